"""What a step sends and when, and where the host waits for a value: counted on fake ranks.

The formulas are in `tests/support/budget.py`, and what counts in `tests/support/counted.py`.
"""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.support.budget import (
    AFTER,
    ROWS,
    SHAPES,
    TOKENS,
    Levers,
    Tally,
    described,
    expected,
    pages,
    shaped,
    sizes_of,
)
from tests.support.counted import LENGTH, Step, count, counted, layout_of, workload
from tests.support.warm import PRELOADED
from trainer.engines import ENGINES
from trainer.errors import ConfigError
from trainer.tools.planner.simulate import Workload

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="fake tensors of PyTorch 2.10 have no messages"
)

# a shard is a part of every dimension: FSDP2 pads what does not divide
TINY: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    tie_word_embeddings=False,
)
LLAMA = {"model_type": "llama", **TINY}
HEAD = LLAMA | {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
TIED = LLAMA | {"tie_word_embeddings": True}
MOE = TINY | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SLIDING = {"model_type": "mistral", "sliding_window": 8, **TINY}

HALF = {"precision": "bfloat16"}
HSDP = {**HALF, "replicate": 2, "shard": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": dict(replicate=8),
    "ddp, gradients in bfloat16": dict(replicate=8, reduced="bf16"),
    "ddp, moe": dict(replicate=8, model=MOE),
    "ddp, sliding": dict(replicate=8, model=SLIDING),
    "zero1": dict(zero_stage=1, shard=8, **HALF),
    "zero2": dict(zero_stage=2, shard=8, **HALF),
    "zero2, moe": dict(zero_stage=2, shard=8, model=MOE, **HALF),
    "zero3": dict(zero_stage=3, shard=8, **HALF),
    "zero3, tied": dict(zero_stage=3, shard=8, model=TIED, **HALF),
    "zero3, moe": dict(zero_stage=3, shard=8, model=MOE, **HALF),
    "zero3, sliding": dict(zero_stage=3, shard=8, model=SLIDING, **HALF),
    "hsdp, zero2": dict(zero_stage=2, **HSDP),
    "hsdp, zero3": dict(zero_stage=3, **HSDP),
    "hsdp, zero3, gradients in bfloat16": dict(zero_stage=3, reduced="bf16", **HSDP),
    "hpz": dict(zero_stage=3, shard=8, secondary_shard=2, **HALF),
    "hpz, tied": dict(zero_stage=3, shard=8, secondary_shard=4, model=TIED, **HALF),
    "hpz, hsdp": dict(zero_stage=3, secondary_shard=2, **HSDP),
    "hpz, context": dict(zero_stage=3, shard=8, secondary_shard=4, context=2, **HALF),
    "hpz, pipeline": dict(pipeline=2, zero_stage=3, shard=4, secondary_shard=2, **HALF),
    "hpz, experts": dict(zero_stage=3, shard=8, secondary_shard=4, expert=2, model=MOE, **HALF),
    "pipeline": dict(pipeline=2),
    "pipeline, tied": dict(pipeline=2, model=TIED),
    "pipeline x ddp": dict(pipeline=2, replicate=2),
    "pipeline x zero1": dict(pipeline=2, zero_stage=1, shard=2),
    "pipeline x zero2": dict(pipeline=2, zero_stage=2, shard=2, **HALF),
    "pipeline x zero3": dict(pipeline=2, zero_stage=3, shard=2, **HALF),
    "pipeline x hsdp": dict(pipeline=2, zero_stage=3, **HSDP),
    "zero3, experts": dict(zero_stage=3, shard=8, expert=4, model=MOE, **HALF),
    "zero2, all experts": dict(zero_stage=2, shard=8, expert=8, model=MOE, **HALF),
    "hsdp, experts": dict(zero_stage=3, expert=2, model=MOE, **HSDP),
    "pipeline x experts": dict(pipeline=2, zero_stage=2, shard=2, expert=2, model=MOE, **HALF),
    "zero3, context": dict(zero_stage=3, shard=8, context=2, **HALF),
    "zero2, context, moe": dict(zero_stage=2, shard=8, context=4, model=MOE, **HALF),
    "ddp, context, sliding": dict(replicate=4, context=2, model=SLIDING),
    "zero2, context in groups": dict(zero_stage=2, shard=8, context=8, **HALF),
    "zero3, context of heads": dict(zero_stage=3, shard=8, context=8, model=HEAD, **HALF),
    "pipeline x context": dict(pipeline=2, zero_stage=1, shard=2, context=2),
    "tensor x zero2, context": dict(tensor=2, zero_stage=2, shard=2, context=2, **HALF),
    "tensor": dict(tensor=4),
    "tensor, tied": dict(tensor=4, model=TIED),
    "tensor, moe": dict(tensor=2, model=MOE),
    "tensor x zero3, moe": dict(tensor=2, zero_stage=3, shard=2, model=MOE, **HALF),
    "tensor, sequence parallel": dict(tensor=4, sequence_parallel=True),
    "tensor x ddp": dict(tensor=2, replicate=2),
    "tensor x ddp, gradients in bfloat16": dict(tensor=2, replicate=2, reduced="bf16"),
    "tensor x zero1": dict(tensor=2, zero_stage=1, shard=2, **HALF),
    "tensor x zero2": dict(tensor=2, zero_stage=2, shard=2, **HALF),
    "tensor x zero3": dict(tensor=2, zero_stage=3, shard=2, **HALF),
    "tensor x hsdp": dict(tensor=2, zero_stage=3, **HSDP),
    "tensor x zero3, sequence parallel": dict(
        tensor=2, zero_stage=3, shard=2, sequence_parallel=True, **HALF
    ),
    "pipeline x tensor": dict(pipeline=2, tensor=2),
    "pipeline x tensor, sequence parallel": dict(pipeline=2, tensor=2, sequence_parallel=True),
    "pipeline x tensor x zero3": dict(pipeline=2, tensor=2, zero_stage=3, shard=2, **HALF),
}
# gathered module by module: by default it joins modules, as they fit its buckets
ONE_BY_ONE = {
    "zero_optimization": {
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0,
    }
}
OPTIMIZERS: Any = {
    name: {"type": name, "params": {"lr": 1e-2, "weight_decay": 0.0}}
    for name in ("SGD", "RMSprop", "Muon")
}
SELECTIVE = dict(recompute="selective", precision="bfloat16", zero_stage=3, shard=8)


def offered() -> dict[str, dict[str, Any]]:
    """Every layout with one and with four micro-batches, under each engine that offers it."""
    results = {}
    for name, case in LAYOUTS.items():
        for engine in ENGINES if "reduced" not in case else ("mesh", "accelerate"):
            job = {"model": LLAMA, **case, "engine": engine}
            if engine == "deepspeed" and case.get("zero_stage") == 3:
                job["more"] = ONE_BY_ONE
            if engine == "deepspeed" and "tensor" in case and job["model"] is MOE:
                continue  # AutoTP splits no experts: its check refuses the model
            if engine == "deepspeed" and "expert" in case:
                continue  # the formulas have no experts under DeepSpeed's ZeRO
            axes = {key: value for key, value in case.items() if key not in ("model", "reduced")}
            try:
                layout_of(engine, accumulation=4, **axes)
            except ConfigError:
                continue
            # of a pipeline, the first and the last stage
            for rank in (0, -1) if "pipeline" in case else (0,):
                end = ", last" if rank else ""
                for m in (4,) if "pipeline" in case else (1, 4):
                    results[f"{engine} {name}, {m}{end}"] = {**job, "accumulation": m, "rank": rank}
    return results


def rows() -> dict[str, dict[str, Any]]:
    """Every row of the docs' table, with few blocks: the formulas are linear in them."""
    return {
        f"{shape}, {described(layout_of(accumulation=4, **axes))}": {
            "shape": shape,
            "blocks": 2 * axes.get("pipeline", 1),
            "engine": "mesh",
            **axes,
        }
        for shape in SHAPES
        for layouts in ROWS.values()
        for axes in layouts
    }


def made(name: str) -> Workload:
    job = {key: value for key, value in JOBS[name].items() if key != "rank"}
    return shaped(**job) if "shape" in job else workload(**job)


SENT = offered() | rows()
JOBS = SENT | {
    **{name: dict(model=LLAMA, optimizer=it) for name, it in OPTIMIZERS.items()},
    "selective": dict(model=LLAMA, **SELECTIVE),
    "selective, sliding": dict(model=SLIDING, **SELECTIVE),
    "selective, moe": dict(model=MOE, **SELECTIVE),
}


class Jobs:
    """The steps of the tests that run, counted together: as many at a time as there are cores."""

    def __init__(self, names: list[str]) -> None:
        for module in PRELOADED:  # once, and not in each process
            import_module(module)
        self.workloads = {name: made(name) for name in names}
        pairs = [
            (work, JOBS[name].get("rank", 0) % work.layout.world_size)
            for name, work in self.workloads.items()
        ]
        self.steps: dict[str, Step] = dict(zip(names, count(pairs), strict=True))


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> Jobs:
    items = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in items if hasattr(item, "callspec")]
    return Jobs(list(dict.fromkeys(names)))


