"""A model cut into pipeline stages: the model itself, with stand-ins for other stages' blocks.

So rotary embeddings, masks, windows and soft caps stay the model's own code, and no parameter
changes its name. Every stage runs the whole forward on the micro-batch's ids; the output of the
stage before takes the place of whatever stands in front of its first block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.errors import ConfigError, Problem, named_line
from trainer.models.materialise import materialise, on_host
from trainer.models.names import differing, gradients_of, outermost
from trainer.models.spec import ModelSpec, Trial

TOLERANCE = 1e-4
"""The relative error allowed of a gradient in float32, larger than rounding."""


@dataclass(frozen=True)
class StageBoundary:
    """Modules outside the blocks, by where in a model's forward they run."""

    before: tuple[str, ...]
    """Names of modules with parameters that run before the blocks, and of those that never run."""
    after: tuple[str, ...]
    """Names of modules that run after the blocks, with or without parameters."""
    tuples: int
    """The number of values a block returns; 0 for a bare tensor."""
    around: tuple[str, ...] = ()
    """Names of modules without parameters that run both before and after the blocks."""


class StageInput:
    """The hidden state [batch, sequence, hidden] that a stage got from the stage before it."""

    def __init__(self) -> None:
        self.hidden: torch.Tensor | None = None
        """The hidden state; None on the first stage, and between micro-batches."""

    def put(self, hidden: torch.Tensor | None) -> None:
        """Set the hidden state that the next forward pass starts from."""
        self.hidden = hidden


class _Passed(nn.Module):
    """A stand-in for a block, norm or head of another stage: returns its first argument."""

    def __init__(self, tuples: int = 0) -> None:
        super().__init__()
        self._tuples = tuples

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else next(iter(kwargs.values()))
        return (hidden, *[None] * (self._tuples - 1)) if self._tuples else hidden


class _UntilBlocks(nn.Module):
    """A stand-in for a module on both sides of the blocks: behind them it returns its input."""

    def __init__(self, module: nn.Module, whole: nn.Module, last_block: nn.Module) -> None:
        super().__init__()
        self.module, self._behind = module, False
        whole.register_forward_pre_hook(lambda *_: self._stand(behind=False))
        last_block.register_forward_hook(lambda *_: self._stand(behind=True))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._behind:
            return args[0] if args else next(iter(kwargs.values()))
        return self.module(*args, **kwargs)

    def _stand(self, *, behind: bool) -> None:
        self._behind = behind


class _Blank(nn.Module):
    """A stand-in for an input table or projection: gives zeros, which no block reads."""

    def __init__(self, stage_input: StageInput, width: int, table: bool) -> None:
        super().__init__()
        self._stage_input, self._width, self._table = stage_input, width, table

    @property
    def weight(self) -> torch.Tensor | None:
        """The hidden state: some models ask a table for its device and dtype."""
        return self._stage_input.hidden

    def forward(self, given: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden = self._stage_input.hidden
        assert hidden is not None
        return hidden.new_zeros(*(given.shape if self._table else given.shape[:-1]), self._width)


class _Received(_Passed):
    """A stand-in for the block before this stage's first: gives the received hidden state."""

    def __init__(self, stage_input: StageInput, tuples: int = 0) -> None:
        super().__init__(tuples)
        self._stage_input = stage_input

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self._stage_input.hidden)


def is_whole(module: nn.Module) -> bool:
    """Return False if another stage has a part of the module."""
    return not any(isinstance(part, _Passed | _Blank | _UntilBlocks) for part in module.modules())


def cut(model: nn.Module, spec: ModelSpec, boundary: StageBoundary, blocks: range) -> StageInput:
    """Reduce `model`, in place, to the stage of these `blocks`.

    The first stage keeps the tables, the last norm and head; the last keeps an input table, too, if
    the head is tied to it: the parameter is then on both stages.
    """
    stage_input, first, last = StageInput(), blocks.start == 0, blocks.stop == len(spec.blocks)
    for index, name in enumerate(spec.blocks):
        if index == blocks.start - 1:
            _replace_block(model, name, _Received(stage_input, boundary.tuples))
        elif index not in blocks:
            _replace_block(model, name, _Passed(boundary.tuples))
    if not first:
        kept = kept_for_the_head(spec, boundary) if last else set()
        for name in boundary.before:
            if name not in kept:
                model.set_submodule(name, _blank(model.get_submodule(name), stage_input))
    if not last:
        for name in boundary.after:
            model.set_submodule(name, _Passed())
        whole = getattr(model, "base_model", model)
        last_block = model.get_submodule(spec.blocks[blocks.stop - 1])
        for name in boundary.around:
            model.set_submodule(name, _UntilBlocks(model.get_submodule(name), whole, last_block))
    return stage_input


