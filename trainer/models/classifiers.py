"""Image classifiers: torchvision's by name, as a chain of segments; or a user's own callable.

A chain is an `nn.Sequential` of the classifier's own modules. Any consecutive segments can be a
pipeline stage, and each segment an FSDP unit. The tensors keep torchvision's names in files
(`ModelFiles.published`).
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.errors import ConfigError, Problem, refused, suggestion
from trainer.models.door import check_folder, opening
from trainer.models.own import module
from trainer.models.pretrained.weights import SafetensorsFolder
from trainer.models.spec import MadeWeights, ModelSpec, Weights
from trainer.storage import Json, parse_json, read_file

if TYPE_CHECKING:
    from torchvision.models import VisionTransformer, WeightsEnum

DESCRIPTION = "module.json"
"""The file that describes a classifier in its folder: how to build it, its classes and input."""
SIZED = {"vit_": "image_size", "VisionTransformer": "image_size", "maxvit": "input_size"}
"""The beginning of a builder's name -> its argument for the size of the images."""
CLASSES = ("ResNet", "VisionTransformer")
"""Classes of torchvision that may also be named, for sizes that no builder function has."""
NAMES = (
    "a name of torchvision.models (resnet50, vit_b_16, ...), package.module:callable, or a folder"
)
"""The accepted values of `trainer.model.name_or_path`, as error messages list them."""


class Segment(nn.Sequential):
    """Modules that run one after the other."""


class Tokens(nn.Module):
    """The part of a vision transformer before its blocks: patches, class token and positions.

    Takes images [batch, channels, height, width]; returns [batch, tokens, width].
    """

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.conv_proj = model.conv_proj
        self.class_token = model.class_token
        self.pos_embedding = model.encoder.pos_embedding
        self.dropout = model.encoder.dropout

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.conv_proj(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(patches), -1, -1), patches], 1)
        return self.dropout(tokens + self.pos_embedding)  # type: ignore[no-any-return]


class FirstToken(nn.Module):
    """The choice of the class token: [batch, tokens, width] -> [batch, width]."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, 0]


def chain_of(model: nn.Module) -> nn.Sequential | None:
    """Return the model's modules as a chain of segments; None if no split is known for it."""
    from torchvision.models import ResNet, VisionTransformer

    if not type(model).__module__.startswith("torchvision.models") or "forward" in vars(model):
        return None  # its forward is not known
    if isinstance(model, ResNet):
        stem = ("conv1", "bn1", "relu", "maxpool")
        segments = {"stem": Segment(OrderedDict((name, getattr(model, name)) for name in stem))}
        for name in ("layer1", "layer2", "layer3", "layer4"):
            numbered = enumerate(getattr(model, name))
            segments |= {f"{name}_{index}": block for index, block in numbered}
        end = OrderedDict(avgpool=model.avgpool, flatten=nn.Flatten(), fc=model.fc)
        segments["head"] = Segment(end)
        return nn.Sequential(OrderedDict(segments))
    if isinstance(model, VisionTransformer):
        head = Segment(OrderedDict(ln=model.encoder.ln, first=FirstToken(), heads=model.heads))
        blocks = model.encoder.layers.named_children()
        return nn.Sequential(OrderedDict([("tokens", Tokens(model)), *blocks, ("head", head)]))
    parts = dict(model.named_children())
    if list(parts) == ["features", "avgpool", "classifier"]:
        # ConvNeXt's classifier flattens after its norm
        flattens = any(isinstance(inner, nn.Flatten) for inner in parts["classifier"].children())
        between = {} if flattens else {"flatten": nn.Flatten()}
        ends = OrderedDict(avgpool=parts["avgpool"], **between, classifier=parts["classifier"])
        blocks = ((f"features_{name}", block) for name, block in parts["features"].named_children())
        return nn.Sequential(OrderedDict([*blocks, ("head", Segment(ends))]))
    return None


@dataclass(frozen=True)
class Images:
    """The images that a classifier takes, and the classes that it tells apart."""

    classes: tuple[str, ...]
    mode: str
    """The Pillow mode: RGB or L."""
    size: tuple[int, int]
    """Height and width in pixels."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Mean and standard deviation of each channel, to normalise values from 0 to 1 by."""

    @property
    def channels(self) -> int:
        return 3 if self.mode == "RGB" else 1


