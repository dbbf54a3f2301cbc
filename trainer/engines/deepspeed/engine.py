"""The DeepSpeed engine: ZeRO 0 to 3; PipelineModule up to ZeRO-1, AutoTP up to ZeRO-2."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn

from trainer.engines.deepspeed import machine, patches, pipeline, tensor
from trainer.engines.deepspeed.forward_backward import AccumulatedStep, StepRunner, initialize
from trainer.engines.engine import EngineKind, Job, builder_of, mesh_of
from trainer.engines.normalise import NormalisedEngine
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.materialise import Placement, materialise
from trainer.models.names import expert_stacks, layer_of
from trainer.models.spec import ModelSpec
from trainer.optim.builders import Builder, in_deepspeed
from trainer.optim.optimizer import step_if_finite
from trainer.parallel import compilation
from trainer.parallel.apply import sharding_of, wrap_blocks
from trainer.parallel.gradients import GradientNorm
from trainer.parallel.probes import compiled_blocks, expert_parts
from trainer.parallel.recompute import tiles
from trainer.probes.questions.stages import check_cut
from trainer.storage import Json, installed
from trainer.tasks.mixers import runs_by_document
from trainer.tasks.task import ModelWithLoss

OLDEST = Version("0.19")
"""Below it AutoTP's section is refused, and PipelineModule and ZeRO-1 and 2 fail or are wrong."""

WITH_EXPERTS = Version("0.19.8")
"""AutoEP's marks are older, and not tried there; before 0.19.3 there are none."""


def refusal(layout: Layout) -> str | None:
    """Return the reason why DeepSpeed can't run a layout, or None."""
    if not installed("deepspeed"):
        return "DeepSpeed is not installed: pip install 'meshloom[deepspeed]'."
    if layout.compile == "blocks" and (reason := _compile_refusal(layout)):
        return reason
    if layout.float8 != "none":
        return "DeepSpeed makes no products in float8; the mesh engine does."
    if layout.secondary_shard > 1:  # 0.19.8 sets it up for one module, and fails at the next
        return 'DeepSpeed\'s hpZ does not run. Set trainer.engine to "mesh".'
    flat = layout.zero_stage in (1, 2) or layout.precision != "float32" and layout.zero_stage == 0
    split = layout.pipeline * layout.tensor > 1
    release = Version(version("deepspeed"))
    if (split or (flat and layout.averaging_ranks > 1)) and release < OLDEST:
        needs = "Pipelines, tensor parallelism and ZeRO-1 and 2 over several ranks need"
        return f"{needs} DeepSpeed {OLDEST}; this is {release}."
    if layout.expert > 1 and release < WITH_EXPERTS:
        return f"Experts over several ranks need DeepSpeed {WITH_EXPERTS}; this is {release}."
    if layout.tensor > 1 and (reason := tensor.refusal(layout)):
        return reason
    if layout.pipeline > 1 and (reason := pipeline.refusal(layout)):
        return reason
    if layout.replicate > 1 and layout.shard > 1:
        removed = "DeepSpeed removed MiCS, and hpZ replicates weights only"
        return f"{removed}: it has no sharding within replicas (HSDP)."
    if layout.zero_stage > 0 and layout.replicate > 1:
        return f"ZeRO-{layout.zero_stage} shards over all data ranks; replicate must be 1."
    return None


def _compile_refusal(layout: Layout) -> str | None:
    """Return the reason why the blocks of a layout can't be compiled under DeepSpeed, or None."""
    if reason := compilation.refusal(layout):
        return reason
    if layout.zero_stage == 3:
        others = "the other engines have none there."
        return f"The hooks of DeepSpeed's ZeRO-3 inside blocks can't be compiled; {others}"
    if layout.pipeline * layout.tensor * layout.expert > 1:
        parallel = "pipelines, tensor and expert parallelism"
        return f"DeepSpeed's {parallel} are not compiled; the mesh engine's are."
    return None


