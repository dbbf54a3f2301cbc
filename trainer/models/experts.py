"""The parameters of a mixture of experts that a token does not use."""

from __future__ import annotations

from typing import Any

from torch import nn

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
"""Transformers' config keys, by family, for the routed experts of a layer and the experts chosen
for a token.
"""


def idle_parameters(model: nn.Module, config: Any) -> int:
    """Count the parameters of the experts that a token is not routed to; 0 for a dense model.

    Routed experts are a module named `experts`, or parameters stacked over all experts; shared
    experts see every token.
    """
    configs = (config, getattr(config, "ffn_config", None))
    experts, chosen = (_first(configs, names) for names in (EXPERTS, CHOSEN))
    if not experts or not chosen or chosen >= experts:
        return 0
    routed = [
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "experts" in name.split(".") or (parameter.ndim == 3 and parameter.shape[0] == experts)
    ]
    return sum(routed) * (experts - chosen) // experts


def _first(configs: tuple[Any, ...], names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for config in configs for name in names)
    return next((value for value in values if isinstance(value, int)), None)
