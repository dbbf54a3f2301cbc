"""The validation of a `trainer` section: each key by itself, then contradictions between keys."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import ValidationError

from trainer.config.keys import KEYS, PARAMETERS
from trainer.config.keys.hints import unknown, useless
from trainer.config.keys.key import NOUNS
from trainer.config.own_keys import OWN_KEYS, honoured, unhonoured
from trainer.config.sections.images import ImagesSection
from trainer.config.sections.model_and_data import DataSection, Rows
from trainer.config.sections.trainer import TrainerSection
from trainer.errors import MOST_SHOWN, Problem, listed, show, suggestion
from trainer.plugins import options_of
from trainer.storage import Json


def validate(raw: object, folder: str = "") -> tuple[TrainerSection, list[Problem]]:
    """Return the section and its problems; if there are any, the section is the default one.

    `folder` is that of the config's file, in which plug-ins may be.
    """
    try:
        section = TrainerSection.model_validate(raw, context=folder)
    except ValidationError as error:
        return TrainerSection(), _problems(error)
    problems = [
        *unhonoured(section, section.task),
        *_of_recipe(section),
        *_of_images(section.images),
        *_of_data(section),
        *_of_mixture(section.data),
        *_of_stream(section),
        *_of_parameters(section),
        *_of_float8(section),
        *_of_intervals(section),
    ]
    return section, problems


def _of_recipe(section: TrainerSection) -> Iterator[Problem]:
    """Yield the problems of the keys that a plug-in's recipe has of its own."""
    options = options_of(section.task)
    if options is None:
        if section.recipe:
            expected = f'a recipe with keys of its own; "{section.task}" has none'
            yield Problem("trainer.recipe", f"saw {show(section.recipe)}", expected)
        return
    try:
        options.model_validate(section.recipe)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            place = ".".join(["trainer.recipe", *map(str, item["loc"])])
            expected = _expectation(dict(item))
            hint = ""
            if item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
                names = list(options.model_fields)
                expected = f"a key that the recipe has: {listed(names, most=12)}"
                hint = suggestion(str(item["loc"][0]), names)
            yield Problem(place, f"saw {show(item['input'])}", expected, hint)


def _of_images(images: ImagesSection) -> Iterator[Problem]:
    if (images.mean is None) != (images.std is None):
        actual = f"saw mean {show(images.mean)}, std {show(images.std)}"
        yield Problem("trainer.images", actual, "both or none")
    if images.augment.crop_padding and images.augment.crop_scale is not None:
        actual = "saw crop_padding and crop_scale"
        yield Problem("trainer.images.augment", actual, "at most one of the two")


def _of_data(section: TrainerSection) -> Iterator[Problem]:
    data = section.data
    prompt = show(data.prompt_column)
    completion = show(data.completion_column)
    both = honoured("trainer.data.completion_column", section.task)
    if both and (data.prompt_column is None) != (data.completion_column is None):
        actual = f"saw prompt_column {prompt} and completion_column {completion}"
        yield Problem("trainer.data", actual, "both or neither")
    elif data.path is None and data.prompt_column is not None:
        actual = f"saw {prompt} without trainer.data.path"
        place = "trainer.data.prompt_column"
        expected = "data of yours that has such a column"
        yield Problem(place, actual, expected)
    if data.too_long != "truncate" and data.documents == "concatenate":
        actual = f'saw {show(data.too_long)}, with trainer.data.documents "concatenate"'
        expected = "documents that are not cut wherever a window ends"
        yield Problem("trainer.data.too_long", actual, expected)


def _of_mixture(data: DataSection) -> Iterator[Problem]:
    """Yield the contradictions in a mixture of sources."""
    place = "trainer.data.sources"
    sources = data.sources
    if not sources:
        return
    default = DataSection()
    for name in Rows.model_fields:
        value = getattr(data, name)
        if name != "path" and value != getattr(default, name):
            actual = f"saw {show(value)}, and sources"
            yield Problem(f"trainer.data.{name}", actual, "it in each of the sources")
    weighted = sum(source.weight is not None for source in sources)
    counted = sum(source.epochs is not None for source in sources)
    if weighted and (weighted < len(sources) or counted):
        actual = f"saw {weighted} with a weight, {counted} with epochs"
        yield Problem(place, actual, "a weight for each of them, or epochs")
    labels = [source.label or str(source.path) for source in sources]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        yield Problem(place, f"saw {show(twice[0])} twice", "another label for each")


def _of_stream(section: TrainerSection) -> Iterator[Problem]:
    if not (data := section.data).stream:
        return
    place = "trainer.data.stream"
    if data.sources:
        yield Problem(place, "saw true, with sources", "one trainer.data.path")
    elif data.path is not None and section.steps is None:
        yield Problem("trainer.steps", "saw none, with a stream of unknown length", "a number")
    if data.max_rows is not None:
        actual = f"saw {data.max_rows}, with trainer.data.stream"
        yield Problem("trainer.data.max_rows", actual, "no limit: a stream reads all rows")


