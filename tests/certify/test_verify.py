"""The parity certificate: it passes for what is right, and catches and names every planted
fault.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.commands import ROOT, run
from tests.support.messages import shows
from tests.support.pool import machine_here
from tests.support.training import GPT2
from trainer.certify.tiny_run import smallest_world, tiny_run
from trainer.errors import ConfigError
from trainer.supervise.world import environment_of, free_port

CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))


def config(
    folder: Path,
    engine: str,
    stage: int,
    stages: int = 1,
    tensor: int = 1,
    context: int = 1,
    expert: int = 1,
    **trainer: Any,
) -> str:
    """GPT-2: dropout in three places, tied, biases; in so many pipeline stages, on so many ranks
    that divide matrices, rows, or experts.
    """
    content = {
        "train_batch_size": 64,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage},
        "pipeline": {"stages": stages},
        "tensor_parallel": {"autotp_size": tensor},
        "sequence_parallel_size": context,
        "expert_parallel": {"enabled": expert > 1, "autoep_size": expert},
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 5, "warmup_max_lr": "auto"},
        },
        "trainer": {"engine": engine, "model": {"config": GPT2 | {"n_layer": 6}}, **trainer},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return str(path)


# The faults. Each is a patch that is in force while every rank certifies.


def step_of(engine: str) -> Any:
    from trainer.engines.deepspeed.engine import DeepSpeedEngine
    from trainer.engines.torch.engine import TorchEngine

    return DeepSpeedEngine if engine == "deepspeed" else TorchEngine


def with_step(engine: str, change: Callable[..., Any]) -> Any:
    """`change(self, batches, update)` gives what the real step is called with."""
    kind = step_of(engine)
    real = kind.step

    def step(self, number, batches, update, observe=None):
        return real(self, number, *change(self, batches, update), observe)

    return mock.patch.object(kind, "step", step)


def with_optimizer(engine: str, change: Callable[[Any], Any]) -> Any:
    """`change(optimizer)` comes before each step; the one of PyTorch within DeepSpeed's."""

    def changed(self, batches, update):
        outer = self._engine.optimizer if engine == "deepspeed" else self._optimizer
        change(getattr(outer, "optimizer", outer))
        return batches, update

    return with_step(engine, changed)


def in_groups(engine: str, **values: Any) -> Any:
    return with_optimizer(
        engine, lambda optimizer: [group.update(values) for group in optimizer.param_groups]
    )


def around(owner: Any, name: str, change: Callable[..., Any]) -> Any:
    """`owner.name` gives what `change` makes of the real function and the arguments."""
    real = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args, **kwargs: change(real, *args, **kwargs))


def scaled_by_accumulation(engine: str) -> Any:
    import torch

    from trainer.tasks.task import ModelWithLoss

    real = ModelWithLoss.forward

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    return mock.patch.object(
        ModelWithLoss, "forward", lambda self, batch: Twice.apply(real(self, batch))
    )


def dropped_micro_batch(engine: str) -> Any:
    return with_step(engine, lambda self, batches, update: ([batches[0]] * len(batches), update))


def wrong_rate(engine: str) -> Any:
    return with_step(
        engine,
        lambda self, batches, update: (
            batches,
            replace(update, learning_rate=update.learning_rate * 0.9),
        ),
    )


def lost_reduction(engine: str) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    real = DistributedDataParallel.forward

    def forward(self, *args, **kwargs):
        with self.no_sync():
            return real(self, *args, **kwargs)

    return mock.patch.object(DistributedDataParallel, "forward", forward)


def norm_of_one_rank(engine: str) -> Any:
    from trainer.parallel.gradients import GradientNorm

    def alone(real, self, limit):
        with mock.patch.object(type(self._mesh), "sum", lambda mesh, tensor, reduction: tensor):
            return real(self, limit)

    return around(GradientNorm, "clip", alone)


def untied_embedding(engine: str) -> Any:
    import torch

    from trainer.engines.torch import mesh

    real = mesh.ModelWithLoss

    def untie(model, task):
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        return real(model, task)

    return mock.patch.object(mesh, "ModelWithLoss", untie)


def dropout_not_replayed(engine: str) -> Any:
    from trainer.parallel.recompute import activation_checkpointing

    real = activation_checkpointing.checkpoint

    def forgetful(*args, **kwargs):
        return real(*args, **{**kwargs, "preserve_rng_state": False})

    return mock.patch.object(activation_checkpointing, "checkpoint", forgetful)


def norm_of_one_stage(engine: str) -> Any:
    return norm_of_one_rank(engine)


def tied_tables_apart(engine: str) -> Any:
    from trainer.parallel.gradients import GradientSync

    return mock.patch.object(GradientSync, "reduce", lambda self: None)


def tied_tables_of_pipeline_module_apart(engine: str) -> Any:
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.pipe.schedule import ReduceTiedGrads

    return mock.patch.dict(PipelineEngine._INSTRUCTION_MAP, {ReduceTiedGrads: lambda self: None})


def tied_table_counted_twice(engine: str) -> Any:
    from trainer.engines.deepspeed import pipeline as deepspeed_pipeline

    return mock.patch.object(deepspeed_pipeline, "is_copy", lambda parameter: False)


def zero_bubble_with_resharding(engine: str) -> Any:
    """The product that is refused: ZeRO-2 is asked for, and FSDP frees the parameters after each
    forward pass.
    """
    from trainer.parallel import shard

    real = shard.fully_shard
    return mock.patch.object(
        shard,
        "fully_shard",
        lambda module, **options: real(module, **{**options, "reshard_after_forward": True}),
    )


