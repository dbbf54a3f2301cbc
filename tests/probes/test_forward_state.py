"""What a forward pass leaves behind: refused with its place where it changes what comes later, and
nothing else is.
"""

from __future__ import annotations

import collections
import functools
import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from transformers import AutoConfig

from tests.support.command.own_task import spec_and_task
from tests.support.messages import raises
from tests.support.probing import findings_of, layout
from tests.support.training import LLAMA, spec_of, task_of
from trainer.errors import ConfigError
from trainer.models.spec import TinyCopies
from trainer.parallel.checks import check_layout
from trainer.recipes.causal_lm.subject import _longrope_notes

RWKV = {
    "model_type": "rwkv",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 9,
    "intermediate_size": 48,
}


class Net(nn.Module):
    """Two layers, and between them what a case puts there."""

    def __init__(self, add: Any = None, between: Any = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)
        if add is not None:
            self.kept = add()
        self.between = between or (lambda net, hidden: net.kept(hidden))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.b(self.between(self, self.a(rows)).tanh())


@dataclass
class Record:
    count: int = 0
    last: Any = None


class Counting(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self, hidden):
        self.n += 1
        return hidden


def after(change: Any) -> Any:
    """What lies between: `change(net, hidden)` is for what it leaves behind."""

    def between(net, hidden):
        change(net, hidden)
        return hidden

    return between


def late(net, hidden):
    """Nothing changes in the passes of the check."""
    net.kept["steps"] += net.training
    return hidden * (1 + (net.kept["steps"] > 1000))


def first_seen(net, hidden):
    net.kept.setdefault("scale", hidden.detach().std())
    return hidden / net.kept["scale"]


def turned_over(net, hidden):
    net.kept["on"] = not net.kept.get("on")
    return hidden * (2 if net.kept["on"] else 1)


def averaged(net, hidden):
    """Of training alone, and from the first rows on: over the same rows again it would not move."""
    mean = hidden.detach().mean()
    if net.training:
        net.kept["mean"] = 0.5 * net.kept.get("mean", mean).to(mean.device) + 0.5 * mean


def counted_backward():
    """The backward pass of each call is another one: its gradients grow, and forward passes show
    nothing.
    """
    passes = itertools.count()
    identity = nn.Identity()
    identity.register_full_backward_hook(
        lambda module, mine, theirs: (mine[0] * (1 + next(passes)),)
    )
    return identity


def divided(net, hidden):
    if not net.training and not hidden.is_meta:
        net.b.weight.data.div_(2)


