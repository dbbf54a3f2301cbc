"""The sections of preference optimisation: the loss over pairs of answers, and their data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.keys.key import Key
from trainer.config.sections.model_and_data import DataSection
from trainer.config.sections.section import ROWS, Number, Section

PairLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "sigmoid_norm",
    "apo_zero",
    "apo_down",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "simpo",
    "cpo",
    "orpo",
]


Ranked = Literal["all", "best"]


class PairsSection(Section):
    """Preference optimisation, for the task `pairs`: what compares a chosen with a rejected answer.

    `simpo`, `cpo` and `orpo` have no reference; the others compare with the model as it was before
    training, whose log-probabilities are computed first, and kept in the run's folder.
    """

    loss: PairLoss = "sigmoid"
    """The loss, by TRL's names; `sigmoid` is DPO (docs/preferences.md has the equations)."""
    beta: Annotated[Number, Field(gt=0, le=1e6), Key(unit="factor")] = 0.1
    """The strength of the pull towards the reference; of `orpo`, the weight of the odds ratio."""
    label_smoothing: Annotated[Number, Field(ge=0, lt=0.5), Key(unit="share")] = 0.0
    """The share of pairs whose answers are assumed to be swapped, for the losses that have it."""
    gamma: Annotated[Number, Field(ge=0, le=1e6), Key(unit="factor")] = 0.5
    """The margin by which `simpo` wants the chosen answer's reward to be higher."""
    sft_weight: Annotated[Annotated[Number, Field(ge=0, le=1e6)] | None, Key(unit="factor")] = None
    """The weight of the chosen answers' cross-entropy, a mean over the step's tokens; None: 1 for
    `cpo` and `orpo`, 0 for the others."""
    ranked: Annotated[Ranked, Key(needs=ROWS)] = "all"
    """The pairs of a row with several ranked answers: each two of them (arXiv 2203.02155, section
    3.5), or the best with each other one."""


class PairedDataSection(DataSection):
    """The data section, read as pairs of answers; each pair is a sample."""

    ranked: Ranked = "all"

    @property
    def arrangement(self) -> Literal["pairs"]:
        return "pairs"

    @property
    def packs(self) -> bool:
        return False
