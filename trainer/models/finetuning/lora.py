"""Low-rank adapters (LoRA, arXiv 2106.09685) by PEFT: from a model's spec to that of the model with
adapters.

The base is read under its own names and held as it is; files and checkpoints have the adapters
alone, under the names that PEFT gives them. Only linear layers within the blocks are adapted: so
blocks stay what engines cut, shard and seed.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

from trainer.config.grammar import show
from trainer.errors import ConfigError, Problem, listed, named_line
from trainer.models.finetuning.lora_folder import STEM, Started, completed
from trainer.models.materialise import materialise
from trainer.models.names import aliases_of, pattern_of
from trainer.models.spec import WHOLE, ModelSpec, NoWeights, Weights
from trainer.models.weights import fingerprint

ADAPTER = "default"
"""PEFT's name for a single adapter, which its files leave out."""
LINEAR = (nn.Linear, Conv1D)


class _BaseWeights:
    """Weights of the base under the names that tensors have inside adapters; None for what the
    adapter adds.
    """

    def __init__(self, base: Weights, *, lasting: bool) -> None:
        """Keep them in memory if `lasting`: they are read again after the engine is built."""
        self._base, self._lasting = base, lasting
        self.started: Started | None = None
        """The adapter to start from, if any: tensors in `published` are read from it, under its
        names for them.
        """
        self.published: Mapping[str, str] = {}

    def read(self, name: str) -> torch.Tensor | None:
        if self.started is not None and name in self.published:
            return self.started.read(self.published[name])
        if is_adapters(name):
            return None
        value = self._base.read(base_name(name))
        # the copy that is trained and the original that is not may not share memory
        return (
            value.clone() if value is not None and f".modules_to_save.{ADAPTER}." in name else value
        )

    def release(self) -> None:
        if not self._lasting:
            self._base.release()


class _MergedWeights:
    """Weights of the base with an adapter's merged into them, a tensor at a time, in float32; in
    the base's dtype.
    """

    def __init__(
        self, base: Weights, model: nn.Module, folder: Path, published: dict[str, str]
    ) -> None:
        self._base, self._file = base, folder / f"{STEM}.safetensors"
        self._copies = {
            base_name(ours): theirs for ours, theirs in published.items() if not is_adapters(ours)
        }
        self._layers = {
            f"{name}.weight": (name, module)
            for name, module in (
                (base_name(f"{name}.")[:-1], m) for name, m in model.named_modules()
            )
            if hasattr(module, "lora_A")
        }

    def read(self, name: str) -> torch.Tensor | None:
        value = self._base.read(name)
        if value is None:
            return None
        with safe_open(self._file, "pt") as file:
            if name in self._copies:
                return file.get_tensor(self._copies[name]).to(value.dtype)  # type: ignore[no-any-return]
            if name not in self._layers:
                return value
            prefix, layer = self._layers[name]
            names = [key for key in file.keys() if f".{prefix}.lora_" in key]  # noqa: SIM118
            part = {key: file.get_tensor(key).float() for key in names}
        a, b, magnitude = (
            _ending(part, end) for end in ("lora_A.weight", "lora_B.weight", "magnitude_vector")
        )
        assert a is not None and b is not None
        turned = isinstance(layer.base_layer, Conv1D)
        merged = (value.T if turned else value).float() + layer.scaling[ADAPTER] * (b @ a)
        if magnitude is not None:
            merged *= (magnitude / torch.linalg.norm(merged, dim=1))[:, None]
        return (merged.T.contiguous() if turned else merged).to(value.dtype)

    def release(self) -> None: ...


def _ending(tensors: dict[str, torch.Tensor], end: str) -> torch.Tensor | None:
    return next((tensor for name, tensor in tensors.items() if name.endswith(end)), None)


