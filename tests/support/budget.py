"""What a step of training sends, by formulas: for each engine and layout, from a model's sizes.

    python -m tests.support.budget    # writes the table of docs/traffic.md

Written by hand, from the papers in docs/parallelism.md and FSDP2's units, and not recorded:
`tests/budgets/` compares each with what a rank of the engine does (`tests/support/counted.py`).

Sizes are numbers of values: e of the embedding, b of a block, h of the last norm and the head, with
P = e + L b + h; m micro-batches; shards of S ranks, R replicas, t tensor ranks, p stages. Blocks
are such that each dimension is a multiple of the ranks (FSDP2 pads what is none).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from tests.support.counted import LENGTH, Kind, layout_of, spec_with, workload
from trainer.layout import AXES, Layout
from trainer.models.spec import ModelSpec
from trainer.parallel.parallel_mesh import division_of
from trainer.parallel.splits.experts import STYLE as EXPERTS
from trainer.parallel.splits.matrices import STYLES
from trainer.tools.planner.simulate import Workload


@dataclass(frozen=True)
class Sizes:
    """The numbers of values in a model's parts, and the shape of what goes from block to block."""

    blocks: int
    block: int
    split: int
    """The values of a block that tensor parallelism divides."""
    embedding: int
    head: int
    """The last norm, and the head unless it is tied to the embedding."""
    norms: int
    """The tensors of one dimension, which are not decayed: DeepSpeed has them in another group."""
    modules: int
    """The modules of a block with parameters of their own, a layer of experts being one."""
    columns: int
    """The matrices of a block that are split by columns, and those that are split by rows."""
    rows: int
    """With a layer of experts, which are split as a whole."""
    experts: int
    """The values of a block's routed experts, and their number."""
    many: int
    chosen: int
    """The experts of a token, if they are split."""
    summed: int
    """The values of a block's norms that see some heads."""
    hidden: int
    attended: int
    """The values of a token's queries, keys, values and attention output in a block."""
    keys: int
    """The values of its keys and values."""
    heads: int
    words: int
    tied: bool

    @property
    def all(self) -> int:
        return self.embedding + self.blocks * self.block + self.head


def sizes_of(spec: ModelSpec) -> Sizes:
    """Measure a model on the meta device. All its blocks have one size."""
    model = spec.build()
    plan = spec.language.tensor_plan
    blocks = [model.get_submodule(name) for name in spec.blocks]
    [block] = {_count(block) for block in blocks}
    first = spec.blocks[0]
    own = {name: style for name, style in plan.items() if name.startswith(f"{first}.")}
    modules = dict(model.named_modules())
    of = {name: style for name, style in own.items() if name in modules}
    split = [name for name, style in of.items() if style in STYLES]
    experts = [name for name, style in of.items() if style == EXPERTS]
    summed = [name for name, style in of.items() if style == "replicated_with_grad_allreduce"]
    embedding = _count(model.get_input_embeddings())  # type: ignore[operator]
    return Sizes(
        blocks=len(blocks),
        block=block,
        split=sum(_count(modules[name]) for name in [*split, *experts]),
        summed=sum(_count(modules[name]) for name in summed),
        embedding=embedding,
        head=_count(model) - embedding - len(blocks) * block,
        norms=sum(p.numel() for p in model.parameters() if p.ndim == 1),
        modules=_modules(blocks[0]),
        columns=sum(own[name].startswith("colwise") for name in split),
        rows=sum(own[name].startswith("rowwise") for name in split) + len(experts),
        experts=sum(_count(modules[name]) for name in experts),
        many=sum(len(next(modules[name].parameters())) for name in experts),
        chosen=len(experts) and model.config.num_experts_per_tok,  # type: ignore[union-attr]
        hidden=spec.language.hidden_size or 0,
        attended=2 * spec.language.attention.width + _keys(spec),
        keys=_keys(spec),
        heads=spec.language.attention.heads,
        words=spec.language.vocabulary,
        tied=bool(spec.tied),
    )