def _replace_block(model: nn.Module, name: str, stand_in: nn.Module) -> None:
    """Replace a block; its words stay, as a model may ask a block what kind of mask it wants."""
    block = model.get_submodule(name)
    attributes: dict[str, Any] = {}
    for part in (*reversed(type(block).__mro__), block):
        attributes.update(vars(part))
    words = {k: v for k, v in attributes.items() if isinstance(v, str) and not k.startswith("_")}
    vars(stand_in).update(words)
    model.set_submodule(name, stand_in)


def _blank(module: nn.Module, stage_input: StageInput) -> nn.Module:
    width = getattr(module, "embedding_dim", None) or getattr(module, "out_features", None)
    if not isinstance(width, int):
        return _Passed()
    return _Blank(stage_input, width, isinstance(module, nn.Embedding))


def kept_for_the_head(spec: ModelSpec, boundary: StageBoundary) -> set[str]:
    """Return the modules before the blocks that the last stage keeps: its head is tied to them."""
    after = tuple(f"{name}." for name in boundary.after)
    owners = [owner for alias, owner in spec.tied.items() if alias.startswith(after)]
    return {owner.rpartition(".")[0] for owner in owners} & set(boundary.before)


def check_cut(spec: ModelSpec, stages: int) -> StageBoundary:
    """Check on a tiny copy that stages of a block each have the whole model's logits and gradients.

    Raises ConfigError, with the reason, for a model that can't be cut so or has fewer blocks than
    `stages`.
    """
    place = f"pipeline.stages: {spec.name}"
    if len(spec.blocks) < stages:
        seen = f"{len(spec.blocks)} blocks for {stages} pipeline stages"
        raise ConfigError(Problem(place, seen, "at least one block for each stage"))
    try:
        return _try(spec.tiny.copy() if spec.tiny.copy else spec)
    except Exception as error:  # whatever a model's own code raises when its blocks are gone
        reason = str(error) if isinstance(error, _CannotCut) else named_line(error)
        expected, mend = "the same logits and gradients", "Set pipeline.stages to 1."
        raise ConfigError(Problem(place, f"cut into stages: {reason}", expected, mend)) from error


@dataclass
class _StagePass:
    """A stage with what it got and gave in a forward pass."""

    stage: nn.Module
    hidden: torch.Tensor | None
    output: torch.Tensor


def _try(spec: ModelSpec) -> StageBoundary:
    """Compare stages of one block each with the whole model, forward and backward."""
    whole, trial = on_host(spec).eval(), spec.tiny.input or of_tokens(spec)
    boundary, expected = _survey(whole, spec, trial)
    passes = _forward(spec, boundary, trial)
    if not torch.equal(passes[-1].output, expected):
        seen = "other logits than the whole model"
        raise _CannotCut(f"{seen}: a block reads more than the block before it gives")
    weight = torch.sin(torch.arange(expected.numel()).reshape(expected.shape))
    (expected * weight).sum().backward()
    gradients = _backward(passes, weight)
    for name, _ in whole.named_parameters():
        if name not in gradients:
            raise _CannotCut(f"no stage for {name}")
    if found := differing(gradients, gradients_of(whole), TOLERANCE):
        raise _CannotCut(f"another gradient of {found[0]} than the whole model")
    return boundary


def _forward(spec: ModelSpec, boundary: StageBoundary, trial: Trial) -> list[_StagePass]:
    passes: list[_StagePass] = []
    for index in range(len(spec.blocks)):
        stage = spec.build()
        stage_input = cut(stage, spec, boundary, range(index, index + 1))
        # after the cut, as engines do: an initialiser may refer to a module that was cut away
        materialise(stage, spec, seed=0)
        hidden = passes[-1].output.detach().requires_grad_() if passes else None
        stage_input.put(hidden)
        last = index + 1 == len(spec.blocks)
        output = trial.output(stage.eval()) if last else trial.hidden(stage.eval())
        if not isinstance(output, torch.Tensor):
            seen = f"what it gives is a {type(output).__name__}"
            raise _CannotCut(f"{seen}, and a stage sends one tensor")
        passes.append(_StagePass(stage, hidden, output))
    return passes


