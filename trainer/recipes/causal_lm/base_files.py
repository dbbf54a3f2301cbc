"""The base that a config names: what a run reads of it against transformers' `from_pretrained`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from trainer.certify.finding import CheckResult
from trainer.errors import refused
from trainer.models import huggingface
from trainer.models.finetuning.quantised.quantised_base import quantised_weights
from trainer.models.finetuning.quantised.quantised_experts import quantised
from trainer.models.finetuning.quantised.quantised_files import format_of
from trainer.models.language import model_config
from trainer.models.language.auto_class import auto_class
from trainer.models.pretrained.files import PICKLES, SAFETENSORS
from trainer.models.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from trainer.config.sections.adapter import QuantizeSection
    from trainer.config.sections.model_and_data import ModelSection

CHECK = "base"
MOST_VALUES = 4_000_000_000
"""The most values that are read: 8 GB in 16 bits."""


class BaseFiles(NamedTuple):
    """The comparison of a base's values, or why there is none."""

    finding: CheckResult | None = None
    notes: tuple[str, ...] = ()
    untied: bool = False
    """True if the files untie what the config ties."""


def compare_base(
    architecture: PreTrainedConfig,
    options: ModelSection,
    quantize: QuantizeSection | None = None,
) -> BaseFiles:
    """Compare each tensor that a run reads of a local base with what transformers loads.

    Of a large base, the first blocks are compared. If a run is to `quantize` it, a note says how
    far that moves the values. Raises ConfigError for a base that cannot be read.
    """
    if not options.name_or_path:
        return BaseFiles()
    folder = Path(options.name_or_path)
    if not any((folder / name).is_file() for name in (*SAFETENSORS, *PICKLES)):
        note = f"the weights of {options.name_or_path} are not in a local folder"
        return BaseFiles(notes=(f"{note}: how they are read is not compared",))
    ties = _ties(architecture)
    spec = huggingface.spec_of(architecture, options)
    untied = ties and not _ties(architecture)
    layers = _affordable(spec)
    if layers is None:
        note = f"{options.name_or_path} is too large here: how it is read is not compared"
        return BaseFiles(None, (note,), untied)
    theirs = _loaded(options, layers, len(spec.blocks))
    finding = _worst(spec, theirs)
    notes = []
    if layers < len(spec.blocks):
        notes.append(f"of the base, the first {layers} of {len(spec.blocks)} blocks are compared")
    if quantize is not None:
        notes.append(_quantising_error(spec, theirs, quantize))
    spec.building.weights.release()
    return BaseFiles(finding, tuple(notes), untied)


def _ties(architecture: PreTrainedConfig) -> bool:
    """Return what the text's config says of ties; some families do not state them."""
    return bool(getattr(architecture.get_text_config(decoder=True), "tie_word_embeddings", False))


def _affordable(spec: ModelSpec) -> int | None:
    """Return how many blocks can be read with all that is outside of them; None: not even one."""
    model = spec.build()
    sizes = [_size(model.get_submodule(block)) for block in spec.blocks]
    room = MOST_VALUES - (_size(model) - sum(sizes))
    layers = 0
    while layers < len(sizes) and sum(sizes[: layers + 1]) <= room:
        layers += 1
    return None if layers == 0 and (sizes or room < 0) else layers


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _loaded(options: ModelSection, layers: int, blocks: int) -> dict[str, torch.Tensor]:
    """Load the first blocks by transformers, in the dtype that the base states."""
    config = model_config.pretrained_blocks(options, layers, blocks)
    more = {"trust_remote_code": options.trust_remote_code, "revision": options.revision}
    place = f"trainer.model.name_or_path: {options.name_or_path}"
    # network, memory and value errors alike
    with refused(place, "a base that transformers loads", named=True):
        model = auto_class(config).from_pretrained(
            options.name_or_path, config=config, dtype="auto", **more
        )
    return model.state_dict()  # type: ignore[no-any-return]


def _worst(spec: ModelSpec, theirs: dict[str, torch.Tensor]) -> CheckResult:
    """Return the largest difference of a tensor, relative to its largest value; 0 is expected."""
    worst = CheckResult(CHECK, 0, 0.0, 0.0, f"({len(theirs)} tensors)")
    for name, value in theirs.items():
        error = _error(spec.building.weights.read(spec.tied.get(name, name)), value)
        if error > worst.error:
            worst = CheckResult(CHECK, 0, error, 0.0, name)
    return worst


def _quantising_error(
    spec: ModelSpec, values: Mapping[str, torch.Tensor], quantize: QuantizeSection
) -> str:
    """Say how far the quantised values are from those of the base, relative to their size."""
    model = spec.build().requires_grad_(False)
    format = format_of(quantize)
    stored = quantised_weights(quantised(model, spec.blocks, format))
    forms = {name: weight.form for name, weight in stored.items() if name in values}
    moved = 0.0
    size = 0.0
    shares = dict[str, float]()
    for name, form in forms.items():
        value = values[name].float()
        rounding = form.dequantised(form.stored(value), torch.float32) - value
        own_moved = float(rounding.double().square().sum())
        own_size = float(value.double().square().sum())
        shares[name] = math.sqrt(own_moved / max(own_size, 1e-300))
        moved += own_moved
        size += own_size
    if not shares:
        return "no weight of the base is quantised"
    whole = math.sqrt(moved / max(size, 1e-300))
    worst = max(shares, key=lambda name: shares[name])
    return (
        f"{format.name} moves {len(shares)} tensors of the base by {whole:.1%} of their size (root "
        f"mean square), most {worst}: {shares[worst]:.1%}"
    )


def _error(ours: torch.Tensor | None, theirs: torch.Tensor) -> float:
    if ours is None or ours.shape != theirs.shape:
        return float("inf")
    ours = ours.to(theirs.dtype)
    if torch.equal(ours, theirs):
        return 0.0
    difference = (ours.double() - theirs.double()).abs().max()
    error = float(difference / theirs.double().abs().max().clamp(min=1e-30))
    return error if error > 0 else float("inf")  # NaN
