"""The section of distillation: the teacher, what is known of it, and the loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.keys.key import Key
from trainer.config.sections.section import Count, Number, Section


class TeacherSection(Section):
    """The teacher: a causal language model with the same tokens as the model that is trained."""

    name_or_path: str | None = None
    """The folder or hub id; None: whichever model made `column`."""
    revision: str | None = None
    """The branch, tag or commit of a teacher on the hub."""
    trust_remote_code: bool = False
    """True to run the code that the teacher brings along."""


class DistillationSection(Section):
    """Distillation, for the task `distillation`: a student learns the distribution of a teacher.

    The teacher's likeliest tokens of each position are computed before training, and kept.
    """

    teacher: TeacherSection = TeacherSection()
    column: str | None = None
    """The folder of what is known of the teacher: read if it is there, else made; None: the run's
    own. `--teacher-only` makes it and ends."""
    top_k: Annotated[Count, Key(unit="tokens")] = 64
    """The teacher's likeliest tokens that are kept; all others together are one outcome."""
    divergence: Literal["forward", "reverse", "jensen_shannon"] = "forward"
    """KL(teacher, student), KL(student, teacher), or between both, by `beta`."""
    beta: Annotated[Number, Field(gt=0, lt=1), Key(unit="share")] = 0.5
    """The teacher's share in the mixture of `jensen_shannon`: TRL's `beta`, whose 0 and 1 are
    `forward` and `reverse`."""
    temperature: Annotated[Number, Field(ge=0.01, le=100), Key(unit="factor")] = 1.0
    """The temperature T of both distributions; the divergence is multiplied by its square."""
    hard_weight: Annotated[Number, Field(ge=0, lt=1), Key(unit="share")] = 0.0
    """The share of the targets' cross-entropy in the loss; the rest is the divergence's."""
