"""Models whose experts are balanced by biases: enough that one token moves another bias."""

from __future__ import annotations

from typing import Any

from tests.support.layouts import family
from tests.support.training import Case

ROUTED: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 16}
GLM = family("glm4_moe", n_routed_experts=16, first_k_dense_replace=1, head_dim=8, **ROUTED)
GLM |= {"n_group": 4, "topk_group": 2, "n_shared_experts": 1}
ERNIE = family("ernie4_5_moe", moe_num_experts=16, moe_k=3, moe_intermediate_size=16)
MINIMAX = family("minimax_m2", num_local_experts=16, num_experts_per_tok=3, head_dim=8)
ONE = Case(world_size=1, model=GLM, router_bias_rate=0.05)
