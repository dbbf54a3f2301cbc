"""The class of transformers that opens a language model, alone or with its image tower."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

CAUSAL = AutoModelForCausalLM
WITH_IMAGES = AutoModelForImageTextToText


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class that builds and opens the model of a config.

    It is AutoModelForCausalLM wherever that knows the config or the model brings its own code;
    a model that exists only with an image tower is opened with it.
    """
    of_its_own = getattr(config, "auto_map", None) or {}
    if type(config) in CAUSAL._model_mapping or CAUSAL.__name__ in of_its_own:
        return CAUSAL
    return WITH_IMAGES if type(config) in WITH_IMAGES._model_mapping else CAUSAL
