"""The subject of preference optimisation: a language model, its pairs, and the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from trainer.config import Config
from trainer.config.sections.pair_losses import PairedDataSection, PairsSection
from trainer.config.sections.trainer import TrainerSection
from trainer.data.mixture import Source
from trainer.data.order import SampleOrder, sample_ids
from trainer.data.text.preferences import RECORDS
from trainer.data.text.preparation import open_data
from trainer.data.text.prepared import Data
from trainer.data.text.preview import preview
from trainer.data.text.token_files import PreparedPairs
from trainer.engines import Engine, Metrics
from trainer.errors import ConfigError, DataError, Problem
from trainer.recipe import RunContext, Subject
from trainer.recipes.causal_lm.subject import LanguageSubject, fitted, language_parts
from trainer.recipes.causal_lm.task import CausalLM
from trainer.recipes.pairs import reference
from trainer.recipes.pairs.first_loss import check, first_loss
from trainer.recipes.pairs.losses import LOSSES
from trainer.recipes.pairs.task import FIGURES, PairsTask
from trainer.supervise.process import cache_folder
from trainer.tasks.task import Sample


@dataclass(frozen=True)
class PairsSubject(LanguageSubject):
    """A causal language model on pairs of answers."""

    task: PairsTask
    order: SampleOrder = SampleOrder()
    unit: ClassVar[str] = "pair"
    units: ClassVar[str] = "pairs"
    counts_tokens: ClassVar[bool] = False

    @property
    def probed(self) -> CausalLM:
        """Next-token prediction: what a layout asks of the model does not depend on the loss."""
        return CausalLM.of(self.spec)

    def settled(self, config: Config) -> Config:
        return config

    def amount(self, samples: int, section: TrainerSection) -> str:
        return super().amount(2 * samples, section)

    def samples(self, numbers: list[int], width: int = 100, in_full: bool = False) -> str:
        """Return both answers of some pairs, each behind its prompt."""
        lines = []
        for number in numbers:
            sample = self.data.train[number]
            margin = f", margin {sample['margin']:g}" if sample["margin"] else ""
            for side in ("chosen", "rejected"):
                shown = preview([sample[side]], self.tokenizer, [0], width, in_full)
                lines.append(shown.replace("sample 0:", f"pair {number}, {side}{margin}:", 1))
        return "\n".join(lines)

    def measures(self, loss: float) -> dict[str, float]:
        return {}

    def training_figures(self, metrics: Metrics, device: torch.device) -> dict[str, float]:
        sums = self.task.take_figures()
        means = metrics.means(sums, device)
        return dict(zip(FIGURES, means.tolist(), strict=True))

    def prompts(self) -> Source:
        return ChosenAnswers(super().prompts())

    def before_training(self, engine: Engine, folder: Path, step: int) -> Subject:
        """Compute the reference, or read it if the run is resumed; check the first loss.

        Collective. Raises DataError for the reference of another run, and NumericsError for
        another first loss.
        """
        if not LOSSES[self.task.keys.loss].has_reference:
            return self
        parts = self._parts()
        ranks = engine.job.machine.ranks
        known = ranks.on_first(lambda: reference.identity(engine, parts))
        if step:
            columns = ranks.on_first(lambda: reference.read(folder, known))
        else:
            engine.job.machine.signs.at("computing the reference's log-probabilities")
            columns = reference.compute(engine, self.task, parts)
            ranks.on_first(lambda: reference.write(folder, known, columns))
        for name, part in parts.items():
            part.refer_to(columns[name])
        if step:
            return replace(
                self, notes=("the reference's log-probabilities are those of the start",)
            )
        size = len(self.data.train)
        count = engine.job.layout.train_batch
        numbers = sample_ids(self.order.seed, 0, count, size, self.order.version)
        first = first_loss(engine, self.task, self.data.train, numbers)
        line = check(first, engine.job.layout.precision, self.task.keys.loss)
        return replace(self, notes=(line,))

    def _parts(self) -> dict[str, PreparedPairs]:
        """Return the parts of the data, by a name for each."""
        parts = {f"train {share.label}".rstrip(): share.source for share in self.data.shares}
        parts |= {
            f"evaluation {name}".rstrip(): part for name, part in self.data.evaluations.items()
        }
        return {name: part for name, part in parts.items() if isinstance(part, PreparedPairs)}


@dataclass(frozen=True)
class ChosenAnswers:
    """The chosen answers of pairs, as documents."""

    pairs: Source

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        return self.pairs[index]["chosen"]


def open_pairs(context: RunContext) -> PairsSubject:
    """Open a language model, its tokenizer and its pairs. Collective.

    Raises ConfigError or DataError for what does not fit together.
    """
    section = context.section
    _check(section)
    parts = language_parts(context)
    plain = PairsTask.of(parts.spec, parts.tokenizer.pad_token_id or 0)
    assert isinstance(plain, PairsTask)
    task = plain.comparing(section.pairs)
    rows = dict(section.data) | {"ranked": section.pairs.ranked}
    options = PairedDataSection.model_construct(**rows)
    source = (cache_folder(), context.ranks, context.sample_order, context.progress)
    data = open_data(options, parts.tokenizer, *source)
    _check_margins(data, section.pairs)
    spec, tokenizer, notes = fitted(context, parts, data)
    spec = replace(spec, notes=(*spec.notes, *notes))
    order = context.sample_order
    return PairsSubject(spec, task, data, False, data.check, tokenizer=tokenizer, order=order)


def _check(section: TrainerSection) -> None:
    """Raise ConfigError for keys that do not go together."""
    _check_data(section)
    keys = section.pairs
    kind = LOSSES[keys.loss]
    smoothing = "trainer.pairs.label_smoothing"
    if keys.label_smoothing and not kind.smooths:
        some = ", ".join(name for name, one in LOSSES.items() if one.smooths)
        actual = f'{keys.label_smoothing:g}, with the loss "{keys.loss}", which has no smoothing'
        raise ConfigError(Problem(smoothing, actual, f"0, or one of {some}"))
    if kind.needs_smoothing and not keys.label_smoothing:
        actual = f'0, with the loss "{keys.loss}", which takes its logarithm'
        raise ConfigError(Problem(smoothing, actual, "a number above 0"))
    if keys.loss != "simpo" and keys.gamma != PairsSection().gamma:
        actual = f'{keys.gamma:g}, with the loss "{keys.loss}"'
        raise ConfigError(Problem("trainer.pairs.gamma", actual, 'the loss "simpo"'))
    if section.data.stream and kind.has_reference:
        actual = f'true, with the loss "{keys.loss}"'
        hint = "The reference is computed of all samples before the first step."
        expected = "false, or a loss without a reference (simpo, cpo, orpo)"
        raise ConfigError(Problem("trainer.data.stream", actual, expected, hint))


def _check_data(section: TrainerSection) -> None:
    data = section.data
    if data.path is None and not data.sources:
        expected = "data with the columns chosen and rejected"
        raise ConfigError(Problem("trainer.data.path", "saw none", expected))
    kinds = {source.records for source in data.sources} or {data.records}
    if unread := kinds - set(RECORDS):
        expected = "one of " + ", ".join(f'"{name}"' for name in RECORDS)
        raise ConfigError(Problem("trainer.data.records", f'"{min(unread)}", with pairs', expected))
    if data.documents in ("concatenate", "pack"):
        actual = f'"{data.documents}", with pairs'
        hint = "Pairs are not packed yet: each answer is padded to the longest of its micro-batch."
        raise ConfigError(Problem("trainer.data.documents", actual, 'null or "pad"', hint))


def _check_margins(data: Data, keys: PairsSection) -> None:
    """Raise DataError for margins that the loss does not take."""
    if LOSSES[keys.loss].takes_margins:
        return
    for share in data.shares:
        if isinstance(share.source, PreparedPairs) and share.source.margins.any():
            some = ", ".join(name for name, one in LOSSES.items() if one.takes_margins)
            place = f"trainer.data: {share.label}".rstrip(": ")
            actual = f'a column "margin", which the loss "{keys.loss}" does not have'
            raise DataError(Problem(place, actual, f"none, or one of {some}"))
