"""A user's `nn.Module` as a `ModelSpec`: a callable that builds it, and a pattern of its blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trainer.distributed.seeding import seeded_init
from trainer.errors import ConfigError, Problem, refused
from trainer.models.materialise import built_tensor
from trainer.models.names import aliases_of, outermost, tensors_of
from trainer.models.patches import has_values
from trainer.models.spec import Building, MadeWeights, ModelFiles, ModelSpec, NoWeights, Weights
from trainer.storage import Json

LARGEST_BUILT = 1_000_000_000
"""The most parameters of a module that each process builds on the host, for its initial values."""

UNUSED = {"_is_hf_initialized", "_no_reinit", "_no_weight_decay"}
"""Attributes of parameters that transformers' initialisation sets, and no forward pass reads."""


def _built(build: Callable[[], nn.Module], seed: int) -> dict[str, torch.Tensor]:
    """Return the values that the constructor gives with a seed; the same in every process."""
    with torch.device("cpu"), seeded_init(seed, "module"):
        return tensors_of(build())


def spec_of(build: Callable[[], nn.Module], blocks: str | None, seed: int) -> ModelSpec:
    """Build the spec of the module that `build` makes.

    `blocks` is a dotted pattern in which `*` stands for a number, such as `layers.*`. Without one,
    the blocks are the children of an `nn.Sequential`; in any other module `_repeated` finds them.
    `seed`: of the initial values. Raises ConfigError if `build` makes no module or can't run on the
    meta device, and if the module has no such blocks or can't be trained.
    """

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return build()

    model = _checked(on_meta)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    weights: Weights = MadeWeights(partial(_built, build, seed))
    notes: tuple[str, ...] = ()
    if parameters > LARGEST_BUILT:
        count = f"its {parameters / 1e9:.1f} G parameters"
        source = "reset_parameters, not from the constructor"
        weights = NoWeights()
        notes = (f"{count} get initial values from {source}",)
    return ModelSpec(
        name=type(model).__name__,
        building=Building(on_meta, _initialise, weights, partial(built_tensor, on_meta)),
        blocks=_blocks(model, blocks),
        parameters=parameters,
        tied=aliases_of(model),
        notes=notes,
        config=config_of(model),
        files=ModelFiles(save_config=partial(_save_config, model)),
    )


def _checked(on_meta: Callable[[], nn.Module]) -> nn.Module:
    """Build the module on the meta device.

    Raises ConfigError if that fails, and for a module that can't be trained.
    """
    expected = "a callable that builds an nn.Module"
    start = "on the meta device: "
    with refused("model", f"{expected}, on any device", named=True, start=start):
        model = on_meta()
    if not isinstance(model, nn.Module):
        raise ConfigError(Problem("model", type(model).__name__, expected))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta:
            actual = f"{name} is built on {tensor.device}"
            expected = "tensors on the default device"
            raise ConfigError(Problem("model", actual, expected, "Leave `device=` out."))
    for name, inner in model.named_modules():
        if isinstance(inner, nn.SyncBatchNorm):
            hint = "Set trainer.sync_batch_norm, which knows the data ranks of each layout."
            actual = f"{name} is an nn.SyncBatchNorm"
            raise ConfigError(Problem("model", actual, "nn.BatchNorm", hint))
    if problems := [one for name, p in model.named_parameters() for one in _not_kept(name, p)]:
        raise ConfigError(*problems)
    return model


def _not_kept(name: str, parameter: nn.Parameter) -> Iterator[Problem]:
    """Yield a problem for each trait of a parameter that is lost when an engine rebuilds it."""
    kind = type(parameter)
    dtype = f"{name} is a parameter of {parameter.dtype}"
    if not (parameter.is_floating_point() or parameter.is_complex()):
        yield Problem("model", dtype, "floating point", "Make it a buffer: register_buffer.")
    elif parameter.dtype != torch.float32:
        complex_numbers = "Complex numbers fit two real ones (torch.view_as_complex)"
        hint = f"{complex_numbers}; bf16.enabled computes in bfloat16."
        yield Problem("model", dtype, "float32", hint)
    if kind is not nn.Parameter:
        actual = f"{name} is a {kind.__module__}.{kind.__qualname__}"
        yield Problem("model", actual, "an nn.Parameter of known size")
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        hint = "Scale what comes out in the forward pass, or use a hook of the module."
        yield Problem("model", f"{name} has a hook of its own", "none: it would never run", hint)
    if own := vars(parameter).keys() - UNUSED:
        expected = "none: keep it on the module, which has it in every layout"
        yield Problem("model", f"{name} has an attribute {min(own)}", expected)


def _blocks(model: nn.Module, pattern: str | None) -> tuple[str, ...]:
    children = [name for name, _ in model.named_children()]
    if pattern is None:
        return tuple(children) if isinstance(model, nn.Sequential) else _repeated(model)
    wanted = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
    matches = filter(None, (wanted.fullmatch(name) for name, _ in model.named_modules()))
    numbers = {match[0]: [int(number) for number in match.groups()] for match in matches}
    if not numbers:
        actual = f"no module of {type(model).__name__} is named {pattern}"
        expected = f"a pattern of names below {', '.join(children)}, such as layers.*"
        raise ConfigError(Problem("blocks", actual, expected))
    return tuple(sorted(numbers, key=lambda name: numbers[name]))


def _repeated(model: nn.Module) -> tuple[str, ...]:
    """Find the blocks without a pattern, as the members of module lists that have the same class.

    Candidates are the classes of at least two members that have children. The class with the most
    parameters in total is chosen, and all its members are blocks, in order, except those inside
    another. The probe `block_order` checks later whether they run in this order.
    """
    lists = nn.ModuleList | nn.Sequential
    kinds: dict[type, dict[str, int]] = {}
    for name, inner in model.named_modules():
        for key, member in inner.named_children() if isinstance(inner, lists) else ():
            if not isinstance(member, lists) and any(member.children()):
                size = sum(parameter.numel() for parameter in member.parameters())
                kinds.setdefault(type(member), {})[f"{name}.{key}".lstrip(".")] = size
    alike = [lengths for lengths in kinds.values() if len(lengths) > 1]
    best = max(alike, key=lambda lengths: sum(lengths.values()), default=dict[str, int]())
    return tuple(outermost(list(best)))


def _initialise(root: nn.Module, name: str) -> None:
    """Initialise a module by its own `reset_parameters`, unless all its values were read."""
    module = root.get_submodule(name)
    own = (*module._parameters.values(), *module._buffers.values())
    fresh = any(tensor is not None and not has_values(tensor) for tensor in own)
    if fresh and callable(reset := getattr(module, "reset_parameters", None)):
        reset()


def class_of(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def config_of(model: nn.Module) -> Json:
    """Return the architecture for comparison: the class, and the shapes of its state dict."""
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    return {"module": class_of(model), "shapes": shapes}


def _save_config(model: nn.Module, folder: Path | str, dtype: torch.dtype | None) -> None:
    """Write `module.json`: the class of the module whose state dict is in the folder."""
    content = {"module": class_of(model)}
    (Path(folder) / "module.json").write_text(json.dumps(content, indent=2) + "\n")


def running_norms(root: nn.Module) -> dict[str, _NormBase]:
    """Return the batch and instance norms that keep running statistics, by name."""
    norms = {name: part for name, part in root.named_modules() if isinstance(part, _NormBase)}
    return {name: norm for name, norm in norms.items() if norm.running_mean is not None}