def part_of_a_norms_gradient(engine: str) -> Any:
    """Norms of queries and keys see the heads of one rank; their gradients are a part, until they
    are added up.
    """
    from trainer.parallel import gradients

    return mock.patch.object(gradients, "add_up", lambda *arguments: None)


def replicated_counted_twice(engine: str) -> Any:
    from trainer.parallel.gradients import GradientSync

    return mock.patch.object(GradientSync, "_counts", lambda self, name, parameter: True)


# Optimizers and schedules


def no_update(engine: str) -> Any:
    return with_step(
        engine, lambda self, batches, update: (batches, replace(update, learning_rate=0.0))
    )


def no_decay(engine: str) -> Any:
    return in_groups(engine, weight_decay=0.0)


def decayed_norms(engine: str) -> Any:
    return in_groups(engine, weight_decay=0.1)


def wrong_second_beta(engine: str) -> Any:
    return in_groups(engine, betas=(0.9, 0.99))


def no_bias_correction(engine: str) -> Any:
    def late(optimizer):
        for state in optimizer.state.values():
            state["step"].fill_(1e6)

    return with_optimizer(engine, late)


def schedule_a_step_early(engine: str) -> Any:
    from trainer.certify import recording

    early = lambda real, *args: lambda step: real(*args)(step + 1)  # noqa: E731
    return around(recording, "schedule_of", early)


def clipped_by_one_rank(engine: str) -> Any:
    """Each rank clips by the norm of its own shards, and reports that of all."""
    from trainer.parallel.gradients import GradientNorm

    def alone(real, self, limit):
        norm = real(self, 0.0)
        with mock.patch.object(type(self._mesh), "sum", lambda mesh, tensor, reduction: tensor):
            real(self, limit)
        return norm

    return around(GradientNorm, "clip", alone)


def masters_in_bfloat16(engine: str) -> Any:
    """Updates are lost in the rounding of the weights that they change."""
    from trainer.distributed.dtensor import local

    def rounded(self, batches, update):
        for module in self.modules:
            for parameter in module.parameters():
                own = local(parameter.detach())
                own.copy_(own.bfloat16())
        return batches, update

    return with_step(engine, rounded)


# Samples, padding, loss


def of_collation(change: Callable[..., Any]) -> Any:
    from trainer.recipes.causal_lm.task import CausalLM

    return around(
        CausalLM,
        "collate",
        lambda real, self, samples: change(lambda part: real(self, part), samples),
    )


def shifted_targets(engine: str) -> Any:
    return of_collation(
        lambda real, samples: (b := real(samples)) | {"targets": b["targets"].roll(-1, 1)}
    )


def padding_counted(engine: str) -> Any:
    def counted(real, samples):
        batch = real(samples)
        for row, sample in enumerate(samples):
            batch["targets"][row, len(sample["targets"]) :] = 0
        return batch

    return of_collation(counted)


def truncated_sample(engine: str) -> Any:
    return of_collation(
        lambda real, samples: real([{k: v[:-1] for k, v in samples[0].items()}, *samples[1:]])
    )


def later_token_as_input(engine: str) -> Any:
    def leaked(real, samples):
        batch = real(samples)
        counted = batch["targets"] >= 0
        batch["input_ids"][counted] = batch["targets"][counted]
        return batch

    return of_collation(leaked)


def samples_of_another_rank(engine: str) -> Any:
    from trainer.data import loader

    return around(
        loader,
        "micro_batches",
        lambda real, ids, micro, accumulation, ranks, rank: real(
            ids, micro, accumulation, ranks, 0
        ),
    )


def samples_in_the_order_of_epoch_0(engine: str) -> Any:
    from trainer.data import order

    return around(order, "_keyed", lambda real, key, size: real([key[0], 0], size))


def last_chunk_dropped(engine: str) -> Any:
    from trainer.tasks import cross_entropy

    return around(
        cross_entropy, "_chunks", lambda real, *args, **kwargs: real(*args, **kwargs)[:-1]
    )


def accumulation_not_divided(engine: str) -> Any:
    from trainer.parallel.forward_backward import GradientAccumulation

    return around(
        GradientAccumulation,
        "train",
        lambda real, self, seed, batches, scale: real(self, seed, batches, scale * len(batches)),
    )


def means_of_means(engine: str) -> Any:
    """The held-out loss as the mean of the micro-batches' own means."""
    import torch

    from trainer.engines.normalise import NormalisedEngine

    def means(real, self, batches):
        batches, task, mesh = list(batches), self.job.task, self._mesh
        total, targets = real(self, batches)
        own = [
            self._runner.evaluate([batch])[0].double() / task.targets(batch).clamp_min(1)
            for batch in batches
        ]
        mean = torch.stack(own).mean() / mesh.layout.world_size
        torch.distributed.all_reduce(mean)
        return torch.cat([(mean * targets)[None], total[1:]]), targets

    return around(NormalisedEngine, "evaluate", means)


# Randomness


def seeded(**fixed: int) -> Any:
    from trainer.engines import normalise

    def same(real, seed, step, data_rank):
        return real(seed, fixed.get("step", step), fixed.get("data_rank", data_rank))

    return around(normalise, "step_seed", same)


def same_dropout_on_all_ranks(engine: str) -> Any:
    return seeded(data_rank=0)


def same_dropout_in_each_step(engine: str) -> Any:
    return seeded(step=0)


def same_dropout_in_each_micro_batch(engine: str) -> Any:
    from trainer.parallel.forward_backward import Dropout

    return around(Dropout, "start", lambda real, self, seed, micro_batch: real(self, seed, 0))


