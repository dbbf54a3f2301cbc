"""A user's `nn.Module` as a `ModelSpec`: a callable that builds it, and a pattern of its blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trainer.distributed.seeding import seeded_init
from trainer.errors import ConfigError, Problem
from trainer.models.materialise import built_tensor
from trainer.models.names import aliases_of
from trainer.models.spec import ModelFiles, ModelSpec, NoWeights

LARGEST_BUILT = 1_000_000_000
"""The most parameters of a module that each process builds on the host, to take its constructor's
values.
"""

UNUSED = {"_is_hf_initialized", "_no_reinit", "_no_weight_decay"}
"""Attributes of parameters that transformers' own initialisation sets, and no forward pass
reads.
"""


class _Built:
    """The values that the constructor gives with a seed; the same in every process."""

    def __init__(self, build: Callable[[], nn.Module], seed: int) -> None:
        self._build, self._seed = build, seed

    def read(self, name: str) -> torch.Tensor | None:
        value = self._values.get(name)
        return None if value is None else value.detach().clone()

    def release(self) -> None:
        self.__dict__.pop("_values", None)  # built again at the next read

    @cached_property
    def _values(self) -> dict[str, torch.Tensor]:
        with torch.device("cpu"), seeded_init(self._seed, "module"):
            model = self._build()
        return dict(
            (
                *model.named_parameters(remove_duplicate=False),
                *model.named_buffers(remove_duplicate=False),
            )
        )


def spec_of(build: Callable[[], nn.Module], blocks: str | None, seed: int) -> ModelSpec:
    """Build the spec of the module that `build` makes.

    `blocks` is a dotted pattern in which `*` stands for a number, such as `layers.*`. Without one,
    the children of an `nn.Sequential` are its blocks. Raises ConfigError if `build` makes no
    module, can't run on the meta device, or the module has no such blocks."""

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return build()

    try:
        model = on_meta()
    except Exception as error:  # whatever the constructor raises
        seen = f"on the meta device: {type(error).__name__}: {error}".splitlines()[0][:200]
        raise ConfigError(
            Problem("model", seen, "a callable that builds an nn.Module, on any device")
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            Problem("model", type(model).__name__, "a callable that builds an nn.Module")
        )
    named = dict(model.named_parameters())
    tensors = (*named.items(), *model.named_buffers())
    if stray := next(
        ((name, tensor.device) for name, tensor in tensors if not tensor.is_meta), None
    ):
        seen = f"{stray[0]} is built on {stray[1]}"
        raise ConfigError(
            Problem("model", seen, "tensors on the default device", "Leave `device=` out.")
        )
    if synced := [
        name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)
    ]:
        wanted, mend = (
            "nn.BatchNorm",
            "Set trainer.sync_batch_norm, which knows the data ranks of each layout.",
        )
        raise ConfigError(Problem("model", f"{synced[0]} is an nn.SyncBatchNorm", wanted, mend))
    if problems := [problem for name, p in named.items() for problem in _not_kept(name, p)]:
        raise ConfigError(*problems)
    parameters = sum(parameter.numel() for parameter in named.values())
    built = parameters <= LARGEST_BUILT
    note = (
        f"its {parameters / 1e9:.1f} G parameters get initial values from reset_parameters, "
        "not "
        "from the constructor"
    )
    return ModelSpec(
        name=type(model).__name__,
        build=on_meta,
        initialise=_initialise,
        blocks=_blocks(model, blocks),
        parameters=parameters,
        tied=aliases_of(model),
        weights=_Built(build, seed) if built else NoWeights(),
        notes=() if built else (note,),
        constructed=lambda name: built_tensor(on_meta, name),
        config=config_of(model),
        files=ModelFiles(save_config=lambda folder, dtype: _save_config(model, folder)),
    )


