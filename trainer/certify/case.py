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
    """Builds the one process again; `amend` changes the model's own config, where it has one."""

    def __call__(self, small: Tiny, amend: Amend | None = None) -> Reference: ...


class Case(Protocol):
    """A subject to certify, as it is trained in the tiny run."""

    small: Tiny
    """The tiny run, with notes on what of the case proves less."""
    subject: Subject
    """The tiny copy and its task; its data is that of `rehearse`."""
    base: CheckResult | None
    """The comparison of the pretrained values that a run reads, where it reads some."""
    edges: Sequence[Edge]
    """The lengths of sequences at which code may branch; empty for no sequences."""

    def options(self, small: Tiny) -> Sequence[Option]:
        """List the options that are on, of which the certificate shows that they are."""

    def rehearse(self, spec: ModelSpec) -> tuple[Sources, MakeReference]:
        """Return the samples, and the one process that trains on them. Collective.

        Raises ConfigError or DataError for what one process could not repeat.
        """


@runtime_checkable
class Certified(Protocol):
    """A recipe that brings a certificate."""

    def case(self, small: Tiny, handed_in: HandedIn, machine: Machine, folder: Path) -> Case:
        """Make the tiny copy, and in `folder` its files if a run would read them. Collective."""
