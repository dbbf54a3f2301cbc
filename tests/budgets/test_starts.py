"""What a start costs a rank of 1,024: the objects that it receives before the first step, the
memory that it takes beyond its shards, and the groups and sockets that it has.

A start is run as it is, by `execute`, on a fake process group; `Counting` counts what PyTorch's
object collectives would have sent to a rank.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.commands import run as run_command
from tests.support.commands import write_job
from tests.support.counted import layout_of
from tests.support.fake_ranks import Counting, ranks_of
from tests.support.run.interruptions import command, environment
from tests.support.training import spec_of
from trainer.config import load
from trainer.distributed import initial_values
from trainer.distributed.dtensor import local
from trainer.engines import Machine
from trainer.layout import AXES
from trainer.models.materialise import materialise
from trainer.parallel.parallel_mesh import groups_of, parallel_mesh_of
from trainer.run import run
from trainer.run.session import Session
from trainer.run.start.request import Request
from trainer.supervise import ending, process
from trainer.supervise.signals import NoSignals

MIB = 1 << 20
LAYOUT = ["trainer.engine=mesh", "zero_optimization.stage=3", "train_batch_size=2048"]


class _FirstStep(Exception):
    """The start is over."""


def started(folder: Path, world_size: int, *options: str) -> tuple[Counting, int, list[int]]:
    """Start a run up to its first step; return what was sent, the most bytes that Python and numpy
    held, and the sizes of the process groups of this rank."""

    def loop(*_: Any) -> None:
        raise _FirstStep

    def in_group(values: list[Any], *_: Any, **__: Any) -> None:
        ranks.send(0, values[0])

    folder.mkdir()
    config = load(write_job(folder), [*LAYOUT, *options])
    with (
        ranks_of(world_size) as ranks,
        patch.object(run, "loop", loop),
        patch.object(dist, "broadcast_object_list", in_group),
        patch.object(dist, "all_gather_object", side_effect=AssertionError("counted nowhere")),
    ):
        tracemalloc.start()
        with (
            patch.object(ending, "Watch", lambda *_: None),
            patch.object(dist.distributed_c10d, "_get_default_store", lambda: None),
        ):
            process.check_even(8, ranks.on_host())
            ending.watched(config, ranks, ending.WatchReports(print))
        machine = Machine(torch.device("cpu"), ranks, 8)
        console = Console(file=StringIO())
        with pytest.raises(_FirstStep):
            run.execute(Session(Request(), machine, console, NoSignals()), config)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        groups = [len(of) for of in dist.distributed_c10d._world.pg_group_ranks.values()]
    return ranks, peak, groups


HSDP = ["trainer.mesh.replicate=128", "trainer.mesh.shard=8"]
FEW = ["trainer.mesh.replicate=2", "trainer.mesh.shard=4"]


def test_a_start_of_a_thousand_ranks(tmp_path: Path) -> None:
    ranks, peak, groups = started(tmp_path / "many", 1024, *HSDP)
    print(f"{ranks.objects:,} bytes of objects, {dict(ranks.received)}")
    assert ranks.objects < 16 * MIB and peak < 64 * MIB
    # of each other rank nothing but its host and process, for the watchdog
    assert ranks.received["gathered"] < 1023 * 100
    assert ranks.received["host groups"] == 1
    assert sorted(size for size in groups if size > 1) == [8, 128, 1024]


@pytest.mark.more
def test_a_start_takes_as_much_memory_on_a_thousand_ranks_as_on_eight(tmp_path: Path) -> None:
    few, _, _ = started(tmp_path / "few", 8, *FEW)  # and imports what a start imports
    before = psutil.Process().memory_info().rss
    ranks, _, _ = started(tmp_path / "many", 1024, *HSDP)
    assert psutil.Process().memory_info().rss - before < 64 * MIB
    assert ranks.received["broadcast"] == few.received["broadcast"]
    assert ranks.received["gathered"] * 7 == few.received["gathered"] * 1023


LLAMA_405B = {
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def test_a_rank_of_a_thousand_draws_little_more_than_its_shard() -> None:
    """One block and both tables of Llama 405B: 7.4 billion values, of which a rank keeps 7 million.

    No more than the ends of a shard's blocks are drawn besides; memory that is not written to is
    not taken.
    """
    spec, drawn = spec_of(LLAMA_405B), Counter[str]()

    def run(function: Any, arguments: Any, seed: Any, tensor: torch.Tensor, rows: range) -> None:
        drawn["values" if seed else "others"] += tensor[rows.start : rows.stop].numel()
        plain_run(function, arguments, seed, tensor, rows)

    plain_run = initial_values._run
    with ranks_of(1024), patch.object(initial_values, "_run", run):
        mesh, model = init_device_mesh("cpu", (1024,)), spec.build()
        fully_shard(model, mesh=mesh)
        before, start = psutil.Process().memory_info().rss, time.process_time()
        materialise(model, spec, seed=0)
        seconds = time.process_time() - start
        shares = [local(parameter).numel() for parameter in model.parameters()]
    print(f"{drawn['values']:,} values drawn for {sum(shares):,}, in {seconds:.2f} s of CPU")
    assert sum(shares) < spec.parameters / 1000
    assert drawn["values"] <= sum(shares) + 2 * len(shares) * initial_values.BLOCK
    assert psutil.Process().memory_info().rss - before < 1024 * MIB


def test_the_groups_of_all_rows_are_made_in_one_call() -> None:
    sizes = {"pipeline": 4, "replicate": 4, "shard": 16, "tensor": 4}
    calls: list[list[list[int]]] = []
    with ranks_of(1024):
        shape = tuple(sizes.get(axis, 1) for axis in AXES)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
        whole: Any = dist.distributed_c10d._get_default_group()
        whole.bound_device_id = torch.device("cuda", 0)  # as with NCCL
        with patch.object(dist, "split_group", lambda split_ranks: calls.append(split_ranks)):
            groups_of(mesh)
        whole.bound_device_id = None
    assert [len(rows) for rows in calls] == [16, 4, 4]  # batch, loss, norm
    for rows in calls:
        assert sorted(rank for row in rows for rank in row) == list(range(1024))


def test_no_group_is_made_twice() -> None:
    """On GPUs each is a communicator. The experts' mesh shares the axes that do not divide them."""
    experts = layout_of(pipeline=2, replicate=4, shard=8, expert=4, zero_stage=3, accumulation=2)
    with ranks_of(64):
        mesh = parallel_mesh_of(experts, torch.device("cpu"))
        assert mesh.experts is not None
        assert mesh.experts["expert"].mesh.tolist() == [0, 1, 2, 3]
        assert mesh.experts["expert_shard"].mesh.tolist() == [0, 4]
        groups = Counter(map(tuple, dist.distributed_c10d._world.pg_group_ranks.values()))
    assert {ranks: count for ranks, count in groups.items() if len(ranks) > 1 < count} == {}