def _not_kept(name: str, parameter: nn.Parameter) -> Iterator[Problem]:
    """Yield a problem for each trait of a parameter that is lost when an engine rebuilds, shards or
    gathers it.
    """
    kind, hooks = (
        type(parameter),
        (parameter._backward_hooks, parameter._post_accumulate_grad_hooks),
    )
    if not (parameter.is_floating_point() or parameter.is_complex()):
        mend = "Make it a buffer: register_buffer."
        yield Problem(
            "model", f"{name} is a parameter of {parameter.dtype}", "floating point", mend
        )
    elif parameter.dtype != torch.float32:
        mend = (
            "Complex numbers fit two real ones (torch.view_as_complex); bf16.enabled computes "
            "in bfloat16."
        )
        yield Problem("model", f"{name} is a parameter of {parameter.dtype}", "float32", mend)
    if kind is not nn.Parameter:
        yield Problem(
            "model",
            f"{name} is a {kind.__module__}.{kind.__qualname__}",
            "an nn.Parameter of known size",
        )
    if any(hooks):
        mend = "Scale what comes out in the forward pass, or use a hook of the module."
        yield Problem("model", f"{name} has a hook of its own", "none: it would never run", mend)
    if own := vars(parameter).keys() - UNUSED:
        yield Problem(
            "model",
            f"{name} has an attribute {min(own)}",
            "none: keep it on the module, which has it in every layout",
        )


def _blocks(model: nn.Module, pattern: str | None) -> tuple[str, ...]:
    if pattern is None:
        return (
            tuple(name for name, _ in model.named_children())
            if isinstance(model, nn.Sequential)
            else _repeated(model)
        )
    wanted = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
    found = [
        (match, name) for name, _ in model.named_modules() if (match := wanted.fullmatch(name))
    ]
    if not found:
        seen = f"no module of {type(model).__name__} is named {pattern}"
        names = ", ".join(name for name, _ in model.named_children())
        raise ConfigError(
            Problem("blocks", seen, f"a pattern of names below {names}, such as layers.*")
        )
    return tuple(
        name
        for _, name in sorted(found, key=lambda item: [int(number) for number in item[0].groups()])
    )


def _repeated(model: nn.Module) -> tuple[str, ...]:
    """Find the blocks where no pattern is given: the class with the most parameters among members
    of module lists.

    Only classes that occur twice or more and have children count; all members of the class are
    blocks, in order, except those inside another. `check_module` tries later if they run so.
    """
    lists = [
        (name, inner)
        for name, inner in model.named_modules()
        if isinstance(inner, nn.ModuleList | nn.Sequential)
    ]
    kinds: dict[type, dict[str, int]] = {}
    for name, inner in lists:
        for key, member in inner.named_children():
            if not isinstance(member, nn.ModuleList | nn.Sequential) and any(member.children()):
                kinds.setdefault(type(member), {})[f"{name}.{key}".lstrip(".")] = sum(
                    p.numel() for p in member.parameters()
                )
    alike = [found for found in kinds.values() if len(found) > 1]
    best = max(alike, key=lambda found: sum(found.values()), default={})
    return tuple(name for name in best if not any(name.startswith(f"{other}.") for other in best))


def _initialise(root: nn.Module, name: str) -> None:
    """Initialise a module by its own `reset_parameters`, unless all its values were read."""
    module = root.get_submodule(name)
    own = [*module._parameters.values(), *module._buffers.values()]
    fresh = [
        tensor
        for tensor in own
        if tensor is not None and not getattr(tensor, "_is_hf_initialized", False)
    ]
    if fresh and callable(reset := getattr(module, "reset_parameters", None)):
        reset()


def class_of(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return the architecture for comparison: the class, and the shape of each tensor of the state
    dict.
    """
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    return {"module": class_of(model), "shapes": shapes}


def _save_config(model: nn.Module, folder: Any) -> None:
    """Write `module.json`, the module's class; its weights are safetensors under the names of its
    state dict.
    """
    content = {"module": class_of(model)}
    (Path(folder) / "module.json").write_text(json.dumps(content, indent=2) + "\n")


def running_norms(root: nn.Module) -> dict[str, _NormBase]:
    """Return the modules that keep running statistics, by name: batch norms, and instance norms
    that track them.
    """
    found = (
        (name, module) for name, module in root.named_modules() if isinstance(module, _NormBase)
    )
    return {name: module for name, module in found if module.running_mean is not None}