def _compiling(job: Job) -> tuple[Job, tuple[str, ...]]:
    """Return the job with its `compile` decided, and a note on it. Collective."""
    reason = _compile_refusal(job.layout)
    layout, notes = compiled_blocks.decided(job.layout, job.spec, job.machine, reason)
    return replace(job, layout=layout), notes


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raise ConfigError for a model that can't be cut or split so, or may lack gradients."""
    if spec.training.sparse:
        # under ZeRO-2 and 3 a missing gradient may also hang
        place = f"engine deepspeed: {spec.name}"
        hint = 'Set trainer.engine to "mesh"'
        actual = f"some tokens leave parameters without a gradient ({spec.training.sparse[0]}, ...)"
        zeros = "DeepSpeed takes a missing one for zeros, and decays the weight"
        expected = f"a gradient of each: {zeros}"
        raise ConfigError(Problem(place, actual, expected, hint))
    if layout.expert > 1:
        expert_parts.check(spec, layout)
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
    job, notes = _compiling(job)
    builder = builder_of(KIND, job)
    machine.announce(job.layout, job.machine, builder.library)
    patches.leave_out_sums_in_shared_memory()
    deepspeed.init_distributed(dist.get_backend())
    job.machine.signs.at("building the engine, and the model's values")
    config = machine.runtime_config(job, builder)
    runner: StepRunner
    runner = pipeline.build(job, config) if job.layout.pipeline > 1 else _whole(job, config)
    job.machine.signs.applied(sharding_of(f"ZeRO-{job.layout.zero_stage}", job.layout))
    patches.link_group_by_group(runner.engine.optimizer)
    patches.skip_steps_that_are_not_finite(runner.engine.optimizer)
    return DeepSpeedEngine(runner, job, (*notes, *builder.notes))


def _gather_once(model: nn.Module, spec: ModelSpec, tiled: bool) -> None:
    """Let ZeRO-3 gather a module as a whole: once a pass, however often a rank calls its parts.

    Those are MLPs in tiles, blocks in which layers with state run a document at a time, and experts
    that have adapters around them.
    """
    from deepspeed.utils import set_z3_leaf_module

    mlps = tiles.mlps(model, spec) if tiled else []
    around = [model.get_submodule(layer_of(name)) for name in expert_stacks(model, spec.blocks)]
    adapted = [module for module in around if hasattr(module, "lora_A")]
    blocks = [model.get_submodule(name) for name in spec.blocks]
    stateful = [block for block in blocks if any(map(runs_by_document, block.modules()))]
    for module in (*map(model.get_submodule, mlps), *adapted, *stateful):
        set_z3_leaf_module(module, True)
        if any(parameter.requires_grad for parameter in module.parameters()):
            module.register_forward_pre_hook(_with_gradient)


