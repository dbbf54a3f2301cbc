"""The DeepSpeed engine: ZeRO 0 to 3, offload, mixed precision; PipelineModule to ZeRO-1, AutoTP to
ZeRO-2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.distributed.seeding import step_seed
from trainer.engines.deepspeed import patches, pipeline, tensor
from trainer.engines.deepspeed.forward_backward import AccumulatedStep, Step, StepRunner
from trainer.engines.deepspeed.machine import (
    DTYPES,
    STAGE_0_NOTE,
    announce,
    check_compiler,
    check_precision,
    has_plain_optimizer,
    runtime_config,
)
from trainer.engines.deepspeed.tensor import Split
from trainer.engines.engine import EngineKind, Job, Metrics, Observer, recipe_of, set_update
from trainer.engines.normalise import counted_here, evaluated, gradient_scale
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.cut import check_cut
from trainer.models.materialise import Placement, materialise
from trainer.models.spec import ModelSpec
from trainer.optim.decay import groups_of
from trainer.optim.lr_schedules import Update
from trainer.optim.optimizer import step_if_finite
from trainer.optim.recipes import Recipe, in_deepspeed
from trainer.parallel.apply import wrap_blocks
from trainer.parallel.batch_norm import RunningStatistics
from trainer.parallel.gradients import GradientNorm
from trainer.parallel.parallel_mesh import parallel_mesh_of
from trainer.state import StateTensor
from trainer.tasks.task import Batch, ModelWithLoss


def refusal(layout: Layout) -> str | None:
    """Return the reason why DeepSpeed can't run a layout, or None."""
    if layout.tensor > 1 and (reason := tensor.refusal(layout)):
        return reason
    if layout.pipeline > 1 and (reason := pipeline.refusal(layout)):
        return reason
    if layout.replicate > 1 and layout.shard > 1:
        return (
            "DeepSpeed removed MiCS, and hpZ replicates weights only: it has no sharding "
            "within "
            "replicas (HSDP)."
        )
    if layout.zero_stage > 0 and layout.replicate > 1:
        return f"ZeRO-{layout.zero_stage} shards over all data ranks; replicate must be 1."
    return None


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError if a model can't be cut or split so, or DeepSpeed would put zeros for
    missing gradients.
    """
    if spec.training.sparse:
        # it takes a missing gradient for zeros, which decays the weight and, under ZeRO-2 and 3,
        # may hang
        seen = f"some tokens leave parameters without a gradient ({spec.training.sparse[0]}, ...)"
        expected = (
            "a gradient of each: DeepSpeed takes a missing one for zeros, and decays the weight"
        )
        raise ConfigError(
            Problem(
                f"engine deepspeed: {spec.name}", seen, expected, 'Set trainer.engine to "mesh"'
            )
        )
    if layout.tensor > 1:
        tensor.check(spec, layout)
    if layout.pipeline > 1:
        check_cut(spec, layout.stages)


def build(job: Job) -> DeepSpeedEngine:
    """Give the model, or this rank's stage of it, its values and pass it to DeepSpeed."""
    import deepspeed
    from deepspeed.utils import logger

    patches.forget_earlier_engines()
    logger.setLevel("WARNING")
    recipe = recipe_of(KIND, job)
    announce(job.layout, job.machine, recipe.library)
    deepspeed.init_distributed(dist.get_backend())
    job.machine.signs.at("building the engine, and the model's values")
    config = runtime_config(job, recipe)
    runner: StepRunner = (
        pipeline.build(job, config) if job.layout.pipeline > 1 else _whole(job, config)
    )
    patches.link_group_by_group(runner.engine.optimizer)
    patches.skip_steps_that_are_not_finite(runner.engine.optimizer)
    return DeepSpeedEngine(runner, job, recipe.notes)


def _whole(job: Job, config: dict[str, Any]) -> AccumulatedStep:
    """Build the runner of a whole model, or of this rank's tensor parallel shard of it."""
    import deepspeed

    layout, dtype = job.layout, DTYPES[job.layout.precision]
    mesh, mpu = parallel_mesh_of(layout, job.machine.device), None
    model, dropout = wrap_blocks(job.spec, job.task, layout)

    def partition(module: nn.Module, parameters: list[nn.Parameter]) -> None:
        unit = nn.Module()
        for index, parameter in enumerate(parameters):
            unit.register_parameter(str(index), parameter)
        deepspeed.zero.Init(module=unit, config_dict_or_path=config, dtype=dtype)

    # under ZeRO-3 each unit is partitioned once it has values
    after: dict[str, Any] = {"after_unit": partition} if layout.zero_stage == 3 else {}
    if layout.tensor > 1:
        mpu = tensor.groups(layout)
        config = {**config, "tensor_parallel": tensor.section(job.spec, config["tensor_parallel"])}
    # the accelerator need not hold the whole model, only this rank's shard
    on_host = layout.offload_param != "none" or layout.tensor > 1
    storage = torch.device("cpu") if on_host else job.machine.device
    with torch.device("cpu"):
        placement = Placement(storage, dtype)
        materialise(model, job.spec, seed=job.seed_of_values, placement=placement, **after)
    module = ModelWithLoss(model, job.task)
    decay = config["optimizer"]["params"]["weight_decay"]
    learned = groups_of(module.named_parameters(), job.undecayed, decay, job.spec.training.tuned)
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=learned, config=config, mpu=mpu
    )
    if layout.tensor > 1:
        engine.first_dataloader_check.remove()  # can't compare batches that are dictionaries
    split = Split(module, job.spec, mesh) if layout.tensor > 1 else None
    return AccumulatedStep(engine, job, dropout, mesh, split)


