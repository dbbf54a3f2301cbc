"""The same run in one process, by PyTorch, transformers and DeepSpeed's schedulers alone.

Written anew from the contracts: order of samples, padding, seeds of dropout, loss, clipping, decay
groups. Only the initial values share code with the run, except those read from files or made by
PEFT.

Each step starts from the engine's state before it, so that its error is that of one step: nothing
accumulates, an optimizer that divides noise by noise (eps 1e-8) stays comparable, and an error is
found in the step that made it."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim._muon import muon

from trainer.certify.outputs import Listener, Loads, Outputs, apart, parts_of
from trainer.certify.parameters import Learner
from trainer.certify.recording import Sources, State, Tensors
from trainer.certify.tiny_run import PROBE_RATE, Tiny, permutation, seed_of
from trainer.config import Config
from trainer.models.spec import ModelSpec
from trainer.parallel import float8
from trainer.parallel.parallel_mesh import division_of
from trainer.plugins import NAMED
from trainer.state import MASTER, WEIGHT
from trainer.storage import required

IGNORED = -100
_OF_DEEPSPEED = "adam_w_mode torch_adam bias_correction fp32_optimizer_states fused ns_method"
NOT_OF_TORCH = tuple(_OF_DEEPSPEED.split())


class MicroBatch(NamedTuple):
    data_rank: int
    number: int
    """Its number among the micro-batches of its data rank."""
    inputs: Any
    """Token ids [batch, sequence], or whatever a module takes."""
    targets: Any
    start: int = 0
    row: int = 0
    """The place of its first token in a packed row of so many tokens."""


@dataclass(frozen=True)
class Rounding:
    """The largest differences of one process in the run's low precision from float32."""

    loss: float
    """Relative, as that of the norm."""
    norm: float
    gradients: dict[str, float]
    outputs: dict[tuple[int, int, str], float]
    least: float
    """The relative rounding of one number."""


EXACT = Rounding(0.0, 0.0, {}, {}, 0.0)
"""No difference: that of a run in float32."""


@dataclass(frozen=True)
class Expected:
    """The expected result of one step."""

    loss: float
    norm: float
    gradients: Tensors
    state: State
    """The state after the step: weights (float32) and optimizer state."""
    targets: int
    rounding: Rounding
    outputs: Outputs = field(default_factory=dict)

    @property
    def overflows(self) -> bool:
        """True if the gradient is not finite, so that nothing may change."""
        return not math.isfinite(self.norm)


class Judged(NamedTuple):
    """The expected result of an evaluation."""

    loss: float
    targets: int
    right: tuple[int, ...]
    """The number of correct targets, for each of the task's measures."""
    unsure: int = 0
    """The number of targets whose correctness may depend on rounding."""


