"""The validation of a `trainer` section: each key by itself, then contradictions; problems in
words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from trainer.config.grammar import show, unknown
from trainer.config.sections import DataSection, ImagesSection, Rows, TrainerSection, known_keys
from trainer.errors import MOST_SHOWN, Problem


def validate(raw: Any) -> tuple[TrainerSection, list[Problem]]:
    """Return the section and its problems; if there are any, the section is the default one."""
    try:
        section = TrainerSection.model_validate(raw)
    except ValidationError as error:
        return TrainerSection(), _problems(error)
    return section, _conflicts(section)


def _conflicts(section: TrainerSection) -> list[Problem]:
    model, data = section.model, section.data
    found = [*_strange(section), *_image_conflicts(section.images)]
    if model.name_or_path is not None and model.config is not None and section.task == "causal_lm":
        seen = f"saw name_or_path {show(model.name_or_path)} and a config"
        mend = "name_or_path loads weights, config starts from scratch."
        found.append(Problem("trainer.model", seen, "one of the two", mend))
    if section.steps is not None and section.epochs is not None:
        found.append(
            Problem(
                "trainer",
                f"saw steps {section.steps} and epochs {section.epochs:g}",
                "one of the two",
            )
        )
    if (data.prompt_column is None) != (data.completion_column is None):
        seen = (
            f"saw prompt_column {show(data.prompt_column)} and completion_column "
            f"{show(data.completion_column)}"
        )
        found.append(Problem("trainer.data", seen, "both or neither"))
    if section.adapter is not None and (section.task != "causal_lm" or model.name_or_path is None):
        seen, expected = (
            f'saw one, with the task "{section.task}"',
            'the task "causal_lm", and its base',
        )
        found.append(
            Problem(
                "trainer.adapter", seen, expected, "Name the base as trainer.model.name_or_path."
            )
        )
    if section.mesh.replicate == -1 and section.mesh.shard == -1:
        found.append(Problem("trainer.mesh", "saw -1 for both axes", "-1 for at most one of them"))
    saves, evaluates = section.checkpoint.every, section.evaluation.every
    if section.checkpoint.keep_best and saves and not evaluated_at(saves, evaluates):
        seen = (
            f"saw true, with trainer.checkpoint.every {saves} and trainer.evaluation.every "
            f"{show(evaluates)}"
        )
        found.append(
            Problem("trainer.checkpoint.keep_best", seen, "an evaluation at each checkpoint")
        )
    for index, group in enumerate(section.parameter_groups):
        if group.lr_multiplier == 1 and group.weight_decay is None:
            place = f"trainer.parameter_groups[{index}]"
            found.append(
                Problem(
                    place, f"saw {show(group.names)} alone", "an lr_multiplier or a weight_decay"
                )
            )
    if section.log.by_source and len(data.sources) < 2:
        found.append(Problem("trainer.log.by_source", "saw true", "several trainer.data.sources"))
    found += _mixing(data)
    if data.too_long != "truncate" and data.documents == "concatenate":
        seen = f'saw {show(data.too_long)}, with trainer.data.documents "concatenate"'
        found.append(
            Problem(
                "trainer.data.too_long", seen, "documents that are not cut wherever a window ends"
            )
        )
    if section.evaluation.patience is not None and evaluates is None:
        seen = f"saw {section.evaluation.patience}, with one evaluation at the end"
        found.append(Problem("trainer.evaluation.patience", seen, "trainer.evaluation.every"))
    found += profile_problems(section, section.steps)
    if data.path is None and data.prompt_column is not None and data.completion_column is not None:
        seen = f"saw {show(data.prompt_column)} without trainer.data.path"
        found.append(
            Problem("trainer.data.prompt_column", seen, "data of yours that has such a column")
        )
    return found


def profile_problems(section: TrainerSection, steps: int | None) -> list[Problem]:
    """List the problems of the steps to profile, once the number of steps is known."""
    if section.profile is None or steps is None or section.profile.start <= steps:
        return []
    seen = f"saw {section.profile.start}, in a run of {steps} steps"
    return [Problem("trainer.profile.start", seen, f"a step of the run, at most {steps}")]


def evaluated_at(saves: float, evaluates: float | None) -> bool:
    """Return True if each checkpoint has an evaluation: shares of all steps are rounded, so they
    must be equal.
    """
    if evaluates is None or min(saves, evaluates) < 1:
        return saves == evaluates
    return saves % evaluates == 0


def _mixing(data: DataSection) -> Iterator[Problem]:
    """Yield the contradictions in a mixture of sources."""
    place = "trainer.data.sources"
    if not data.sources:
        return
    for name in Rows.model_fields:
        if (value := getattr(data, name)) != getattr(DataSection(), name):
            yield Problem(
                f"trainer.data.{name}",
                f"saw {show(value)}, and sources",
                "it in each of the sources",
            )
    weighted = [source.weight is not None for source in data.sources]
    if any(weighted) and (
        not all(weighted) or any(source.epochs is not None for source in data.sources)
    ):
        seen = (
            f"saw {sum(weighted)} with a weight, "
            f"{sum(s.epochs is not None for s in data.sources)} with epochs"
        )
        yield Problem(place, seen, "a weight for each of them, or epochs")
    labels = [source.label or str(source.path) for source in data.sources]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        yield Problem(place, f"saw {show(twice[0])} twice", "another label for each")


OF_TEXT: dict[str, tuple[str, ...]] = {
    "data": (
        *(
            "sources",
            "records",
            "text_column",
            "prompt_column",
            "completion_column",
            "chat_column",
            "chat_template",
            "loss_on",
        ),
        *("sequence_length", "documents", "isolate", "too_long", "corrupt", "tokenizer", "workers"),
    ),
    "generate": ("prompt",),
    "model": ("revision", "trust_remote_code", "attention"),
}
"""Keys that only the task causal_lm has."""
OF_IMAGES = {"model": ("blocks", "weights")}


def _strange(section: TrainerSection) -> list[Problem]:
    """List the problems of keys that belong to another task."""
    task, plain = section.task, TrainerSection()
    wanted, others = (
        ("causal_lm", OF_TEXT) if task != "causal_lm" else ("image_classification", OF_IMAGES)
    )
    found = [
        Problem(
            f"trainer.{name}.{key}",
            f"saw {show(value)}",
            f'the task "{wanted}"; this one is "{task}"',
        )
        for name, keys in others.items()
        for key in keys
        if (value := getattr(getattr(section, name), key)) != getattr(getattr(plain, name), key)
    ]
    if task == "causal_lm" and section.images != plain.images:
        found.append(
            Problem(
                "trainer.images", "saw keys", 'the task "image_classification"', "Set trainer.task."
            )
        )
    if task != "causal_lm" and section.data.format not in ("auto", "parquet", "hub"):
        seen = f"saw {show(section.data.format)}"
        found.append(Problem("trainer.data.format", seen, '"auto", "parquet" or "hub" of images'))
    if task != "causal_lm" and isinstance(section.data.evaluation_path, dict):
        found.append(
            Problem("trainer.data.evaluation_path", "saw several by name", "one of images")
        )
    if task != "causal_lm" and isinstance(section.model.config, str):
        found.append(
            Problem(
                "trainer.model.config",
                "saw text",
                "a section {...} of keyword arguments of the model",
            )
        )
    return found


def _image_conflicts(images: ImagesSection) -> list[Problem]:
    found = []
    if (images.mean is None) != (images.std is None):
        found.append(
            Problem(
                "trainer.images",
                f"saw mean {show(images.mean)}, std {show(images.std)}",
                "both or none",
            )
        )
    if images.augment.crop_padding and images.augment.crop_scale is not None:
        seen = "saw crop_padding and crop_scale"
        found.append(Problem("trainer.images.augment", seen, "at most one of the two"))
    return found


def _problems(error: ValidationError) -> list[Problem]:
    """Return one problem for each place; the branches of a union are joined by "or"."""
    known = known_keys()
    expected: dict[str, list[str]] = {}
    seen: dict[str, Any] = {}
    strange: list[Problem] = []
    for item in error.errors(include_url=False):
        place = "trainer"
        for name in item["loc"]:
            inside = re.sub(r"\[\d+\]", "", f"{place}.{name}")
            if item["type"] != "extra_forbidden" and isinstance(name, str) and inside not in known:
                break  # the rest names the branch of a union
            place += f"[{name}]" if isinstance(name, int) else f".{name}"
        if item["type"] == "extra_forbidden":
            section = place.rpartition(".")[0]
            plain = re.sub(r"\[\d+\]", "", section)
            near = (
                [name.replace(plain, section, 1) for name in known] if plain != section else known
            )
            strange.append(unknown(place, item["input"], near if len(strange) < MOST_SHOWN else ()))
        else:
            expected.setdefault(place, []).append(_expectation(dict(item)))
            seen[place] = item["input"]
    texts = {place: " or ".join(dict.fromkeys(branches)) for place, branches in expected.items()}
    return strange + [
        Problem(place, f"saw {show(seen[place])}", text) for place, text in texts.items()
    ]


def _expectation(item: dict[str, Any]) -> str:
    """Say what pydantic expected, in the words of a key table."""
    kind, context = item["type"], item.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return str(context["expected"]).replace("'", '"')
    return next(text for prefix, text in _EXPECTATIONS.items() if kind.startswith(prefix)).format(
        **context
    )


_EXPECTATIONS = {
    "missing": "it, which has no default",
    "greater_than_equal": "a number of at least {ge:g}",
    "greater_than": "a number above {gt:g}",
    "less_than_equal": "a number of at most {le:,}",
    "less_than": "a number below {lt:,}",
    "finite_number": "a finite number",
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "list": "a list",
    "too_short": "a list that is not empty",
    "too_long": "a list of at most {max_length:,}",
    "dict": "a section {{...}}",
    "model": "a section {{...}}",
}
