"""The DeepSpeed engine: ZeRO 0 to 3, offload, mixed precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.engines.deepspeed_state import MasterState
from trainer.engines.engine import EngineKind, Job, Metrics, Observer, over_all, set_update
from trainer.errors import ConfigError, Problem
from trainer.layout import Layout
from trainer.models.materialise import materialise
from trainer.optimizers import Update
from trainer.parallel import recompute
from trainer.parallel.dropout import Dropout
from trainer.seeding import step_seed
from trainer.state import Piece
from trainer.tasks.task import Batch, Trainee, bare_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def refusal(layout: Layout) -> str | None:
    """Why DeepSpeed can't run a layout."""
    if layout.pipeline > 1:
        return "Its PipelineModule is not used, and asserts under ZeRO-2 and 3; the mesh engine runs the same JSON."
    if layout.tensor > 1:
        return "Its AutoTP is not used; the mesh engine splits the model by the model's own plan."
    if layout.replicate > 1 and layout.shard > 1:
        return "DeepSpeed removed MiCS, and hpZ replicates weights only: it has no sharding within replicas (HSDP)."
    if layout.zero_stage > 0 and layout.replicate > 1:
        return f"ZeRO-{layout.zero_stage} shards over all data ranks; replicate must be 1."
    return None


def build(job: Job) -> DeepSpeedEngine:
    """Materialise the model (under ZeRO-3 each unit is partitioned as it comes) and hand it to DeepSpeed."""
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    deepspeed.init_distributed(dist.get_backend())
    _check_precision(job)
    config = _runtime_config(job)
    dtype = DTYPES[job.layout.precision]
    model = job.task.prepare(job.spec.build())

    def partition(module: nn.Module, parameters: list[nn.Parameter]) -> None:
        unit = nn.Module()
        for index, parameter in enumerate(parameters):
            unit.register_parameter(str(index), parameter)
        deepspeed.zero.Init(module=unit, config_dict_or_path=config, dtype=dtype)

    place: dict[str, Any] = {"place": partition} if job.layout.zero_stage == 3 else {}
    with torch.device("cpu"):
        materialise(model, job.spec, seed=job.seed, device=_home(job), dtype=dtype, **place)
    recompute.apply(model, job.spec, job.layout.recompute)
    dropout = Dropout(model, job.spec)
    trainee = Trainee(model, job.task)
    engine, *_ = deepspeed.initialize(
        model=trainee, model_parameters=[p for p in trainee.parameters() if p.requires_grad], config=config
    )
    if hasattr(engine.optimizer, "check_grad_overflow"):
        engine.optimizer.check_grad_overflow = True  # in float32 too, a step that is not finite is skipped
    return DeepSpeedEngine(engine, job, dropout)


KIND = EngineKind(refusal, build)

STAGE_0_NOTE = (
    "ZeRO-0 in {} runs as ZeRO-1, with the same gradients and less memory: DeepSpeed's own path for float16 divides "
    "gradients by a loss scale that it never applied"
)


def _check_precision(job: Job) -> None:
    from deepspeed.accelerator import get_accelerator

    if job.layout.precision == "float16" and not get_accelerator().is_fp16_supported():
        seen = "true on a processor without float16 arithmetic"
        expected = "a GPU, or a processor with AVX512-FP16 or AMX"
        raise ConfigError(Problem("fp16.enabled", seen, expected, 'Set bf16.enabled, or trainer.device="cuda"'))


def _has_plain_optimizer(layout: Layout) -> bool:
    """Without ZeRO in float32 DeepSpeed steps PyTorch's optimizer itself, with nothing around it."""
    return layout.zero_stage == 0 and layout.precision == "float32"


def _home(job: Job) -> torch.device:
    """Where new values go: under parameter offload they never have to fit on the accelerator."""
    return torch.device("cpu") if job.layout.offload_param != "none" else job.machine.device


