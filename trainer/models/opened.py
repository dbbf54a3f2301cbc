"""A trained model from its folder, as a module of the user's own kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from trainer.errors import ConfigError, Problem, first_line, listed
from trainer.models import classifiers
from trainer.models.module import class_of
from trainer.models.names import aliases_of
from trainer.models.weights import SafetensorsFolder

EXPECTED = "runs/NAME/final, or a checkpoint such as runs/NAME/checkpoints/step-000100"


def opened(folder: Path, build: Callable[[], nn.Module] | None) -> nn.Module:
    """The model of `final/` or of a checkpoint, in evaluation mode. Raises ConfigError where there is none."""
    if (inner := folder / "model").is_dir():
        folder = inner
    known = [
        name for name in (classifiers.DESCRIPTION, "adapter_config.json", "config.json") if (folder / name).exists()
    ]
    if not known:
        raise ConfigError(Problem(f"open: {folder}", "a folder without a model", EXPECTED))
    if known[0] != classifiers.DESCRIPTION:
        return _pretrained(folder, adapter=known[0] == "adapter_config.json", built=build is not None)
    model = json.loads((folder / classifiers.DESCRIPTION).read_bytes())
    if build is None and isinstance(model.get("model"), dict):
        return classifiers.opened(folder)[0]
    if build is None:
        expected = f"model=, which builds {model.get('module', 'the module')}"
        raise ConfigError(Problem(f"open: {folder}", "the weights of an own module", expected))
    return _filled(build(), folder, model.get("module"))


def _pretrained(folder: Path, *, adapter: bool, built: bool) -> nn.Module:
    if built:
        raise ConfigError(Problem(f"open: {folder}", "model=, and a folder that says it", "the folder alone"))
    try:
        model: nn.Module = _loader(adapter).from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(f"open: {folder}", first_line(error), EXPECTED)) from error
    return model.eval()


def _loader(adapter: bool) -> Any:
    if adapter:
        from peft import AutoPeftModelForCausalLM

        return AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def _filled(model: nn.Module, folder: Path, name: str | None) -> nn.Module:
    """An own module with the values of the folder. Raises ConfigError where they are another module's."""
    if name is not None and name.rpartition(".")[2] != type(model).__name__:
        raise ConfigError(Problem(f"open: {folder}", f"a {name}", f"one, where model= builds a {class_of(model)}"))
    weights = SafetensorsFolder(folder)
    stored = {key: value for key in weights.names() if (value := weights.read(key)) is not None}
    own, again = model.state_dict(), aliases_of(model)
    stored |= {alias: stored[first] for alias, first in again.items() if first in stored and alias in own}
    wrong = [f"{key} is missing" for key in own if key not in stored]
    wrong += [f"{key} is no part of the module" for key in stored if key not in own]
    shapes = ((key, list(stored[key].shape), list(own[key].shape)) for key in own if key in stored)
    wrong += [f"{key} is {there}, here {here}" for key, there, here in shapes if there != here]
    if wrong:
        raise ConfigError(
            Problem(f"open: {folder}", listed(wrong), f"the tensors of {class_of(model)}, as it was trained")
        )
    model.load_state_dict(stored)
    return model.eval()
