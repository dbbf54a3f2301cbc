"""DeepSpeed's weights, float32 masters and moments by name, whole, under each ZeRO stage."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed import utils
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero import GatheredParameters
from torch import nn

from trainer.distributed.dtensor import coordinate_in, own_rows, rows_of
from trainer.distributed.ranks import Ranks
from trainer.engines.deepspeed import patches
from trainer.engines.deepspeed.partitions import (
    ZeroParameter,
    is_apart,
    padded,
    partition_of,
    rows_of_partition,
    start_of,
)
from trainer.engines.deepspeed.tensor import Split, ranges
from trainer.engines.engine import Observer
from trainer.engines.optimizer_state import OptimizerState, elsewhere, fresh_state
from trainer.engines.owners import Kind, persistent_buffers, report, state_tensors_of
from trainer.errors import ConfigError, Problem
from trainer.models.materialise import materialise
from trainer.models.spec import ModelSpec
from trainer.parallel.parallel_mesh import REDUCTIONS, ParallelMesh
from trainer.state import MASTER, STEP, WEIGHT, Part, Reader, StateTensor
from trainer.tasks.task import bare_name

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


class MasterState:
    """Reads and writes the training state of all pipeline stages of a DeepSpeed engine."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        module: nn.Module,
        ranks: Ranks,
        mesh: ParallelMesh,
        split: Split,
    ) -> None:
        self._module = module
        self._ranks = ranks
        self._mesh = mesh
        self._split = split
        self._partitioned = engine.zero_optimization_stage() == 3
        self._optimizer = engine.optimizer
        # without ZeRO in float32, the engine's optimizer is PyTorch's own
        self._inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self._states = OptimizerState(self._inner)
        self._scalars: dict[str, float] = {}
        """Restored scalars that all parameters of a flat partition share."""
        dtypes = {p.dtype for p in module.parameters()}
        self.low_precision = dtypes != {torch.float32}
        scales = torch.float16 in dtypes
        self._scaler = getattr(engine.optimizer, "loss_scaler", None) if scales else None
        self._flat = next((name for name in _FLAT if hasattr(engine.optimizer, name)), None)

    def start_masters(self, blank: nn.Module, spec: ModelSpec, seed: int) -> None:
        """Give the float32 masters the initial values as they are before rounding. Collective.

        `blank` is on the meta device, with the names of this rank's parameters. One unit of it is
        materialised at a time.
        """
        named = self._module.named_parameters()
        learned = {bare_name(name): p for name, p in named if p.requires_grad}
        metas = blank.named_parameters()
        states: dict[torch.Tensor, Any] = {meta: learned.get(name) for name, meta in metas}

        def rows(meta: torch.Tensor) -> range:
            own = states.get(meta)
            if own is not None and own in self._split:
                return rows_of(self._split.own(own, meta))
            return rows_of_partition(meta) if self._partitioned else own_rows(meta)

        def take(unit: nn.Module, parameters: list[nn.Parameter]) -> None:
            names = {parameter: name for name, parameter in blank.named_parameters()}
            for parameter in parameters:
                if (name := names[parameter]) in learned:
                    own = self._split.own(learned[name], parameter.detach())
                    self._write_flat(learned[name], own, None)
                parameter.data = torch.empty(0)

        materialise(blank, spec, seed=seed, after_unit=take, rows=rows)

    def state_tensors(self) -> list[StateTensor]:
        """List weights, float32 masters, optimizer state and persistent buffers. Collective."""
        states: dict[Kind, torch.Tensor] = {}
        # a tied parameter comes once, under its first name
        for full_name, parameter in self._module.named_parameters():
            name = bare_name(full_name)
            shape = self._split.shape(parameter)
            states[name, WEIGHT, shape, parameter.dtype] = parameter
            if parameter.requires_grad:
                if self.low_precision:
                    states[name, MASTER, shape, torch.float32] = parameter
                for key, value in self._states.of(self._updated(parameter)[0]).items():
                    states[name, key, shape if value.ndim else (), value.dtype] = parameter
        for name, buffer in persistent_buffers(self._module):
            states[bare_name(name), WEIGHT, tuple(buffer.shape), buffer.dtype] = buffer
        return state_tensors_of(states, self._mesh, self._state_tensor)

    def gradients(self, observe: Observer) -> None:
        """Implement `TrainingState.gradients`, before `engine.step`."""
        scale = float(getattr(self._optimizer, "loss_scale", 1.0))
        gradients = {
            bare_name(name): self._split.whole(parameter, gradient.detach().float()) / scale
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad
            and (gradient := utils.safe_get_full_grad(parameter)) is not None
        }
        report(gradients, self._mesh, observe)

    def scalars(self) -> dict[str, float]:
        scalars = {"optimizer_step": self._states.step()}
        known = [key for key in _SCALER_KEYS if hasattr(self._scaler, key)]
        return scalars | {f"scaler.{key}": float(getattr(self._scaler, key)) for key in known}

    def restore(self, scalars: Mapping[str, float]) -> None:
        self._states.common_step = scalars["optimizer_step"]
        self._scalars = {}
        known = [key for key in _SCALER_KEYS if hasattr(self._scaler, key)]
        saved = {key: scalars[f"scaler.{key}"] for key in known if f"scaler.{key}" in scalars}
        patches.set_loss_scaler(self._scaler, saved)

    # One state tensor

    def _state_tensor(
        self, kind: Kind, states: torch.Tensor | None, is_source: bool, owner: int
    ) -> StateTensor:
        name, key = kind[:2]

        def parts() -> list[Part]:
            return [] if states is None or not is_source else self._parts(states, key, owner)

        def write(stored: Reader) -> None:
            if isinstance(states, nn.Parameter):
                self._read(kind, states, stored)
            elif states is not None:
                stored.fill(Part(states))

        still = states is not None and not states.requires_grad
        keep = partial(self._keep, name, states) if key == WEIGHT and not still else None
        return StateTensor(*kind, owner, parts, write, keep)

    def _keep(
        self, name: str, parameter: torch.Tensor | None, shapes: Mapping[str, tuple[int, ...]]
    ) -> list[StateTensor]:
        """Implement `StateTensor.keep`; what a flat partition adds for itself is zero."""
        if parameter is None:
            return elsewhere(name, shapes)
        tensors = self._updated(parameter)
        flat = self._flat is not None
        fresh = not self._states.of(tensors[0])
        self._states.keep(tensors, bool(shapes) or (flat and not fresh))
        if flat and shapes and fresh and not self._partitioned:
            self._optimizer._lazy_init_hp_params_optimizer_state()
        entries = []
        for key, value in self._states.of(tensors[0]).items():
            shape = self._split.shape(parameter) if value.ndim else ()
            if shapes and key == STEP and key not in shapes:
                self._put(name, parameter, key, torch.tensor(self._states.common_step))
            elif shapes or self._states.from_start:
                kind = (name, key, shape, value.dtype)
                entries.append(StateTensor(*kind, 0, list, partial(self._read, kind, parameter)))
            elif value.ndim:
                own = self._split.own(parameter, torch.zeros(shape))
                self._write_flat(parameter, own, key)
        return entries

    def _parts(self, states: ZeroParameter, key: str, owner: int) -> list[Part]:
        """Return what this rank writes of a parameter, of its state, or of a buffer."""
        value, start = self._own(states, key)
        split = self._split if value.ndim and states in self._split else None
        along = split.mesh if split else self._mesh.device_mesh
        at, own = (coordinate_in(along, rank) or () for rank in (owner, self._ranks.rank))
        # ranks that differ along these hold other values
        others = {split.axis} if split else set[str]()
        others |= {*REDUCTIONS["batch"], "expert_shard"} if start is not None else set()
        for axis, *places in zip(along.mesh_dim_names or (), at, own, strict=True):
            if axis not in others and places[0] != places[1]:
                return []
        return self._placed(states, value, start)

    def _placed(self, states: ZeroParameter, value: torch.Tensor, start: int | None) -> list[Part]:
        """Return this rank's values of a parameter or its state as parts of the whole.

        `value`, `start`: as of `_own`.
        """
        split = self._split if value.ndim and states in self._split else None
        place = split.place(states) if split else (0, None)
        return [Part(value, *place)] if start is None else ranges(value, start, states, *place)

    def _own(self, states: ZeroParameter, key: str) -> tuple[torch.Tensor, int | None]:
        """Return this rank's values, and where in the flat tensor they begin; None: all it has."""
        if key == WEIGHT and not (self._partitioned and isinstance(states, nn.Parameter)):
            return states.detach(), None
        if key not in (WEIGHT, MASTER):
            value = self._states.of(self._updated(states)[0])[key]
            if self._flat is None or not value.ndim:
                return value, None
        if self._partitioned:
            start = start_of(states)
            return self._partition(states, key).detach()[: max(0, states.ds_numel - start)], start
        if (fragment := states._hp_mapping) is None:
            return torch.empty(0), 0
        value = fragment.get_hp_fragment(None if key == MASTER else key)
        return value.detach(), fragment.lp_fragment_address.start

    def _partition(self, states: ZeroParameter, key: str) -> torch.Tensor:
        """Return this rank's partition under ZeRO-3, with the padding at its end."""
        if key == WEIGHT:
            own: torch.Tensor = states.ds_tensor
            if states.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE:  # on a disk
                own = torch.empty(states.ds_tensor.ds_numel, dtype=states.dtype)
                states.nvme_swapper.swap_into_buffer(states, own)
            return own
        get = utils.safe_get_local_optimizer_state
        value = utils.safe_get_local_fp32_param(states) if key == MASTER else get(states, key)
        # the buffer of what is on a disk is the next tensor's
        return value.clone() if self._optimizer.swap_optimizer else value

    def _read(self, kind: Kind, parameter: ZeroParameter, stored: Reader) -> None:
        """Read this rank's values of a parameter or of its state."""
        name, key, _, dtype = kind
        if key == WEIGHT:
            self._read_weight(parameter, stored)
        elif key != MASTER and not self._states.of(self._updated(parameter)[0])[key].ndim:
            scalar = torch.empty((), dtype=dtype)
            stored.fill(Part(scalar))
            self._put(name, parameter, key, scalar)
        elif self._partitioned:  # what DeepSpeed's getters return may be a copy
            own = torch.zeros(parameter.ds_tensor.ds_numel, device=parameter.device)
            start = start_of(parameter)
            self._fill(parameter, own[: max(0, parameter.ds_numel - start)], start, stored)
            self._optimizer.set_local_hp_param(own, parameter, None if key == MASTER else key)
        else:
            self._fill(parameter, *self._own(parameter, key), stored)

    def _read_weight(self, parameter: ZeroParameter, stored: Reader) -> None:
        """Read this rank's part of a weight, also into its float32 partition if it has the same."""
        if not self._partitioned:
            self._fill(parameter, parameter.detach(), None, stored)
        elif is_apart(parameter):
            value, start = self._own(parameter, WEIGHT)
            self._fill(parameter, value, start, stored)
            parameter.ds_tensor[len(value) :].zero_()
        else:
            with GatheredParameters([parameter], modifier_rank=0):
                if dist.get_rank(parameter.ds_process_group) == 0:
                    self._fill(parameter, parameter.detach(), None, stored)
        if self.low_precision or self._flat is None or not parameter.requires_grad:
            return
        if self._partitioned:
            own = padded(parameter, self._own(parameter, WEIGHT)[0])
            self._optimizer.set_local_hp_param(own, parameter)
        else:
            self._write_flat(parameter, parameter.detach(), None)

    def _fill(
        self, states: ZeroParameter, value: torch.Tensor, start: int | None, stored: Reader
    ) -> None:
        """Read this rank's values; `value`, `start`: as of `_own`."""
        for part in self._placed(states, value, start):
            stored.fill(part)

    def _write_flat(self, parameter: torch.Tensor, value: torch.Tensor, key: str | None) -> None:
        """Write the float32 weight, or a part of the optimizer state, into the partitions."""
        if self._partitioned:  # DeepSpeed's own setter requires a size that the ranks divide evenly
            self._optimizer.set_local_hp_param(partition_of(parameter, value), parameter, key)
        elif key is None:
            utils.safe_set_full_fp32_param(parameter, value.flatten())
        else:
            utils.safe_set_full_optimizer_state(parameter, value.flatten(), key)

    def _put(self, name: str, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        """Set a scalar: the parameter's own or, in flat partitions, the one that all share."""
        tensors = self._updated(parameter)
        if self._flat is not None:
            known = self._scalars.get(key)
            if known is not None and known != float(value):
                counts = f"{key} {float(value):g} of {name}, {known:g} of others"
                actual = f"{counts}: it had no gradient in some steps"
                expected = "one for all of a ZeRO partition, which is what DeepSpeed has"
                hint = 'Set trainer.engine to "mesh"'
                raise ConfigError(Problem("optimizer state", actual, expected, hint))
            if known is None and key == STEP and hasattr(self._inner, "ds_opt_adam"):
                # it accumulates its bias correction step by step; a power would round otherwise
                fresh_state(self._inner, tensors[0], steps=int(value))
            self._scalars[key] = float(value)
            if known is not None:
                return
        self._states.put(tensors, key, value)

    def _updated(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that the inner optimizer updates: `parameter` or all flat ones."""
        return [parameter] if self._flat is None else list(getattr(self._optimizer, self._flat))


# the attributes of ZeRO-3, ZeRO-1/2 and ZeRO-1's bfloat16 optimizer with float32 partitions
_FLAT = (
    "fp32_partitioned_groups_flat",
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
)
_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