def formula(name: str, work: Workload, levers: Levers) -> Tally:
    job = JOBS[name]
    return expected(
        work.layout,
        sizes_of(work.spec),
        work.engine_name,
        stage=job["pipeline"] - 1 if job.get("rank") else 0,
        length=TOKENS if "shape" in job else LENGTH,
        levers=levers,
        reduced="bfloat16" if "reduced" in job else "float32",
    )


FIRST = (
    "mesh zero2, 4",
    "deepspeed zero3, 1",
    "accelerate zero3, 4",
    "mesh zero3, 1",
    "mesh hpz, 4",
    "mesh hsdp, zero3, 4",
    "mesh pipeline x zero3, 4",
    "mesh pipeline x zero3, 4, last",
    "mesh zero3, experts, 1",
    "mesh tensor x zero3, 1",
)
"""The layouts of a first run."""


@pytest.mark.first(*FIRST)
@pytest.mark.parametrize("name", SENT)
def test_a_step_sends_what_the_formulas_say(jobs, name):
    assert jobs.steps[name].collectives() == formula(name, jobs.workloads[name], AFTER).on_mesh()


@pytest.mark.first
def test_a_recomputed_layer_of_experts_sends_no_token_again():
    work = workload(model=MOE, expert=4, accumulation=1, **SELECTIVE)
    seen = counted(work).collectives()
    wanted = expected(work.layout, sizes_of(work.spec)).on_mesh()
    exchanges = {kind: message for kind, message in wanted.items() if kind[0] == "all-to-all"}
    assert len(exchanges) == 3
    assert {kind: seen[kind] for kind in exchanges} == exchanges