class _MadeUp:
    """Weights of a tiny copy's base: the same for every seed, and rounded to bfloat16, as a
    folder's may be.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def read(self, name: str) -> torch.Tensor | None:
        value = self._values.get(name)
        return None if value is None else value.detach().clone()

    def release(self) -> None: ...

    @cached_property
    def _values(self) -> dict[str, torch.Tensor]:
        model = self._spec.build()
        materialise(model, self._spec, seed=0, device=torch.device("cpu"), dtype=torch.float32)
        named = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        return {name: tensor.detach().bfloat16().to(tensor.dtype) for name, tensor in named}


def is_adapters(name: str) -> bool:
    """Return True if a parameter or module belongs to an adapter, and not to the base or a copy of
    a part of it.
    """
    return any(part.startswith("lora_") for part in name.split("."))


def base_name(name: str) -> str:
    """Return the name that a tensor of the base has without adapters around it."""
    for added in (".base_layer", f".modules_to_save.{ADAPTER}", ".original_module"):
        name = name.replace(added, "")
    return name


def adapted(spec: ModelSpec, options: Any) -> ModelSpec:
    """Return the spec of the model with the adapters of `trainer.adapter`; the spec itself if
    `options` is None.

    Raises ConfigError without PEFT, and for targets that the model does not have.
    """
    if options is None:
        return spec
    _require_peft()
    options, model = completed(options), spec.build()
    targets = _targets(model, spec, options.targets)
    _check_saved(model, spec, options.modules_to_save, targets)
    if options.targets == "all-linear":
        spec = replace(spec, notes=(*spec.notes, *_passed_over(model, spec)))
    patterns = {pattern_of(name) for name in targets}

    @cache
    def tiny_copy(layers: int = 3, split: int = 1) -> ModelSpec:
        assert spec.tiny.copy is not None
        small = spec.tiny.copy(layers, split)
        if isinstance(small.weights, NoWeights):
            small = replace(small, weights=_MadeUp(small))
        names = [name for name, _ in small.build().named_modules() if pattern_of(name) in patterns]
        return _described(small, options, names)

    named = {base_name(name) for name, _ in model.named_parameters()}
    described = _described(spec, options, targets)
    base = fingerprint(spec.weights, sorted(named)) if spec.tiny.copy else ""
    if options.path is not None:
        described = _started(described, Path(options.path))
    copies = replace(spec.tiny, copy=tiny_copy if spec.tiny.copy else None)
    return replace(described, config={**described.config, "base": base}, tiny=copies)


def _started(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Return the spec with the values of the adapter in `folder`. Raises ConfigError if its modules
    differ.
    """
    sizes = {
        name: tuple(p.shape) for name, p in spec.build().named_parameters(remove_duplicate=False)
    }
    assert isinstance(spec.weights, _BaseWeights)
    spec.weights.published = spec.files.published
    spec.weights.started = Started(
        folder, {theirs: sizes[ours] for ours, theirs in spec.files.published.items()}
    )
    return replace(
        spec, notes=(*spec.notes, f"the adapter starts as that of {folder} (trainer.adapter.path)")
    )


def _described(spec: ModelSpec, options: Any, targets: Sequence[str]) -> ModelSpec:
    """Return the spec with adapters in the modules `targets`."""
    config = _peft_config(spec, options, targets)
    whole = spec.build()

    def build() -> nn.Module:
        return _injected(spec.build(), config)

    def initialise(root: nn.Module, name: str) -> None:
        _initialise(root, name, spec)

    try:
        model = build()
    except (ValueError, TypeError) as error:
        raise ConfigError(
            Problem("trainer.adapter", named_line(error), "an adapter that PEFT makes")
        ) from error
    named = dict(model.named_parameters(remove_duplicate=False))
    held = {name: p.numel() for name, p in model.named_parameters() if not p.requires_grad}
    published = _published(model, named)
    head = whole.get_output_embeddings()  # type: ignore[operator]
    plain = spec.language.plain_head and type(model.get_output_embeddings()) is type(head)  # type: ignore[operator]
    learned = sum(p.numel() for p in model.parameters() if p.requires_grad)

    def merged(folder: Path) -> ModelSpec:
        return replace(spec, weights=_MergedWeights(spec.weights, model, folder, published))

    added = (
        f"LoRA of rank {options.r} in {len(targets)} layers: {learned / 1e6:,.2f} M values "
        "are "
        "learned"
    )
    return replace(
        spec,
        build=build,
        initialise=initialise,
        parameters=sum(p.numel() for p in model.parameters()),
        language=replace(spec.language, plain_head=plain, tensor_plan=_tensor_plan(spec, targets)),
        tied=aliases_of(model),
        weights=_BaseWeights(spec.weights, lasting=options.merge),
        constructed=lambda name: spec.constructed(base_name(name)),
        training=replace(
            spec.training,
            frozen=held,
            fresh=frozenset(name for name in named if is_adapters(name)),
            unsaved=frozenset({*named, *dict(model.named_buffers())} - published.keys()),
        ),
        files=replace(
            spec.files,
            published=published,
            merged=merged if options.merge else None,
            stem=STEM,
            opens="peft.AutoPeftModelForCausalLM.from_pretrained",
            save_config=lambda folder, dtype: _save_config(config, folder),
        ),
        notes=(
            *spec.notes,
            f"{added}, the other {sum(held.values()) / 1e6:,.1f} M of {spec.name} stay as they are",
        ),
        config={**spec.config, "adapter": _settings(options, config)},
    )


def _require_peft() -> None:
    try:
        import peft  # noqa: F401
    except ImportError as error:
        mend = "Install it: pip install 'meshloom[lora]'"
        raise ConfigError(
            Problem("trainer.adapter", f"no PEFT here ({error})", "the package peft", mend)
        ) from error