def _of_parameters(section: TrainerSection) -> Iterator[Problem]:
    """Yield the contradictions of the adapter, the parameter groups and the mesh."""
    if section.adapter is not None and section.model.name_or_path is None:
        hint = "Name the base as trainer.model.name_or_path."
        yield Problem("trainer.adapter", "saw one without its base", "its base", hint)
    for index, group in enumerate(section.parameter_groups):
        if group.lr_multiplier == 1 and group.weight_decay is None:
            place = f"trainer.parameter_groups[{index}]"
            actual = f"saw {show(group.names)} alone"
            yield Problem(place, actual, "an lr_multiplier or a weight_decay")
    if section.mesh.replicate == -1 and section.mesh.shard == -1:
        yield Problem("trainer.mesh", "saw -1 for both axes", "-1 for at most one of them")


def _of_float8(section: TrainerSection) -> Iterator[Problem]:
    """Yield the contradiction of a head in float8 beside layers that are not."""
    if section.float8_head and section.float8 == "none":
        place = "trainer.float8_head"
        hint = 'Set trainer.float8 to "rowwise" or "tensorwise".'
        yield Problem(place, 'saw true, with trainer.float8 "none"', "trainer.float8", hint)


def _of_intervals(section: TrainerSection) -> Iterator[Problem]:
    """Yield the contradictions of what is saved, evaluated, logged and profiled, and when."""
    saves = section.checkpoint.every
    evaluates = section.evaluation.every
    if section.checkpoint.keep_best and saves and not evaluated_at(saves, evaluates):
        given = f"trainer.checkpoint.every {saves} and trainer.evaluation.every {show(evaluates)}"
        place = "trainer.checkpoint.keep_best"
        expected = "an evaluation at each checkpoint"
        yield Problem(place, f"saw true, with {given}", expected)
    patience = section.evaluation.patience
    if patience is not None and evaluates is None:
        actual = f"saw {patience}, with one evaluation at the end"
        yield Problem("trainer.evaluation.patience", actual, "trainer.evaluation.every")
    if section.log.by_source and len(section.data.sources) < 2:
        yield Problem("trainer.log.by_source", "saw true", "several trainer.data.sources")
    yield from profile_problems(section, section.steps)


def profile_problems(section: TrainerSection, steps: int | None) -> list[Problem]:
    """List the problems of the steps to profile, once the number of steps is known."""
    if section.profile is None or steps is None or section.profile.start <= steps:
        return []
    actual = f"saw {section.profile.start}, in a run of {steps} steps"
    return [Problem("trainer.profile.start", actual, f"a step of the run, at most {steps}")]


def evaluated_at(saves: float, evaluates: float | None) -> bool:
    """Return True if each checkpoint has an evaluation.

    Both are numbers of steps, or shares of all steps; shares are rounded later, so they must be
    equal.
    """
    if evaluates is None or min(saves, evaluates) < 1:
        return saves == evaluates
    return saves % evaluates == 0


OFF = {
    "trainer.evaluation.every": (
        "To switch evaluation off, set trainer.data.evaluation_fraction=0, without evaluation_path"
    )
}
"""Keys for which a value is tried that would switch something off -> what does that."""


def _problems(error: ValidationError) -> list[Problem]:
    """Return one problem for each place; the branches of a union are joined by "or"."""
    expected: dict[str, list[str]] = {}
    actual: Json = {}
    strange: list[Problem] = []
    for item in error.errors(include_url=False):
        place = "trainer"
        for name in item["loc"]:
            inside = re.sub(r"\[\d+\]", "", f"{place}.{name}")
            if (
                item["type"] != "extra_forbidden"
                and isinstance(name, str)
                and inside not in OWN_KEYS
            ):
                break  # the rest names the branch of a union
            place += f"[{name}]" if isinstance(name, int) else f".{name}"
        if item["type"] == "extra_forbidden":
            section = place.rpartition(".")[0]
            plain = re.sub(r"\[\d+\]", "", section)
            near = [*(name.replace(plain, section, 1) for name in OWN_KEYS), *KEYS, *PARAMETERS]
            near = near if len(strange) < MOST_SHOWN else []
            strange.append(unknown(place, item["input"], near, useless(KEYS)))
        else:
            expected.setdefault(place, []).append(_expectation(dict(item)))
            actual[place] = item["input"]
    texts = {place: " or ".join(dict.fromkeys(branches)) for place, branches in expected.items()}
    for place, text in texts.items():
        strange.append(Problem(place, f"saw {show(actual[place])}", text, OFF.get(place, "")))
    return strange


def _expectation(item: Json) -> str:
    """Say what pydantic expected, in the words of a key table."""
    kind = item["type"]
    context = item.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return str(context["expected"]).replace("'", '"')
    if kind == "extra_forbidden":
        return "a key that the recipe has"
    limits = [text for prefix, text in _LIMITS.items() if kind.startswith(prefix)]
    if limits:
        return limits[0].format(**context)
    nouns = (NOUNS[noun] for prefix, noun in _TYPES.items() if kind.startswith(prefix))
    return next(nouns, str(item["msg"]))


_LIMITS = {
    "missing": "it, which has no default",
    "greater_than_equal": "a number of at least {ge:g}",
    "greater_than": "a number above {gt:g}",
    "less_than_equal": "a number of at most {le:,}",
    "less_than": "a number below {lt:,}",
    "finite_number": "a finite number",
    "too_short": "a list that is not empty",
    "too_long": "a list of at most {max_length:,}",
}
"""The expectations of pydantic in words, by the prefix of its error type."""
_TYPES = {
    "int": "int",
    "float": "float",
    "string": "str",
    "bool": "bool",
    "list": "list",
    "dict": "section",
    "model": "section",
}
"""The kinds of keys, by the prefix of pydantic's error type."""