def dropout_while_evaluating(engine: str) -> Any:
    import torch

    from trainer.parallel.forward_backward import GradientAccumulation

    evaluating = torch.nn.Module.eval

    def eval_but_dropout(module):
        for inner in evaluating(module).modules():
            inner.training = isinstance(inner, torch.nn.Dropout)
        return module

    def training(real, self, batches):
        with mock.patch.object(torch.nn.Module, "eval", eval_but_dropout):
            return real(self, batches)

    return around(GradientAccumulation, "evaluate", training)


# Saving and loading


def of_state_tensors(function: str, change: Callable[[Any], Any]) -> Any:
    """The state tensors that are given to `save` (the third argument) or `load` (the second)."""
    from trainer import checkpoint

    index = {"save": 2, "load": 1}[function]

    def changed(real, *args, **named):
        return real(
            *args[:index], [change(entry) for entry in args[index]], *args[index + 1 :], **named
        )

    return around(checkpoint, function, changed)


def not_loaded(which: Callable[[str], bool]) -> Any:
    def idle(entry):
        return replace(entry, write=lambda value: None) if which(entry.key) else entry

    def forgetful(entry):
        keep = getattr(entry, "keep", None)
        return (
            replace(idle(entry), keep=lambda shapes: [idle(p) for p in keep(shapes)])
            if keep
            else idle(entry)
        )

    return of_state_tensors("load", forgetful)


def moments_not_loaded(engine: str) -> Any:
    return not_loaded(lambda part: part.startswith("exp_avg"))


def step_count_not_loaded(engine: str) -> Any:
    """Whether it is kept by parameter or for all together."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(step_of(engine), "restore", lambda self, scalars: None))
    stack.enter_context(not_loaded(lambda part: part == "step"))
    return stack


def stale_weight_saved(engine: str) -> Any:
    def stale(entry):
        if entry.name != "transformer.h.1.mlp.c_fc.weight" or entry.key != "weight":
            return entry

        def parts():
            return [replace(part, value=part.value * 0.999) for part in entry.parts()]

        return replace(entry, parts=parts)

    return of_state_tensors("save", stale)


def buffers_not_saved(engine: str) -> Any:
    from trainer.engines.torch import state as torch_state

    return mock.patch.object(torch_state, "persistent_buffers", lambda root: [])


def tied_gradient_halved(engine: str) -> Any:
    from trainer.parallel.gradients import GradientSync

    def halved(real, self):
        real(self)
        for copies in self._tied.values():
            for parameter in copies:
                parameter.grad /= 2

    return around(GradientSync, "reduce", halved)


# What shows at a third micro-batch or rank, in long rows, large ids, late steps, and in what is
# said of a run


def third_micro_batch_dropped(engine: str) -> Any:
    return with_step(
        engine, lambda self, batches, update: ([*batches[:2], *batches[: len(batches) - 2]], update)
    )


def gradient_of_rank_2_lost(engine: str) -> Any:
    import torch
    import torch.distributed as dist

    from trainer.tasks.task import ModelWithLoss

    class Lost(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * (dist.get_rank() != 2)

    return around(ModelWithLoss, "forward", lambda real, self, batch: Lost.apply(real(self, batch)))


def mean_over_the_other_axis(engine: str) -> Any:
    from trainer.engines import normalise

    def other(real, targets, mesh, divided_by):
        return real(targets, mesh, divided_by) * mesh.layout.replicate / mesh.layout.shard

    return around(normalise, "gradient_scale", other)


def ids_of_ten_bits(engine: str) -> Any:
    return of_collation(
        lambda real, samples: (b := real(samples)) | {"input_ids": b["input_ids"] % 1024}
    )


def rows_of_64(engine: str) -> Any:
    return of_collation(
        lambda real, samples: real([{k: v[:64] for k, v in sample.items()} for sample in samples])
    )


def window_of_one_more(engine: str) -> Any:
    """In the run's own masks alone: those of the one process are made by transformers without
    ours.
    """
    from transformers import masking_utils

    from trainer.tasks.masks import Masks

    real, overlay = Masks.of, masking_utils.sliding_window_overlay

    @contextlib.contextmanager
    def of(self, *rows):
        wider = mock.patch.object(
            masking_utils, "sliding_window_overlay", lambda window: overlay(window + 1)
        )
        with wider, real(self, *rows):
            yield

    return mock.patch.object(Masks, "of", of)


def schedule_wrong_after_step_10(engine: str) -> Any:
    from trainer.optim import lr_schedules

    def slower(*args, **params):
        real = lr_schedules.warmup(*args, **params)
        return lambda step: replace(
            real(step), learning_rate=real(step).learning_rate * (1 if step <= 10 else 0.99)
        )

    return mock.patch.dict(lr_schedules.SCHEDULES, WarmupLR=slower)


def never_clipped(engine: str) -> Any:
    from trainer.parallel.gradients import GradientNorm

    return around(GradientNorm, "clip", lambda real, self, limit: real(self, 0.0))


def scaled_up_to_the_limit(engine: str) -> Any:
    from trainer.parallel.gradients import GradientNorm

    def clip(real, self, limit):
        norm = real(self, 0.0)
        for parameter, _ in self._parameters:
            parameter.grad *= limit / norm
        return norm

    return around(GradientNorm, "clip", clip)


def overflow_applied(engine: str) -> Any:
    from trainer.engines.torch import engine as torch_engine

    return mock.patch.object(
        torch_engine, "step_if_finite", lambda optimizer, norm: optimizer.step()
    )


def overflow_applied_by_deepspeed(engine: str) -> Any:
    """Both of its checks are off: with either it leaves the step out by itself."""
    from deepspeed.runtime.zero import stage_1_and_2

    def change(self, batches, update):
        self._engine.optimizer.check_grad_overflow = False
        return batches, update

    stack = contextlib.ExitStack()
    stack.enter_context(
        mock.patch.object(stage_1_and_2, "is_invalid_grad_norm", lambda norm: False)
    )
    stack.enter_context(with_step(engine, change))
    return stack


def accuracy_of_the_next_target(engine: str) -> Any:
    from trainer.tasks import cross_entropy

    return around(
        cross_entropy,
        "count_correct",
        lambda real, logits, targets, *words: real(logits, targets.roll(1, -1), *words),
    )


def tokens_of_one_rank_logged(engine: str) -> Any:
    from trainer.run import loop

    return around(
        loop, "RunState", lambda real, step, samples, tokens: real(step, samples, tokens // 2)
    )


def in_blocks_of_the_run(change: Callable[[Any, Any], None]) -> Any:
    """`change(model, spec)` comes after the model was split and wrapped; the one process knows
    nothing of it.
    """
    from trainer.parallel.forward_backward import Dropout

    def changed(real: Any, self: Any, model: Any, spec: Any) -> None:
        real(self, model, spec)
        change(model, spec)

    real = Dropout.__init__
    return mock.patch.object(
        Dropout, "__init__", lambda self, model, spec: changed(real, self, model, spec)
    )


def wrong_kv_head(engine: str) -> Any:
    """Queries see the keys of the next group."""

    def change(model: Any, spec: Any) -> None:
        keys = model.get_submodule("model.layers.1.self_attn.k_proj")
        keys.register_forward_hook(
            lambda module, inputs, output: output.roll(output.shape[-1] // 2, -1)
        )

    return in_blocks_of_the_run(change)


def rotary_embedding_of_the_last_stage(engine: str) -> Any:
    import torch.distributed as dist

    def change(model: Any, spec: Any) -> None:
        if dist.get_rank() == 1:
            real = model.model.rotary_emb.forward
            model.model.rotary_emb.forward = lambda x, position_ids, **named: real(
                x, 2 * position_ids, **named
            )

    return in_blocks_of_the_run(change)


def unscaled_attention(engine: str) -> Any:
    def change(model: Any, spec: Any) -> None:
        model.get_submodule("transformer.h.1.attn").register_forward_hook(
            lambda m, i, o: (o[0] * 1.001, *o[1:])
        )

    return in_blocks_of_the_run(change)


# What shows where ranks share rows


def weighed_by_its_own_targets(engine: str) -> Any:
    """The gradient is that of a mean of the ranks' own means."""
    from trainer.engines import normalise

    own: list[Any] = []

    def counted(real, *args):
        own.append(real(*args))
        return own[-1].clone()  # it is summed over the ranks in place

    def scale(real, targets, mesh, divided_by=1):
        return real(own[-1].clamp_min(1) * mesh.size("loss"), mesh, divided_by)

    stack = contextlib.ExitStack()
    stack.enter_context(around(normalise, "counted_here", counted))
    stack.enter_context(around(normalise, "gradient_scale", scale))
    return stack


