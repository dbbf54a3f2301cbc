"""Muon for the matrices of blocks, and AdamW for all else: each matrix is updated by one owner.

Momentum is kept and updated where the parameter is. A rank sends its part of a matrix's direction
to the matrix's owner, which orthogonalises the whole by PyTorch's Newton-Schulz iteration in
bfloat16 (Keller Jordan, 2024) and sends every holder its part of the update: what one process
computes, bit for bit. Parts travel in bfloat16, as the iteration rounds them first of all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.distributed.dtensor import local, shard_at
from trainer.models.spec import ModelSpec
from trainer.optim.decay import Group
from trainer.optim.on_shards import OnShards

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Those of `torch.optim.Muon` and of DeepSpeed's."""
EPS = 1e-7
LOW = torch.bfloat16
"""The precision in which the iteration runs, and in which its matrices are sent."""
Axes: TypeAlias = tuple[str, ...]
"""Names of a mesh's axes."""


def hidden_matrices(spec: ModelSpec) -> set[str]:
    """Return the names of the parameters that Muon updates: the matrices of a model's blocks.

    Weights of two dimensions, and experts' of three, each a matrix; no tables, no convolutions.
    """
    model = spec.build()
    blocks = tuple(f"{name}." for name in spec.blocks)
    others = (nn.Embedding, nn.modules.conv._ConvNd)
    matrices = set()
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(name, recurse=False):
            matrix = parameter.ndim in (2, 3) and min(parameter.shape[-2:]) > 1
            if matrix and key.startswith(blocks) and not isinstance(module, others):
                matrices.add(key)
    return matrices


@dataclass(frozen=True)
class Shared:
    """The matrices that Muon updates, and the ranks that hold them, whole or in parts."""

    matrices: Collection[str]
    device: torch.device
    group: dist.ProcessGroup | None
    """None if this rank is alone."""
    rank: int
    """This rank's number in `group`."""
    places: Sequence[Mapping[str, int]]
    """Each rank's coordinates by the name of the mesh's axis."""
    _senders: dict[tuple[int, Axes], frozenset[int]] = field(default_factory=dict)
    """The senders to each owner so far: on 1,024 ranks it takes milliseconds to list them."""
    _along: dict[Axes, list[tuple[int, ...]]] = field(default_factory=dict)

    def senders(self, owner: int, axes: Axes) -> frozenset[int]:
        """Return the ranks nearest to `owner` with one copy of what is divided along `axes`."""
        key = (owner, axes)
        if key not in self._senders:
            self._senders[key] = self._nearest(owner, axes)
        return self._senders[key]

    def along(self, axes: Axes) -> list[tuple[int, ...]]:
        """Return each rank's coordinates along `axes`."""
        if axes not in self._along:
            self._along[axes] = [tuple(place[axis] for axis in axes) for place in self.places]
        return self._along[axes]

    def _nearest(self, owner: int, axes: Axes) -> frozenset[int]:
        nearest: dict[tuple[int, ...], int] = {}
        places = self.along(axes)
        for rank in sorted(range(len(places)), key=lambda rank: abs(rank - owner)):
            nearest.setdefault(places[rank], rank)
        return frozenset(nearest.values())


@dataclass(frozen=True)
class Iteration:
    """The parameters of `torch.optim.Muon` that AdamW lacks."""

    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr_fn: str = "original"