# The choice of modules


def _targets(model: nn.Module, spec: ModelSpec, wanted: str | Sequence[str]) -> list[str]:
    """Return the linear layers of blocks that `wanted` selects. Raises ConfigError if a target
    selects none.
    """
    linear = [name for name, module in _in_blocks(model, spec) if type(module) in LINEAR]
    if isinstance(wanted, str):
        if not linear:
            raise ConfigError(
                Problem(
                    "trainer.adapter.targets",
                    "no linear layer",
                    "a model with blocks that have one",
                )
            )
        return linear if wanted == "all-linear" else _matched(model, wanted, linear)
    found = {target: [name for name in linear if _means(target, name)] for target in wanted}
    wrong = [
        _no_target(f"trainer.adapter.targets[{index}]", target, model, linear)
        for index, target in enumerate(wanted)
        if not found[target]
    ]
    if wrong or not wanted:
        raise ConfigError(*(wrong or [_no_target("trainer.adapter.targets", "", model, linear)]))
    chosen = {name for names in found.values() for name in names}
    return [name for name in linear if name in chosen]


def _matched(model: nn.Module, pattern: str, linear: Sequence[str]) -> list[str]:
    """Return the modules whose whole name matches, as in PEFT. Raises ConfigError for one not in
    `linear`.
    """
    found = [name for name, module in model.named_modules() if name and re.fullmatch(pattern, name)]
    if not found or (others := [name for name in found if name not in linear]):
        seen = f"{show(pattern)} matches {listed(others) if found else 'no module'}"
        short = listed(list(dict.fromkeys(map(pattern_of, linear))), 12)
        raise ConfigError(
            Problem("trainer.adapter.targets", seen, f"linear layers of the blocks alone: {short}")
        )
    return found


def _passed_over(model: nn.Module, spec: ModelSpec) -> Iterator[str]:
    """Yield a line on matrices of the blocks that "all-linear" leaves out: fused experts, routers,
    convolutions.
    """
    found = {
        f"{name}.{key}": parameter.numel()
        for name, module in _in_blocks(model, spec)
        if type(module) not in LINEAR
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 1
    }
    if found:
        shown = listed(list(dict.fromkeys(map(pattern_of, found))))
        yield (
            f'trainer.adapter.targets "all-linear" leaves {len(found)} matrices '
            f"({sum(found.values()) / 1e6:,.1f} M "
            f"values) without an adapter, as they are in no linear layer: {shown}"
        )


def _means(target: str, name: str) -> bool:
    """Return True if `target` is the name, or its end after a dot, as in PEFT."""
    return name == target or name.endswith(f".{target}")


def _in_blocks(model: nn.Module, spec: ModelSpec) -> Iterator[tuple[str, nn.Module]]:
    """Yield the named modules inside the blocks; all modules where no blocks are known."""
    inside = tuple(f"{block}." for block in spec.blocks)
    return (
        (name, module)
        for name, module in model.named_modules()
        if not inside or name.startswith(inside)
    )


def _no_target(place: str, target: str, model: nn.Module, linear: Sequence[str]) -> Problem:
    short = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    known = [name for name, _ in model.named_modules() if target and _means(target, name)]
    seen = f'"{target}" names no linear layer of a block'
    if known:
        seen += f" ({known[0]} is {type(model.get_submodule(known[0])).__name__})"
    longer = dict.fromkeys(pattern_of(name).rpartition(".*.")[2] for name in linear)
    near = get_close_matches(target[:100], [*short, *longer], n=2, cutoff=0.5)
    mend = "Did you mean " + " or ".join(f'"{name}"' for name in near) + "?" if near else ""
    if known and not near:
        mend = "trainer.adapter.modules_to_save trains a module as a whole."
    return Problem(place, seen, f'"all-linear", or some of {listed(short, 12)}', mend)


def _check_saved(
    model: nn.Module, spec: ModelSpec, wanted: Sequence[str], targets: Sequence[str]
) -> None:
    """Raise ConfigError for a module that does not exist, or that can't be trained with the
    adapters.
    """
    modules, tied = dict(model.named_modules()), {*spec.tied, *spec.tied.values()}
    problems = []
    for index, name in enumerate(wanted):
        place, found = (
            f"trainer.adapter.modules_to_save[{index}]",
            [m for m in modules if m.endswith(name) and name],
        )
        owners = [m for m in found if any(True for _ in modules[m].parameters())]
        inside = [t for t in targets for m in found if f"{t}.".startswith(f"{m}.")]
        shared = [n for n in tied for m in found if n.startswith(f"{m}.")]
        if not owners:
            near = get_close_matches(
                name, dict.fromkeys(m.rpartition(".")[2] for m in modules if m), n=2
            )
            mend = (
                "Did you mean " + " or ".join(f'"{other}"' for other in near) + "?" if near else ""
            )
            problems.append(
                Problem(place, f'"{name}" is no module with parameters', "the name of one", mend)
            )
        elif inside:
            problems.append(
                Problem(
                    place, f'"{name}" holds {inside[0]}, which has an adapter', "one or the other"
                )
            )
        elif shared:
            seen = f'"{name}" has {sorted(shared)[0]}, which is tied'
            mend = (
                "Trained by itself it would part from the other: no merged model could have both."
            )
            problems.append(Problem(place, seen, "a module that shares no parameter", mend))
    if problems:
        raise ConfigError(*problems)


