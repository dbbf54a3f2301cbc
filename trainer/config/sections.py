"""The `trainer` section: keys that DeepSpeed does not have, and never sees."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from trainer.plugins import SourceName, TaskName, TrackerName, load


@dataclass(frozen=True)
class Only:
    """Marks a key as one of some tasks; the others refuse it."""

    tasks: tuple[str, ...]
    accepts: Callable[[Any], bool] = lambda value: False
    """Returns True for a value that every task takes."""
    accepted: str = ""
    """Those values, in words."""


@dataclass(frozen=True)
class Needs:
    """Marks a key that has no effect without a condition, which `rules.unmet` names."""

    condition: str


@dataclass(frozen=True)
class Excludes:
    """Marks a key that can't be given together with another, but for some tasks."""

    other: str
    hint: str = ""
    but_for: tuple[str, ...] = ()


TEXT, IMAGES = Only(("causal_lm",)), Only(("image_classification",))
ROWS, HELD_OUT = Needs("rows"), Needs("data to evaluate on")


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):  # pydantic reads true as 1
        raise ValueError("a number")
    return value


def _file_name(value: str) -> str:
    if "/" in value or value in ("", ".", "..") or not value.isprintable() or len(value) > 100:
        raise ValueError("a name of at most 100 letters, without a slash")
    return value


def _recompute(value: str) -> str:
    if not re.fullmatch(r"none|full|selective|every:[1-9]\d{0,5}", value):
        raise ValueError('"none", "full", "selective" or "every:N" with N of at least 1')
    return value


def _axis(value: int) -> int:
    if not (1 <= value <= 1_000_000 or value == -1):
        raise ValueError("a whole number of at least 1, or -1 for what is left")
    return value


def _interval(value: Any) -> Any:
    if type(value) in (int, float) and (
        0 < value < 1 or (1 <= value <= 1e9 and value == int(value))
    ):
        return value if value < 1 else int(value)
    raise ValueError("a whole number of at least 1, or a share of all steps below 1")


def _range(value: list[float]) -> list[float]:
    if len(value) != 2 or not 0 < value[0] <= value[1] <= 1:
        raise ValueError("two numbers above 0 and at most 1, the lower one first")
    return value


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f'"all-linear", names in a list, or a regular expression ({error})'
        ) from None
    return value


def _pair(value: list[int]) -> list[int]:
    if len(value) != 2:
        raise ValueError("a height and a width")
    return value


