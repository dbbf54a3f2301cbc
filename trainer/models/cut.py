"""A model cut into pipeline stages: each is the model itself, with a stand-in for every block of another stage.

So rotary embeddings, masks, windows and soft caps stay the model's own code, and no parameter changes its name.
Every stage runs the whole forward on the micro-batch's ids; what the stage before computed takes the place of
whatever stands in front of its first block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.errors import ConfigError, Problem
from trainer.models.materialise import materialise
from trainer.models.spec import ModelSpec


@dataclass(frozen=True)
class Anatomy:
    """Where in a model's forward the modules run that are not part of a block."""

    before: tuple[str, ...]
    """Those with parameters."""
    after: tuple[str, ...]
    """Those with parameters, and norms without."""
    tuples: int
    """How many values a block returns; 0 for a bare tensor."""


class Inlet:
    """Where a stage finds the hidden state [batch, sequence, hidden] that the stage before it sent."""

    hidden: torch.Tensor | None = None


class _Passed(nn.Module):
    """In place of a block, a norm or a head of another stage: gives its first argument back."""

    def __init__(self, tuples: int = 0) -> None:
        super().__init__()
        self._tuples = tuples

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else next(iter(kwargs.values()))
        return (hidden, *[None] * (self._tuples - 1)) if self._tuples else hidden


class _Received(_Passed):
    """In place of what stands right before this stage's first block, and of the input tables."""

    def __init__(self, inlet: Inlet, tuples: int = 0) -> None:
        super().__init__(tuples)
        self._inlet = inlet

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self._inlet.hidden)


def cut(model: nn.Module, spec: ModelSpec, anatomy: Anatomy, blocks: range) -> Inlet:
    """Leave of `model`, in place, what runs with `blocks`; the first keeps the tables, the last norm and head.

    The last stage keeps an input table, too, if the head is tied to it: the parameter is then on both.
    """
    inlet, first, last = Inlet(), blocks.start == 0, blocks.stop == len(spec.blocks)
    for index, name in enumerate(spec.blocks):
        if index not in blocks:
            block = model.get_submodule(name)
            kind = _Received(inlet, anatomy.tuples) if index == blocks.start - 1 else _Passed(anatomy.tuples)
            # a model may ask a block what kind of mask it wants
            vars(kind).update({k: v for k, v in vars(block).items() if isinstance(v, str) and not k.startswith("_")})
            model.set_submodule(name, kind)
    needed = {spec.tied[alias].rpartition(".")[0] for alias in spec.tied if alias.rpartition(".")[0] in anatomy.after}
    for name in anatomy.before if not first else ():
        if not (last and name in needed):
            table = isinstance(model.get_submodule(name), nn.Embedding)
            model.set_submodule(name, _Received(inlet) if table else _Passed())
    for name in anatomy.after if not last else ():
        model.set_submodule(name, _Passed())
    return inlet


def prove(spec: ModelSpec, stages: int) -> Anatomy:
    """Cut a tiny copy of the model, one stage a block, and see that it computes the very logits of the whole.

    Raises ConfigError, with the reason, for a model that can't be cut so or has fewer blocks than `stages`.
    """
    if len(spec.blocks) < stages:
        seen = f"{len(spec.blocks)} blocks for {stages} pipeline stages"
        raise ConfigError(Problem(f"pipeline.stages: {spec.name}", seen, "at least one block for each stage"))
    try:
        small = spec.shrunk() if spec.shrunk else spec
        whole = _real(small)
        ids = torch.arange(2 * 12).reshape(2, 12) % (small.vocabulary - 1) + 1
        anatomy, expected = _survey(whole, small, ids)
        found: set[str] = set()
        hidden = torch.empty(0)
        for index in range(len(small.blocks)):
            stage = _real(small)
            inlet = cut(stage, small, anatomy, range(index, index + 1))
            inlet.hidden = hidden
            found |= dict(stage.named_parameters()).keys()
            with torch.no_grad():
                if index + 1 < len(small.blocks):
                    hidden = stage.base_model(input_ids=ids, use_cache=False)[0]  # type: ignore[operator]
                else:
                    hidden = stage(input_ids=ids, use_cache=False).logits
        wrong = "" if torch.equal(hidden, expected) else "other logits than the whole model"
        if lost := dict(whole.named_parameters()).keys() - found:
            wrong = f"no stage for {min(lost)}"
    except _CannotCut as reason:
        wrong = str(reason)
    except Exception as error:  # whatever a model's own code raises when its blocks are gone
        wrong = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if wrong:
        place, mend = f"pipeline.stages: {spec.name}", "Set pipeline.stages to 1."
        raise ConfigError(Problem(place, f"cut into stages: {wrong}", "the same logits", mend))
    return anatomy


class _CannotCut(Exception):
    pass


def _real(spec: ModelSpec) -> nn.Module:
    model = spec.build()
    materialise(model, spec, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    return model.eval()


def _survey(model: nn.Module, spec: ModelSpec, ids: torch.Tensor) -> tuple[Anatomy, torch.Tensor]:
    """Run the whole model, and note when each module outside the blocks is called."""
    blocks = {model.get_submodule(name): index for index, name in enumerate(spec.blocks)}
    called: dict[str, set[str]] = {}
    place, tuples = "before", 0

    def enter(name: str) -> Any:
        return lambda module, inputs: called.setdefault(name, set()).add(place)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal place, tuples
        place = "after" if blocks[module] + 1 == len(blocks) else "between"
        tuples = len(output) if isinstance(output, tuple) else 0

    for block in blocks:
        block.register_forward_hook(leave)
    outside = {name: module for name, module in model.named_modules() if _is_outside(name, module, spec.blocks)}
    owners = {name for name, module in outside.items() if any(p is not None for p in module._parameters.values())}
    for name, module in outside.items():
        module.register_forward_pre_hook(enter(name))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    for name in owners:
        if any(block.startswith(f"{name}.") for block in spec.blocks) or not name:
            raise _CannotCut(f"{name or spec.name} has parameters beside its blocks")
        if (places := called.get(name, set())) not in ({"before"}, {"after"}):
            raise _CannotCut(
                f"{name} runs {' and '.join(sorted(places)) or 'never'}, not once before or after all blocks"
            )
    return Anatomy(
        tuple(name for name, places in called.items() if places == {"before"} and name in owners),
        tuple(name for name, places in called.items() if places == {"after"}),
        tuples,
    ), logits


def _is_outside(name: str, module: nn.Module, blocks: Sequence[str]) -> bool:
    """Whether a module does work of its own, and belongs to no block."""
    works = any(p is not None for p in module._parameters.values()) or not any(module.children())
    return works and not any(f"{name}.".startswith(f"{block}.") for block in blocks)
