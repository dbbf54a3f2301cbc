"""Rules between keys: which exclude or contradict one another, or have no effect without others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainer.config.check import UNSAID
from trainer.config.keys import KEYS, PARAMETERS
from trainer.config.keys.key import AUTO
from trainer.config.own_keys import OWN_KEYS
from trainer.config.read import at
from trainer.config.sections.trainer import TrainerSection
from trainer.errors import Problem, show
from trainer.storage import Json

BATCH = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
WARMUP = "scheduler.params.warmup_num_steps"


EVERYWHERE = ("trainer", *OWN_KEYS, *KEYS, *PARAMETERS)
"""All keys, by their dotted paths: where a key that is unknown in its section may belong."""


def exclusive(recipe: str) -> dict[tuple[str, str], str]:
    """Return the pairs of keys that can't both be given for a recipe, each with a hint."""
    pairs = {}
    for path, key in (OWN_KEYS | KEYS).items():
        if key.now:
            pairs[path, key.now] = ""
        elif key.excludes and recipe not in key.excludes.but_for:
            pairs[path, key.excludes.other] = key.excludes.hint
    return pairs


def _is_given(path: str, value: object) -> bool:
    if value == AUTO:
        return path in OWN_KEYS  # in a key of ours, "auto" is a name or a path
    return value not in (None, []) and value is not False


