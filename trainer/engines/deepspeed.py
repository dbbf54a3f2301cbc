"""The DeepSpeed engine: ZeRO 0 to 3, offload and mixed precision; pipelines under ZeRO 0 and 1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.engines import deepspeed_pipeline, deepspeed_tensor
from trainer.engines.deepspeed_config import DTYPES, STAGE_0_NOTE, check_precision, has_plain_optimizer, runtime_config
from trainer.engines.deepspeed_passes import Passes, Step, Whole
from trainer.engines.deepspeed_state import MasterState
from trainer.engines.deepspeed_tensor import Split
from trainer.engines.engine import EngineKind, Job, Metrics, Observer, over_all, set_update
from trainer.layout import Layout
from trainer.models.cut import prove
from trainer.models.materialise import materialise
from trainer.models.spec import ModelSpec
from trainer.optimizers import Update
from trainer.parallel import recompute
from trainer.parallel.dropout import Dropout
from trainer.parallel.mesh import grid_of
from trainer.seeding import step_seed
from trainer.state import Piece
from trainer.tasks.task import Batch, Trainee


def refusal(layout: Layout) -> str | None:
    """Why DeepSpeed can't run a layout."""
    if layout.tensor > 1 and (reason := deepspeed_tensor.refusal(layout)):
        return reason
    if layout.pipeline > 1 and (reason := deepspeed_pipeline.refusal(layout)):
        return reason
    if layout.replicate > 1 and layout.shard > 1:
        return "DeepSpeed removed MiCS, and hpZ replicates weights only: it has no sharding within replicas (HSDP)."
    if layout.zero_stage > 0 and layout.replicate > 1:
        return f"ZeRO-{layout.zero_stage} shards over all data ranks; replicate must be 1."
    return None


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raises ConfigError for a model that can't be cut or split so."""
    if layout.tensor > 1:
        deepspeed_tensor.check(spec, layout)
    if layout.pipeline > 1:
        prove(spec, layout.stages)


def build(job: Job) -> DeepSpeedEngine:
    """Give the model, or this rank's stage of it, its values and hand it to DeepSpeed."""
    import deepspeed
    from deepspeed.utils import groups, logger

    # those of an engine that this process had before; DeepSpeed itself would take them for this one's
    groups.mpu = groups._TENSOR_MODEL_PARALLEL_GROUP = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    logger.setLevel("WARNING")
    deepspeed.init_distributed(dist.get_backend())
    check_precision(job)
    config = runtime_config(job)
    passes: Passes = deepspeed_pipeline.build(job, config) if job.layout.pipeline > 1 else _whole(job, config)
    if hasattr(passes.engine.optimizer, "check_grad_overflow"):
        passes.engine.optimizer.check_grad_overflow = True  # in float32 too, a step that is not finite is skipped
    return DeepSpeedEngine(passes, job)


def _whole(job: Job, config: dict[str, Any]) -> Whole:
    """The model in one, or this rank's part of each of its matrices."""
    import deepspeed

    layout, dtype = job.layout, DTYPES[job.layout.precision]
    model = job.task.prepare(job.spec.build())

    def partition(module: nn.Module, parameters: list[nn.Parameter]) -> None:
        unit = nn.Module()
        for index, parameter in enumerate(parameters):
            unit.register_parameter(str(index), parameter)
        deepspeed.zero.Init(module=unit, config_dict_or_path=config, dtype=dtype)

    # under ZeRO-3 each unit is partitioned as it comes
    place: dict[str, Any] = {"place": partition} if layout.zero_stage == 3 else {}
    grid, mpu = None, None
    if layout.tensor > 1:
        grid, mpu = grid_of(layout, job.machine.device), deepspeed_tensor.groups(layout)
        config = {**config, "tensor_parallel": deepspeed_tensor.section(job.spec, config["tensor_parallel"])}
    # the whole need not fit on the accelerator where a part of it will be
    home = torch.device("cpu") if layout.offload_param != "none" or grid else job.machine.device
    with torch.device("cpu"):
        materialise(model, job.spec, seed=job.seed, device=home, dtype=dtype, **place)
    recompute.apply(model, job.spec, layout.recompute)
    dropout = Dropout(model, job.spec)
    trainee = Trainee(model, job.task)
    learned = [p for p in trainee.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=trainee, model_parameters=learned, config=config, mpu=mpu)
    if grid:
        engine.first_dataloader_check.remove()  # that tensor ranks have the same batch; it can't compare dictionaries
    return Whole(engine, dropout, grid, Split(trainee, job.spec, grid) if grid else None)


