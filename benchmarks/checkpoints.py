"""What a checkpoint costs, on CPU: beside plain safetensors and `torch.distributed.checkpoint`,
stall, and memory.

    torchrun --nproc-per-node 2 benchmarks/checkpoints.py [--rounds 5] [--blocks 16] [--folder DISK]
        [--smoke]

The state is that of the memory model of layouts.py under ZeRO-3 on engine `mesh`: weights and two
moments in float32. save, load: `trainer.checkpoint` (hashed by SHA-256 or BLAKE3, flushed, agreed,
one rename; loading without and with the verification of every byte), `safetensors.torch` writing
and reading the same bytes, each rank what it holds as one file, and `torch.distributed.checkpoint`
of the same sharded tensors. What is written is flushed to disk, and dropped from the page cache
before it is read. stall: how long the loop waits in a save that is waited for, and in one beside
the training; a step that has a save beside it, against one that has none. memory: the most private
memory of a rank above what it holds between saves, and the largest tensor. The arms of a round come
in random order; median of the ratios within a round, and the slowest rank counts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layouts import SIZES, Bench, Peak, interleaved, ratio, resident
from safetensors.torch import load_file, save_file

from trainer import checkpoint
from trainer.checkpoint.directory import step_name
from trainer.checkpoint.slots import PLAIN, ModelForm
from trainer.distributed.ranks import Ranks
from trainer.optim.lr_schedules import Update
from trainer.state import RunState
from trainer.storage import flush
from trainer.supervise.world import world_of


class Arms:
    """The ways to save and to load one state, each below a folder of its own."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.ranks, self.folder = Ranks(bench.rank, bench.world_size), folder
        self.counts: dict[str, int] = {}
        self.engine = bench.engine("mesh", bench.layout(3))
        self.engine.step(0, bench.batches(), Update(1e-3))
        self.state_tensors = self.engine.state_tensors()
        state = self.engine._state
        self.sharded = {name: held[0].detach() for name, held in state._named.items()}
        for name, held in state._named.items():
            moments = {
                key: v
                for key, v in state._optimizer.of(held[0]).items()
                if v.shape == held[0].shape
            }
            self.sharded |= {f"{name}.{key}": moment for key, moment in moments.items()}

    def share(self) -> dict[str, torch.Tensor]:
        """What this rank writes, as tensors of a file of its own."""
        return {
            f"{entry.name}.{entry.key}": part.value.clone()
            for entry in self.state_tensors
            for part in entry.parts()
        }

    def ours(
        self,
        entries: Any = None,
        ranks: Ranks | None = None,
        name: str = "ours",
        form: ModelForm = PLAIN,
    ) -> None:
        folder, ranks = self.fresh(name), ranks or self.ranks
        checkpoint.save(
            folder,
            RunState(step=1, samples=1),
            entries or self.state_tensors,
            {},
            checkpoint.ModelFolder(form=form),
            ranks,
        )

    def plain(self, tensors: dict[str, torch.Tensor]) -> None:
        path = self.fresh("plain") / f"{self.ranks.rank}.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_file(tensors, path)
        flush(path)

    def distributed(self) -> None:
        dcp.save(
            self.sharded, storage_writer=dcp.FileSystemWriter(self.fresh("dcp"), sync_files=True)
        )

    def fresh(self, name: str) -> Path:
        """A folder that is not there yet; those before it are removed by `tidy`, outside what is
        timed.
        """
        self.counts[name] = self.counts.get(name, 0) + 1
        return self.at(name)

    def at(self, name: str) -> Path:
        """The latest folder of that name."""
        return self.folder / f"{name}-{self.counts[name]}"

    def tidy(self) -> None:
        dist.barrier()
        if self.ranks.first:
            for path in self.folder.iterdir():
                if path not in [self.at(name) for name in self.counts]:
                    shutil.rmtree(path)
        dist.barrier()

    def loads(self) -> dict[str, Callable[[], object]]:
        ours = lambda: self.at("ours") / step_name(1)  # noqa: E731
        return {
            "ours": lambda: checkpoint.load(ours(), self.state_tensors, self.ranks),
            "verified": lambda: (
                checkpoint.verify(ours(), self.ranks),
                checkpoint.load(ours(), self.state_tensors, self.ranks),
            ),
            "plain": lambda: [
                tensor.clone()
                for tensor in load_file(
                    self.at("plain") / f"{self.ranks.rank}.safetensors"
                ).values()
            ],
            "distributed": lambda: dcp.load(self.sharded, checkpoint_id=self.at("dcp")),
        }

    def uncached(self, work: Callable[[], object]) -> Callable[[], None]:
        """`work` on files that are read from the disk. What is timed begins when no rank has them
        in memory.
        """

        def run() -> None:
            if self.ranks.first:
                for path in self.folder.rglob("*"):
                    if path.is_file():
                        with path.open("rb") as file:
                            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            dist.barrier()
            work()

        return run


