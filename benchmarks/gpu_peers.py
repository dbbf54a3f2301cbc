"""What gpu.py measures beside our engines: a loop of plain PyTorch, and Hugging Face's Trainer."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from gpu import MICRO_BATCH, RATE
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM

if TYPE_CHECKING:
    from gpu import Bench


def bare(bench: Bench, compiled: bool) -> Callable[[int], object]:
    """A loop of plain PyTorch, with nothing of ours but the model's config.

    The units are the blocks, the table of embeddings, and the last norm with the head, if the
    head has a matrix of its own. Products and attention are kept, all else is recomputed.
    """
    values = dict(bench.model)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options: dict[str, Any] = {"mp_policy": low} if bench.cuda else {}
    options["reshard_after_forward"] = bench.world_size > 1
    for block in model.model.layers:
        block.forward = partial(kept_products, block.forward)
        if compiled:
            block.forward = torch.compile(block.forward)
        fully_shard(block, **options)
    kept = {**options, "reshard_after_forward": False}
    if not config.tie_word_embeddings:
        fully_shard(model.model.embed_tokens, **options)
        fully_shard([model.model.norm, model.lm_head], **kept)
    fully_shard(model, **kept)
    model.to_empty(device=bench.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(bench.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, fused=True)

    def step(index: int) -> None:
        batch = bench.batch(index)
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), batch["targets"].flatten()
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def trainer(bench: Bench) -> float:
    """The median time of a step of transformers.Trainer with the same JSON."""
    import deepspeed
    from transformers import Trainer, TrainerCallback, TrainingArguments

    deepspeed.init_distributed(
        torch.distributed.get_backend()
    )  # else it takes this process for the only one
    times: list[float] = []
    wait = bench.wait

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            wait()
            times.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            wait()
            times[-1] = time.perf_counter() - times[-1]

    made, values = torch.Generator().manual_seed(0), dict(bench.model)
    size = (bench.warm_up + bench.steps) * bench.world_size * MICRO_BATCH
    shape = (size, bench.sequence)
    rows = torch.randint(0, values["vocab_size"], shape, generator=made)
    arguments = TrainingArguments(
        tempfile.mkdtemp(dir=bench.folder),
        deepspeed={name: value for name, value in bench.given.items() if name != "trainer"},
        per_device_train_batch_size=MICRO_BATCH,
        learning_rate=RATE,
        weight_decay=0.1,
        bf16=bench.cuda,
        gradient_checkpointing=True,
        max_steps=bench.warm_up + bench.steps,
        logging_steps=10,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not bench.cuda,
    )
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config)
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model, arguments, train_dataset=data, callbacks=[Clock()]).train()
    return statistics.median(times[bench.warm_up :])


def kept_products(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A block's forward pass, of which matrix products and attention are kept."""
    aten = torch.ops.aten
    kept = [
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ]
    contexts = partial(create_selective_checkpoint_contexts, kept)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    return checkpoint(forward, *args, context_fn=contexts, **options, **kwargs)
