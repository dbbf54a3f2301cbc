"""A base's folder as it is saved again: the trained values in it, and all that was not trained."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from trainer.distributed.ranks import Ranks
from trainer.errors import ConfigError, DiskError, Problem, listed, refused
from trainer.models.door import object_in
from trainer.models.names import aliases_of
from trainer.models.pretrained import config_json
from trainer.models.pretrained.carried import CarriedTensors
from trainer.models.pretrained.conversion import Conversion, plan, targets_of
from trainer.models.pretrained.reader import ConvertedWeights
from trainer.models.pretrained.way_back import values_of
from trainer.state import CARRIED, WEIGHT, FileTensor, Part, StateTensor
from trainer.storage import to_json

CONFIG = "config.json"
GENERATION = "generation_config.json"
TEMPLATES = "additional_chat_templates"
FOLDERS = (TEMPLATES, "custom_generate")
"""The folders inside a model's folder that transformers reads."""
MODEL_FILES = (
    *("*.json", "*.jinja", "*.py", "*.txt", "*.model", "*.tiktoken", "tokenizer*"),
    *("LICENSE*", "NOTICE*", "USE_POLICY*"),
)
"""The patterns of files that belong to a model: settings, templates, code, licences."""
TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.tiktoken", "chat_template*", f"{TEMPLATES}/*"),
)
"""The patterns of a tokenizer's files, copied only if the base's own tokenizer is used."""
NOT_KEPT = (
    *(CONFIG, "*.index.json", "trainer_state.json", "adapter_config.json", "manifest.json"),
    *("*quant*config*.json", "*_results.json", "trainer.json"),
)
"""The patterns of files that are not copied: they describe the base, not the trained model."""
WHOLE_KEY = "trainer.model.keep_untrained"


class WholeBase:
    """The folder of a base, to be saved again with the trained values in it.

    Tensors keep the names that they have in the base's files. Those that the trained model has no
    place for are copied byte for byte, or dequantised if the base is quantised. The config keeps
    the base's class, unless the trained model has another head.
    """

    def __init__(
        self,
        folder: Path,
        weights: ConvertedWeights,
        model: PreTrainedModel,
        config: PreTrainedConfig,
        build_whole: Callable[[], PreTrainedModel] | None,
    ) -> None:
        """Raise ConfigError if something of the base would be lost.

        `model`: the trained one; `config`: the base's, as transformers reads it. `build_whole`
        makes the model that the base's config names, on the meta device; None if the trained model
        is no part of a larger one.
        """
        self._folder = folder
        self._weights = weights
        self._model = model
        self._config = config
        self._build_whole = build_whole
        self._stated = object_in(folder / CONFIG)
        self._check_part()
        self._check_carried()
        self._check_complete()

    @property
    def opens(self) -> str:
        """The function that opens the folder."""
        stated = next(iter(self._stated.get("architectures") or ()), "")
        text = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        images = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())
        kind = "AutoModelForImageTextToText" if stated in images - text else "AutoModelForCausalLM"
        return f"{kind}.from_pretrained"

    @property
    def is_part(self) -> bool:
        """True if the trained model is a part of what the base's config names."""
        return self._build_whole is not None

    def whole(self) -> PreTrainedModel:
        """Build the model that the base's config names, on the meta device."""
        return self._model if self._build_whole is None else self._build_whole()

    @cached_property
    def carried(self) -> CarriedTensors:
        """The tensors of the files that are not trained."""
        weights = self._weights
        place = f"trainer.model: {self._folder}"
        return CarriedTensors(weights.stored, weights.strangers(), weights.quantiser, place)

    def names(self) -> dict[str, str]:
        """Map each tensor's name in the trained model to its name in the whole model, if any."""
        if self._build_whole is None:
            return {name: name for name in self._weights.names()}
        trained = self._weights.targets()
        whole = targets_of(self._planned.values())
        return {trained[key]: name for key, name in whole.items() if key in trained}

    def entries(self, entries: Sequence[StateTensor], ranks: Ranks) -> list[StateTensor]:
        """Return state tensors as they are in the base's files, and those that are not trained.

        Each rank reads a share of the latter.
        """
        trained = [place for entry in entries for place in self._in_files(entry)]
        return [*trained, *self._carried_entries(ranks)]

    def save_config(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Write the base's config with its changes, and its other files except the tokenizer's."""
        trained = self._model.config
        stated = config_json.changed(self._stated, self._config, trained, dtype)
        if self._is_other_class:
            stated["architectures"] = [type(self._model).__name__]
        (folder / CONFIG).write_bytes(to_json(stated))
        for name in self._others(TOKENIZER):
            self._copy(name, folder)
        generates = self._model.can_generate() and self._model.generation_config is not None
        if generates and not (folder / GENERATION).exists():
            self._model.generation_config.save_pretrained(folder)

    def check(self, folder: Path) -> None:
        """Raise DiskError unless a folder has the tensors of the base's files, and no others."""
        place = f"{folder}: *.safetensors"
        written: list[str] = []
        with refused(place, "the tensors of the base", OSError, SafetensorError, raises=DiskError):
            for path in folder.glob("*.safetensors"):
                with safe_open(path, "pt") as file:
                    written += file.keys()
        if odd := sorted({*written} ^ self.written):
            actual = f"{len(written)} tensors, of which {listed(odd, 2)} should not be so"
            raise DiskError(Problem(place, actual, f"the {len(self.written)} of the base"))

    def save_tokenizer_files(self, folder: Path) -> None:
        """Copy the files of the base's tokenizer that the tokenizer's library did not write."""
        template = any(folder.glob("chat_template*"))
        for name in self._others(()):
            stale = template and name.startswith(("chat_template", TEMPLATES))
            if _matches(name, TOKENIZER) and not stale and not (folder / name).exists():
                self._copy(name, folder)

    def _copy(self, name: str, folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._folder / name, folder / name)

    def _others(self, without: Sequence[str]) -> Iterator[str]:
        """Yield the paths in the folder of files that belong to the model, except `without`."""
        paths = [*self._folder.iterdir()]
        for name in FOLDERS:
            paths += (self._folder / name).rglob("*")
        if any(path.suffix == ".py" for path in paths):  # the model's own code may be in packages
            paths += self._folder.glob("[!.]*/**/*.py")
        names = (path.relative_to(self._folder).as_posix() for path in paths if path.is_file())
        for name in sorted({*names}):
            if _matches(name, MODEL_FILES) and not _matches(name, (*NOT_KEPT, *without)):
                yield name

    @cached_property
    def _whole(self) -> PreTrainedModel:
        return self.whole()

    @cached_property
    def _planned(self) -> dict[str, Conversion]:
        """The first tensor of each conversion into the whole model -> that conversion."""
        weights = self._weights
        return plan(weights.stored.names(), self._whole, weights.quantiser)[0]

    @cached_property
    def _places(self) -> dict[str, list[tuple[FileTensor, ...]]]:
        """Trained tensor -> its places in the files: for each, the tensors that make up its bytes.

        A tensor whose bytes are not whole tensors of the files is saved under the whole model's
        name. A tied tensor that the files have under each of its names has several places.
        """
        own = self.names()
        pieces = self._weights.pieces()
        aliases: dict[str, list[str]] = {}
        for alias, first in aliases_of(self._model).items():
            aliases.setdefault(first, []).append(alias)
        tied = {alias for names in aliases.values() for alias in names}
        result = {}
        for name, like in self._model.state_dict().items():
            if name not in tied:
                names = [name, *aliases.get(name, ())]
                known = [pieces[one] for one in names if pieces.get(one)]
                plain = (FileTensor(own.get(name, name), tuple(like.shape)),)
                result[name] = list(dict.fromkeys(known)) or [plain]
        return result

    def _in_files(self, entry: StateTensor) -> Iterator[StateTensor]:
        dtype = self._wide.get(entry.name)
        for pieces in self._places.get(entry.name, [()]):
            yield replace(entry, pieces=pieces, file_dtype=dtype)

    @cached_property
    def _wide(self) -> dict[str, torch.dtype]:
        """The dtypes of trained tensors that a base in 16 bits has in more: biases of routers."""
        stored = self._weights.dtypes()
        sizes: Counter[torch.dtype] = Counter()
        for name, like in self._model.state_dict().items():
            sizes[stored.get(name, like.dtype)] += like.numel()
        usual = max(sizes, key=sizes.__getitem__)
        if usual.itemsize > 2:
            return {}
        return {n: d for n, d in stored.items() if d.is_floating_point and d.itemsize > 2}

    def _carried_entries(self, ranks: Ranks) -> Iterator[StateTensor]:
        for index, name in enumerate(self.carried):
            like = self.carried.like(name)
            owner = index % ranks.world_size

            def parts(name: str = name, owner: int = owner) -> list[Part]:
                return [Part(self._read_carried(name))] if ranks.rank == owner else []

            shape = tuple(like.shape)
            key = WEIGHT if self.carried.is_dequantised(name) else CARRIED
            yield StateTensor(name, key, shape, like.dtype, owner, parts, lambda value: None)

    @property
    def _is_other_class(self) -> bool:
        """True if the trained model is neither what the config names nor a part of it."""
        stated = self._stated.get("architectures") or ()
        kind = class_named(stated)
        trained = type(self._model)
        other = kind is not None and not issubclass(trained, kind)
        return other and not self.is_part and trained.__name__ not in stated

    @property
    def renamed(self) -> list[str]:
        """The tensors of the files that are saved under other names, divided or transposed."""
        return sorted(self._weights.values() - self.written)

    def _read_carried(self, name: str) -> torch.Tensor:
        """Read a tensor that is not trained. Raises DiskError if the base's folder is gone."""
        expected = f"{name}, as at the start of the run"
        with refused(str(self._folder), expected, OSError, SafetensorError, raises=DiskError):
            return self.carried.read(name)

    def _check_part(self) -> None:
        """Raise ConfigError if the config of what is trained is no part of the base's."""
        kind = type(self._model.config)
        if config_json.path_to_part(self._config, kind) is None:
            actual = f"a {type(self._config).__name__} without a {kind.__name__}"
            raise self._refused(actual, "a config that has that of its text")

    def _check_carried(self) -> None:
        """Raise ConfigError for codes that nothing dequantises: what is saved is not quantised."""
        codes = self.carried.codes
        if codes and self._weights.quantised_by:
            actual = f"{len(codes)} quantised tensors that are not trained: {listed(codes, 3)}"
            raise self._refused(actual, "a base of which they are stored in 16 or 32 bits")

    @cached_property
    def written(self) -> set[str]:
        """The names of the tensors in the files that are written."""
        places = [place for each in self._places.values() for place in each]
        return {*(piece.name for place in places for piece in place), *self.carried}

    def _check_complete(self) -> None:
        """Raise ConfigError if the whole model would lack a tensor that the base's files have."""
        complete = {
            name
            for name, conversion in self._planned.items()
            if name in self.written or {*values_of(conversion)} <= self.written
        }
        tied = aliases_of(self._whole)
        complete |= {alias for alias, first in tied.items() if first in complete}
        complete |= {first for alias, first in tied.items() if alias in complete}
        if lost := sorted(self._planned.keys() - complete):
            actual = f"{type(self._whole).__name__} would miss {len(lost)} tensors of the result"
            expected = "a base whose tensors have their own names in its files"
            raise self._refused(f"{actual}: {listed(lost, 3)}", expected)

    def _refused(self, actual: str, expected: str) -> ConfigError:
        hint = f"Set {WHOLE_KEY} to false to save a {type(self._model).__name__} alone"
        return ConfigError(Problem(f"trainer.model: {self._folder}", actual, expected, hint))


def class_named(stated: Sequence[str]) -> type[PreTrainedModel] | None:
    """Return transformers' class for the first name in `architectures`; None if there is none."""
    kind = getattr(transformers, next(iter(stated), ""), None)
    is_model = isinstance(kind, type) and issubclass(kind, PreTrainedModel)
    return kind if is_model else None


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