def _backward(passes: Sequence[_StagePass], weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run the backward passes, last stage first; return the gradients, summed over stages."""
    found: dict[str, torch.Tensor] = {}
    gradient: torch.Tensor | None = weight
    for one in reversed(passes):
        if one.output.requires_grad:  # else every parameter up to here is frozen
            one.output.backward(gradient)
        gradient = None if one.hidden is None else one.hidden.grad
        own = gradients_of(one.stage)
        for name, parameter in one.stage.named_parameters():
            found[name] = found.get(name, 0.0) + own.get(name, torch.zeros_like(parameter))
    return found


def of_tokens(spec: ModelSpec) -> Trial:
    """Make a trial of two sequences, for a language model."""
    ids = torch.arange(2 * 12).reshape(2, 12) % (spec.language.vocabulary - 1) + 1
    width = spec.language.hidden_size

    def hidden(stage: nn.Module) -> torch.Tensor:
        state: torch.Tensor = stage.base_model(input_ids=ids, use_cache=False)[0]  # type: ignore[operator]
        if tuple(state.shape) != (*ids.shape, width):
            seen = f"a block gives a hidden state of shape {list(state.shape)}"
            raise _CannotCut(f"{seen}, and stages send [batch, sequence, {width}] alone")
        return state

    return Trial(lambda model: model(input_ids=ids, use_cache=False).logits, hidden)


class _CannotCut(Exception):
    pass


def runs_outside(
    model: nn.Module, spec: ModelSpec, trial: Trial
) -> tuple[dict[str, list[str]], int, torch.Tensor]:
    """Run the whole model; return where each module outside the blocks is called, in order.

    Also returns the number of values of a block (`StageBoundary.tuples`), and the output.
    """
    blocks = {model.get_submodule(name): index for index, name in enumerate(spec.blocks)}
    called: dict[str, list[str]] = {}
    place, tuples = "before", 0

    def enter(name: str) -> Any:
        return lambda module, inputs: called.setdefault(name, []).append(place)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal place, tuples
        place = "after" if blocks[module] + 1 == len(blocks) else "between"
        tuples = len(output) if isinstance(output, tuple | list) else 0

    for block in blocks:
        block.register_forward_hook(leave)
    for name, module in _modules_outside(model, spec.blocks).items():
        module.register_forward_pre_hook(enter(name))
    output = trial.output(model)
    return called, tuples, output


def _survey(model: nn.Module, spec: ModelSpec, trial: Trial) -> tuple[StageBoundary, torch.Tensor]:
    """Run the whole model; return where modules outside the blocks are called, and the output."""
    outside = _modules_outside(model, spec.blocks)
    runs, tuples, output = runs_outside(model, spec, trial)
    called = {name: set(places) for name, places in runs.items()}
    owners = [name for name, module in outside.items() if owns_parameters(module)]
    for name in owners:
        if any(block.startswith(f"{name}.") for block in spec.blocks) or not name:
            raise _CannotCut(f"{name or spec.name} has parameters beside its blocks")
        places = called.get(name, set())
        if places not in ({"before"}, {"after"}, set()):
            where = " and ".join(sorted(places))
            raise _CannotCut(f"{name} runs {where}, not once before or after all blocks")
    # modules that text never runs stay with the first stage, whole: their parts may read one
    # another's weights
    run = (*called, *spec.blocks)
    before = [name for name, _ in model.named_modules() if name and not _overlaps(name, run)]
    before += [name for name in owners if called.get(name, set()) != {"after"}]
    before = outermost([name for name in dict.fromkeys(before) if _overlaps(name, owners)])
    after = outermost([name for name, places in called.items() if places == {"after"}])
    around = [name for name, places in called.items() if places == {"before", "after"}]
    around = [name for name in around if name not in owners]
    return StageBoundary(tuple(before), tuple(after), tuples, tuple(around)), output


def _modules_outside(model: nn.Module, blocks: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that do work of their own and belong to no block."""
    inside = tuple(f"{block}." for block in blocks)
    return {
        name: module
        for name, module in model.named_modules()
        if not f"{name}.".startswith(inside)
        and (owns_parameters(module) or not any(module.children()))
    }


def owns_parameters(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())


def _overlaps(name: str, others: Sequence[str]) -> bool:
    """Return True if one of the other modules is this one, contains it or is inside it."""
    own, dotted = f"{name}.", [f"{other}." for other in others]
    return any(other.startswith(own) or own.startswith(other) for other in dotted)
