"""Quantised bases: dequantised as they are read, or unsupported.

A code is a stored entry that is not a number itself; with its scale it gives one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.errors import ConfigError, Problem, first_line, refused
from trainer.models.pretrained.files import StoredTensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers.quantizers.base import HfQuantizer

KEY = "quantization_config"
METHODS = ("fp8", "mxfp8", "mxfp4", "compressed-tensors")
SUPPORTED = f"16 or 32 bits, or quantised by {', '.join(METHODS)}"
COMPANION = re.compile(
    r"(^|_|\.)(scale|scales|scale_inv|zero_point|zeros|qzeros|qweight|packed|blocks|g_idx|absmax"
    r"|nested_absmax|quant_map|quant_state|codebook|amax|SCB|perm|qscale)(_|\.|$|\d)"
)
"""The names of tensors that quantisation libraries store beside a weight, or in its place."""
ACTIVATIONS = re.compile(
    r"(^|\.)(input|output|activation|kv|[qkv])(_global)?_(scale|zero_point)(_inv)?$"
)
"""The scales of activations and of keys and values in a cache: no part of a weight's value."""
SCALES = re.compile(r"(?<!global)_scales?(_inv)?$")
"""The patterns of the scales by which transformers multiplies codes."""
VALUES = ("weight", "_packed", "_blocks")
"""The ends of the patterns of the codes themselves."""
CODES = {getattr(torch, name) for name in dir(torch) if name.startswith(("float8", "float4"))}
"""Floating-point dtypes of fewer than 16 bits, in which only codes are stored."""


def stored_config(config: PreTrainedConfig) -> Mapping[str, object] | None:
    """Return the `quantization_config` of a config, or else of its text part, or None."""
    text = config.get_text_config(decoder=True)
    stored = getattr(config, KEY, None) or getattr(text, KEY, None)
    return stored if stored is None or isinstance(stored, Mapping) else stored.to_dict()


def remove_config(config: PreTrainedConfig) -> None:
    """Remove the `quantization_config`, in place: what is built and saved is not quantised."""
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, KEY):
            delattr(part, KEY)


def dequantiser(values: Mapping[str, object] | None, place: str) -> HfQuantizer | None:
    """Return transformers' quantiser that dequantises each stored weight; None if `values` is None.

    `values`: a base's `quantization_config`. Raises ConfigError for a method whose weights
    transformers cannot dequantise as it reads them, and without the method's library.
    """
    if values is None:
        return None
    from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

    method = values.get("quant_method") or "an unnamed method"
    place = f"{place}: {KEY}"
    actual = f"weights quantised by {method}"
    expected = f"a base in {SUPPORTED}"
    unsupported = ConfigError(Problem(place, actual, expected, "Take the base before that"))
    if method not in METHODS:
        raise unsupported
    try:
        parsed = AutoQuantizationConfig.from_dict({**values, "dequantize": True})
        if getattr(parsed, "dequantize", False) is not True:
            raise unsupported
        quantizer = AutoHfQuantizer.from_config(parsed, pre_quantized=True)
        quantizer.validate_environment()
        if not quantizer.get_weight_conversions():
            raise unsupported
        reason = "a transform_config" if values.get("transform_config") else _mixed(parsed)
    except ImportError as error:
        actual = f"{actual}: {first_line(error)}"
        hint = "pip install 'meshloom[quantised]'"
        raise ConfigError(Problem(place, actual, expected, hint)) from error
    except ConfigError:
        raise
    except Exception as error:  # whatever the config's own class raises for its values
        actual = f"{actual}: {first_line(error)}"
        raise ConfigError(Problem(place, actual, expected)) from error
    if reason:
        actual = f"{actual} with {reason}, which transformers does not dequantise"
        raise ConfigError(Problem(place, actual, expected, "Take the base before that"))
    return quantizer


def _mixed(parsed: object) -> str:
    """Name what transformers ignores in a config of compressed-tensors; empty if nothing.

    It applies one scheme to all experts, and one to all other layers.
    """
    stated = getattr(parsed, "quantization_config", None)
    schemes: dict[bool, set[str]] = {False: set(), True: set()}
    for group in (getattr(stated, "config_groups", None) or {}).values():
        experts = any(name.startswith("re:") and "experts" in name for name in group.targets)
        schemes[experts].add(f"{group.weights} {group.format}")
    return "several schemes for its layers" if max(map(len, schemes.values())) > 1 else ""


def is_code(like: torch.Tensor) -> bool:
    """Return True for a stored tensor whose dtype shows that it has codes and not numbers."""
    return not like.dtype.is_floating_point or like.dtype in CODES


