"""The certificate of your own module: itself, on its own first samples, with its own loss."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from trainer.certify.pairs import PairsCase
from trainer.certify.parameters import constructed
from trainer.certify.tiny_run import Tiny
from trainer.engines import Machine
from trainer.recipe import HandedIn, RunContext
from trainer.recipes.own_module.subject import open_module


def module_case(small: Tiny, handed_in: HandedIn, machine: Machine) -> PairsCase:
    """Build the case of your own module. Collective."""
    without = replace(handed_in, metrics={})
    context = RunContext(small.config, without, small.layout, machine.ranks)
    subject = open_module(context)
    assert handed_in.model is not None
    assert handed_in.loss is not None
    build = partial(constructed, handed_in.model)
    return PairsCase(small, subject, build, handed_in.loss)
