"""The properties of a language model, read from its modules and config, or found by running it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from trainer.errors import refused
from trainer.models.language.head import has_plain_head, is_word_by_word
from trainer.models.language.tensor_plan import tensor_plan_of
from trainer.models.spec import AttentionSizes, LanguageModel, OutputHead

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
"""Transformers' config keys, by family, for the experts of a layer and those chosen for a token."""


def language_of(model: PreTrainedModel, blocks: tuple[str, ...]) -> LanguageModel:
    """Read a model's head, sizes and tensor plan on the meta device."""
    text = text_config(model)
    head = model.get_output_embeddings()
    table = model.get_input_embeddings()
    tables = [module for module in (table, head) if module is not None]
    is_tied = head is not None and table is not None and head.weight is table.weight
    hidden = getattr(text, "hidden_size", None)
    heads, kv_heads, width = _heads(text, hidden or 0)
    return LanguageModel(
        head=OutputHead(
            parameters=head.weight.numel() if head is not None else 0,
            plain=has_plain_head(model),
            word_by_word=is_word_by_word(model),
        ),
        attention=AttentionSizes(heads, kv_heads, width),
        embedding_parameters=0 if is_tied or table is None else table.weight.numel(),
        idle_parameters=idle_parameters(model, text),
        # target ids must be in the table, too
        vocabulary=min((len(module.weight) for module in tables), default=0),
        positions=positions_of(model, text),
        hidden_size=hidden,
        layers=getattr(text, "num_hidden_layers", 0),
        tensor_plan=tensor_plan_of(model, blocks, heads),
        own_loss=bool(getattr(text, "output_router_logits", False)),
    )


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the part of the config that describes the decoder. Raises ConfigError for several."""
    with refused(f"trainer.model: {model.config.model_type}", "one decoder", ValueError):
        return model.config.get_text_config()


def _heads(text: PreTrainedConfig, hidden: int) -> tuple[int, int, int]:
    """Return the numbers of query and key-value heads, and the mean of heads x head size.

    If layers differ, a number of heads is the greatest common divisor over the layers.
    """
    layers = list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]
    heads = []
    kv_heads = []
    width = 0
    for layer in layers:
        many = getattr(layer, "num_attention_heads", 0) or 0
        size = getattr(layer, "head_dim", None) or (hidden // many if many else 0)
        heads.append(many)
        kv_heads.append(getattr(layer, "num_key_value_heads", None) or many)
        width += many * size
    return math.gcd(*heads), math.gcd(*kv_heads), width // len(layers)


def positions_of(model: nn.Module, text: PreTrainedConfig) -> int | None:
    """Return the most tokens of a sequence, or None if the config sets no limit.

    RoBERTa's position ids begin after the id of padding, which leaves fewer.
    """
    reserved = [0]
    for name, module in model.named_modules():
        if "position" in name and isinstance(module, nn.Embedding):
            reserved.append(0 if module.padding_idx is None else module.padding_idx + 1)
    stated = getattr(text, "max_position_embeddings", None)
    return stated and stated - max(reserved)


# Experts


def routes(model: PreTrainedModel) -> bool:
    """Return True if a layer routes tokens to experts.

    It does if there are parameters of routed experts, or a module of the router class from which
    the family records logits.
    """
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    router = getattr(recorded, "target_class", recorded)
    has_router = isinstance(router, type) and any(isinstance(m, router) for m in model.modules())
    return has_router or _routed_parameters(model, text_config(model)) > 0


def _routed_parameters(model: nn.Module, config: PreTrainedConfig) -> int:
    """Count the parameters of routed experts: modules named `experts`, or stacked over all experts.

    Shared experts, which see every token, do not count.
    """
    experts = _first_number(config, EXPERTS)
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "experts" in name.split(".") or (parameter.ndim == 3 and parameter.shape[0] == experts)
    )


def idle_parameters(model: nn.Module, config: PreTrainedConfig) -> int:
    """Count the parameters of the experts that a token is not routed to; 0 for a dense model."""
    experts = _first_number(config, EXPERTS)
    chosen = _first_number(config, CHOSEN)
    if not experts or not chosen or chosen >= experts:
        return 0
    return _routed_parameters(model, config) * (experts - chosen) // experts


def _first_number(config: PreTrainedConfig, names: Sequence[str]) -> int | None:
    parts = (config, getattr(config, "ffn_config", None))
    values = (getattr(part, name, None) for part in parts for name in names)
    return next((value for value in values if isinstance(value, int)), None)
