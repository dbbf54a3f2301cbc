"""Sums of modules' outputs over tokens, without padding, which place a wrong forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from trainer.distributed.context_ranks import Division
from trainer.models.cut import is_whole
from trainer.models.spec import ModelSpec
from trainer.parallel.splits.expert_loads import biases_of

Outputs = dict[tuple[int, int, str], torch.Tensor]
"""Sums, and sums of squares, [2, features], by part of the rows of all data ranks (`parts_of`),
micro-batch and module as executed."""
Tokens = Mapping[tuple[int, int], torch.Tensor | None]
"""The tokens that are listened to, those that are not 0, by part and micro-batch; None for all."""
LEAST = 1e-2
"""Features that are small are measured against this share of the largest."""


def parts_of(
    ids: torch.Tensor, data_rank: int, division: Division, start: int = 0, row: int = 0
) -> dict[int, torch.Tensor]:
    """Return the ids [batch, sequence] with zeros for those of other ranks, for each of the ranks
    that share the rows, by its number among those of all data ranks.

    The first token is at `start` of rows of `row` tokens, by default at 0 of whole ones.
    """
    places = torch.arange(row or ids.shape[1], device=ids.device)[None]
    ranks = division.size
    here = places[0, start : start + ids.shape[1]]
    own = [torch.isin(here, division.part(places, rank, fill=-1)) for rank in range(ranks)]
    return {data_rank * ranks + rank: ids * own[rank] for rank in range(ranks)}


class Listener:
    """Keeps the outputs of modules with parameters, but not those of recomputed activations, nor
    of passes without gradients, in which a task looks ahead.

    Nor of what is inside the modules `closed`.
    """

    def __init__(self, models: Iterable[nn.Module], closed: Sequence[str] = ()) -> None:
        inside = tuple(f"{name}." for name in closed)
        self._parts: Sequence[Tokens] = ()
        self._calls = Counter[str]()
        self._found = Outputs()
        for name, module in (pair for model in models for pair in model.named_modules()):
            if not name or name.startswith(inside):
                continue
            if is_whole(module) and any(True for _ in module.parameters()):
                module.register_forward_hook(self._hook(name))

    def begin(self, parts: Sequence[Tokens]) -> None:
        """Listen to forward passes of so many micro-batches."""
        self._parts = parts
        self._calls = Counter()
        self._found = {}

    def end(self) -> Outputs:
        """Return what was heard since, of modules that ran once for each."""
        count = len(self._parts)
        self._parts = ()
        return {key: value for key, value in self._found.items() if self._calls[key[2]] == count}

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            computed_again = torch._C._current_graph_task_id() >= 0  # in a backward pass
            if computed_again or not torch.is_grad_enabled():
                return
            number = self._calls[name]
            # one too many shows a module that several stages of this rank have
            self._calls[name] += 1
            if number >= len(self._parts):
                return
            value = output[0] if isinstance(output, (tuple, list)) else output
            for place, tokens in self._parts[number].items():
                if (rows := _rows(value, tokens)) is not None:
                    rows = rows.double()
                    sums = torch.stack([rows.sum(0), rows.square().sum(0)])
                    self._found[*place, name] = sums.cpu()

        return hook


class Loads:
    """Counts the tokens of a step that choose each expert, and moves routers' biases by them.

    Algorithm 1 of arXiv 2408.15664.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec, rate: float) -> None:
        state = model.state_dict()
        self._rate = rate
        biases = biases_of(spec) if rate else {}
        self.biases = {name: state[name] for name in biases.values()}
        self.ids = torch.empty(0)
        """The tokens of the forward pass that runs; 0 is padding."""
        for stack, name in biases.items():
            model.get_submodule(stack).register_forward_pre_hook(self._hook(name))

    def begin(self) -> None:
        self._found: dict[str, torch.Tensor] = {}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Keep the counts of the step while other forward passes run."""
        counts = self._found
        yield
        self._found = counts

    def move(self) -> None:
        for name, load in self._found.items():
            bias = self.biases[name]
            bias += self._rate * (load.double().mean() - load).sign().to(bias).view_as(bias)

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if module.training:
                chosen = inputs[1][(self.ids != 0).flatten()].flatten()
                load = torch.bincount(chosen, minlength=self.biases[name].numel())
                self._found[name] = self._found.get(name, torch.zeros_like(load)) + load

        return hook


def _rows(value: object, tokens: torch.Tensor | None) -> torch.Tensor | None:
    if not torch.is_tensor(value) or value.dim() < 2 or not value.is_floating_point():
        return None
    # what is saved for a backward pass here would be missing when a block is computed again
    value = value.detach()
    if tokens is None:  # of an own module: features are last, or the channels of images
        value = value.movedim(1, -1) if value.dim() > 3 else value
        return value.flatten(0, -2)
    fits = value.dim() == 3 and len(value) == len(tokens) and value.shape[1] >= tokens.shape[1]
    return value[:, : tokens.shape[1]][tokens != 0] if fits else None


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference of a feature, relative to its norm over the tokens."""
    norm = theirs[1].sqrt()
    norm = norm.clamp_min(max(LEAST * float(norm.max()), 1e-30))
    return float(((ours - theirs).abs() / torch.stack([norm, norm.square()])).max())


def order_of_computation(
    model: nn.Module, named: Mapping[str, nn.Parameter], first_pass: Callable[[], None]
) -> dict[str, int]:
    """Return the place of each parameter in a forward pass; -1 if it takes no part."""
    called: dict[int, int] = {}

    def note(module: nn.Module, inputs: object) -> None:
        for parameter in module.parameters(recurse=False):
            called.setdefault(id(parameter), len(called))

    hooks = [module.register_forward_pre_hook(note) for module in model.eval().modules()]
    with torch.no_grad():
        first_pass()
    for hook in hooks:
        hook.remove()
    return {name: called.get(id(parameter), -1) for name, parameter in named.items()}
