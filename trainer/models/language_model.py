"""The properties of a language model, read from its modules and config, or found by running it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import ModelOutput

from trainer.errors import refused
from trainer.models.materialise import on_host
from trainer.models.names import outermost, pattern_of
from trainer.models.spec import HEADS, LanguageModel, ModelSpec

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
"""Transformers' config keys, by family, for a layer's routed experts and a token's chosen ones."""
LARGEST = 50_000_000
"""The most parameters of a model that is run to find its blocks."""


def language_of(model: PreTrainedModel, blocks: tuple[str, ...]) -> LanguageModel:
    """Read a model's head, sizes and tensor plan on the meta device."""
    text = text_config(model)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    tables = [module for module in (table, head) if module is not None]
    is_tied = head is not None and table is not None and head.weight is table.weight
    hidden = getattr(text, "hidden_size", None)
    heads, kv_heads, width = _heads(text, hidden or 0)
    return LanguageModel(
        head_parameters=head.weight.numel() if head is not None else 0,
        embedding_parameters=0 if is_tied or table is None else table.weight.numel(),
        idle_parameters=idle_parameters(model, text),
        # target ids must be in the table, too
        vocabulary=min((len(module.weight) for module in tables), default=0),
        positions=positions_of(model, text),
        hidden_size=hidden,
        layers=getattr(text, "num_hidden_layers", 0),
        attention_width=width,
        heads=heads,
        kv_heads=kv_heads,
        tensor_plan=_tensor_plan(model, blocks, heads),
        plain_head=_has_plain_head(model),
        word_by_word=_is_word_by_word(model),
        own_loss=bool(getattr(text, "output_router_logits", False)),
    )


def text_config(model: Any) -> Any:
    """Return the part of the config that describes the decoder. Raises ConfigError for several."""
    with refused(f"trainer.model: {model.config.model_type}", "one decoder", ValueError):
        return model.config.get_text_config()


