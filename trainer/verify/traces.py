"""What a few steps leave behind: by an engine on many ranks, and by plain PyTorch in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainer import checkpoint
from trainer.engines import Job, Machine, select
from trainer.models.materialise import materialise
from trainer.models.spec import ModelSpec
from trainer.optimizers import Update, optimizer_of, schedule_of
from trainer.parallel.dropout import Dropout
from trainer.ranks import Ranks
from trainer.seeding import step_seed
from trainer.state import WEIGHT, RunState
from trainer.tasks.causal_lm import CausalLM
from trainer.verify.shrink import STEPS, Small, batch

Tensors = dict[str, torch.Tensor]


@dataclass
class Trace:
    """Step by step: the loss, the norm before clipping, each gradient and each weight by Hugging Face name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    weights: list[Tensors] = field(default_factory=list)


def updates(small: Small) -> Callable[[int], Update]:
    """The config's own schedule, from the step on at which its warm-up is over: at rate 0 nothing would show."""
    optimizer, scheduler = small.config.optimizer, small.config.scheduler
    schedule = schedule_of(vars(optimizer), None if scheduler is None else vars(scheduler))
    warm = 0 if scheduler is None else int(scheduler.params.get("warmup_num_steps", 0)) + 1
    return lambda step: schedule(step + warm)


def by_engine(small: Small, spec: ModelSpec, ranks: Ranks, folder: Path) -> tuple[Trace, Trace]:
    """The requested layout; and its last steps again from a checkpoint in the middle, by a new engine. Collective."""
    section, layout = small.config.trainer, small.layout
    task = CausalLM(fused_head=spec.plain_head)
    _, kind = select(section.engine, layout)
    kind.check(spec, layout)
    job = Job(layout, spec, task, small.config.deepspeed, section.seed, Machine(torch.device("cpu"), ranks))
    schedule, data_rank = updates(small), layout.data_rank(ranks.rank)

    def advance(engine: Any, trace: Trace, first: int, last: int) -> None:
        for step in range(first, last):
            gradients: Tensors = {}
            batches = [task.collate(samples) for samples in batch(layout, step, data_rank)]
            keep = lambda name, gradient, into=gradients: into.__setitem__(name, gradient.clone())  # noqa: E731
            metrics = engine.step(step, batches, schedule(step), keep)
            trace.losses.append(float(metrics.loss()))
            trace.norms.append(float(metrics.gradient_norm))
            trace.gradients.append(gradients)
            trace.weights.append(_weights(engine, ranks))

    whole, resumed, middle = Trace(), Trace(), STEPS // 2
    engine = kind.build(job)
    advance(engine, whole, 0, middle)
    state = RunState(step=middle, engine=engine.scalars())
    path = checkpoint.save(folder, state, engine.pieces(), {}, lambda target: None, ranks)
    advance(engine, whole, middle, STEPS)
    engine.close()
    # built with another seed, so that all it knows comes from the checkpoint; dropout needs the right one
    engine = kind.build(replace(job, seed=job.seed + 1))
    engine.restore(checkpoint.read_description(path)["position"]["engine"])
    checkpoint.load(path, engine.pieces(), ranks)
    engine.job = job
    advance(engine, resumed, middle, STEPS)
    engine.close()
    return whole, resumed


def by_one_process(small: Small, spec: ModelSpec) -> Trace:
    """Hugging Face's forward, PyTorch's loss and optimizer; of ours only the initial values and the order of seeds."""
    section, layout, schedule = small.config.trainer, small.layout, updates(small)
    model = spec.build()
    materialise(model, spec, seed=section.seed, device=torch.device("cpu"), dtype=torch.float32)
    dropout = Dropout(model, spec)
    settings = vars(small.config.optimizer)
    optimizer = optimizer_of(list(model.parameters()), {**settings, "params": {**settings["params"], "fused": False}})
    task = CausalLM(fused_head=False)
    clip, trace = float(small.config.settings.get("gradient_clipping", 0.0)), Trace()
    for step in range(STEPS):
        shares = [batch(layout, step, rank) for rank in range(layout.data_ranks)]
        counted = sum(int((s["targets"] != -100).sum()) for share in shares for part in share for s in part)
        total = torch.zeros(())
        for data_rank, share in enumerate(shares):
            batches = [task.collate(samples) for samples in share]
            # a pipeline gives its micro-batches one shape, and what attention drops depends on that
            for micro, inputs in enumerate(task.padded(batches) if layout.pipeline > 1 else batches):
                dropout.start(step_seed(section.seed, step, data_rank), micro)
                logits = model(input_ids=inputs["input_ids"], use_cache=False).logits.flatten(0, 1)
                loss = F.cross_entropy(logits, inputs["targets"].flatten(), reduction="sum", ignore_index=-100)
                (loss / counted).backward()
                total += loss.detach()
        trace.losses.append(float(total / counted))
        trace.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        trace.norms.append(
            float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip if clip > 0 else float("inf")))
        )
        update = schedule(step)
        for group in optimizer.param_groups:
            group["lr"] = update.learning_rate
            if update.betas is not None:
                group["betas"] = update.betas
        optimizer.step()
        optimizer.zero_grad()
        trace.weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return trace


def _weights(engine: Any, ranks: Ranks) -> Tensors:
    """Every weight on every rank: each is read on its owner and sent round."""
    found = {}
    for piece in engine.pieces():
        value = piece.read()
        if piece.part == WEIGHT:
            value = torch.empty(piece.shape) if value is None else value.detach().clone().contiguous()
            if ranks.world_size > 1:
                dist.broadcast(value, piece.owner)
            found[piece.name] = value
    return found