@dataclass(frozen=True)
class Classifier:
    """The description from which a model is built, without its weights: name and arguments."""

    name: str
    """The name of a function or class of torchvision.models, or "package.module:callable"."""
    arguments: Json = field(default_factory=dict)
    folder: Path | None = None
    """The folder of its weights; None: initial values, or torchvision's weights."""
    weights: str | None = None
    """The name of torchvision's weights, such as IMAGENET1K_V2; None: they are not used."""

    def completed(self, images: Images) -> Classifier:
        """Fill in the number of classes and the size of the images where the config lacks them."""
        arguments = dict(self.arguments)
        if takes(self.callable, "num_classes"):
            arguments.setdefault("num_classes", len(images.classes))
        sized = next((key for start, key in SIZED.items() if self.name.startswith(start)), None)
        if sized is not None:
            size = images.size[0] if sized == "image_size" else list(images.size)
            arguments.setdefault(sized, size)
        return replace(self, arguments=arguments)

    @property
    def callable(self) -> Callable[..., nn.Module]:
        return _imported(self.name) if ":" in self.name else _of_torchvision(self.name)

    @property
    def pretrained(self) -> WeightsEnum | None:
        """The entry of torchvision's weights, or None. Raises ConfigError for an unknown name."""
        if self.weights is None:
            return None
        from torchvision import models

        # googlenet and inception_v3 transform their input once they are pretrained
        without = (*CLASSES, "googlenet", "inception_v3")
        unknown = ":" in self.name or self.folder or self.name in without
        known = {} if unknown else models.get_model_weights(self.name).__members__
        if self.weights not in known:
            actual = f'saw "{self.weights}" of {self.name}'
            expected = f"one of {', '.join(known)}"
            if not known:
                expected = "none: there are no weights by name"
            raise ConfigError(Problem("trainer.model.weights", actual, expected))
        return known[self.weights]

    @property
    def normalised_by(self) -> tuple[tuple[float, ...], ...] | None:
        """Mean and standard deviation of each channel that pretrained weights expect, or None."""
        given = self.pretrained and self.pretrained.transforms()
        return given and (tuple(given.mean), tuple(given.std))

    def state(self) -> Mapping[str, torch.Tensor]:
        """Load torchvision's weights from disk or the network, if named. Raises ConfigError."""
        if (entry := self.pretrained) is None:
            return {}
        start = f"{entry} can't be loaded: "
        expected = f"{entry.url}, or that file in {torch.hub.get_dir()}/checkpoints"
        # errors of the network or the disk, or a file with another hash
        with refused("trainer.model.weights", expected, named=True, start=start):
            return entry.get_state_dict(progress=False, check_hash=True, weights_only=True)  # type: ignore[no-any-return]

    def build(self) -> nn.Module:
        arguments = dict(self.arguments)
        if self.name == "ResNet" and isinstance(arguments.get("block"), str):
            from torchvision.models import resnet

            arguments["block"] = getattr(resnet, arguments["block"])
        return self.callable(**arguments)


def named(name: str, arguments: Json, weights: str | None = None) -> Classifier:
    """Return the classifier that `trainer.model` names. Raises ConfigError if there is none."""
    if not (folder := Path(name)).is_dir():
        classifier = Classifier(name, arguments, weights=weights)
        _ = classifier.callable, classifier.pretrained
        return classifier
    kinds = (OSError, ValueError, KeyError, TypeError)
    expected = "a folder such as runs/NAME/final"
    start = f"a folder without a {DESCRIPTION} that says how it is built: "
    check_folder(folder)
    with refused("trainer.model.name_or_path", expected, *kinds, named=True, start=start):
        model = description_in(folder)["model"]
        classifier = Classifier(model["name"], {**model["arguments"], **arguments}, folder, weights)
    _ = classifier.pretrained
    return classifier