def _heads(text: Any, hidden: int) -> tuple[int, int, int]:
    """Return query and key-value heads (common divisors of layers), and mean heads x head size."""
    layers = list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]
    heads, kv_heads, width = [], [], 0
    for layer in layers:
        many = getattr(layer, "num_attention_heads", 0) or 0
        size = getattr(layer, "head_dim", None) or (hidden // many if many else 0)
        heads.append(many)
        kv_heads.append(getattr(layer, "num_key_value_heads", None) or many)
        width += many * size
    return math.gcd(*heads), math.gcd(*kv_heads), width // len(layers)


def positions_of(model: nn.Module, text: Any) -> int | None:
    """Return the most tokens of a sequence; RoBERTa numbers them from after the padding's."""
    reserved = [0]
    for name, module in model.named_modules():
        if "position" in name and isinstance(module, nn.Embedding):
            reserved.append(0 if module.padding_idx is None else module.padding_idx + 1)
    stated = getattr(text, "max_position_embeddings", None)
    return stated and stated - max(reserved)


def _tensor_plan(model: PreTrainedModel, blocks: tuple[str, ...], heads: int) -> dict[str, str]:
    """Return the rules of the model's tensor plan within the blocks, layer numbers filled in.

    A family without a plan gets one by the shapes of its layers, which is tried before it is used.
    """
    inside = tuple(f"{block}." for block in blocks)
    parts = dict((*model.named_modules(), *model.named_parameters()))
    names = [name for name in parts if name.startswith(inside)]
    plan = {pattern: style for pattern, style in model.tp_plan.items() if style}
    if found := {name: plan[pattern_of(name)] for name in names if pattern_of(name) in plan}:
        stacks = {name for name, style in found.items() if style == "moe_tp_experts"}
        return {n: style for n, style in found.items() if n.rpartition(".")[0] not in stacks}
    guessed: dict[str, set[str]] = {}
    for block in blocks:
        for name, style in _guessed_plan(model.get_submodule(block), heads).items():
            guessed.setdefault(pattern_of(f"{block}.{name}"), set()).add(style)
    plan = {pattern: min(styles) for pattern, styles in guessed.items() if len(styles) == 1}
    return {name: plan[pattern_of(name)] for name in names if pattern_of(name) in plan}


_OF_HEADS = re.compile(r"(^|\.)(w?[qkv]|query|key|value)(_proj|_lin)?$", re.IGNORECASE)
"""The names of layers each of whose rows belongs to one head."""


def widths(layer: nn.Module) -> tuple[int, int]:
    """Return the widths of what a linear layer takes and gives."""
    rows, columns = layer.weight.shape  # type: ignore[union-attr,misc]
    return (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)


def _guessed_plan(block: nn.Module, heads: int) -> dict[str, str]:
    """Return the styles of the large layers of a block, after Megatron (arXiv 1909.08053).

    Queries, keys, values and the layer behind them are split by heads; a wide layer and the one
    that takes what it gives by columns and rows. What lies between them is whole on each rank if it
    draws random numbers or has parameters for all of it; as it is behind any other wide layer.
    """
    layers = {n: m for n, m in block.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    sizes = {name: widths(layer) for name, layer in layers.items()}
    hidden, plan = next((given for given, _ in sizes.values()), 0), dict[str, str]()

    def pair(columns: list[str], rows: list[str], free: bool) -> None:
        plan.update(dict.fromkeys(columns, "colwise" if free else "colwise_gather_output"))
        plan.update(dict.fromkeys(rows, "rowwise" if free else "rowwise_split_input"))

    regions: dict[str, list[str]] = {}
    for name, (given, _) in sizes.items():
        if given == hidden and _OF_HEADS.search(name):
            regions.setdefault(name.rpartition(".")[0], []).append(name)
    for at, columns in regions.items():
        width, names = max(sizes[name][1] for name in columns), list(sizes)
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
    """Return True if a module has tensors of these sizes beside those of linear layers."""
    others = [m for m in region.modules() if not isinstance(m, nn.Linear | Conv1D)]
    tensors = [t for m in others for t in (*m._parameters.values(), *m._buffers.values())]
    return any(sizes & {*tensor.shape} for tensor in tensors if tensor is not None)


def _drops(attention: nn.Module) -> bool:
    """Return True if a module drops attention weights at random."""
    own = {key: value for key, value in vars(attention).items() if isinstance(value, float)}
    own |= {n: m.p for n, m in attention.named_modules() if isinstance(m, nn.Dropout)}
    return any(value > 0 for name, value in own.items() if "drop" in name and "resid" not in name)


# Experts


def routes(model: PreTrainedModel) -> bool:
    """Return True if a layer routes tokens to experts: has some, or what the family records."""
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    router = getattr(recorded, "target_class", recorded)
    has_router = isinstance(router, type) and any(isinstance(m, router) for m in model.modules())
    return has_router or _routed_parameters(model, text_config(model)) > 0


def _routed_parameters(model: nn.Module, config: Any) -> int:
    """Count the parameters of routed experts: modules named `experts`, or stacked over all experts.

    Shared experts, which see every token, do not count.
    """
    experts = _first_number(config, EXPERTS)
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "experts" in name.split(".") or (parameter.ndim == 3 and parameter.shape[0] == experts)
    )


def idle_parameters(model: nn.Module, config: Any) -> int:
    """Count the parameters of the experts that a token is not routed to; 0 for a dense model."""
    experts, chosen = _first_number(config, EXPERTS), _first_number(config, CHOSEN)
    if not experts or not chosen or chosen >= experts:
        return 0
    return _routed_parameters(model, config) * (experts - chosen) // experts


def _first_number(config: Any, names: Sequence[str]) -> int | None:
    parts = (config, getattr(config, "ffn_config", None))
    values = (getattr(part, name, None) for part in parts for name in names)
    return next((value for value in values if isinstance(value, int)), None)


# The head


@cache
def _body_output() -> type[ModelOutput]:
    """Return the class of a body's output, which registers itself with torch when it is made."""

    @dataclass
    class BodyOutput(ModelOutput):
        """The output of a model below its head, with every field that the families use."""

        last_hidden_state: torch.Tensor | None = None
        past_key_values: Any = None
        hidden_states: Any = None
        attentions: Any = None
        cross_attentions: Any = None
        router_logits: Any = None

    return BodyOutput


class _Body(nn.Module):
    """A stand-in for everything below the head: returns `hidden`, and has the body's attributes."""

    def __init__(self, body: nn.Module, hidden: torch.Tensor) -> None:
        super().__init__()
        self._body, self._hidden = (body,), hidden  # in a tuple, it is no submodule

    def forward(self, *args: Any, **kwargs: Any) -> ModelOutput:
        return _body_output()(last_hidden_state=self._hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_body"][0], name)


def _has_plain_head(model: PreTrainedModel) -> bool:
    """Return True if the logits are the head's product with the last hidden state, untouched.

    Runs the model's own forward on the meta device with a stand-in for everything below the head,
    and checks that the head sees that very storage and that its output is returned as the logits.
    This detects soft caps, logit scales and upcasts.
    """
    head, body = model.get_output_embeddings(), model.base_model
    if type(head) is not nn.Linear or body is model:
        return False
    hidden = torch.empty(1, 2, head.in_features, device="meta", dtype=head.weight.dtype)
    passed: list[torch.Tensor] = []

    def observe(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        passed[:] = inputs[0], output

    hook = head.register_forward_hook(observe)
    model.set_submodule(model.base_model_prefix, _Body(body, hidden))
    try:
        logits = model(input_ids=torch.zeros(1, 2, dtype=torch.long, device="meta")).logits
    except Exception:  # a forward that needs more than this has no plain head
        return False
    finally:
        hook.remove()
        model.set_submodule(model.base_model_prefix, body)
    if not passed:
        return False
    same = passed[0].untyped_storage()._cdata == hidden.untyped_storage()._cdata
    return same and logits is passed[1]


def _is_word_by_word(model: PreTrainedModel) -> bool:
    """Return True if each word's vector and logits come from its own row of table and head.

    Runs both on the CPU with small matrices, whole and in parts, in the place of the model's.
    """
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    body = model.base_model
    if type(head) is not nn.Linear or not isinstance(table, nn.Embedding) or body is model:
        return False
    name, width = next(n for n, m in model.named_modules() if m is head), head.in_features
    hidden = torch.arange(1.0, 1 + 3 * width).sin().reshape(1, 3, width)
    matrix = torch.arange(1.0, 1 + 12 * width).cos().reshape(12, width)

    def logits(of: nn.Module, given: torch.Tensor) -> torch.Tensor:
        model.set_submodule(name, of)
        model.set_submodule(model.base_model_prefix, _Body(body, given))
        ids = torch.zeros(1, 3, dtype=torch.long, device=given.device)
        return model(input_ids=ids).logits  # type: ignore[no-any-return]

    def head_of(rows: torch.Tensor) -> nn.Module:
        made = nn.Linear(width, len(rows), bias=False, device="meta")
        made.register_parameter("weight", nn.Parameter(rows))
        return made

    def vectors(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        part = copy(table)
        scales = {key: torch.ones_like(b, device="cpu") for key, b in table.named_buffers()}
        vars(part).update(_parameters={"weight": rows}, _buffers=scales, padding_idx=None)
        return part(ids)  # type: ignore[no-any-return]

    ids, parts = torch.arange(5, 12), (matrix[:5], matrix[5:])
    try:
        if logits(head, hidden.to("meta", head.weight.dtype)).shape[-1] != head.out_features:
            return False
        split = torch.cat([logits(head_of(part), hidden) for part in parts], -1)
        alike = torch.allclose(split, logits(head_of(matrix), hidden), rtol=1e-4, atol=1e-5)
        return alike and torch.equal(vectors(parts[1], ids - 5), vectors(matrix, ids))
    except Exception:  # whatever a model's own code raises
        return False
    finally:
        model.set_submodule(model.base_model_prefix, body)
        model.set_submodule(name, head)


# The blocks


def stated_blocks(model: Any) -> tuple[str, ...]:
    """Return the members of the one module list below the head that is as long as the config says.

    Empty if there is no such list, or more than one that is in no other.
    """
    layers = getattr(text_config(model), "num_hidden_layers", 0)
    long = [name for name, module in _lists(model).items() if len(module) == layers]
    found = outermost([name for name in long if name.startswith(model.base_model_prefix)])
    return tuple(f"{found[0]}.{i}" for i in range(layers)) if len(found) == 1 else ()


def blocks_like(model: nn.Module, blocks: tuple[str, ...]) -> tuple[str, ...]:
    """Return the model's blocks: the members of the lists that hold the blocks of its tiny copy."""
    lists = dict.fromkeys(block.rpartition(".")[0] for block in blocks)
    sizes = {name: len(list(model.get_submodule(name).children())) for name in lists}
    return tuple(f"{name}.{index}" for name, size in sizes.items() for index in range(size))


def blocks_by_run(spec: ModelSpec) -> tuple[str, ...]:
    """Find the blocks of a tiny model by running it; empty if it is too large or can't be run."""
    if spec.parameters > LARGEST:
        return ()
    try:
        ids = torch.arange(1, 17)[None] % spec.language.vocabulary
        return blocks_of(on_host(spec).eval(), ids)
    except Exception:  # whatever a model's own code raises
        return ()


def blocks_of(model: nn.Module, ids: torch.Tensor) -> tuple[str, ...]:
    """Return the members of the module list whose modules run once each, in order; empty if none.

    Each must give a tensor of the shape it is given. Of several such lists, the outermost counts;
    of several outermost ones, that with the most parameters. `ids`: [batch, sequence].
    """
    lists = {name: module for name, module in _lists(model).items() if len(module)}
    calls: dict[str, list[int]] = {name: [] for name in lists}

    def observe(name: str, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = args[0] if args else next(iter(kwargs.values()), None)
            result = output[0] if isinstance(output, tuple) else output
            before, after = getattr(given, "shape", ()), getattr(result, "shape", ())
            alike = before == after and after[:2] == ids.shape
            calls[name].append(index if alike else -1)

        return hook

    with ExitStack() as hooks:
        for name, members in lists.items():
            for index, member in enumerate(members):
                hook = member.register_forward_hook(observe(name, index), with_kwargs=True)
                hooks.enter_context(hook)
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    found = outermost([name for name in lists if calls[name] == list(range(len(lists[name])))])
    sizes = {name: sum(p.numel() for p in lists[name].parameters()) for name in found}
    best = max(sizes, key=lambda name: sizes[name], default="")
    return tuple(f"{best}.{index}" for index in range(len(lists[best]))) if best else ()


def _lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
