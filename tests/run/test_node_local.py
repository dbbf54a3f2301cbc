"""Machines without a shared folder: each keeps all of the run, and what one has lost comes from
another.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.checkpoint_pieces import ALONE, DESCRIPTION, MODEL_FOLDER, STATE, live, same
from tests.support.commands import ROOT, Result, agents, train, write_job
from tests.support.messages import shows
from tests.support.pool import Pools
from trainer.checkpoint import ModelFolder, export, newest, save, verify
from trainer.checkpoint import load as read_back
from trainer.checkpoint.file_records import FileRecord
from trainer.checkpoint.folders import spread
from trainer.checkpoint.manifest import hash_file, read_manifest
from trainer.config import Config, load
from trainer.distributed.ranks import Ranks
from trainer.errors import DiskError, MeshloomError
from trainer.run.start.choose import choose
from trainer.run.start.folder import kept
from trainer.run.start.request import Request
from trainer.supervise.world import free_port

TRAIN = ROOT / "launch" / "train.py"
CASES = {
    "mesh, beside the training": dict(engine="mesh", checkpoint={"every": 2, "asynchronous": True}),
    "deepspeed": dict(engine="deepspeed", checkpoint={"every": 2}),
}


def machines(job: Path, *folders: Path, ranks: int = 1) -> list[Result]:
    """The command on two machines, whose run folders are these."""
    common = [
        "torchrun",
        "--nnodes",
        "2",
        "--nproc-per-node",
        str(ranks),
        "--master-addr",
        "127.0.0.1",
    ]
    common += ["--master-port", str(free_port())]
    first, second = (
        [*common, "--node-rank", str(node), TRAIN, "--config", job, f"trainer.run.folder={folder}"]
        for node, folder in enumerate(folders)
    )
    return agents(first, second)


def content(folder: Path) -> dict[str, bytes]:
    """What a run resumes from, and what it made; not from which step on a start of it did."""
    kept = [
        path for below in ("checkpoints", "final") for path in (folder / "job" / below).rglob("*")
    ]
    results = {str(path.relative_to(folder)): path.read_bytes() for path in kept if path.is_file()}
    for name in results:
        if name.endswith(("trainer.json", "manifest.json")):
            known = json.loads(results[name])
            known.pop("since", None)
            known.get("files", {}).pop("trainer.json", None)
            results[name] = json.dumps(known).encode()
    return results


def ended(results: list[Result]) -> str:
    for result in results:
        assert result.code == 0, result.output
    return results[0].output


@pytest.mark.more
@pytest.mark.parametrize("case", CASES)
def test_a_lost_machine_loses_nothing(tmp_path: Path, case: str) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    job = write_job(tmp_path, steps=4, run={"node_local": True}, **CASES[case])
    ended(machines(job, a, b))
    whole = content(a)
    assert content(b) == whole
    assert {name.split("/")[2] for name in whole if "/checkpoints/" in name} == {
        "step-000002",
        "step-000004",
        "latest",
    }
    # the first machine is another one now, and the second was ended before its last checkpoint
    for path in (a, b / "job" / "final", b / "job" / "checkpoints" / "step-000004"):
        shutil.rmtree(path)
    output = ended(machines(job, a, b))
    shows(output, "step-000002", "copied", "1 to rank 0")
    assert "resumed from" in output and content(a) == content(b) == whole
    # damage on one machine is mended by what the other has
    shutil.rmtree(a / "job" / "final")
    shutil.rmtree(b / "job" / "final")
    weights = next((b / "job" / "checkpoints" / "step-000004" / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    output = ended(machines(job, a, b))
    assert "step-000004 is damaged" in output and "0 steps are lost" in output, output
    shows(output, "step-000004", "copied", "0 to rank 1")
    shutil.rmtree(b / "job" / "checkpoints" / "step-000004.damaged")
    assert content(a) == content(b) == whole


@pytest.mark.more
def test_ranks_of_a_machine_share_its_folder(tmp_path: Path) -> None:
    job = write_job(tmp_path, run={"node_local": True}, engine="mesh")
    ended(machines(job, tmp_path / "a", tmp_path / "b", ranks=2))
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert sorted(path.name for path in (tmp_path / "b" / "job" / "logs").glob("rank-*")) == [
        "rank-2.log",
        "rank-3.log",
    ]


@pytest.mark.more
def test_another_run_of_that_name_is_not_taken_for_this_one(tmp_path: Path) -> None:
    for name, seed in (("b", 4), ("a", 3)):
        job = write_job(tmp_path, run={"node_local": True}, engine="mesh", seed=seed)
        alone = train("--config", job, f"trainer.run.folder={tmp_path / name}")
        assert alone.code == 0, alone.output
    before = content(tmp_path / "b")
    shutil.rmtree(tmp_path / "a" / "job" / "final")
    results = machines(job, tmp_path / "a", tmp_path / "b")
    assert all(result.code for result in results)
    shows(results[0].output, "job", "1 is", "rank 0")
    assert content(tmp_path / "b") == before


# What the folders of three ranks hold, of which the first two are on one machine


def private(folder: Path) -> tuple[Path, Ranks]:
    ranks = Ranks(dist.get_rank(), 3)
    mine = folder / ("a" if ranks.rank < 2 else "b")
    return mine, kept(mine, ranks)


def _whole_in_each(folder: Path) -> object:
    mine, ranks = private(folder)
    state, back = live(ranks), live(ranks).blank()
    path = save(mine, STATE, state.state_tensors(), DESCRIPTION, MODEL_FOLDER, ranks)
    export(mine / "final", state.state_tensors(), MODEL_FOLDER, ranks)
    if ranks.rank == 2:
        shutil.rmtree(path)
    ranks.barrier()
    result, lines = newest(mine, ranks)
    loaded = read_back(path, back.state_tensors(), ranks) == STATE and same(state, back)
    assert sum(name.endswith("safetensors") for name in read_manifest(path)) > 2  # of several ranks
    return (
        ranks.node_firsts,
        result == path,
        lines,
        loaded,
        verify(path),
        sorted(p.name for p in mine.iterdir()),
    )


def test_each_folder_holds_all(tmp_path: Path, pools: Pools) -> None:
    result = pools[3].run(_whole_in_each, timeout=120, folder=tmp_path)
    copied = ["step-000100 was copied from rank 0 to rank 2"]
    assert result == [((0, 0, 2), True, copied, True, [], ["final", "latest", "step-000100"])] * 3
    for name in ("final", "step-000100"):
        trees = [
            {
                p.relative_to(tmp_path / at): p.read_bytes()
                for p in (tmp_path / at / name).rglob("*")
                if p.is_file()
            }
            for at in "ab"
        ]
        assert trees[0] == trees[1]


def _broken(folder: Path, how: str) -> str:
    mine, ranks = private(folder)
    names = ("one", "two")
    if ranks.rank == 1:
        for name in names:
            (mine / name).write_bytes(name.encode() * 1000)
    ranks.barrier()
    records = ranks.on_each(
        lambda: {n: hash_file(mine / n) for n in names} if ranks.rank == 1 else {}
    )[1]
    if how == "full" and ranks.rank == 2:
        (mine / "one").symlink_to("/dev/full")
    if how == "lost" and ranks.rank == 1:
        (mine / "one").unlink()
    if how == "changed":
        records["one"] = FileRecord.whole(records["one"].size, "0" * 64)
    ranks.barrier()
    try:
        spread(mine, records, dict.fromkeys(names, [1]), ranks)
    except DiskError as error:
        assert error.shared and (mine / "two").read_bytes() == b"two" * 1000
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "keys"),
    [
        ("full", ("b/one: ", "No space left")),
        ("lost", ("a/one: ", "No such file")),
        ("changed", ("expected SHA-256 000000000000",)),
        ("whole", ()),
    ],
)
def test_what_does_not_arrive_is_an_error_everywhere(
    tmp_path: Path, pools: Pools, how: str, keys: tuple[str, ...]
) -> None:
    result = pools[3].run(_broken, timeout=60, folder=tmp_path, how=how)
    assert result[0] == result[1] == result[2], result
    assert bool(keys) == bool(result[0])
    shows(result[0], *keys)


def _left(mine: Path, name: str, config: Config, step: int, seed: int = 3) -> Path:
    """What a run that was interrupted left in a folder."""
    folder = mine / name
    save(
        folder / "checkpoints",
        replace(STATE, step=step),
        live(seed=seed).state_tensors(),
        DESCRIPTION,
        MODEL_FOLDER,
        ALONE,
    )
    (folder / "config.json").write_text("{}")
    (folder / "environment.json").write_text(json.dumps({"request": {**config.raw, "seed": seed}}))
    return folder / "checkpoints" / f"step-{step:06d}"


def _start(folder: Path, job: Path, how: str) -> tuple[str, str | None] | str:
    mine = folder / ("a" if dist.get_rank() < 2 else "b")
    config = load(job, [f"trainer.run.folder={mine}", "trainer.run.node_local=true"])
    request = Request(resume="auto")
    if dist.get_rank() == 2:
        if how == "gap":
            _left(mine, "job-2", config, 7)
            _left(mine, "2026", config, 8)  # a run of another name
        if how in ("two runs", "paths"):
            _left(mine, "job", config, 9, seed=4)
        if how == "damaged":
            weights = next(_left(mine, "job", config, 7).rglob("*.safetensors"))
            weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    if dist.get_rank() == 0 and how in ("two runs", "paths"):
        _left(mine, "job", config, 9)
    if how == "paths":
        request = Request(resume=str(mine / "job" / "checkpoints" / "step-000009"))
    dist.barrier()
    try:
        start = choose(config, request, Ranks(dist.get_rank(), 3))
    except MeshloomError as error:
        return str(error)
    assert start.folder.parent == mine
    return start.folder.name, start.source and start.source.name


@pytest.mark.more
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("nothing", ("job", None)),
        ("gap", ("job-2", "step-000007")),
        ("two runs", ["job on rank 2", "another run"]),
        ("paths", ["another checkpoint than rank 0", "both are good"]),
        ("damaged", ["Repair one", "--resume"]),
    ],
)
def test_what_machines_have_decides_where_a_run_begins(
    tmp_path: Path, pools: Pools, how: str, expected: tuple[str, str | None] | list[str]
) -> None:
    result = pools[3].run(_start, timeout=60, folder=tmp_path, job=write_job(tmp_path), how=how)
    if isinstance(expected, list):
        for text in result:
            shows(text, *expected)
    else:
        assert result == [expected] * 3


def _other_libraries(folder: Path) -> None:
    mine, ranks = private(folder)

    def write(model: Path) -> None:
        (model / "inner").mkdir()
        (model / "inner" / "config.json").write_text(str(ranks.rank))

    save(mine, STATE, live(ranks).state_tensors(), DESCRIPTION, ModelFolder(write), ranks)


@pytest.mark.more
def test_files_that_libraries_write_are_those_of_the_first_rank(
    tmp_path: Path, pools: Pools
) -> None:
    pools[3].run(_other_libraries, timeout=60, folder=tmp_path)
    for name in "ab":
        assert (
            tmp_path / name / "step-000100" / "model" / "inner" / "config.json"
        ).read_text() == "0"
        assert verify(tmp_path / name / "step-000100") == []


@pytest.mark.more
def test_machines_with_other_weights_under_one_name_are_refused(tmp_path: Path) -> None:
    """Under ZeRO-3 each would take its shard from its own file."""
    from transformers import AutoModelForCausalLM

    from trainer.data.text.tokenizer import embedded_tokenizer
    from trainer.models.language.model_config import read_config
    from trainer.supervise.process import cache_folder

    job = write_job(tmp_path, engine="mesh")
    section = load(job).trainer.model
    paths = [tmp_path / "a", tmp_path / "b"]
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(read_config(section)).save_pretrained(path)
        embedded_tokenizer(cache_folder()).save_pretrained(path)
    common = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    common += ["--master-port", str(free_port())]
    first, second = (
        [*common, "--node-rank", str(node), TRAIN, "--config", job, "zero_optimization.stage=3",
         "trainer.model.config=null", f"trainer.model.name_or_path={path}"]
        for node, path in enumerate(paths)
    )  # fmt: skip
    results = agents(first, second)
    assert {result.code for result in results} <= {1, 64}
    shows("".join(result.output for result in results), "other ones on rank 1")