def measure_bandwidth(arms: Arms, rounds: int) -> list[str]:
    tensors = arms.share()
    size = sum(tensor.nbytes for tensor in arms.sharded.values()) / 2**20
    saves = {
        "ours": arms.ours,
        "blake3": lambda: arms.ours(name="blake3", form=ModelForm(hash="blake3")),
        "plain": lambda: arms.plain(tensors),
        "distributed": arms.distributed,
    }
    times = interleaved(saves, rounds, warm_up=1, after=arms.tidy)
    lines = [
        f"| of {size:.0f} MiB | MiB/s | / plain safetensors | / torch.distributed.checkpoint |"
    ]
    lines.append("| --- |" + " ---: |" * 3)
    lines.append(row("save", times["ours"], times, size))
    lines.append(row("save by BLAKE3", times["blake3"], times, size))
    times = interleaved(
        {name: arms.uncached(load) for name, load in arms.loads().items()}, rounds, warm_up=1
    )
    lines.append(row("load", times["ours"], times, size))
    lines.append(row("verify and load", times["verified"], times, size))
    return lines


def row(name: str, ours: list[float], times: dict[str, list[float]], size: float) -> str:
    ratios = [f"{ratio(ours, times[other]):.2f}" for other in ("plain", "distributed")]
    return f"| {name} | {size / statistics.median(ours):.0f} | {' | '.join(ratios)} |"


def measure_stall(arms: Arms, bench: Bench, rounds: int) -> list[str]:
    batches, waited, stalls, shares, slowed = bench.batches(), [], [], [], []
    step = lambda: arms.engine.step(1, batches, Update(1e-3))  # noqa: E731
    with checkpoint.Background(arms.ranks.on_host()) as background:
        for number in range(rounds + 1):
            arms.tidy()
            whole = timed(arms.ours)
            alone = min(timed(step) for _ in range(3))
            stall = timed(
                lambda: background.save(
                    arms.state_tensors, lambda entries, ranks: arms.ours(entries, ranks, "beside")
                )
            )
            beside = []
            saves = background._saving
            while arms.ranks.highest_soon(saves is not None and not saves.done())():
                beside.append(timed(step))
            background.wait()
            if number:  # the first one makes the buffers
                waited.append(whole)
                stalls.append(stall)
                shares.append(stall / whole)
                slowed += [one / alone for one in beside]
    lines = [
        "| waited for (s) | stall (s) | stall / waited for | a step beside a save / one without |"
    ]
    lines.append("| ---: | ---: | ---: | ---: |")
    found = [f"{statistics.median(values):.3f}" for values in (waited, stalls, shares)]
    return [
        *lines,
        f"| {' | '.join(found)} | {statistics.median(slowed):.2f} ({len(slowed)} steps) |",
    ]


def timed(work: Callable[[], object]) -> float:
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


def measure_memory(arms: Arms) -> list[str]:
    largest = max(tensor.nbytes for tensor in arms.sharded.values()) / 2**20
    lines = ["| | above the state (MiB) | largest tensor (MiB) |", "| --- | ---: | ---: |"]
    with checkpoint.Background(arms.ranks.on_host()) as background:

        def beside() -> None:
            background.save(
                arms.state_tensors, lambda entries, ranks: arms.ours(entries, ranks, "beside")
            )
            background.wait()

        loads = arms.loads()
        for name, work in {
            "save": arms.ours,
            "load": loads["ours"],
            "save beside the training": beside,
        }.items():
            work()
            before, peak = resident("RssAnon"), Peak()
            peak.start()
            work()
            peak.over.set()
            most = torch.tensor([peak.most - before])
            dist.all_reduce(most, dist.ReduceOp.MAX)
            lines.append(f"| {name} | {int(most) / 2**20:.0f} | {largest:.0f} |")
        copies = sum(tensor.nbytes for tensor in background._copies.values()) / 2**20
    return [
        *lines,
        f"\nThe copy that is kept for saves beside the training: {copies:.0f} MiB on rank 0.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=SIZES["memory"]["num_hidden_layers"])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument(
        "--smoke", action="store_true", help="that it runs: a tiny model, one round, no figure"
    )
    options = parser.parse_args()
    world = world_of(os.environ)
    if world is None:
        parser.error("start it with torchrun")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_world_size))
    SIZES["memory"]["num_hidden_layers"] = options.blocks
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    bench, rounds = (
        Bench("memory", world.rank, world.world_size, options.smoke),
        1 if options.smoke else options.rounds,
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        names = [temporary]
        dist.broadcast_object_list(names)
        arms = Arms(bench, Path(names[0]))
        for measure in (
            lambda: measure_memory(arms),
            lambda: measure_bandwidth(arms, rounds),
            lambda: measure_stall(arms, bench, rounds),
        ):
            lines = measure()
            if world.rank == 0:
                print("\n".join(lines), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
