"""Rules between keys: which exclude or contradict one another, or have no effect beside others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.config.check import UNSAID
from trainer.config.grammar import AUTO, show
from trainer.config.keys import OFFLOADS, RENAMED, ZERO
from trainer.config.read import Json, at, leaves
from trainer.config.sections import TrainerSection
from trainer.errors import Problem

SAME = {
    "fp32": ("fp32", "float32", "float"),
    "fp16": ("fp16", "float16", "half"),
    "bf16": ("bf16", "bfloat16"),
}
"""DeepSpeed's names for each precision."""


BATCH, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
WARMUP = "scheduler.params.warmup_num_steps"
OLD_NAMES = RENAMED | {ZERO + old: ZERO + new for old, new in OFFLOADS.items()}
GROUPS = (
    ("trainer.steps", "trainer.epochs"),
    ("trainer.model.name_or_path", "trainer.model.config"),
    ("trainer.data.path", "trainer.data.sources"),
    ("trainer.warmup_ratio", WARMUP),
    ("trainer.mesh.shard", "zero_optimization.mics_shard_size"),
    ("fp16.enabled", "bf16.enabled"),
    (ACCUMULATION, MICRO, BATCH),  # the batch stays unless both of the others are given
    *OLD_NAMES.items(),
)
"""Groups of keys that can't all be given; of those in the file, the first gives way."""


