"""The `trainer` section: what DeepSpeed has no key for. It is taken off before DeepSpeed sees the config."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from trainer.config.grammar import show, unknown
from trainer.errors import Problem


def _no_flag(value: Any) -> Any:
    # pydantic reads true as 1
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


def _file_name(value: str) -> str:
    if "/" in value or value in ("", ".", ".."):
        raise ValueError("a name without a slash")
    return value


def _recompute(value: str) -> str:
    if not re.fullmatch(r"none|full|selective|every:[1-9]\d*", value):
        raise ValueError('"none", "full", "selective" or "every:N" with N of at least 1')
    return value


def _axis(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError("a whole number of at least 1, or -1 for what is left")
    return value


Whole = Annotated[int, BeforeValidator(_no_flag)]
Count = Annotated[Whole, Field(ge=1)]
Number = Annotated[float, BeforeValidator(_no_flag)]
Axis = Annotated[Whole, AfterValidator(_axis)]
Paths = str | Annotated[list[str], Field(min_length=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class ModelSection(Section):
    """Which model. Neither a name nor a config: the embedded default."""

    name_or_path: str | None = None
    config: dict[str, Any] | str | None = None
    """A transformers config, or the path of its JSON: train from scratch."""
    revision: str | None = None
    trust_remote_code: bool = False
    attention: Literal["sdpa", "eager", "flash_attention_2"] | None = None


class DataSection(Section):
    """Which text. No path: the embedded corpus."""

    path: Paths | None = None
    format: Literal["auto", "jsonl", "parquet", "text", "csv", "hub"] = "auto"
    split: str = "train"
    name: str | None = None
    """The subset of a hub data set."""
    text_column: str = "text"
    prompt_column: str | None = None
    completion_column: str | None = None
    sequence_length: Annotated[Whole, Field(ge=2)] = 512
    """Tokens per sample."""
    documents: Literal["concatenate", "pad"] = "concatenate"
    evaluation_path: Paths | None = None
    evaluation_fraction: Annotated[Number, Field(ge=0, le=0.5)] = 0.01
    """Share of the training documents held out where there is no `evaluation_path`."""
    tokenizer: str | None = None


class RunSection(Section):
    name: Annotated[str, AfterValidator(_file_name)] | None = None
    folder: str = "runs"


class CheckpointSection(Section):
    every: Count | None = None
    """Steps between checkpoints; None: only at the end."""
    keep_last: Count = 2
    keep_best: bool = False
    """Keep the one of the lowest held-out loss too."""
    asynchronous: bool = False
    """Train on while a checkpoint is written; takes host memory for a copy of the state, shared among the ranks."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the model's files; None: as the weights are kept."""


class EvaluationSection(Section):
    every: Count | None = None
    """Steps between evaluations; None: only at the end."""
    samples: Count = 64


class LogSection(Section):
    every: Count = 10
    """Steps between log lines."""
    trackers: list[Literal["tensorboard", "mlflow"]] = []
    sample_ids: bool = False


class GenerateSection(Section):
    prompt: str | None = None
    tokens: Count = 48


class MeshSection(Section):
    """Sizes of the data-parallel mesh axes; -1: what is left; None: by the ZeRO stage."""

    replicate: Axis | None = None
    shard: Axis | None = None


class TrainerSection(Section):
    """The whole `trainer` section."""

    task: Literal["causal_lm"] = "causal_lm"
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    steps: Count | None = None
    epochs: Annotated[Number, Field(gt=0)] | None = None
    """Neither steps nor epochs: one epoch."""
    seed: Annotated[Whole, Field(ge=0)] = 0
    run: RunSection = RunSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    log: LogSection = LogSection()
    generate: GenerateSection = GenerateSection()
    engine: Literal["auto", "deepspeed", "accelerate", "mesh"] = "auto"
    mesh: MeshSection = MeshSection()
    pipeline_schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """In which order pipeline stages run their micro-batches, by PyTorch's names."""
    activation_checkpointing: Annotated[str, AfterValidator(_recompute)] = "none"
    device: Literal["auto", "cpu", "cuda"] = "auto"


