"""The one mechanism of all probes: build a tiny copy, change something, run, compare.

What a model's own code raises while a probe runs becomes a finding here, and an error in
`Finding.error`, with its place and the reason.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from trainer.distributed.seeding import seed_generators
from trainer.errors import ConfigError, MeshloomError, Problem, Raised, attempt
from trainer.models.materialise import on_host
from trainer.models.names import differing, gradients_of
from trainer.models.spec import ModelSpec

TOLERANCE = 1e-4
"""The relative error allowed in float32, larger than rounding and smaller than any mistake."""

T = TypeVar("T")
Change = Callable[[nn.Module, ModelSpec], T]
"""`change(model, spec)` changes a tiny copy, and returns what is then run."""
Compare = Callable[[nn.Module, T, ModelSpec], "Finding | None"]
"""`compare(plain, changed, spec)` runs both, and returns the first difference, or None."""


@dataclass(frozen=True)
class Finding:
    """The reason why something does not hold for a model."""

    actual: str
    expected: str = ""
    """The expectation, where it differs from that of the question."""
    hint: str = ""
    """Advice to the user, where it differs from that of the question."""
    raised: Exception | None = None
    """The error of the model's own code that this is, if it is one."""

    def error(self, place: str, expected: str, hint: str = "", start: str = "") -> MeshloomError:
        """Return the finding as a ConfigError; an error of this project's own stays what it is.

        `start` comes before what the model's own code raised.
        """
        if isinstance(self.raised, MeshloomError):
            return self.raised
        actual = f"{start}{self.actual}" if self.raised else self.actual
        return ConfigError(Problem(place, actual, self.expected or expected, self.hint or hint))


class Differs(Exception):
    """Raised deep inside a probe, such as in a hook: the message is what the probe finds."""


def probe(
    spec: ModelSpec,
    change: Change[T],
    compare: Compare[T],
    like: tuple[ModelSpec, nn.Module] | None = None,
) -> Finding | None:
    """Compare a changed tiny copy with one that is left as it is; return how they differ.

    Both have the same values: they are built, or copied from `like`, a tiny copy that is there
    already, which is faster. The generators of random numbers are left as they were. Whatever the
    model's own code raises, or a `Differs`, is the finding.
    """

    def compared() -> Finding | None:
        if like is not None:
            small, model = like
            return compare(copy.deepcopy(model), change(copy.deepcopy(model), small), small)
        small, plain = tiny(spec)
        return compare(plain, change(drawn(small), small), small)

    return observe(compared)


def observe(look: Callable[[], T]) -> T | Finding:
    """Return what `look` sees of a model that it runs, or as a finding what was raised meanwhile.

    The generators of random numbers are left as they were.
    """
    with own_randomness():
        result = attempt(look)
    if not isinstance(result, Raised):
        return result
    if isinstance(result.error, Differs):
        return Finding(str(result.error))
    return Finding(result.reason, raised=result.error)


def tiny(spec: ModelSpec) -> tuple[ModelSpec, nn.Module]:
    """Return a tiny copy and its spec, on the CPU in float32; the same values at each call.

    No weight is left at zero: an initial value of zero would hide what it multiplies.
    """
    small = tiny_spec(spec)
    return small, drawn(small)


def tiny_spec(spec: ModelSpec, **sizes: int) -> ModelSpec:
    """Return the spec of a tiny copy, or of the model itself where there is none.

    `sizes`: arguments of `TinyCopies.copy`.
    """
    return spec.tiny.copy(**sizes) if spec.tiny.copy else spec


def drawn(small: ModelSpec) -> nn.Module:
    """Build the tiny model again, so that nothing is left over from an earlier pass."""
    model = on_host(small)
    spread(model, seed=0)
    return model


def spread(model: nn.Module, seed: int) -> None:
    """Draw the weights again, such that activations keep their scale; files stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        values = parameter.data + 0.1 * noise
        if parameter.dim() > 1:
            values = noise / parameter.shape[-1] ** 0.5
        parameter.data = values.to(parameter.dtype)


def differing_gradient(
    ours: nn.Module, theirs: nn.Module, most: float = 10 * TOLERANCE
) -> tuple[str, float] | None:
    """Return the first parameter whose gradient differs, and by what share of its largest entry."""
    return differing(gradients_of(ours), gradients_of(theirs), most)


def own_loss_difference(
    own: nn.Module,
    ours: nn.Module,
    theirs: Callable[[], torch.Tensor],
    mine: Callable[[], torch.Tensor],
) -> Finding | None:
    """Compare a summed loss and every gradient with the model's own, with the same random numbers.

    `theirs` computes the loss of `own`, and `mine` that of `ours`.
    """
    seed_generators(1)
    expected = theirs()
    expected.backward()
    seed_generators(1)
    loss = mine()
    loss.backward()
    error = abs(float(loss.detach() - expected.detach()))
    if not error <= TOLERANCE * abs(float(expected.detach())):
        actual = f"loss {float(loss.detach()):.6g}"
        return Finding(actual, f"its own, {float(expected.detach()):.6g}")
    if result := differing_gradient(ours, own):
        name, share = result
        return Finding(f"the gradient of {name} is off by {share:.1%} of its largest entry")
    lacking = sorted(gradients_of(own).keys() ^ gradients_of(ours).keys())
    return Finding(f"a gradient for {lacking[0]} in one of both") if lacking else None


@contextmanager
def own_randomness() -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch at the end."""
    python = random.getstate()
    numpy = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
