"""What lives at a tick, and which moments of two runs are the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.tools.planner.extrapolate import _at_depth
from trainer.tools.planner.fakes.memory_history import MemoryHistory
from trainer.tools.planner.simulate import Trace, common_name

GRADIENT, ACTIVATION, LOGITS = "gradients", "activations", "logits"


def step(blocks: int, gradient: int, activation: int, logits: int) -> MemoryHistory:
    """A step in which each block keeps an activation and then gives a gradient."""
    consumers = tuple((kind, f"{kind} of all") for kind in (GRADIENT, ACTIVATION, LOGITS))
    loss = blocks + 1
    end = 2 * blocks + 3  # the last tick is the update
    spans = [(loss, loss, logits, 0, 2)]
    for block in range(blocks):
        backward = end - 2 - block
        spans.append((block + 1, backward - 1, activation, 0, 1))
        spans.append((backward, end - 1, gradient, 0, 0))
    operators = [0, *[1] * blocks, 2, *[3] * blocks, 4]
    marks = (1, loss, loss + 1, end - 1)
    return MemoryHistory((("step 2", 0),), marks, np.array(spans), consumers, np.array(operators))


@given(*[st.integers(1, 50)] * 3, st.integers(8, 40))
def test_the_peak_of_many_blocks_may_be_another_moment_than_that_of_few(
    gradient, activation, logits, blocks
):
    few, more, whole = (step(n, gradient, activation, logits) for n in (4, 6, blocks))
    peaks = _at_depth({4: Trace(0, few, ()), 6: Trace(0, more, ())}, blocks)
    assert peaks["step 2"].size == whole.peaks()[0].size
    assert peaks["step 2"].size == max(
        blocks * activation + logits, blocks * gradient, gradient + (blocks - 1) * activation
    )


def test_gradients_in_one_storage_have_the_name_of_their_module():
    names = ["model.layers.3.mlp.up_proj.weight", "model.layers.3.input_layernorm.weight"]
    assert common_name(names) == "model.layers.3"
    assert common_name(names[:1]) == names[0]
