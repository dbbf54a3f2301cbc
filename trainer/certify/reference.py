"""The same run in one process, by PyTorch, transformers and DeepSpeed's schedulers alone.

The order of samples, padding, seeds of dropout, loss, clipping and decay groups are written a
second time here, from their contracts. Initial values come from the run's own code, except those
that are read from files or made by PEFT.

Each step starts from the engine's state before it, so that no error accumulates: an optimizer that
divides noise by noise (eps 1e-8) stays comparable, and an error shows in the step that made it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from trainer.certify.finding import Order
from trainer.certify.one_process.cancelled import cancelled
from trainer.certify.one_process.edges import Edge
from trainer.certify.one_process.expected import (
    EXACT,
    Expected,
    Judged,
    MicroBatch,
    Rounding,
    norm_of,
    right_of,
)
from trainer.certify.one_process.factors import multiply_in_float8, shaken
from trainer.certify.one_process.optimizers import (
    optimizer_of,
    scheduler_of,
    state_of_optimizer,
    update_by,
)
from trainer.certify.one_process.repeated import (
    FEWER,
    REPEATS,
    Buffers,
    Compute,
    Computed,
    rounding_of_float32,
    rounding_of_low_precision,
)
from trainer.certify.one_process.sample_order import DropoutSeeds, numbers_of
from trainer.certify.outputs import Listener, Loads, Outputs, order_of_computation, parts_of
from trainer.certify.parameters import Learner
from trainer.certify.recording import Inputs, Sources, State, Targets, Tensors
from trainer.certify.tiny_run import CLIPPED_STEPS, PROBE_RATE, Tiny
from trainer.models.spec import ModelSpec
from trainer.parallel.parallel_mesh import division_of
from trainer.state import MASTER, WEIGHT
from trainer.tasks.task import Sample


class Reference(ABC):
    """One process with the whole tiny model in float32.

    `listens` is False if the micro-batches of all data ranks run as one, whose outputs no rank has.
    `adds_up` is False if a step's loss is not the sum of its micro-batches' losses. `tops` has, for
    each measure, the number of highest logits among which a correct target is."""

    listens = True
    adds_up = True

    def __init__(
        self,
        small: Tiny,
        spec: ModelSpec,
        own: Learner,
        data: Sources,
        device: torch.device,
        tops: Sequence[int] = (1,),
    ) -> None:
        self.small = small
        self._spec = spec
        self._data = data
        self._device = device
        self._layout = small.layout
        self._seed = small.config.trainer.seed
        self._tops = tops
        self._smoothing = small.config.trainer.label_smoothing
        in_float8 = self._layout.float8 != "none"
        self._scale = self._layout.data_ranks if in_float8 else 1  # float8 rounds as in the engine
        self._factor = 1.0
        self._margin = 0.05 if small.low_precision or in_float8 else 1e-4
        self.model = own.model.to(device)
        self.published = own.published
        if in_float8:
            multiply_in_float8(self.model, spec, self._layout, lambda: self._factor)
        self._named = dict(self.model.named_parameters())
        self.frozen = {
            name for name, parameter in self._named.items() if not parameter.requires_grad
        }
        self.order = order_of_computation(self.model, self._named, self._first_pass)
        self.model.train()
        self._seeds = DropoutSeeds(self._seed)
        for index, name in enumerate(spec.blocks):
            self.model.get_submodule(name).register_forward_pre_hook(
                self._seeds.before_block(index)
            )
        self._listener = Listener([self.model])
        self._outputs = Outputs()
        self._start = Buffers(self.model)
        self._loads = Loads(self.model, spec, small.layout.router_bias_rate)
        self._optimizer = optimizer_of(own, small, spec.blocks)
        self._scheduler = scheduler_of(self._optimizer, small.config)

    def _first_pass(self) -> None:
        self._output(self.model, self._example())

    @abstractmethod
    def held_out(self, state: State) -> Judged:
        """Evaluate the held-out samples with the weights of `state`."""

    @abstractmethod
    def _collated(self, samples: Sequence[Sample]) -> tuple[Inputs, Targets]:
        """Return the inputs and targets of a micro-batch."""

    @abstractmethod
    def _output(self, model: nn.Module, inputs: Inputs) -> torch.Tensor:
        """Return the logits, or whatever the loss of a user's module takes."""

    @abstractmethod
    def _loss_sum(self, model: nn.Module, inputs: Inputs, targets: Targets) -> torch.Tensor:
        """Return the summed loss of a micro-batch, a scalar."""

    @abstractmethod
    def _counted(self, inputs: Inputs, targets: Targets) -> int:
        """Count the targets of a micro-batch."""

    @abstractmethod
    def _example(self) -> Inputs:
        """Return inputs for a first forward pass."""

    def weights(self) -> Tensors:
        """Return every tensor of a checkpoint of the model: parameters and persistent buffers."""
        tied = {alias: name for alias, name in self._spec.tied.items() if alias not in self._named}
        stored = self.model.state_dict()
        kept = {name: value for name, value in stored.items() if name not in tied}
        return {name: value.detach().cpu().clone() for name, value in kept.items()}

    def step(
        self, step: int, before: State, gradients: Tensors, norm: float, measures: bool = True
    ) -> Expected:
        """Compute a step from the state `before` it, and update by `gradients` and `norm`.

        All are the engine's, so that a wrong gradient is not reported as a wrong update, too. To be
        called for each step, in order.
        """
        parts = self.whole_step(step)
        if step != self.small.overflow_step:
            computed = self.computed(step, before, parts, measures)
        else:
            self._load(before)
            if self._scheduler is not None:
                self._scheduler.step()
            named = self._named.keys() | self._loads.biases.keys()
            kept = {key: value for key, value in before.items() if key[0] in named}
            return Expected(math.inf, math.inf, {}, kept, self._count(parts), EXACT)
        self._update(step, gradients, norm)
        other = self._loads.biases if self.small.low_precision else ()  # rounding changes routing
        after = {(n, WEIGHT): value for n, value in self.weights().items() if n not in other}
        after |= state_of_optimizer(self._optimizer, self._named)
        biases = {name: value.detach().cpu().clone() for name, value in self._loads.biases.items()}
        return replace(computed, state=after, biases=biases)

    def computed(
        self, step: int, state: State, parts: list[MicroBatch], measures: bool = True
    ) -> Expected:
        """Compute loss and gradients of micro-batches with the weights of `state`; no update.

        If `measures`, it also measures the run's rounding, or in float32 finds what cancels.
        """
        self._load(state)
        counted = self._count(parts)
        loss, own = self._gradients(self.model, step, parts, counted)
        outputs = self._outputs
        exact = Expected(loss, norm_of(own), own, {}, counted, EXACT, outputs)
        if not measures:
            return exact
        if self.small.low_precision or self._layout.float8 != "none":
            given = Computed(loss, own, outputs)
            with self._start.again(), self._loads.aside():
                return replace(exact, rounding=self._rounding(step, parts, counted, given))

        def again(seed: int) -> Tensors:
            return self._gradients(shaken(self.model, seed), step, parts, counted)[1]

        with self._start.again(), self._loads.aside():
            order = Order(self.order, self._spec.blocks)
            return replace(exact, cancelled=cancelled(own, order, again))

    def norms(self, steps: int) -> list[float]:
        """Train `steps` steps from the initial values, and return the gradient norm of each."""
        norms = []
        for step in range(steps):
            parts = self.whole_step(step)
            _, own = self._gradients(self.model, step, parts, self._count(parts))
            norms.append(norm_of(own))
            self._update(step, own, norms[-1])
        return norms

    def _count(self, parts: Iterable[MicroBatch]) -> int:
        return sum(self._counted(part.inputs, part.targets) for part in parts)

    def _judged(self, samples: Sequence[object], size: int) -> Judged:
        """Evaluate samples, `size` at a time."""
        total = 0.0
        counted = 0
        right = [0] * len(self._tops)
        unsure = 0
        repeats = FEWER if self._layout.float8 != "none" else 0
        others = [shaken(self.model, seed).eval() for seed in range(repeats)]
        rounded = [0.0] * repeats
        self.model.eval()
        with torch.no_grad():
            for start in range(0, len(samples), size):
                inputs, targets = self._collated(samples[start : start + size])
                total += float(self._loss_sum(self.model, inputs, targets))
                counted += self._counted(inputs, targets)
                for index, model in enumerate(others):
                    rounded[index] += float(self._loss_sum(model, inputs, targets))
                for index, most in enumerate(self._tops):
                    logits = self._output(self.model, inputs)
                    judged = right_of(logits, targets, most, self._margin)
                    right[index] = right[index] + judged[0]
                    unsure = unsure + judged[1]
        self.model.train()
        furthest = max((abs(other - total) for other in rounded), default=0.0)
        rounding = furthest / abs(total) if furthest else 0.0  # the loss of a lone sample may be 0
        return Judged(total / counted, counted, tuple(right), unsure, rounding)

    def _gradients(
        self, model: nn.Module, step: int, parts: Sequence[MicroBatch], counted: int
    ) -> tuple[float, Tensors]:
        """Return the mean loss of micro-batches with `counted` targets together; its gradients."""
        model.zero_grad()
        self._factor = self._scale / counted
        total = 0.0
        self._outputs = {}
        self._loads.begin()
        for part in parts:
            self._seeds.start(step, part.data_rank, part.number)
            self._inputs = self._loads.ids = part.inputs
            tokens: Mapping[int, torch.Tensor | None] = {part.data_rank: None}
            if self._spec.language.vocabulary:
                division = division_of(self._layout, self._spec.language.attention.heads)
                tokens = parts_of(part.inputs, part.data_rank, division, part.start, part.row)
            self._listener.begin([{(place, part.number): ids for place, ids in tokens.items()}])
            loss = self._loss_sum(model, part.inputs, part.targets)
            (loss * self._scale / counted).backward()
            total += float(loss.detach())
            outputs = self._listener.end()
            for key, value in outputs.items() if self.listens else ():
                self._outputs[key] = self._outputs.get(key, 0) + value  # over packed documents
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return total / counted, {n: g.float().cpu() / self._scale for n, g in gradients.items()}

    def rounding_of_float32(self, step: int, state: State, parts: list[MicroBatch]) -> Rounding:
        """Measure the rounding of float32 in a step with the weights of `state`; no update."""
        one = self.computed(step, state, parts, measures=False)
        exact = Computed(one.loss, one.gradients, one.outputs)
        compute = self._compute(step, one.targets)
        with self._start.again(), self._loads.aside():
            return rounding_of_float32(self.model, compute, parts, exact)

    def _rounding(
        self, step: int, parts: list[MicroBatch], counted: int, exact: Computed
    ) -> Rounding:
        groups = [[part] for part in parts] if self.adds_up else [parts]
        repeats = REPEATS if step < CLIPPED_STEPS else FEWER
        compute = self._compute(step, counted)
        return rounding_of_low_precision(self.model, compute, groups, exact, self._layout, repeats)

    def _compute(self, step: int, counted: int) -> Compute:
        def compute(model: nn.Module, parts: Sequence[MicroBatch]) -> Computed:
            loss, gradients = self._gradients(model, step, parts, counted)
            return Computed(loss, gradients, self._outputs)

        return compute

    # Samples

    def _numbers(self, step: int, data_rank: int) -> np.ndarray:
        """Return the numbers of a data rank's samples in a step, [accumulation, micro-batch]."""
        size = len(self._data.training)
        return numbers_of(self._layout, self._seed, size, step)[:, data_rank]

    def _samples(self, step: int, data_rank: int) -> list[list[Sample]]:
        """Return the samples of each micro-batch of a data rank."""
        return [[self._data.training[i] for i in part] for part in self._numbers(step, data_rank)]

    def _evaluated_samples(self) -> list[Sample]:
        """Return the samples of an evaluation."""
        held_out = self._data.held_out
        return [held_out[i] for i in range(min(len(held_out), self.small.held_out))]

    def _micro_batches(self, step: int, data_rank: int) -> list[MicroBatch]:
        parts = self._samples(step, data_rank)
        return [MicroBatch(data_rank, i, *self._collated(part)) for i, part in enumerate(parts)]

    def whole_step(self, step: int) -> list[MicroBatch]:
        """List all micro-batches, in the order in which running statistics include them."""
        ranks = range(self._layout.data_ranks)
        parts = [part for rank in ranks for part in self._micro_batches(step, rank)]
        return sorted(parts, key=lambda part: (part.number, part.data_rank))

    def parts_at(self, edge: Edge, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step at an edge."""
        raise NotImplementedError("a case with edges has sequences at them")

    def projected(self, state: State, step: int) -> tuple[list[Tensors], list[Tensors]]:
        """Return the gradients of the steps that measure rounding: in float32, in low precision."""
        raise NotImplementedError("a case whose rounding is measured has such steps")

    # State

    def _load(self, state: State) -> None:
        """Load the engine's weights, float32 masters where it has them, and its optimizer state."""
        stored = self.model.state_dict()
        with torch.no_grad():
            for name, value in stored.items():
                if (own := state.get((name, MASTER), state.get((name, WEIGHT)))) is not None:
                    value.copy_(own.reshape(value.shape))
            for name, parameter in self._named.items():
                for part, value in self._optimizer.state[parameter].items():
                    if (name, part) in state and value.shape == parameter.shape:
                        value.copy_(state[name, part].reshape(value.shape))
        self._start.keep()

    def _update(self, step: int, gradients: Tensors, norm: float) -> None:
        limit = float(self.small.config.settings["gradient_clipping"])
        for name, parameter in self._named.items():
            parameter.grad = None
            if (gradient := gradients.get(name)) is not None:
                parameter.grad = gradient.reshape(parameter.shape).to(self._device, copy=True)
        if limit > 0:  # as PyTorch clips, bit for bit, because Muon then rounds to 16 bits
            nn.utils.clip_grads_with_norm_(self._named.values(), limit, torch.tensor(norm))
        update_by(self._optimizer, PROBE_RATE if step >= self.small.steps else None)
        self._optimizer.zero_grad()
        self._loads.move()
        if self._scheduler is not None:
            self._scheduler.step()
