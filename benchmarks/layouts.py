"""What the PyTorch engines' layouts cost, on CPU: time beside hand-written PyTorch, memory and
pipelines beside theory.

    python benchmarks/layouts.py time [--rounds 12]
    python benchmarks/layouts.py memory
    torchrun --nproc-per-node 2 benchmarks/layouts.py pipeline [--rounds 10]
    python benchmarks/layouts.py build

`--smoke` shows that a measure runs: a tiny model, and no figure.

time: one step of four micro-batches (forward, backward, clipping, fused AdamW) of engine `mesh`
(twice, for A/A) and `accelerate`, and of the same layout written by hand (DDP, or fully_shard on
the same units; gradients are accumulated and reduced at the same moments), on two ranks; DDP and
HSDP of `mesh` on four; all interleaved in random order. Each ratio stands beside its bound, with
the CPU time that other processes took; then step_time.py's rows for a small model. Median of ratios
within a round. memory: the highest resident memory of a rank of its own process group while it
trains, above what it had before the model was built, beside the bytes that the layout has to hold.
The C allocator is told to give back what is freed. build: the most private memory of a rank (pages
of the mapped file are not counted) while it builds its part from a folder of safetensors, beside
what it keeps, the largest block, and the whole model. pipeline: two equal stages, 1F1B, one thread
a rank; efficiency is (time of the same micro-batches in one process of plain PyTorch) / (2 x time
of the pipeline), as a part of m / (m + p - 1). The one process is timed with the other core idle,
and with the other core at the same work, as it is in a pipeline: the two share caches and memory.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainer.config.sections.model_and_data import ModelSection
from trainer.distributed.ranks import Ranks
from trainer.engines import ENGINES, Job, Machine
from trainer.layout import PIPELINE_SCHEDULES, Layout, Recompute
from trainer.models import huggingface
from trainer.models.language import model_config
from trainer.models.materialise import materialise
from trainer.optim.lr_schedules import Update
from trainer.recipes.causal_lm.task import CausalLM
from trainer.supervise.world import environment_of, free_port, world_of
from trainer.tasks.task import Batch, ModelWithLoss

BATCH, CLIP, RATE = 2, 1.0, 1e-3
OPTIMIZER = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01, "fused": True}}
SIZES = {
    "time": {
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "vocab_size": 4096,
        "sequence": 64,
    },
    "memory": {
        "hidden_size": 1024,
        "intermediate_size": 2752,
        "num_hidden_layers": 16,
        "vocab_size": 4096,
        "sequence": 16,
    },
    # next to no head, so that two stages of as many blocks are equal
    "pipeline": {
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "vocab_size": 64,
        "sequence": 128,
    },
}
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "sequence": 8,
}
# pipeline stages and ZeRO stage
BUILDS = {"ZeRO-3": (1, 3), "2 stages x ZeRO-3": (2, 3), "2 stages": (2, 0), "DDP": (1, 0)}
HEADS = {
    "memory": (
        "| layout | counted (MiB) | measured (MiB) | measured / counted |\n| --- | ---: | "
        "---: | ---: |"
    ),
    "build": "| layout | whole model (MiB) | one block (MiB) | kept (MiB) | most (MiB) |\n| --- |"
    + " ---: |" * 4,
}
KINDS = {"DDP": 0, "ZeRO-2": 2, "ZeRO-3": 3}


class Bench:
    def __init__(self, measure: str, rank: int, world_size: int, smoke: bool = False) -> None:
        sizes = {**(TINY if smoke else SIZES[measure])}
        self.sequence, self.rank, self.world_size = sizes.pop("sequence"), rank, world_size
        config = {
            "model_type": "llama",
            **sizes,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
        }
        options = ModelSection(config=config)
        self.spec = huggingface.spec_of(model_config.read_config(options), options)
        self.task = CausalLM(self.spec.language)

    def batches(self, count: int = 1) -> list[Batch]:
        ids = torch.randint(0, self.spec.language.vocabulary, (count, BATCH, self.sequence + 1))
        return [
            {"input_ids": part[:, :-1].contiguous(), "targets": part[:, 1:].contiguous()}
            for part in ids
        ]

    def layout(
        self,
        stage: int,
        pipeline: int = 1,
        accumulation: int = 1,
        world_size: int | None = None,
        replicate: int = 1,
    ) -> Layout:
        world_size = world_size or self.world_size
        ranks = world_size // pipeline
        return Layout(
            pipeline=pipeline,
            replicate=replicate if stage else ranks,
            shard=ranks // replicate if stage else 1,
            tensor=1,
            micro_batch=BATCH,
            accumulation=accumulation,
            zero_stage=stage,
            offload_optimizer="none",
            offload_param="none",
            precision="float32",
            recompute=Recompute(),
            schedule=replace(PIPELINE_SCHEDULES["1F1B"], partition="uniform"),
        )

    def engine(self, name: str, layout: Layout) -> Any:
        machine = Machine(
            torch.device("cpu"), Ranks(self.rank if layout.world_size > 1 else 0, layout.world_size)
        )
        settings = {"optimizer": OPTIMIZER, "gradient_clipping": CLIP}
        return ENGINES[name].build(Job(layout, self.spec, self.task, settings, 0, machine))

    def ours(
        self, name: str, stage: int, accumulation: int = 1, replicate: int = 1
    ) -> Callable[[], None]:
        layout = self.layout(stage, accumulation=accumulation, replicate=replicate)
        engine, batches, counter = (
            self.engine(name, layout),
            self.batches(accumulation),
            iter(range(10**9)),
        )

        def step() -> None:
            engine.step(next(counter), batches, Update(RATE))

        return step

    def by_hand(self, stage: int | None, accumulation: int = 1) -> Callable[..., None]:
        """What one writes from the PyTorch tutorials for this layout."""
        model = self.task.prepare(self.spec.build())
        materialise(model, self.spec, seed=0)
        module: Any = ModelWithLoss(model, self.task).train()
        units: list[Any] = []
        if stage is None:
            pass
        elif stage:
            units = self.sharded(module, model, resharded=stage == 3)
        else:
            module = DistributedDataParallel(module, gradient_as_bucket_view=True)
        parameters = list(module.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)
        own = self.batches(accumulation)

        def step(batches: Sequence[Batch] = own) -> None:
            for number, batch in enumerate(batches, 1):
                last = number == len(batches)
                for unit in units if stage == 2 else ():
                    unit.set_reshard_after_backward(last, recurse=False)
                with module.no_sync() if stage == 0 and not last else nullcontext():
                    (module(batch) / (len(batches) * BATCH * self.sequence)).backward()
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def sharded(self, module: Any, model: Any, resharded: bool) -> list[Any]:
        """Make the units: blocks, the table, norm and head together, and the root."""
        mesh = init_device_mesh("cpu", (self.world_size,))
        blocks = [model.get_submodule(name) for name in self.spec.blocks]
        for unit in (*blocks, model.model.embed_tokens):
            fully_shard(unit, mesh=mesh, reshard_after_forward=resharded)
        model.model.embed_tokens.set_unshard_in_backward(False)
        for ends in ([model.model.norm, model.lm_head], module):
            fully_shard(ends, mesh=mesh, reshard_after_forward=False)
        return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


def interleaved(
    arms: dict[str, Callable[[], None]],
    rounds: int,
    warm_up: int = 4,
    after: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each arm in each round; `after` each, something that is not timed."""
    order, names, times = random.Random(0), list(arms), {name: [] for name in arms}
    for number in range(warm_up + rounds):
        order.shuffle(names)
        for name in names:
            dist.barrier()
            started = time.perf_counter()
            arms[name]()
            dist.barrier()
            if number >= warm_up:
                times[name].append(time.perf_counter() - started)
            after()
    return times


def ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def measure_pipeline(bench: Bench, rounds: int, counts: Sequence[int]) -> str:
    lines = [
        "| micro-batches | m / (m + p - 1) | of that | of that, both cores busy |",
        "| ---: |" + " ---: |" * 3,
    ]
    for count in counts:
        batches = bench.batches(count)
        pipeline = bench.engine("mesh", bench.layout(0, pipeline=2, accumulation=count))
        single = partial(bench.by_hand(None), batches)
        arms = {
            "pipeline": partial(pipeline.step, 0, batches, Update(RATE)),
            "alone": single if bench.rank == 0 else lambda: None,
            "both": single,
        }
        times = interleaved(arms, rounds)
        ideal = count / (count + 1)
        found = [ratio(times[name], times["pipeline"]) / 2 / ideal for name in ("alone", "both")]
        lines.append(f"| {count} | {ideal:.3f} | {found[0]:.3f} | {found[1]:.3f} |")
    return "\n".join(lines)


def resident(key: str) -> int:
    """Bytes of this process, from the kernel: VmRSS now, VmHWM at most so far."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) * 1024


def state_of(bench: Bench, stage: int) -> float:
    """Bytes that a rank has to hold in float32: weights, gradients, two moments, and what is
    gathered.

    ZeRO-2 keeps the weights gathered; both gather the root's (embedding, head, norm) for the whole
    step, hold one block's whole gradient while it is reduced, and ZeRO-3 one block's whole weights
    and those of the next.
    """
    parameters, blocks = (
        bench.spec.parameters,
        bench.spec.build().get_submodule(bench.spec.blocks[0]),
    )
    block = sum(p.numel() for p in blocks.parameters())
    root = parameters - block * len(bench.spec.blocks)
    own = 16 * parameters / (bench.world_size if stage else 1)
    extra = {
        0: 0,
        2: 4 * parameters + 4 * max(block, root),
        3: 4 * (2 * block + root) + 4 * max(block, root),
    }
    return own + extra[stage]


def measure_memory(bench: Bench, kind: str) -> str:
    small = torch.nn.Linear(8, 8)  # what the first backward pass and step load is not the layout's
    torch.optim.AdamW(small.parameters(), fused=True)
    small(torch.ones(2, 8)).sum().backward()
    before = resident("VmRSS")
    step = bench.ours("mesh", KINDS[kind])
    for _ in range(3):
        step()
    found, counted = resident("VmHWM") - before, state_of(bench, KINDS[kind])
    return f"| {kind} | {counted / 2**20:.0f} | {found / 2**20:.0f} | {found / counted:.2f} |"


class Peak(threading.Thread):
    """Watches the private memory of this process, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.over = resident("RssAnon"), threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.001):
            self.most = max(self.most, resident("RssAnon"))


