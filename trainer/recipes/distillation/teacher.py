"""The teacher as a run of its own: evaluated before the student's, and then no longer in memory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import Config
from trainer.config.sections.distillation import DistillationSection
from trainer.config.sections.model_and_data import ModelSection
from trainer.config.sections.trainer import TrainerSection
from trainer.data.text.prepared import Data
from trainer.data.text.tokenizer import load_any_tokenizer, tokenizer_name
from trainer.engines import Engine
from trainer.engines.measuring import digest_of_weights
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models import huggingface
from trainer.models.language import model_config
from trainer.models.spec import ModelSpec
from trainer.plugins import TEACHER
from trainer.recipe import PlannedModel, RunContext, Subject
from trainer.recipes.causal_lm.subject import LanguageSubject, open_language_model
from trainer.recipes.causal_lm.task import CausalLM
from trainer.recipes.distillation import column
from trainer.recipes.distillation.task import DistillationTask, made_of
from trainer.storage import Json, ensure_writable, size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "trainer.distillation.teacher.name_or_path"
SHARED: Json = {"shared": True}
"""Marks the config of a teacher whose column all ranks see."""


@dataclass(frozen=True)
class TeacherSubject(LanguageSubject):
    """A teacher on the student's documents, in the student's tokens; it is not trained."""

    task: DistillationTask
    place: Path = field(default=Path(), kw_only=True)
    """The folder of the column."""
    shared: bool = field(default=False, kw_only=True)
    """True if all ranks see that folder; a run's own may be each machine's."""

    @property
    def probed(self) -> CausalLM:
        return CausalLM.of(self.spec)

    def trained(self, spec: ModelSpec, section: TrainerSection) -> Subject:
        return replace(self, spec=spec)

    def before_training(self, engine: Engine, folder: Path, step: int) -> Subject:
        """Compute the column, and write it. Collective. Raises DiskError."""
        ranks = engine.job.machine.ranks
        parts = column.parts_of(self.data)
        engine.job.machine.signs.at("computing the teacher's likeliest tokens")
        writes = ranks.first or (not self.shared and ranks.rank == ranks.node_first)
        targets = sum(part.summary.targets for part in parts.values())
        needed = targets * 4 * self.task.width

        def look() -> None:
            if writes:
                ensure_writable(self.place.parent, needed)

        ranks.on_own(look)
        seed = engine.job.seed

        def describe() -> Json:
            of_teacher = known_of_teacher(engine.job.spec, engine.job.layout, seed)
            of_data = known_of(self.task.keys, self.data, self.tokenizer)
            return {"name": engine.job.spec.name, **of_data, **of_teacher}

        known = ranks.on_first(describe)
        column.write(self.place, known, column.arrays_of(engine, self.task, parts), writes)
        ranks.barrier()
        return replace(self, notes=(f"{self.place}: {size(needed)} of the teacher",))


class Teacher:
    """The recipe of a teacher that is measured, which no config names."""

    def subject(self, context: RunContext) -> Subject:
        return open_teacher(context)

    def planned(self, section: TrainerSection, layout: Layout) -> PlannedModel:
        actual = "a teacher, which is not trained"
        raise ConfigError(Problem("trainer.task", actual, "what is trained"))


RECIPE = Teacher()


def teacher_of(config: Config, folder: Path | None) -> Config | None:
    """Return the config by which the teacher is measured, in the layout of `config`; None if that
    has been done, or if there is no teacher and another job is to do it.

    `folder`: that of the student's run; None: there is none. Raises ConfigError without a place for
    the column, and without a teacher to make it.
    """
    section = config.trainer
    keys = section.distillation
    place = column_folder(section, folder)
    if keys.teacher.name_or_path is None:
        if folder is None:
            raise ConfigError(Problem(KEY, "saw none", "the teacher that is to be measured"))
        return None
    if place.exists():
        return None
    data = section.data.model_copy(update={"tokenizer": tokenizer_name(section)})
    own = keys.model_copy(update={"column": str(place)})
    unchanged: Json = {
        "task": TEACHER,
        "model": model_of_teacher(section),
        "recipe": SHARED if keys.column is not None else {},
        "data": data,
        "distillation": own,
        "adapter": None,
        "freeze": [],
        "parameter_groups": [],
        "label_smoothing": 0.0,
        "neftune_alpha": 0.0,
        "router_bias_update_rate": 0.0,
        "warmup_ratio": None,
        "steps": 1,
        "epochs": None,
        "profile": None,
    }
    return replace(config, trainer=section.model_copy(update=unchanged))


def column_folder(section: TrainerSection, folder: Path | None) -> Path:
    """Return the folder of the column. Raises ConfigError if there is none."""
    if (named := section.distillation.column) is not None:
        return Path(named)
    if folder is None:
        expected = "a folder that both jobs see"
        raise ConfigError(Problem("trainer.distillation.column", "saw none", expected))
    return folder / column.FOLDER


def open_teacher(context: RunContext) -> TeacherSubject:
    """Open the teacher on the student's data, in the student's tokens. Collective.

    Raises ConfigError or DataError for a teacher that does not fit them.
    """
    language, task = open_fitted(context)
    section = context.section
    return TeacherSubject(
        language.spec,
        task,
        language.data,
        language.packed,
        language.check,
        tokenizer=language.tokenizer,
        form=language.form,
        place=Path(str(section.distillation.column)),
        shared=section.recipe == SHARED,
    )


def open_fitted(context: RunContext) -> tuple[LanguageSubject, DistillationTask]:
    """Open a student or its teacher on the data, and its task. Collective.

    Raises ConfigError or DataError for what does not fit together.
    """
    section = context.section
    keys = section.distillation
    language = open_language_model(context)
    context.ranks.on_own(lambda: check_tokens(section, keys, language.tokenizer))
    check_count(keys, language.spec, language.tokenizer)
    task = made_of(language.spec, keys, language.tokenizer, language.task.attention)
    return language, task.packing() if language.packed else task  # type: ignore[return-value]


def check_tokens(
    section: TrainerSection, keys: DistillationSection, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise ConfigError unless the teacher that is named has the same tokens."""
    name = keys.teacher.name_or_path
    if name is None:
        return
    own = load_any_tokenizer(
        name, keys.teacher.trust_remote_code, keys.teacher.revision
    ).get_vocab()
    ours = tokenizer.get_vocab()
    if own == ours:
        return
    other = min(token for token in own.keys() | ours.keys() if own.get(token) != ours.get(token))
    actual = f"{name}, of whose {len(own):,} tokens {other!r} has the id {own.get(other)}"
    expected = f"the {len(ours):,} tokens of the student's tokenizer, which gives {ours.get(other)}"
    hint = (
        "Between other tokens no distribution can be compared: take a teacher of the same family."
    )
    raise ConfigError(Problem(KEY, actual, expected, hint))


