"""Each rank writes what it holds into files that all share: no tensor is sent, and each part has a
hash of its own.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blake3 import blake3

from tests.support.checkpoint_pieces import (
    ALONE,
    DESCRIPTION,
    MODEL_FOLDER,
    STATE,
    live,
    records_of,
    same,
)
from tests.support.conformance.resuming import LAYOUTS, advance, started
from tests.support.messages import raises
from tests.support.pool import Pools
from trainer.checkpoint import Background, ModelFolder, load, newest, save, verify
from trainer.checkpoint.file_records import PARTS, FileRecord, Span, span
from trainer.checkpoint.manifest import MANIFEST
from trainer.checkpoint.safetensors_stream import TensorType, spans_of
from trainer.checkpoint.slots import PLAIN, ModelForm
from trainer.errors import ConfigError
from trainer.state import WEIGHT, Part, RunState, StateTensor
from trainer.storage import to_json

BLAKE3 = ModelForm(hash="blake3")
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "shard": ((4,), ("shard",)),
    "HSDP": ((2, 2), ("replicate", "shard")),
    "shard x tensor": ((2, 2), ("shard", "tensor")),
    "experts, cut twice": ((2, 2), ("shard", "expert")),
    "experts and columns": ((2, 2), ("expert", "tensor")),
}


def written(
    folder: Path, sizes: tuple[int, ...], names: tuple[str, ...], form: ModelForm = PLAIN
) -> int:
    """Save tensors cut over a mesh, compare what the files hold; return the bytes of messages."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from trainer.distributed.dtensor import own_shard
    from trainer.distributed.ranks import Ranks
    from trainer.engines.torch.state import _parts
    from trainer.tools.planner.fakes.messages import Messages

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    ranks, made, wanted, entries = Ranks(rank, 4), torch.Generator().manual_seed(0), {}, []
    # ten rows over four ranks are 3 + 3 + 3 + 1, and two over four leave two ranks without any
    for shape in ((10, 6, 4), (512, 512, 4), (2, 5, 3), (6, 4, 2)):
        inner = 1 if names == ("expert", "tensor") else 0
        places = {"shard": Shard(0), "expert": Shard(0), "tensor": Shard(2 - inner)}
        cut = [places.get(name, Replicate()) for name in names]
        whole = torch.randn(shape, generator=made)
        like: Any = SimpleNamespace(device_mesh=mesh, placements=cut)
        own = own_shard(whole, like).clone()
        tensor = DTensor.from_local(
            own, mesh, cut, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        name = f"tensor-{len(entries)}"
        wanted[name] = whole
        for key, value in {WEIGHT: tensor, "exp_avg": tensor, "step": torch.tensor(3.0)}.items():
            owner = len(entries) % 4

            def parts(value: torch.Tensor = value, owner: int = owner) -> list[Part]:
                return _parts(value, owner, rank)

            entries.append(
                StateTensor(
                    name, key, tuple(value.shape), value.dtype, owner, parts, lambda _: None
                )
            )
    with Messages(rank) as messages:
        path = save(folder, STATE, entries, DESCRIPTION, replace(MODEL_FOLDER, form=form), ranks)
    assert verify(path, ranks) == []
    results = {
        f"{entry.name}.{entry.key}": torch.zeros(entry.shape, dtype=entry.dtype)
        for entry in entries
    }
    back = [
        replace(entry, write=lambda stored, value=value: stored.fill(Part(value)))
        for entry, value in zip(entries, results.values(), strict=True)
    ]
    load(path, back, ranks)
    for entry in entries:
        value = wanted[entry.name] if entry.shape else torch.tensor(3.0)
        assert torch.equal(results[f"{entry.name}.{entry.key}"], value), entry.name
        assert torch.equal(entry.read(ranks), value), entry.name
    return sum(message.size for message in messages.found)


@pytest.mark.parametrize("name", MESHES)
def test_what_several_ranks_write_is_one_file(tmp_path: Path, pools: Pools, name: str) -> None:
    sizes, names = MESHES[name]
    for sent in pools[4].run(written, folder=tmp_path, sizes=sizes, names=names):
        # hashes and places of parts, where the tensors have 8 MiB
        assert sent < 2**18


def test_parts_hashed_by_blake3(tmp_path: Path, pools: Pools) -> None:
    sizes, names = MESHES["shard x tensor"]
    pools[4].run(written, folder=tmp_path, sizes=sizes, names=names, form=BLAKE3)
    [path] = tmp_path.glob("step-*")
    digests = [
        digest
        for record in records_of(path).values()
        for _, digest in record.parts
        if record.in_blake3
    ]
    assert len(digests) > 8 and all(digest.startswith("blake3:") for digest in digests)


def collected() -> tuple[list[Any], list[Any]]:
    import torch.distributed as dist

    from trainer.distributed.ranks import Ranks

    rank = dist.get_rank()
    folders = Ranks(rank, 4, node_firsts=(0, 0, 2, 2))
    return Ranks(rank, 4).to_node_firsts(f"part {rank}"), folders.to_node_firsts(rank)


def test_the_keeper_alone_has_what_each_rank_wrote(pools: Pools) -> None:
    """As many records as tensors times ranks are no load for the other ranks."""
    first, *others = pools[4].run(collected)
    assert first == ([f"part {rank}" for rank in range(4)], [0, 1, 2, 3])
    assert others == [([], [0, 1, 2, 3])] * 3


def sent_in_saves(case: Any, folder: Path) -> set[str]:
    """Return the dtypes of what this rank sends in a save, and in one beside the training."""
    from trainer.checkpoint import save
    from trainer.tools.planner.fakes.messages import Messages

    engine, ranks = started(case)
    advance(engine, case, 0)
    entries, result = engine.state_tensors(), []

    def write(entries: Any, apart: Any) -> None:
        with Messages(ranks.rank) as messages:
            save(folder / str(len(result)), RunState(2, 4), entries, {}, ModelFolder(), apart)
        result.append(messages)

    with Messages(ranks.rank) as copying, Background(ranks.on_host()) as background:
        background.save(entries, write)
    write(entries, ranks)
    engine.close()
    return {str(message.dtype) for one in (copying, *result) for message in one.found}


@pytest.mark.parametrize(
    "name",
    [
        "`mesh` HSDP on 4",
        *(
            pytest.param(name, marks=pytest.mark.more)
            for name in LAYOUTS
            if name not in ("one process", "`deepspeed` ZeRO-2 on 1", "`mesh` HSDP on 4")
        ),
    ],
)
def test_no_tensor_is_sent_in_a_save(tmp_path: Path, pools: Pools, name: str) -> None:
    case = LAYOUTS[name]
    for sent in pools[case.world_size].run(sent_in_saves, case=case, folder=tmp_path):
        # of objects, bytes and lengths; a state has float32, at least of its moments
        assert sent and sent <= {"torch.uint8", "torch.int64"}


# Hashes of parts


def _saved(folder: Path) -> None:
    from trainer.distributed.ranks import Ranks

    ranks = Ranks(torch.distributed.get_rank(), 2)
    save(folder, STATE, live(ranks).state_tensors(), DESCRIPTION, MODEL_FOLDER, ranks)


@pytest.fixture
def shared(tmp_path: Path, pools: Pools) -> Path:
    """A checkpoint that two ranks wrote."""
    pools[2].run(_saved, folder=tmp_path)
    return tmp_path / "step-000100"


def test_a_flipped_byte_is_found_in_its_part(shared: Path) -> None:
    name = "optimizer/optimizer-00001-of-00002.safetensors"
    record = records_of(shared)[name]
    assert len(record.parts) > 2 and verify(shared) == []
    content = (shared / name).read_bytes()
    for place, digest in record.parts:
        damaged = bytearray(content)
        damaged[place.start + place.size // 2] ^= 4
        (shared / name).write_bytes(damaged)
        [problem] = verify(shared)
        assert problem.place == str(shared / name)
        assert problem.actual.endswith(f" of bytes {place.start} to {place.end}")
        assert problem.expected == f"SHA-256 {digest[:12]}..."
    (shared / name).write_bytes(content)
    back = live().blank()
    assert verify(shared) == [] and load(shared, back.state_tensors(), ALONE) == STATE
    assert same(back, live())


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts[1:],
        lambda parts: [*parts, parts[0]],
        lambda parts: [[0, 2**40, "0" * 64]],
        lambda parts: [[-4, *parts[0][1:]], *parts[1:]],
        lambda parts: [[*parts[0][:2], 0, 0, parts[0][-1]], *parts[1:]],
        lambda parts: [[*parts[0][:2], "1", 2, parts[0][-1]], *parts[1:]],
        lambda parts: [[]],
        lambda parts: [7],
        lambda parts: [parts[0][:2], *parts[1:]],
        lambda parts: {"0": parts},
        lambda parts: [[*parts[0][:2], True], *parts[1:]],
    ],
)
def test_parts_that_are_not_the_file_are_damage(shared: Path, change: Any) -> None:
    """In a manifest of format 2, which has the parts in it."""
    files = in_format_2(shared)
    entry = files["optimizer/optimizer-00001-of-00002.safetensors"]
    entry["parts"] = change(entry["parts"])
    (shared / MANIFEST).write_bytes(to_json({"format": 2, "files": files}))
    assert len(verify(shared)) == 1
    assert newest(shared.parent)[0] is None


