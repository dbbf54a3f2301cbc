"""ZeRO checkpoints (stages 1 to 3) by DeepSpeed's own `save_checkpoint`, read as state tensors.

Their files are pickles. PyTorch's restricted unpickler makes tensors and plain values of them, and
for DeepSpeed's classes the inert stand-ins below: nothing that a file names is ever run. Files are
memory-mapped, and a tensor is assembled when it is read. Memory for about two of the largest
tensors is enough.

Layout of the files: deepspeed/utils/zero_to_fp32.py (0.19). Stages 1 and 2 lay the parameters of a
group end to end, in the order of `param_shapes`, and cut the whole into equal parts, one for each
rank. (`param_slice_mappings` of each rank should agree, but with `round_robin_gradients` it has
another order.) Stage 3 cuts each padded parameter into equal parts, and each rank lays its parts
end to end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch

from trainer.data.order import KEYED
from trainer.errors import ConfigError, DataError, Problem, refused
from trainer.state import MASTER, WEIGHT, Part, RunState, StateTensor
from trainer.storage import REFUSED_PICKLE, Json, check_regular

Shape = tuple[int, ...]
Extents = list[tuple[int, int, int]]
"""The places of a parameter's elements, in order: rank, start and end in its flat tensor."""


class _Stage(int):
    """A stand-in for `ZeroStageEnum`."""


class _Scaler:
    """A stand-in for `LossScaler` and `DynamicLossScaler`, with their attributes."""


class _Address:
    """A stand-in for `fragment_address`: the place of a parameter's part in a flat tensor."""


_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}


def _member(kind: object, name: str) -> _Stage:
    """Replace `getattr`, with which Python 3.11.0 to 3.11.3 pickles members of an enumeration.

    Raises TypeError for any other use.
    """
    if kind is not _Stage or name not in _STAGES:
        raise TypeError(f"it asks for {name!r} of {kind!r}")
    return _Stage(_STAGES[name])


_STAND_INS: list[Any] = [
    (_member, "builtins.getattr"),
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Scaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Scaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Address, "deepspeed.utils.tensor_fragment.fragment_address"),
]
_SCALARS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class Imported(NamedTuple):
    """The arguments of `checkpoint.save` that are read from DeepSpeed's checkpoint."""

    state: RunState
    state_tensors: list[StateTensor]
    description: dict[str, object]


def read_deepspeed(path: Path) -> Imported:
    """Read the checkpoint in `path`: a folder `global_stepN`, or one whose file `latest` names it.

    Raises ConfigError if there is none or its kind can't be assembled, and DataError for a file
    that is damaged or holds more than data.
    """
    folder = _folder(path)
    kinds = (AttributeError, IndexError, KeyError, TypeError, ValueError)
    expected = "the files of DeepSpeed's save_checkpoint, 0.8 or later"
    start = "not what DeepSpeed writes: "
    with refused(str(folder), expected, *kinds, named=True, start=start, raises=DataError):
        return _imported(folder)


def _imported(folder: Path) -> Imported:
    shards = _ZeroFiles.of(folder)
    model = shards.models[0]
    first = shards.states[0]
    entries = [entry for placed in shards.placed() for entry in shards.entries(*placed)]
    entries += _frozen(shards.models) + _buffers(model)
    inner: Json = next(iter(_inner(first, shards.stage)), {})
    scalars = {"optimizer_step": float(inner["step"] if "step" in inner else model["global_steps"])}
    scaler = vars(first["loss_scaler"]) if first.get("dynamic_loss_scale") else {}
    scalars |= {f"scaler.{key}": float(scaler[key]) for key in _SCALARS if key in scaler}
    state = RunState(int(model["global_steps"]), int(model["global_samples"]), 0, scalars)
    versions = {"deepspeed": shards.version}
    description = {"imported_from": str(folder), "engine": "deepspeed", "order": KEYED}
    return Imported(state, entries, description | {"versions": versions})


Flats = list[list[torch.Tensor]]
"""Flat float32 tensors by parameter group (stage 3: sub-group), then by rank."""
Placed = Iterator[tuple[str, Shape, int, Extents]]
"""Name, shape, group and place of each parameter."""