def check_count(
    keys: DistillationSection, spec: ModelSpec, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise ConfigError for more likeliest tokens than there are, and for a model that lacks some.

    If they are all tokens, a model has no others, whose probability the other model may not have.
    """
    shared = len(tokenizer)
    rows = spec.language.vocabulary
    if rows < shared:
        actual = f"{spec.name} with {rows:,} ids"
        expected = f"an id for each of the tokenizer's {shared:,} tokens"
        raise ConfigError(Problem("trainer.distillation", actual, expected))
    most = shared if rows == shared else shared - 1
    if keys.top_k > most:
        expected = f"at most {most:,}, of {shared:,} tokens and the {rows:,} ids of {spec.name}"
        raise ConfigError(Problem("trainer.distillation.top_k", str(keys.top_k), expected))


def known_of(keys: DistillationSection, data: Data, tokenizer: PreTrainedTokenizerBase) -> Json:
    """Return what a column is computed of, besides the teacher and its precision."""
    tokens = json.dumps(sorted(tokenizer.get_vocab().items()))
    parts = column.parts_of(data)
    return {
        "top_k": keys.top_k,
        "temperature": keys.temperature,
        "tokenizer": hashlib.sha256(tokens.encode()).hexdigest(),
        "data": {name: part.summary.fingerprint for name, part in parts.items()},
    }


def known_of_teacher(spec: ModelSpec, layout: Layout, seed: int) -> Json:
    """Return by which values of a teacher, and in which precision, a column is computed."""
    float8 = "" if layout.float8 == "none" else f", float8 {layout.float8}"
    return {"weights": digest_of_weights(spec, seed), "precision": f"{layout.precision}{float8}"}


def spec_of_teacher(section: TrainerSection) -> ModelSpec:
    """Open the teacher that a config names. Raises ConfigError."""
    model = model_of_teacher(section)
    return huggingface.spec_of(model_config.read_config(model), model)


def model_of_teacher(section: TrainerSection) -> ModelSection:
    """Return the section of the model by which a run opens the teacher."""
    own = section.distillation.teacher.model_dump()
    return ModelSection(**own, attention=section.model.attention, keep_untrained=False)
