"""Gradients that are zero by symmetry: terms that cancel, whose sum is rounding alone."""

from __future__ import annotations

from collections.abc import Callable

from trainer.certify.finding import Order
from trainer.certify.one_process.expected import largest_value
from trainer.certify.recording import Tensors

SMALL = 1e-4
"""The share of its layer's largest entry below which a gradient may be rounding alone."""
REPEATS = 2
"""The number of runs, with weights that differ a little, in which a small gradient is compared."""
STEADY = 100.0
"""The ratio of a gradient to its change in those runs above which it is not rounding alone: a true
gradient changes by about `factors.SHAKEN` of itself, and rounding by all of itself."""


def largest_in_layers(gradients: Tensors, order: Order) -> dict[str, float]:
    """Return the largest entry of the gradients of each layer, by the layer's name."""
    largest: dict[str, float] = {}
    for name, value in gradients.items():
        layer = order.layer(name)
        largest[layer] = max(largest.get(layer, 0.0), largest_value(value))
    return largest


def cancelled(own: Tensors, order: Order, again: Callable[[int], Tensors]) -> frozenset[str]:
    """Return the names of gradients that are rounding alone.

    `again(seed)` computes the gradients with weights that differ by a little. It is called only
    if some gradient is small beside those of its layer.
    """
    of_layer = largest_in_layers(own, order)
    small = [
        n for n, value in own.items() if largest_value(value) < SMALL * of_layer[order.layer(n)]
    ]
    if not small:
        return frozenset()
    others = [again(seed) for seed in range(REPEATS)]

    def change(name: str) -> float:
        return max(largest_value(other[name] - own[name]) for other in others)

    return frozenset(name for name in small if largest_value(own[name]) <= STEADY * change(name))