def ready(layout: Layout, device: torch.device, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if this machine lacks float16 arithmetic, or a compiler that is needed."""
    check_precision(layout)
    recipe = in_deepspeed(settings, layout, device.type, grouped=False)
    check_compiler(layout, device, recipe.library if isinstance(recipe, Recipe) else "")


KIND = EngineKind(refusal, in_deepspeed, build, check, ready)


class DeepSpeedEngine:
    """Runs `deepspeed.DeepSpeedEngine` by contract 1 (`engines/normalise.py`)."""

    def __init__(self, runner: StepRunner, job: Job, notes: tuple[str, ...]) -> None:
        from trainer.engines.deepspeed.state import (
            MasterState,
        )  # seconds of imports that other engines skip

        self.job = job
        self._runner = runner
        self._engine = runner.engine
        self._mesh = runner.mesh
        self._state = MasterState(
            runner.engine, runner.module, job.machine.ranks, runner.mesh, runner.split
        )
        if self._state.low_precision:
            self._state.start_masters(*runner.blank, job.seed_of_values)
        self._statistics = RunningStatistics([runner.module], runner.mesh, job.data_rank)
        self._own_norm: GradientNorm | None = None
        """The norm, if it is taken here: DeepSpeed reports none or, of a ZeRO-0 pipeline, the first
        stage's.
        """
        self._norm = torch.zeros(())
        """The norm that `_own_norm` found in the last step."""
        if has_plain_optimizer(job.layout):
            learned = [p for p in runner.module.parameters() if p.requires_grad]
            counted = [p for p in learned if _counts(p, runner)]
            self._own_norm = GradientNorm(learned, counted, runner.mesh, job.machine.device)
            optimizer = runner.engine.optimizer
            patches.replace_step(
                optimizer, lambda update: step_if_finite(optimizer, self._norm, update)
            )
        self._clip = float(job.deepspeed["gradient_clipping"])
        plain = job.layout.zero_stage > 0 or self._own_norm is not None
        self.notes = (
            *runner.notes,
            *notes,
            *(() if plain else (STAGE_0_NOTE.format(job.layout.precision),)),
        )

    def step(
        self,
        step: int,
        micro_batches: Sequence[Batch],
        update: Update,
        observe: Observer | None = None,
    ) -> Metrics:
        job, mesh, engine = self.job, self._mesh, self._engine
        set_update(engine.optimizer.param_groups, update)
        targets = counted_here(job.task, micro_batches, mesh)
        # overlaps with the first forward pass
        group = mesh.group("loss")
        counting = (
            dist.all_reduce(targets, group=group, async_op=True) if group is not None else None
        )

        @cache
        def scale() -> torch.Tensor:
            if counting is not None:
                counting.wait()
            return gradient_scale(targets, mesh, divided_by=job.layout.accumulation)

        seed = step_seed(job.seed, step, job.data_rank)
        with self._statistics.of_step(len(micro_batches)):
            loss_sum = self._runner.train(
                micro_batches, Step(seed, scale, lambda: self._before_update(observe))
            )
        scale()  # otherwise only the last pipeline stage waits for it
        norm = self._norm if self._own_norm else engine.get_global_grad_norm()
        skipped = bool(getattr(engine.optimizer, "overflow", False))
        return Metrics(loss_sum, targets, torch.as_tensor(norm), skipped=skipped, group=group)

    def evaluate(self, micro_batches: Iterable[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        return evaluated(self.job.task, self._mesh, self._runner.evaluate, micro_batches)

    def state_tensors(self) -> list[StateTensor]:
        return self._state.state_tensors()

    def scalars(self) -> dict[str, float]:
        return self._state.scalars()

    def restore(self, scalars: Mapping[str, float]) -> None:
        self._state.restore(scalars)

    @property
    def modules(self) -> Sequence[nn.Module]:
        return [self._runner.module]

    def close(self) -> None:
        if "comms_logger" in self.job.deepspeed:
            import deepspeed.comm

            deepspeed.comm.log_summary()
        self._engine.destroy()

    def _before_update(self, observe: Observer | None) -> None:
        if observe is not None:
            self._state.gradients(observe)
        if self._own_norm:
            self._norm = self._own_norm.clip(self._clip)


def _counts(parameter: nn.Parameter, runner: StepRunner) -> bool:
    """Return True if this rank counts a parameter's gradient in the norm."""
    if pipeline.is_copy(parameter):
        return False
    return bool(runner.split and parameter in runner.split) or runner.mesh.rank("tensor") == 0
