"""The formats of a quantised base, and how an adapter's folder states them."""

from __future__ import annotations

from typing import Any

from trainer.config.sections.adapter import QuantizeSection

FORMATS: list[dict[str, Any]] = [{}, {"double_quant": True}, {"type": "int8"}]
"""The keys of `trainer.adapter.quantize`, for each format."""
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def stated(quantize: QuantizeSection) -> dict[str, Any]:
    """The keys of `BitsAndBytesConfig` that state how a base was quantised."""
    if quantize.type == "int8":
        return dict(INT8)
    return {**NF4, "bnb_4bit_use_double_quant": quantize.double_quant}