class Reference(ABC):
    """One process with the whole tiny model in float32.

    `tops` has, for each measure of the task, the number of highest logits among which a correct
    target is."""

    def __init__(
        self,
        small: Tiny,
        spec: ModelSpec,
        own: Learner,
        data: Sources,
        device: torch.device,
        tops: Sequence[int] = (1,),
    ) -> None:
        self._small, self._spec, self._data, self._device = small, spec, data, device
        self._layout, self._seed, self._tops = small.layout, small.config.trainer.seed, tops
        self._smoothing = small.config.trainer.label_smoothing
        self._exact = replace(EXACT, least=float8.ERROR[small.layout.float8])
        self._scale = self._layout.data_ranks if self._exact.least else 1  # rounds as the engine
        self._margin = 0.05 if small.low_precision or self._exact.least else 1e-4
        self.model, self.published = own.model.to(device), own.published
        float8.apply(self.model, spec, small.layout, torch.device("cpu"), gathers=False)
        self._named = dict(self.model.named_parameters())
        self.held = {name for name, parameter in self._named.items() if not parameter.requires_grad}
        self.order = self._order_of_computation()
        self.model.train()
        self._block_seed = 0
        for index, name in enumerate(spec.blocks):
            self.model.get_submodule(name).register_forward_pre_hook(self._seeding(index))
        self._listener, self._outputs = Listener([self.model]), Outputs()
        self._loads = Loads(self.model, spec, small.layout.router_bias_rate)
        self._optimizer = optimizer_of(own, small, spec.blocks)
        self._scheduler = scheduler_of(self._optimizer, small.config)

    @abstractmethod
    def held_out(self, state: State) -> Judged:
        """Evaluate the held-out samples with the weights of `state`."""

    @abstractmethod
    def _collated(self, samples: Sequence[Any]) -> tuple[Any, Any]:
        """Return the inputs and targets of a micro-batch."""

    @abstractmethod
    def _output(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        """Return the logits, or whatever the loss of an own module takes."""

    @abstractmethod
    def _loss_sum(self, model: nn.Module, inputs: Any, targets: Any) -> torch.Tensor: ...

    @abstractmethod
    def _counted(self, inputs: Any, targets: Any) -> int:
        """Count the targets of a micro-batch."""

    @abstractmethod
    def _example(self) -> Any:
        """Return inputs for a first forward pass."""

    def weights(self) -> Tensors:
        """Return every tensor of a checkpoint of the model: parameters and persistent buffers."""
        tied = {alias: name for alias, name in self._spec.tied.items() if alias not in self._named}
        stored = self.model.state_dict()
        kept = {name: value for name, value in stored.items() if name not in tied}
        return {name: value.detach().cpu().clone() for name, value in kept.items()}

    def step(self, step: int, before: State, gradients: Tensors, norm: float) -> Expected:
        """Take a step from the engine's state before it; update by the engine's gradients and norm.

        So a wrong gradient is not reported as a wrong update, too. Called for each, in order."""
        self._load(before)
        parts = self._whole_step(step)
        counted = self._count(parts)
        if step == self._small.overflow_step:
            if self._scheduler is not None:
                self._scheduler.step()
            named = self._named.keys() | self._loads.biases.keys()
            kept = {key: value for key, value in before.items() if key[0] in named}
            return Expected(math.inf, math.inf, {}, kept, counted, EXACT)
        loss, own = self._gradients(self.model, step, parts, counted)
        outputs, rounding = self._outputs, self._exact
        if self._small.low_precision:
            rounding = self._rounding(step, parts, counted, loss, own)
        self._update(step, gradients, norm)
        other = self._loads.biases if self._small.low_precision else ()  # they follow rounding
        after = {(n, WEIGHT): value for n, value in self.weights().items() if n not in other}
        for name, parameter in self._named.items():
            for part, value in self._optimizer.state[parameter].items():
                if torch.is_tensor(value):
                    after[name, part] = value.detach().cpu().clone()
        return Expected(loss, norm_of(own), own, after, counted, rounding, outputs)

    def norms(self, steps: int) -> list[float]:
        """Return the gradient norms of the first steps: the engine's, up to rounding."""
        found = []
        for step in range(steps):
            parts = self._whole_step(step)
            _, own = self._gradients(self.model, step, parts, self._count(parts))
            found.append(norm_of(own))
            self._update(step, own, found[-1])
        return found

    def _count(self, parts: Iterable[MicroBatch]) -> int:
        return sum(self._counted(part.inputs, part.targets) for part in parts)

    def _judged(self, samples: Sequence[Any], size: int) -> Judged:
        """Evaluate samples, `size` at a time."""
        total, counted, right, unsure = 0.0, 0, [0] * len(self._tops), 0
        self.model.eval()
        with torch.no_grad():
            for start in range(0, len(samples), size):
                inputs, targets = self._collated(samples[start : start + size])
                total += float(self._loss_sum(self.model, inputs, targets))
                counted += self._counted(inputs, targets)
                for index, most in enumerate(self._tops):
                    logits = self._output(self.model, inputs)
                    found = right_of(logits, targets, most, self._margin)
                    right[index], unsure = right[index] + found[0], unsure + found[1]
        self.model.train()
        return Judged(total / counted, counted, tuple(right), unsure)

    def _gradients(
        self, model: nn.Module, step: int, parts: Sequence[MicroBatch], counted: int
    ) -> tuple[float, Tensors]:
        """Return the mean loss of micro-batches with `counted` targets, and its gradients."""
        model.zero_grad()
        total, self._outputs = 0.0, {}
        self._loads.begin()
        for part in parts:
            self._start_dropout(step, part.data_rank, part.number)
            self._inputs = self._loads.ids = part.inputs
            tokens: dict[int, Any] = {part.data_rank: None}
            if self._spec.language.vocabulary:
                division = division_of(self._layout, self._spec.language.heads)
                tokens = parts_of(part.inputs, part.data_rank, division, part.start, part.row)
            self._listener.begin([{(place, part.number): ids for place, ids in tokens.items()}])
            loss = self._loss_sum(model, part.inputs, part.targets)
            (loss * self._scale / counted).backward()
            total += float(loss.detach())
            for key, value in self._listener.end().items():  # a packed row is several parts
                self._outputs[key] = self._outputs.get(key, 0) + value
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return total / counted, {n: g.float().cpu() / self._scale for n, g in found.items()}

    def _order_of_computation(self) -> dict[str, int]:
        """Return the place of each parameter in a forward pass; -1 if it takes no part."""
        called: dict[int, int] = {}

        def note(module: nn.Module, inputs: Any) -> None:
            for parameter in module.parameters(recurse=False):
                called.setdefault(id(parameter), len(called))

        hooks = [module.register_forward_pre_hook(note) for module in self.model.eval().modules()]
        with torch.no_grad():
            self._output(self.model, self._example())
        for hook in hooks:
            hook.remove()
        return {name: called.get(id(p), -1) for name, p in self._named.items()}

    def _rounding(
        self, step: int, parts: list[MicroBatch], counted: int, loss: float, own: Tensors
    ) -> Rounding:
        """Repeat the step in low precision, gradients summed in low precision and in float32."""
        dtype = getattr(torch, self._layout.precision)
        low, exact = copy.deepcopy(self.model), self._outputs
        for parameter in low.parameters():
            parameter.data = parameter.data.to(dtype)
        together = self._gradients(low, step, parts, counted)
        outputs = {key: apart(value, exact[key]) for key, value in self._outputs.items()}
        alone = [self._gradients(low, step, [part], counted) for part in parts]
        summed = {
            name: torch.stack([of[name] for _, of in alone if name in of]).sum(0)
            for name in together[1]
        }
        runs = [together, (sum(loss for loss, _ in alone), summed)]
        gradients = {
            n: max(float((of[n] - value).abs().max()) for _, of in runs) for n, value in own.items()
        }
        return Rounding(
            max(abs(low_loss - loss) for low_loss, _ in runs) / loss,
            max(abs(norm_of(of) - norm_of(own)) for _, of in runs) / norm_of(own),
            gradients,
            outputs,
            max(torch.finfo(dtype).eps / 2, self._exact.least),
        )

    # Samples

    def _numbers(self, step: int, data_rank: int) -> np.ndarray:
        """Return the numbers of the samples, [accumulation, micro-batch]: the stream of all epochs
        in parts of a step, each viewed as [accumulation, data ranks, micro-batch]."""
        layout, batch, size = self._layout, self._layout.train_batch, len(self._data.training)
        epochs = range(step * batch // size, (step + 1) * batch // size + 1)
        stream = np.concatenate([permutation(self._seed, epoch, size) for epoch in epochs])
        first = step * batch - epochs.start * size
        shape = layout.accumulation, layout.data_ranks, layout.micro_batch
        return stream[first : first + batch].reshape(shape)[:, data_rank]  # type: ignore[no-any-return]

    def _samples(self, step: int, data_rank: int) -> list[list[Any]]:
        """Return the samples of each micro-batch of a data rank."""
        return [[self._data.training[i] for i in part] for part in self._numbers(step, data_rank)]

    def _evaluated_samples(self) -> list[Any]:
        """Return the samples of an evaluation."""
        held_out = self._data.held_out
        return [held_out[i] for i in range(min(len(held_out), self._small.held_out))]

    def _micro_batches(self, step: int, data_rank: int) -> list[MicroBatch]:
        parts = self._samples(step, data_rank)
        return [MicroBatch(data_rank, i, *self._collated(part)) for i, part in enumerate(parts)]

    def _whole_step(self, step: int) -> list[MicroBatch]:
        """List all micro-batches, in the order in which running statistics include them."""
        ranks = range(self._layout.data_ranks)
        parts = [part for rank in ranks for part in self._micro_batches(step, rank)]
        return sorted(parts, key=lambda part: (part.number, part.data_rank))

    # Randomness

    def _start_dropout(self, step: int, data_rank: int, micro_batch: int) -> None:
        self._block_seed = seed_of(seed_of("dropout", self._seed, step, data_rank), micro_batch)
        torch.manual_seed(self._block_seed)

    def _seeding(self, index: int) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            if module.training:
                torch.manual_seed((self._block_seed + index + 1) % 2**63)

        return hook

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

    def _update(self, step: int, gradients: Tensors, norm: float) -> None:
        limit = float(self._small.config.settings["gradient_clipping"])
        for name, parameter in self._named.items():
            parameter.grad = None
            if (gradient := gradients.get(name)) is not None:
                parameter.grad = gradient.reshape(parameter.shape).to(self._device, copy=True)
        if limit > 0:  # to the last bit, as Muon rounds to 16 of them
            nn.utils.clip_grads_with_norm_(self._named.values(), limit, torch.tensor(norm))
        groups = self._optimizer.param_groups
        if step >= self._small.steps:
            for group in groups:
                group["lr"] = PROBE_RATE
        scheduled = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] *= group["lr_multiplier"]
        self._optimizer.step()
        for group, rate in zip(groups, scheduled, strict=True):
            group["lr"] = rate
        self._optimizer.zero_grad()
        self._loads.move()
        if self._scheduler is not None:
            self._scheduler.step()


def right_of(
    logits: torch.Tensor, targets: torch.Tensor, most: int, margin: float
) -> tuple[int, int]:
    """Count targets among the `most` highest logits, and those within `margin` of the edge."""
    logits, targets = logits.float().flatten(0, -2), targets.flatten()
    logits, targets = logits[targets != IGNORED], targets[targets != IGNORED]
    if not len(targets):
        return 0, 0
    own = logits.gather(1, targets[:, None])[:, 0]
    others = logits.scatter(1, targets[:, None], -math.inf).topk(most).values[:, -1]
    unsure = (own - others).abs() <= margin * logits.abs().max()
    return int((own > others).sum()), int(unsure.sum())


def norm_of(gradients: Tensors) -> float:
    return float(torch.stack([value.double().norm() for value in gradients.values()]).norm())


def matrices_of(model: nn.Module, blocks: Sequence[str]) -> set[str]:
    """Return the weights that Muon updates, by docs/optimizers.md."""
    found = set[str]()
    for block in blocks:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if not isinstance(module, nn.Embedding | nn.Conv1d):
                own = module.named_parameters(name, recurse=False)
                found |= {key for key, p in own if p.ndim in (2, 3) and 1 not in p.shape[-2:]}
    return found


class MuonOfTorch(torch.optim.AdamW):
    """`torch.optim.Muon`'s update, of each expert, in groups of one with `muon`; else AdamW."""

    def __init__(self, groups: list[dict[str, Any]], **params: Any) -> None:
        halves = {True: params.pop("muon_lr", None), False: params.pop("adam_lr", None)}
        for group in groups:
            if (rate := halves[group["muon"]]) is not None:
                group["lr_multiplier"] *= rate / params["lr"]
        ours = "momentum", "nesterov", "ns_steps", "adjust_lr_fn"
        wanted = {name: params.pop(name) for name in ours if name in params}
        self._muon = torch.optim.Muon([torch.zeros(2, 2)], **wanted).defaults
        super().__init__(groups, **params)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        everything = self.param_groups
        self.param_groups = [group for group in everything if not group["muon"]]
        super().step()
        self.param_groups = everything
        for group in everything:
            [parameter] = group["params"]
            if group["muon"] and parameter.grad is not None:
                zeros = torch.zeros_like(parameter)
                buffer = self.state[parameter].setdefault("momentum_buffer", zeros)
                tensors = parameter.detach(), parameter.grad, buffer
                chosen: Any = self._muon | {key: group[key] for key in ("lr", "weight_decay")}
                muon(*([*t] if t.ndim == 3 else [t] for t in tensors), **chosen, has_complex=False)


def optimizer_of(own: Learner, small: Tiny, blocks: Sequence[str]) -> torch.optim.Optimizer:
    """Build PyTorch's optimizer, tensor by tensor, with the config's parameters, DeepSpeed's
    defaults and Trainer's groups. Each parameter is a group by itself.
    """
    from transformers import Trainer

    wanted, section = small.config.optimizer, small.config.trainer
    matrices = matrices_of(own.model, blocks) if wanted.type == "Muon" else set[str]()
    decoupled = wanted.type == "Adam" and wanted.params.get("adam_w_mode", True)
    params = {key: value for key, value in wanted.params.items() if key not in NOT_OF_TORCH}
    params = {"weight_decay": 0.0, **params, "foreach": False}
    named = dict(own.model.named_parameters())
    decayed = set(named)
    if section.weight_decay_excludes != "nothing":
        decayed &= set(Trainer.get_decay_parameter_names(None, own.model))
    groups = []
    for key, parameter in named.items():
        multiplier, decay = own.groups.get(key, (1.0, None))
        if decay is None:
            decay = params["weight_decay"] if key in decayed else 0.0
        group = {"params": [parameter], "lr": params["lr"], "lr_multiplier": multiplier}
        groups.append({**group, "weight_decay": decay, "muon": key in matrices})
    if build := NAMED["optimizer"].get(wanted.type):
        return build(groups, **wanted.params)  # type: ignore[no-any-return]
    name = "AdamW" if decoupled else wanted.type
    kind: Any = MuonOfTorch if matrices else getattr(torch.optim, name)
    return kind(groups, **params)  # type: ignore[no-any-return]


def scheduler_of(optimizer: torch.optim.Optimizer, config: Config) -> Any:
    """Build DeepSpeed's own scheduler, or transformers', which is stepped after each update."""
    from transformers import get_scheduler

    if (section := config.scheduler) is None:
        return None
    if section.type[0].isupper():  # transformers' names are in lower case
        place = f"scheduler.type: {section.type}, compared with DeepSpeed's own"
        lr_schedules = required("deepspeed.runtime.lr_schedules", place, "deepspeed")
        return getattr(lr_schedules, section.type)(optimizer, **section.params)
    steps = (section.params.get(f"{which}_num_steps", 0) for which in ("warmup", "total"))
    least = {"min_lr_rate": rate} if (rate := section.params.get("cos_min_ratio")) else None
    return get_scheduler("cosine_with_min_lr" if least else section.type, optimizer, *steps, least)