KIND = EngineKind(refusal, build, check)


class DeepSpeedEngine:
    """Runs `deepspeed.DeepSpeedEngine` by contract 1.

    DeepSpeed divides a loss by the accumulation steps and averages gradients over the data ranks; so that
    the gradient is that of (sum of token losses) / (targets of the global batch), each micro-batch's sum is
    multiplied by data ranks x accumulation / targets.
    """

    def __init__(self, passes: Passes, job: Job) -> None:
        self.job = job
        self._passes = passes
        self._engine = passes.engine
        self._state = MasterState(passes.engine, passes.trainee, job.machine.ranks, passes.grid, passes.split)
        self._norm: torch.Tensor | None = None
        """What this engine found itself, where DeepSpeed reports none."""
        self._own_norm = has_plain_optimizer(job.layout)
        self._clip = float(job.deepspeed.get("gradient_clipping", 0.0))
        plain = job.layout.zero_stage > 0 or self._own_norm
        self.notes = (*passes.notes, *(() if plain else (STAGE_0_NOTE.format(job.layout.precision),)))
        self._parameters = [p for p in passes.trainee.parameters() if p.requires_grad]

    def step(
        self, step: int, micro_batches: Sequence[Batch], update: Update, observe: Observer | None = None
    ) -> Metrics:
        job, layout, engine = self.job, self.job.layout, self._engine
        set_update(engine.optimizer.param_groups, update)
        targets = job.task.targets(micro_batches[0])
        for batch in micro_batches[1:]:
            targets += job.task.targets(batch)
        # while the first forward pass runs
        counting = dist.all_reduce(targets, async_op=True) if layout.world_size > 1 else None

        @cache
        def scale() -> torch.Tensor:
            if counting is not None:
                counting.wait()
                targets.floor_divide_(layout.world_size // layout.data_ranks)
            return layout.data_ranks * layout.accumulation / targets

        seed = step_seed(job.seed, step, job.data_rank)
        loss_sum = self._passes.train(micro_batches, Step(seed, scale, lambda: self._before_update(observe)))
        scale()  # the last pipeline stage alone needs it before
        return Metrics(
            loss_sum=loss_sum / layout.tensor,
            targets=targets,
            gradient_norm=torch.as_tensor(engine.get_global_grad_norm() if self._norm is None else self._norm),
            skipped=bool(getattr(engine.optimizer, "overflow", False)),
            shared=layout.world_size > 1,
        )

    def evaluate(self, micro_batches: Iterable[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        batches = list(micro_batches)
        targets = torch.stack([self.job.task.targets(batch) for batch in batches]).sum()
        return over_all(self._passes.evaluate(batches), targets, self.job.layout)

    def pieces(self) -> list[Piece]:
        return self._state.pieces()

    def scalars(self) -> dict[str, float]:
        return self._state.scalars()

    def restore(self, scalars: Mapping[str, float]) -> None:
        self._state.restore(scalars)

    def close(self) -> None:
        self._engine.destroy()

    def _before_update(self, observe: Observer | None) -> None:
        if observe is not None:
            self._state.gradients(observe)
        if self._own_norm:
            self._norm = self._clip_and_norm()
            # in DeepSpeed's own step, PyTorch's fused kernel does nothing where a norm is not finite
            optimizer = self._engine.optimizer
            optimizer.grad_scale, optimizer.found_inf = None, (~self._norm.isfinite()).float()

    def _clip_and_norm(self) -> torch.Tensor:
        """The norm over the whole model; gradients are scaled in place.

        DeepSpeed's own, of a pipeline under ZeRO-0, is the norm of the first stage alone.
        """
        counted = [p for p in self._parameters if p.grad is not None and not deepspeed_pipeline.is_copy(p)]
        gradients = [p.grad for p in counted if p.grad is not None]
        if grid := self._passes.grid:
            split = self._passes.split
            shares = [1.0 if split and p in split else 1.0 / grid.layout.tensor for p in counted]
            squares = torch.stack(torch._foreach_norm(gradients)).square()
            total = (squares * torch.tensor(shares, device=squares.device)).sum()
            dist.all_reduce(total, group=grid.replica)
            norm = total.sqrt()
        else:
            norm = torch.nn.utils.get_total_norm(gradients)
        if self._clip > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clip, norm)
        return norm
