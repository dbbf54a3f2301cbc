"""Models with experts to spread over ranks, and a layout that spreads them over two."""

from __future__ import annotations

from tests.support.layouts import EXPERTS, family
from tests.support.training import Case

SPREAD = Case("mesh", expert=2, zero_stage=2, micro_batch=1, model=EXPERTS)


DEEPSEEK = family(
    "deepseek_v3",
    num_key_value_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    moe_intermediate_size=16,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
)


GPT_OSS = family("gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=8)