def in_format_2(path: Path) -> dict[str, Any]:
    """The files of a checkpoint as format 2 has them, with all parts in the manifest."""
    files = {name: record.to_json() for name, record in records_of(path).items()}
    (path / PARTS).unlink()
    return files


def test_a_manifest_that_has_the_parts_is_read(shared: Path) -> None:
    files = in_format_2(shared)
    (shared / MANIFEST).write_bytes(to_json({"format": 2, "files": files}))
    assert newest(shared.parent) == (shared, [])
    back = live().blank()
    assert load(shared, back.state_tensors(), ALONE) == STATE and same(back, live())


NAME = "optimizer/optimizer-00001-of-00002.safetensors"


CHANGES: dict[str, Any] = {
    "none": lambda lines: [],
    "not JSON": lambda lines: [b"x" * len(lines[0]), lines[1]],
    "no object": lambda lines: [b"[]", lines[1]],
    "another file": lambda lines: [lines[0].replace(b"optimizer/", b"../"), lines[1]],
    "one with a hash": lambda lines: [b'{"trainer.json":[[0,9,"0"]]}', lines[1]],
    "outside the file": lambda lines: [b'{"%s":[[0,999999,"0"]]}' % NAME.encode(), lines[1]],
    "no parts": lambda lines: [b'{"%s":7}' % NAME.encode(), lines[1]],
}


