"""A question that is asked of a model before anything is allocated, and how all of them are asked.

`trainer/parallel/checks.py` has the table of questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from torch import nn

from trainer.layout import Layout, Recompute
from trainer.models.materialise import on_host
from trainer.models.spec import ModelSpec
from trainer.probes.findings import Findings, applied
from trainer.probes.inputs import ProbeTask
from trainer.probes.probe import Finding, observe, tiny

FROM_TOKENS = "a model that computes logits and its loss from tokens alone"
ONE_PROCESS = Layout(
    pipeline=1,
    replicate=1,
    shard=1,
    tensor=1,
    micro_batch=2,
    accumulation=2,
    zero_stage=0,
    offload_optimizer="none",
    offload_param="none",
    precision="float32",
    recompute=Recompute(),
)
"""The layout of one process, which examples change in the one thing that they need."""


@runtime_checkable
class Packs(Protocol):
    """A task that can keep several documents of a sample apart."""

    def packing(self) -> ProbeTask: ...


class Probed:
    """A model that is probed: its task, the layout that it is for, and what is known so far."""

    def __init__(
        self,
        spec: ModelSpec,
        task: ProbeTask,
        layout: Layout,
        *,
        packed: bool = False,
        findings: Findings | None = None,
    ) -> None:
        self.spec = spec
        self.task = task.packing() if packed and isinstance(task, Packs) else task
        self.layout = layout
        self.packed = packed
        """True if samples are several documents that must not attend to one another."""
        self.findings = findings or Findings()
        self.is_tried = True
        """False from when it is known that no tiny copy can be run."""

    @property
    def is_language(self) -> bool:
        """True for a language model, which is tried on its logits; False for any other module."""
        return self.spec.tiny.input is None

    @cached_property
    def tiny(self) -> tuple[ModelSpec, nn.Module]:
        """A tiny copy that all questions share, with its spec; the whole where there is none.

        A question may set its mode, and otherwise leaves it as it is.
        """
        if self.is_language or self.spec.tiny.copy is not None:
            return tiny(self.spec)
        return self.spec, on_host(self.spec)

    def give_up(self) -> None:
        """Ask nothing more that needs a tiny copy."""
        self.is_tried = False

    def release(self) -> None:
        """Free the copy that questions share."""
        self.__dict__.pop("tiny", None)

    def learn(self, *notes: str, **known: Any) -> None:
        """Add to the findings: notes for the user, and values of fields of `Findings`."""
        notes = (*self.findings.notes, *notes)
        self.findings = replace(self.findings, notes=notes, **known)
        self.__dict__.pop("trained", None)

    @cached_property
    def trained(self) -> ModelSpec:
        """The spec as it will be trained, by what is known so far."""
        return applied(self.spec, self.findings)

    def under(self, packed: bool = False, **fields: Any) -> Probed:
        """Return the same model under another layout: ONE_PROCESS but for these fields."""
        layout = replace(ONE_PROCESS, **fields)
        return Probed(self.spec, self.task, layout, packed=packed, findings=self.findings)


def no_example(about: Probed) -> None:
    """Return None: no layout makes it a question about a model for which it is none."""


@dataclass(frozen=True)
class Need:
    """The models, layouts or options that need the answer to a question."""

    who: str
    """The name for all of them. Printed in docs/models.md."""
    met: Callable[[Probed], bool]
    """Tells if a model and its layout need the answer."""
    example: Callable[[Probed], Probed | None] = no_example
    """Returns the model under a layout that needs the answer, for `verify`, which asks all; None if
    it can't be asked of this model.
    """


@dataclass(frozen=True)
class Question:
    """A question, and its row of the table in docs/models.md."""

    name: str
    """The words for what an error of the model's own code leaves open: "whether it is causal"."""
    key: str
    """The place that an error names: the key that asks for it."""
    need: Need
    """The models and layouts that need the answer."""
    ask: Callable[[Probed], Finding | None]
    """Asks it: learns what it finds, or returns why the model can't be trained so."""
    holds: str
    """The condition that is checked. Printed in docs/models.md, as are the next."""
    otherwise: str
    """The consequence if it does not hold."""
    cost: str
    """The seconds that it takes for a small Llama on one core, in order of magnitude."""
    expected: str = ""
    """The expectation of the model, where a finding has none."""
    hint: str = ""
    """Advice to the user, where a finding has none."""
    elsewhere: bool = False
    """True if `train` asks it elsewhere: where the model is opened, or in the engine, once it is
    known that this engine runs the layout.
    """


def by_check(check: Callable[[ModelSpec, Layout], None]) -> Callable[[Probed], None]:
    """Return how a question is asked that a `check(spec, layout)` answers by a ConfigError."""
    return lambda about: check(about.trained, about.layout)


def ask(question: Question, about: Probed) -> None:
    """Ask one question. Raises ConfigError, with place and reason, if the answer rules it out.

    Whatever the model's own code raises is such a reason.
    """
    finding = observe(lambda: question.ask(about))
    if finding is None:
        return
    expected = question.expected
    if finding.raised:
        expected = FROM_TOKENS if about.is_language else "a model that runs"
    start = f"a tiny copy of it does not show {question.name}: "
    error = finding.error(f"{question.key}: {about.spec.name}", expected, question.hint, start)
    raise error from (None if error is finding.raised else finding.raised)


def ask_all(table: Iterable[Question], about: Probed) -> None:
    """Ask what the model and its layout need, in the order of the table, but not elsewhere."""
    for question in table:
        if not question.elsewhere and question.need.met(about):
            ask(question, about)