def spec_of(classifier: Classifier, blocks: str | None, seed: int) -> ModelSpec:
    """Build the spec of the chain of segments if the split is known, else of the model itself.

    `blocks`: a pattern of the names of the model's blocks, with which no chain is made; `seed`: of
    the initial values. Raises ConfigError as `module.spec_of` does.
    """

    def build() -> nn.Module:
        model = classifier.build()
        chain = None if blocks else chain_of(model)
        return model if chain is None else chain

    spec = module.spec_of(build, blocks, seed)
    with torch.device("meta"):
        whole = classifier.build()
    names = published_names(whole, chain_of(whole)) if spec.name == "Sequential" else {}
    weights = spec.building.weights
    notes = spec.notes
    if classifier.folder is not None:
        weights = SafetensorsFolder(classifier.folder, renamed=names)
    config = module.config_of(whole)
    if (entry := classifier.pretrained) is not None:
        arguments = {**classifier.arguments, "num_classes": len(entry.meta["categories"])}
        with torch.device("meta"):
            pretrained = replace(classifier, arguments=arguments).build()
        shapes = module.config_of(pretrained)["shapes"]
        head = [name for name, shape in config["shapes"].items() if shapes.get(name) != shape]
        weights = _Pretrained(classifier, names, head, spec.building.weights)
        anew = f"; {', '.join(head)} of other classes are initialised at random" if head else ""
        notes = (*notes, f"weights {entry}{anew}")
    files = replace(spec.files, published=names)
    name = classifier.name
    described = replace(spec, name=name, files=files, config=config, notes=notes)
    return described.with_weights(weights)


def published_names(model: nn.Module, chain: nn.Module | None) -> dict[str, str]:
    """Map the name of each tensor in the chain to its name in the model; empty without a chain."""
    own = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}
    tensors = chain.state_dict(keep_vars=True).items() if chain is not None else ()
    return {name: own[id(tensor)] for name, tensor in tensors}


class _Pretrained(MadeWeights):
    """Torchvision's weights; a head for another number of classes gets initial values."""

    def __init__(
        self,
        classifier: Classifier,
        names: Mapping[str, str],
        head: Sequence[str],
        initial: Weights,
    ) -> None:
        super().__init__(classifier.state)
        self._names = names
        self._head = head
        self._initial = initial

    def read(self, name: str) -> torch.Tensor | None:
        own = self._names.get(name, name)
        # older files lack the counts of batches, which then start at zero
        if own in self._head or (own not in self._values and own.endswith("num_batches_tracked")):
            return self._initial.read(name)
        return super().read(own)

    def release(self) -> None:
        super().release()
        self._initial.release()


def describe(classifier: Classifier, images: Images) -> str:
    """Return the text of the file DESCRIPTION."""
    content = {
        "task": "image_classification",
        "model": {"name": classifier.name, "arguments": dict(classifier.arguments)},
        "classes": images.classes,
        "images": {key: getattr(images, key) for key in ("mode", "size", "mean", "std")},
    }
    return json.dumps(content, indent=2) + "\n"


def opened(folder: Path) -> tuple[nn.Module, Images]:
    """Load a trained classifier, in evaluation mode, and its `Images`. Raises ConfigError."""
    classifier = named(str(folder), {})
    weights = SafetensorsFolder(folder)
    with opening(f"open: {folder}", "a classifier as a run saves it"):
        content = description_in(folder)
        given = content["images"]
        numbers = [tuple(given[key]) for key in ("size", "mean", "std")]
        model = classifier.build()
        model.load_state_dict({name: weights.read(name) for name in weights.names()})
        return model.eval(), Images(tuple(content["classes"]), given["mode"], *numbers)


def description_in(folder: Path) -> Json:
    """Return the parsed file DESCRIPTION. Raises OSError, or ValueError if it is no description."""
    content = parse_json(read_file(folder / DESCRIPTION))
    known = content if isinstance(content, dict) else {}
    model = known.get("model")
    name = model.get("name") if isinstance(model, dict) else known.get("module")
    if not isinstance(name, str):
        raise ValueError("no description of a model")
    return known


def takes(function: Callable[..., object], argument: str) -> bool:
    """Return True if a callable has this keyword argument or takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # callables written in C have no signature
        return False
    return any(argument == p.name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _of_torchvision(name: str) -> Callable[..., nn.Module]:
    from torchvision import models

    known = [*models.list_models(module=models), *CLASSES]
    if name not in known:
        hint = suggestion(name, known)
        raise ConfigError(Problem("trainer.model.name_or_path", f'saw "{name}"', NAMES, hint))
    return getattr(models, name) if name in CLASSES else models.get_model_builder(name)  # type: ignore[no-any-return]


def _imported(name: str) -> Callable[..., nn.Module]:
    path, _, attribute = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # for a module in the working folder, as with `python -m`
    place = "trainer.model.name_or_path"
    start = f'saw "{name}": '
    # whatever the module's own code raises
    with refused(place, "a callable that can be imported", named=True, start=start):
        imported = getattr(importlib.import_module(path), attribute)
    if not callable(imported):
        raise ConfigError(Problem(place, f"{start}no callable", "one that builds a model"))
    return imported  # type: ignore[no-any-return]
