"""A tiny copy split over ranks that are threads, compared with the whole copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier, BrokenBarrierError, Lock
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.distributed.exchange import Exchange, Move
from trainer.errors import Raised, attempt, named_line
from trainer.models.names import differing, gradients_of, pattern_of
from trainer.models.spec import ModelSpec
from trainer.parallel.splits.experts import Part
from trainer.probes.inputs import sequence_of
from trainer.probes.probe import TOLERANCE, drawn, own_randomness, tiny_spec

if TYPE_CHECKING:
    from torch._ops import OpOverload

Split = Callable[[nn.Module, ModelSpec, Exchange, Part], None]
"""Splits a model in place."""
SECONDS = 60
"""How long a rank waits for another one's part of an exchange."""
_generator = Lock()


def _loss(model: nn.Module, spec: ModelSpec) -> torch.Tensor:
    """Return a loss over what the model is tried on; a language model's over two sequences, the
    number of whose tokens two ranks do not divide.
    """
    if spec.tiny.input is not None:
        return spec.tiny.input.output(model).float().square().mean()
    sequence = sequence_of(spec)[:-1]
    ids = torch.stack([sequence, sequence.flip(0)])
    return model(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]


def difference(
    spec: ModelSpec,
    ranks: int,
    split: Split,
    is_partial: Callable[[ModelSpec], Callable[[str], bool]],
) -> str | None:
    """Return in words where a tiny copy in parts first differs from the whole, or None.

    Compares, on the fewest ranks that divide `ranks`, loss, gradients, and where random numbers are
    drawn. `is_partial` tells by name if each rank has a term of a whole parameter's gradient.
    """
    size = next(n for n in range(2, ranks + 1) if ranks % n == 0)
    small = tiny_spec(spec, split=size)
    styles = {pattern_of(name): style for name, style in spec.language.tensor_plan.items()}
    model = small.build()
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    plan = {name: styles[pattern_of(name)] for name in names if pattern_of(name) in styles}
    small = replace(small, language=replace(small.language, tensor_plan=plan))
    slots: list[object] = [None] * size
    barrier = Barrier(size)
    with own_randomness(), ThreadPoolExecutor(size) as threads:
        whole, *parts = (_Pass(small, _RankThread(n, slots, barrier)) for n in (0, *range(size)))
        errors = [whole.run(), *threads.map(lambda part: part.run(split), parts)]
    failed = sorted(filter(None, errors), key=lambda error: isinstance(error, BrokenBarrierError))
    if failed:
        return f"a tiny copy of it fails in parts: {named_line(failed[0])}"
    for name in filter(is_partial(small), whole.gradients):
        terms = [part.gradients[name] for part in parts if name in part.gradients]
        for part in parts if terms else ():
            part.gradients[name] = torch.stack(terms).sum(0)
    return next((actual for part in parts for actual in part.differences(whole)), None)


class _RankThread(Exchange):
    """The exchanges of a rank that is a thread."""

    group: Any

    def __init__(self, rank: int, slots: list[object], barrier: Barrier) -> None:
        def all_of(own: object) -> list[object]:
            slots[rank] = own
            barrier.wait(SECONDS)
            given = list(slots)
            barrier.wait(SECONDS)
            return given

        sizes = {"rank": lambda: rank, "size": lambda: len(slots)}
        super().__init__(SimpleNamespace(**sizes, all=all_of, abort=barrier.abort))  # type: ignore[arg-type]

    def begin_sum(self, term: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.group.all(term)).sum(0)

    def land(self, begun: torch.Tensor) -> torch.Tensor:
        return begun  # nothing is under way

    def _all_gather_first(self, first: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.group.all(first))

    def _reduce_scatter_first(self, first: torch.Tensor) -> torch.Tensor:
        return self.begin_sum(first).chunk(self.group.size())[self.group.rank()]

    def _moved(self, sent: Sequence[int], received: Sequence[int]) -> Move:
        def moved(rows: torch.Tensor) -> torch.Tensor:
            by_rank = self.group.all(rows.split([*sent]))
            return torch.cat([parts[self.group.rank()] for parts in by_rank])

        return moved