def _keys(spec: ModelSpec) -> int:
    sizes = spec.language.attention
    return 2 * sizes.width * sizes.kv_heads // sizes.heads


def _modules(block: nn.Module) -> int:
    own = [name for name, module in block.named_modules() if module._parameters]
    layers = {name.rpartition(".")[0] for name in own if name.endswith("experts")}
    return len([name for name in own if not name.startswith(tuple(layers))]) + len(layers)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class Levers(NamedTuple):
    """What issue 23 changes: as it was before, or as it is right."""

    units: bool = True
    """Embedding and head are units of their own, and gathered for one pass of the two."""
    accumulation: bool = True
    """ZeRO-2 gathers once a step, and HSDP adds its replicas up once."""
    tensor: bool = True
    """The gradient of what several split matrices read is added up once, and tensor ranks share
    table, head and loss."""


BEFORE, AFTER = Levers(False, False, False), Levers()


class Unit(NamedTuple):
    """Parameters that FSDP gathers and reduces together."""

    size: int
    both: bool
    """True if ZeRO-3 gathers it for the forward and for the backward pass."""
    kept: bool = False
    """True if it stays gathered from the forward pass to the backward pass."""
    parts: int = 1
    """The ranks of `shard` that have a part each of what this is a part of."""


class Tally(dict[Kind, tuple[int, int]]):
    """Counts and bytes of messages by kind."""

    def add(self, name: str, axes: tuple[str, ...], dtype: str, count: int, size: int) -> None:
        """Add messages of so many bytes together; none among ranks that are one."""
        if axes and count:
            before = self.get((name, axes, dtype), (0, 0))
            self[name, axes, dtype] = before[0] + count, before[1] + size

    def on_mesh(self) -> Tally:
        """Return it with both parts of `shard`, among which experts are divided, as `shard`."""
        result, names = Tally(), {"expert": "shard", "rest": "shard"}
        for (name, axes, dtype), message in self.items():
            result.add(name, tuple(names.get(axis, axis) for axis in axes), dtype, *message)
        return result


WIDTH = {"float32": 4, "bfloat16": 2}


