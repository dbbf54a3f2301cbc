"""The adapters that PEFT opens from a config and a file, compared with those that are trained.

In many mixtures of experts, PEFT 0.19 to 0.21 take `gate_proj`, `up_proj` and `down_proj` as names
of the stacked experts. A linear layer of that name, in a dense or a shared MLP, then gets no
adapter from `target_modules`. Such layers are saved as `target_parameters`: the same tensors, under
the same names.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn

from trainer.errors import ConfigError, DiskError, Problem, listed, named_line, refused
from trainer.models.finetuning.lora_experts import computed_by_experts, stacks_among
from trainer.models.finetuning.lora_folder import CONFIG, PREFIX, STEM, WEIGHT
from trainer.models.finetuning.lora_targets import LINEAR
from trainer.models.finetuning.lora_weights import ADAPTER, adapted_weight
from trainer.models.pretrained.weights import SafetensorsFolder

if TYPE_CHECKING:
    from peft import LoraConfig

_NONE = ["no module has this name"]

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of tensors, by their names in a file."""


class Adapters(NamedTuple):
    """The modules that have an adapter, and the tensors that are its values."""

    scalings: Mapping[str, float]
    """The name of a module with an adapter -> the factor of the adapter's output."""
    tensors: Mapping[str, str]
    """The name of a trained parameter -> the name of its tensor in a file."""

    def difference(self, other: Adapters) -> str:
        """Describe how `other` differs; empty if it does not."""
        parts = []
        for own, theirs in ((self.scalings, other.scalings), (self.tensors, other.tensors)):
            if lost := own.keys() - theirs.keys():
                parts.append(f"without {len(lost)} ({listed(sorted(lost), 2)})")
            if more := theirs.keys() - own.keys():
                parts.append(f"with {len(more)} more ({listed(sorted(more), 2)})")
            changed = [name for name in own if theirs.get(name, own[name]) != own[name]]  # type: ignore[attr-defined]
            if changed:
                parts.append(f"with another factor or tensor for {listed(sorted(changed), 2)}")
            if parts:
                break
        return ", ".join(parts)


def injected(model: nn.Module, config: LoraConfig, targets: Sequence[str]) -> nn.Module:
    """Put adapters into exactly the `targets` of a model on the meta device, by PEFT.

    They are linear layers and stacks of experts. Raises whatever PEFT raises for a config that it
    does not accept.
    """
    from peft import inject_adapter_in_model

    stacks = stacks_among(model, targets)
    # names of tensors give PEFT the exact modules; names in a config it may read as other modules
    own = replace(copy.deepcopy(config), target_modules=_NONE)
    names = {f"{name}.lora_A.weight": torch.empty(0) for name in targets if name not in stacks}
    with torch.device("meta"), _silent():
        if names:
            model = inject_adapter_in_model(own, model, ADAPTER, state_dict=names)
        if stacks:
            kept = None if names else config.modules_to_save
            on_stacks = replace(own, target_parameters=stacks, modules_to_save=kept)
            model = inject_adapter_in_model(on_stacks, model, ADAPTER)
            computed_by_experts(model)
    return model


def scalings_of(model: nn.Module, prefix: str = "") -> dict[str, float]:
    """Map each module with an adapter, without `prefix`, to the factor of the adapter's output."""
    carriers = ((name, module) for name, module in model.named_modules() if _carries(module))
    return {
        _target(name, of).removeprefix(prefix): float(of.scaling[ADAPTER]) for name, of in carriers
    }  # type: ignore[index]


def adapted_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield PEFT's linear layers whose adapter is added to what the layer gives, and no more."""
    for module in model.modules():
        of_layer = _carries(module) and not hasattr(module, "parameter_name")
        if of_layer and ADAPTER not in module.lora_variant:  # type: ignore[operator]
            yield module


def _target(name: str, carrier: nn.Module) -> str:
    """Return the name of the linear layer or stack that a module with an adapter adapts."""
    weight = adapted_weight(name, carrier)
    by_parameter = hasattr(carrier, "parameter_name")
    if by_parameter and not isinstance(carrier.get_base_layer(), LINEAR):  # type: ignore[operator]
        return weight
    return weight.removesuffix(WEIGHT)