def measure_build(bench: Bench, kind: str, folder: str) -> str:
    options = ModelSection(name_or_path=folder)
    bench.spec = huggingface.spec_of(model_config.read_config(options), options)
    pipeline, stage = BUILDS[kind]
    block = sum(
        p.numel() for p in bench.spec.build().get_submodule(bench.spec.blocks[0]).parameters()
    )
    before, peak = resident("RssAnon"), Peak()
    peak.start()
    engine = bench.engine("mesh", bench.layout(stage, pipeline, accumulation=2 * pipeline))
    peak.over.set()
    parts = [
        p.to_local() if hasattr(p, "to_local") else p
        for m in engine.modules
        for p in m.parameters()
    ]
    kept = sum(part.nbytes for part in parts)
    cells = [4 * bench.spec.parameters, 4 * block, kept, peak.most - before]
    return f"| {kind} | " + " | ".join(f"{cell / 2**20:.0f}" for cell in cells) + " |"


def save_model(folder: str, smoke: bool) -> None:
    """The model of the memory measure as `save_pretrained` writes it, in shards."""
    bench = Bench("memory", 0, 1, smoke)
    model = bench.spec.build()
    materialise(model, bench.spec, seed=0)
    model.save_pretrained(folder, max_shard_size="200MB")  # type: ignore[operator]


def main() -> None:
    import layout_times  # which imports this file

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measure", choices=("time", "memory", "pipeline", "build"))
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument(
        "--smoke", action="store_true", help="that it runs: a tiny model, one kind, no figure"
    )
    options = parser.parse_args()
    if options.measure in HEADS and options.kind is None:
        print(HEADS[options.measure])
        with tempfile.TemporaryDirectory() as folder:
            if options.measure == "build":
                save_model(folder, options.smoke)
            kinds = list(KINDS if options.measure == "memory" else BUILDS)
            for kind in kinds[:1] if options.smoke else kinds:
                command = [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nproc-per-node",
                    "2",
                    __file__,
                ]
                command += [
                    options.measure,
                    "--kind",
                    kind,
                    "--folder",
                    folder,
                    *["--smoke"][: options.smoke],
                ]
                environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
                done = subprocess.run(
                    command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment
                )
                print(
                    "\n".join(line for line in done.stdout.splitlines() if line.startswith("|")),
                    flush=True,
                )
        return
    if options.measure == "time" and world_of(os.environ) is None:
        return layout_times.run(__file__, options)
    if world_of(os.environ) is None:
        os.environ.update(environment_of(0, 1, free_port()))
    world = world_of(os.environ)
    assert world is not None
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_world_size))
    dist.init_process_group("gloo")
    torch.manual_seed(world.rank if options.measure == "time" else 0)
    measured = "memory" if options.measure == "build" else options.measure
    bench = Bench(measured, world.rank, world.world_size, options.smoke)
    if options.measure == "memory":
        report = measure_memory(bench, options.kind)
    elif options.measure == "build":
        report = measure_build(bench, options.kind, options.folder)
    else:
        measure = {"time": layout_times.measure, "pipeline": measure_pipeline}[options.measure]
        report = measure(
            bench, 1 if options.smoke else options.rounds, (2,) if options.smoke else (2, 4, 8, 16)
        )
    if world.rank == 0:
        print(report, flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
