"""How good the model is: held-out loss, and a sample that a person can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainer.data.feed import Collate, evaluation_batches
from trainer.data.source import Source
from trainer.engines.engine import Engine
from trainer.layout import Layout


def held_out_loss(
    engine: Engine, source: Source, collate: Collate, layout: Layout, samples: int, data_rank: int, device: torch.device
) -> tuple[float, int]:
    """Mean loss over the targets of the first `samples` held-out samples, nats per target, and their number.

    Collective.
    """
    batches = evaluation_batches(
        source,
        collate,
        limit=samples,
        micro_batch=layout.micro_batch,
        data_ranks=layout.data_ranks,
        data_rank=data_rank,
        device=device,
    )
    loss_sum, targets = engine.evaluate(batches)
    return float(loss_sum / targets), int(targets)


def continuation(folder: Path, tokenizer: Any, prompt: str, tokens: int, seed: int) -> str:
    """What the model in `folder`, opened as any Hugging Face model, writes after `prompt` (at temperature 0.8)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        written = model.generate(
            **inputs,
            max_new_tokens=tokens,
            do_sample=True,
            temperature=0.8,
            top_k=50,
            pad_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(written[0], skip_special_tokens=True))