def _carries(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and ADAPTER in module.lora_A  # type: ignore[operator]


def opened(build: Callable[[], nn.Module], config: LoraConfig, shapes: Shapes) -> Adapters:
    """Return the adapters that PEFT opens from a config and a file with tensors of these `shapes`.

    `build` makes the base on the meta device. Raises whatever PEFT raises.
    """
    from peft import get_peft_model, set_peft_model_state_dict

    # each tensor is filled with its own number, which shows where PEFT puts it
    names = sorted(shapes)
    renamed = dict[str, str]()
    tensors = {
        name: torch.tensor(float(index)).expand(shapes[name]) for index, name in enumerate(names)
    }

    def note(module: nn.Module, loaded: Mapping[str, torch.Tensor], *_: object) -> None:
        for name, value in loaded.items():
            renamed[name.removeprefix(PREFIX)] = names[int(value.flatten()[0])]

    with _silent():
        with torch.device("meta"):
            model: nn.Module = get_peft_model(build(), copy.deepcopy(config))  # type: ignore[arg-type]
        model.register_load_state_dict_pre_hook(note)
        result: Any = set_peft_model_state_dict(model, tensors, ADAPTER, low_cpu_mem_usage=True)
    for name in result.unexpected_keys:
        renamed.pop(name.removeprefix(PREFIX), None)
    return Adapters(scalings_of(model, PREFIX), renamed)


def loadable(
    build: Callable[[], nn.Module],
    config: LoraConfig,
    targets: Sequence[str],
    trained: Adapters,
    shapes: Shapes,
) -> Any:
    """Return the config to save: PEFT opens from it exactly the adapters that are trained.

    Raises ConfigError if there is none.
    """

    def difference(of: LoraConfig) -> str:
        try:
            return trained.difference(opened(build, of, shapes))
        except Exception as error:  # whatever PEFT raises for a config or a model
            return f"not at all ({named_line(error, 120)})"

    stacks = stacks_among(build(), targets)
    layers = [name for name in targets if name not in stacks]
    plain = replace(
        config, target_modules=layers, target_parameters=stacks or None, inference_mode=True
    )
    if stacks:
        plain = replace(plain, lora_dropout=0.0)  # as below
    if not difference(plain):
        return plain
    last = {name: name.rpartition(".")[2] for name in layers}
    lost = {
        word
        for word in dict.fromkeys(last.values())
        if _misread(build, config, [name for name in layers if last[name] == word])
    }
    by_parameter = replace(
        plain,
        target_modules=[name for name in layers if last[name] not in lost],
        target_parameters=[*stacks, *(f"{n}{WEIGHT}" for n in layers if last[n] in lost)],
        lora_dropout=0.0,  # PEFT supports none for parameters, and inference has none
    )
    if reason := difference(by_parameter):
        import peft

        actual = f"PEFT {peft.__version__} would open the adapter {reason}"
        expected = "one that it opens with the matrices that are trained"
        hint = "Leave these out of trainer.adapter.targets, or take another version of PEFT"
        if config.use_dora and lost:
            hint = f"Set trainer.adapter.dora to false, or leave out {listed(sorted(lost))}"
        raise ConfigError(Problem("trainer.adapter", actual, expected, hint))
    return by_parameter


def _misread(build: Callable[[], nn.Module], config: LoraConfig, names: Sequence[str]) -> bool:
    """Return True unless PEFT adapts exactly the modules `names` if a config targets them alone."""
    try:
        with _silent(), torch.device("meta"):
            from peft import inject_adapter_in_model

            own = replace(copy.deepcopy(config), target_modules=list(names), modules_to_save=None)
            model = inject_adapter_in_model(own, build(), ADAPTER)
    except Exception:  # whatever PEFT raises for names that it reads as others
        return True
    return scalings_of(model).keys() != set(names)


def check_folder(folder: Path, config: LoraConfig, shapes: Shapes) -> None:
    """Raise DiskError unless a folder has this config, and a file with exactly these tensors.

    From these, PEFT opens the adapters that are trained: `loadable` has checked it.
    """
    from peft import LoraConfig

    place = f"{folder / STEM}.safetensors"
    expected = "the adapter that is trained"
    with refused(place, expected, OSError, SafetensorError, raises=DiskError):
        weights = SafetensorsFolder(folder, STEM)
        shapes_there = {name: tuple(weights[name].shape) for name in weights.names()}
    if odd := [
        name for name in {**shapes_there, **shapes} if shapes_there.get(name) != shapes.get(name)
    ]:
        actual = f"{len(shapes_there)} tensors, with differences in {listed(sorted(odd), 2)}"
        raise DiskError(Problem(place, actual, f"the {len(shapes)} of {expected}"))
    place = str(folder / CONFIG)
    with refused(place, expected, OSError, ValueError, TypeError, raises=DiskError):
        saved = LoraConfig.from_pretrained(str(folder)).to_dict()
        own = config.to_dict()
    if odd := [key for key in own if _sorted(saved.get(key)) != _sorted(own[key])]:
        raise DiskError(Problem(place, f"another {listed(odd)}", f"that of {expected}"))


def _sorted(value: object) -> object:
    """Sort names, of which PEFT makes sets; return any other value as it is."""
    return sorted(value) if isinstance(value, set | list | tuple) else value


@contextmanager
def _silent() -> Iterator[None]:
    """Silence PEFT's warnings, as this module checks what they are about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