# Through PEFT


def _peft_config(spec: ModelSpec, options: Any, targets: Sequence[str]) -> Any:
    from peft import LoraConfig

    model, folder = spec.build(), Path(spec.name)
    return LoraConfig(
        r=options.r,
        lora_alpha=int(options.alpha) if float(options.alpha).is_integer() else options.alpha,
        lora_dropout=options.dropout,
        target_modules=list(targets),
        bias=options.bias,
        modules_to_save=list(options.modules_to_save) or None,
        use_rslora=options.rslora,
        use_dora=options.dora,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(folder.resolve()) if folder.is_dir() else spec.name,
        revision=None if folder.is_dir() else spec.files.revision,
    )


def _injected(model: nn.Module, config: Any) -> nn.Module:
    """Put adapters into a model on the meta device, in place; PEFT decides which parameters require
    gradients.
    """
    from peft import inject_adapter_in_model

    with torch.device("meta"):
        return inject_adapter_in_model(
            copy.deepcopy(config), model, ADAPTER, low_cpu_mem_usage=True
        )


def _published(model: nn.Module, named: dict[str, nn.Parameter]) -> dict[str, str]:
    """Map our names of the tensors that PEFT saves to the names in its files, by PEFT's own
    rule.
    """
    from peft import get_peft_model_state_dict

    ours = {id(parameter): name for name, parameter in named.items()}
    found = get_peft_model_state_dict(
        model, state_dict=dict(named), adapter_name=ADAPTER, save_embedding_layers=False
    )
    return {ours[id(value)]: f"base_model.model.{name}" for name, value in found.items()}


def _settings(options: Any, config: Any) -> dict[str, Any]:
    """Return the settings that must be the same when a run resumes from a checkpoint."""
    same = {key: getattr(options, key) for key in ("type", "r", "alpha", "bias", "rslora", "dora")}
    return {
        **same,
        "targets": sorted(config.target_modules),
        "modules_to_save": list(options.modules_to_save),
    }


def _save_config(config: Any, folder: Path) -> None:
    saved = copy.deepcopy(config)
    saved.inference_mode = True
    saved.target_modules = sorted(config.target_modules)
    saved.save_pretrained(str(folder))


def _initialise(root: nn.Module, name: str, base: ModelSpec) -> None:
    """Initialise one module: an adapter's by PEFT's rule, any other by the base's own."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    module = root.get_submodule(name)
    if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper | nn.ModuleDict):
        return
    if not is_adapters(name):
        return base.initialise(root, name)
    # tensors read from an adapter's folder have this mark, which PyTorch's own initialisers ignore
    own = {
        k: p
        for k, p in module.named_parameters(recurse=False)
        if not getattr(p, "_is_hf_initialized", False)
    }
    if not own:
        return
    kind = next(part for part in name.split(".") if part.startswith("lora_"))
    if kind == "lora_A":
        nn.init.kaiming_uniform_(own["weight"], a=math.sqrt(5))
    elif kind == "lora_B":
        nn.init.zeros_(own["weight"])
    else:  # DoRA's magnitude is that of each of the base's rows (arXiv 2402.09353)
        layer = root.get_submodule(f"{name.partition('.lora_')[0]}.base_layer")
        rows = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
        own["weight"].copy_(torch.linalg.norm(rows.float(), dim=1))  # type: ignore[arg-type]


def _tensor_plan(spec: ModelSpec, targets: Sequence[str]) -> dict[str, str]:
    """Return the tensor plan of the base with the adapter's: B or A is split along the dimension
    its layer is split on.

    The other matrix is whole, takes and gives whole vectors, and so has its whole gradient on every
    rank.
    """
    plan = {}
    for name, style in spec.language.tensor_plan.items():
        if name not in targets:
            plan[name] = style
            continue
        rows = style.startswith("rowwise")
        plan[f"{name}.base_layer"] = style
        plan[f"{name}.lora_A.{ADAPTER}"] = style if rows else WHOLE
        plan[f"{name}.lora_B.{ADAPTER}"] = WHOLE if rows else style
    return plan