MOVES = {
    "a count": ((Counting,), "kept.n ("),
    "a count that matters later": ((lambda: {"steps": 0}, late), "kept['steps'] ("),
    "a queue that grows": (
        (lambda: collections.deque(maxlen=99), after(lambda net, h: net.kept.append(1))),
        "kept",
    ),
    "the first rows": ((dict, first_seen), "after other passes, by"),
    "on and off": ((dict, turned_over), "kept['on'] ("),
    "a mean that goes along": ((dict, after(averaged)), "kept['mean']"),
    "a hook of the backward pass": (
        (counted_backward, None),
        "gradients after other passes",
    ),
    "NumPy's generator": (
        (lambda: np.random.default_rng(1), lambda net, h: h * float(net.kept.random())),
        "after other passes, by",
    ),
    "Python's generator": (
        (lambda: random.Random(1), lambda net, h: h * net.kept.random()),
        "after other passes, by",
    ),
    "weights in evaluation": (
        (None, after(divided)),
        "evaluation changes b.weight",
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_moves_is_refused_with_its_place(name):
    given, place = MOVES[name]
    with pytest.raises(ConfigError, match="^trainer.model: Net: ") as caught:
        findings_of(*spec_and_task(functools.partial(Net, *given)))
    assert place in str(caught.value), caught.value


def buffered(persistent: bool) -> Any:
    def build():
        net = Net(None, moved)
        net.register_buffer("mean", torch.zeros(()), persistent=persistent)
        return net

    def moved(net, hidden):
        if net.training:
            net.mean.mul_(0.9).add_(hidden.detach().mean())
        return hidden

    return build


def test_a_buffer_that_no_checkpoint_has_is_no_place_for_what_moves():
    with pytest.raises(ConfigError, match="never settles: mean"):
        findings_of(*spec_and_task(buffered(persistent=False)))
    spec, task = spec_and_task(buffered(persistent=True))
    findings = findings_of(spec, task)
    check_layout(spec, task, layout(), findings)
    with raises(ConfigError, "buffer mean"):
        check_layout(spec, task, layout(replicate=2), findings)


def masked(net, hidden):
    """A cache: it changes an attribute, and nothing that comes out."""
    if "mask" not in net.kept or net.kept["mask"].device != hidden.device:
        net.kept["mask"] = torch.ones(8, device=hidden.device)
    return hidden * net.kept["mask"]


def lazily_buffered(net, hidden):
    if "mask" not in net._buffers:
        net.register_buffer("mask", torch.ones(8, device=hidden.device))
    return hidden * net.mask.to(hidden.device)


RESTS = {
    "a mask that is kept": (dict, masked),
    "a buffer that is made late": (None, lazily_buffered),
    "what was seen last": (Record, after(lambda net, h: vars(net.kept).update(last=h.detach()))),
    "dropout": (lambda: nn.Dropout(0.5),),
    "batch norm": (lambda: nn.BatchNorm1d(8),),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 8)),),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),),
    "an LSTM": (lambda: nn.LSTM(8, 8), lambda net, h: net.kept(h[:, None])[0][:, 0]),
    "a partial": (lambda: functools.partial(torch.mul, 2.0),),
}


@pytest.mark.parametrize("name", RESTS)
def test_what_rests_is_allowed(name):
    moved = findings_of(*spec_and_task(functools.partial(Net, *RESTS[name]))).moves_buffers
    assert bool(moved) == (name == "spectral norm")  # one process trains it


def test_a_tensor_that_nobody_knows_of_is_told_by_its_place():
    scaled = functools.partial(
        Net, lambda: {"last": torch.ones(8)}, lambda net, hidden: hidden * net.kept["last"]
    )
    with raises(ConfigError, "kept['last']", "parameter nor"):
        findings_of(*spec_and_task(scaled))


# Families of transformers


def test_rwkv_evaluates_without_dividing_its_weights():
    spec = spec_of(RWKV)
    findings_of(spec, task_of(spec))
    assert spec.config["rescale_every"] == 6  # as it is saved, for those who evaluate in float16
    model = spec.build()
    assert model.config.rescale_every == 6 and model.base_model.config.rescale_every == 0


def test_weights_that_are_divided_in_evaluation_are_found_in_the_tiny_copy():
    def as_transformers_has_it(config: Any) -> Any:
        plain = spec_of(config)

        def build():
            model = small.build()
            model.base_model.config.rescale_every = small.config["rescale_every"]
            return model

        small = plain.tiny.copy()
        assert len(small.blocks) < 6
        return small.built_by(build)

    spec = as_transformers_has_it(RWKV)
    with raises(ConfigError, "evaluation changes rwkv.blocks.1.attention.output.weight"):
        findings_of(spec, task_of(spec))


def test_rotary_embeddings_that_keep_the_longest_row_are_refused():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    spec = replace(
        spec_of({**LLAMA, "max_position_embeddings": 12, "rope_parameters": rope}),
        tiny=TinyCopies(),
    )
    with raises(ConfigError, "passes", "something behind", "model.rotary_emb"):
        findings_of(spec, task_of(spec))


@pytest.mark.parametrize(("length", "says"), [(16, False), (17, True)])
def test_rotary_embeddings_that_turn_by_the_longest_row_of_a_micro_batch_are_told(length, says):
    """A tiny copy's rows are shorter: it is known from the config, and by the length of the run's
    rows.
    """
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
    config = AutoConfig.for_model(
        **LLAMA | {"max_position_embeddings": 64, "rope_parameters": rope}
    )
    assert ("more than 16 tokens" in "".join(_longrope_notes(length, config))) is says