class _Pass(TorchDispatchMode):
    """A forward and backward pass, in which all ranks draw the same random numbers.

    Notes what modules give, and for which shapes numbers are drawn in which module.
    """

    def __init__(self, spec: ModelSpec, ranks: _RankThread) -> None:
        super().__init__()
        self.model = drawn(spec).train()
        self.gradients = dict[str, torch.Tensor]()
        self._spec = spec
        self._ranks = ranks
        self._loss = torch.empty(0)
        self._outputs = dict[str, torch.Tensor]()
        self._dims = dict[nn.Parameter, int]()
        """The dimension along which a parameter is a part of a whole one."""
        self._draws = list[tuple[str, list[int]]]()
        """The module and the shape of each draw."""
        self._places = [""]
        """The modules that run, the innermost last."""
        self._state = torch.Generator().manual_seed(1).get_state()
        for name, module in self.model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._places.append(name))
            module.register_forward_hook(self._leave)

    def run(self, split: Split | None = None) -> Exception | None:
        """Run both passes."""
        result = attempt(lambda: self._losses(split))
        if isinstance(result, Raised):
            self._ranks.group.abort()
            return result.error
        self._loss = result
        self.gradients = gradients_of(self.model)
        return None

    def _losses(self, split: Split | None) -> torch.Tensor:
        if split is not None:
            split(self.model, self._spec, self._ranks, self._take)
        with self:
            loss = _loss(self.model, self._spec)
            loss.backward()
        return loss.detach()

    def _take(self, whole: nn.Parameter, dim: int) -> nn.Parameter:
        part = nn.Parameter(self._own(whole.data, dim), requires_grad=whole.requires_grad)
        self._dims[part] = dim
        return part

    def _own(self, whole: torch.Tensor, dim: int | None) -> torch.Tensor:
        group = self._ranks.group
        return whole if dim is None else whole.chunk(group.size(), dim)[group.rank()].clone()

    def differences(self, whole: _Pass) -> Iterator[str]:
        """Yield in words where this rank differs from one process, the first place first."""
        both = min(len(self._draws), len(whole._draws))
        draws = zip(self._draws[:both], whole._draws[:both], strict=True)
        for (place, shape), (_, expected) in draws:
            if shape != expected:
                shapes = f"for {shape} on a rank, where one process draws for {expected}"
                place = pattern_of(place)
                yield f"{place} draws random numbers (dropout) inside what is split: {shapes}"
        dims = {name: self._dims.get(p) for name, p in self.model.named_parameters()}
        ours = {"": self._loss} | dict(reversed(self.gradients.items()))
        theirs = {name: self._own(g, dims[name]) for name, g in reversed(whole.gradients.items())}
        wrong = differing(ours, {"": whole._loss} | theirs, 10 * TOLERANCE)
        for name, output in whole._outputs.items() if wrong else ():
            given = self._outputs.get(name, output)
            like = output if given.shape == output.shape else self._ranks.scatter(output, 1)
            if given.shape == like.shape and differing({"": given}, {"": like}, 10 * TOLERANCE):
                yield f"{pattern_of(name)} computes something else when it is split over ranks"
        if wrong:
            what = f"the gradient of {pattern_of(wrong[0])}" if wrong[0] else "the loss"
            yield f"{what} differs when it is split over ranks, by {wrong[1]:.1e}"

    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple) else output
        name = self._places.pop()
        if torch.is_tensor(first) and first.is_floating_point() and first.dim() > 1:
            self._outputs[name] = first.detach()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        with _generator:
            torch.set_rng_state(self._state)
            result = func(*args, **(kwargs or {}))
            state = self._state
            self._state = torch.get_rng_state()
        if not torch.equal(state, self._state):
            self._draws.append((self._places[-1], list(tree_leaves(result)[0].shape)))
        return result