def positions_of_each_rank(engine: str) -> Any:
    """Position ids restart on each rank."""

    def change(model: Any, spec: Any) -> None:
        real = model.model.rotary_emb.forward
        model.model.rotary_emb.forward = lambda x, position_ids, **named: real(
            x, position_ids - position_ids[:, :1], **named
        )

    return in_blocks_of_the_run(change)


def with_mask(change: Callable[..., Any]) -> Any:
    """`change(seen, function, border)` gives the mask, of what is seen within documents and of the
    model's own; `border(q, k)` is true if two ranks of a row have these tokens.
    """
    from trainer.tasks import masks

    def apart(real, function, documents):
        length = row[-1] // 2
        return change(real(function, documents), function, lambda q, k: q // length != k // length)

    row: list[int] = []
    stack = contextlib.ExitStack()
    stack.enter_context(
        around(masks, "_of_whole_rows", lambda real, *args: row.append(args[1]) or real(*args))
    )
    stack.enter_context(around(masks, "_apart", apart))
    return stack


def window_within_a_rank(engine: str) -> Any:
    return with_mask(
        lambda seen, function, border: lambda b, h, q, k: seen(b, h, q, k) & ~border(q, k)
    )


def border_of_documents_ignored(engine: str) -> Any:
    """A document on the second rank sees those on the first."""
    return with_mask(
        lambda seen, function, border: (
            lambda b, h, q, k: seen(b, h, q, k) | (function(b, h, q, k) & border(q, k))
        )
    )


def kv_heads_of_the_neighbour(engine: str) -> Any:
    from trainer.distributed.context_ranks import ContextRanks

    def attended(real, self, compute, query, key, value):
        others = (part.roll(part.shape[1] // self.division.size, 1) for part in (key, value))
        return real(self, compute, query, *others)

    return around(ContextRanks, "attended", attended)


def keys_in_the_order_of_groups(engine: str) -> Any:
    """Gathered keys and values stand as their ranks do: the tail of the first before the others."""
    from trainer.distributed.context_ranks import Division

    return around(Division, "in_order", lambda real, self, groups, dim: groups)


QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 2, "tie_word_embeddings": True}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Has a buffer that persists: the correction of its router's bias."""
TABLE = "transformer.wte.weight"


def experts_divided_by_their_own_ranks(engine: str) -> Any:
    from torch.distributed.fsdp import FSDPModule

    return mock.patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)


def replicas_of_experts_left_out(engine: str) -> Any:
    from trainer.parallel.splits import expert_ranks

    def alone(real, module, mesh, **options):
        real(module, mesh=mesh["expert_shard"], **options)

    return around(expert_ranks, "fully_shard", alone)


def rows_of_the_next_expert(engine: str) -> Any:
    """In the run alone: a trial's parameters are no DTensors."""
    from torch.distributed.tensor import DTensor

    from trainer.parallel import patches

    def rolled(real, tensor):
        return real(tensor).roll(1, 0) if isinstance(tensor, DTensor) else real(tensor)

    return around(patches, "local", rolled)


def with_loads(change: Callable[..., Any]) -> Any:
    """`change(norm, skipped)` gives what the biases of routers are moved after."""
    from trainer.parallel.splits.expert_loads import ExpertLoads

    return around(ExpertLoads, "move", lambda real, self, *given: real(self, *change(*given)))


def loads_of_one_rank(engine: str) -> Any:
    from trainer.parallel.splits import expert_loads

    return around(expert_loads, "holders_of", lambda real, mesh: (None, real(mesh)[1]))


def padding_in_the_loads(engine: str) -> Any:
    from trainer.recipes.causal_lm.task import CausalLM

    return around(CausalLM, "real", lambda real, self, batch: real(self, batch).fill_(1))


def biases_moved_by_an_overflow(engine: str) -> Any:
    return with_loads(lambda norm, skipped: (norm.nan_to_num(1.0, 1.0), False))


@dataclass(frozen=True)
class Planted:
    """Where a fault is planted, and what the certificate is to say of it."""

    engine: str
    stage: int
    check: str
    where: str = ""
    step: int = 0
    rank: int = 0
    size: int = 2
    trainer: dict[str, Any] = field(default_factory=dict)


STAGES = {"stages": 2}
BIAS = "mlp.gate.e_score_correction_bias"
BALANCED = {
    "model": {"config": DEEPSEEK | {"vocab_size": 61, "n_group": 1, "num_experts_per_tok": 2}},
    "data": {"sequence_length": 28},
    "router_bias_update_rate": 0.01,
}
TENSOR = {"tensor": 2, "model": {"config": QWEN3}}
SPREAD = {
    "expert": 2,
    "model": {"config": {"model_type": "qwen3_moe", "num_hidden_layers": 2, "vocab_size": 61}},
}
LARGE = {"model": {"config": GPT2 | {"vocab_size": 5000, "n_positions": 128}}}
LLAMA = {
    "model": {"config": {"model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 2}}
}
MISTRAL = {"model_type": "mistral", "num_hidden_layers": 2, "vocab_size": 61, "sliding_window": 32}
ROWS = {"context": 2, **LLAMA}
ONE_HEAD = MISTRAL | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 1}
OF_ROWS = {
    kv_heads_of_the_neighbour: ("output", 0, {}),
    keys_in_the_order_of_groups: (
        "output",
        0,
        {"model": {"config": ONE_HEAD | {"num_key_value_heads": 1}}},
    ),
    positions_of_each_rank: ("output", 1, {}),
    window_within_a_rank: ("output", 1, {"model": {"config": MISTRAL}}),
    border_of_documents_ignored: ("output", 1, {"data": {"documents": "pack"}}),
    weighed_by_its_own_targets: ("gradient", 0, {}),
}
"""The check that finds it, the first rank, and more of the config."""
PLACES = {"output": "model.layers.0.self_attn.o_proj", "gradient": "lm_head.weight"}

FAULTS: dict[Callable[[str], Any], Planted] = {
    **{
        fault: Planted("mesh", 2, check, PLACES[check], rank=rank, trainer=ROWS | more)
        for fault, (check, rank, more) in OF_ROWS.items()
    },
    scaled_by_accumulation: Planted("deepspeed", 2, "gradient", "transformer.ln_f.bias"),
    dropped_micro_batch: Planted("deepspeed", 3, "output"),
    wrong_rate: Planted("deepspeed", 1, "update", TABLE, step=2),
    lost_reduction: Planted("mesh", 0, "gradient", "transformer.ln_f.bias"),
    norm_of_one_rank: Planted("mesh", 3, "norm"),
    untied_embedding: Planted("mesh", 0, "initial", "lm_head.weight (only here)"),
    dropout_not_replayed: Planted(
        "mesh", 2, "gradient", trainer={"activation_checkpointing": "full"}
    ),
    norm_of_one_stage: Planted("mesh", 1, "norm", trainer=STAGES),
    tied_tables_apart: Planted("mesh", 0, "gradient", TABLE, trainer=STAGES),
    tied_tables_of_pipeline_module_apart: Planted(
        "deepspeed", 1, "gradient", TABLE, trainer=STAGES
    ),
    tied_table_counted_twice: Planted("deepspeed", 0, "norm", trainer=STAGES),
    part_of_a_norms_gradient: Planted(
        "mesh", 2, "gradient", "model.layers.1.self_attn.k_norm.weight", trainer=TENSOR
    ),
    replicated_counted_twice: Planted("mesh", 2, "norm", trainer=TENSOR),
    zero_bubble_with_resharding: Planted(
        "mesh", 2, "gradient", trainer={**STAGES, "pipeline_schedule": "ZBVZeroBubble"}
    ),
    schedule_a_step_early: Planted("mesh", 2, "update", TABLE, step=1),
    decayed_norms: Planted("mesh", 2, "update", "transformer.h.0.ln_1.weight", step=2),
    clipped_by_one_rank: Planted("mesh", 2, "moment", TABLE, step=2),  # the first over it
    shifted_targets: Planted("mesh", 2, "loss"),
    padding_counted: Planted("mesh", 2, "loss"),
    truncated_sample: Planted("mesh", 2, "output"),
    later_token_as_input: Planted("mesh", 2, "output"),
    samples_of_another_rank: Planted("mesh", 2, "output", rank=1),
    samples_in_the_order_of_epoch_0: Planted("mesh", 2, "output", step=1),
    last_chunk_dropped: Planted("mesh", 2, "loss"),
    accumulation_not_divided: Planted("mesh", 2, "gradient", "transformer.ln_f.bias"),
    means_of_means: Planted("mesh", 2, "held-out loss", step=3),
    same_dropout_on_all_ranks: Planted("mesh", 2, "output", rank=1),
    same_dropout_in_each_step: Planted("mesh", 2, "output", step=1),
    same_dropout_in_each_micro_batch: Planted("mesh", 2, "output"),
    dropout_while_evaluating: Planted("mesh", 2, "held-out loss", step=3),
    moments_not_loaded: Planted("mesh", 2, "loaded state", f"{TABLE} (exp_avg)", step=4),
    step_count_not_loaded: Planted("mesh", 2, "loaded state", "step", step=4),
    stale_weight_saved: Planted(
        "mesh", 2, "loaded state", "transformer.h.1.mlp.c_fc.weight", step=4
    ),
    buffers_not_saved: Planted(
        "mesh",
        2,
        "initial",
        "e_score_correction_bias (only in one process)",
        trainer={"model": {"config": DEEPSEEK}},
    ),
    tied_gradient_halved: Planted("mesh", 1, "gradient", TABLE, trainer=STAGES),
    third_micro_batch_dropped: Planted("mesh", 2, "output"),
    gradient_of_rank_2_lost: Planted("mesh", 2, "gradient", size=3),
    mean_over_the_other_axis: Planted(
        "mesh", 3, "gradient", size=6, trainer={"mesh": {"replicate": 2, "shard": -1}}
    ),
    ids_of_ten_bits: Planted("mesh", 2, "output", trainer=LARGE),
    rows_of_64: Planted("mesh", 2, "output", step=1, rank=1, trainer=LARGE),
    window_of_one_more: Planted("mesh", 2, "output", trainer={"model": {"config": MISTRAL}}),
    schedule_wrong_after_step_10: Planted(
        "mesh", 2, "schedule", "(0.00099 in place of 0.001)", step=11
    ),
    never_clipped: Planted("mesh", 2, "moment", trainer=LARGE),
    scaled_up_to_the_limit: Planted("mesh", 2, "moment", step=1, trainer=LARGE),
    overflow_applied: Planted("mesh", 2, "overflow", TABLE, step=6),
    wrong_kv_head: Planted(
        "mesh", 2, "output", "model.layers.1.self_attn.k_proj, micro-batch 0", trainer=LLAMA
    ),
    rotary_embedding_of_the_last_stage: Planted(
        "mesh",
        1,
        "output",
        "model.layers.2.self_attn.o_proj, micro-batch 0",
        rank=1,
        trainer={**LLAMA, **STAGES},
    ),
    unscaled_attention: Planted("deepspeed", 3, "output", "transformer.h.1.attn, micro-batch 0"),
    overflow_applied_by_deepspeed: Planted("deepspeed", 2, "overflow", TABLE, step=6),
    accuracy_of_the_next_target: Planted("mesh", 2, "accuracy", step=3),
    tokens_of_one_rank_logged: Planted("mesh", 2, "counts"),
    experts_divided_by_their_own_ranks: Planted("mesh", 3, "gradient", "experts", trainer=SPREAD),
    replicas_of_experts_left_out: Planted(
        "mesh", 2, "gradient", "experts", size=4, trainer=SPREAD | {"mesh": {"replicate": 2}}
    ),
    loads_of_one_rank: Planted("mesh", 2, "update", BIAS, trainer=BALANCED),
    padding_in_the_loads: Planted("mesh", 2, "update", BIAS, trainer=BALANCED),
    biases_moved_by_an_overflow: Planted("mesh", 2, "overflow", BIAS, step=6, trainer=BALANCED),
    rows_of_the_next_expert: Planted("mesh", 2, "output", "mlp", trainer=SPREAD),
}


def certified(
    path: str,
    world_size: int,
    fault: str | None = None,
    overrides: Sequence[str] = (),
    precision: str = "float32",
) -> tuple[bool, str, str]:
    """Runs on each rank: whether it passed, the first check that failed, and the table."""

    from trainer.certify import certificate as module
    from trainer.certify.certificate import certify, table

    small = tiny_run(path, list(overrides), world_size, precision)
    with contextlib.ExitStack() as stack:
        if fault:
            # the checks at start refuse some of these faults; here it is seen that the certificate
            # does, too
            stack.enter_context(mock.patch.object(module, "checked", lambda spec, *_: (spec, ())))
            stack.enter_context(globals()[fault](small.config.trainer.engine))
        certificate = certify(small, machine_here())
    first = certificate.first_failure
    return certificate.passed, first.check if first else "", table(certificate)


@pytest.fixture(scope="module")
def sound() -> dict[str, str]:
    """The configs that were seen to pass without a fault."""
    return {}


OF_A_KIND = {
    norm_of_one_stage,
    tied_table_counted_twice,
    replicated_counted_twice,
    dropped_micro_batch,
    padding_counted,
    later_token_as_input,
    samples_in_the_order_of_epoch_0,
    accumulation_not_divided,
    same_dropout_in_each_step,
    same_dropout_in_each_micro_batch,
    dropout_while_evaluating,
    step_count_not_loaded,
}
"""Like another in the table: left to `--whole`."""


def sampled(faults: Iterable[Callable[[str], Any]]) -> list[Any]:
    return [
        pytest.param(f, marks=pytest.mark.whole if f in OF_A_KIND else (), id=f.__name__)
        for f in faults
    ]


def test_what_the_faults_patch_is_there():
    """A function that was renamed is found here, not in an hour."""
    for fault, planted in FAULTS.items():
        with fault(planted.engine):
            pass


@pytest.mark.first("norm_of_one_rank")
@pytest.mark.parametrize("fault", sampled(FAULTS))
def test_a_planted_fault_is_caught_and_named(pools, tmp_path, sound, fault):
    planted = FAULTS[fault]
    path = config(tmp_path, planted.engine, planted.stage, **planted.trainer)
    if (content := f"{planted.size} {Path(path).read_text()}") not in sound:
        for passed, _, table in pools[planted.size].run(
            certified, path=path, world_size=planted.size
        ):
            assert passed, table
        sound[content] = path
    arguments = {"path": path, "world_size": planted.size, "fault": fault.__name__}
    for passed, first, table in pools[planted.size].run(certified, **arguments):
        assert not passed
        assert first == planted.check, table
        where = f"at step {planted.step}, on rank {planted.rank}: {planted.check}"
        assert f"FAIL: first differs {where}" in table, table
        assert planted.where in table.splitlines()[-1], table


OF_OPTIMIZERS = {
    no_update: ("update",),
    wrong_rate: ("update",),
    wrong_second_beta: ("moment",),
    no_decay: ("update",),
    no_bias_correction: (
        "update",
        "moment",
    ),  # planted in the step count, which may be kept by parameter
}


@pytest.mark.more
@pytest.mark.parametrize(
    "rate", [*(pytest.param(rate, marks=pytest.mark.whole) for rate in (1e-3, 1e-5)), 1e-7]
)
@pytest.mark.parametrize("fault", OF_OPTIMIZERS, ids=lambda fault: fault.__name__)
def test_a_wrong_optimizer_is_caught_at_any_learning_rate(pools, tmp_path, sound, fault, rate):
    path = config(tmp_path, "mesh", 2)
    arguments = {"path": path, "world_size": 2, "overrides": [f"optimizer.params.lr={rate}"]}
    if (content := f"{Path(path).read_text()} at {rate}") not in sound:
        for passed, _, table in pools[2].run(certified, **arguments):
            assert passed, table
        sound[content] = path
    for passed, first, table in pools[2].run(certified, fault=fault.__name__, **arguments):
        assert not passed
        assert first in OF_OPTIMIZERS[fault], table


OPT = {
    "model_type": "opt",
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
"""Its keys' biases have a gradient of zero, and in floating point one of rounding errors: softmax
ignores a shift.
"""
ONE_CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}}
LINEAR = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_type": "linear"}}


@pytest.mark.more
@pytest.mark.parametrize(
    ("model", "scheduler"),
    [(OPT, LINEAR), (GPT2, ONE_CYCLE)],
    ids=lambda part: part.get("model_type", part.get("type")),
)
def test_what_is_right_raises_no_alarm(pools, tmp_path, model, scheduler):
    path = Path(config(tmp_path, "mesh", 3, model={"config": model}))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scheduler": scheduler}))
    for passed, _, table in pools[2].run(certified, path=str(path), world_size=2):
        assert passed, table


@pytest.mark.more
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_what_is_computed_again_raises_no_alarm(pools, tmp_path, recompute):
    path = config(tmp_path, "mesh", 2, activation_checkpointing=recompute)
    for passed, _, table in pools[2].run(certified, path=path, world_size=2):
        assert passed, table


MUON = {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.1}
EXPERTS = {
    **{"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 61},
    **{"num_hidden_layers": 2, "hidden_size": 32, "moe_intermediate_size": 16, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48},
}
MUON_ON: dict[str, tuple[int, str, tuple[int, int, int], dict[str, Any]]] = {
    "ZeRO-3": (2, "mesh", (3, 1, 1), {}),
    "tensor": (4, "mesh", (2, 1, 2), LLAMA),
    "pipeline": (4, "mesh", (2, 2, 1), {}),
    "experts": (2, "accelerate", (3, 1, 1), {"model": {"config": EXPERTS}}),
}
"""Ranks, the engine, the ZeRO stage, stages and tensor ranks, and more of the config."""


def shards_orthogonalised(engine: str) -> Any:
    """Each rank orthogonalises its own rows, in place of the whole matrix."""
    from trainer.optim.muon import LOW, Muon

    def updates(self, parameters, directions):
        return [self._orthogonal(d.to(LOW)) if d.numel() else d for d in directions]

    return mock.patch.object(Muon, "_updates", updates)


@pytest.mark.more
@pytest.mark.parametrize("layout", MUON_ON)
def test_muon_is_compared_with_that_of_pytorch(pools, tmp_path, layout):
    size, engine, sizes, more = MUON_ON[layout]
    path = Path(config(tmp_path, engine, *sizes, **more))
    optimizer = {"optimizer": {"type": "Muon", "params": MUON}}
    path.write_text(json.dumps(json.loads(path.read_text()) | optimizer))
    arguments = {"path": str(path), "world_size": size}
    for passed, _, table in pools[size].run(certified, **arguments):
        assert passed, table
    if layout == "ZeRO-3":
        for passed, first, table in pools[size].run(
            certified, fault=shards_orthogonalised.__name__, **arguments
        ):
            assert (passed, first) == (False, "update"), table


@pytest.mark.more
def test_a_low_precision_is_allowed_its_rounding_and_no_more(pools, tmp_path):
    path = config(tmp_path, "mesh", 2)
    overrides = ["bf16.enabled=true", "optimizer.params.lr=1e-5"]
    arguments = {"path": path, "world_size": 2, "overrides": overrides, "precision": "config"}
    for passed, _, table in pools[2].run(certified, **arguments):
        assert passed, table
        assert "bfloat16" in table
    for fault, check in ((masters_in_bfloat16, "update"), (dropped_micro_batch, "output")):
        for passed, first, table in pools[2].run(certified, fault=fault.__name__, **arguments):
            assert not passed
            assert first == check, table


def test_the_seeds_of_the_one_process_are_all_different():
    """So that what agrees with it draws other dropout on each data rank, in each step, micro-batch
    and block.
    """
    from trainer.certify.one_process.sample_order import seed_of

    seeds = [
        seed_of(seed_of("dropout", seed, step, rank), micro) + block
        for seed in range(3)
        for step in range(10)
        for rank in range(4)
        for micro in range(4)
        for block in range(20)
    ]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.first("fsdp-[]")
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        *((path.stem, []) for path in CONFIGS),
        ("pipeline_zero1", ["trainer.engine=deepspeed"]),
        ("tensor_zero2", ["trainer.engine=deepspeed"]),
    ],
    ids=str,
)
def test_every_config_that_ships_passes(pools, name, overrides):
    path = str(ROOT / "ds_configs" / f"{name}.json")
    size = tiny_run(path, overrides, None).layout.world_size
    for passed, _, table in pools[size].run(
        certified, path=path, world_size=size, overrides=overrides
    ):
        assert passed, table


