"""Does the plan put layouts in the order that their steps take? On processors, by rank correlation.

    python benchmarks/plan_order.py [--ranks 2 4 8] [--layouts 12] [--smoke]

Of all layouts of one global batch that the mesh engine runs on so many ranks, some are taken,
evenly from the fastest to the slowest by `trainer/tools/planner/proposals.py`. Each is planned
for a device whose numbers are measured first (two blocks, forward and backward, a copy, a line
through the times of gloo's collectives by their bytes), and run: the median of some steps, each as
long as its slowest rank. Ranks have one thread.

A processor sends by itself, so that nothing is hidden behind what it computes: layouts are put in
the order of `Time.most`. Where ranks share cores, what one leaves idle in a pipeline another takes:
there the bubble is left out. Writes the section "Order" of benchmarks/results/plan.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from torch import nn

from tests.support.pool import Pools
from trainer.config import Config, load
from trainer.engines.devices import Device
from trainer.errors import ConfigError
from trainer.layout import Layout
from trainer.models.flops import flops_per_token
from trainer.models.materialise import materialise
from trainer.tools.planner.candidates import candidates
from trainer.tools.planner.cluster import Cluster
from trainer.tools.planner.from_config import ModelOnCluster, model_on, planned
from trainer.tools.planner.proposals import ClosedForm, changed_to

RESULTS = ROOT / "benchmarks" / "results" / "plan.md"
LAYERS, STEPS = 8, 4
CONFIG: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "trainer": {
        "engine": "mesh",
        "steps": STEPS,
        "data": {"sequence_length": 64},
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 384,
                "intermediate_size": 1024,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
                "vocab_size": 2048,
                "max_position_embeddings": 128,
            }
        },
    },
}
SIZES = [2**power for power in range(14, 23, 2)]
"""Numbers of the messages by which gloo is measured."""


@dataclass(frozen=True)
class Row:
    layout: Layout
    planned: float
    """Seconds of a step."""
    measured: float


def device_numbers() -> dict[str, float]:
    """Measure FLOP/s, bytes/s of memory and of gloo, seconds of a message. On each rank of a pool."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    alone = Cluster(1, 1, Device("this", 1e15, 1e12, 1e10, 1e10))
    dist.barrier()
    rate = _rate(model_on(load({**CONFIG, "train_batch_size": 2}), alone))
    copy = _usual(torch.ones(SIZES[-1]).clone)
    slope, latency = np.polyfit(*zip(*_messages(dist.get_world_size()), strict=True), 1)
    return {
        "rate": rate,
        "bandwidth": 2 * 4 * SIZES[-1] / copy,
        "link": 1 / slope,
        "latency": latency,
    }


def _rate(source: ModelOnCluster) -> float:
    """FLOP/s of two blocks, forward and backward: by how much longer three take than one."""
    seconds, flops, units = [], [], source.workload.sample.units
    for blocks in (1, 3):
        spec = source.of_blocks(blocks)
        task, batch = source.task(spec), source.workload.batch(source.workload.layout.micro_batch)
        model = task.prepare(spec.build())
        materialise(model, spec, seed=0)
        seconds.append(_usual(partial(_pass, task, model, batch)))
        flops.append(flops_per_token(spec, units) * units * source.workload.layout.micro_batch)
    return (flops[1] - flops[0]) / (seconds[1] - seconds[0])


def _pass(task: Any, model: nn.Module, batch: Any) -> None:
    model.zero_grad()
    hidden = task.hidden(model, batch)
    hidden.backward(torch.ones_like(hidden))


