"""A trained model, loaded from its folder as an `nn.Module` of the class that was trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from trainer.errors import ConfigError, Problem, listed
from trainer.models import classifiers
from trainer.models.door import (
    BUILD_MEMORY,
    BUILD_SECONDS,
    bounded,
    check_folder,
    check_size,
    object_in,
    opening,
)
from trainer.models.finetuning.quantised import quantised_files
from trainer.models.names import aliases_of
from trainer.models.own.module import class_of
from trainer.models.pretrained.weights import SafetensorsFolder
from trainer.storage import required

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainer.config.sections.adapter import QuantizeSection
    from trainer.models.language.auto_class import AutoClass

EXPECTED = "runs/NAME/final, or a checkpoint such as runs/NAME/checkpoints/step-000100"


def opened(
    folder: Path, build: Callable[[], nn.Module] | None = None, **options: object
) -> nn.Module:
    """Load the model of `final/` or of a checkpoint, in evaluation mode.

    `build` makes your own module, of which the folder has the weights alone. `options`: those of a
    library's `from_pretrained`. Raises ConfigError for a folder without a model that opens.
    """
    if (inner := folder / "model").is_dir():
        folder = inner
    place = f"open: {folder}"
    check_folder(folder)
    files = (classifiers.DESCRIPTION, "adapter_config.json", "config.json")
    if (kind := next((name for name in files if (folder / name).exists()), None)) is None:
        actual = "a folder without a model" if folder.is_dir() else "no such folder"
        raise ConfigError(Problem(place, actual, EXPECTED))
    if kind != classifiers.DESCRIPTION:
        if build is not None:
            actual = "model=, and a folder that says it"
            raise ConfigError(Problem(place, actual, "the folder alone"))
        return _pretrained(folder, adapter=kind == "adapter_config.json", **options)
    with opening(place, EXPECTED):
        content = classifiers.description_in(folder)
    name = content.get("module") or content["model"]["name"].rpartition(":")[2]
    if build is None and "model" in content:
        return classifiers.opened(folder)[0]
    if build is None:
        expected = f"model=, which builds {name}"
        raise ConfigError(Problem(place, "the weights of your own module", expected))
    return _filled(build(), folder, name)


def opened_language_model(folder: Path, trust: bool) -> PreTrainedModel:
    """Load a language model as `opened` does, on the GPUs if there are any.

    `trust`: the model's own code may run. Raises ConfigError for a model of another kind, too.
    """
    if (folder / classifiers.DESCRIPTION).exists():
        actual = "a classifier, or a module of your own"
        raise ConfigError(Problem(f"open: {folder}", actual, "a language model of transformers"))
    device = "auto" if torch.cuda.is_available() else None
    return opened(folder, device_map=device, trust_remote_code=trust)


class Adapted(NamedTuple):
    """A model, or one of the adapters in it."""

    model: PreTrainedModel
    adapter: str = ""
    """The name of the adapter; empty if it is the model's only one, or there is none."""

    def choose(self) -> None:
        """Let the model compute with this adapter."""
        if self.adapter:
            self.model.set_adapter(self.adapter)


def opened_on_one_base(folders: Sequence[Path], trust: bool) -> list[Adapted]:
    """Load a language model or, from several folders, their adapters on their one base.

    The first one's adapter is in use. Raises ConfigError, also for adapters on different bases.
    """
    first = folders[0]
    if len(folders) == 1:
        return [Adapted(opened_language_model(first, trust))]
    base = _base_of(first)
    for folder in folders[1:]:
        if (own := _base_of(folder)) != base:
            actual = f"an adapter on {', '.join(own)}"
            expected = f"one on {', '.join(base)}, as {first} has"
            raise ConfigError(Problem(f"open: {folder}", actual, expected))
    if (bits := quantised_files.read(first)) is not None:
        models = _on_quantised(folders, bits, trust, on_gpu=torch.cuda.is_available())
        return [Adapted(cast("PreTrainedModel", model)) for model in models]
    model = opened_language_model(first, trust)
    adapters = [Adapted(model, "default")]
    for number, folder in enumerate(folders[1:], start=2):
        adapters.append(Adapted(model, f"adapter_{number}"))
        with opening(f"open: {folder}", EXPECTED):
            model.load_adapter(str(folder), adapters[-1].adapter)
    model.eval()
    return adapters


def _base_of(folder: Path) -> tuple[str, ...]:
    """Return the base of an adapter, its revision if there is one, and how it is kept.

    Raises ConfigError for a folder of another kind.
    """
    place = f"open: {folder}"
    if not (folder / "adapter_config.json").exists():
        actual = "a model without an adapter"
        raise ConfigError(Problem(place, actual, "a LoRA adapter, where several folders are given"))
    kept = quantised_files.name_of(quantised_files.read(folder))
    stated = object_in(folder / "adapter_config.json")
    name = str(stated.get("base_model_name_or_path"))
    name = str(Path(name).resolve()) if Path(name).is_dir() else name
    return tuple(filter(None, (name, stated.get("revision"), kept)))


