"""The certificate of a model on pairs of input and target, which a loss compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from trainer.certify.case import MakeReference
from trainer.certify.finding import CheckResult
from trainer.certify.one_process.edges import Edge
from trainer.certify.one_process.expected import IGNORED, Judged, MicroBatch
from trainer.certify.one_process.options import Amend, Option, options_of
from trainer.certify.parameters import Learner, learner
from trainer.certify.recording import Inputs, Sources, State, Targets
from trainer.certify.reference import Reference
from trainer.certify.tiny_run import Tiny
from trainer.data.dataset import Subset
from trainer.errors import ConfigError, DataError, Problem
from trainer.models.spec import ModelSpec
from trainer.probes.probe import tiny
from trainer.probes.questions.randomness import observe_draws
from trainer.recipe import Subject
from trainer.tasks.supervised import Loss
from trainer.tasks.task import Sample

LARGEST = 50_000_000
"""The most parameters of a module that is certified: there is no smaller copy of it."""
PAIRED = 1e-5
"""The relative difference between losses of micro-batches and of single samples above which the
loss counts as one that compares samples with one another."""


class PairsReference(Reference):
    """One process with only the module, `default_collate` and the loss."""

    def __init__(self, small: Tiny, spec: ModelSpec, own: Learner, data: Sources, case: PairsCase):
        self._loss = case.loss
        super().__init__(small, spec, own, data, torch.device("cpu"), case.tops)

    def held_out(self, state: State) -> Judged:
        """Evaluate each sample by itself; by micro-batches if the loss compares samples."""
        self._load(state)
        samples = self._evaluated_samples()
        sizes = (1, self._layout.micro_batch)
        alone, together = (self._judged(samples, size) for size in sizes)
        return alone if abs(alone.loss - together.loss) <= PAIRED * abs(alone.loss) else together

    def _collated(self, samples: Sequence[Sample]) -> tuple[Inputs, Targets]:
        return tuple(default_collate([tuple(sample) for sample in samples]))  # type: ignore[return-value]

    def _output(self, model: nn.Module, inputs: Inputs) -> torch.Tensor:
        """Return the module's output; floats enter in the precision of its weights."""
        kind = next(p.dtype for p in model.parameters() if p.is_floating_point())

        def cast(value: object) -> object:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return value.to(kind)
            return value

        given = tree_map(cast, inputs)
        return model(**given) if isinstance(given, dict) else model(given)

    def _loss_sum(self, model: nn.Module, inputs: Inputs, targets: Targets) -> torch.Tensor:
        output = self._output(model, inputs)
        if self._smoothing and model.training:
            return F.cross_entropy(
                output.float(),
                targets,
                ignore_index=IGNORED,
                reduction="sum",
                label_smoothing=self._smoothing,
            )
        return self._loss(output, targets)[0]  # type: ignore[no-any-return]

    def _counted(self, inputs: Inputs, targets: Targets) -> int:
        """Count targets by the loss itself, from the module's output."""
        training = self.model.training
        with torch.no_grad():
            count = int(self._loss(self._output(self.model.eval(), inputs), targets)[1])
        self.model.train(training)
        return count

    def _example(self) -> object:
        return self._collated([self._data.training[0]])[0]

    def whole_step(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches; those that batch norm normalises together become one."""
        layout = self._layout
        training = self._data.training
        if not layout.sync_batch_norm:
            return super().whole_step(step)
        of_ranks = [self._numbers(step, rank) for rank in range(layout.data_ranks)]
        rows = np.stack(of_ranks, 1).reshape(layout.accumulation, -1)
        batches = [self._collated([training[n] for n in row]) for row in rows]
        return [MicroBatch(0, index, *batch) for index, batch in enumerate(batches)]


class PairsCase:
    """A model on pairs, with its loss; `build(seed=...)` builds it with its initial values."""

    base: CheckResult | None = None
    edges: Sequence[Edge] = ()
    reference: type[PairsReference] = PairsReference
    """The class of the one process; a recipe with a loss of another kind has its own."""

    def __init__(
        self,
        small: Tiny,
        subject: Subject,
        build: Callable[..., nn.Module],
        loss: Loss,
        tops: Sequence[int] = (),
    ) -> None:
        """`tops` has, for each measure of the task, the number of highest scores among which a
        correct target is.

        Raises ConfigError if it does not have one for each measure, or if the model has more than
        LARGEST parameters.
        """
        if len(tops) != len(subject.task.measures):
            names = ", ".join(subject.task.measures) or "none"
            actual = f"a certificate with {len(tops)} tops, and a task with the measures {names}"
            hint = "It compares no metrics: leave Supervised.measuring to the recipe's subject."
            raise ConfigError(Problem("trainer.task", actual, "one for each measure", hint))
        self.small = small
        self.subject = subject
        self.loss = loss
        self.tops = tops
        self._build = build
        if subject.spec.parameters > LARGEST:
            actual = f"{subject.spec.parameters / 1e6:,.0f} M parameters"
            most = f"at most {LARGEST / 1e6:,.0f} M"
            raise ConfigError(Problem("model", actual, most, "Verify a smaller one of its kind."))

    def options(self, small: Tiny) -> Sequence[Option]:
        return options_of(small)

    def rehearse(self, spec: ModelSpec) -> tuple[Sources, MakeReference]:
        """Return the samples, and a function that builds one process to train on them.

        Raises ConfigError if one process would draw other random numbers or could not tell rounding
        from errors, DataError for too few samples.
        """
        layout = self.small.layout
        source = self.subject.data.train
        if self.small.low_precision and _has_batch_norm(spec):
            actual = (
                f"{layout.precision}, and batch norm, whose statistics are rounded at each step"
            )
            expected = "float32, or a model without batch norm"
            raise ConfigError(Problem("precision", actual, expected))
        if layout.sync_batch_norm and observe_draws(tiny(spec)[1], spec).any:
            actual = "with a module that draws random numbers, on each data rank its own"
            expected = "dropout of 0 to verify it"
            raise ConfigError(Problem("trainer.sync_batch_norm", actual, expected))
        wanted = layout.train_batch * 3 // 2 + 1  # steps span the ends of epochs
        if len(source) < wanted + 1:
            expected = f"at least {wanted + 1} to verify on"
            raise DataError(Problem("data", f"{len(source)} samples", expected))
        end = min(len(source), wanted + self.small.held_out + 1)
        sources = Sources(Subset(source, range(wanted)), Subset(source, range(wanted, end)))

        def make(small: Tiny, amend: Amend | None = None) -> Reference:
            section = small.config.trainer
            own = learner(self._build(seed=section.seed), section)
            return self.reference(small, spec, own, sources, self)

        return sources, make


def _has_batch_norm(spec: ModelSpec) -> bool:
    return any(isinstance(module, _BatchNorm) for module in spec.build().modules())
