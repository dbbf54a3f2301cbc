"""A model cut into pipeline stages: each is the model itself, with a stand-in for every block of
another stage.

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
from trainer.models.materialise import materialise
from trainer.models.spec import ModelSpec, Trial


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
    """The place where a stage finds the hidden state [batch, sequence, hidden] that the stage
    before it sent.
    """

    hidden: torch.Tensor | None = None


class _Passed(nn.Module):
    """A stand-in for a block, norm or head of another stage: returns its first argument."""

    def __init__(self, tuples: int = 0) -> None:
        super().__init__()
        self._tuples = tuples

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else next(iter(kwargs.values()))
        return (hidden, *[None] * (self._tuples - 1)) if self._tuples else hidden


class _UntilBlocks(nn.Module):
    """A stand-in for a module on both sides of the blocks: behind this stage's last block it
    returns its input.
    """

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
    """A stand-in for an input table or projection: gives zeros in its shape, which nothing of this
    stage reads.
    """

    def __init__(self, stage_input: StageInput, width: int, table: bool) -> None:
        super().__init__()
        self._stage_input, self._width, self._table = stage_input, width, table

    @property
    def weight(self) -> torch.Tensor | None:
        """The hidden state: some models ask a table for its device and dtype."""
        return self._stage_input.hidden

    def forward(self, given: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert self._stage_input.hidden is not None
        return self._stage_input.hidden.new_zeros(
            *(given.shape if self._table else given.shape[:-1]), self._width
        )


class _Received(_Passed):
    """A stand-in for the block right before this stage's first: gives the hidden state that was
    received.
    """

    def __init__(self, stage_input: StageInput, tuples: int = 0) -> None:
        super().__init__(tuples)
        self._stage_input = stage_input

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self._stage_input.hidden)


def is_whole(module: nn.Module) -> bool:
    """Return False if another stage has a part of the module."""
    return not any(isinstance(part, _Passed | _Blank | _UntilBlocks) for part in module.modules())


def cut(model: nn.Module, spec: ModelSpec, boundary: StageBoundary, blocks: range) -> StageInput:
    """Reduce `model`, in place, to the stage of these `blocks`; the first keeps the tables, the
    last norm and head.

    The last stage keeps an input table, too, if the head is tied to it: the parameter is then on
    both stages.
    """
    stage_input, first, last = StageInput(), blocks.start == 0, blocks.stop == len(spec.blocks)
    for index, name in enumerate(spec.blocks):
        if index not in blocks:
            block = model.get_submodule(name)
            kind: nn.Module = (
                _Received(stage_input, boundary.tuples)
                if index == blocks.start - 1
                else _Passed(boundary.tuples)
            )
            # a model may ask a block what kind of mask it wants
            words = {
                k: v
                for part in (*reversed(type(block).__mro__), block)
                for k, v in vars(part).items()
            }
            vars(kind).update(
                {k: v for k, v in words.items() if isinstance(v, str) and not k.startswith("_")}
            )
            model.set_submodule(name, kind)
    kept = kept_for_the_head(spec, boundary)
    for name in boundary.before if not first else ():
        if not (last and name in kept):
            module = model.get_submodule(name)
            width = getattr(module, "embedding_dim", None) or getattr(module, "out_features", None)
            kind = (
                _Blank(stage_input, width, isinstance(module, nn.Embedding))
                if isinstance(width, int)
                else _Passed()
            )
            model.set_submodule(name, kind)
    for name in boundary.after if not last else ():
        model.set_submodule(name, _Passed())
    for name in boundary.around if not last else ():
        whole, last_block = (
            getattr(model, "base_model", model),
            model.get_submodule(spec.blocks[blocks.stop - 1]),
        )
        model.set_submodule(name, _UntilBlocks(model.get_submodule(name), whole, last_block))
    return stage_input


def kept_for_the_head(spec: ModelSpec, boundary: StageBoundary) -> set[str]:
    """Return the modules before the blocks that the last stage keeps, too, since its head is tied
    to them.
    """
    after = tuple(f"{name}." for name in boundary.after)
    needed = {
        owner.rpartition(".")[0] for alias, owner in spec.tied.items() if alias.startswith(after)
    }
    return needed & set(boundary.before)


def check_cut(spec: ModelSpec, stages: int) -> StageBoundary:
    """Check on a tiny copy, cut into one stage a block, that the stages compute the whole model's
    logits and gradients.

    Raises ConfigError, with the reason, for a model that can't be cut so or has fewer blocks than
    `stages`.
    """
    if len(spec.blocks) < stages:
        seen = f"{len(spec.blocks)} blocks for {stages} pipeline stages"
        raise ConfigError(
            Problem(f"pipeline.stages: {spec.name}", seen, "at least one block for each stage")
        )
    try:
        small = spec.tiny.copy() if spec.tiny.copy else spec
        boundary, wrong = _try(small)
    except _CannotCut as reason:
        wrong = str(reason)
    except Exception as error:  # whatever a model's own code raises when its blocks are gone
        wrong = named_line(error)
    if wrong:
        place, mend = f"pipeline.stages: {spec.name}", "Set pipeline.stages to 1."
        raise ConfigError(
            Problem(place, f"cut into stages: {wrong}", "the same logits and gradients", mend)
        )
    return boundary


def _try(spec: ModelSpec) -> tuple[StageBoundary, str]:
    """Compare stages of one block each with the whole model, forward and backward; return what
    differs, if anything.
    """
    whole, trial = _real(spec), spec.tiny.input or of_tokens(spec)
    boundary, expected = _survey(whole, spec, trial)
    found: dict[str, torch.Tensor] = {}
    stages: list[nn.Module] = []
    given: list[torch.Tensor | None] = []
    made: list[torch.Tensor] = []
    for index in range(len(spec.blocks)):
        stages.append(spec.build())
        stage_input = cut(stages[-1], spec, boundary, range(index, index + 1))
        _fill(
            stages[-1], spec
        )  # after the cut, as engines do: an initialiser may refer to a module that was cut away
        stage_input.hidden = made[-1].detach().requires_grad_() if made else None
        given.append(stage_input.hidden)
        if index + 1 < len(spec.blocks):
            made.append(trial.hidden(stages[-1]))
            if not isinstance(made[-1], torch.Tensor):
                return (
                    boundary,
                    f"what it gives is a {type(made[-1]).__name__}, and a stage sends one tensor",
                )
        else:
            made.append(trial.output(stages[-1]))
    if not torch.equal(made[-1], expected):
        return (
            boundary,
            "other logits than the whole model: a block reads more than the block before it gives",
        )
    weight = torch.sin(torch.arange(expected.numel()).reshape(expected.shape))
    (expected * weight).sum().backward()
    gradient: torch.Tensor | None = weight
    for stage, hidden, output in zip(
        reversed(stages), reversed(given), reversed(made), strict=True
    ):
        if output.requires_grad:  # else every parameter up to here is frozen
            output.backward(gradient)
        gradient = None if hidden is None else hidden.grad
        for name, parameter in stage.named_parameters():
            earlier = found.get(name, 0.0)
            found[name] = earlier + (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
    for name, parameter in whole.named_parameters():
        if name not in found:
            return boundary, f"no stage for {name}"
        theirs = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if not torch.allclose(
            found[name], theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()) + 1e-7
        ):
            return boundary, f"another gradient of {name} than the whole model"
    return boundary, ""


def of_tokens(spec: ModelSpec) -> Trial:
    """Make a trial of two rows of tokens, for a language model."""
    ids = torch.arange(2 * 12).reshape(2, 12) % (spec.language.vocabulary - 1) + 1

    def hidden(stage: nn.Module) -> torch.Tensor:
        state: torch.Tensor = stage.base_model(input_ids=ids, use_cache=False)[0]  # type: ignore[operator]
        if tuple(state.shape) != (wanted := (*ids.shape, spec.language.hidden_size)):
            seen = f"a block gives a hidden state of shape {list(state.shape)}"
            raise _CannotCut(f"{seen}, and stages send [batch, sequence, {wanted[-1]}] alone")
        return state

    return Trial(lambda model: model(input_ids=ids, use_cache=False).logits, hidden)


class _CannotCut(Exception):
    pass


def _real(spec: ModelSpec) -> nn.Module:
    return _fill(spec.build(), spec)


def _fill(model: nn.Module, spec: ModelSpec) -> nn.Module:
    materialise(model, spec, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    return model.eval()


def _survey(model: nn.Module, spec: ModelSpec, trial: Trial) -> tuple[StageBoundary, torch.Tensor]:
    """Run the whole model, and note when each module outside the blocks is called; return that and
    the output.
    """
    blocks = {model.get_submodule(name): index for index, name in enumerate(spec.blocks)}
    called: dict[str, set[str]] = {}
    place, tuples = "before", 0

    def enter(name: str) -> Any:
        return lambda module, inputs: called.setdefault(name, set()).add(place)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal place, tuples
        place = "after" if blocks[module] + 1 == len(blocks) else "between"
        tuples = len(output) if isinstance(output, tuple | list) else 0

    for block in blocks:
        block.register_forward_hook(leave)
    outside = {
        name: module
        for name, module in model.named_modules()
        if _is_outside(name, module, spec.blocks)
    }
    owners = {
        name
        for name, module in outside.items()
        if any(p is not None for p in module._parameters.values())
    }
    for name, module in outside.items():
        module.register_forward_pre_hook(enter(name))
    output = trial.output(model)
    for name in owners:
        if any(block.startswith(f"{name}.") for block in spec.blocks) or not name:
            raise _CannotCut(f"{name or spec.name} has parameters beside its blocks")
        if (places := called.get(name, set())) not in ({"before"}, {"after"}, set()):
            raise _CannotCut(
                f"{name} runs {' and '.join(sorted(places))}, not once before or after all blocks"
            )
    # modules that text never runs stay with the first stage, whole: their parts may read one
    # another's weights
    idle = [
        name
        for name, _ in model.named_modules()
        if name and not _holds(name, (*called, *spec.blocks))
    ]
    before = [
        name
        for name in outside
        if called.get(name, set()) in ({"before"}, set()) and name in owners
    ]
    before = [name for name in dict.fromkeys((*idle, *before)) if _holds(name, tuple(owners))]
    after = [name for name, places in called.items() if places == {"after"}]
    around = tuple(
        name
        for name, places in called.items()
        if places == {"before", "after"} and name not in owners
    )
    return StageBoundary(_outermost(before), _outermost(after), tuples, around), output


def _outermost(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def _holds(name: str, others: Sequence[str]) -> bool:
    """Return True if one of the other modules is this one, holds it or is held by it."""
    return any(
        f"{other}.".startswith(f"{name}.") or f"{name}.".startswith(f"{other}.") for other in others
    )


def _is_outside(name: str, module: nn.Module, blocks: Sequence[str]) -> bool:
    """Return True if a module does work of its own and belongs to no block."""
    works = any(p is not None for p in module._parameters.values()) or not any(module.children())
    return works and not any(f"{name}.".startswith(f"{block}.") for block in blocks)