def _pretrained(folder: Path, *, adapter: bool, **options: object) -> nn.Module:
    place = f"open: {folder}"
    trust = bool(options.setdefault("trust_remote_code", False))
    if adapter:
        return _adapted(folder, trust, place, **options)
    kind = _checked_class(folder, trust, place)
    with opening(place, EXPECTED):
        opened = kind.from_pretrained(folder, output_loading_info=True, **options)
        if missing := sorted(opened[1]["missing_keys"]):
            raise ValueError(f"no {listed(missing)}")  # they would get initial values
        return opened[0].eval()  # type: ignore[no-any-return]


def _adapted(folder: Path, trust: bool, place: str, **options: Any) -> nn.Module:
    required("peft", f"{place}: an adapter", "peft")
    import peft
    from transformers import AutoConfig

    from trainer.models.language.auto_class import CAUSAL, class_in_folder

    if (bits := quantised_files.read(folder)) is not None:
        return _on_quantised([folder], bits, trust, on_gpu=bool(options.get("device_map")))[0]
    stated = object_in(folder / "adapter_config.json")
    name = stated.get("base_model_name_or_path")
    base = _checked_class(name, trust, place, stated.get("revision"))
    # without a task, the config names the class of the base's whole model
    whole = stated.get("task_type") is None and stated.get("auto_mapping")
    kind = peft.AutoPeftModel if whole else peft.AutoPeftModelForCausalLM
    with opening(place, EXPECTED):
        if (folder / "config.json").exists():  # for a head for labels, which the base may not have
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
            base = class_in_folder(config)
            options["config"] = config
        elif whole or base is CAUSAL:
            return kind.from_pretrained(folder, **options).eval()  # type: ignore[no-any-return]
        # PEFT itself would open any causal language model with AutoModelForCausalLM
        model = base.from_pretrained(name, revision=stated.get("revision"), **options)
        return peft.PeftModel.from_pretrained(model, str(folder)).eval()


def _on_quantised(
    folders: Sequence[Path], bits: QuantizeSection, trust: bool, *, on_gpu: bool
) -> list[nn.Module]:
    """Open adapters on their one quantised base, on the current GPU or on the CPU.

    On the CPU the base is dequantised as it is read: doing that for each token would be too slow.
    """
    from trainer.models.finetuning.quantised.quantised_opened import opened_on_quantised

    place = f"open: {listed([str(folder) for folder in folders])}"
    stated = object_in(folders[0] / "adapter_config.json")
    _checked_class(stated.get("base_model_name_or_path"), trust, place, stated.get("revision"))
    device = torch.device("cuda" if on_gpu else "cpu")
    with opening(place, EXPECTED):
        return opened_on_quantised(folders, bits, trust, device, keep=on_gpu)


def _checked_class(source: object, trust: bool, place: str, revision: object = None) -> AutoClass:
    """Return transformers' class for a folder or hub id, of which `revision` is opened.

    Raises ConfigError unless its config makes a model of a plausible size.
    """
    from transformers import AutoConfig

    from trainer.models.language.auto_class import class_in_folder
    from trainer.models.language.model_config import check_kernels

    if not isinstance(source, Path | str):
        raise ConfigError(Problem(place, f"the base {source!r}"[:200], "its folder or hub id"))
    check_folder(Path(source))
    with opening(place, EXPECTED), bounded(BUILD_MEMORY, BUILD_SECONDS):
        pinned = {} if revision is None else {"revision": revision}
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust, **pinned)
    check_kernels(config, place)
    with opening(place, EXPECTED), bounded(BUILD_MEMORY, BUILD_SECONDS), torch.device("meta"):
        empty = class_in_folder(config).from_config(config, trust_remote_code=trust)
    if Path(source).is_dir():
        check_size(Path(source), sum(one.numel() for one in empty.parameters()), place)
    return class_in_folder(config)


def _filled(model: nn.Module, folder: Path, name: str) -> nn.Module:
    """Load the folder's values into a user's module; `name`: the class that was trained.

    Raises ConfigError for another class, and for values that do not fit the module.
    """
    weights = SafetensorsFolder(folder)
    first = aliases_of(model)
    # a tied tensor has one name in the files
    stored = {key: weights.read(first.get(key, key)) for key in model.state_dict()}
    stored |= {key: weights.read(key) for key in weights.names()}
    try:
        if name.rpartition(".")[2] != type(model).__name__:
            raise RuntimeError(f"a {name}")
        model.load_state_dict({key: value for key, value in stored.items() if value is not None})
    except RuntimeError as error:
        actual = " ".join(str(error).split())[:400]
        expected = f"the tensors of a {class_of(model)}, which model= builds"
        raise ConfigError(Problem(f"open: {folder}", actual, expected)) from error
    return model.eval()
