"""The types and marks of keys in the `trainer` section."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


@dataclass(frozen=True)
class Only:
    """Marks a key as one of some tasks; the others refuse it."""

    tasks: tuple[str, ...]
    accepts: Callable[[Any], bool] = lambda value: False
    """Returns True for a value that every task takes."""
    accepted: str = ""
    """Those values, in words."""


@dataclass(frozen=True)
class Needs:
    """Marks a key that has no effect without a condition, which `rules.unmet` names."""

    condition: str


@dataclass(frozen=True)
class Excludes:
    """Marks a key that can't be given together with another, but for some tasks."""

    other: str
    hint: str = ""
    but_for: tuple[str, ...] = ()


TEXT, IMAGES = Only(("causal_lm",)), Only(("image_classification",))
ROWS, HELD_OUT = Needs("rows"), Needs("data to evaluate on")


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):  # pydantic reads true as 1
        raise ValueError("a number")
    return value


def _file_name(value: str) -> str:
    if "/" in value or value in ("", ".", "..") or not value.isprintable() or len(value) > 100:
        raise ValueError("a name of at most 100 letters, without a slash")
    return value


Whole = Annotated[int, BeforeValidator(_no_flag)]
Count = Annotated[Whole, Field(ge=1, le=1_000_000_000)]
Number = Annotated[float, BeforeValidator(_no_flag)]
Share = Annotated[Number, Field(ge=0, le=1)]
FileName = Annotated[str, AfterValidator(_file_name)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
