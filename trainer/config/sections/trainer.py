"""The `trainer` section: keys that DeepSpeed does not have, and never sees."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from trainer.config.keys.key import Excludes, Key
from trainer.config.sections.adapter import AdapterSection
from trainer.config.sections.distillation import DistillationSection
from trainer.config.sections.embeddings import EmbeddingsSection
from trainer.config.sections.images import ImagesSection
from trainer.config.sections.labels import LabelsSection
from trainer.config.sections.masked import MaskedSection
from trainer.config.sections.model_and_data import (
    DataSection,
    ModelSection,
    ParameterGroup,
)
from trainer.config.sections.pair_losses import PairsSection
from trainer.config.sections.section import (
    CAUSAL,
    DISTILLATION,
    EMBEDDINGS,
    HELD_OUT,
    IMAGES,
    LABELS,
    MASKED,
    PAIRS,
    TEXT,
    TOKENS,
    Count,
    FileName,
    Number,
    Section,
    Whole,
)
from trainer.plugins import TaskName, TrackerName, load


def _recompute(value: str) -> str:
    if not re.fullmatch(r"auto|none|full|selective(:2)?|offload|every:[1-9]\d{0,5}", value):
        modes = '"auto", "none", "full", "selective", "selective:2", "offload"'
        raise ValueError(f'{modes} or "every:N" with N of at least 1')
    return value


def _axis(value: int) -> int:
    if not (1 <= value <= 1_000_000 or value == -1):
        raise ValueError("a whole number of at least 1, or -1 for what is left")
    return value


def _interval(value: Any) -> int | float:
    if type(value) in (int, float) and (
        0 < value < 1 or (1 <= value <= 1e9 and value == int(value))
    ):
        return value if value < 1 else int(value)
    raise ValueError("a whole number of at least 1, a share of all steps below 1, or null: the end")


_STEPS = {"type": "number", "exclusiveMinimum": 0, "maximum": 1_000_000_000}
Every = Annotated[Any, AfterValidator(_interval), WithJsonSchema(_STEPS)]
"""A number of steps; or a share of all steps, which `resolve` turns into a number of steps."""
Axis = Annotated[Whole, AfterValidator(_axis)]
PipelineSchedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


class RunSection(Section):
    name: FileName | None = None
    """The run's name; None: the config's file name."""
    folder: str = "runs"
    """The folder in which the run gets a folder of its name."""
    node_local: bool = False
    """True if `folder` is each machine's own, and each keeps everything needed to resume."""


class CheckpointSection(Section):
    every: Annotated[Every | None, Key(unit="steps")] = None
    """Steps between checkpoints, or the share of all steps; None: only at the end."""
    keep_last: Annotated[Count, Key(unit="checkpoints")] = 2
    keep_best: Annotated[bool, Key(needs=HELD_OUT)] = False
    """True to keep the checkpoint with the lowest held-out loss, too."""
    asynchronous: bool = False
    """True to write in the background, from a copy of the state in the hosts' memory."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype of the model's files; None: that of the weights."""
    hash: Literal["sha256", "blake3"] = "sha256"
    """The hash of the tensors' files; blake3 needs meshloom[blake3], to save and to resume."""
    upload: str | None = None
    """An address of fsspec, such as s3://bucket/runs, to which checkpoints and model are copied."""


class EvaluationSection(Section):
    every: Annotated[Every | None, Key(unit="steps", needs=HELD_OUT)] = None
    """Steps between evaluations, or the share of all steps; None: only at the end."""
    samples: Annotated[Count, Key(unit="samples", needs=HELD_OUT)] = 64
    """The number of samples of each source."""
    patience: Annotated[Count | None, Key(unit="evaluations", needs=HELD_OUT)] = None
    """Evaluations in a row without a lower loss after which a run ends; None: it does not."""
    tasks: Annotated[list[str], Key(needs=HELD_OUT, recipes=TEXT), Field(max_length=100)] = []
    """Tasks of lm-eval, or their YAML files, on whose first `samples` questions it is scored."""


class LogSection(Section):
    every: Annotated[Count, Key(unit="steps")] = 10
    """Steps between log lines."""
    trackers: Annotated[list[TrackerName], Field(max_length=10)] = []
    """Trackers beside the terminal and `metrics.jsonl`."""
    sample_ids: bool = False
    """True to write the numbers of each step's samples to `logs/`."""
    by_source: bool = False
    """True to log the training loss of each of several sources, too."""


class ProfileSection(Section):
    """The steps that PyTorch's profiler records on the first rank, into the run's folder."""

    start: Annotated[Count, Key(unit="steps")] = 5
    """The first step, from 1; the first few are slower than the others."""
    steps: Annotated[Whole, Field(ge=1, le=100), Key(unit="steps")] = 3


class GenerateSection(Section):
    prompt: Annotated[str | None, Key(recipes=TEXT)] = None
    """The beginning of the sample at the end; None: no sample.

    "auto": the beginning of a document, or a chat up to the first answer.
    """
    tokens: Annotated[Count, Key(unit="tokens", needs="a prompt")] = 48


class HubSection(Section):
    """The repository on the Hugging Face Hub that gets `final/` at the end, with a model card."""

    repository: str
    """Its name, "owner/name"; without an owner, it is yours."""
    private: bool = True
    """False to make a new repository public; a repository that is public is refused otherwise."""
    checkpoints: bool = False
    """True to push the checkpoints that the run keeps, too."""
    certificate: str | None = None
    """The file of `meshloom verify` for the card; None: certificate.json of the run, or here."""