Whole = Annotated[int, BeforeValidator(_no_flag)]
Count = Annotated[Whole, Field(ge=1, le=1_000_000_000)]
Number = Annotated[float, BeforeValidator(_no_flag)]
Share = Annotated[Number, Field(ge=0, le=1)]
_STEPS = {"type": "number", "exclusiveMinimum": 0, "maximum": 1_000_000_000}
Every = Annotated[Any, AfterValidator(_interval), WithJsonSchema(_STEPS)]
"""A number of steps; or a share of all of them, which is a number in a resolved config."""
Axis = Annotated[Whole, AfterValidator(_axis)]
PipelineSchedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
Paths = str | Annotated[list[str], Field(min_length=1, max_length=100_000)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class ModelSection(Section):
    """The model. With neither a name nor a config: the embedded default.

    For images: a name of torchvision.models, "package.module:callable", or a folder that a run
    left.
    """

    name_or_path: Annotated[
        str | None,
        Excludes(
            "trainer.model.config",
            "name_or_path loads weights, config starts from scratch.",
            but_for=IMAGES.tasks,
        ),
    ] = None
    """The folder or hub id of a model, whose weights training starts from."""
    config: Annotated[
        dict[str, Any] | str | None,
        Only(
            TEXT.tasks,
            lambda config: not isinstance(config, str),
            "a section {...} of keyword arguments of the model",
        ),
    ] = None
    """A transformers config, or the path of its JSON: train from scratch.

    For images: keyword arguments of the callable that builds the model.
    """
    blocks: Annotated[str | None, IMAGES] = None
    """The pattern of an own classifier's modules that run once each, in order: "layers.*"."""
    weights: Annotated[str | None, IMAGES] = None
    """The pretrained weights of a torchvision model: "DEFAULT", or a name: "IMAGENET1K_V2"."""
    revision: Annotated[str | None, TEXT, Needs("a model's name")] = None
    """The branch, tag or commit of a model on the hub."""
    trust_remote_code: Annotated[bool, TEXT] = False
    """True to run the code that a model brings along."""
    attention: Annotated[Literal["sdpa", "eager", "flash_attention_2"] | None, TEXT] = None
    """The implementation of attention; None: transformers' choice."""


class Rows(Section):
    """The place of rows, and the columns that are read."""

    path: Annotated[
        Paths | None, Excludes("trainer.data.sources", "Each of the sources has its own path.")
    ] = None
    """Files, globs, folders or a hub id."""
    format: Annotated[
        SourceName,
        ROWS,
        Only(
            TEXT.tasks,
            lambda form: form in ("auto", "parquet", "hub"),
            '"auto", "parquet" or "hub" of images',
        ),
    ] = "auto"
    split: Annotated[str, ROWS] = "train"
    name: Annotated[str | None, ROWS] = None
    """The subset of a hub data set."""
    records: Annotated[
        Literal["auto", "text", "prompt_completion", "instruction", "alpaca", "chat"], ROWS, TEXT
    ] = "auto"
    """The kind of a row; auto: by its columns; alpaca: an instruction in Alpaca's own prompt."""
    text_column: Annotated[str, ROWS, TEXT] = "text"
    prompt_column: Annotated[str | None, TEXT] = None
    completion_column: Annotated[str | None, TEXT] = None
    chat_column: Annotated[str, ROWS, TEXT] = "messages"
    """The column of chats; also "conversations", if it is left at the default."""
    max_rows: Annotated[Count | None, ROWS] = None
    """The number of rows to read, from the first; None: all."""


class SourceSection(Rows):
    """One of several sources, with a weight or a number of passes over it, by default one pass."""

    path: Paths
    """Files, globs, folders or a hub id."""
    label: Annotated[str, AfterValidator(_file_name)] | None = None
    """Its name in the log; None: its path."""
    weight: Annotated[Number, Field(gt=0, le=1e9)] | None = None
    """Its share of the samples, relative to the other sources' weights."""
    epochs: Annotated[Number, Field(gt=0, le=1e4)] | None = None


class DataSection(Rows):
    """The text data. With no path and no sources: the embedded corpus.

    For images: digits, mnist, fashion_mnist, cifar10 or cifar100; a folder with a folder for each
    class; parquet files or a hub id with an image column.
    """

    sources: Annotated[list[SourceSection], Field(max_length=1000), TEXT] = []
    """Several sources, mixed; in place of `path`."""
    chat_template: Annotated[str | None, ROWS, TEXT] = None
    """A file with a Jinja template; None: the tokenizer's own, or a plain one."""
    loss_on: Annotated[Literal["assistant", "last_assistant", "all"], ROWS, TEXT] = "assistant"
    """The label tokens of a chat: all of the assistant's turns, its last one, or all tokens."""
    too_long: Annotated[Literal["truncate", "drop", "error"], TEXT] = "truncate"
    """The handling of padded or packed documents of more than `sequence_length` tokens."""
    corrupt: Annotated[Literal["error", "skip"], ROWS, TEXT] = "error"
    """The handling of rows that are not JSON, lack a column, or hold neither text nor a chat.

    Skipped ones are counted.
    """
    sequence_length: Annotated[Whole, Field(ge=2, le=2**24), TEXT] = 512
    """Tokens per sample."""
    documents: Annotated[Literal["concatenate", "pad", "pack"], TEXT] = "concatenate"
    """Samples are cut from one stream; one document each; or several isolated whole documents."""
    isolate: Annotated[bool, TEXT, Needs("concatenated documents")] = False
    """True if concatenated documents do not see one another, as padded and packed ones never do."""
    evaluation_path: Annotated[
        Paths | Annotated[dict[str, Paths], Field(min_length=1, max_length=100)] | None,
        Only(TEXT.tasks, lambda paths: not isinstance(paths, dict), "one path of images"),
    ] = None
    """Data for evaluation; several sets by name: {"code": "code.jsonl", "chat": "chat.jsonl"}."""
    evaluation_fraction: Annotated[
        Number, Field(ge=0, le=0.5), Needs("training data to hold out from")
    ] = 0.01
    """The share of the training documents held out if there is no `evaluation_path`."""
    tokenizer: Annotated[str | None, TEXT] = None
    """The folder or hub id of a tokenizer; None: the model's own, or the embedded one."""
    workers: Annotated[Annotated[Whole, Field(ge=1, le=1024)] | None, TEXT] = None
    """Processes that prepare the data, on one rank; None: one a core, or one for little data."""

    @property
    def packs(self) -> bool:
        """True if a sample may be several documents that do not see one another."""
        return self.documents == "pack" or (self.documents == "concatenate" and self.isolate)


class AugmentSection(Section):
    """The augmentation of training images in this order, new in each epoch; by default none."""

    crop_padding: Annotated[Whole, Field(ge=0, le=4096)] = 0
    """Pixels of black border, from which a part of the image's own size is cut out at random."""
    crop_scale: Annotated[list[Number], AfterValidator(_range)] | None = None
    """The smallest and largest share of the image's area that is cut out and scaled to `size`:
    [0.08, 1].
    """
    flip: Share = 0.0
    """The probability of exchanging left and right."""
    rotate: Annotated[Number, Field(ge=0, le=180)] = 0.0
    """The largest rotation in degrees, to either side."""
    trivial: bool = False
    """One random operation of a random strength (TrivialAugment, arXiv 2103.10158)."""
    colour: Share = 0.0
    """The largest relative change of brightness, contrast and saturation."""
    erase: Share = 0.0
    """The probability of blanking a random rectangle."""


class ImagesSection(Section):
    """The reading and preparation of images for the task `image_classification`."""

    root: str | None = None
    """The folder of torchvision's data sets and their downloads; None: in the cache folder."""
    image_column: str = "image"
    label_column: str = "label"
    classes: Count | None = None
    """The number of classes, if the data does not give it, or a plan can't read the images."""
    size: Annotated[list[Count], AfterValidator(_pair)] | Count | None = None
    """The images' size for the model, a number or [height, width]; None: as they are, all alike."""
    mode: Literal["auto", "RGB", "L"] = "auto"
    """Colour or grey; auto: as the images are."""
    normalize: Annotated[Literal["data", "imagenet", "none"], Needs("no mean and std")] = "data"
    """The source of the mean and deviation of each channel: the training images, or ImageNet."""
    mean: list[Number] | None = None
    """The mean of each channel, of values from 0 to 1; with `std`, in place of `normalize`."""
    std: list[Annotated[Number, Field(gt=0)]] | None = None
    augment: AugmentSection = AugmentSection()
    workers: Annotated[Whole, Field(ge=0, le=1024)] | None = None
    """Processes of a rank that load images; 0: a thread; None: by the cores, on a GPU up to 8."""
    corrupt: Literal["error", "skip"] = "error"
    """The handling of an image that can't be read; a skipped one counts for nothing."""


class RunSection(Section):
    name: Annotated[str, AfterValidator(_file_name)] | None = None
    """The run's name; None: the config's file name."""
    folder: str = "runs"
    """The folder in which the run gets a folder of its name."""
    node_local: bool = False
    """True if `folder` is each machine's own, and each keeps everything needed to resume."""


class CheckpointSection(Section):
    every: Every | None = None
    """Steps between checkpoints, or the share of all steps; None: only at the end."""
    keep_last: Count = 2
    keep_best: Annotated[bool, HELD_OUT] = False
    """True to keep the checkpoint with the lowest held-out loss, too."""
    asynchronous: bool = False
    """True to write in the background, from a copy of the state in the hosts' memory."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype of the model's files; None: that of the weights."""


class EvaluationSection(Section):
    every: Annotated[Every | None, HELD_OUT] = None
    """Steps between evaluations, or the share of all steps; None: only at the end."""
    samples: Annotated[Count, HELD_OUT] = 64
    """The number of samples of each source."""
    patience: Annotated[Count | None, HELD_OUT] = None
    """Evaluations in a row without a lower loss after which a run ends; None: it does not."""
    tasks: Annotated[list[str], TEXT, HELD_OUT, Field(max_length=100)] = []
    """Tasks of lm-eval, or their YAML files, on whose first `samples` questions it is scored."""


class LogSection(Section):
    every: Count = 10
    """Steps between log lines."""
    trackers: Annotated[list[TrackerName], Field(max_length=10)] = []
    """Trackers beside the terminal and `metrics.jsonl`."""
    sample_ids: bool = False
    """True to write the numbers of each step's samples to `logs/`."""
    by_source: bool = False
    """True to log the training loss of each of several sources, too."""


class ProfileSection(Section):
    """The steps that PyTorch's profiler records on the first rank, into the run's folder."""

    start: Count = 5
    """The first step, from 1; the first few are slower than the others."""
    steps: Annotated[Whole, Field(ge=1, le=100)] = 3


class GenerateSection(Section):
    prompt: Annotated[str | None, TEXT] = None
    """The beginning of the sample at the end; None: no sample.

    "auto": the beginning of a document, or a chat up to the first answer.
    """
    tokens: Annotated[Count, Needs("a prompt")] = 48


class HubSection(Section):
    """The repository on the Hugging Face Hub that gets `final/` at the end, with a model card."""

    repository: str
    """Its name, "owner/name"; without an owner, it is yours."""
    private: bool = True
    """False to make a new repository public; a repository that is public is refused otherwise."""
    checkpoints: bool = False
    """True to push the checkpoints that the run keeps, too."""
    certificate: str | None = None
    """The file that `meshloom verify` wrote, for the card; None: certificate.json of the run."""


class AdapterSection(Section):
    """A PEFT adapter on a frozen model; the keys are those of its `LoraConfig`."""

    type: Literal["lora"] = "lora"
    path: str | None = None
    """The folder of an adapter to start from: it decides the keys here except dropout and merge."""
    r: Annotated[Whole, Field(ge=1, le=65_536)] = 8
    """The rank of the adapter."""
    alpha: Annotated[Number, Field(gt=0)] = 8.0
    """The numerator of the adapter's scale, alpha / r, or with `rslora` alpha / sqrt(r)."""
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    targets: (
        Annotated[str, Field(min_length=1, max_length=10_000), AfterValidator(_pattern)]
        | Annotated[list[str], Field(min_length=1, max_length=10_000)]
    ) = "all-linear"
    """Linear layers of the blocks by the ends of their names, or by a regular expression."""
    bias: Literal["none", "all", "lora_only"] = "none"
    modules_to_save: Annotated[list[str], Field(max_length=1000)] = []
    """Modules that are trained whole, and saved with the adapter."""
    rslora: bool = False
    dora: bool = False
    merge: bool = False
    """True to write `final-merged/`, too: the base with the adapter merged into it."""


class ParameterGroup(Section):
    """Parameters with a learning rate or a weight decay of their own."""

    names: str | Annotated[list[str], Field(min_length=1, max_length=10_000)]
    """Patterns of their names, * for any letters: "model.embed_tokens.*"."""
    lr_multiplier: Annotated[Number, Field(gt=0, le=1e6)] = 1.0
    """The factor of the optimizer's or scheduler's learning rate at each step."""
    weight_decay: Annotated[Number, Field(ge=0, le=1e6)] | None = None
    """The weight decay; None: as without a group."""

    @property
    def patterns(self) -> list[str]:
        return [self.names] if isinstance(self.names, str) else self.names


class MeshSection(Section):
    """Sizes of the data-parallel axes; -1: the rest; None: by the ZeRO stage; "node": a node's."""

    replicate: Axis | None = None
    shard: Axis | Literal["node"] | None = None


class _Subject(Section):
    """Keys of what is trained."""

    plugins: list[Annotated[str, AfterValidator(load)]] = []
    """Modules, or entry points of `meshloom.plugins`, which are imported first of all."""
    task: TaskName = "causal_lm"
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    images: Annotated[ImagesSection, IMAGES] = ImagesSection()
    adapter: Annotated[AdapterSection | None, TEXT] = None
    freeze: Annotated[list[str], Field(max_length=10_000)] = []
    """Patterns of names of parameters that are not trained: "model.embed_tokens.*"."""


class _Training(Section):
    """Keys of the steps, and of the numbers that they compute."""

    steps: Annotated[Count | None, Excludes("trainer.epochs")] = None
    """The number of optimizer updates."""
    epochs: Annotated[Number, Field(gt=0, le=1e6)] | None = None
    """The number of passes over the data; with neither steps nor epochs: one."""
    warmup_ratio: Annotated[
        Annotated[Number, Field(ge=0, lt=1)] | None,
        Excludes("scheduler.params.warmup_num_steps", 'Set that key to "auto".'),
    ] = None
    """The share of all steps for `scheduler.params.warmup_num_steps` "auto"; None: no warm-up."""
    parameter_groups: Annotated[list[ParameterGroup], Field(max_length=1000)] = []
    """The parameter groups; the first that matches a parameter counts."""
    seed: Annotated[Whole, Field(ge=0, lt=2**63)] = 0
    """The seed of the order of the data, of dropout and of initial values."""
    label_smoothing: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """The share of each target that is spread evenly over all classes or tokens, in training."""
    neftune_alpha: Annotated[Number, Field(ge=0, le=1e6)] = 0.0
    """The alpha of noise on input embeddings, in training.

    The noise is at most alpha / sqrt(tokens x width) (arXiv 2310.05914).
    """
    sync_batch_norm: bool = False
    """True to normalise by the statistics of all data ranks' micro-batches together."""
    weight_decay_excludes: Annotated[
        Literal["norms_and_biases", "nothing"], Needs("weight decay")
    ] = "norms_and_biases"
    """The parameters without weight decay; by default as in Hugging Face's Trainer."""


class _Records(Section):
    """Keys of what a run leaves."""

    run: RunSection = RunSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    log: LogSection = LogSection()
    profile: ProfileSection | None = None
    generate: GenerateSection = GenerateSection()
    hub: HubSection | None = None


class _Execution(Section):
    """Keys of how the devices are used."""

    engine: Literal["auto", "deepspeed", "accelerate", "mesh"] = "auto"
    """The engine; "auto": the first that runs the layout."""
    mesh: MeshSection = MeshSection()
    pipeline_schedule: Annotated[PipelineSchedule, Needs("a pipeline")] = "1F1B"
    """The order in which pipeline stages run their micro-batches, by PyTorch's names."""
    activation_checkpointing: Annotated[str, AfterValidator(_recompute)] = "none"
    """Blocks recomputed in the backward pass: "none", "full", "selective" or "every:N"."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    plan: Literal["refuse", "warn", "off"] = "refuse"
    """The reaction to a predicted lack of device memory; "off" predicts nothing.

    On GPUs; on a CPU if the key is given.
    """
    patience: Annotated[Number, Field(gt=0, le=86_400)] | None = None
    """Seconds without progress that end a run; None: ten median steps, at least two minutes."""


class TrainerSection(_Execution, _Records, _Training, _Subject):
    """The whole `trainer` section."""
