"""The auto class of transformers that opens a model.

The model may be a causal language model, alone or with its image tower; a model with a head for
labels or for masked tokens; or a body without a head.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import _BaseAutoModelClass

CAUSAL = AutoModelForCausalLM
WITH_IMAGES = AutoModelForImageTextToText
SEQUENCES = AutoModelForSequenceClassification
TOKENS = AutoModelForTokenClassification
MASKED = AutoModelForMaskedLM
BODIES = AutoModel
AutoClass = type[_BaseAutoModelClass]
"""A class of transformers that builds and opens models of many architectures."""


def auto_class(config: PreTrainedConfig) -> AutoClass:
    """Return the class that builds and opens the model of a config.

    It is AutoModelForCausalLM if that knows the config, or if the model brings its own code for it.
    It is AutoModelForImageTextToText for a model that exists only with an image tower.
    """
    of_its_own = getattr(config, "auto_map", None) or {}
    if type(config) in CAUSAL._model_mapping or CAUSAL.__name__ in of_its_own:
        return CAUSAL
    return WITH_IMAGES if type(config) in WITH_IMAGES._model_mapping else CAUSAL


def class_in_folder(config: PreTrainedConfig) -> AutoClass:
    """Return the class that opens the trained model whose folder has this config."""
    stated = (getattr(config, "architectures", None) or [""])[0]
    return _not_causal(config, stated) or auto_class(config)


def class_named(config: PreTrainedConfig, names: Sequence[str]) -> AutoClass:
    """Return the auto class of the first named model class that is no causal language model.

    If all are causal, or not known, it is that of the config's own model.
    """
    others = (_not_causal(config, name) for name in names)
    return next((kind for kind in others if kind), None) or auto_class(config)


def opening_class(model: PreTrainedModel) -> AutoClass:
    """Return the class that opens the folder of a model."""
    return _not_causal(model.config, type(model).__name__) or auto_class(model.config)


def _not_causal(config: PreTrainedConfig, name: str) -> AutoClass | None:
    """Return the auto class of the model class `name`; None if it is causal or not known."""
    for kind in (SEQUENCES, TOKENS, MASKED, BODIES):
        known = kind._model_mapping.get(type(config), None)
        classes = known if isinstance(known, tuple) else (known,)
        if name in [getattr(one, "__name__", "") for one in classes]:
            return kind
    return None