def check_read(stored: StoredTensors, key: str, like: torch.Tensor, place: str) -> None:
    """Raise ConfigError if a floating-point tensor of a model, `like`, is stored as codes."""
    if like.dtype.is_floating_point and is_code(stored.like(key)):
        dtype = stored.like(key).dtype
        actual = f"{key} is stored as {dtype}, and nothing says what number that stands for"
        raise ConfigError(Problem(place, actual, f"a base in {SUPPORTED}"))


def check_scaled(
    stored: StoredTensors,
    sources: Sequence[tuple[str, str]],
    quantiser: HfQuantizer | None,
    place: str,
) -> tuple[int, int] | None:
    """Raise ConfigError unless each tensor of codes to be dequantised has a scale that fits it.

    Transformers takes codes without a scale for the numbers themselves, pairs experts with scales
    by their order, and takes all blocks of a tensor to have the same size. `sources`: names in the
    files, and the patterns of transformers' converter that they match. Returns the rows and columns
    to which a single tensor is to be padded so that all its blocks are whole; None: not at all.
    """
    scales = {key.rpartition(".")[0]: key for key, pattern in sources if is_scale(pattern)}
    codes = [key for key, pattern in sources if _leaf(pattern).endswith(VALUES)]
    stated = getattr(quantiser, "quantization_config", None)
    size = getattr(stated, "weight_block_size", None)
    whole = None
    for key in codes:
        like = stored.like(key)
        scale = scales.get(key.rpartition(".")[0])
        if scale is not None and size:
            whole = _whole_blocks(like.shape, stored.like(scale).shape, size)
            if whole is not None and (len(codes) > 1 or like.dtype not in CODES):
                shape = tuple(like.shape)
                actual = f"{key} of shape {shape} in blocks of {size}, the last of which is smaller"
                expected = "whole blocks: transformers dequantises no others"
                raise ConfigError(Problem(place, actual, expected, "Take the base in 16 bits"))
        elif scale is None and is_code(like):
            actual = f"{key} is stored as {like.dtype}, without its scale"
            raise ConfigError(Problem(place, actual, f"a base whose {KEY} describes its files"))
    return whole


def _whole_blocks(
    codes: Sequence[int], scale: Sequence[int], size: Sequence[int]
) -> tuple[int, int] | None:
    """Return a matrix's rows and columns, padded to whole blocks; None if it needs no padding.

    `codes` and `scale`: the shapes; `size`: that of a block. A dimension with a single block may be
    smaller than this.
    """
    wanted = []
    for length, count, block in zip(codes[-2:], scale[-2:], size, strict=True):
        uneven = count > 1 and length % block and count == -(-length // block)
        wanted.append(count * block if uneven else length)
    whole = (wanted[0], wanted[1])
    return None if whole == tuple(codes[-2:]) else whole


def is_scale(pattern: str) -> bool:
    """Return True for a pattern of scales by which transformers multiplies codes."""
    return bool(SCALES.search(pattern)) and not ACTIVATIONS.search(pattern)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def stray_companions(
    unread: Mapping[str, str], read: Collection[str], model: nn.Module
) -> Iterator[str]:
    """Yield the companions of a weight that nothing reads, though the weight is read.

    `unread`: names in the files -> those that they would have in the model; `read`: names in the
    files that are read. Companions in modules that the model does not have belong to other weights.
    """
    modules = {name for name, _ in model.named_modules()}
    beside = {key.rpartition(".")[0] for key in read} - {""}
    for key, name in unread.items():
        module = name.rpartition(".")[0]
        parents = [module, module.rpartition(".")[0]]  # bitsandbytes: weight.quant_state
        own = key.rpartition(".")[0] in beside and COMPANION.search(_leaf(key))
        known = modules & {*parents} - {""}
        if own or known and COMPANION.search(_leaf(name) if module in modules else name):
            yield key


def check_unread(
    unread: Mapping[str, str],
    read: Collection[str],
    model: nn.Module,
    quantiser: HfQuantizer | None,
    place: str,
) -> None:
    """Raise ConfigError if a scale or other companion of a weight would be left out.

    In a quantised base the scales of activations may be left out: its weights do not need them.
    """
    stray = sorted(stray_companions(unread, read, model))
    if quantiser is not None:
        stray = [key for key in stray if not ACTIVATIONS.search(key)]
    if stray:
        shown = ", ".join(stray[:3])
        actual = f"{len(stray)} scales or codes of quantised weights that nothing reads: {shown}"
        raise ConfigError(Problem(place, actual, f"a base in {SUPPORTED}, whose {KEY} is complete"))


def conversion_errors(place: str, name: str) -> AbstractContextManager[None]:
    """Turn what transformers raises for a tensor that it cannot convert into ConfigError."""
    return refused(f"{place}: {name}", "a tensor that transformers converts", named=True)
