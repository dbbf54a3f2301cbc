"""The trial of a split: a tiny copy on ranks that are threads, against the whole copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier, BrokenBarrierError, Lock
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.distributed.exchange import Exchange, Move
from trainer.errors import named_line
from trainer.models.names import differing, gradients_of, pattern_of
from trainer.models.spec import ModelSpec
from trainer.trial.setup import TOLERANCE, drawn, own_randomness, row_of

Part = Callable[[nn.Parameter, int], nn.Parameter]
"""Returns this rank's part of a whole parameter, along a dimension."""
Split = Callable[[nn.Module, ModelSpec, Exchange, Part], None]
"""Splits a model in place."""
SECONDS = 60
"""How long a rank waits for another one's part of an exchange."""
_drawing = Lock()


def difference(
    spec: ModelSpec,
    size: int,
    split: Split,
    is_partial: Callable[[ModelSpec], Callable[[str], bool]],
) -> str | None:
    """Return in words where a tiny copy on `size` ranks first differs from the whole, or None.

    Compares loss, gradients, and where random numbers are drawn. `is_partial` returns whether each
    rank has a term of the gradient of a whole parameter of a model, by name.
    """
    small = spec.tiny.copy(split=size) if spec.tiny.copy else spec
    styles = {pattern_of(name): style for name, style in spec.language.tensor_plan.items()}
    model = small.build()
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    plan = {name: styles[pattern_of(name)] for name in names if pattern_of(name) in styles}
    small = replace(small, language=replace(small.language, tensor_plan=plan))
    slots, barrier = [torch.empty(0)] * size, Barrier(size)
    with own_randomness():
        whole, *parts = (_Pass(small, _Rank(n, slots, barrier)) for n in (0, *range(size)))
        try:
            whole.run()
            for part in parts:
                split(part.model, small, part.threads, part.take)
            with ThreadPoolExecutor(size) as threads:
                runs = [threads.submit(part.run) for part in parts]
            errors = [error for run in runs if (error := run.exception())]
            if errors:
                raise next((e for e in errors if type(e) is not BrokenBarrierError), errors[0])
        except Exception as error:  # whatever a model's own code raises
            return f"a tiny copy of it fails in parts: {named_line(error)}"
    for name in filter(is_partial(small), whole.gradients):
        terms = [part.gradients[name] for part in parts if name in part.gradients]
        for part in parts if terms else ():
            part.gradients[name] = torch.stack(terms).sum(0)
    return next((seen for part in parts for seen in part.differences(whole)), None)


class _Rank:
    """The group of ranks that are threads, as one of them sees it."""

    def __init__(self, rank: int, slots: list[torch.Tensor], barrier: Barrier) -> None:
        self._rank, self._slots, self.barrier = rank, slots, barrier

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._slots)

    def all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return what each rank gives. Collective."""
        self._slots[self._rank] = tensor
        self.barrier.wait(SECONDS)
        given = list(self._slots)
        self.barrier.wait(SECONDS)
        return given


class _Threads(Exchange):
    """Exchanges of ranks that are threads."""

    group: Any  # a `_Rank`

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.group.all(tensor)).sum(0)

    def _gathered(self, dim: int, length: int) -> Move:
        return lambda part: torch.cat(self.group.all(part), dim).narrow(dim, 0, length)

    def _scattered(self, dim: int) -> Move:
        return lambda term: self._part(self._sum(term), dim)


class _Pass(TorchDispatchMode):
    """A forward and backward pass, in which all ranks draw the same random numbers.

    Notes what modules give, and for which shapes numbers are drawn in which module.
    """

    def __init__(self, spec: ModelSpec, rank: _Rank) -> None:
        super().__init__()
        self.model, self.threads = drawn(spec).train(), _Threads(rank)  # type: ignore[arg-type]
        self._row, self._rank = row_of(spec)[:-1], rank
        self.loss, self.gradients = torch.empty(0), dict[str, torch.Tensor]()
        self._outputs, self._dims = dict[str, torch.Tensor](), dict[nn.Parameter, int]()
        self._draws, self._places = list[tuple[str, list[int]]](), [""]
        self._state = torch.Generator().manual_seed(1).get_state()
        for name, module in self.model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._places.append(name))
            module.register_forward_hook(self._leave)

    def take(self, whole: nn.Parameter, dim: int) -> nn.Parameter:
        """Return this rank's part of a parameter."""
        part = nn.Parameter(self._chunk(whole.data, dim), requires_grad=whole.requires_grad)
        self._dims[part] = dim
        return part

    def _chunk(self, whole: torch.Tensor, dim: int | None) -> torch.Tensor:
        parts = (whole,) if dim is None else whole.chunk(self._rank.size(), dim)
        return parts[self._rank.rank() if dim is not None else 0].clone()

    def run(self) -> None:
        """Run both passes on two rows, the number of whose tokens two ranks do not divide."""
        ids = torch.stack([self._row, self._row.flip(0)])
        try:
            with self:
                loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
        except BaseException:
            self._rank.barrier.abort()
            raise
        self.loss, self.gradients = loss.detach(), gradients_of(self.model)

    def differences(self, whole: _Pass) -> Iterator[str]:
        """Yield in words where this rank differs from one process, the first place first."""
        for (place, shape), (_, expected) in zip(self._draws, whole._draws, strict=False):
            if shape != expected:
                yield (
                    f"{pattern_of(place)} draws random numbers (dropout) inside what is split: for "
                    f"{shape} on a rank, where one process draws for {expected}"
                )
        dims = {name: self._dims.get(p) for name, p in self.model.named_parameters()}
        gradients = {name: self._chunk(g, dims[name]) for name, g in whole.gradients.items()}
        wrong = differing(
            {"": self.loss} | dict(reversed(self.gradients.items())),
            {"": whole.loss} | dict(reversed(gradients.items())),
            10 * TOLERANCE,
        )
        if wrong is None:
            return
        for name, output in whole._outputs.items():
            given = self._outputs.get(name, output)
            like = output if given.shape == output.shape else self.threads.divide(output, 1)
            if given.shape == like.shape and differing({"": given}, {"": like}, 10 * TOLERANCE):
                yield f"{pattern_of(name)} gives something else on ranks that have a part each"
        name, error = wrong
        what = f"the gradient of {pattern_of(name)}" if name else "the loss"
        yield f"{what} is another on ranks that have a part each, by {error:.1e}"

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if torch.is_tensor(first) and first.is_floating_point() and first.dim() > 1:
            self._outputs[self._places[-1]] = first.detach()
        self._places.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        with _drawing:
            torch.set_rng_state(self._state)
            result = func(*args, **(kwargs or {}))
            state, self._state = self._state, torch.get_rng_state()
        if not torch.equal(state, self._state):
            self._draws.append((self._places[-1], list(tree_leaves(result)[0].shape)))
        return result