class MeshSection(Section):
    """Sizes of the data-parallel axes; -1: the rest; None: by the ZeRO stage; "node": a node's."""

    replicate: Annotated[Axis | None, Key(unit="ranks")] = None
    shard: Annotated[Axis | Literal["node"] | None, Key(unit="ranks")] = None


class _Subject(Section):
    """Keys of what is trained."""

    plugins: list[Annotated[str, AfterValidator(load)]] = []
    """Modules, or entry points of `meshloom.plugins`, which are imported first of all."""
    task: TaskName = "causal_lm"
    """The recipe by which a model is trained, with its samples and its loss."""
    recipe: dict[str, Any] = {}
    """The keys of a plug-in's recipe, which says what they are."""
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    images: Annotated[ImagesSection, Key(recipes=IMAGES)] = ImagesSection()
    embeddings: Annotated[EmbeddingsSection, Key(recipes=EMBEDDINGS)] = EmbeddingsSection()
    labels: Annotated[LabelsSection, Key(recipes=LABELS)] = LabelsSection()
    masked: Annotated[MaskedSection, Key(recipes=MASKED)] = MaskedSection()
    pairs: Annotated[PairsSection, Key(recipes=PAIRS)] = PairsSection()
    distillation: Annotated[DistillationSection, Key(recipes=DISTILLATION)] = DistillationSection()
    adapter: Annotated[AdapterSection | None, Key(recipes=TOKENS)] = None


class _Training(Section):
    """Keys of the steps, and of the numbers that they compute."""

    steps: Annotated[Count | None, Key(unit="steps", excludes=Excludes("trainer.epochs"))] = None
    """The number of optimizer updates."""
    epochs: Annotated[Annotated[Number, Field(gt=0, le=1e6)] | None, Key(unit="epochs")] = None
    """The number of passes over the data; with neither steps nor epochs: one."""
    warmup_ratio: Annotated[
        Annotated[Number, Field(ge=0, lt=1)] | None,
        Key(
            unit="share",
            excludes=Excludes("scheduler.params.warmup_num_steps", 'Set that key to "auto".'),
        ),
    ] = None
    """The share of all steps for `scheduler.params.warmup_num_steps` "auto"; None: no warm-up."""
    freeze: Annotated[list[str], Field(max_length=10_000)] = []
    """Patterns of names of parameters that are not trained: "model.embed_tokens.*"."""
    parameter_groups: Annotated[list[ParameterGroup], Field(max_length=1000)] = []
    """The parameter groups; the first that matches a parameter counts."""
    seed: Annotated[Whole, Field(ge=0, lt=2**63), Key(unit="number")] = 0
    """The seed of the order of the data, of dropout and of initial values."""
    label_smoothing: Annotated[Number, Field(ge=0, lt=1), Key(unit="share")] = 0.0
    """The share of each target that is spread evenly over all classes or tokens, in training."""
    neftune_alpha: Annotated[Number, Field(ge=0, le=1e6), Key(unit="factor")] = 0.0
    """The alpha of noise on input embeddings, in training.

    The noise is at most alpha / sqrt(tokens x width) (arXiv 2310.05914).
    """
    router_bias_update_rate: Annotated[Number, Field(ge=0, le=1), Key(unit="number")] = 0.0
    """How far a step moves the bias by which a router chooses an expert, as 0.001; 0: not at all.

    Up if fewer tokens than the mean chose the expert, down if more (arXiv 2412.19437).
    """
    sync_batch_norm: bool = False
    """True to normalise by the statistics of all data ranks' micro-batches together."""
    weight_decay_excludes: Annotated[
        Literal["norms_and_biases", "nothing"], Key(needs="weight decay")
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
    """The engine; "auto": the first that runs the layout, on GPUs `mesh` if it alone compiles."""
    mesh: MeshSection = MeshSection()
    pipeline_schedule: Annotated[PipelineSchedule, Key(needs="a pipeline")] = "1F1B"
    """The order in which pipeline stages run their micro-batches, by PyTorch's names."""
    activation_checkpointing: Annotated[str, AfterValidator(_recompute)] = "none"
    """Blocks recomputed in the backward pass: "none", "full" or "every:N".

    "selective" keeps matrix products and attention, "selective:2" half of the products;
    "offload" is "full" with the inputs of blocks on the host; "auto": the cheapest that fits.
    """
    tiled_mlp: Annotated[Count | None, Key(unit="tokens")] = None
    """The most tokens that a block's MLP computes at a time, and again in the backward
    pass; None: all, once. For long sequences.
    """
    compile: Literal["auto", "none", "blocks"] = "auto"
    """The parts that `torch.compile` compiles; auto: blocks, on GPUs where the engine can."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Large linear layers of blocks multiply in float8 by torchao, with a scale a matrix or a row.

    On GPUs that have it; a CPU emulates it."""
    float8_head: Annotated[bool, Key(recipes=CAUSAL)] = False
    """True if the head multiplies in float8, too: its logits, and the gradient of its input.

    With a scale a row; the gradient of its matrix stays in the run's precision."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    plan: Literal["refuse", "warn", "off"] = "refuse"
    """The reaction to a predicted lack of device memory; "off" predicts nothing.

    On GPUs; on a CPU if the key is given.
    """
    patience: Annotated[Annotated[Number, Field(gt=0, le=86_400)] | None, Key(unit="seconds")] = (
        None
    )
    """Seconds without progress that end a run; None: ten median steps, at least two minutes."""


class TrainerSection(_Execution, _Records, _Training, _Subject):
    """The whole `trainer` section."""
