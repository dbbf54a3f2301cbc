"""What gpu.py measures beside our engines: a loop of plain PyTorch, and Hugging Face's Trainer."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu_arms import LORA, RATE

if TYPE_CHECKING:
    from benchmarks.gpu_bench import Bench


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


def trainer(bench: Bench) -> tuple[float, float]:
    """Return the seconds of a step of transformers.Trainer with the same JSON, as `steps_of`."""
    import deepspeed

    deepspeed.init_distributed(
        torch.distributed.get_backend()
    )  # else it takes this process for the only one
    values = dict(bench.model)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config)
    keys = {name: value for name, value in bench.config.items() if name != "trainer"}
    return steps_of(bench, model, deepspeed=keys)


def trainer_with_peft(bench: Bench) -> tuple[float, float]:
    """Return the seconds of a step of transformers.Trainer, compiled, with an adapter of PEFT, as
    `steps_of`: the same base with random values, in bfloat16, and the same rank.
    """
    from peft import LoraConfig, get_peft_model

    config = AutoConfig.from_pretrained(bench.config["trainer"]["model"]["name_or_path"])
    with bench.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    adapter = LoraConfig(
        r=LORA["r"],
        lora_alpha=LORA["alpha"],
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return steps_of(
        bench,
        get_peft_model(model, adapter),
        optim="adamw_torch_fused",
        torch_compile=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )


def steps_of(bench: Bench, model: Any, **own: Any) -> tuple[float, float]:
    """Return the median seconds of a step of Trainer that is waited for, and the seconds of a step
    of as many in one interval, which follow.

    `own` are arguments of TrainingArguments.
    """
    from transformers import Trainer, TrainingArguments

    alone = bench.warm_up + bench.steps
    count = alone + bench.steps
    made = torch.Generator().manual_seed(0)
    shape = (count * bench.world_size * bench.micro_batch, bench.sequence)
    rows = torch.randint(0, bench.model["vocab_size"], shape, generator=made)
    arguments = TrainingArguments(
        tempfile.mkdtemp(dir=bench.folder),
        per_device_train_batch_size=bench.micro_batch,
        learning_rate=RATE,
        weight_decay=0.1,
        bf16=bench.cuda,
        gradient_checkpointing=True,
        max_steps=count,
        logging_steps=10,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not bench.cuda,
        **own,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    clock = clock_of(bench.wait, alone, count)
    Trainer(model, arguments, train_dataset=data, callbacks=[clock]).train()
    return statistics.median(clock.times[bench.warm_up :]), clock.interval / bench.steps


def clock_of(wait: Callable[[], None], alone: int, count: int) -> Any:
    """Return a callback of Trainer with the `times` of the first steps, which are `alone`, and of
    the `interval` of the others, of `count` in all.
    """
    from transformers import TrainerCallback

    class StepClock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []
            self.interval = 0.0
            self.done = 0
            self.started = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if self.done <= alone:
                wait()
                self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.done += 1
            if self.done <= alone:
                wait()
                self.times.append(time.perf_counter() - self.started)
            elif self.done == count:
                wait()
                self.interval = time.perf_counter() - self.started

    return StepClock()


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
