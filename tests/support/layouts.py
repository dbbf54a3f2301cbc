"""What every engine has to match: layouts by name, each a small training run
(`tests/support/training.py`).

Rows stand by their number of ranks, so that few worker pools are started. An engine runs those that
it does not refuse.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.support.training import GPT2, LLAMA, Case

HOST = {"offload_optimizer": "cpu", "offload_param": "cpu"}
LLAMA_4, GPT2_4 = LLAMA | {"num_hidden_layers": 4}, GPT2 | {"n_layer": 4}
UNTIED, UNTIED_4 = ({**model, "tie_word_embeddings": False} for model in (LLAMA, LLAMA_4))
BIASED = LLAMA | {"attention_bias": True, "mlp_bias": True}
BERT = {
    key: value for key, value in LLAMA_4.items() if "dropout" not in key and "key_value" not in key
}
BERT |= {"model_type": "bert", "is_decoder": True, "max_position_embeddings": 64}
SIZES = {
    key: LLAMA[key]
    for key in LLAMA
    if key not in ("attention_dropout", "model_type", "tie_word_embeddings")
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def family(model_type: str, **values: object) -> dict[str, Any]:
    """Return a tiny model that draws nothing inside what tensor parallelism splits."""
    return {"model_type": model_type, **SIZES, **TOKENS, "tie_word_embeddings": False, **values}


TIED = family("llama", tie_word_embeddings=True)
FAMILIES = {
    "llama, biases": family("llama", attention_bias=True, mlp_bias=True),
    "qwen2": family("qwen2"),
    "qwen3": family("qwen3", head_dim=16),
    "mistral": family("mistral"),
    "gemma2": family("gemma2", tie_word_embeddings=True, head_dim=8),
    "olmo2": family("olmo2"),
    "phi3": family("phi3", resid_pdrop=0.1, embd_pdrop=0.1),
    "gpt_neox": family("gpt_neox", hidden_dropout=0.1),
    "opt": family("opt", ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64),
    "gpt2": GPT2,
}
WITHOUT_WORDS = ("olmo2", "phi3", "opt", "gpt2")
"""Families whose plan has a style that AutoTP lacks; the last two have none in transformers."""

# tied tables, dropout, ragged samples, clipping, accumulation
DATA = Case()
HSDP = replace(DATA, world_size=4, replicate=2, micro_batch=1)
STAGES = Case(pipeline=2, zero_stage=0, model=LLAMA_4)
STAGES_4 = replace(STAGES, world_size=4, micro_batch=1)
SPLIT = Case(tensor=2, zero_stage=0, micro_batch=4, model=TIED)
SPLIT_4 = replace(SPLIT, world_size=4, micro_batch=2)
EXPERTS = family(
    "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=16
)
SHARED = family(
    "qwen2_moe",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=32,
)
TWO_EXPERTS = EXPERTS | {"num_experts": 2, "num_experts_per_tok": 1}
EXPERTS_4 = EXPERTS | {"num_hidden_layers": 4}
SPREAD = Case(expert=2, zero_stage=2, model=EXPERTS)
SPREAD_4 = replace(SPREAD, world_size=4, micro_batch=1)
CONTEXT = Case(context=2, micro_batch=4, model=TIED)
HYBRID = family("lfm2", layer_types=["conv", "full_attention", "conv"])
HYBRID_4 = HYBRID | {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}
"""Its convolutions have a state: under context parallelism a rank computes whole documents."""
HPZ = {"zero_optimization": {"zero_hpz_partition_size": 2}}
SECOND = replace(DATA, world_size=4, micro_batch=1, zero_stage=3, more=HPZ)
PARTS = {"tensor_parallel": {"sequence_parallel": True}}
BIASED_4 = FAMILIES["llama, biases"] | {"num_key_value_heads": 4}

LAYOUTS = {
    "one rank": replace(DATA, world_size=1),
    "ddp": replace(DATA, zero_stage=0),
    "ddp, no accumulation": replace(DATA, zero_stage=0, micro_batch=4),
    "ddp, gpt2, full": replace(DATA, zero_stage=0, model=GPT2, recompute="full"),
    "zero1": replace(DATA, zero_stage=1),
    "zero2": replace(DATA, zero_stage=2),
    "zero2, gpt2, every 2": replace(DATA, zero_stage=2, model=GPT2, recompute="every", every=2),
    "zero2, optimizer on the host": replace(DATA, zero_stage=2, offload_optimizer="cpu"),
    "zero2, gpt2, offload": replace(DATA, zero_stage=2, model=GPT2, recompute="offload"),
    "zero3": replace(DATA, zero_stage=3),
    "zero3, micro-batch of one": replace(DATA, zero_stage=3, micro_batch=1),
    "zero3, untied": replace(DATA, zero_stage=3, model=UNTIED),
    "zero2, untied, micro-batch of one": replace(DATA, zero_stage=2, micro_batch=1, model=UNTIED),
    "zero3, two tables, untied": replace(
        DATA, zero_stage=3, micro_batch=1, model=GPT2 | {"tie_word_embeddings": False}
    ),
    "zero3, gpt2, full": replace(DATA, zero_stage=3, model=GPT2, recompute="full"),
    "zero3, gpt2, selective": replace(DATA, zero_stage=3, model=GPT2, recompute="selective"),
    "zero3, gpt2, selective of 2": replace(
        DATA, zero_stage=3, model=GPT2, recompute="selective", every=2
    ),
    "zero3, biases, selective": replace(DATA, zero_stage=3, model=BIASED, recompute="selective"),
    "zero3, all on the host": replace(DATA, zero_stage=3, **HOST),
    "ddp, tiled": replace(DATA, zero_stage=0, tile=3),
    "zero2, tiled, offload": replace(DATA, zero_stage=2, tile=3, recompute="offload"),
    "zero3, tiled": replace(DATA, zero_stage=3, tile=4, micro_batch=1),
    "zero3, tiled, full": replace(DATA, zero_stage=3, tile=4, recompute="full"),
    "zero3, tiled, selective": replace(DATA, zero_stage=3, tile=3, recompute="selective"),
    "zero3, tiled, all on the host": replace(DATA, zero_stage=3, tile=4, recompute="full", **HOST),
    "pipeline": STAGES,
    "pipeline, GPipe": replace(STAGES, schedule="GPipe"),
    "pipeline, Interleaved1F1B": replace(STAGES, schedule="Interleaved1F1B"),
    "pipeline, InterleavedZeroBubble": replace(STAGES, schedule="InterleavedZeroBubble"),
    "pipeline, ZBVZeroBubble": replace(STAGES, schedule="ZBVZeroBubble"),
    "pipeline, ZBVZeroBubble, hidden states that are views": replace(
        STAGES, model=GPT2_4, schedule="ZBVZeroBubble"
    ),
    "pipeline, DualPipeV": replace(STAGES, schedule="DualPipeV"),
    "pipeline, eight micro-batches": replace(STAGES, micro_batch=1),
    "pipeline, untied": replace(STAGES, model=LLAMA_4 | {"tie_word_embeddings": False}),
    "pipeline, dropout after the tables": replace(STAGES, model=GPT2_4),
    "pipeline, a head tied within itself, beside the table": replace(STAGES, model=BERT),
    "pipeline, gpt2, full": replace(STAGES, recompute="full", model=GPT2_4),
    "pipeline, every 2": replace(STAGES, recompute="every", every=2),
    "pipeline, selective": replace(STAGES, recompute="selective"),
    "pipeline, tiled, gpt2, full": replace(
        STAGES, recompute="full", tile=4, model=GPT2_4 | {"resid_pdrop": 0.0}
    ),
    "pipeline, zero1 of one shard": replace(STAGES, zero_stage=1),
    "pipeline, zero2 of one shard": replace(STAGES, zero_stage=2),
    "tensor": SPLIT,
    **{f"tensor, {name}": replace(SPLIT, model=model) for name, model in FAMILIES.items()},
    "tensor, zero1 of one shard": replace(SPLIT, zero_stage=1),
    "tensor, zero2 of one shard": replace(SPLIT, zero_stage=2),
    "hsdp, zero2": replace(HSDP, zero_stage=2),
    "hsdp, zero3": replace(HSDP, zero_stage=3),
    "hsdp, zero2, untied": replace(HSDP, zero_stage=2, model=UNTIED),
    "hsdp, zero3, untied": replace(HSDP, zero_stage=3, model=UNTIED),
    "hsdp of one shard, zero2, untied": replace(
        DATA, replicate=2, zero_stage=2, micro_batch=1, model=UNTIED
    ),
    "hsdp, zero3, gpt2, selective": replace(HSDP, zero_stage=3, model=GPT2, recompute="selective"),
    "hsdp, zero3, all on the host": replace(HSDP, zero_stage=3, **HOST),
    "pipeline x ddp": STAGES_4,
    "pipeline x zero1": replace(STAGES_4, zero_stage=1),
    "pipeline x zero1, optimizer on the host": replace(
        STAGES_4, zero_stage=1, offload_optimizer="cpu"
    ),
    "pipeline x zero1, untied": replace(
        STAGES_4, zero_stage=1, model=LLAMA_4 | {"tie_word_embeddings": False}
    ),
    "pipeline x zero2": replace(STAGES_4, zero_stage=2),
    "pipeline x zero2, InterleavedZeroBubble": replace(
        STAGES_4, zero_stage=2, schedule="InterleavedZeroBubble"
    ),
    "pipeline x zero2, InterleavedZeroBubble, untied": replace(
        STAGES_4, zero_stage=2, schedule="InterleavedZeroBubble", model=UNTIED_4
    ),
    "pipeline x zero2, ZBVZeroBubble": replace(STAGES_4, zero_stage=2, schedule="ZBVZeroBubble"),
    "pipeline x zero2, ZBVZeroBubble, full": replace(
        STAGES_4, zero_stage=2, schedule="ZBVZeroBubble", recompute="full"
    ),
    "pipeline x zero2, DualPipeV": replace(STAGES_4, zero_stage=2, schedule="DualPipeV"),
    "pipeline x zero3": replace(STAGES_4, zero_stage=3),
    "pipeline x zero3, GPipe, untied": replace(
        STAGES_4, zero_stage=3, schedule="GPipe", model=UNTIED_4
    ),
    "pipeline x zero3, GPipe, gpt2, full": replace(
        STAGES_4, zero_stage=3, schedule="GPipe", recompute="full", model=GPT2_4
    ),
    "pipeline x zero3, Interleaved1F1B": replace(
        STAGES_4, zero_stage=3, schedule="Interleaved1F1B"
    ),
    "four stages of five blocks": replace(
        STAGES_4, pipeline=4, micro_batch=2, model=LLAMA | {"num_hidden_layers": 5}
    ),
    "four stages, zero1": replace(STAGES_4, pipeline=4, zero_stage=1),
    "tensor x ddp": SPLIT_4,
    "tensor x ddp, qwen3, selective": replace(
        SPLIT_4, model=FAMILIES["qwen3"], recompute="selective"
    ),
    "tensor x zero1": replace(SPLIT_4, zero_stage=1),
    "tensor x zero2": replace(SPLIT_4, zero_stage=2),
    "tensor x zero2, optimizer on the host": replace(
        SPLIT_4, zero_stage=2, offload_optimizer="cpu"
    ),
    "tensor x zero2, overlapped": replace(
        SPLIT_4, zero_stage=2, more={"tensor_parallel": {"tp_overlap_comm": True}}
    ),
    "tensor x zero2, gpt_neox, selective": replace(
        SPLIT_4, zero_stage=2, model=FAMILIES["gpt_neox"], recompute="selective"
    ),
    "tensor x zero3": replace(SPLIT_4, zero_stage=3),
    "tensor x zero3, qwen3, full": replace(
        SPLIT_4, zero_stage=3, model=FAMILIES["qwen3"], recompute="full"
    ),
    "tensor, sequence": replace(SPLIT, more=PARTS),
    "tensor, sequence, gpt_neox": replace(SPLIT, more=PARTS, model=FAMILIES["gpt_neox"]),
    "tensor, sequence, olmo2": replace(SPLIT, more=PARTS, model=FAMILIES["olmo2"]),
    "tensor x zero3, sequence, gpt2": replace(SPLIT_4, zero_stage=3, more=PARTS, model=GPT2),
    "tensor x zero3, sequence, phi3, full": replace(
        SPLIT_4, zero_stage=3, recompute="full", more=PARTS, model=FAMILIES["phi3"]
    ),
    "tensor x zero2, sequence, qwen3, selective": replace(
        SPLIT_4, zero_stage=2, recompute="selective", more=PARTS, model=FAMILIES["qwen3"]
    ),
    "tensor, experts": replace(SPLIT, model=EXPERTS),
    "tensor, experts, router's loss": replace(
        SPLIT, model=EXPERTS | {"output_router_logits": True}
    ),
    "tensor x zero3, experts, sequence": replace(SPLIT_4, zero_stage=3, more=PARTS, model=EXPERTS),
    "experts": SPREAD,
    "pipeline, tiled, ZBVZeroBubble": replace(STAGES, schedule="ZBVZeroBubble", tile=4),
    "tensor, tiled": replace(SPLIT, tile=3),
    "tensor, tiled, full": replace(SPLIT, zero_stage=2, tile=3, recompute="full"),
    "tensor, tiled, sequence, biases": replace(
        SPLIT, tile=4, recompute="full", more=PARTS, model=FAMILIES["llama, biases"]
    ),
    "tensor x zero3, tiled, sequence, selective": replace(
        SPLIT_4, zero_stage=3, tile=3, recompute="selective", more=PARTS
    ),
    "context, tiled, full": replace(CONTEXT, zero_stage=3, tile=3, recompute="full"),
    "experts, shared": replace(SPREAD, model=SHARED),
    "experts, zero1": replace(SPREAD, zero_stage=1),
    "experts, zero3, all on the host": replace(SPREAD, zero_stage=3, **HOST),
    "experts, half of them, zero1": replace(SPREAD_4, zero_stage=1),
    "experts, half of them, zero2": SPREAD_4,
    "experts, half of them": replace(SPREAD_4, zero_stage=3),
    "experts over four, full": replace(SPREAD_4, expert=4, zero_stage=3, recompute="full"),
    "experts, hsdp, selective": replace(SPREAD_4, replicate=2, zero_stage=3, recompute="selective"),
    "pipeline x experts": replace(SPREAD_4, pipeline=2, model=EXPERTS_4),
    "pipeline x experts, zero1": replace(SPREAD_4, pipeline=2, zero_stage=1, model=EXPERTS_4),
    "pipeline x experts, ZBVZeroBubble": replace(
        SPREAD_4, pipeline=2, schedule="ZBVZeroBubble", model=EXPERTS_4
    ),
    "tensor x experts": replace(SPREAD_4, tensor=2, micro_batch=2),
    "tensor x experts over four, sequence": replace(
        SPREAD_4, tensor=2, micro_batch=2, expert=4, zero_stage=3, more=PARTS
    ),
    "context x experts": replace(SPREAD_4, context=2, micro_batch=2, zero_stage=3),
    "context": CONTEXT,
    "context x zero3, gpt2, full": replace(
        CONTEXT, zero_stage=3, recompute="full", model=GPT2 | {"attn_pdrop": 0.0}
    ),
    "context, ddp": replace(CONTEXT, zero_stage=0),
    "context x hsdp, experts": replace(
        CONTEXT, world_size=4, replicate=2, micro_batch=2, zero_stage=3, model=EXPERTS
    ),
    "context over four, zero3": replace(
        CONTEXT,
        world_size=4,
        context=4,
        zero_stage=3,  # a key-value head for each two ranks
    ),
    "context over four, two heads": replace(
        CONTEXT,
        world_size=4,
        context=4,
        zero_stage=3,
        model=TIED | {"num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "context, hybrid, zero3, full": replace(CONTEXT, zero_stage=3, recompute="full", model=HYBRID),
    "context, hybrid, ddp, a sequence at a time": replace(
        CONTEXT, zero_stage=0, micro_batch=1, model=HYBRID
    ),
    "context over four, hybrid, two heads, selective": replace(
        CONTEXT,
        world_size=4,
        context=4,
        recompute="selective",
        model=HYBRID | {"num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "pipeline x context, hybrid, full": replace(
        CONTEXT,
        world_size=4,
        pipeline=2,
        micro_batch=2,
        zero_stage=0,
        recompute="full",
        model=HYBRID_4,
    ),
    "context x hsdp, hybrid": replace(
        CONTEXT, world_size=4, replicate=2, micro_batch=1, zero_stage=3, model=HYBRID
    ),
    "hpZ": SECOND,
    "hpZ, untied, selective": replace(SECOND, model=UNTIED, recompute="selective"),
    "hpZ, gpt2, full": replace(SECOND, model=GPT2, recompute="full"),
    "hpZ, all on the host": replace(SECOND, **HOST),
    "hpZ, experts": replace(SPREAD_4, zero_stage=3, more=HPZ),
    "hpZ, context": replace(CONTEXT, world_size=4, micro_batch=2, zero_stage=3, more=HPZ),
    "hpZ, hsdp": replace(SECOND, world_size=8, replicate=2),
    "hpZ, pipeline": replace(
        SECOND, world_size=8, pipeline=2, model=UNTIED | {"num_hidden_layers": 4}
    ),
    "zero3 over four, two experts": replace(
        DATA,
        world_size=4,
        micro_batch=1,
        zero_stage=3,
        model=TWO_EXPERTS,
    ),
    "mixtral, zero3, selective": replace(
        DATA,
        zero_stage=3,
        recompute="selective",
        model=family("mixtral", num_local_experts=4, num_experts_per_tok=2),
    ),
    "gpt_oss, selective": replace(
        DATA,
        recompute="selective",
        model=family("gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    ),
    "experts, one to two ranks": replace(SPREAD_4, zero_stage=3, model=TWO_EXPERTS),
    "context, three heads, hsdp, window": replace(
        CONTEXT,
        world_size=4,
        replicate=2,
        micro_batch=2,
        zero_stage=3,
        recompute="full",
        model=family(
            "mistral",
            sliding_window=4,
            hidden_size=48,
            num_attention_heads=3,
            num_key_value_heads=3,
        ),
    ),
    "pipeline x context": replace(
        CONTEXT,
        world_size=4,
        pipeline=2,
        micro_batch=2,
        zero_stage=0,
        model=TIED | {"num_hidden_layers": 4},
    ),
    "pipeline x context, three heads, selective": replace(
        CONTEXT,
        world_size=4,
        pipeline=2,
        micro_batch=2,
        zero_stage=0,
        recompute="selective",
        model=TIED
        | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
        | {"num_hidden_layers": 4},
    ),
    "tensor x context, a head for two ranks": replace(
        CONTEXT,
        world_size=4,
        tensor=2,
        zero_stage=2,
        model=TIED | {"num_attention_heads": 2, "num_key_value_heads": 2},
    ),
    "tensor x context, sequence, phi3": replace(
        CONTEXT,
        world_size=4,
        tensor=2,
        more=PARTS,
        model=FAMILIES["phi3"] | {"num_key_value_heads": 4},
    ),
    "four tensor ranks, zero2, sequence, biases": replace(
        SPLIT_4, tensor=4, zero_stage=2, more=PARTS, model=BIASED_4
    ),
    "pipeline x tensor, sequence": replace(
        SPLIT_4, pipeline=2, more=PARTS, model=TIED | {"num_hidden_layers": 4}
    ),
    "four tensor ranks, zero2": replace(
        SPLIT_4, tensor=4, zero_stage=2, model=TIED | {"num_key_value_heads": 4}
    ),
    "pipeline x tensor": replace(SPLIT_4, pipeline=2, model=TIED | {"num_hidden_layers": 4}),
    "pipeline x hsdp": replace(
        STAGES, world_size=8, replicate=2, micro_batch=1, zero_stage=3, recompute="full"
    ),
    "pipeline x tensor x zero3": replace(
        SPLIT_4,
        world_size=8,
        pipeline=2,
        zero_stage=3,
        micro_batch=1,
        model=TIED | {"num_hidden_layers": 4},
    ),
    "tensor x hsdp": replace(
        SPLIT_4, world_size=8, replicate=2, zero_stage=3, micro_batch=1, model=FAMILIES["qwen3"]
    ),
}

RESUMED = (
    *(
        "ddp",
        "zero1",
        "zero2",
        "zero2, optimizer on the host",
        "zero3",
        "zero3, all on the host",
        "hsdp, zero3",
    ),
    *("pipeline x ddp", "pipeline x zero1", "pipeline x zero2, DualPipeV", "pipeline x zero3"),
    *("tensor x ddp", "tensor x zero1", "tensor x zero2", "tensor x zero3"),
    *("experts, half of them", "experts, half of them, zero2", "pipeline x experts, zero1"),
)
"""Layouts in which a run is stopped and resumes."""

PRECISIONS = {
    f"{precision}, {name}": replace(LAYOUTS[name], precision=precision)
    for name in (
        *("ddp", "zero1", "zero2", "zero3", "pipeline x ddp", "pipeline x zero1"),
        *("tensor x ddp", "tensor x zero1", "tensor x zero2"),
    )
    for precision in ("bfloat16", "float16")
}
"""Layouts in 16 bits."""
PRECISIONS |= {
    f"{name}, float32 gradients": replace(
        PRECISIONS[name], more={"data_types": {"grad_accum_dtype": "fp32"}}
    )
    for name in ("bfloat16, pipeline x zero1", "float16, pipeline x zero1")
}


def by_engine(cases: dict[str, Case]) -> dict[str, Case]:
    """Name each case under each engine that offers its layout: `mesh-NAME` and so on."""
    from tests.support.training import layout_of
    from trainer.engines import ENGINES

    rows = (
        (name, engine, replace(case, engine=engine))
        for name, case in cases.items()
        for engine in ENGINES
    )
    return {
        f"{engine}-{name}": case
        for name, engine, case in rows
        if ENGINES[engine].refusal(layout_of(case)) is None and _known(engine, case)
    }


def _known(engine: str, case: Case) -> bool:
    words = [FAMILIES[name] for name in WITHOUT_WORDS]
    wordless = case.model in words or "num_experts" in case.model
    return engine != "deepspeed" or case.tensor == 1 or not wordless
