"""Faults of gradients: their sums over ranks and micro-batches, ties, recomputation."""

from __future__ import annotations

from typing import Any
from unittest import mock

from tests.support.certify.faults.planting import around, with_step


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


def accumulation_not_divided(engine: str) -> Any:
    from trainer.parallel.forward_backward import GradientAccumulation

    return around(
        GradientAccumulation,
        "train",
        lambda real, self, seed, batches, scale: real(self, seed, batches, scale * len(batches)),
    )


def tied_gradient_halved(engine: str) -> Any:
    from trainer.parallel.gradients import GradientSync

    def halved(real, self):
        real(self)
        for copies in self._tied.values():
            for parameter in copies:
                parameter.grad /= 2

    return around(GradientSync, "reduce", halved)


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
