"""The modules of blocks that tensor parallelism splits: the family's own plan, or a guess.

`trainer/parallel/probes/tensor_parts.py` tries a plan on a tiny copy before it is used.
"""

from __future__ import annotations

import re

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainer.models.names import pattern_of
from trainer.models.spec import HEADS


def tensor_plan_of(model: PreTrainedModel, blocks: tuple[str, ...], heads: int) -> dict[str, str]:
    """Return the style of each module and parameter of the blocks that the model's plan names.

    For a family without a plan, one is guessed from the shapes of its layers; it is tried before it
    is used.
    """
    inside = tuple(f"{block}." for block in blocks)
    parts = dict((*model.named_modules(), *model.named_parameters()))
    names = [name for name in parts if name.startswith(inside)]
    plan = {pattern: style for pattern, style in model.tp_plan.items() if style}
    if matched := {name: plan[pattern_of(name)] for name in names if pattern_of(name) in plan}:
        stacks = {name for name, style in matched.items() if style == "moe_tp_experts"}
        return {n: style for n, style in matched.items() if n.rpartition(".")[0] not in stacks}
    guessed: dict[str, set[str]] = {}
    for block in blocks:
        for name, style in _guessed_plan(model.get_submodule(block), heads).items():
            guessed.setdefault(pattern_of(f"{block}.{name}"), set()).add(style)
    plan = {pattern: min(styles) for pattern, styles in guessed.items() if len(styles) == 1}
    return {name: plan[pattern_of(name)] for name in names if pattern_of(name) in plan}


_OF_HEADS = re.compile(r"(^|\.)(w?[qkv]|query|key|value)(_proj|_lin)?$", re.IGNORECASE)
"""The names of layers in which each row of the matrix belongs to one head."""


def widths(layer: nn.Module) -> tuple[int, int]:
    """Return the widths of a linear layer's input and output."""
    if isinstance(layer, Conv1D):
        return layer.weight.shape[0], layer.weight.shape[1]
    return layer.in_features, layer.out_features  # type: ignore[return-value]


def _guessed_plan(block: nn.Module, heads: int) -> dict[str, str]:
    """Return the styles of the large layers of a block, after Megatron (arXiv 1909.08053).

    Queries, keys and values are split by heads, as is the layer after them. A wide layer is split
    by columns, and the layer that takes its output by rows. What is between them works on a rank's
    part, unless it draws random numbers or has parameters for all parts: then the output is
    gathered. It is also gathered after a wide layer that no such layer follows.
    """
    layers = {n: m for n, m in block.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    sizes = {name: widths(layer) for name, layer in layers.items()}
    hidden = next((given for given, _ in sizes.values()), 0)
    plan = dict[str, str]()

    def pair(columns: list[str], rows: list[str], free: bool) -> None:
        plan.update(dict.fromkeys(columns, "colwise" if free else "colwise_gather_output"))
        plan.update(dict.fromkeys(rows, "rowwise" if free else "rowwise_split_input"))

    regions: dict[str, list[str]] = {}
    for name, (given, _) in sizes.items():
        if given == hidden and _OF_HEADS.search(name):
            regions.setdefault(name.rpartition(".")[0], []).append(name)
    for at, columns in regions.items():
        width = max(sizes[name][1] for name in columns)
        names = list(sizes)
        behind = names[names.index(columns[-1]) + 1 :]
        rows = [name for name in behind if sizes[name] == (width, hidden)][:1]
        region = block.get_submodule(at)
        free = bool(rows and at) and not _drops(region) and not _has(region, {width, heads})
        pair(columns, rows, free)
        if free:
            plan[at] = HEADS
    for width in {gives for given, gives in sizes.values() if given == hidden != gives}:
        columns = [n for n in sizes if n not in plan and sizes[n] == (hidden, width)]
        rows = [n for n in sizes if n not in plan and sizes[n] == (width, hidden)]
        around = [block.get_submodule(name.rpartition(".")[0]) for name in columns]
        if columns and (rows or width > hidden):
            pair(columns, rows, bool(rows) and not any(_has(module, {width}) for module in around))
    pair([], [n for n in sizes if n not in plan and sizes[n][1] == hidden <= sizes[n][0]], False)
    return plan


def _has(region: nn.Module, sizes: set[int]) -> bool:
    """Return True if a module has a tensor with such a dimension, apart from linear layers."""
    others = [m for m in region.modules() if not isinstance(m, nn.Linear | Conv1D)]
    tensors = [t for m in others for t in (*m._parameters.values(), *m._buffers.values())]
    return any(sizes & {*tensor.shape} for tensor in tensors if tensor is not None)


def _drops(attention: nn.Module) -> bool:
    """Return True if a module drops attention weights at random."""
    own = {key: value for key, value in vars(attention).items() if isinstance(value, float)}
    own |= {n: m.p for n, m in attention.named_modules() if isinstance(m, nn.Dropout)}
    return any(value > 0 for name, value in own.items() if "drop" in name and "resid" not in name)
