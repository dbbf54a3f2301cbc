"""The same run in one process, by PyTorch, transformers and, for the schedules, DeepSpeed's own
classes alone.

Written anew from the contracts: order of samples, padding, seeds of dropout, loss, clipping, decay
groups. Only the initial values share code with the run, except those read from files or made by
PEFT.

Each step starts from the engine's state before it. So its error is that of one step: nothing
accumulates from step to step, an optimizer that divides noise by noise (eps 1e-8) stays comparable,
and an error is found in the step that made it.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainer.certify.outputs import Listener, Outputs, apart
from trainer.certify.parameters import Learner
from trainer.certify.recording import State, Tensors
from trainer.certify.rounding import STEPS, rows_of
from trainer.certify.samples import Documents
from trainer.certify.tiny_run import LONGEST, PROBE_RATE, Tiny
from trainer.config import Config
from trainer.data.text.token_files import Encoded
from trainer.models.spec import ModelSpec
from trainer.state import MASTER, WEIGHT

IGNORED = -100
NOT_OF_TORCH = ("adam_w_mode", "torch_adam", "bias_correction", "fp32_optimizer_states", "fused")


class MicroBatch(NamedTuple):
    data_rank: int
    number: int
    """Its number among the micro-batches of its data rank."""
    inputs: torch.Tensor
    """[batch, sequence]."""
    targets: torch.Tensor


@dataclass(frozen=True)
class Expected:
    """The expected result of one step."""

    loss: float
    norm: float
    gradients: Tensors
    state: State
    """The state after the step: weights (float32) and optimizer state."""
    targets: int
    rounding: Rounding | None = None
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


@dataclass(frozen=True)
class Rounding:
    """The largest differences of one process in the run's low precision from float32."""

    loss: float
    norm: float
    gradients: dict[str, float]
    outputs: dict[tuple[int, int, str], float]
    least: float
    """The relative rounding of one number."""