def _runtime_config(job: Job) -> dict[str, Any]:
    """The user's JSON as this machine needs it; nothing here changes what is computed."""
    config = {**job.deepspeed, "steps_per_print": 2**31 - 1}
    optimizer = config["optimizer"]
    if optimizer["type"].lower() in ("adam", "adamw") and job.layout.offload_optimizer == "none":
        # PyTorch's own fused kernel: the same update as DeepSpeed's FusedAdam, without a compiler at run time
        defaults = {"torch_adam": True, "fused": True}
        config["optimizer"] = {**optimizer, "params": {**defaults, **optimizer["params"]}}
        if not config["optimizer"]["params"]["torch_adam"]:
            config["optimizer"]["params"].pop("fused")
    if _has_plain_optimizer(job.layout):
        # DeepSpeed reports no norm here, so this engine takes it and clips
        config["gradient_clipping"] = 0.0
    elif job.layout.zero_stage == 0:
        config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": 1}
    return config


class DeepSpeedEngine:
    """Runs `deepspeed.DeepSpeedEngine` by contract 1.

    DeepSpeed divides a loss by the accumulation steps and averages gradients over the data ranks; so that
    the gradient is that of (sum of token losses) / (targets of the global batch), each micro-batch's sum is
    multiplied by data ranks x accumulation / targets.
    """

    def __init__(self, engine: Any, job: Job, dropout: Dropout) -> None:
        self._engine = engine
        self.job = job
        self._dropout = dropout
        self._state = MasterState(engine, job.machine.ranks)
        self._own_norm = _has_plain_optimizer(job.layout)
        self._clip = float(job.deepspeed.get("gradient_clipping", 0.0))
        plain = job.layout.zero_stage > 0 or self._own_norm
        self.notes = () if plain else (STAGE_0_NOTE.format(job.layout.precision),)
        self._parameters = [p for p in engine.module.parameters() if p.requires_grad]

    def step(
        self, step: int, micro_batches: Sequence[Batch], update: Update, observe: Observer | None = None
    ) -> Metrics:
        job, engine = self.job, self._engine
        if not engine.module.training:
            engine.train()
        set_update(engine.optimizer.param_groups, update)
        targets = job.task.targets(micro_batches[0])
        for batch in micro_batches[1:]:
            targets += job.task.targets(batch)
        # while the first forward pass runs
        counting = dist.all_reduce(targets, async_op=True) if job.layout.data_ranks > 1 else None
        losses, scale, seed = [], None, step_seed(job.seed, step, job.data_rank)
        for index, batch in enumerate(micro_batches):
            self._dropout.start(seed, index)
            loss = engine(batch)
            losses.append(loss.detach())
            if scale is None:
                if counting is not None:
                    counting.wait()
                scale = job.layout.data_ranks * job.layout.accumulation / targets
            engine.backward(loss * scale)
            if index + 1 < len(micro_batches):
                engine.step()
        if observe is not None:
            self._state.gradients(observe)
        norm = self._clip_and_norm() if self._own_norm else None
        if norm is not None:
            # DeepSpeed's own step, in which PyTorch's fused kernel does nothing where a norm is not finite
            engine.optimizer.grad_scale, engine.optimizer.found_inf = None, (~norm.isfinite()).float()
        engine.step()
        norm = engine.get_global_grad_norm() if norm is None else norm
        return Metrics(
            loss_sum=sum(losses[1:], losses[0]),
            targets=targets,
            gradient_norm=torch.as_tensor(norm),
            skipped=bool(getattr(engine.optimizer, "overflow", False)),
            shared=job.layout.data_ranks > 1,
        )

    def evaluate(self, micro_batches: Iterable[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        self._engine.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.job.machine.device)
        with torch.no_grad():
            for batch in micro_batches:
                totals[0] += self._engine(batch)
                totals[1] += self.job.task.targets(batch)
        return over_all(totals[0], totals[1], self.job.layout)

    def pieces(self) -> list[Piece]:
        # a tied parameter is listed once, under the name that comes first
        return [replace(piece, name=bare_name(piece.name)) for piece in self._state.pieces()]

    def scalars(self) -> dict[str, float]:
        return self._state.scalars()

    def restore(self, scalars: Mapping[str, float]) -> None:
        self._state.restore(scalars)

    def close(self) -> None:
        self._engine.destroy()

    def _clip_and_norm(self) -> torch.Tensor:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self._clip > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clip, norm)
        return norm