def _messages(world: int) -> Iterator[tuple[float, float]]:
    """(bytes in rings, seconds) of collectives of each kind and size."""
    import torch.distributed as dist

    for size in SIZES:
        whole, part = torch.ones(size), torch.ones(size // world)
        ring = 4 * size * (world - 1) / world
        yield 2 * ring, _usual(partial(dist.all_reduce, whole))
        yield ring, _usual(partial(dist.all_gather_into_tensor, whole, part))
        yield ring, _usual(partial(dist.reduce_scatter_tensor, part, whole))


def _usual(act: Callable[[], object]) -> float:
    """Seconds: the median of some times."""
    found = []
    for _ in range(25):
        began = time.perf_counter()
        act()
        found.append(time.perf_counter() - began)
    return statistics.median(found[5:])


def step_seconds(config: Config, cluster: Cluster) -> list[float]:
    """Return the seconds of each step of this rank. Runs on each rank of a pool."""
    import torch.distributed as dist

    from trainer.distributed.ranks import Ranks
    from trainer.engines import Job, Machine

    torch.set_num_threads(1)
    source = model_on(config, cluster)
    workload, spec = source.workload, source.of_blocks(LAYERS)
    machine = Machine(
        torch.device("cpu"), Ranks(dist.get_rank(), cluster.world_size), cluster.world_size
    )
    layout = workload.layout
    engine = workload.engine.build(
        Job(layout, spec, source.task(spec), workload.deepspeed, 0, machine, workload.undecayed)
    )
    found = []
    for step in range(STEPS + 1):
        batches = [workload.batch(layout.micro_batch) for _ in range(layout.accumulation)]
        dist.barrier()
        began = time.perf_counter()
        engine.step(step, batches, workload.schedule(step))
        dist.barrier()
        found.append(time.perf_counter() - began)
    engine.close()
    return found[1:]


def chosen(config: Config, cluster: Cluster, count: int) -> Iterator[tuple[Layout, Config]]:
    """Layouts that the engine runs, evenly from the fastest to the slowest by the closed form."""
    base = planned(config, cluster)
    old, form = base.workload.layout, ClosedForm.of(base)
    known: list[tuple[float, Layout, Config]] = []
    for layout in candidates(old, cluster, LAYERS):
        if (
            layout.offloads
            or layout.zero_stage == 1
            or layout.pipeline > 4
            or layout.recompute.mode == "selective"
        ):
            continue
        try:
            known.append(
                (form.seconds(layout), layout, changed_to(config, cluster, old, layout)[1])
            )
        except ConfigError:
            continue
        if count == 1:  # any will do
            break
    known.sort(key=lambda found: found[0])
    for place in range(count):
        yield known[round(place * (len(known) - 1) / max(1, count - 1))][1:]


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's, of values that are all different."""
    if len(first) < 2:
        return float("nan")
    orders = [torch.tensor(values).argsort().argsort().double() for values in (first, second)]
    return float(torch.corrcoef(torch.stack(orders))[0, 1])


def compared(ranks: int, count: int, pools: Pools) -> tuple[str, list[Row]]:
    """Compare layouts on so many ranks; return the device in words, and the rows."""
    each = pools[ranks].run(device_numbers)
    rate, bandwidth, link, latency = (
        statistics.median(found[key] for found in each) for key in each[0]
    )
    device = Device(
        "a core", 1e12, 2 * rate, bandwidth, link, link, latency
    )  # float32 is half the peak
    description = (
        f"{rate / 1e9:.1f} GFLOP/s a rank, {bandwidth / 1e9:.1f} GB/s of memory, "
        f"{link / 1e9:.2f} GB/s of gloo and {latency * 1e3:.2f} ms a message"
    )
    cluster, config, rows = Cluster(1, ranks, device), load(CONFIG), []
    for layout, changed in chosen(config, cluster, count):
        plan = planned(changed, cluster)
        taken = pools[ranks].run(step_seconds, config=changed, cluster=cluster)
        measured = statistics.median(max(step) for step in zip(*taken, strict=True))
        expected = plan.time.most - (plan.time.bubble if ranks > (os.cpu_count() or 1) else 0.0)
        rows.append(Row(layout, expected, measured))
        print(
            f"{layout.describe()}: planned {expected:.3f} s, measured {measured:.3f} s", flush=True
        )
    return description, sorted(rows, key=lambda row: row.planned)


def section(found: dict[int, tuple[str, list[Row]]]) -> str:
    lines = [
        "## Order",
        "",
        (
            f"`python {' '.join(['benchmarks/plan_order.py', *sys.argv[1:]])}`, {os.cpu_count()} "
            "cores."
        ),
        "",
    ]
    for ranks, (description, rows) in found.items():
        both = rank_correlation([row.planned for row in rows], [row.measured for row in rows])
        lines += [
            f"{ranks} ranks ({description}): rank correlation **{both:.2f}** over {len(rows)} layouts.",
            "",
        ]
        lines += [
            "| layout | planned (s) | measured (s) | measured / planned |",
            "| --- | ---: | ---: | ---: |",
        ]
        lines += [
            (
                f"| {row.layout.describe()} | {row.planned:.3f} | {row.measured:.3f} | "
                f"{row.measured / row.planned:.2f} |"
            )
            for row in rows
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--layouts", type=int, default=12)
    parser.add_argument(
        "--smoke", action="store_true", help="that it runs: one layout of two ranks, no file"
    )
    options = parser.parse_args()
    if options.smoke:
        options.ranks, options.layouts = [2], 1
    pools = Pools()
    try:
        found = {ranks: compared(ranks, options.layouts, pools) for ranks in options.ranks}
    finally:
        pools.close()
    text = section(found)
    print(text)
    if options.smoke:
        return
    before, _, after = RESULTS.read_text().partition("## Order\n")
    rest = after.partition("\n## ")
    RESULTS.write_text(f"{before.rstrip()}\n\n{text}" + (f"\n## {rest[2]}" if rest[1] else ""))


if __name__ == "__main__":
    main()
