"""Patches of DeepSpeed 0.18 and 0.19: each says the symptom without it, and when it can go.

`tests/engines/test_patches.py` fails once one of them is no longer needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine


def forget_earlier_engines() -> None:
    """Reset what earlier engines of this process left in globals.

    Symptom: a second engine takes the first one's groups for its own, ZeRO-3's linear function
    stays in PyTorch, and its model in memory. Can go when `DeepSpeedEngine.destroy` undoes all.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.utils import groups

    groups.mpu = groups._TENSOR_MODEL_PARALLEL_GROUP = None
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    for known in _expert_groups():
        known.clear()
    FWD_MODULE_STACK.clear()
    torch.nn.functional.linear = torch._C._nn.linear


def leave_out_sums_in_shared_memory() -> None:
    """Let DeepSpeed do without the operator by which its inference sums tensors on a CPU.

    Symptom: the first run on a CPU needs a C++ compiler, and takes half a minute to compile what no
    training calls. Can go when DeepSpeed builds the operator at its first use.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _expert_groups() -> list[dict[str, object]]:
    """Return DeepSpeed's groups, by name, of ranks with other experts, with the same, and ranks."""
    from deepspeed.utils import groups

    names = ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP")
    return [getattr(groups, name + end) for end in ("", "_RANKS") for name in names]


def mark_experts(parameters: Iterable[nn.Parameter], along: DeviceMesh) -> None:
    """Mark a rank's part of experts as AutoEP marks its own, which are spread over `along`.

    Symptom: ZeRO averages other ranks' experts into it. Can go when an argument names experts.
    """
    name = f"ep_size_{along['expert'].size()}"
    pair = [along[axis].get_group() for axis in ("expert", "expert_shard")]
    values = (*pair, *map(dist.get_process_group_ranks, pair))
    for known, value in zip(_expert_groups(), values, strict=True):
        known[name] = value
    marks = {"allreduce": False, "group_name": name, "ds_zero_placement_family": "autoep_expert"}
    marks |= {"ds_zero_partition_group_name": name, "ds_zero_partition_process_group": pair[1]}
    for parameter in parameters:
        vars(parameter).update(marks)


def partition(init: Any, parameter: nn.Parameter) -> None:
    """Let a rank keep its partition of a parameter, whose other values may be anything.

    Symptom: `deepspeed.zero.Init` sends all values from the first rank to the others. Can go when
    an argument says that each rank has those of its partition.
    """
    parameter.data = parameter.data.to(init.local_device)
    init._convert_to_deepspeed_param(parameter)
    parameter.partition()  # type: ignore[attr-defined]


@contextmanager
def has_expert_layer(module: nn.Module) -> Iterator[None]:
    """Let DeepSpeed find a layer of AutoEP in a module that it wraps.

    Symptom: it looks for spread experts by the class of its own layers, and not by the marks. Can
    go when it looks at the marks.
    """
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    class Spread(AutoEPMoELayer):  # type: ignore[misc]
        num_experts = 1

        def __init__(self) -> None:
            nn.Module.__init__(self)

        def set_deepspeed_parallelism(self, *_: object, **__: object) -> None: ...

    module.add_module("autoep", Spread())
    try:
        yield
    finally:
        del module.autoep


def skip_steps_that_are_not_finite(optimizer: ZeROOptimizer) -> None:
    """Skip a step whose gradient is not finite whatever `bf16.check_grad_overflow` says.

    Symptom: with that key false ZeRO writes NaN into the weights. Can go when the key does.
    """
    if hasattr(optimizer, "check_grad_overflow"):
        optimizer.check_grad_overflow = True


def link_group_by_group(optimizer: ZeROOptimizer) -> None:
    """Link parameters to their optimizer state group by group.

    Symptom: ZeRO links all groups after the first one's step; those after it have no state then,
    and can't be saved. Can go when `_optimizer_step` links the group that it has stepped.
    """
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    pairs = {
        "bit16_groups": "single_partition_of_fp32_groups",
        "bf16_groups": "fp32_groups_flat_partition",
    }
    present = [pair for pair in pairs.items() if all(hasattr(optimizer, name) for name in pair)]
    linked: set[int] = set()

    def link() -> None:
        state = optimizer.optimizer.state
        groups, flats = (getattr(optimizer, name) for name in present[0])
        for index, (group, flat) in enumerate(zip(groups, flats, strict=True)):
            if index not in linked and state.get(flat):
                lazy_init_hp_params_optimizer_state(group, flat, state)
                linked.add(index)

    if present:
        optimizer._lazy_init_hp_params_optimizer_state = link


def replace_step(optimizer: ZeROOptimizer, step: Callable[[Callable[[], object]], object]) -> None:
    """Let `step` decide if an optimizer that ZeRO does not wrap takes its step, which it is given.

    Symptom: stage 0 takes steps that are not finite. Can go when it looks, too.
    """
    update = optimizer.step
    optimizer.step = lambda: step(update)


def surround_update(
    engine: DeepSpeedEngine, before: Iterable[Callable[[], None]], after: Callable[[], None]
) -> None:
    """Call all of `before`, and `after`, around each update of a `PipelineEngine`'s schedule.

    Symptom: it clips and steps right after its last reduction, where nothing else gets in. Can go
    when its schedule has an instruction, or the engine a hook, between the two.
    """
    update = engine._take_model_step

    def surrounded(options: object) -> None:
        for work in before:
            work()
        update(options)
        after()

    engine._take_model_step = surrounded


def set_loss_scaler(scaler: object, values: Mapping[str, float]) -> None:
    """Set the scale and the counts of a dynamic loss scaler, by name.

    Symptom: a resumed run starts at the initial scale. Can go when scalers load a state.
    """
    for name, value in values.items():
        setattr(scaler, name, type(getattr(scaler, name))(value))


def tie_stages(
    module: Any,
    optimizer: ZeROOptimizer,
    copies: Sequence[nn.Parameter],
    group: dist.ProcessGroup | None,
    *,
    is_copy: bool,
) -> None:
    """Sum the gradients of parameters that two pipeline stages hold, without a `TiedLayerSpec`.

    `copies` are this stage's, and `group` the two stages' ranks; `is_copy` is True on the later
    one, which norms do not count. Symptom: PipelineModule ties layers that it builds itself, not
    parameters of a stage, and with `grad_accum` it sums an empty `grad`. Can go when it takes
    parameters.
    """
    for parameter in copies:
        parameter.ds_pipe_replicated = is_copy  # type: ignore[attr-defined]
    kept_apart = getattr(optimizer, "use_grad_accum_attribute", False)
    module.get_tied_weights_and_groups = lambda: [
        (SimpleNamespace(grad=vars(p)["grad_accum"]) if kept_apart else p, group) for p in copies
    ]