@pytest.mark.more
def test_the_command(tmp_path):
    output = tmp_path / "certificate.json"
    command = [
        sys.executable,
        ROOT / "launch" / "verify.py",
        "--config",
        config(tmp_path, "auto", 2),
    ]
    result = run(*command, "--output", output)
    assert result.code == 0, result.output
    shows(result.output.rstrip(), "PASS: trains", f"{output}")
    certificate = json.loads(output.read_text())
    assert certificate["passed"] is True
    assert certificate["config"] == json.loads(Path(command[3]).read_text())
    assert [finding["check"] for finding in certificate["findings"]][:4] == [
        "initial",
        "output",
        "loss",
        "gradient",
    ]
    no_gpu = run(*command, "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert no_gpu.code == 64
    shows(no_gpu.output, "--device: cuda with 0", "GPUs", "3 processes")
    wrong = run(*command, "zero_optimization.stag=2")
    assert wrong.code == 64
    assert (
        'Did you mean "zero_optimization.stage"?' in wrong.output
        or 'Did you mean "stage"?' in wrong.output
    )


@pytest.mark.more
def test_a_failure_ends_with_76(tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "import trainer.certify.comparison as comparison\n"
        "comparison.TOLERANCES['gradient'] = -1.0\n"
        f"sys.argv[0] = {str(ROOT / 'launch' / 'verify.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    arguments = ["--config", config(tmp_path, "mesh", 0), "--output", str(tmp_path / "c.json")]
    result = run(sys.executable, script, *arguments, **environment_of(0, 1, free_port()))
    assert result.code == 76, result.output
    shows(result.output, "FAIL: first differs", "step 0", "rank 0")


@pytest.mark.more
def test_norms_on_both_sides_of_the_limit_are_named_by_their_steps(tmp_path):
    """Once "of the first 3 steps 0 are over it" was read as none of three."""
    from trainer.certify.tiny_run import clipping

    small = tiny_run(config(tmp_path, "mesh", 0), [], 2)
    shows(clipping(small, [3.0, 1.0, 1.2]).changes[-1], "step 0, under", "1 and 2")
    assert clipping(small, [1.0, 1.0, 1.0]).changes[-1].endswith("it proves less")


@pytest.mark.parametrize(
    ("stage", "mesh", "world_size"),
    [
        (0, {}, 3),
        (3, {}, 3),
        (3, {"replicate": 2, "shard": -1}, 6),
        (3, {"replicate": 2, "shard": 2}, 4),
        (3, {"replicate": -1, "shard": 4}, 8),
        (3, {"shard": "node"}, 6),
    ],
)
def test_the_smallest_world_has_every_axis(tmp_path, stage, mesh, world_size):
    from trainer.config import load

    assert smallest_world(load(config(tmp_path, "auto", stage, mesh=mesh))) == world_size


@pytest.mark.parametrize(
    ("precision", "engine"),
    [
        ({}, "mesh"),
        ({"bf16": {"enabled": True}}, "deepspeed"),
        ({"fp16": {"enabled": True}}, "deepspeed"),
    ],
)
def test_the_engine_that_is_verified_is_that_of_the_run(tmp_path, precision, engine):
    """In float32 another would take a pipeline without ZeRO."""
    from trainer.certify.recording import engine_of

    path = Path(config(tmp_path, "auto", 0, stages=2))
    path.write_text(json.dumps(json.loads(path.read_text()) | precision))
    small = tiny_run(str(path), [], 2)
    assert (small.layout.precision, engine_of(small, "cpu")) == ("float32", engine)


def test_a_mesh_that_needs_more_processes_than_there_are_names_the_way_out(tmp_path):
    with pytest.raises(ConfigError) as caught:
        tiny_run(config(tmp_path, "auto", 3, mesh={"replicate": 4, "shard": 8}), [], None)
    shows(caught.value, "--world-size", "8 fits", "Override trainer.mesh")


@pytest.mark.more
def test_the_example_of_a_planted_bug_names_it(tmp_path: Path) -> None:
    output = str(tmp_path / "certificate.json")
    result = run(sys.executable, "examples/planted_bug.py", "--output", output)
    assert result.code == 76, result.output
    first = r"FAIL: first differs at step 0, on rank \d: gradient transformer\.wte\.weight"
    assert re.search(first, result.output), result.output