def known_keys(model: type[BaseModel] = TrainerSection, prefix: str = "trainer") -> list[str]:
    """The dotted path of every key of the section."""
    paths = []
    for name, field in model.model_fields.items():
        paths.append(f"{prefix}.{name}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            paths += known_keys(field.annotation, paths[-1])
    return paths


def validate(raw: Any) -> tuple[TrainerSection, list[Problem]]:
    """The section and its problems; with problems, the section is the default one."""
    try:
        section = TrainerSection.model_validate(raw)
    except ValidationError as error:
        return TrainerSection(), _problems(error)
    return section, _conflicts(section)


def _conflicts(section: TrainerSection) -> list[Problem]:
    model, data = section.model, section.data
    found = []
    if model.name_or_path is not None and model.config is not None:
        seen = f"saw name_or_path {show(model.name_or_path)} and a config"
        mend = "name_or_path loads weights, config starts from scratch."
        found.append(Problem("trainer.model", seen, "one of the two", mend))
    if section.steps is not None and section.epochs is not None:
        found.append(Problem("trainer", f"saw steps {section.steps} and epochs {section.epochs:g}", "one of the two"))
    if (data.prompt_column is None) != (data.completion_column is None):
        seen = f"saw prompt_column {show(data.prompt_column)} and completion_column {show(data.completion_column)}"
        found.append(Problem("trainer.data", seen, "both or neither"))
    if section.mesh.replicate == -1 and section.mesh.shard == -1:
        found.append(Problem("trainer.mesh", "saw -1 for both axes", "-1 for at most one of them"))
    saves, evaluates = section.checkpoint.every, section.evaluation.every
    if section.checkpoint.keep_best and saves and (evaluates is None or saves % evaluates):
        seen = f"saw true, with trainer.checkpoint.every {saves} and trainer.evaluation.every {show(evaluates)}"
        found.append(Problem("trainer.checkpoint.keep_best", seen, "an evaluation at each checkpoint"))
    if data.path is None and data.prompt_column is not None and data.completion_column is not None:
        seen = f"saw {show(data.prompt_column)} without trainer.data.path"
        found.append(Problem("trainer.data.prompt_column", seen, "data of yours that has such a column"))
    return found


def _problems(error: ValidationError) -> list[Problem]:
    """One problem for each place; the branches of a union are joined by "or"."""
    known = known_keys()
    expected: dict[str, list[str]] = {}
    seen: dict[str, Any] = {}
    strange: list[Problem] = []
    for item in error.errors(include_url=False):
        place = "trainer"
        for name in item["loc"]:
            if item["type"] != "extra_forbidden" and isinstance(name, str) and f"{place}.{name}" not in known:
                break  # the rest names the branch of a union
            place += f"[{name}]" if isinstance(name, int) else f".{name}"
        if item["type"] == "extra_forbidden":
            strange.append(unknown(place, item["input"], known))
        else:
            expected.setdefault(place, []).append(_expectation(dict(item)))
            seen[place] = item["input"]
    texts = {place: " or ".join(dict.fromkeys(branches)) for place, branches in expected.items()}
    return strange + [Problem(place, f"saw {show(seen[place])}", text) for place, text in texts.items()]


def _expectation(item: dict[str, Any]) -> str:
    """What pydantic wanted, in the words of a key table."""
    kind, context = item["type"], item.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return str(context["expected"]).replace("'", '"')
    return next(text for prefix, text in _EXPECTATIONS.items() if kind.startswith(prefix)).format(**context)


_EXPECTATIONS = {
    "greater_than_equal": "a number of at least {ge:g}",
    "greater_than": "a number above {gt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "finite_number": "a finite number",
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "list": "a list",
    "too_short": "a list that is not empty",
    "dict": "a section {{...}}",
    "model": "a section {{...}}",
}
