"""The certificate of an own module: the module itself, on its own first samples, with its own
loss.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

from trainer.certify.certificate import Certificate, compare
from trainer.certify.parameters import Learner, constructed, learner
from trainer.certify.recording import Sources, State, record, shared_folder
from trainer.certify.reference import IGNORED, Judged, MicroBatch, Reference
from trainer.certify.samples import Documents
from trainer.certify.tiny_run import CLIPPED_STEPS, Tiny, clipping, tiny_run
from trainer.data.dataset import Subset
from trainer.engines import Machine
from trainer.errors import ConfigError, DataError, Problem
from trainer.models.spec import ModelSpec
from trainer.parallel.checks import checked
from trainer.run.subject import Given, Subject, own_module
from trainer.supervise.process import join
from trainer.supervise.world import world_of
from trainer.tasks.image_classification import TOP
from trainer.trial.draws import observe_draws
from trainer.trial.setup import Alone, tiny

LARGEST = 50_000_000
"""The most parameters of a module that is certified: there is no smaller copy of it."""
PAIRED = 1e-5
"""The relative difference above which a loss over micro-batches counts as one of pairs of
samples.
"""


def tiny_run_of(
    config: str | Path | dict[str, Any], overrides: Sequence[str], processes: int | None
) -> Tiny:
    """Shrink a config to a few steps; `processes` default to a launcher's, else to the fewest with
    every axis of it.
    """
    launched = world_of(os.environ)
    return tiny_run(
        config, list(overrides), launched.world_size if launched and not processes else processes
    )


def certify_given(small: Tiny, given: Given, machine: Machine) -> Certificate:
    """Certify an own module on own data, with its loss. Collective."""
    assert given.model is not None
    author = partial(constructed, given.model, small.config.trainer.seed)
    return certify_subject(
        small, own_module(small.config, given, machine.ranks), author, given.loss, machine
    )


def met(
    small: Tiny, device: str = "cpu", say: Callable[[str], None] = lambda line: None
) -> Machine:
    """Join the processes that were started for a certificate; `say` is told which are waited for.
    Collective.

    Raises ConfigError if they don't come, or have met with another backend.
    """
    world = world_of(os.environ)
    assert world is not None
    section = small.config.trainer.model_copy(update={"device": device})
    machine = join(replace(small.config, trainer=section), world, say)
    if dist.get_backend() != ("nccl" if device == "cuda" else "gloo"):
        seen = f"processes that have met by {dist.get_backend()}"
        raise ConfigError(
            Problem("verify", seen, "a script of its own, or a call before that of train")
        )
    return machine


def certify_subject(
    small: Tiny, subject: Subject, make: Callable[[], nn.Module], loss: Any, machine: Machine
) -> Certificate:
    """Certify any model on pairs of input and target, with its loss; on the CPU. Collective.

    `make` builds the model of the one process, with its initial values. Raises ConfigError or
    DataError if unfit.
    """
    ranks = machine.ranks
    if subject.spec.parameters > LARGEST:
        seen = f"{subject.spec.parameters / 1e6:,.0f} M parameters"
        most = f"at most {LARGEST / 1e6:,.0f} M"
        raise ConfigError(Problem("model", seen, most, "Verify a smaller one of its kind."))
    spec, _ = checked(subject.spec, subject.task, small.layout, ranks)
    if small.layout.sync_batch_norm and observe_draws(tiny(spec)[1], spec).any:
        seen = (
            "with a module that draws random numbers: each data rank draws its own, one "
            "process "
            "can't"
        )
        raise ConfigError(Problem("trainer.sync_batch_norm", seen, "dropout of 0 to verify it"))
    source = subject.data.train
    wanted = small.layout.train_batch * 3 // 2 + 1  # steps span the ends of epochs
    if len(source) < wanted + 1:
        raise DataError(
            Problem("data", f"{len(source)} samples", f"at least {wanted + 1} to verify on")
        )
    training = Subset(source, range(wanted))
    held_out = Subset(source, range(wanted, min(len(source), wanted + small.held_out + 1)))
    measures = len(subject.task.measures)

    def reference(small: Tiny) -> Reference:
        own = learner(make(), small.config.trainer)
        return _Reference(small, spec, own, (training, held_out), loss, measures)

    small = clipping(small, ranks.on_first(Alone()(lambda: reference(small).norms(CLIPPED_STEPS))))
    with shared_folder(ranks) as folder:
        sources = Sources(training, held_out)
        task = subject.trained(spec, small.config.trainer).task
        run, resumed = record(small, spec, task, sources, machine, folder)
    return compare(small, spec, run, resumed, machine, lambda: reference(small))


class _Reference(Reference):
    """The reference of an own module: one process with only the module, `default_collate` and the
    loss.
    """

    def __init__(
        self,
        small: Tiny,
        spec: ModelSpec,
        own: Learner,
        data: tuple[Subset, Subset],
        loss: Any,
        measures: int,
    ) -> None:
        (self._training, self._held_out), self._loss = data, loss
        self._most = (1, TOP)[:measures]
        super().__init__(small, spec, own, Documents([], []), torch.device("cpu"))

    def held_out(self, state: State) -> Judged:
        """Evaluate each sample by itself; by micro-batches if the loss is one of pairs of
        samples.
        """
        self._load(state)
        alone, together = (self._evaluated(size) for size in (1, self._layout.micro_batch))
        return alone if abs(alone.loss - together.loss) <= PAIRED * abs(alone.loss) else together

    def _evaluated(self, size: int) -> Judged:
        self.model.eval()
        limit = min(len(self._held_out), self._small.held_out)
        parts = (range(start, min(start + size, limit)) for start in range(0, limit, size))
        return self._judged(
            default_collate([tuple(self._held_out[i]) for i in part]) for part in parts
        )

    def _logits(self, inputs: Any) -> torch.Tensor:
        return self._output(self.model, inputs)  # type: ignore[no-any-return]

    def _whole_step(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches; those that batch norm normalises together are one here."""
        layout, batch = self._layout, self._layout.train_batch // self._layout.accumulation
        if not layout.sync_batch_norm:
            return super()._whole_step(step)
        numbers = np.stack(
            [self._numbers(step, rank, len(self._training)) for rank in range(layout.data_ranks)], 1
        )
        rows = numbers.reshape(layout.accumulation, batch)
        return [
            MicroBatch(0, i, *default_collate([tuple(self._training[n]) for n in row]))
            for i, row in enumerate(rows)
        ]

    def _micro_batches(self, step: int, data_rank: int) -> list[MicroBatch]:
        numbers = self._numbers(step, data_rank, len(self._training))
        batches = [default_collate([tuple(self._training[i]) for i in row]) for row in numbers]
        return [MicroBatch(data_rank, index, *batch) for index, batch in enumerate(batches)]

    def _loss_sum(self, model: nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
        output = self._output(model, inputs)
        if self._smoothing and model.training:
            smoothed: Any = {
                "label_smoothing": self._smoothing,
                "reduction": "sum",
                "ignore_index": IGNORED,
            }
            return F.cross_entropy(output.float(), targets, **smoothed)
        return self._loss(output, targets)[0]  # type: ignore[no-any-return]

    def _counted(self, inputs: Any, targets: Any) -> int:
        """Count targets by the loss itself, from the module's output."""
        training = self.model.training
        with torch.no_grad():
            count = int(self._loss(self._output(self.model.eval(), inputs), targets)[1])
        self.model.train(training)
        return count

    def _try_forward(self) -> tuple[bool, bool]:
        self._watch_order(
            lambda: self._output(self.model, default_collate([tuple(self._training[0])])[0])
        )
        return False, False

    def _output(self, model: nn.Module, inputs: Any) -> Any:
        return model(**inputs) if isinstance(inputs, dict) else model(inputs)
