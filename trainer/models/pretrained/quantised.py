"""Bases that are stored in fewer bits: read as the values that they stand for, or unsupported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from trainer.errors import ConfigError, Problem, first_line, refused
from trainer.models.pretrained.files import StoredTensors

KEY = "quantization_config"
SUPPORTED = "16 or 32 bits, or quantised by fp8, compressed-tensors or mxfp4"
COMPANION = re.compile(
    r"(^|_|\.)(scale|scales|scale_inv|zero_point|zeros|qzeros|qweight|packed|blocks|g_idx|absmax"
    r"|nested_absmax|quant_map|quant_state|codebook|amax|SCB|perm|qscale)(_|\.|$|\d)"
)
"""The names of what a quantised weight is stored with, by its various libraries."""
CODES = {getattr(torch, name) for name in dir(torch) if name.startswith(("float8", "float4"))}
"""Dtypes of fewer than 16 bits."""


def stored_config(config: Any) -> Mapping[str, Any] | None:
    """Return the `quantization_config` of a model's config, or of the part that is its text."""
    text = config.get_text_config(decoder=True)
    found = getattr(config, KEY, None) or getattr(text, KEY, None)
    return found if found is None or isinstance(found, Mapping) else found.to_dict()


def remove_config(config: Any) -> None:
    """Remove the `quantization_config`, in place: what is built and saved is not quantised."""
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, KEY):
            delattr(part, KEY)


def dequantiser(values: Mapping[str, Any] | None, place: str) -> Any:
    """Return transformers' quantiser that gives each stored weight its value; None for no values.

    Raises ConfigError for a method whose weights transformers cannot dequantise as it reads them.
    """
    if values is None:
        return None
    from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

    method = values.get("quant_method") or "an unnamed method"
    place = f"{place}: {KEY}"
    actual, expected = f"weights quantised by {method}", f"a base in {SUPPORTED}"
    unsupported = ConfigError(Problem(place, actual, expected, "Take the base before that"))
    try:
        parsed = AutoQuantizationConfig.from_dict({**values, "dequantize": True})
        if getattr(parsed, "dequantize", False) is not True:
            raise unsupported
        found = AutoHfQuantizer.from_config(parsed, pre_quantized=True)
        found.validate_environment()
        if not found.get_weight_conversions():
            raise unsupported
    except ImportError as error:
        actual, hint = f"{actual}: {first_line(error)}", "pip install 'meshloom[quantised]'"
        raise ConfigError(Problem(place, actual, expected, hint)) from error
    except ConfigError:
        raise
    except Exception as error:  # whatever the config's own class raises for its values
        actual = f"{actual}: {first_line(error)}"
        raise ConfigError(Problem(place, actual, expected)) from error
    return found


def check_read(stored: StoredTensors, key: str, like: torch.Tensor, place: str) -> None:
    """Raise ConfigError for a number of a model that is stored as a code for it."""
    dtype = stored.like(key).dtype
    if not like.dtype.is_floating_point or (dtype.is_floating_point and dtype not in CODES):
        return
    actual = f"{key} is stored as {dtype}, and nothing says what number that stands for"
    raise ConfigError(Problem(place, actual, f"a base in {SUPPORTED}"))


def stray_companions(unread: Mapping[str, str], model: nn.Module) -> Iterator[str]:
    """Yield the tensors that nothing reads, though they stand beside a weight that is read.

    `unread`: names in the files, and the names that they would have in the model. Those of modules
    that the model does not have belong to other weights.
    """
    modules = {name for name, _ in model.named_modules()}
    for key, name in unread.items():
        module, _, leaf = name.rpartition(".")
        parents = [module, module.rpartition(".")[0]]  # bitsandbytes: weight.quant_state
        if modules & {*parents} - {""} and COMPANION.search(leaf if module in modules else name):
            yield key


def check_unread(unread: Mapping[str, str], model: nn.Module, place: str) -> None:
    """Raise ConfigError if a scale or other companion of a weight would be left out."""
    if stray := sorted(stray_companions(unread, model)):
        shown = ", ".join(stray[:3])
        actual = f"{len(stray)} scales or codes of quantised weights that nothing reads: {shown}"
        raise ConfigError(Problem(place, actual, f"a base in {SUPPORTED}, whose {KEY} is complete"))


def conversion_errors(place: str, name: str) -> Any:
    """Turn what transformers raises for a tensor that it cannot convert into ConfigError."""
    return refused(f"{place}: {name}", "a tensor that transformers converts", named=True)
