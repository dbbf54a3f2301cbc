"""The certificate's part of a recipe: a tiny copy of what is trained, and its one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from trainer.certify.finding import CheckResult
from trainer.certify.one_process.edges import Edge
from trainer.certify.one_process.options import Amend, Option
from trainer.certify.recording import Sources
from trainer.certify.reference import Reference
from trainer.certify.tiny_run import Tiny
from trainer.engines import Machine
from trainer.models.spec import ModelSpec
from trainer.recipe import HandedIn, Subject


class MakeReference(Protocol):
    """Builds the one process for `small`; `amend` changes the model's own config, if it has one."""

    def __call__(self, small: Tiny, amend: Amend | None = None) -> Reference: ...


class Case(Protocol):
    """A subject to certify, as it is trained in the tiny run."""

    small: Tiny
    """The tiny run, with notes on what makes the certificate prove less."""
    subject: Subject
    """The tiny copy and its task; the samples are those that `rehearse` returns."""
    base: CheckResult | None
    """The comparison of the pretrained values that a run reads; None if there is none."""
    edges: Sequence[Edge]
    """The lengths of sequences at which code may branch; empty if none are tried."""

    def options(self, small: Tiny) -> Sequence[Option]:
        """List the options that are on; the certificate shows that each has its effect."""

    def rehearse(self, spec: ModelSpec) -> tuple[Sources, MakeReference]:
        """Return the samples, and a function that builds one process to train on them. Collective.

        Raises ConfigError or DataError if one process could not repeat the run.
        """


@runtime_checkable
class Certified(Protocol):
    """A recipe that brings a certificate."""

    def case(self, small: Tiny, handed_in: HandedIn, machine: Machine, folder: Path) -> Case:
        """Make the case, and its files in `folder` if a run would read them. Collective."""