def give_way(raw: Json, overridden: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Remove from `raw` the file's values that contradict the command line; return their origins
    and notes.
    """
    origins, notes = {}, []
    for group in GROUPS:
        values = {path: at(raw, path) for path in group}
        said = {
            path: value
            for path, value in values.items()
            if value not in (None, AUTO, []) and value is not False
        }
        line = [
            path
            for path in said
            if any(_within(path, over) or _within(over, path) for over in overridden)
        ]
        loser = next((path for path in group if path not in line), None)
        together = "model" in group[0] and at(raw, "trainer.task") == "image_classification"
        if len(said) < len(group) or together or not line or loser is None:
            continue
        section, _, name = loser.rpartition(".")
        del at(raw, section)[name]
        if loser == WARMUP:
            at(raw, section)[name] = AUTO  # the ratio decides it
        winner = f"{' and '.join(line)} on the command line"
        origins[loser] = f"auto: the file's {show(said[loser])} gives way to {winner}"
        notes.append(f"{loser} {show(said[loser])} in the file gives way to {winner}")
    return origins, notes


def _within(path: str, section: str) -> bool:
    return f"{path}.".startswith(f"{section}.")


def conflicts(settings: Json) -> list[Problem]:
    """List the problems of keys that contradict one another."""
    zero = settings.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    return [*_precision(settings, stage), *_offload(zero, stage), *_averages(settings, zero, stage)]


def warm_up(settings: Json, ratio: float | None) -> list[Problem]:
    """Report a `trainer.warmup_ratio` that has no effect."""
    steps = settings.get("scheduler", {}).get("params", {}).get("warmup_num_steps")
    if ratio is None or steps == AUTO:
        return []
    seen = f"saw {ratio:g}, and scheduler.params.warmup_num_steps {show(steps)}"
    return [
        Problem(
            "trainer.warmup_ratio",
            seen,
            '"auto" there, which it decides, in a scheduler with a warm-up',
        )
    ]


SWITCHES = {
    "zero_optimization": "stage",
    **dict.fromkeys(
        ("zero_optimization.offload_param", "zero_optimization.offload_optimizer"), "device"
    ),
    **dict.fromkeys(("fp16", "bf16", "flops_profiler", "comms_logger"), "enabled"),
}
"""The key that switches a section on; without it, the section is off."""


def unswitched(settings: Json) -> list[str]:
    """Return a note for each section without its switch."""
    found = [
        (path, switch)
        for path, switch in SWITCHES.items()
        if switch not in (at(settings, path) or {switch})
    ]
    return [f"{path} has no effect here: {UNSAID.format(switch)}" for path, switch in found]


def notes_of(settings: Json, trainer: TrainerSection) -> list[str]:
    """Return notes on valid keys that have no effect given the others, those of the section
    `trainer` too.
    """
    zero, one = settings.get("zero_optimization", {}), (None, 0, 1, AUTO)
    stage, offloads = (
        zero.get("stage", 0),
        [at(zero, f"offload_{which}.device") for which in ("param", "optimizer")],
    )
    threes = sorted(f"zero_optimization.{name}" for name in zero if name.startswith("stage3_"))
    pipeline, tensor = at(settings, "pipeline.stages"), at(settings, "tensor_parallel.autotp_size")
    data, held = trainer.data, trainer.data.evaluation_path
    bare = trainer.task == "causal_lm" and not (data.path or data.sources)
    decays = [
        at(settings, "optimizer.params.weight_decay"),
        *(it.weight_decay for it in trainer.parameter_groups),
    ]
    rows = [
        (f"the ZeRO stage is {stage}", stage != 3, threes),
        ("nothing is offloaded to NVMe", "nvme" not in offloads, ["aio"]),
        (
            "there is no pipeline",
            pipeline in one,
            ["pipeline.partition", "trainer.pipeline_schedule"],
        ),
        ("there is no tensor parallelism", tensor in one, ["tensor_parallel.tp_overlap_comm"]),
        ("there is no trainer.data.path", bare, OF_ROWS.split()),
        (
            "trainer.data.documents keeps them apart",
            data.documents != "concatenate",
            ["trainer.data.isolate"],
        ),
        (
            "evaluation_path has the rows to evaluate on",
            held is not None,
            ["trainer.data.evaluation_fraction"],
        ),
        ("nothing is held out", not (held or data.evaluation_fraction), OF_EVALUATION.split()),
        (
            "trainer.generate.prompt is null",
            trainer.generate.prompt is None,
            ["trainer.generate.tokens"],
        ),
        (
            "there is no trainer.model.name_or_path",
            trainer.model.name_or_path is None,
            ["trainer.model.revision"],
        ),
        (
            "its mean and std are given",
            trainer.images.mean is not None,
            ["trainer.images.normalize"],
        ),
        ("no parameter is decayed", not any(decays), ["trainer.weight_decay_excludes"]),
    ]
    usual, values = (
        dict(leaves({"trainer": it.model_dump()})) for it in (TrainerSection(), trainer)
    )
    written = settings | {path: True for path in values if usual.get(path) != values[path]}
    kept = (
        (why, [it for it in paths if written.get(it) or at(written, it)])
        for why, idle, paths in rows
        if idle
    )
    return [
        f"{', '.join(it)} {'has' if len(it) == 1 else 'have'} no effect here: {why}"
        for why, it in kept
        if it
    ]


OF_ROWS = """
trainer.data.corrupt trainer.data.chat_template trainer.data.format trainer.data.split
trainer.data.name trainer.data.records trainer.data.text_column trainer.data.chat_column
trainer.data.max_rows trainer.data.loss_on
"""
OF_EVALUATION = (
    "trainer.evaluation.every trainer.evaluation.samples trainer.evaluation.patience "
    "trainer.checkpoint.keep_best"
)


def _precision(settings: Json, stage: int) -> list[Problem]:
    fp16, bf16 = settings.get("fp16", {}), settings.get("bf16", {})
    found = []
    if fp16.get("enabled") is True and bf16.get("enabled") is True:
        found.append(
            Problem("fp16.enabled", "saw true, and bf16.enabled true", "at most one of the two")
        )
    if fp16.get("enabled") is True and fp16.get("loss_scale", 0) in (0, "auto"):
        for name in ("loss_scale_window", "min_loss_scale"):
            if fp16.get(name) == 0:
                found.append(
                    Problem(f"fp16.{name}", "saw 0", "at least 1 where the loss scale is dynamic")
                )
    for place, section in (("fp16", fp16), ("bf16", bf16)):
        for name in (f"{place}_master_weights_and_grads", "bf16_optimizer_states"):
            if section.get(name) is True and stage == 0:
                found.append(
                    Problem(f"{place}.{name}", "saw true with ZeRO stage 0", "ZeRO stage 1, 2 or 3")
                )
    wanted = settings.get("data_types", {}).get("param_dtype")
    computes = {"fp16": fp16.get("enabled", False), "bf16": bf16.get("enabled", False)}
    if wanted and AUTO not in computes.values():
        name = next((name for name, on in computes.items() if on), "fp32")
        if wanted.removeprefix("torch.") not in SAME[name]:
            seen = f"saw {show(wanted)}, and a model in {name}"
            found.append(
                Problem(
                    "data_types.param_dtype",
                    seen,
                    show(name),
                    "fp16.enabled and bf16.enabled say it.",
                )
            )
    if (
        bf16.get("bf16_optimizer_states") is True
        and bf16.get("bf16_master_weights_and_grads") is not True
    ):
        found.append(
            Problem(
                "bf16.bf16_optimizer_states",
                "saw true",
                "bf16_master_weights_and_grads true with it",
            )
        )
    return found


def _averages(settings: Json, zero: Json, stage: int) -> list[Problem]:
    """List contradictions with a reduce-scatter, which DeepSpeed requires to divide after the
    sum.
    """
    if not zero.get("reduce_scatter", True) or stage < 2:
        return []
    plain: dict[str, Any] = {"prescale_gradients": False, "gradient_predivide_factor": 1.0}
    return [
        Problem(
            name, f"saw {show(settings[name])} with ZeRO stage {stage}", show(value), _NO_SCATTER
        )
        for name, value in plain.items()
        if settings.get(name, value) != value
    ]


_NO_SCATTER = "DeepSpeed takes it only with zero_optimization.reduce_scatter false."


def _offload(zero: Json, stage: int) -> list[Problem]:
    found = []
    for name in ("offload_param", "offload_optimizer"):
        section = zero.get(name) or {}
        device, place = section.get("device", "none"), f"zero_optimization.{name}"
        if device in ("none", "auto"):
            continue
        if stage == 0:
            seen = f'saw device "{device}" with ZeRO stage 0'
            found.append(
                Problem(
                    place,
                    seen,
                    "stage 1, 2 or 3",
                    'Set zero_optimization.stage, or the device "none".',
                )
            )
        if device == "nvme" and section.get("nvme_path") in (None, "auto"):
            found.append(Problem(f"{place}.nvme_path", "saw none", "a folder on the NVMe device"))
        if section.get("ratio", 1.0) != "auto" and section.get("ratio", 1.0) < 1 and stage != 3:
            seen = f"saw {section['ratio']:g} with ZeRO stage {stage}"
            found.append(Problem(f"{place}.ratio", seen, "1, or stage 3"))
    return found
