"""The section of an adapter, `trainer.adapter`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from trainer.config.keys.key import Key
from trainer.config.sections.section import Number, Section, Whole


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        expected = '"all-linear", names in a list, or a regular expression'
        raise ValueError(f"{expected} ({error})") from None
    return value


class QuantizeSection(Section):
    """A frozen base in fewer bits, as bitsandbytes has it."""

    type: Literal["nf4", "int8"] = "nf4"
    double_quant: bool = False
    """True to keep the scales of nf4 in 8 bits, too."""

    @model_validator(mode="after")
    def _has_scales_in_blocks(self) -> QuantizeSection:
        if self.double_quant and self.type != "nf4":
            raise ValueError(f"double_quant is for nf4: {self.type} has one scale a row")
        return self


class AdapterSection(Section):
    """A PEFT adapter on a frozen model; the keys are those of its `LoraConfig`."""

    type: Literal["lora"] = "lora"
    path: str | None = None
    """The folder of an adapter to start from: it decides the keys here except dropout, merge and
    quantize."""
    r: Annotated[Whole, Field(ge=1, le=65_536), Key(unit="dimensions")] = 8
    """The rank of the adapter."""
    alpha: Annotated[Number, Field(gt=0), Key(unit="factor")] = 8.0
    """The numerator of the adapter's scale, alpha / r, or with `rslora` alpha / sqrt(r)."""
    dropout: Annotated[Number, Field(ge=0, lt=1), Key(unit="share")] = 0.0
    targets: (
        Annotated[str, Field(min_length=1, max_length=10_000), AfterValidator(_pattern)]
        | Annotated[list[str], Field(min_length=1, max_length=10_000)]
    ) = "all-linear"
    """Linear layers of the blocks, and in a list stacks of experts, by the ends of their names; or
    a regular expression for linear layers."""
    bias: Literal["none", "all", "lora_only"] = "none"
    modules_to_save: Annotated[list[str], Field(max_length=1000)] = []
    """Modules that are trained whole, and saved with the adapter."""
    rslora: bool = False
    dora: bool = False
    merge: bool = False
    """True to write `final-merged/`, too: the base with the adapter merged into it."""
    quantize: QuantizeSection | None = None
    """The form of the base's linear layers while it is trained; none: that of the computation."""

    @model_validator(mode="after")
    def _fits_quantize(self) -> AdapterSection:
        if self.dora and self.quantize:
            raise ValueError("dora: it needs the rows of the base's weights, which are quantised")
        return self
