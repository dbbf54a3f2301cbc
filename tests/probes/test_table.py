"""The table of questions: what it takes to add one, and the one place for what models' code raises."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.messages import raises
from tests.support.probing import layout
from tests.support.training import LLAMA, spec_of, task_of
from trainer.distributed.ranks import Ranks
from trainer.errors import ConfigError
from trainer.models.spec import ModelSpec
from trainer.parallel import checks
from trainer.probes.inputs import logits_of, sequence_of
from trainer.probes.probe import Differs, Finding, observe, probe
from trainer.probes.question import Need, Probed, Question

# A toy: all that its own file would have


def _doubled(model: nn.Module, spec: ModelSpec) -> nn.Module:
    for parameter in model.parameters():
        parameter.data.mul_(2)
    return model


def _compare(plain: nn.Module, doubled: nn.Module, spec: ModelSpec) -> Finding | None:
    ids = sequence_of(spec)[None]
    same = torch.equal(logits_of(plain.eval(), ids), logits_of(doubled.eval(), ids))
    return None if same else Finding("twice the weights give other logits")


TOY = Question(
    name="whether weights matter",
    key="trainer.toy",
    expected="a model without weights",
    hint="Leave it out.",
    need=Need("toys", lambda about: about.layout.micro_batch == 3),
    ask=lambda about: probe(about.trained, _doubled, _compare),
    holds="Twice the weights give the same logits",
    otherwise="error",
    cost="0.1 s",
)


def test_a_probe_is_its_own_file_and_a_line_of_the_table(monkeypatch):
    """Its line is all that anything else knows of it: it is asked where a layout needs it."""
    monkeypatch.setattr(checks, "OF_LAYOUTS", [*checks.OF_LAYOUTS, TOY])
    spec = spec_of(LLAMA)
    checks.checked(spec, task_of(spec), layout(), Ranks())
    with raises(ConfigError, "trainer.toy: llama", "other logits", "Leave it out"):
        checks.checked(spec, task_of(spec), layout(micro_batch=3), Ranks())


def test_the_row_of_a_probe_is_printed(monkeypatch):
    from tests.support import reference

    monkeypatch.setattr(reference, "TABLE", (*reference.TABLE, TOY))
    row = "| Twice the weights give the same logits | toys | error | 0.1 s |"
    assert row in reference.models()


def test_what_the_models_own_code_raises_is_a_finding_with_place_and_reason(monkeypatch):
    def planted(model: nn.Module, spec: ModelSpec) -> nn.Module:
        raise IndexError("planted\nbelow")

    toy = replace(TOY, ask=lambda about: probe(about.trained, planted, _compare))
    monkeypatch.setattr(checks, "OF_LAYOUTS", [toy])
    spec = spec_of(LLAMA)
    state = torch.get_rng_state()
    with raises(ConfigError, "trainer.toy: llama", "whether weights matter", "planted") as caught:
        checks.checked(spec, task_of(spec), layout(micro_batch=3), Ranks())
    assert isinstance(caught.value.__cause__, IndexError)
    assert torch.equal(state, torch.get_rng_state())


def test_an_error_of_this_project_stays_what_it_is():
    from trainer.errors import Problem

    def planted() -> None:
        raise ConfigError(Problem("place", "actual", "expected"))

    result = observe(planted)
    assert isinstance(result, Finding) and str(result.error("other", "")) == (
        "place: actual; expected expected"
    )


def test_a_difference_deep_inside_is_a_finding_without_its_class():
    def planted() -> None:
        raise Differs("it mixes tokens")

    assert observe(planted) == Finding("it mixes tokens")


def test_a_probe_leaves_the_generators_as_they_were():
    def drawing(model: nn.Module, spec: ModelSpec) -> nn.Module:
        torch.rand(3)
        return model

    state = torch.get_rng_state()
    assert probe(spec_of(LLAMA), drawing, lambda plain, drawn, spec: None) is None
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("question", checks.TABLE, ids=lambda question: question.name)
def test_a_question_has_its_row_and_no_other_has_its_name(question):
    words = (question.holds, question.need.who, question.otherwise, question.cost)
    assert all(words) and not any("|" in text or "\n" in text for text in words)
    assert [other.name for other in checks.TABLE].count(question.name) == 1
    assert re.fullmatch(r"(whether|what|where|which) .+", question.name)


def test_no_question_is_asked_that_a_layout_does_not_need():
    spec = spec_of(LLAMA)
    about = Probed(spec, task_of(spec), layout())
    assert not [question.name for question in checks.OF_LAYOUTS if question.need.met(about)]
