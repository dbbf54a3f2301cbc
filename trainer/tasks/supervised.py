"""The task of users' modules: pairs of input and target, and a loss of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import default_collate

from trainer.distributed.context_ranks import ContextRanks
from trainer.errors import ConfigError, DataError, Problem, refused
from trainer.models.spec import ModelSpec, Trial
from trainer.tasks.task import Batch, Sample, WholeStep, changed

PLACE = "data: samples"
"""The place of problems with own samples, for the user."""
Loss = Callable[[Any, Any], tuple[torch.Tensor, int | torch.Tensor]]
"""`loss(output, target)` of a micro-batch returns the sum over its targets, a scalar tensor, and
their number.

The number must not depend on the values of `output`: it is computed before the forward pass, with
zeros.
"""
PAIR = "(sum over the targets as a scalar tensor, number of targets)"
"""The expected result of a loss, as error messages have it."""
NUMBER = "/number"
"""The end of the name of a metric's number, a measure beside its sum."""
RESERVED = ("step", "loss", "targets", "accuracy", "accuracy_top5", "perplexity")
"""Names of an evaluation's own values."""


@dataclass(frozen=True)
class Blank:
    """A stand-in for a sample when none are left; it counts for nothing."""

    sample: object


class Supervised:
    """The task of samples that are pairs (input, target): tensors, numbers, or dictionaries of
    them.

    The module is called with the input, or with a dictionary's entries as keyword arguments.
    `build` makes it on the meta device; `blocks` are its blocks' names.
    """

    measures: tuple[str, ...] = ()
    draws: bool = False
    whole_step: WholeStep | None = None
    _metrics: Mapping[str, Loss] = {}

    def __init__(
        self, loss: Loss, build: Callable[[], nn.Module], blocks: Sequence[str] = ()
    ) -> None:
        self._loss = loss
        self._build = build
        self._blocks = tuple(blocks)
        self._shapes: dict[object, tuple[object, dict[int, tuple[int, ...]]]] = {}
        """By a batch's shapes: its output on the meta device, and the shapes that enter blocks."""

    def regularised(
        self, spec: ModelSpec, label_smoothing: float, neftune_alpha: float
    ) -> Supervised:
        """Return the same task. Raises ConfigError for smoothed labels and noise on embeddings."""
        if neftune_alpha:
            actual = f"saw {neftune_alpha:g}, and no language model"
            expected = "noise on the embeddings of tokens"
            raise ConfigError(Problem("trainer.neftune_alpha", actual, expected))
        if label_smoothing:
            actual = f"saw {label_smoothing:g}, and a loss that is handed in"
            expected = "0: a user's loss smooths its labels itself"
            raise ConfigError(Problem("trainer.label_smoothing", actual, expected))
        return self

    def placed(self, context: ContextRanks | None, batch: dist.ProcessGroup | None = None) -> None:
        """Take no note of them: each loss is of its own samples, and no sequence is divided."""

    def started(
        self, batches: Sequence[Batch], summed: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Count nothing: the loss is a mean over the targets."""

    def prepare(self, model: nn.Module) -> nn.Module:
        return model

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Stack `input` (or `input.KEY`) and `target`; add the targets' `count`, `share` 0 or 1."""
        kept = [sample for sample in samples if not isinstance(sample, Blank)]
        pairs = kept or [samples[0].sample]
        expected = "pairs (input, target) that stack to a batch"
        kinds = (TypeError, ValueError)
        with refused(PLACE, expected, *kinds, RuntimeError, named=True, raises=DataError):
            given, target = default_collate([tuple(pair) for pair in pairs])
        batch = {**_flat("input", given), **_flat("target", target)}
        count = 0
        if kept:
            count = int(_checked(self._loss(self._zeros(batch), _nested("target", batch)))[1])
        return {**batch, "count": torch.tensor(count), "share": torch.tensor(float(bool(kept)))}

    def measuring(self, metrics: Mapping[str, Loss], samples: Sequence[object]) -> Self:
        """Return the same task with a script's metrics, tried on an output of zeros for samples.

        They are like the loss, but their numbers may depend on the output. Raises ConfigError.
        """
        batch = self.collate(samples)
        if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
            actual = f"saw {type(metrics).__name__}"
            raise ConfigError(Problem("metrics", actual, "a dictionary of functions by name"))
        for name, metric in metrics.items():
            if name in RESERVED or name.endswith(NUMBER):
                raise ConfigError(Problem("metrics", f'saw "{name}"', "the name of no other value"))
            # whatever a script's own code raises
            with refused(f"metrics: {name}", PAIR, named=True):
                measured = metric(self._zeros(batch), _nested("target", batch))
            _checked(measured, f"metrics: {name}")
        names = (each for name in metrics for each in (name, name + NUMBER))
        return changed(self, _metrics=metrics, measures=(*self.measures, *names))

    def trial(self, samples: Sequence[object]) -> Trial:
        """Make a trial of the module and its loss from a few samples."""
        batch = self.collate(samples)

        def output(model: nn.Module) -> torch.Tensor:
            return torch.cat([value.flatten() for value in _tensors(self.output(model, batch))])

        alone = [self.collate([sample]) for sample in samples]
        return Trial(output, lambda stage: self.hidden(stage, batch), [batch, *alone])

    def blank(self, sample: object) -> Blank:
        return Blank(sample)

    def shape(self, batch: Batch) -> tuple[int, ...]:
        return tuple(size for key, value in sorted(batch.items()) for size in (*value.shape, -1))

    def hidden_shape(self, batch: Batch, block: int) -> tuple[int, ...]:
        return self._on_meta(batch)[1][block]

    def padded(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the micro-batches. Raises DataError if they differ in shape."""
        if len({self.shape(batch) for batch in batches}) > 1:
            actual = "micro-batches of several shapes in a step"
            raise DataError(Problem(PLACE, actual, "one shape, which a pipeline's buffers have"))
        return list(batches)

    def targets(self, batch: Batch) -> torch.Tensor:
        return batch["count"]

    def output(self, model: nn.Module, batch: Batch) -> Any:
        """Run the module on a batch's input."""
        kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        cast = lambda value: value.to(kind) if value.is_floating_point() else value  # noqa: E731
        given = _map(_nested("input", batch), cast)
        return model(**given) if isinstance(given, dict) else model(given)

    def hidden(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self.output(model, batch)  # type: ignore[no-any-return]

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        total, _ = self._loss(self.output(model, batch), _nested("target", batch))
        return _wide(total) * batch["share"]

    def measured(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        output = self.output(model, batch)
        target = _nested("target", batch)
        total, _ = self._loss(output, target)
        totals = torch.stack([_wide(total), *self._measured_by(output, target)])
        return totals.where(batch["share"] > 0, 0.0)  # a stand-in's may not be finite

    def _measured_by(self, output: object, target: object) -> list[torch.Tensor]:
        """Return each metric's sum and number, in float32 or wider."""
        pairs = [metric(output, target) for metric in self._metrics.values()]
        device = next(_tensors(target)).device
        values = [torch.as_tensor(value, device=device) for pair in pairs for value in pair]
        return [_wide(value.reshape(())) for value in values]

    def count(self, model: nn.Module, batch: Batch) -> int:
        """Return the number of targets that the loss gives for the module's real output."""
        return int(_checked(self._loss(self.output(model, batch), _nested("target", batch)))[1])

    def _zeros(self, batch: Batch) -> object:
        """Return zeros in the shape of the module's output."""
        zeros = lambda value: torch.zeros(value.shape, dtype=value.dtype)  # noqa: E731
        return _map(self._on_meta(batch)[0], zeros)

    def _on_meta(self, batch: Batch) -> tuple[object, dict[int, tuple[int, ...]]]:
        key = tuple((name, value.dtype, *value.shape) for name, value in sorted(batch.items()))
        if key not in self._shapes:
            on_meta = {name: value.to("meta") for name, value in batch.items()}
            self._shapes[key] = self._run_on_meta(on_meta)
        return self._shapes[key]

    def _run_on_meta(self, batch: Batch) -> tuple[object, dict[int, tuple[int, ...]]]:
        model = self._build().eval()
        entered = dict[int, tuple[int, ...]]()
        for index, name in enumerate(self._blocks):

            def note(
                module: nn.Module,
                args: tuple[object, ...],
                kwargs: dict[str, object],
                index: int = index,
            ) -> None:
                given = args[0] if args else next(iter(kwargs.values()))
                if isinstance(given, torch.Tensor):  # else a pipeline says that it has no shape
                    entered[index] = tuple(given.shape)

            model.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True)
        expected = "a forward pass over this input whose shapes do not depend on values"
        start = "its forward pass fails on the meta device: "
        # whatever the module's own code raises
        with refused("model", expected, named=True, start=start), torch.no_grad():
            return self.output(model, batch), entered


def _checked(result: Any, place: str = "loss") -> tuple[torch.Tensor, int | torch.Tensor]:
    total, number = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
    one = number.numel() == 1 if torch.is_tensor(number) else isinstance(number, Real)
    if not one or not torch.is_tensor(total) or total.ndim != 0:
        parts = (
            ", ".join(type(part).__name__ for part in result) if isinstance(result, tuple) else ""
        )
        actual = type(result).__name__ + (f" of {parts}" if parts else "")
        raise ConfigError(Problem(place, actual, PAIR))
    return result  # type: ignore[no-any-return]


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _flat(name: str, value: object) -> Batch:
    if isinstance(value, Mapping):
        return {f"{name}.{key}": part for key, part in value.items()}
    if not torch.is_tensor(value):
        actual = f"an {name} of {type(value).__name__}"
        raise DataError(Problem(PLACE, actual, "a tensor, or a dictionary"))
    return {name: value}


def _nested(name: str, batch: Batch) -> torch.Tensor | Batch:
    if name in batch:
        return batch[name]
    start = f"{name}."
    return {key.removeprefix(start): part for key, part in batch.items() if key.startswith(start)}


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def _map(value: object, change: Callable[[torch.Tensor], object]) -> object:
    if torch.is_tensor(value):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map(part, change) for part in value)
    return value
