"""Sums of modules' outputs over tokens, without padding; they locate an error in a forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from trainer.distributed.autograd import in_backward
from trainer.distributed.context_ranks import Division
from trainer.models.cut import is_whole
from trainer.models.spec import ModelSpec
from trainer.parallel.splits.expert_loads import biases_of

Outputs = dict[tuple[int, int, str], torch.Tensor]
"""Sums and sums of squares, [2, features], in order of execution; by the part of the sequences
(`parts_of`), the micro-batch and the module."""
Tokens = Mapping[tuple[int, int], torch.Tensor | None]
"""Token ids by part and micro-batch; those that are not 0 count in sums. None: all tokens count."""
LEAST = 1e-2
"""The least norm that a feature's error is relative to, as a share of the largest feature's."""


def parts_of(
    ids: torch.Tensor, data_rank: int, division: Division, start: int = 0, row: int = 0
) -> dict[int, torch.Tensor]:
    """Return the ids [batch, sequence] of each context-parallel rank, with 0 for others' tokens.

    The keys number the parts of all data ranks: data rank x ranks that share sequences + rank.
    `start` is the first token's place in sequences of `row` tokens; `row` 0: the ids are whole.
    """
    places = torch.arange(row or ids.shape[1], device=ids.device)[None]
    ranks = division.size
    here = places[0, start : start + ids.shape[1]]
    own = [torch.isin(here, division.part(places, rank, fill=-1)) for rank in range(ranks)]
    return {data_rank * ranks + rank: ids * own[rank] for rank in range(ranks)}


class Listener:
    """Sums the outputs of modules with parameters, except those inside the modules `closed`.

    Recomputed activations are left out, and so are passes without gradients, in which a task looks
    ahead.
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
        """Listen to the next forward passes, one for each micro-batch of `parts`."""
        self._parts = parts
        self._calls = Counter()
        self._found = {}

    def end(self) -> Outputs:
        """Stop, and return the sums of the modules that ran exactly once for each micro-batch."""
        count = len(self._parts)
        self._parts = ()
        return {key: value for key, value in self._found.items() if self._calls[key[2]] == count}

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            if in_backward() or not torch.is_grad_enabled():
                return
            number = self._calls[name]
            # also counted beyond the last micro-batch: `end` drops a module that several stages run
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
    """Counts a step's tokens that choose each expert, and updates routers' biases by the counts.

    This is algorithm 1 of arXiv 2408.15664.
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
        """Raise by the rate each bias of an expert with less than the mean load; lower others'."""
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
    if tokens is None:  # your own module: features are last; channels of images come second
        value = value.movedim(1, -1) if value.dim() > 3 else value
        return value.flatten(0, -2)
    fits = value.dim() == 3 and len(value) == len(tokens) and value.shape[1] >= tokens.shape[1]
    return value[:, : tokens.shape[1]][tokens != 0] if fits else None


def differences(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return each feature's larger difference, of its sum or of its norm over the tokens.

    Absolute, [features].
    """
    sums = (ours[0] - theirs[0]).abs()
    norms = (ours[1].sqrt() - theirs[1].sqrt()).abs()
    return torch.maximum(sums, norms)


def scales(theirs: torch.Tensor) -> torch.Tensor:
    """Return what each feature's difference is relative to: its norm over the tokens, [features].

    It is at least LEAST of the largest feature's.
    """
    norm = theirs[1].sqrt()
    return norm.clamp_min(max(LEAST * float(norm.max()), 1e-30))


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