def _with_gradient(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> object:
    """Let a module's input have a gradient, by which ZeRO-3 sees when those of its parameters end.

    Behind frozen layers there is none, and parameters outside an `nn.Linear` are taken apart early.
    """
    missing = inputs and torch.is_grad_enabled() and not inputs[0].requires_grad
    return (inputs[0].detach().requires_grad_(), *inputs[1:]) if missing else None


def _whole(job: Job, config: Json) -> AccumulatedStep:
    """Build the runner of a whole model, or of this rank's tensor parallel shard of it."""
    import deepspeed

    layout = job.layout
    dtype = getattr(torch, job.layout.precision)
    mesh = mesh_of(job)
    mpu = None
    model, dropout = wrap_blocks(
        job.spec,
        job.task,
        layout,
        mesh if layout.expert > 1 else None,
        say=job.machine.signs.applied,
    )
    if layout.zero_stage == 3:
        _gather_once(model, job.spec, tiled=bool(layout.recompute.tile))
    if layout.zero_stage == 3 and expert_stacks(model, job.spec.blocks):
        model.get_submodule(job.spec.blocks[0]).register_forward_pre_hook(_with_gradient)

    options: Json = {}
    if layout.zero_stage == 3:  # each unit is partitioned once it has values
        from trainer.engines.deepspeed.partitions import rows_of_partition

        init = deepspeed.zero.Init(nn.Module(), config_dict_or_path=config, dtype=dtype)

        def partition(module: nn.Module, parameters: list[nn.Parameter]) -> None:
            tensor.mark_experts(model, job.spec, mesh)
            for parameter in parameters:
                patches.partition(init, parameter)

        options = {"after_unit": partition, "rows": rows_of_partition}
    if layout.tensor > 1:
        mpu = tensor.groups(layout)
        config = {**config, "tensor_parallel": tensor.section(job.spec, config["tensor_parallel"])}
    # the device may hold this rank's shard alone
    on_host = layout.offload_param != "none" or layout.tensor > 1
    storage = torch.device("cpu") if on_host else job.machine.device
    with torch.device("cpu"):
        placement = Placement(storage, dtype, plain=True)
        materialise(model, job.spec, seed=job.seed_of_values, placement=placement, **options)
    module = ModelWithLoss(model, job.task)
    split = tensor.split_of_experts(model, job.spec, mesh)
    engine = initialize(module, module.named_parameters(), job, config, mpu)
    if layout.tensor > 1:
        engine.first_dataloader_check.remove()  # can't compare batches that are dictionaries
        split = tensor.split_of(module, job.spec, mesh)
    return AccumulatedStep(engine, job, dropout, mesh, split)


def ready(layout: Layout, device: torch.device, settings: Json) -> None:
    """Raise ConfigError without float16 or a compiler, where it is needed."""
    machine.check_precision(layout)
    compilation.check_compiler(layout, device)
    builder = in_deepspeed(settings, layout, device.type, grouped=False)
    machine.check_compiler(layout, device, builder.library if isinstance(builder, Builder) else "")
    tensor.check_keys(layout, settings)


KIND = EngineKind(refusal, in_deepspeed, build, check, ready, patches.forget_earlier_engines)


class DeepSpeedEngine(NormalisedEngine):
    """Runs a `deepspeed.DeepSpeedEngine`."""

    def __init__(self, runner: StepRunner, job: Job, notes: tuple[str, ...]) -> None:
        # seconds of imports that other engines skip
        from trainer.engines.deepspeed.state import MasterState

        engine, mesh, [module] = runner.engine, runner.mesh, runner.modules
        state = MasterState(engine, module, job.machine.ranks, mesh, runner.split)
        if state.low_precision:
            state.start_masters(*runner.blank, job.seed_of_values)
        plain = machine.has_plain_optimizer(job.layout)
        if job.layout.zero_stage == 0 and not plain:
            notes = (*notes, machine.STAGE_0_NOTE.format(job.layout.precision))
        super().__init__(job, mesh, runner, engine.optimizer, state, (*runner.notes, *notes))
        self.divided_by = job.layout.accumulation
        self._engine = engine
        runner.before_update.append(self._before_update)
        self._own_norm: GradientNorm | None = None
        """Computes the norm without ZeRO: DeepSpeed reports none, or the first stage's alone."""
        self._norm = torch.zeros(())
        """The norm that `_own_norm` computed in the last step."""
        if plain:
            learned = [p for p in module.parameters() if p.requires_grad]
            counted = [p for p in learned if _counts(p, runner)]
            self._own_norm = GradientNorm(learned, counted, mesh, job.machine.device)
            patches.replace_step(
                engine.optimizer, lambda step: step_if_finite(engine.optimizer, self._norm, step)
            )

    def _before_update(self) -> None:
        if self._observe is not None:
            self._state.gradients(self._observe)
        if self._own_norm:
            self._norm = self._own_norm.clip(self._clip)

    def _finish(self) -> tuple[torch.Tensor, bool]:
        norm = self._norm if self._own_norm else self._engine.get_global_grad_norm()
        return torch.as_tensor(norm), bool(getattr(self._engine.optimizer, "overflow", False))

    def close(self) -> None:
        super().close()
        if "comms_logger" in self.job.deepspeed:
            import deepspeed.comm

            deepspeed.comm.log_summary()
        self._engine.destroy()
        patches.forget_earlier_engines()


def _counts(parameter: nn.Parameter, runner: StepRunner) -> bool:
    """Return True if this rank counts a parameter's gradient in the norm."""
    if pipeline.is_copy(parameter):
        return False
    return parameter in runner.split or runner.mesh.rank("tensor") == 0
