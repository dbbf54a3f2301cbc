"""Where DeepSpeed keeps weights, float32 masters and moments under each ZeRO stage, as whole tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import nn

from trainer.engines.deepspeed_tensor import Split
from trainer.engines.engine import Observer
from trainer.engines.homes import Kind, homes, owners, place_of, tell
from trainer.parallel.mesh import Grid
from trainer.ranks import Ranks
from trainer.state import MASTER, WEIGHT, Piece
from trainer.tasks.task import bare_name


class MasterState:
    """Reads and writes the training state of a `deepspeed.DeepSpeedEngine`, of all stages if it is a pipeline's."""

    def __init__(
        self, engine: Any, trainee: nn.Module, ranks: Ranks, grid: Grid | None = None, split: Split | None = None
    ) -> None:
        self._trainee = trainee
        self._ranks = ranks
        self._grid = grid
        self._split = split
        self._partitioned = engine.zero_optimization_stage() == 3
        self._optimizer = engine.optimizer
        # without ZeRO in float32 the engine's optimizer is PyTorch's own, over the model's parameters
        self._inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        dtypes = {p.dtype for p in trainee.parameters()}
        self._low_precision = dtypes != {torch.float32}
        self._scaler = getattr(engine.optimizer, "loss_scaler", None) if torch.float16 in dtypes else None
        self._flat = next((name for name in _FLAT if hasattr(engine.optimizer, name)), None)

    def pieces(self) -> list[Piece]:
        """Every parameter's weight, then its float32 master and optimizer state; then persistent buffers."""
        self._make_states()
        parts = [MASTER] if self._low_precision else []
        parts += self._state_keys()
        held: dict[Kind, torch.Tensor] = {}
        for name, parameter in self._trainee.named_parameters():  # a tied one comes once, under its first name
            name, shape = bare_name(name), tuple(getattr(parameter, "ds_shape", parameter.shape))
            if self._split:
                shape = self._split.shape(parameter, shape)
            held[name, WEIGHT, shape, parameter.dtype] = parameter
            held |= {(name, part, shape, torch.float32): parameter for part in parts if parameter.requires_grad}
        for name, buffer in _persistent_buffers(self._trainee):
            held[bare_name(name), WEIGHT, tuple(buffer.shape), buffer.dtype] = buffer
        found = homes(held, self._grid)
        owner = owners(found, self._ranks, self._grid)
        place = place_of(self._grid)
        return [self._piece(kind, held.get(kind), home == place, owner[kind[0]]) for kind, home in found.items()]

    def gradients(self, observe: Observer) -> None:
        """Tell `observe` every gradient, whole, averaged and unscaled. Collective; before `engine.step`."""
        scale = float(getattr(self._optimizer, "loss_scale", 1.0))
        found = {
            bare_name(name): self._whole(parameter, safe_get_full_grad(parameter).detach().float()) / scale
            for name, parameter in self._trainee.named_parameters()
            if parameter.requires_grad
        }
        tell(found, self._grid, observe)

    def scalars(self) -> dict[str, float]:
        # all are equal, and each is a wait for the device
        found = {"optimizer_step": next((float(s["step"]) for s in self._inner.state.values() if "step" in s), 0.0)}
        known = [key for key in _SCALER_KEYS if hasattr(self._scaler, key)]
        return found | {f"scaler.{key}": float(getattr(self._scaler, key)) for key in known}

    def restore(self, scalars: Mapping[str, float]) -> None:
        self._make_states()
        for state in self._inner.state.values():
            step = scalars["optimizer_step"]
            if torch.is_tensor(state.get("step")):
                state["step"].fill_(step)
            elif "step" in state:
                state["step"] = int(step)
        for key in _SCALER_KEYS:
            if f"scaler.{key}" in scalars and hasattr(self._scaler, key):
                kind = type(getattr(self._scaler, key))
                setattr(self._scaler, key, kind(scalars[f"scaler.{key}"]))

    # Reading and writing one tensor

    def _piece(self, kind: Kind, held: torch.Tensor | None, home: bool, owner: int) -> Piece:
        part = kind[1]

        def read() -> torch.Tensor | None:
            if held is None or not home:
                return None
            value = self._whole(held, self._read(held, part))
            return value.detach() if owner == self._ranks.rank else None

        def write(value: torch.Tensor) -> None:
            if isinstance(held, nn.Parameter):
                self._write(held, part, self._split.own(held, value) if self._split else value)
            elif held is not None:
                _copy(held, value)

        return Piece(*kind, owner, read, write)

    def _whole(self, held: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return self._split.whole(held, own) if self._split else own

    def _read(self, held: torch.Tensor, part: str) -> torch.Tensor:
        if part == WEIGHT:
            if not (self._partitioned and isinstance(held, nn.Parameter)):
                return held
            with GatheredParameters([held]):
                return held.detach().clone()
        if part == MASTER:
            return safe_get_full_fp32_param(held)
        if self._flat is None:
            return self._inner.state[held][part]
        return safe_get_full_optimizer_state(held, part)

    def _write(self, parameter: nn.Parameter, part: str, value: torch.Tensor) -> None:
        if part == WEIGHT:
            self._write_weight(parameter, value)
        elif part == MASTER:
            self._write_master(parameter, value)
        elif self._flat is None:
            _copy(self._inner.state[parameter][part], value)
        else:
            safe_set_full_optimizer_state(parameter, value.to(parameter.device, torch.float32), part)

    def _write_weight(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        if self._partitioned:
            with GatheredParameters([parameter], modifier_rank=0):
                if self._ranks.first:
                    _copy(parameter, value)
        else:
            _copy(parameter, value)
        if not self._low_precision and self._flat is not None:
            self._write_master(parameter, value)

    def _write_master(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        safe_set_full_fp32_param(parameter, value.to(parameter.device, torch.float32))

    # What the optimizer keeps

    def _updated(self) -> list[torch.Tensor]:
        """The tensors that the inner optimizer really updates: flat partitions, or the parameters themselves."""
        if self._flat is not None:
            return list(getattr(self._optimizer, self._flat))
        return [p for p in self._trainee.parameters() if p.requires_grad]

    def _state_keys(self) -> list[str]:
        first = self._updated()[0]
        return sorted(k for k, v in self._inner.state[first].items() if torch.is_tensor(v) and v.shape == first.shape)

    def _make_states(self) -> None:
        """Have the optimizer make its moments, as it would in its first step, without moving a weight.

        A step at learning rate 0 with zero gradients; the step count is put back to 0.
        """
        updated = self._updated()
        if all(self._inner.state.get(tensor) for tensor in updated):
            return
        groups = self._inner.param_groups
        kept = [(group["params"], group["lr"]) for group in groups]
        for group in groups:
            group["params"], group["lr"] = [], 0.0
        for tensor in updated:  # one at a time, so that one tensor's gradient is all that is needed beside it
            gradient, tensor.grad = tensor.grad, torch.zeros_like(tensor)
            groups[0]["params"] = [tensor]
            self._inner.step()
            tensor.grad = gradient
        for group, (parameters, rate) in zip(groups, kept, strict=True):
            group["params"], group["lr"] = parameters, rate
        for state in self._inner.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"].zero_()
            elif "step" in state:
                state["step"] = 0
        link: Callable[[], None] | None = getattr(self._optimizer, "_lazy_init_hp_params_optimizer_state", None)
        if link is not None:
            link()


# where ZeRO-3, ZeRO-1/2 and the bfloat16 optimizer of ZeRO-1 keep their float32 partitions
_FLAT = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def _persistent_buffers(root: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    stored = set(root.state_dict(keep_vars=True)) if any(True for _ in root.buffers()) else set()
    return [(name, buffer) for name, buffer in root.named_buffers() if name in stored]


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(value)