@pytest.mark.parametrize("change", CHANGES)
def test_lines_that_are_no_parts_are_damage(shared: Path, change: str) -> None:
    """Also where the manifest has the hash of what is there."""
    manifest = json.loads((shared / MANIFEST).read_bytes())
    changes = CHANGES[change]
    content = (shared / PARTS).read_bytes()
    lines = changes(content.splitlines(keepends=True))
    (shared / PARTS).write_bytes(b"".join(lines))
    assert [problem.place for problem in verify(shared)] == [str(shared / PARTS)]
    end = 0
    parts: list[Any] = []
    for line in lines:
        parts.append([end, end + len(line), hashlib.sha256(line).hexdigest()])
        end += len(line)
    manifest["files"][PARTS] = {"size": end, "parts": parts}
    (shared / MANIFEST).write_bytes(to_json(manifest))
    assert verify(shared)
    assert newest(shared.parent)[0] is None


def test_a_manifest_of_the_earlier_format_is_read(tmp_path: Path) -> None:
    path = save(tmp_path, STATE, live().state_tensors(), DESCRIPTION, MODEL_FOLDER, ALONE)
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert all(entry.keys() == {"size", "sha256"} for entry in manifest["files"].values())
    (path / "manifest.json").write_bytes(to_json(manifest | {"format": 1}))
    assert newest(tmp_path) == (path, [])


def test_a_later_format_is_no_damage(tmp_path: Path) -> None:
    path = save(tmp_path, STATE, live().state_tensors(), DESCRIPTION, MODEL_FOLDER, ALONE)
    manifest = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_bytes(to_json(manifest | {"format": 5}))
    with raises(ConfigError, "format 5", "format 4", "newer Meshloom"):
        newest(tmp_path)
    assert path.is_dir()


def test_a_checkpoint_hashed_by_blake3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its package the checkpoint is not taken for damaged."""
    entries = live().state_tensors()
    path = save(tmp_path, STATE, entries, DESCRIPTION, replace(MODEL_FOLDER, form=BLAKE3), ALONE)
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert manifest["format"] == 3
    for name, entry in manifest["files"].items():
        content = (path / name).read_bytes()
        if name.endswith(".safetensors"):
            result = "blake3:" + blake3(content).hexdigest()
            assert entry == {"size": len(content), "parts": [[0, len(content), result]]}
        else:
            assert entry["sha256"] == hashlib.sha256(content).hexdigest()
    assert newest(tmp_path) == (path, [])
    with monkeypatch.context() as patch:
        patch.setattr("trainer.storage.installed", lambda package: package != "blake3")
        with pytest.raises(ConfigError, match=r"pip install 'meshloom\[blake3\]'"):
            newest(tmp_path)
    name = next(name for name in manifest["files"] if name.endswith(".safetensors"))
    content = bytearray((path / name).read_bytes())
    content[-1] ^= 1
    (path / name).write_bytes(content)
    actual = verify(path)[0]
    assert actual.actual.startswith("BLAKE3 ") and actual.expected.startswith("BLAKE3 ")


def test_the_bytes_of_a_part() -> None:
    kind, whole = TensorType((4, 6, 2), torch.float32), torch.arange(48.0).reshape(4, 6, 2)
    cases: list[tuple[tuple[slice, ...], list[Span]]] = [
        ((slice(1, 3),), [span(148, 244)]),
        ((slice(None), slice(2, 4)), [Span(116, 276, 16, 48)]),
        ((slice(None), slice(None), slice(1, 2)), [Span(104, 292, 4, 8)]),
        (
            (slice(0, 2), slice(1, 3), slice(0, 1)),
            [Span(108, 120, 4, 8), Span(156, 168, 4, 8)],
        ),
        ((slice(0, 0),), []),
    ]
    for part, expected in cases:
        view = whole[part]
        kept = Part(view, view.storage_offset(), view.stride())
        assert (result := spans_of(kept, kind, 100)) == expected
        runs = [run for place in result for run in place.runs(place.run)]
        values = [value for start, end in runs for value in range(start - 100, end - 100, 4)]
        assert values == [4 * int(value) for value in view.reshape(-1)]
        assert sum(place.size for place in result) == 4 * view.numel()
    assert FileRecord.of(0, "x").to_json() == {"size": 0, "sha256": "x"}