def give_way(raw: Json, overridden: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Remove from `raw` the file's values that contradict the command line.

    Returns the origins of the removed keys, and a note for each. Of several keys that the file has,
    only the first is removed: `train_batch_size` stays unless the command line has both others.
    """
    origins = {}
    notes = []
    for group in ((ACCUMULATION, MICRO, BATCH), *exclusive(at(raw, "trainer.task"))):
        values = {path: at(raw, path) for path in group}
        line = [
            path
            for path in group
            if any(within(path, over) or within(over, path) for over in overridden)
        ]
        rest = [path for path in group if path not in line]
        if not line or not rest or not all(_is_given(*item) for item in values.items()):
            continue
        loser = rest[0]
        section, _, name = loser.rpartition(".")
        del at(raw, section)[name]
        if loser == WARMUP:
            at(raw, section)[name] = AUTO  # warmup_ratio decides it
        outcome = f"{show(values[loser])} gives way to {' and '.join(line)} on the command line"
        origins[loser] = f"auto: the file's {outcome}"
        notes.append(f"{loser} {outcome.replace(' gives', ' in the file gives', 1)}")
    return origins, notes


def within(path: str, section: str) -> bool:
    """Return True if a dotted path is that of the section, or of a key below it."""
    return f"{path}.".startswith(f"{section}.")


def contradictions(settings: Json, trainer: TrainerSection) -> Iterator[Problem]:
    """Yield the problems of keys that exclude one another, and of a warm-up without a scheduler."""
    tree = settings | {"trainer": trainer.model_dump(exclude_defaults=True)}
    for (path, other), hint in exclusive(trainer.task).items():
        value = at(tree, path)
        beside = at(tree, other)
        if _is_given(path, value) and _is_given(other, beside):
            actual = f"saw {show(value)}, and {other} {show(beside)}"
            yield Problem(path, actual, "at most one of the two", hint)
    if trainer.warmup_ratio is not None and at(settings, WARMUP) is None:
        actual = f"saw {trainer.warmup_ratio:g}"
        expected = "a scheduler with a warm-up"
        yield Problem("trainer.warmup_ratio", actual, expected, f'Set {WARMUP} to "auto".')


def unswitched(settings: Json) -> list[str]:
    """Return a note for each section without the key that switches it on."""
    return [
        f"{path} has no effect here: {UNSAID.format(key.switch)}"
        for path, key in KEYS.items()
        if key.switch and key.switch not in (at(settings, path) or {key.switch})
    ]


def unmet(settings: Json, trainer: TrainerSection) -> dict[str, str]:
    """Return the conditions of keys' `needs` that do not hold, each with the reason."""
    stage = at(settings, "zero_optimization.stage") or 0
    offloaded = ("offload_param", "offload_optimizer")
    devices = [at(settings, f"zero_optimization.{name}.device") for name in offloaded]
    axes = ("pipeline.stages", "tensor_parallel.autotp_size")
    pipelined, split = (at(settings, size) not in (None, 0, 1, AUTO) for size in axes)
    data = trainer.data
    has_path = trainer.data.evaluation_path is not None
    model = trainer.model.name_or_path
    stream = data.arrangement == "concatenate"
    decays = [group.weight_decay for group in trainer.parameter_groups]
    decays.append(at(settings, "optimizer.params.weight_decay"))
    conditions: dict[str, tuple[object, str]] = {
        "ZeRO stage 3": (stage == 3, f"the ZeRO stage is {stage}"),
        "NVMe": ("nvme" in devices, "nothing is offloaded to NVMe"),
        "a pipeline": (pipelined, "there is no pipeline"),
        "tensor parallelism": (split, "there is no tensor parallelism"),
        "rows": (data.path or data.sources, "there is no trainer.data.path"),
        "concatenated documents": (stream, "trainer.data.documents keeps them apart"),
        "training data to hold out from": (
            not has_path,
            "evaluation_path has the rows to evaluate on",
        ),
        "data to evaluate on": (has_path or data.evaluation_fraction, "nothing is held out"),
        "a prompt": (trainer.generate.prompt is not None, "trainer.generate.prompt is null"),
        "a model's name": (model is not None, "there is no trainer.model.name_or_path"),
        "no mean and std": (trainer.images.mean is None, "its mean and std are given"),
        "weight decay": (any(decays), "no parameter is decayed"),
    }
    return {name: reason for name, (holds, reason) in conditions.items() if not holds}


def notes_of(settings: Json, trainer: TrainerSection) -> list[str]:
    """Return notes on valid keys that have no effect given the others."""
    tree = settings | {"trainer": trainer.model_dump(exclude_defaults=True)}
    needs = {path: key.needs for path, key in (KEYS | OWN_KEYS).items() if key.needs}
    given = [path for path in needs if _has_value(at(tree, path), path in OWN_KEYS)]
    notes = []
    for condition, reason in unmet(settings, trainer).items():
        if paths := [path for path in given if needs[path] == condition]:
            have = "has" if len(paths) == 1 else "have"
            notes.append(f"{', '.join(paths)} {have} no effect here: {reason}")
    return notes


def _has_value(value: object, own: bool) -> bool:
    """Return True for a value that asks for something.

    False does so in our `own` keys alone, whose defaults the caller has left out.
    """
    off = value is False and not own
    return value is not None and not off and value != {}


def conflicts(settings: Json) -> list[Problem]:
    """List the problems of DeepSpeed's keys that contradict one another."""
    zero = settings.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    return [
        *_loss_scale(settings),
        *_masters(settings, stage),
        *_model_dtype(settings),
        *_offload(zero, stage),
        *_averages(settings, zero, stage),
    ]


def _loss_scale(settings: Json) -> Iterator[Problem]:
    fp16 = settings.get("fp16", {})
    if fp16.get("enabled") is True and fp16.get("loss_scale", 0) in (0, AUTO):
        for name in ("loss_scale_window", "min_loss_scale"):
            if fp16.get(name) == 0:
                yield Problem(f"fp16.{name}", "saw 0", "at least 1 where the loss scale is dynamic")


def _masters(settings: Json, stage: int) -> Iterator[Problem]:
    """Yield the problems of master weights and optimizer states in low precision."""
    states = "bf16.bf16_optimizer_states"
    masters = [f"{name}.{name}_master_weights_and_grads" for name in ("fp16", "bf16")]
    for place in (*masters, states):
        if at(settings, place) is True and stage == 0:
            yield Problem(place, "saw true with ZeRO stage 0", "ZeRO stage 1, 2 or 3")
    if at(settings, states) is True and at(settings, masters[1]) is not True:
        yield Problem(states, "saw true", "bf16_master_weights_and_grads true with it")


def _model_dtype(settings: Json) -> Iterator[Problem]:
    wanted = at(settings, "data_types.param_dtype")
    computes = {name: at(settings, f"{name}.enabled") or False for name in ("fp16", "bf16")}
    if not wanted or AUTO in computes.values():
        return
    name = next((name for name, enabled in computes.items() if enabled), "fp32")
    if wanted != name:
        place = "data_types.param_dtype"
        actual = f"saw {show(wanted)}, and a model in {name}"
        yield Problem(place, actual, show(name), "fp16.enabled and bf16.enabled say it.")


def _averages(settings: Json, zero: Json, stage: int) -> Iterator[Problem]:
    """Yield what contradicts a reduce-scatter, for which DeepSpeed divides after the sum."""
    if not zero.get("reduce_scatter", True) or stage < 2:
        return
    hint = "DeepSpeed takes it only with zero_optimization.reduce_scatter false."
    plain: Json = {"prescale_gradients": False, "gradient_predivide_factor": 1.0}
    for name, value in plain.items():
        if settings.get(name, value) != value:
            actual = f"saw {show(settings[name])} with ZeRO stage {stage}"
            yield Problem(name, actual, show(value), hint)


def _offload(zero: Json, stage: int) -> Iterator[Problem]:
    for name in ("offload_param", "offload_optimizer"):
        section = zero.get(name) or {}
        device = section.get("device", "none")
        place = f"zero_optimization.{name}"
        if device in ("none", AUTO):
            continue
        if stage == 0:
            actual = f'saw device "{device}" with ZeRO stage 0'
            hint = 'Set zero_optimization.stage, or the device "none".'
            yield Problem(place, actual, "stage 1, 2 or 3", hint)
        if device == "nvme" and section.get("nvme_path") in (None, AUTO):
            yield Problem(f"{place}.nvme_path", "saw none", "a folder on the NVMe device")
        ratio = section.get("ratio", 1.0)
        if ratio != AUTO and ratio < 1 and stage != 3:
            actual = f"saw {ratio:g} with ZeRO stage {stage}"
            yield Problem(f"{place}.ratio", actual, "1, or stage 3")