@dataclass(frozen=True)
class _ZeroFiles:
    """The content of the files of all data-parallel ranks."""

    stage: int
    models: list[Json]
    states: list[Json]
    """The optimizer's state of each rank."""
    version: str
    masters: Flats
    moments: dict[str, Flats]

    @classmethod
    def of(cls, folder: Path) -> _ZeroFiles:
        """Read the files. Raises ConfigError for another stage, or if some are missing."""
        model_files = _files(folder, "model_states")
        files = _files(folder, "optim_states")
        shards = [_read(file) for file in files]
        states = [shard["optimizer_state_dict"] for shard in shards]
        # stage 1 in bfloat16 with float32 gradients has an optimizer that does not store the stage
        unsaid = 1 if files[0].name.startswith("bf16_zero") else 0
        stage = int(states[0].get("zero_stage", unsaid))
        count = states[0].get("partition_count")
        parts = max(count) if isinstance(count, list) else count
        if stage not in (1, 2, 3) or parts != len(states):
            actual = f"ZeRO stage {stage} with {len(states)} of {parts} files *_optim_states.pt"
            expected = "stage 1, 2 or 3, with a file of each data-parallel rank"
            raise ConfigError(Problem(str(folder), actual, expected))
        models = [_read(file) for file in (model_files if stage == 3 else model_files[:1])]
        version = str(shards[0].get("ds_version"))
        return cls(stage, models, states, version, *_flat_tensors(states, stage))

    def placed(self) -> Placed:
        """Yield the place of each parameter. Raises DataError if they don't fill the tensors."""
        groups = self.models[0]["param_shapes"]
        shapes = [{name: tuple(shape) for name, shape in group.items()} for group in groups]
        if self.stage == 3:
            return _placed_in_parts(shapes, self.masters)
        paddings = self.states[0].get("param_alignment_paddings")
        unpadded = [[0] * len(named) for named in shapes]
        return _placed_end_to_end(shapes, self.masters, paddings or unpadded)

    def entries(
        self, name: str, shape: Shape, group: int, extents: Extents
    ) -> Iterator[StateTensor]:
        """Yield the weight of a parameter, its master if it has one, and its moments."""
        known = self.models[0]["module"][name]
        master = partial(_assembled, self.masters[group], extents, shape)
        # in stage 3 the model's files have no weights
        weight = partial(_agreed, name, master, known)
        if self.stage == 3:
            weight = partial(_rounded, master, known.dtype)
        yield _entry(name, WEIGHT, shape, known.dtype, weight)
        if known.dtype != torch.float32:
            yield _entry(name, MASTER, shape, torch.float32, master)
        for key, flats in self.moments.items():
            moment = partial(_assembled, flats[group], extents, shape)
            yield _entry(name, key, shape, torch.float32, moment)


def _folder(path: Path) -> Path:
    latest = path / "latest"
    name = latest.read_text().strip() if latest.is_file() else ""
    if name and Path(name).name != name:
        actual = f"a path that leaves the folder: {name!r:.200}"
        raise DataError(Problem(str(latest), actual, "the name of a folder"))
    folder = path / name
    if not folder.is_dir() or not list(folder.glob("*_optim_states.pt")):
        expected = (
            "a folder global_stepN with *_optim_states.pt, or one whose file `latest` names it"
        )
        raise ConfigError(Problem(str(folder), "no ZeRO checkpoint of DeepSpeed", expected))
    return folder


def _files(folder: Path, kind: str) -> list[Path]:
    """List the files of all data-parallel ranks, in their order."""
    files = list(folder.glob(f"*_{kind}.pt"))
    files.sort(key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])
    odd = [path.name for path in files if "mp_rank_00" not in path.name or "expert" in path.name]
    if odd or not files:
        expected = "files of data-parallel ranks alone: no tensor parallelism, pipeline or experts"
        raise ConfigError(Problem(str(folder), odd[0] if odd else f"no *_{kind}.pt", expected))
    return files


def _read(file: Path) -> Json:
    expected = "a file that torch.save wrote"
    # whatever a damaged archive or pickle raises
    with refused(str(file), expected, named=True, raises=DataError):
        try:
            check_regular(file)
            named = set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
            if strange := sorted(named - {name for _, name in _STAND_INS}):
                actual = f"a pickle that names {', '.join(strange[:3])}"
                raise DataError(Problem(str(file), actual, "data alone"))
            with torch.serialization.safe_globals(_STAND_INS):
                content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except UnpicklingError as error:
            wanted = f"{expected}, of data alone"
            raise DataError(Problem(str(file), REFUSED_PICKLE, wanted)) from error
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}")
        return content