def test_ranks_connect_where_they_send() -> None:
    """The sockets of a group on the host, of ranks that are threads: not one for each rank."""
    count, store, own = 32, dist.HashStore(), psutil.Process()
    operations: list[Callable[[Any], Any]] = [
        lambda group: group.allreduce(torch.zeros(1)).wait(),
        lambda group: group.broadcast(torch.zeros(1), 0).wait(),
        lambda group: group.broadcast(torch.zeros(1), count - 1).wait(),
    ]
    before = len(own.net_connections("tcp"))
    with patch.dict(os.environ), ThreadPoolExecutor(count) as pool:
        os.environ.pop("TORCH_GLOO_LAZY_INIT", None)
        process.set_up_groups()
        patient = timedelta(seconds=60)
        make = lambda rank: dist.ProcessGroupGloo(store, rank, count, patient)  # noqa: E731
        groups = list(pool.map(make, range(count)))
        for operation in operations:
            list(pool.map(operation, groups))
        each = (len(own.net_connections("tcp")) - before) / count
    print(f"{each} sockets a rank, on average, of {count} ranks")
    assert 1 < each < 2 * math.log2(count)


MEETS = """
import resource
from datetime import timedelta
from trainer.supervise.meeting import reach, serve
from trainer.supervise.process import set_up_groups
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
set_up_groups()
store = serve("127.0.0.1", 0, timedelta(seconds=20))
stores = [reach("127.0.0.1", store.port, rank, timedelta(seconds=20), print) for rank in range(100)]
for rank, each in enumerate(stores):
    each.set(str(rank), str(rank))
print(store.get("99").decode())
"""


@pytest.mark.more
def test_more_ranks_meet_than_a_process_usually_may_open_files() -> None:
    """Shells and Slurm give 1,024; here it is 64, of which two are taken for each rank."""
    result = run_command(sys.executable, "-c", MEETS, timeout=60)
    assert result.code == 0 and result.lines[-1] == "99", result.output


COUNTS_READS = """
import os
real = os.preadv

def counted(file, buffers, start):
    count = real(file, buffers, start)
    path = os.readlink(f"/proc/self/fd/{file}")
    if path.endswith(".safetensors"):
        with (folder / f"read-{rank}").open("a") as report:
            print(start, start + count, path, file=report)
    return count
os.preadv = counted
"""


@pytest.mark.more
@pytest.mark.parametrize("engine", ["mesh", "accelerate", "deepspeed"])
def test_a_load_reads_each_byte_once_over_all_ranks(tmp_path: Path, engine: str) -> None:
    """Under ZeRO-3: each rank reads its rows. Counts of updates, 4 bytes each, all ranks read."""
    job = write_job(tmp_path, engine=engine, steps=2, checkpoint={"every": 1})
    config = json.loads(job.read_text())
    config["trainer"]["model"]["config"] |= {"vocab_size": 32768, "hidden_size": 64}
    config["zero_optimization"]["stage"] = 3
    job.write_text(json.dumps(config))
    for code in ("", COUNTS_READS):
        for name in ("final", "checkpoints/step-000002"):  # to go on after the first step
            shutil.rmtree(tmp_path / "runs/job" / name, ignore_errors=True)
        words = command(tmp_path, job, code, ranks=4)
        result = run_command(*words, timeout=200, **environment(tmp_path / "cache"))
        assert result.code == 0, result.output
    reports = [path.read_text().splitlines() for path in tmp_path.glob("read-*")]
    reads: dict[str, list[range]] = {}
    for line in (line for report in reports for line in report):
        start, end, path = line.split(maxsplit=2)
        reads.setdefault(path, []).append(range(int(start), int(end)))
    whole = total = 0
    for path, of_file in reads.items():
        content = Path(path).read_bytes()
        whole += len(content) - 8 - int.from_bytes(content[:8], "little")
        covered = bytearray(len(content))
        for read in of_file:
            covered[read.start : read.stop] = b"\1" * len(read)
        total += sum(map(len, of_file))
        assert covered.count(1) == len(content) - 8 - int.from_bytes(content[:8], "little"), path
    print(f"{engine}: {total / whole:.4f} of {whole:,} bytes are read")
    assert len(reports) == 4 and len(reads) > 2
    assert total <= 1.01 * whole