def test_the_docs_have_the_tables():
    assert {path: path.read_text() for path in pages()} == pages()


def reads_of(step: Step) -> Counter[str]:
    """Return host reads by file and function."""
    result: Counter[str] = Counter()
    for place, number in step.reads.items():
        file, _, where = place.partition(":")
        result[f"{file} {where.partition(' ')[2]}"] += number
    return result


@pytest.mark.first(
    *FIRST,
    "SGD",
    "selective",
    "selective, sliding",
    "selective, moe",
)
@pytest.mark.parametrize("name", JOBS)
def test_the_host_waits_for_no_value(jobs, name):
    """Without a fused kernel the host decides whether to step; DeepSpeed's ZeRO-1 and 2 ask, too."""
    work = jobs.workloads[name]
    wanted: dict[str, int] = {}
    if name == "RMSprop":
        wanted = {"trainer/optim/optimizer.py step_if_finite": 1}
    elif work.engine_name == "deepspeed" and work.layout.zero_stage in (1, 2):
        file, function = "forward_backward.py", "train"
        if work.layout.pipeline > 1:
            file, function = "patches.py", "surrounded"
        wanted = {f"trainer/engines/deepspeed/{file} {function}": 1}
    elif work.layout.expert > 1:  # the sizes of the parts, once a layer and pass
        passes = work.layout.accumulation * len(work.spec.blocks) // work.layout.pipeline
        sizes = {"trainer/parallel/splits/expert_ranks.py split_sizes": 3 * work.layout.expert}
        wanted = {place: passes * number for place, number in sizes.items()}
    assert reads_of(jobs.steps[name]) == wanted


@pytest.mark.parametrize("name", ["mesh zero3, 1", "SGD", "RMSprop", "Muon"])
def test_fused_kernels_clip_the_gradients_that_they_read(jobs, name):
    """Others need a pass over all gradients before them."""
    names = [event.name for event in jobs.steps[name].events]
    assert names.count("aten._foreach_mul_") == (name in ("RMSprop", "Muon"))


def first(step: Step, what: str, during: str, block: int) -> int:
    """Return the place in the step of the first operator or message of a block's pass."""
    return next(
        place
        for place, event in enumerate(step.events)
        if (event.name, event.during, event.block) == (what, during, block)
    )


def places(step: Step, kind: str, size: int) -> list[int]:
    """Return the places in the step of messages of one kind and number of bytes."""
    return [
        place
        for place, event in enumerate(step.events)
        if event.message is not None and (event.name, event.message.size) == (kind, size)
    ]


@pytest.mark.first("mesh zero3, 1")
@pytest.mark.parametrize("name", ["mesh zero2, 1", "mesh zero3, 1", "accelerate zero3, 1"])
def test_the_head_is_reduced_before_the_last_block(jobs, name):
    step, sizes = jobs.steps[name], sizes_of(jobs.workloads[name].spec)
    [head] = places(step, "reduce-scatter", 4 * sizes.head)
    blocks = places(step, "reduce-scatter", 4 * sizes.block)
    [embedding] = places(step, "reduce-scatter", 4 * sizes.embedding)
    assert [head, *blocks, embedding] == sorted([head, *blocks, embedding])
    assert len(blocks) == sizes.blocks
    assert head < first(step, "aten.mm", "backward", sizes.blocks - 1)


