"""The configs that ship, at any number of processes: resolved at all of them, and run by two
agents.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.support.commands import TRAIN, agents, losses, write_job
from trainer.config import Config, RuntimeFacts, load, resolve
from trainer.engines import select
from trainer.errors import ConfigError
from trainer.layout import Layout, layout_of
from trainer.supervise.world import free_port

SHIPPED = sorted((Path(__file__).parent.parent.parent / "ds_configs").glob("*.json"))
CUT = {
    "experts": 2,
    "long_context": 2,
    "megatron_3d": 4,
    "pipeline_zero1": 2,
    "pipeline_zero2": 2,
    "pipeline_zero3": 2,
    "tensor_zero2": 2,
}
"""Those that need a multiple of so many processes."""
LARGEST = 1024
PER_NODE = (1, 2, 4, 8)


@cache
def config_of(path: Path) -> Config:
    return load(path)


def laid_out(path: Path, nodes: int, local: int, device: str = "cpu") -> tuple[Config, Layout]:
    facts = RuntimeFacts(nodes * local, 64, 500, device == "cuda", device, local)  # type: ignore[arg-type]
    config = resolve(config_of(path), facts)
    return config, layout_of(config, nodes * local)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_it_runs_at_any_number_of_processes(path: Path, device: str) -> None:
    cut = CUT.get(path.stem, 1)
    for local in PER_NODE:
        # every count of nodes up to 40, and some of each kind beyond
        for nodes in [*range(1, 41), *range(41, LARGEST // local + 1, 29), LARGEST // local]:
            world = nodes * local
            if world > LARGEST:
                continue
            if world % cut:
                with pytest.raises(ConfigError, match=f"multiple of {cut} processes"):
                    laid_out(path, nodes, local)
                continue
            config, layout = laid_out(path, nodes, local, device)
            assert layout.train_batch == 8 * layout.data_ranks
            select(config.trainer.engine, layout, config, device)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_smallest_has_the_batch_of_the_readme(path: Path) -> None:
    cut = CUT.get(path.stem, 1)
    layout = laid_out(path, 1, cut)[1]
    assert layout.train_batch == 8 * layout.data_ranks
    assert layout.data_ranks == (2 if path.stem == "experts" else 1)


@pytest.mark.parametrize(
    ("name", "nodes", "local", "sizes"),
    [
        ("hsdp", 1, 1, (1, 1)),
        ("hsdp", 1, 8, (1, 8)),
        ("hsdp", 4, 8, (4, 8)),
        ("hsdp", 3, 2, (3, 2)),
        ("hsdp", 4, 1, (1, 4)),
        ("fsdp", 4, 8, (4, 8)),
        ("fsdp", 4, 1, (1, 4)),
        ("fsdp", 1, 1, (1, 1)),
    ],
)
def test_nodes_are_sharded_within_and_replicated_across(
    name: str, nodes: int, local: int, sizes: tuple[int, int]
) -> None:
    config, layout = laid_out(next(path for path in SHIPPED if path.stem == name), nodes, local)
    assert (layout.replicate, layout.shard) == sizes
    lone = name == "hsdp" and local == 1 and nodes > 1
    assert any("no two ranks" in note and str(nodes) in note for note in config.notes) is lone
    again = resolve(config, RuntimeFacts(nodes * local, 64, 500, False, "cpu", local))
    assert (layout_of(again, nodes * local), again.notes) == (layout, config.notes)


@pytest.mark.parametrize(
    ("stages", "tensor", "nodes", "local", "sizes"),
    [
        (2, 1, 4, 4, (2, 2, 4, 1)),  # two nodes a stage
        (4, 1, 2, 8, (4, 1, 4, 1)),  # a stage is half a node
        (1, 2, 2, 8, (1, 2, 4, 2)),
        (1, 2, 2, 3, (1, 1, 3, 2)),  # a tensor parallel group of two nodes
        (3, 1, 2, 3, (3, 1, 2, 1)),  # a stage of two nodes, with no two ranks in one
        (3, 1, 3, 4, (3, 1, 4, 1)),
        (3, 1, 2, 6, (3, 2, 2, 1)),
    ],
)
def test_a_shard_group_never_leaves_its_node(
    stages: int, tensor: int, nodes: int, local: int, sizes: tuple[int, ...]
) -> None:
    path = next(path for path in SHIPPED if path.stem == "hsdp")
    config = load(
        path,
        [
            f"pipeline.stages={stages}",
            f"tensor_parallel.autotp_size={tensor}",
            "gradient_accumulation_steps=8",
        ],
    )
    world = nodes * local
    resolved = resolve(config, RuntimeFacts(world, None, None, False, "cpu", local))
    layout = layout_of(resolved, world)
    assert (layout.pipeline, layout.replicate, layout.shard, layout.tensor) == sizes
    assert layout == layout_of(
        resolve(replace(resolved), RuntimeFacts(world, 64, 9, False, "cpu", local)), world
    )
    if layout.replicate == 1:
        return
    group = layout.shard * layout.tensor
    for first in range(0, world, group):
        assert first // local == (first + group - 1) // local


AGENTS = {
    # name -> ranks of each agent, and the mesh that is said
    "experts": {1: "shard 2, ZeRO-3, experts over 2 ranks"},
    "fsdp": {1: "shard 2, ZeRO-3", 2: "replicate 2 x shard 2, ZeRO-3"},
    "hsdp": {1: "shard 2, ZeRO-3", 2: "replicate 2 x shard 2, ZeRO-3"},
    "ddp": {1: "replicate 2, ZeRO-0", 2: "replicate 4, ZeRO-0"},
    "zero1": {1: "shard 2, ZeRO-1", 2: "shard 4, ZeRO-1"},
    "zero2": {1: "shard 2, ZeRO-2", 2: "shard 4, ZeRO-2"},
    "zero2_offload": {1: "shard 2, ZeRO-2", 2: "shard 4, ZeRO-2"},
    "zero3": {1: "shard 2, ZeRO-3", 2: "shard 4, ZeRO-3"},
    "zero3_offload": {1: "shard 2, ZeRO-3", 2: "shard 4, ZeRO-3"},
    "long_context": {1: "shard 2, ZeRO-3, context 2"},
    "pipeline_zero1": {1: "pipeline 2, ZeRO-1", 2: "pipeline 2 x shard 2, ZeRO-1"},
    "pipeline_zero2": {1: "pipeline 2, ZeRO-2", 2: "pipeline 2 x shard 2, ZeRO-2"},
    "pipeline_zero3": {1: "pipeline 2, ZeRO-3", 2: "pipeline 2 x shard 2, ZeRO-3"},
    "tensor_zero2": {1: "tensor 2, ZeRO-2", 2: "shard 2 x tensor 2, ZeRO-2"},
    "megatron_3d": {2: "pipeline 2 x tensor 2, ZeRO-2"},
}


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "local"), [(name, local) for name, shapes in AGENTS.items() for local in shapes]
)
def test_two_agents_run_it(name: str, local: int, tmp_path: Path) -> None:
    job = json.loads(write_job(tmp_path).read_text())["trainer"]
    model = job["model"]["config"] | {
        "attention_dropout": 0.0
    }  # which is not drawn inside of what is split
    if name == "experts":
        model |= {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
        model |= {"moe_intermediate_size": 16}
    small = {"model.config": model, "data": job["data"], "run.folder": str(tmp_path / "runs")}
    small |= {"steps": 2, "log.every": 1, "evaluation.samples": 4, "generate.prompt": None}
    overrides = [f"trainer.{key}={json.dumps(value)}" for key, value in small.items()]
    common = ["--nnodes", "2", "--nproc-per-node", str(local), "--master-addr", "127.0.0.1"]
    common += ["--master-port", str(free_port())]
    command = [TRAIN, "--config", name, *overrides]
    results = agents(
        *(["torchrun", *common, "--node-rank", str(node), *command] for node in range(2))
    )
    for result in results:
        assert result.code == 0, result.output
    assert any(f"layout  {AGENTS[name][local]}" in result.output for result in results), results[
        0
    ].output
    assert all(math.isfinite(loss) for loss in losses(tmp_path / "runs" / name))
