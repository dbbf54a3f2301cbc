"""The types of keys in the `trainer` section; a key's mark says what its type does not."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from trainer.config.keys.key import Key, Recipes
from trainer.storage import Json

CAUSAL = Recipes(("causal_lm",))
TEXT = Recipes(("causal_lm", "pairs", "distillation"))
DOCUMENTS = Recipes(("causal_lm", "distillation"))
"""The recipes whose samples are made of documents, one after the other."""
DISTILLATION = Recipes(("distillation",))
PAIRS = Recipes(("pairs",))
IMAGES = Recipes(("image_classification",))
LABELS = Recipes(("labels",))
EMBEDDINGS = Recipes(("embeddings",))
ANSWERS = Recipes((*PAIRS.names, *LABELS.names))
"""The recipes whose rows hold a better and a worse answer."""
MASKED = Recipes(("masked_lm",))
TOKENS = Recipes((*TEXT.names, *EMBEDDINGS.names, *LABELS.names, *MASKED.names))
"""The recipes whose samples are tokens."""
TEXTS = Recipes((*TEXT.names, *LABELS.names))
"""The recipes whose rows hold a text in a column, or a chat."""
CUT = Recipes((*TEXTS.names, *MASKED.names))
"""The recipes whose samples may be one text each, cut at the sequence length."""
CORPUS = Recipes((*TEXT.names, *MASKED.names))
"""The recipes whose rows become samples by the preparation of documents."""
ROWS = "rows"
HELD_OUT = "data to evaluate on"


def _no_flag(value: object) -> object:
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


def mark_of(field: FieldInfo) -> Key:
    """Return a field's mark, without what its type says; an empty `Key` if it has none."""
    return next((mark for mark in field.metadata if isinstance(mark, Key)), Key())


def _describe(schema: Json, model: type[BaseModel]) -> None:
    """Describe each key of a section's JSON Schema, by its docstring and its mark."""
    for name, field in model.model_fields.items():
        texts = [field.description or "", *mark_of(field).sentences()]
        if any(texts):
            schema["properties"][name]["description"] = " ".join(filter(None, texts))


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        json_schema_extra=_describe,
    )