class Reference:
    """One process with the whole small model in float32."""

    _most: tuple[int, ...] = (1,)
    """For each measure, the number of highest logits among which a correct target is."""

    def __init__(
        self, small: Tiny, spec: ModelSpec, own: Learner, documents: Documents, device: torch.device
    ) -> None:
        self._small, self._spec, self._documents, self._device = small, spec, documents, device
        self._layout, self._seed = small.layout, small.config.trainer.seed
        self._smoothing = small.config.trainer.label_smoothing
        self._margin = 1e-4 if small.layout.precision == "float32" else 0.05
        self.model = own.model.to(device)
        self._named = dict(self.model.named_parameters())
        self.held = {name for name, parameter in self._named.items() if not parameter.requires_grad}
        self.order: dict[str, int] = {}
        """Parameter -> its place in the order of computation of a forward pass."""
        self._has_own_loss, self._adds_to_loss = self._try_forward()
        self.model.train()
        self._block_seed = 0
        for index, name in enumerate(spec.blocks):
            self.model.get_submodule(name).register_forward_pre_hook(self._seeding(index))
        if (alpha := small.config.trainer.neftune_alpha) and not small.config.trainer.data.packs:
            table: nn.Module = self.model.get_input_embeddings()  # type: ignore[operator]
            table.register_forward_hook(self._adding_noise(alpha))
        self._listener, self._outputs = Listener([self.model]), Outputs()  # which hears noise, too
        self._optimizer = optimizer_of(self.model, small, own.groups)
        self._scheduler = scheduler_of(self._optimizer, small.config)

    def weights(self) -> Tensors:
        """Return every tensor that a checkpoint of the model has: parameters, and persistent
        buffers.
        """
        tied = {alias: name for alias, name in self._spec.tied.items() if alias not in self._named}
        stored = self.model.state_dict()
        return {
            name: value.detach().cpu().clone() for name, value in stored.items() if name not in tied
        }

    def step(self, step: int, before: State, gradients: Tensors, norm: float) -> Expected:
        """Take a step from the engine's state before it; update by the engine's gradients and norm.

        So a wrong gradient is not reported as a wrong update, too. Called for each step, in order.
        """
        self._load(before)
        found = self._whole_step(step)
        counted = sum(self._counted(part.inputs, part.targets) for part in found)
        if step == self._small.overflow_step:
            if self._scheduler is not None:
                self._scheduler.step()
            kept = {key: value for key, value in before.items() if key[0] in self._named}
            return Expected(math.inf, math.inf, {}, kept, counted)
        loss, own = self._gradients(self.model, step, found, counted)
        expected, outputs = norm_of(own), self._outputs
        rounding = (
            None
            if self._layout.precision == "float32"
            else self._rounding(step, found, counted, loss, own)
        )
        self._update(step, gradients, norm)
        after = {(name, WEIGHT): value for name, value in self.weights().items()}
        for name, parameter in self._named.items():
            kept = self._optimizer.state[parameter].items()
            after |= {
                (name, part): value.detach().cpu().clone()
                for part, value in kept
                if torch.is_tensor(value)
            }
        return Expected(loss, expected, own, after, counted, rounding, outputs)

    def norms(self, steps: int) -> list[float]:
        """Return the gradient norms of the first steps of a run of its own: the engine's, up to
        rounding.
        """
        found = []
        for step in range(steps):
            parts = self._whole_step(step)
            counted = sum(self._counted(part.inputs, part.targets) for part in parts)
            _, own = self._gradients(self.model, step, parts, counted)
            found.append(norm_of(own))
            self._update(step, own, found[-1])
        return found

    def continued(self, documents: list[Encoded]) -> list[Encoded]:
        """Replace the tokens of every other document by the model's most likely ones, so that its
        accuracy is not 0.
        """
        self.model.eval()
        found = list(documents)
        for index in range(0, len(found), 2):
            tokens = torch.tensor([list(found[index].tokens)], device=self._device)
            for place in range(1, tokens.shape[1]):
                with torch.no_grad():
                    logits = self.model(input_ids=tokens[:, :place], use_cache=False).logits
                tokens[0, place] = logits[0, -1, 1:].argmax() + 1
            found[index] = found[index]._replace(tokens=tokens[0].tolist())
        self.model.train()
        return found

    def held_out(self, state: State) -> Judged:
        """Evaluate the held-out samples, each by itself: mean loss, number of targets, number of
        correct ones.

        By micro-batches if the model adds a loss of a whole micro-batch, or padding moves its
        logits.
        """
        self._load(state)
        self.model.eval()
        together = self._adds_to_loss or self._padding_counts()
        limit, size = self._small.held_out, self._layout.micro_batch if together else 1
        documents = [self._sample(document) for document in self._documents.held_out[:limit]]
        documents += [(documents[0][0], [IGNORED] * len(documents[0][0]))] * (-limit % size)
        return self._judged(
            self._padded(documents[start : start + size])
            for start in range(0, len(documents), size)
        )

    def _judged(self, batches: Iterable[tuple[Any, Any]]) -> Judged:
        total, counted, right, unsure = 0.0, 0, [0] * len(self._most), 0
        with torch.no_grad():
            for inputs, targets in batches:
                total += float(self._loss_sum(self.model, inputs, targets))
                counted += self._counted(inputs, targets)
                for index, most in enumerate(self._most):
                    found = right_of(self._logits(inputs), targets, most, self._margin)
                    right[index], unsure = right[index] + found[0], unsure + found[1]
        self.model.train()
        return Judged(total / counted, counted, tuple(right), unsure)

    def _logits(self, inputs: Any) -> torch.Tensor:
        return self.model(input_ids=inputs, use_cache=False).logits  # type: ignore[no-any-return]

    def _sample(self, document: Encoded) -> tuple[list[int], list[int]]:
        return sample_of(document, self._small.row)

    def _gradients(
        self, model: nn.Module, step: int, found: list[MicroBatch], counted: int
    ) -> tuple[float, Tensors]:
        model.zero_grad()
        total, self._outputs = 0.0, {}
        for part in found:
            self._start_dropout(step, part.data_rank, part.number)
            self._inputs = part.inputs
            place, words = (part.data_rank, part.number), self._spec.language.vocabulary > 0
            self._listener.begin({place: part.inputs if words else None})
            loss = self._loss_sum(model, part.inputs, part.targets)
            (loss / counted).backward()
            total += float(loss.detach())
            for key, value in self._listener.end().items():  # a packed row is several parts
                self._outputs[key] = self._outputs.get(key, 0) + value
        named = model.named_parameters()
        return total / counted, {
            n: p.grad.float().cpu().clone() for n, p in named if p.grad is not None
        }

    def _loss_sum(
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Return the model's own mean loss, with all that it adds, times the number of targets."""
        smoothing = self._smoothing if model.training else 0.0

        def plain(logits: torch.Tensor, smoothing: float) -> torch.Tensor:
            told: Any = {"reduction": "sum", "ignore_index": IGNORED, "label_smoothing": smoothing}
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), **told)

        if self._has_own_loss and bool((targets != IGNORED).any()):
            own = model(input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False)
            total = own.loss * (targets != IGNORED).sum()
            return (
                total + plain(own.logits, smoothing) - plain(own.logits, 0.0)
                if smoothing
                else total
            )  # type: ignore[no-any-return]
        return plain(model(input_ids=inputs, use_cache=False).logits, smoothing)

    def _counted(self, inputs: Any, targets: Any) -> int:
        return int((targets != IGNORED).sum())

    def _try_forward(self) -> tuple[bool, bool]:
        """Return two flags: if the model has a loss over shifted labels, and if it adds anything to
        it.
        """
        ids = torch.arange(1, 9, device=self._device)[None] % self._spec.language.vocabulary
        logits = self._watch_order(
            lambda: self.model(input_ids=ids, use_cache=False).logits.float()
        )
        with torch.no_grad():
            try:
                shifted = {"shift_labels": ids, "use_cache": False}
                losses = [
                    self.model(input_ids=ids, labels=other, **shifted).loss
                    for other in (ids, ids.roll(3))
                ]
            except Exception:  # whatever a model's own code raises for an unknown argument
                return False, False
        known = losses[0] is not None and bool(losses[0] == losses[1])
        plain = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return known, known and abs(float(losses[0]) / float(plain) - 1) > 1e-5

    def _watch_order(self, forward: Callable[[], Any]) -> Any:
        """Run a forward pass, and note the order in which modules with parameters begin."""
        called: dict[int, int] = {}

        def note(module: nn.Module, inputs: Any) -> None:
            for parameter in module.parameters(recurse=False):
                called.setdefault(id(parameter), len(called))

        hooks = [module.register_forward_pre_hook(note) for module in self.model.eval().modules()]
        with torch.no_grad():
            output = forward()
        for hook in hooks:
            hook.remove()
        self.order = {name: called.get(id(p), -1) for name, p in self._named.items()}
        return output

    def _padding_counts(self) -> bool:
        """Return True if logits depend on how many tokens follow in the row, as they do where ties
        are ranked.
        """
        ids = (
            torch.arange(1, LONGEST + 1, device=self._device)[None]
            % (LONGEST // 2)
            % self._spec.language.vocabulary
        )
        moved = 0.0
        with torch.no_grad():
            long = self.model(input_ids=ids, use_cache=False).logits.float()
            for length in range(LONGEST // 2, LONGEST, 2):
                short = self.model(input_ids=ids[:, :length], use_cache=False).logits.float()
                moved = max(moved, float((short - long[:, :length]).abs().max()))
        return moved > 1e-5 * float(long.abs().max())

    def _rounding(
        self, step: int, found: list[MicroBatch], counted: int, loss: float, own: Tensors
    ) -> Rounding:
        """Repeat the step in low precision, twice: with gradients summed in low precision and in
        float32.
        """
        dtype = getattr(torch, self._layout.precision)
        low, exact = copy.deepcopy(self.model), self._outputs
        for parameter in low.parameters():
            parameter.data = parameter.data.to(dtype)
        together = self._gradients(low, step, found, counted)
        outputs = {key: apart(value, exact[key]) for key, value in self._outputs.items()}
        alone = [self._gradients(low, step, [part], counted) for part in found]
        summed = {
            name: torch.stack([of[name] for _, of in alone if name in of]).sum(0)
            for name in together[1]
        }
        runs = [together, (sum(loss for loss, _ in alone), summed)]
        return Rounding(
            max(abs(of[0] - loss) for of in runs),
            max(abs(norm_of(of[1]) - norm_of(own)) for of in runs),
            {
                n: max(float((of[1][n] - value).abs().max()) for of in runs)
                for n, value in own.items()
            },
            outputs,
            torch.finfo(dtype).eps / 2,
        )

    def projected(self, state: State, step: int) -> tuple[list[Tensors], list[Tensors]]:
        """Compute gradients of `rounding.STEPS` steps at the run's rounded weights, in float32 and
        as it does.
        """
        self._load(state)
        dtype, layout, size = (
            getattr(torch, self._layout.precision),
            self._layout,
            self._spec.language.vocabulary,
        )
        low, exact = copy.deepcopy(self.model), copy.deepcopy(self.model)
        for rounded, parameter in zip(low.parameters(), exact.parameters(), strict=True):
            rounded.data = parameter.data.to(dtype)
            parameter.data = rounded.data.float()
        found: tuple[list[Tensors], list[Tensors]] = ([], [])
        places = [
            (rank, number)
            for number in range(layout.accumulation)
            for rank in range(layout.data_ranks)
        ]
        for later in range(step, step + STEPS):
            parts = []
            for rank, number in places:
                rows = [
                    (i.tolist(), t.tolist())
                    for i, t in rows_of(self._small, size, later, rank, number)
                ]
                parts.append(MicroBatch(rank, number, *self._padded(rows)))
            counted = sum(part.targets.numel() for part in parts)
            for gradients, model in zip(found, (exact, low), strict=True):
                gradients.append(self._gradients(model, later, parts, counted)[1])
        return found

    # Samples

    def _numbers(self, step: int, data_rank: int, size: int) -> np.ndarray:
        """Return the numbers of the samples, [accumulation, micro-batch]: the stream of all epochs
        in parts of a step, each viewed as [accumulation, data ranks, micro-batch]."""
        layout, batch = self._layout, self._layout.train_batch
        epochs = range(step * batch // size, (step + 1) * batch // size + 1)
        stream = np.concatenate(
            [
                np.random.Generator(np.random.PCG64([self._seed, e])).permutation(size)
                for e in epochs
            ]
        )
        first = step * batch - epochs.start * size
        ids = stream[first : first + batch].reshape(
            layout.accumulation, layout.data_ranks, layout.micro_batch
        )
        return ids[:, data_rank]  # type: ignore[no-any-return]

    def _whole_step(self, step: int) -> list[MicroBatch]:
        """List the micro-batches of all data ranks, in the order in which running statistics
        include them.
        """
        found = [
            part
            for rank in range(self._layout.data_ranks)
            for part in self._micro_batches(step, rank)
        ]
        return sorted(found, key=lambda part: (part.number, part.data_rank))

    def _micro_batches(self, step: int, data_rank: int) -> list[MicroBatch]:
        layout, documents = self._layout, self._documents.training
        numbers = self._numbers(step, data_rank, len(documents))
        parts = [[self._sample(documents[i]) for i in part] for part in numbers]
        # a pipeline pads its micro-batches to one shape, which affects attention's dropout
        width = max(len(s[0]) for part in parts for s in part) if layout.pipeline > 1 else 0
        return [
            MicroBatch(data_rank, index, *self._padded(part, width))
            for index, part in enumerate(parts)
        ]

    def _padded(
        self, samples: list[tuple[list[int], list[int]]], width: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(width, *(len(inputs) for inputs, _ in samples))
        inputs = [row + [0] * (width - len(row)) for row, _ in samples]
        targets = [row + [IGNORED] * (width - len(row)) for _, row in samples]
        return torch.tensor(inputs, device=self._device), torch.tensor(targets, device=self._device)

    # Randomness

    def _start_dropout(self, step: int, data_rank: int, micro_batch: int) -> None:
        self._block_seed = seed_of(seed_of("dropout", self._seed, step, data_rank), micro_batch)
        torch.manual_seed(self._block_seed)

    def _adding_noise(self, alpha: float) -> Any:
        """Build NEFTune's hook; ids of documents are never 0, the padding."""

        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            if not module.training:
                return output
            lengths = (self._inputs != 0).sum(1)
            bounds = alpha / torch.sqrt(lengths * output.shape[-1])
            return output + (bounds[:, None, None] * (2 * torch.rand(output.shape) - 1)).to(output)

        return hook

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
        share = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        for name, parameter in self._named.items():
            gradient = gradients.get(name)
            parameter.grad = (
                None
                if gradient is None
                else gradient.reshape(parameter.shape).to(self._device) * share
            )
        if step >= self._small.steps:
            for group in self._optimizer.param_groups:
                group["lr"] = PROBE_RATE
        scheduled = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] *= group["lr_multiplier"]
        self._optimizer.step()
        for group, rate in zip(self._optimizer.param_groups, scheduled, strict=True):
            group["lr"] = rate
        self._optimizer.zero_grad()
        if self._scheduler is not None:
            self._scheduler.step()


def right_of(
    logits: torch.Tensor, targets: torch.Tensor, most: int, margin: float
) -> tuple[int, int]:
    """Count targets among the `most` highest logits, and those within a `margin` of being in or
    out.
    """
    logits, targets = logits.float().flatten(0, -2), targets.flatten()
    logits, targets = logits[targets != IGNORED], targets[targets != IGNORED]
    if not len(targets):
        return 0, 0
    own = logits.gather(1, targets[:, None])[:, 0]
    others = logits.scatter(1, targets[:, None], -math.inf).topk(most).values[:, -1]
    return int((own > others).sum()), int(
        ((own - others).abs() <= margin * logits.abs().max()).sum()
    )


def norm_of(gradients: Tensors) -> float:
    return float(torch.stack([value.double().norm() for value in gradients.values()]).norm())


def sample_of(document: Encoded, longest: int) -> tuple[list[int], list[int]]:
    """Return inputs and targets: at each position the token that follows, if it counts."""
    tokens = list(document.tokens)[: longest + 1]
    return tokens[:-1], [
        t if counts else IGNORED for t, counts in zip(tokens, document.counted, strict=False)
    ][1:]


def seed_of(*parts: int | str) -> int:
    """Return the first 63 bits of a SHA-256 over the seed's purpose."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") // 2


def optimizer_of(
    model: nn.Module, small: Tiny, own: Mapping[str, tuple[float, float | None]]
) -> torch.optim.Optimizer:
    """Build PyTorch's optimizer, tensor by tensor, with the config's parameters, DeepSpeed's
    defaults and Trainer's groups.
    Each parameter is a group by itself."""
    from transformers import Trainer

    wanted, section = small.config.optimizer, small.config.trainer
    name = (
        "AdamW" if wanted.type == "Adam" and wanted.params.get("adam_w_mode", True) else wanted.type
    )
    params = {key: value for key, value in wanted.params.items() if key not in NOT_OF_TORCH}
    named = dict(model.named_parameters())
    decayed = set(named)
    if section.weight_decay_excludes != "nothing":
        decayed &= set(Trainer.get_decay_parameter_names(None, model))
    params = {"weight_decay": 0.0, **params, "foreach": False}
    groups = []
    for key, parameter in named.items():
        decay = params["weight_decay"] if key in decayed else 0.0
        multiplier, other = own.get(key, (1.0, None))
        groups.append({"params": [parameter], "lr_multiplier": multiplier})
        groups[-1]["weight_decay"] = decay if other is None else other
    return getattr(torch.optim, name)(groups, **params)  # type: ignore[no-any-return]


def scheduler_of(optimizer: torch.optim.Optimizer, config: Config) -> Any:
    """Build DeepSpeed's own scheduler, or transformers', which is stepped after each update."""
    from deepspeed.runtime import lr_schedules
    from transformers import get_scheduler

    if (section := config.scheduler) is None:
        return None
    if hasattr(lr_schedules, section.type):
        return getattr(lr_schedules, section.type)(optimizer, **section.params)
    steps = (section.params.get(f"{which}_num_steps", 0) for which in ("warmup", "total"))
    least = {"min_lr_rate": rate} if (rate := section.params.get("cos_min_ratio")) else None
    return get_scheduler("cosine_with_min_lr" if least else section.type, optimizer, *steps, least)
