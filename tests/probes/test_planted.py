"""Each question of the table has a planted fault that it finds; without the fault it finds none."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support.command.own_task import spec_and_task
from tests.support.layouts import EXPERTS, family
from tests.support.models.families import SMALL
from tests.support.probing import layout
from tests.support.training import LLAMA, spec_of, task_of
from trainer.models.spec import ModelSpec, TinyCopies
from trainer.parallel.checks import TABLE, answers
from trainer.parallel.probes import expert_bias, expert_parts, tensor_parts
from trainer.parallel.splits import expert_ranks
from trainer.probes.answers import Answer, answer
from trainer.probes.findings import Draws, Findings
from trainer.probes.question import Probed, Question
from trainer.probes.questions import module_loss, single_sample
from trainer.probes.questions.language import causal
from trainer.recipes.causal_lm.task import CausalLM

PLAIN = LLAMA | {"attention_dropout": 0.0}
Hook = Callable[[nn.Module, Any, Any], Any]


@dataclass(frozen=True)
class Planted:
    """A model with a fault, and a key word of what is found."""

    model: Callable[[], tuple[ModelSpec, Any]]
    found: str
    patched: Callable[[], AbstractContextManager[object]] = nullcontext
    """The fault, if it is not in the model."""
    known: Findings = Findings()
    """What other questions have found before."""


def language(config: dict[str, Any]) -> tuple[ModelSpec, Any]:
    spec = spec_of(config)
    return spec, task_of(spec)


def changed(change: Callable[[Any], object], config: dict[str, Any] = PLAIN) -> tuple[Any, Any]:
    """A language model that `change` alters whenever it is built again, as itself and as its copy."""
    plain = spec_of(config)

    def build() -> nn.Module:
        model = plain.build()
        change(model)
        return model

    spec = replace(plain.built_by(build), tiny=TinyCopies())
    return spec, task_of(spec)


def hooked(place: str, make: Callable[[], Hook]) -> Callable[[], tuple[ModelSpec, Any]]:
    """A Llama with a hook behind the module at `place`."""
    return lambda: changed(lambda model: model.get_submodule(place).register_forward_hook(make()))


def fails(model: nn.Module) -> object:
    return model.register_forward_pre_hook(lambda *_: 1 / 0)


def twice(model: Any) -> object:
    again = model.model.layers[2]
    return model.model.layers[1].register_forward_hook(
        lambda module, args, options, out: again(out, **options), with_kwargs=True
    )


def unused(model: Any) -> None:
    model.model.extra = nn.Linear(2, 2, device="meta")


def reads_the_first(model: Any) -> None:
    """The last block reads what the first one gave."""
    kept: list[torch.Tensor] = []
    first, *_, last = model.model.layers
    first.register_forward_hook(lambda module, args, out: kept.append(out))
    last.register_forward_hook(lambda module, args, out: out + kept.pop())


def shared(model: Any) -> tuple[ModelSpec, Any]:
    spec, task = language(model)
    first, second, _ = (f"{block}.mlp.up_proj.weight" for block in spec.blocks)
    return replace(spec, tied={second: first}), task


def remembering() -> Hook:
    longest = 0

    def scaled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal longest
        longest = max(longest, output.shape[1]) if module.training else 0
        return output * (1 + longest // 20)

    return scaled


def counting() -> Hook:
    """Each pass, also one that computes a block again, is another."""
    passes = itertools.count()
    return lambda module, args, output: output * (1 + next(passes))


def noise(draw: Callable[[], Any]) -> Callable[[], Hook]:
    return lambda: lambda module, args, output: output * draw() if module.training else output


def mixing(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """A causal sum over the tokens before, beside attention."""
    return output + output.cumsum(1) / 9


def padded(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * (1 + output.shape[1] // 24)


def on_the_host(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + float(output.detach().numpy().mean())


def sleeping(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    time.sleep(0)
    return output


class Scaled(CausalLM):
    def loss_sum(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss_sum(model, batch) * 1.001


def of_another_loss() -> tuple[ModelSpec, Any]:
    spec = spec_of(PLAIN)
    return spec, Scaled(spec.language)


def not_a_number(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return output.sum() * torch.nan, 1


def normalised() -> tuple[ModelSpec, Any]:
    return spec_and_task(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))


def scaling_table() -> tuple[ModelSpec, Any]:
    """Its vectors are normalised over the whole table."""
    return language(PLAIN | {"model_type": "opt", **OPT})


OPT = {"ffn_dim": 48, "word_embed_proj_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0}
ROUTED = family("minimax_m2", num_local_experts=16, num_experts_per_tok=3, head_dim=8)
MAMBA = family("mamba", state_size=4)
topk = torch.topk
routed = expert_ranks._routed
calls = itertools.count()

PLANTED: dict[str, Planted] = {
    "whether it runs": Planted(lambda: changed(fails), "ZeroDivisionError"),
    "whether its loss is a finite sum": Planted(
        lambda: spec_and_task(lambda: nn.Linear(6, 2), not_a_number), "nan on the first samples"
    ),
    "where it draws random numbers": Planted(
        hooked("model.layers.1.mlp", noise(random.random)), "Python, NumPy"
    ),
    "what its blocks are": Planted(lambda: changed(twice), "run once each"),
    "whether it is causal": Planted(lambda: language(PLAIN | {"is_causal": False}), "not causal"),
    "whether padding moves its logits": Planted(
        hooked("model.layers.1.mlp", lambda: padded), "padding moves its logits"
    ),
    "whether it computes the same again": Planted(
        hooked("model.layers.1.mlp", remembering), "leaves something behind"
    ),
    "whether its loss is ours": Planted(of_another_loss, "tiny copy of it: loss"),
    "which parameters have no gradient": Planted(lambda: changed(unused), "get no gradient"),
    "whether its head is plain": Planted(
        lambda: language({**SMALL, "model_type": "gemma2", "head_dim": 8}), "soft cap"
    ),
    "whether packed documents attend to one another": Planted(
        hooked("model.layers.1.mlp", lambda: mixing), "differ from those alone"
    ),
    "whether our attention can replace its own": Planted(lambda: language(MAMBA), "SDPA"),
    "whether batch norm takes one sample": Planted(
        normalised, "can take no statistics", known=Findings(normalises="1")
    ),
    "what chooses its experts": Planted(
        lambda: language(ROUTED),
        "does not decide which experts",
        lambda: mock.patch("torch.topk", lambda scores, k, **_: topk(-scores, k)),
    ),
    "whether it can be cut into stages": Planted(lambda: changed(reads_the_first), "cut into"),
    "what its stages draw": Planted(
        hooked("model.layers.1.mlp", noise(lambda: 1 + torch.rand(()) * next(calls))),
        "other logits",
        known=Findings(draws=Draws(any=True)),
    ),
    "whether its work can be counted": Planted(
        hooked("model.layers.1.mlp", lambda: on_the_host), "without values"
    ),
    "whether its sequences can be divided": Planted(
        hooked("model.norm", lambda: mixing), "mixes tokens after attention"
    ),
    "what it computes in tiles": Planted(
        hooked("model.layers.1.mlp.down_proj", lambda: mixing), "a part of its tokens"
    ),
    "what it computes again": Planted(
        hooked("model.layers.1.input_layernorm", counting), "computed again"
    ),
    "whether its matrices can be split": Planted(
        lambda: language(family("llama", attention_dropout=0.1)), "inside what is split"
    ),
    "whether its vocabulary can be split": Planted(scaling_table, "more than look rows up"),
    "whether its experts can be spread": Planted(
        lambda: language(EXPERTS),
        "experts computes something else",
        lambda: mock.patch.object(expert_ranks, "_routed", lambda *given: routed(*given) * 0.5),
    ),
    "whether it is gathered block by block": Planted(lambda: shared(PLAIN), "is one with"),
    "whether its blocks compile": Planted(
        hooked("model.layers.0.mlp", lambda: sleeping), "test_planted.py:"
    ),
}
"""A fault for each question, by its name."""


def answered(question: Question, planted: Planted) -> Answer:
    with planted.patched():
        about = Probed(*planted.model(), layout(), findings=planted.known)
        return answer(question, about, lambda about: None)


@pytest.mark.parametrize("question", TABLE, ids=lambda question: question.name)
def test_each_question_finds_a_planted_fault(question: Question) -> None:
    planted = PLANTED[question.name]  # a question without one fails here
    result = answered(question, planted)
    assert result.answer == "note" and planted.found in result.actual


def test_no_fault_is_found_where_none_is_planted() -> None:
    spec, task = language(PLAIN)
    moved: list[None] = []
    result = answers(Probed(spec, task, layout()), lambda: moved.append(None))
    assert [one.question for one in result] == [question.name for question in TABLE]
    assert len(moved) == len(TABLE)
    experts = {expert_bias.QUESTION.name, expert_parts.QUESTION.name}
    notes = {one.question: one for one in result if one.answer == "note"}
    assert notes.keys() == experts and not any(one.applies for one in notes.values())
    none = {one.question for one in result if one.answer == "none"}
    assert none == {module_loss.QUESTION.name, single_sample.QUESTION.name}


def lines_of(question: Question, found: tuple[Answer, ...]) -> Iterator[str]:
    return (str(one) for one in found if one.question == question.name)


def test_a_finding_for_another_layout_is_told_from_one_for_this() -> None:
    """With dropout in attention, tensor ranks can't train it: a note, or an error if they are to."""
    spec, task = language(family("llama", attention_dropout=0.1))
    result = answers(Probed(spec, task, layout()), lambda: None)
    [line] = lines_of(tensor_parts.QUESTION, result)
    assert "inside what is split" in line and "does not apply" in line
    [line] = lines_of(causal.QUESTION, result)
    assert not line