def _flat_tensors(states: Sequence[Json], stage: int) -> tuple[Flats, dict[str, Flats]]:
    """Return the masters, and the moments by name, if there are any."""
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    masters = [list(ranks) for ranks in zip(*(state[key] for state in states), strict=True)]
    entries = [_inner(state, stage) for state in states]
    first = entries[0][0] if entries[0] else {}
    names = sorted(k for k, v in first.items() if torch.is_tensor(v) and v.ndim == 1)
    groups = range(len(masters))
    return masters, {
        name: [[rank[group][name] for rank in entries] for group in groups] for name in names
    }


def _inner(state: Json, stage: int) -> list[Json]:
    """Return the inner optimizer's state of each flat tensor."""
    inner = state["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    if isinstance(inner, list):  # `elastic_checkpoint`
        return inner
    return [inner["state"][key] for key in sorted(inner["state"])]


def _placed_end_to_end(
    shapes: Sequence[Mapping[str, Shape]], flats: Flats, paddings: Sequence[Sequence[int]]
) -> Placed:
    ranks = len(flats[0])
    for group, (named, unused) in enumerate(zip(shapes, paddings, strict=True)):
        own = len(flats[group][0])
        offset = 0
        for (name, shape), padding in zip(named.items(), unused, strict=True):
            end = offset + math.prod(shape)
            starts = [max(offset - rank * own, 0) for rank in range(ranks)]
            ends = [min(end - rank * own, own) for rank in range(ranks)]
            yield name, shape, group, _extents(starts, ends)
            offset = end + padding
        # the last part may be padded
        _check_count(min(offset, sum(map(len, flats[group]))), offset)


def _placed_in_parts(shapes: Sequence[Mapping[str, Shape]], flats: Flats) -> Placed:
    ranks = len(flats[0])
    group = 0
    offset = 0
    for name, shape in (item for named in shapes for item in named.items()):
        if offset == len(flats[group][0]) and group + 1 < len(flats):
            group = group + 1
            offset = 0
        own = math.ceil(math.prod(shape) / ranks)
        count = math.prod(shape)
        ends = [offset + max(0, min(own, count - rank * own)) for rank in range(ranks)]
        yield name, shape, group, _extents([offset] * ranks, ends)
        offset += own
    _check_count(len(flats[group][0]), offset)


def _extents(starts: Sequence[int], ends: Sequence[int]) -> Extents:
    """Return the parts of the ranks that have one."""
    spans = enumerate(zip(starts, ends, strict=True))
    return [(rank, start, end) for rank, (start, end) in spans if end > start]


def _check_count(there: int, wanted: int) -> None:
    if there != wanted:
        expected = f"the {wanted} of the parameters"
        raise DataError(Problem("*_optim_states.pt", f"{there} elements", expected))


def _assembled(flats: Sequence[torch.Tensor], extents: Extents, shape: Shape) -> torch.Tensor:
    parts = [flats[rank][first:last] for rank, first, last in extents]
    return torch.cat(parts).view(shape) if parts else torch.zeros(shape)


def _rounded(master: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return master().to(dtype)


def _agreed(name: str, master: Callable[[], torch.Tensor], known: torch.Tensor) -> torch.Tensor:
    """Return the model file's weight. Raises DataError unless it is the rounded master."""
    if not torch.equal(_rounded(master, known.dtype), known):
        actual = f"values of {name} that differ from those in *_model_states.pt"
        raise DataError(Problem("*_optim_states.pt", actual, "the same"))
    return known


def _frozen(models: Sequence[Json]) -> list[StateTensor]:
    """List the frozen parameters: whole or, in stage 3, in parts of each rank."""
    entries = []
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name] for model in models]
        read = partial(_joined, parts, tuple(shape))
        entries.append(_entry(name, WEIGHT, tuple(shape), parts[0].dtype, read))
    return entries


def _joined(parts: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts])[: math.prod(shape)].view(shape)


def _buffers(model: Json) -> list[StateTensor]:
    named = ((name, model["module"].get(name)) for name in model["buffer_names"])
    return [
        _entry(name, WEIGHT, tuple(buffer.shape), buffer.dtype, partial(torch.clone, buffer))
        for name, buffer in named
        if buffer is not None
    ]


def _entry(
    name: str, key: str, shape: Shape, dtype: torch.dtype, read: Callable[[], torch.Tensor]
) -> StateTensor:
    def parts() -> list[Part]:
        return [Part(read())]

    return StateTensor(name, key, shape, dtype, 0, parts, write=lambda value: None)
