"""Small models with and without windows, and a watch on what waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.training import GPT2, VOCABULARY, spec_of, task_of
from trainer.models.materialise import materialise

WINDOW = 8
SMALL: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
TOKENS = dict(pad_token_id=0, bos_token_id=0, eos_token_id=0)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "mistral": {**SMALL, "sliding_window": WINDOW},
    "gemma2": {**SMALL, **TOKENS, "sliding_window": WINDOW},
    "gemma3_text": {**SMALL, **TOKENS, "sliding_window": WINDOW},
    "qwen3": SMALL,
    "gpt2": {**GPT2, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "olmo3": {**SMALL, **TOKENS, "sliding_window": WINDOW},
    "llama4_text": {**SMALL, **TOKENS, "attention_chunk_size": WINDOW, "num_local_experts": 2},
}
OTHER_ATTENTION: dict[str, dict[str, Any]] = {
    "qwen2": {
        **SMALL,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "mixtral": {**SMALL, "sliding_window": WINDOW, "num_local_experts": 4},
    "gpt_oss": {**SMALL, **TOKENS, "sliding_window": WINDOW, "num_local_experts": 4},
    "falcon": dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "deepseek_v3": {
        **SMALL,
        **dict(moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1),
        **dict(topk_group=1, kv_lora_rank=16, q_lora_rank=16, num_key_value_heads=4),
        **dict(qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8),
    },
}
"""With layers that have no window, experts, an older interface, or latent keys."""

# what reads a value on the host, by its name in aten
WAITS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "_unique2",
    "unique_dim",
}


class Waits(TorchDispatchMode):
    """The operations that read a value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.removeprefix("aten::")
        by_mask = name.startswith("index") and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool
            for part in args
            if isinstance(part, list)
            for i in part
        )
        if name in WAITS or by_mask:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def tiny(name: str, **more: Any) -> tuple[Any, Any, Any]:
    spec = spec_of({"model_type": name, **(FAMILIES | OTHER_ATTENTION)[name], **more})
    task = task_of(spec).packing()
    model = task.prepare(spec.build())
    materialise(model, spec, seed=0)
    return spec, task, model.train()


def batch(length: int, rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.arange(rows * length).reshape(rows, length) * 7 % (VOCABULARY - 1) + 1
    return {"input_ids": ids, "targets": ids.roll(-1, 1)}