def expected(
    layout: Layout,
    sizes: Sizes,
    engine: str = "mesh",
    *,
    stage: int = 0,
    length: int = LENGTH,
    levers: Levers = AFTER,
    reduced: str = "float32",
) -> Tally:
    """Return what a rank of a pipeline stage sends in a step: count and bytes of each kind.

    `reduced`: the dtype in which DDP and FSDP reduce gradients.
    """
    result = Tally()
    if layout.pipeline > 1 and layout.schedule.name != "1F1B":
        raise NotImplementedError("the formulas are those of 1F1B")
    if engine == "deepspeed":
        levers = BEFORE
    words = layout.tensor if levers.tensor else 1
    length //= layout.context

    def rows(matrix: int) -> int:
        """Divide a table's rows by the tensor ranks; those of a shard are filled up with zeros."""
        result = matrix // sizes.hidden // words
        return -(-result // layout.shard) * layout.shard * sizes.hidden

    sizes = replace(
        sizes,
        blocks=sizes.blocks // layout.pipeline,
        block=sizes.block - sizes.split + sizes.split // layout.tensor,
        split=sizes.split // layout.tensor,
        embedding=rows(sizes.embedding),
        head=sizes.hidden + rows(sizes.head - sizes.hidden),
    )
    result.add("all-reduce", _axes(layout, "pipeline", "replicate", "shard"), "int64", 1, 8)
    _activations(result, layout, sizes, stage, length, levers)
    if engine == "deepspeed":
        _deepspeed(result, layout, sizes, stage)
    else:
        _torch(result, layout, sizes, stage, levers, engine, reduced)
    return result


def _axes(layout: Layout, *names: str) -> tuple[str, ...]:
    """Return those of the axes that have more than one rank."""
    return tuple(name for name in names if getattr(layout, name) > 1)


def _activations(
    found: Tally, layout: Layout, sizes: Sizes, stage: int, length: int, levers: Levers
) -> None:
    """Add hidden states, of micro-batch x length x hidden size, that go from stage to stage."""
    m, width = layout.accumulation, WIDTH[layout.precision]
    hidden = layout.micro_batch * length * sizes.hidden * width
    if layout.context > 1:
        # queries, keys and values together, and the output, in both passes (Ulysses, arXiv
        # 2309.14509, section 3.2)
        tokens, axis = layout.micro_batch * length, "shard" if layout.shard > 1 else "replicate"
        size = tokens * sizes.attended // layout.tensor * width
        count, groups = m * sizes.blocks, division_of(layout, sizes.heads).groups
        swaps = count * (groups < layout.context)
        found.add("all-to-all", (axis,), layout.precision, 4 * swaps, 2 * swaps * size)
        # between groups keys and values, and their gradients (Llama 3, arXiv 2407.21783, 3.3.2)
        gathers, keys = 2 * count * (groups > 1), tokens * sizes.keys // layout.tensor * width
        for name in ("all-gather", "reduce-scatter"):
            found.add(name, (axis,), layout.precision, gathers, gathers // 2 * groups * keys)
    if layout.expert > 1:
        # to the ranks of a token's experts and back, in both passes; their weights go there, and
        # gradients of these come back; their numbers, and the counts of rows and pairs
        rows, count = _rows_to_experts(layout, sizes, length), m * sizes.blocks
        size = count * (4 * rows * sizes.hidden + 2 * rows * sizes.chosen) * width
        found.add("all-to-all", ("expert",), layout.precision, 6 * count, size)
        found.add("all-to-all", ("expert",), "int32", count, count * rows * sizes.chosen * 4)
        found.add("all-to-all", ("expert",), "int64", count, count * layout.expert * 2 * 8)
    if layout.tensor > 1:
        _split(found, layout, sizes, stage, length, levers)
    ends = (stage > 0) + (stage + 1 < layout.pipeline)  # one receives, the other sends, and back
    for name in ("send", "receive") if layout.pipeline > 1 else ():
        found.add(name, ("pipeline",), layout.precision, m * ends, m * ends * hidden)


def _rows_to_experts(layout: Layout, sizes: Sizes, length: int) -> int:
    """Return how many rows a rank sends: a token goes once to each rank of its experts.

    A uniform router draws a token's experts one after the other. A rank has no row of it if all are
    on others; what the fake ranks send to one is rounded up.
    """
    others, missed = sizes.many - sizes.many // layout.expert, Fraction(1)
    for drawn in range(sizes.chosen):
        missed *= Fraction(max(0, others - drawn), sizes.many - drawn)
    return layout.expert * math.ceil(layout.micro_batch * length * (1 - missed))


def _split(
    found: Tally, layout: Layout, sizes: Sizes, stage: int, length: int, levers: Levers
) -> None:
    """Add what tensor ranks exchange (Megatron-LM, arXiv 1909.08053, section 3).

    A block has two regions, attention and MLP. In each the output of the row-split matrix is added
    up in the forward pass, and the gradient of the input, which all column-split ones read, in the
    backward pass: 2 + 2 all-reduces a block. So is what a split table looks up, and the gradient of
    the head's input; of a chunk of the loss, two numbers a token are gathered, of the scores of
    each rank's words and of the target's. Before, the gradient of each column-split matrix's input
    was added up on its own, and table, head and loss were whole.

    Sequence parallel (arXiv 2205.05198, section 4.2.2) makes of each all-reduce in a block a
    gather and a reduce-scatter, and gathers where the first block's input and the last one's output
    are divided. A region's input is gathered again for the gradients of its matrices, unless it is
    recomputed. The gradients of a block's norms are added up once a step. So are without it those
    of norms that see some heads. The weights by which experts are mixed have gradients on each rank.
    """
    m, width = layout.accumulation, WIDTH[layout.precision]
    tokens = layout.micro_batch * length
    hidden = tokens * sizes.hidden * width

    def add(name: str, each: int) -> None:
        found.add(name, ("tensor",), layout.precision, m * each, m * each * hidden)

    in_blocks = sizes.blocks * (sizes.rows + (2 if levers.tensor else sizes.columns))
    if layout.sequence_parallel:
        again = sizes.blocks * sizes.rows if layout.recompute.mode == "none" else 0
        add("all-gather", in_blocks + again + 2)
        add("reduce-scatter", in_blocks)
        norms = 4 * sizes.blocks * (sizes.block - sizes.split) // layout.shard
        found.add("all-reduce", ("tensor",), "float32", 1, norms)
    else:
        add("all-reduce", in_blocks)
    chosen = m * sizes.blocks if sizes.chosen else 0  # the gradients of the router's weights
    found.add(
        "all-reduce", ("tensor",), layout.precision, chosen, chosen * tokens * sizes.chosen * width
    )
    whole = 4 * sizes.blocks * sizes.summed // layout.shard
    if not layout.sequence_parallel:
        found.add("all-reduce", ("tensor",), "float32", int(whole > 0), whole)
    if levers.tensor:
        first, last = stage == 0, stage + 1 == layout.pipeline
        add("all-reduce", first + last)
        # a chunk's logits take 64 MiB, and a chunk has at least h / 2 tokens
        rows = max(sizes.hidden // 2, (64 << 20) // (4 * sizes.words // layout.tensor))
        chunks = last * math.ceil(tokens / rows)
        size = 2 * layout.tensor * tokens * 4 if last else 0
        found.add("all-gather", ("tensor",), "float32", m * chunks, m * size)


def _units(
    layout: Layout, sizes: Sizes, stage: int, levers: Levers, engine: str = "mesh"
) -> Iterator[Unit]:
    """Yield FSDP's units on a stage.

    The embedding is read in the forward pass alone, and the backward pass begins with the head,
    where the forward one ends: neither is gathered again. A tied table is embedding and head.
    """
    first, last = stage == 0, stage + 1 == layout.pipeline
    experts = sizes.experts if layout.expert > 1 else 0
    yield from [Unit(sizes.block - experts, both=True)] * sizes.blocks
    if experts:
        unit = Unit(experts // layout.expert, both=True, parts=layout.expert)
        yield from [unit] * sizes.blocks
    table = sizes.embedding if first or last and sizes.tied else 0
    head = sizes.head if last else 0
    if sizes.tied or not levers.units:
        again = not levers.units and engine == "mesh"
        ends = [Unit(table + head, both=again, kept=not again)]
    else:
        ends = [Unit(table, both=False), Unit(head, both=False, kept=True)]
    yield from [unit for unit in ends if unit.size]


def _torch(
    found: Tally,
    layout: Layout,
    sizes: Sizes,
    stage: int,
    levers: Levers,
    engine: str,
    low: str,
) -> None:
    """Add what `mesh` and `accelerate` send: DDP's buckets, or FSDP2's units."""
    m, stages = layout.accumulation, layout.pipeline > 1
    units = list(_units(layout, sizes, stage, levers, engine))
    everything = sum(unit.size for unit in units)
    if layout.zero_stage == 0:  # DDP: all gradients once, in buckets of 25 MB, of which here is one
        found.add("all-reduce", _axes(layout, "replicate"), low, 1, WIDTH[low] * everything)
    else:
        width = WIDTH[layout.precision]
        for unit in units:
            shard = _axes(layout, "shard") if unit.parts == 1 else ("rest",)
            shard = () if unit.parts == layout.shard else shard
            gathers = _gathers(layout, unit, levers)
            again = _again(layout, unit)
            first = (1 if stages else m) if again else gathers
            # a pipeline keeps gradients whole until the last micro-batch
            reduced = 1 if stages else m
            # what is added up in float32 is not yet reduced between replicas
            once = 1 if stages or levers.accumulation and low == "float32" else m
            for axes, times in (shard, first), (again, gathers - first):
                found.add("all-gather", axes, layout.precision, times, times * width * unit.size)
            found.add("reduce-scatter", shard, low, reduced, reduced * WIDTH[low] * unit.size)
            own = WIDTH[low] * unit.size * unit.parts // layout.shard
            found.add("all-reduce", _axes(layout, "replicate"), low, once, once * own)
    ends = stage in (0, layout.pipeline - 1)
    if stages and ends and sizes.tied:  # both ends' gradients of the table
        found.add("all-reduce", ("pipeline",), "float32", 1, 4 * sizes.embedding // layout.shard)
    found.add("all-reduce", _axes(layout, "pipeline", "shard", "tensor"), "float32", 1, 4)


def _gathers(layout: Layout, unit: Unit, levers: Levers) -> int:
    """Return how often a unit is gathered in a step.

    A pipeline frees a unit after each forward pass, and after the last backward pass: of m forward
    and m backward passes in 1F1B's order, a forward pass that follows a backward one finds it
    gathered, and so does a backward one that follows another: m + 1 are left. What is kept from
    pass to pass is gathered once.
    """
    m = layout.accumulation
    if layout.zero_stage < 3:
        return 1 if layout.pipeline > 1 or levers.accumulation else m
    if layout.pipeline > 1:
        return 1 if unit.kept else m + unit.both
    return 2 * m if unit.both else m


def _again(layout: Layout, unit: Unit) -> tuple[str, ...]:
    """Return where a unit is gathered once its step's first forward pass has divided it again.

    hpZ (ZeRO++, arXiv 2306.10209, section 3.2): among the ranks of a second copy. A pipeline frees
    that after its last backward pass; else each micro-batch does. Empty: it is gathered as at
    first, and so are experts that ranks divide.
    """
    second = layout.regathered and unit.both and unit.parts == 1
    return ("secondary",) if second else ()


def _deepspeed(found: Tally, layout: Layout, sizes: Sizes, stage: int) -> None:
    """Add what DeepSpeed sends; a model is smaller than its buckets (5e8 values).

    ZeRO-1 and 2 add gradients up by one all-reduce for all ranks' parts of a bucket
    (`use_multi_rank_bucket_allreduce`), at the end or for each micro-batch, and gather the updated
    weights, in a group with weight decay and one without; they ask in a byte whether a gradient is
    infinite, and take the norm of each group. ZeRO-3 gathers each module for each pass, unless it
    is prefetched with others; it reduces each micro-batch's gradients.
    """
    m, z, width = layout.accumulation, layout.zero_stage, WIDTH[layout.precision]
    axes = _axes(layout, "replicate", "shard")
    units = list(_units(layout, sizes, stage, BEFORE))
    everything = sum(unit.size for unit in units)
    if z == 3:
        count = 2 * m * (sizes.blocks * sizes.modules + 3)
        read = everything + (sizes.embedding if sizes.tied else 0)  # a tied table is read twice
        found.add("all-gather", axes, layout.precision, count, 2 * m * width * read)
        found.add("reduce-scatter", axes, layout.precision, m, m * width * everything)
        found.add("all-reduce", axes, "float64", 2, 16)
        return
    times = m if z == 2 else 1
    groups = 2 if z > 0 else 1
    found.add("all-reduce", axes, layout.precision, times, times * width * everything)
    if z > 0:
        found.add("all-gather", axes, layout.precision, groups, width * everything)
        found.add("all-reduce", axes, "float32", groups, 4 * groups)
    for parts in axes, _axes(layout, "pipeline", "tensor"):
        found.add("all-reduce", parts, "uint8", int(z > 0), 1)
    found.add("all-reduce", _axes(layout, "pipeline", "tensor"), "float32", groups, 4 * groups)
    if layout.pipeline > 1 and stage + 1 == layout.pipeline:
        found.add("all-reduce", axes, "float32", 1, 4)  # the loss
    found.add("broadcast", _axes(layout, "pipeline"), "float32", 1, 8)  # the loss, twice
    if layout.pipeline > 1 and sizes.tied:  # the gradients of both ends, and the updated table
        size = width * sizes.embedding
        found.add("all-reduce", ("pipeline",), layout.precision, 1, size)
        found.add("broadcast", ("pipeline",), layout.precision, 1, size)


# The table of docs/traffic.md

PAGE = Path(__file__).parents[2] / "docs" / "traffic.md"
BEGIN, END = (f"<!-- {word}: python -m tests.support.budget -->" for word in ("begin", "end"))
TOKENS, MICRO_BATCHES = 8192, 4
SHAPES: dict[str, dict[str, Any]] = {
    "8B": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "70B": dict(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
}
"""Llama 3.1 (arXiv 2407.21783, table 3), with a vocabulary of 128,256."""
ROWS: dict[int, list[dict[str, int]]] = {
    8: [
        dict(zero_stage=2, shard=8),
        dict(zero_stage=3, shard=8),
        dict(zero_stage=1, tensor=8),
    ],
    64: [
        dict(zero_stage=2, shard=64),
        dict(zero_stage=3, shard=64),
        dict(zero_stage=3, shard=64, secondary_shard=8),
        dict(zero_stage=2, replicate=8, shard=8),
        dict(zero_stage=3, replicate=8, shard=8),
        dict(zero_stage=3, tensor=8, shard=8),
    ],
    1024: [
        dict(zero_stage=3, replicate=128, shard=8),
        dict(zero_stage=3, replicate=16, shard=64),
        dict(zero_stage=3, tensor=8, shard=128),
        dict(zero_stage=2, pipeline=4, tensor=8, shard=32),
    ],
}


def shaped(shape: str, blocks: int, **layout: Any) -> Workload:
    """Describe a run of a model of the table with so many blocks."""
    options = dict(accumulation=MICRO_BATCHES, precision="bfloat16", length=TOKENS)
    return workload(model=_model(shape, blocks), **options, **layout)


def _model(shape: str, blocks: int) -> dict[str, Any]:
    model = {"model_type": "llama", "vocab_size": 128_256, "tie_word_embeddings": False}
    return model | SHAPES[shape] | {"num_hidden_layers": blocks}


def sent(layout: Layout, tally: Tally) -> dict[str, tuple[int, float]]:
    """Return the count, and the bytes that a rank sends by rings, of each kind of message.

    Those of less than a kilobyte are left out: the targets, the norm. Those among the ranks of a
    second copy (hpZ) have a name of their own.
    """
    results: dict[str, tuple[int, float]] = {}
    for (kind, axes, _), (count, size) in tally.items():
        name = f"{kind}{SECOND}" if axes == ("secondary",) else kind
        parts = {"rest": layout.shard // layout.expert, "secondary": layout.regathered}
        ranks = math.prod(parts.get(axis) or getattr(layout, axis) for axis in axes)
        share = 1.0 if name == "send" else (ranks - 1) / ranks
        if name != "receive" and size > 1024:
            before = results.get(name, (0, 0.0))
            twice = 2 if name == "all-reduce" else 1
            results[name] = before[0] + count, before[1] + twice * share * size
    return results


COLUMNS = ("all-gather", "reduce-scatter", "all-reduce", "send")
SECOND = ", second copy"


def table() -> str:
    """Return the table, in Markdown: the first rank's messages."""
    lines = [
        BEGIN,
        f"| model | ranks | layout | {' | '.join(COLUMNS)} |",
        f"| --- | --- | --- |{' --- |' * len(COLUMNS)}",
    ]
    for shape, config in SHAPES.items():
        few = sizes_of(spec_with(json.dumps(_model(shape, 1))))
        sizes = replace(few, blocks=config["num_hidden_layers"])
        for ranks, layouts in ROWS.items():
            for axes in layouts:
                options = dict(accumulation=MICRO_BATCHES, precision="bfloat16")
                layout = layout_of(**options, **axes)
                plain = replace(layout, secondary_shard=1)  # the key had no effect then
                was = expected(plain, sizes, length=TOKENS, levers=BEFORE)
                before = sent(plain, was)
                after = sent(layout, expected(layout, sizes, length=TOKENS, levers=AFTER))
                cells = [_cell(before.get(kind), after.get(kind)) for kind in COLUMNS]
                if second := after.get(f"all-gather{SECOND}"):
                    cells[0] += f", and {_cell(second, second)} among {layout.regathered}"
                line = [shape, f"{ranks:,}", described(layout), *cells]
                lines.append(f"| {' | '.join(line)} |")
    return "\n".join([*lines, END])


def _cell(before: tuple[int, float] | None, after: tuple[int, float] | None) -> str:
    """Return a number and gigabytes, each with what it was before if that was another."""
    if before is None or after is None:
        return ""
    pairs = zip(
        (f"{before[0]:,}", _gigabytes(before[1])),
        (f"{after[0]:,}", _gigabytes(after[1])),
        strict=True,
    )
    number, size = (new if old == new else f"{old} → {new}" for old, new in pairs)
    return f"{number}: {size} GB"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f}" if size < 1e9 else f"{size / 1e9:.1f}"


def described(layout: Layout) -> str:
    """Describe a layout of the table."""
    axes = [f"{name} {getattr(layout, name)}" for name in AXES if getattr(layout, name) > 1]
    zero = f", ZeRO-{layout.zero_stage}" if layout.zero_stage else ""
    second = f", hpZ {layout.regathered}" if layout.regathered else ""
    return " x ".join(axes) + zero + second


LONG_PAGE, LONG = PAGE.with_name("context.md"), 131_072


def long_table() -> str:
    """Return the table of docs/context.md: one row of LONG tokens, shared by so many ranks."""
    lines = [
        BEGIN,
        "| model | shared by | exchanges | sent by a rank |",
        "| --- | --- | --- | --- |",
    ]
    for shape, config in SHAPES.items():
        few = sizes_of(spec_with(json.dumps(_model(shape, 1))))
        sizes = replace(few, blocks=config["num_hidden_layers"])
        for ranks in (2, 4, 8):
            options: dict[str, Any] = dict(accumulation=1, precision="bfloat16", zero_stage=3)
            layout = layout_of(shard=ranks, context=ranks, **options)
            count, size = sent(layout, expected(layout, sizes, length=LONG))["all-to-all"]
            lines.append(f"| {shape} | {ranks} | {count:,} | {_gigabytes(size)} GB |")
    return "\n".join([*lines, END])


EXPERTS_PAGE = PAGE.with_name("experts.md")
SPARSE = dict(
    model_type="qwen3_moe",
    vocab_size=151_936,
    hidden_size=2048,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=1,
    tie_word_embeddings=False,
)
"""Qwen3-30B-A3B (arXiv 2505.09388, table 2), but for its 48 blocks."""


def experts_table() -> str:
    """Return the table of docs/experts.md: what a rank sends for a micro-batch of TOKENS tokens."""
    kinds = "all-gather", "reduce-scatter", "all-to-all"
    lines = [
        BEGIN,
        f"| ranks | experts over | {' | '.join(kinds)} | sum |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    sizes = replace(sizes_of(spec_with(json.dumps(SPARSE))), blocks=48)
    for ranks, parts in (8, (1, 2, 8)), (64, (1, 8, 64)):
        for expert in parts:
            options: dict[str, Any] = dict(accumulation=1, precision="bfloat16", zero_stage=3)
            layout = layout_of(shard=ranks, expert=expert, **options)
            tally = sent(layout, expected(layout, sizes, length=TOKENS))
            results = [tally.get(kind, (0, 0.0))[1] for kind in kinds]
            cells = [_gigabytes(size) if size else "" for size in (*results, sum(results))]
            lines.append(f"| {ranks} | {expert} | {' | '.join(cells)} |")
    return "\n".join([*lines, END])


def pages() -> dict[Path, str]:
    """Return the pages with the tables of today's formulas."""
    results = {}
    for path, made in (PAGE, table), (LONG_PAGE, long_table), (EXPERTS_PAGE, experts_table):
        text = path.read_text()
        start, stop = text.index(BEGIN), text.index(END) + len(END)
        results[path] = text[:start] + made() + text[stop:]
    return results


if __name__ == "__main__":
    for place, content in pages().items():
        place.write_text(content)