class Muon(OnShards, torch.optim.AdamW):
    """AdamW, and Muon in the groups whose `muon` is True. Collective over `shared`."""

    kernels_read_all = False

    def __init__(
        self,
        params: Iterable[Group],
        shared: Shared,
        lr: float,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        **others: Any,
    ) -> None:
        """Take AdamW's arguments besides, and those of an `Iteration`.

        `muon_lr` and `adam_lr` are rates at which the schedule's is `lr`.
        """
        groups = list(params)
        for group in groups:
            own = muon_lr if group.get("muon") else adam_lr
            group["lr_multiplier"] *= 1.0 if own is None or lr == 0 else own / lr
        names = [field.name for field in fields(Iteration) if field.name in others]
        self._iteration = Iteration(**{name: others.pop(name) for name in names})
        super().__init__(groups, lr=lr, **others)
        self._shared = shared
        self._matrices = {p for group in groups if group.get("muon") for p in group["params"]}

    def _init_group(self, group: dict[str, object], *lists: list[torch.Tensor]) -> object:
        return False if group.get("muon") else super()._init_group(group, *lists)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Take a step, unless `found_inf` is set and not zero."""
        super().step()
        found_inf = getattr(self, "found_inf", None)
        pairs = [(p, group) for group in self.param_groups for p in group["params"]]
        pairs = [(p, group) for p, group in pairs if group.get("muon") and p.grad is not None]
        for parameter, _ in pairs:
            if parameter not in self._matrices:  # a stand-in, by which state is made
                self._direction(parameter, found_inf)
        pairs = [pair for pair in pairs if pair[0] in self._matrices]
        pairs.sort(key=lambda pair: -pair[0].numel())
        ranks = len(self._shared.places)
        for start in range(0, len(pairs), ranks):
            part = pairs[start : start + ranks]
            parameters = [parameter for parameter, _ in part]
            directions = [self._direction(parameter, found_inf) for parameter in parameters]
            updates = self._updates(parameters, directions)
            for (parameter, group), update in zip(part, updates, strict=True):
                self._apply(parameter, group, update, found_inf)

    def _direction(self, parameter: torch.Tensor, found_inf: torch.Tensor | None) -> torch.Tensor:
        """Update this rank's part of the momentum; return that of what is orthogonalised."""
        state = self.state[parameter]
        gradient = local(parameter.grad)  # type: ignore[arg-type]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = local(state["momentum_buffer"])
        if found_inf is not None:
            gradient = torch.where(found_inf > 0, buffer, gradient)  # leaves the buffer as it is
        momentum = self._iteration.momentum
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum) if self._iteration.nesterov else buffer

    def _updates(
        self, parameters: Sequence[torch.Tensor], directions: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return this rank's part of each update; the owner of the nth matrix is rank n."""
        shared = self._shared
        rank = self._shared.rank
        low = [direction.to(shared.device, LOW, copy=True) for direction in directions]
        if shared.group is None:
            return [self._orthogonal(direction) for direction in low]
        sent = [
            part if rank in shared.senders(owner, _axes(like, divided=True)) else part[:0]
            for owner, (like, part) in enumerate(zip(parameters, low, strict=True))
        ]
        updated = list[torch.Tensor]()
        if rank < len(parameters):
            own = parameters[rank]
            matrix = torch.empty(own.shape, dtype=LOW, device=shared.device)
            senders = shared.senders(rank, _axes(own, divided=True))
            parts = self._parts(matrix, own)
            none = matrix[:0]
            wanted = [part if r in senders else none for r, part in enumerate(parts)]
            received = self._exchange(sent, wanted)
            for sender in senders:
                parts[sender].copy_(received[sender].view(parts[sender].shape))
            updated = self._parts(self._orthogonal(matrix), own)
        else:
            self._exchange(sent, [])
        returned = self._exchange(updated, low)
        return [part.view(like.shape) for part, like in zip(returned, low, strict=True)]

    def _exchange(
        self, parts: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Send the nth part to rank n; receive from rank n a part of the size of the nth `like`."""
        shared = self._shared
        counts = [[tensor.numel() for tensor in of] for of in (parts, like)]
        sizes = [of + [0] * (len(shared.places) - len(of)) for of in counts]
        none = torch.empty(0, dtype=LOW, device=shared.device)
        given = torch.cat([none, *[part.flatten() for part in parts]])
        received = given.new_empty(sum(sizes[1]))
        dist.all_to_all_single(received, given, sizes[1], sizes[0], group=shared.group)
        return received.split(sizes[1])[: len(like)]

    def _parts(self, matrix: torch.Tensor, like: torch.Tensor) -> list[torch.Tensor]:
        """Return the view of a whole matrix that each rank holds of `like`, by rank."""
        if not isinstance(like, DTensor):
            return [matrix] * len(self._shared.places)
        keys = self._shared.along(_axes(like, divided=True))
        places = dict(zip(keys, self._shared.along(_axes(like)), strict=True))
        views = {key: shard_at(matrix, like, place) for key, place in places.items()}
        return [views[key] for key in keys]

    def _orthogonal(self, direction: torch.Tensor) -> torch.Tensor:
        """Return the nearest orthogonal matrix, approximately; of experts, one for each."""
        from torch.optim._muon import _zeropower_via_newtonschulz

        if direction.ndim == 3:
            return torch.stack([self._orthogonal(matrix) for matrix in direction])
        return _zeropower_via_newtonschulz(direction, COEFFICIENTS, self._iteration.ns_steps, EPS)

    def _apply(
        self,
        parameter: torch.Tensor,
        group: Group,
        update: torch.Tensor,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Decay this rank's part of a parameter and subtract that of its update."""
        values = local(parameter)
        rate = group["lr"]
        decay = rate * group["weight_decay"]
        update = update.to(values.device)
        if found_inf is not None:
            kept = 1 - found_inf.to(values.device)
            decay = decay * kept.double()
            update = update * kept.to(update.dtype)
        rows, columns = parameter.shape[-2:]
        scale = {
            "original": math.sqrt(max(1.0, rows / columns)),
            "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns)),
            "spectral_unclamped": math.sqrt(rows / columns),
        }[self._iteration.adjust_lr_fn]
        values.mul_(1 - decay).add_(update, alpha=-rate * scale)


def _axes(tensor: torch.Tensor, divided: bool = False) -> Axes:
    """Return the axes of a tensor's mesh by our names, or those of them that divide it."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    known = {"replicate", "shard", "tensor", "expert_shard", "expert"}
    if not known.issuperset(names) or not names:
        names = ("replicate", "shard")[-tensor.device_mesh.ndim :]  # Accelerate's own names
    cut = zip(names, tensor.placements, strict=True)
    return tuple(name for name, placement in cut if not divided or hasattr(placement, "dim"))
