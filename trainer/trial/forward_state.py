"""A check that a forward pass leaves nothing behind that changes a later one or what is saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer.distributed.seeding import seed_generators
from trainer.errors import ConfigError, Problem, listed
from trainer.models.names import gradients_of
from trainer.models.own.python_state import snapshot

TOLERANCE = 1e-5
"""The error allowed of an output, relative to its largest value, for another order of sums."""
TRAIN, EVAL = True, False
ALONE = ((TRAIN, 0), (EVAL, 1), (TRAIN, 1), (TRAIN, 0), (EVAL, 0), (TRAIN, 0))
"""The passes of the first copy: training or evaluation, and the rows. Some over rows 0 are an odd
number of passes apart, which shows what alternates; changes in the last two in training never
settle.
"""
AFTER_OTHERS = ((TRAIN, 1), (TRAIN, 0), (EVAL, 0))
"""The passes of another copy, which show a module that keeps the first rows that it sees."""

Run = Callable[[nn.Module, int], torch.Tensor]
"""`run(model, rows)` returns the output of a forward pass over rows 0 or 1."""


class Pass(NamedTuple):
    training: bool
    rows: int
    before: dict[str, Any]
    after: dict[str, Any]
    found: dict[str, torch.Tensor]
    """The output, and in training the norm of each gradient: backward hooks may leave things."""


def check_forward_state(
    name: str, make: Callable[[], nn.Module], run: Run, *beside: tuple[str, Any]
) -> list[str]:
    """Return the persistent buffers that a forward pass in training changes.

    `make` gives the same model each time, and each pass starts from the buffers' first values.
    Raises ConfigError, with the place, if a pass changes a parameter, if one in evaluation changes
    a persistent buffer, if anything left behind changes a later output, and if an attribute never
    settles, such as a count. State that settles and changes no output is allowed, such as a mask.
    """
    alone, moved = _passes(name, make(), run, ALONE, beside)
    others, _ = _passes(name, make(), run, AFTER_OTHERS, beside)
    for training in (TRAIN, EVAL):
        passes = [one for one in (*alone, *others) if one.training == training]
        first, *later = [one for one in passes if one.rows == 0]
        for one in later:
            _compare(name, first, one)
    before, after = alone[3].after, alone[5].after
    if restless := _changed(before, after):
        places = _shown(restless, before, after)
        raise _refused(
            name,
            f"each forward pass leaves something behind that never settles: {places}. Checkpoints "
            "do not have it, and it differs on ranks that run other passes. A count of training "
            "passes can be a buffer (register_buffer), which checkpoints have",
        )
    return moved


def _passes(
    name: str,
    model: nn.Module,
    run: Run,
    order: Sequence[tuple[bool, int]],
    beside: Sequence[tuple[str, Any]],
) -> tuple[list[Pass], list[str]]:
    """Run the passes; return them, and the persistent buffers that those in training change."""
    parameters = dict(model.named_parameters(remove_duplicate=False)).keys()
    buffers = {key: value for key, value in model.state_dict().items() if key not in parameters}
    first = {key: value.clone() for key, value in buffers.items()}
    passes, moved, after = list[Pass](), dict[str, None](), snapshot(model, *beside)
    for training, rows in order:
        for key, value in first.items():
            buffers[key].copy_(value)
        before = snapshot(model, *beside) if first else after
        seed_generators(1)
        with torch.set_grad_enabled(training):
            output = run(model.train(training), rows).float()
        found = {"something else": output.detach().clone()}
        if output.requires_grad:
            output.square().sum().backward()
            norms = [gradient.norm() for gradient in gradients_of(model).values()]
            found["other gradients"] = torch.stack(norms)
            model.zero_grad()
        after = snapshot(model, *beside)
        changed = _changed(before, after)
        held = parameters if training else {*parameters, *buffers}
        if wrong := [key for key in changed if key in held]:
            mode = "training" if training else "evaluation"
            seen = f"a forward pass in {mode} changes {_shown(wrong, before, after)}"
            effect = "What is trained and saved would depend on when it is evaluated"
            raise _refused(name, f"{seen}. {effect}")
        moved |= dict.fromkeys(key for key in changed if key in buffers)
        passes.append(Pass(training, rows, before, after, found))
    return passes, list(moved)


def _compare(name: str, first: Pass, later: Pass) -> None:
    for what, value in first.found.items():
        moved, largest = float((later.found[what] - value).abs().max()), float(value.abs().max())
        if not moved <= TOLERANCE * largest and bool(value.isfinite().all()):
            changed = _changed(first.before, later.before)
            where = f": {_shown(changed, first.before, later.before)}" if changed else ""
            seen = (
                f"the same input with the same random numbers gives {what} after other passes, by "
                f"{moved:.1e} of {largest:.1e}: a pass leaves something behind{where}"
            )
            raise _refused(name, f"{seen}. Ranks run different rows")


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def _shown(places: Sequence[str], before: dict[str, Any], after: dict[str, Any]) -> str:
    values = {key: (before.get(key, "nothing"), after.get(key, "nothing")) for key in places}
    tensors = {key for key, pair in values.items() if pair[1].startswith("a tensor")}
    shown = [key if key in tensors else f"{key} ({' -> '.join(values[key]):.80})" for key in places]
    return listed(shown, most=3)


def _refused(name: str, actual: str) -> ConfigError:
    expected = "a forward pass that depends on its rows, weights and torch's random numbers alone"
    return ConfigError(Problem(f"trainer.model: {name}", actual, expected))