@pytest.mark.first("mesh zero3, 1")
@pytest.mark.parametrize("name", ["mesh zero3, 1", "accelerate zero3, 1"])
def test_a_block_is_gathered_before_the_backward_products_of_the_one_after_it(jobs, name):
    step, sizes = jobs.steps[name], sizes_of(jobs.workloads[name].spec)
    gathers = places(step, "all-gather", 2 * sizes.block)
    assert len(gathers) == 2 * sizes.blocks
    backward = gathers[sizes.blocks :]  # of the last block, ..., of the first
    for number, gathered in enumerate(backward[1:]):
        assert gathered < first(step, "aten.mm", "backward", sizes.blocks - 1 - number)


@pytest.mark.first("mesh zero3, 1")
@pytest.mark.parametrize("name", ["mesh zero2, 1", "mesh zero3, 1", "accelerate zero3, 1"])
def test_a_block_is_gathered_before_the_products_of_the_one_before_it(jobs, name):
    step, sizes = jobs.steps[name], sizes_of(jobs.workloads[name].spec)
    gathers = places(step, "all-gather", 2 * sizes.block)
    for block in range(1, sizes.blocks):
        assert gathers[block] < first(step, "aten.mm", "forward", block - 1)


WAIT = "_c10d_functional.wait_tensor"
EXCHANGED = {
    "mesh tensor, 1": {"all-reduce": 5},
    "mesh tensor, sequence parallel, 1": {"all-gather": 5, "reduce-scatter": 5},
    "mesh tensor x zero3, 1": {"all-reduce": 5},
}
"""The products that a block computes while messages of its backward pass are under way, by kind: of
queries, keys and values, and of gate and up."""


def hidden_by(step: Step) -> Counter[str]:
    """Count products between what tensor ranks begin to exchange and the wait for it.

    Of the backward passes of blocks, by kind of message. They land in the order of their beginning.
    """
    result: Counter[str] = Counter()
    under_way: list[str] = []
    for event in step.events:
        message = event.message
        if message is not None and step.layout.axes_of(message.group) == ("tensor",):
            under_way.append(event.name if event.during == "backward" else "")
        elif event.name == WAIT:
            under_way.pop(0)
        elif event.name == "aten.mm" and event.block is not None:
            result.update(filter(None, under_way))
    return result


@pytest.mark.first("mesh tensor, sequence parallel, 1")
@pytest.mark.parametrize("name", EXCHANGED)
def test_products_are_computed_while_tensor_ranks_exchange(jobs, name):
    step = jobs.steps[name]
    blocks = len(jobs.workloads[name].spec.blocks)
    assert hidden_by(step) == {kind: blocks * n for kind, n in EXCHANGED[name].items()}


KEPT = {
    "selective": {"aten.mm": 7},
    "selective, sliding": {"aten.mm": 7},
    "selective, moe": {"aten.mm": 5, "aten._grouped_mm": 2, "aten.topk": 1},
}
"""By family, for each block: queries, keys, values, output, and gate, up and down of a MLP; in a
layer of experts the router's product, and two grouped ones, of gate and up together and down."""
ATTENTION = ("attention", "attn")
COSTLY = ("mm", "topk", *ATTENTION, "all_", "reduce_scatter")


@pytest.mark.parametrize("name", KEPT)
def test_selective_keeps_products_attention_and_the_choice_of_experts(jobs, name):
    step, sizes = jobs.steps[name], sizes_of(jobs.workloads[name].spec)
    for block in range(sizes.blocks):
        # varlen_attn has a gradient of its own: it runs without, and again it would in the backward
        forward, again = (
            Counter(
                event.name
                for event in step.events
                if event.block == block and event.during == at[int("varlen_attn" in event.name)]
            )
            for at in (("forward", "no_grad"), ("recompute", "backward"))
        )
        costly = {
            operator: number
            for operator, number in forward.items()
            if any(word in operator for word in COSTLY)
        }
        attention = {name: 1 for name in costly if any(word in name for word in ATTENTION)}
        assert len(attention) == 1
        assert costly == KEPT[name] | attention
        assert not costly.keys() & again.keys()
        assert again["aten.silu"] == 1 and again["aten.rsqrt"] >= 2  # cheap ones are computed again
