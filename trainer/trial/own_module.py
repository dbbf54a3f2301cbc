"""Checks, on a few samples, that a user's own module can be trained on any layout."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import nn

from trainer.errors import ConfigError, Problem
from trainer.models.materialise import on_host
from trainer.models.names import pattern_of
from trainer.models.own.module import LARGEST_BUILT, running_norms
from trainer.models.own.python_state import snapshot
from trainer.models.spec import ModelSpec
from trainer.trial.draws import observe_draws
from trainer.trial.findings import Findings, say_unused
from trainer.trial.forward_state import Run, check_forward_state
from trainer.trial.setup import Alone, own_randomness


class OwnTask(Protocol):
    def loss_sum(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor: ...
    def count(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> int: ...


def check_module(spec: ModelSpec, task: OwnTask) -> Findings:
    """Try the module on a few samples: does it run, do its blocks, which parameters get no
    gradient, where is it random?
    Raises ConfigError for a loss that is not finite, or whose number of targets depends on the
    module's output, and for random numbers that no other layout could replay."""
    assert spec.tiny.input is not None
    if spec.parameters > LARGEST_BUILT:
        return Findings(notes=(f"{spec.name} is too large to be tried before it is trained",))
    with own_randomness(), Alone():
        whole, *single = spec.tiny.input.batches
        model = on_host(spec)
        model.train()
        try:
            loss, found = _with_gradient(model, task, whole)
        except RuntimeError as error:
            if stray := [
                place for place, value in snapshot(model).items() if "without values" in value
            ]:
                seen = (
                    f"{stray[0]} is a tensor that is neither a parameter nor a buffer, and "
                    "gets "
                    "no values"
                )
                raise ConfigError(
                    Problem("model", seen, "one that register_buffer makes known")
                ) from error
            raise
        norms = running_norms(model)
        known = {f"{name}.{key}" for name, norm in norms.items() for key in norm._buffers}
        if not math.isfinite(loss):
            raise ConfigError(
                Problem(f"loss: {spec.name}", f"{loss} on the first samples", "a finite number")
            )
        if (count := task.count(model, whole)) != (asked := int(whole["count"])):
            seen = f"{count} targets where an output of zeros gives {asked}"
            raise ConfigError(
                Problem(f"loss: {spec.name}", seen, "a count that depends on the target alone")
            )
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        model.eval()  # batch norm can't train on one sample
        alone = [_with_gradient(model, task, batch)[1] for batch in single]
        anywhere = found.union(*alone)
        never = tuple(dict.fromkeys(pattern_of(name) for name in names if name not in anywhere))
        sometimes = {
            pattern_of(name) for name in names if any(name not in one for one in (found, *alone))
        }
        draws = observe_draws(model, spec)
        runs = _runs_once_in_order(model.eval(), spec)
        del model
        halves = _halves(whole)
        run: Run = lambda model, rows: task.loss_sum(model, halves[rows])  # noqa: E731
        moved = check_forward_state(
            spec.name, lambda: on_host(spec), run, ("loss", getattr(task, "_loss", None))
        )
    notes = list(say_unused(spec, never))
    if spec.blocks and not runs:
        notes.append(
            f"the blocks of {spec.name} do not run once each, in order: layouts that need blocks "
            "are refused"
        )
    sparse = tuple(sorted(sometimes - set(never)))
    moves = next((name for name in moved if name not in known), "")
    return Findings(never, sparse, draws, runs, moves, next(iter(norms), ""), notes=tuple(notes))


def _halves(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Split a batch into two of two rows each, if it has as many: batch norm can't train on one
    row.
    """
    size = max((len(value) for value in batch.values() if value.ndim), default=0)
    first = range(min(2, size)), range(max(0, size - 2), size)
    pick = lambda value, rows: value[list(rows)] if value.ndim and len(value) == size else value  # noqa: E731
    return [{key: pick(value, rows) for key, value in batch.items()} for rows in first]


def _with_gradient(
    model: nn.Module, task: OwnTask, batch: dict[str, torch.Tensor]
) -> tuple[float, set[str]]:
    """Return the loss of a batch, and the names of the parameters that get a gradient from it."""
    model.zero_grad()
    loss = task.loss_sum(model, batch)
    if not loss.requires_grad:
        raise ConfigError(
            Problem("loss", "depends on no parameter", "a sum that gradients can be taken of")
        )
    loss.backward()
    if sparse := [
        name for name, p in model.named_parameters() if p.grad is not None and p.grad.is_sparse
    ]:
        mend = "Leave sparse=True out of nn.Embedding: the gradients are the same."
        raise ConfigError(
            Problem("model", f"{sparse[0]} has a sparse gradient", "dense ones", mend)
        )
    return float(loss.detach()), {
        name for name, p in model.named_parameters() if p.grad is not None
    }


def _runs_once_in_order(model: nn.Module, spec: ModelSpec) -> bool:
    assert spec.tiny.input is not None
    ran: list[str] = []
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
        for name in spec.blocks
    ]
    with torch.no_grad():
        spec.tiny.input.output(model)
    for hook in hooks:
        hook.remove()
    return bool(spec.blocks) and tuple(ran) == spec.blocks
