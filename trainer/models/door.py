"""The door to the folder of a model that somebody made: what is checked before a library reads it.

Every command that reads such a folder goes through here, so that none is worse protected than
training: only regular files of plausible sizes, configs with plausible counts, templates with a
limit of memory and time, and whatever a library raises becomes a ConfigError with the place.
"""

from __future__ import annotations

import re
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.errors import ConfigError, Problem, refused
from trainer.storage import REFUSED_PICKLE, Json, check_regular, parse_json, read_file, size

LONGEST = 1 << 18
TIMES = 16
MEMORY = 1 << 30
SECONDS = 60.0
"""A rendering's limits: characters, characters for each of the chat, bytes, CPU seconds."""
BUILD_MEMORY = 1 << 34
BUILD_SECONDS = 120.0
"""The limits of building a model without values: Kimi's trillion parameters take seconds."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""The endings of files of any size."""
LARGEST = 1 << 28
"""The most bytes of another file: the largest tokenizers have 35 MB."""
MOST_MODULES = 10_000
"""The most layers, or experts in a layer: the largest models have hundreds."""
PER_BYTE = 64
"""The most parameters for each byte of weights: eight are the most of any quantisation."""
OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json", "adapter_config.json")
_INDEX = ".index.json"
_MODULES = re.compile(r"(n|num)_(\w+_)?(layers?|blocks?|experts?)|(encoder|decoder)_layers")
"""The keys of a config that count modules, each of which is built."""


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless a model's folder can be read without harm; reads no weights.

    All that lies in it must be a regular file, links followed, or a folder; its JSON files must be
    objects, with plausible counts; its indexes must name files in it.
    """
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            continue
        with refused(str(path), "a regular file", OSError):
            check_regular(path)
            count = path.stat().st_size
        if path.suffix not in WEIGHTS and count > LARGEST:
            raise ConfigError(Problem(str(path), size(count), f"at most {size(LARGEST)}"))
    for name in OBJECTS:
        if (folder / name).is_file():
            check_counts(object_in(folder / name), str(folder / name))
    for path in sorted(folder.glob(f"*{_INDEX}")):
        if not path.with_name(path.name.removesuffix(_INDEX)).is_file():  # that would come first
            _check_index(path)


def object_in(path: Path) -> Json:
    """Return the object in a JSON file. Raises ConfigError for anything else."""
    with refused(str(path), "a JSON object", OSError, ValueError):
        content = parse_json(read_file(path, LARGEST))
    if not isinstance(content, dict):
        raise ConfigError(Problem(str(path), f"a {type(content).__name__}", "a JSON object"))
    return content


def check_counts(config: Mapping[str, object], place: str) -> None:
    """Raise ConfigError if a config counts so many modules that to build them would never end."""
    waiting: list[Any] = [config]
    while waiting:
        part = waiting.pop()
        waiting += part.values() if isinstance(part, Mapping) else part
        for key, value in part.items() if isinstance(part, Mapping) else ():
            counts = isinstance(value, int) and _MODULES.fullmatch(key)
            if counts and not 0 <= value <= MOST_MODULES:
                actual = f"{key} is {value:,}"[:200]
                expected = f"from 0 to {MOST_MODULES:,}"
                raise ConfigError(Problem(place, actual, expected))
        waiting = [one for one in waiting if isinstance(one, dict | list)]


def _check_index(path: Path) -> None:
    """Raise ConfigError unless an index maps names to files of its folder that are there."""
    files = object_in(path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ConfigError(Problem(str(path), "no weight_map", "a weight_map of names to files"))
    for name in sorted(set(files.values())):
        if Path(name).name != name:
            expected = "names of files in this folder"
            raise ConfigError(Problem(str(path), repr(name)[:200], expected))
        if not (path.parent / name).is_file():
            actual = f"{name[:200]}, which is not there"
            raise ConfigError(Problem(str(path), actual, "the files that it names"))


def check_size(folder: Path, parameters: int, place: str) -> None:
    """Raise ConfigError if a config makes far more parameters than its folder's weights can hold.

    A library would fill these with initial values, in memory that no machine has.
    """
    files = [path for path in folder.iterdir() if path.suffix in WEIGHTS]
    if not files:
        expected = "model.safetensors, its index and parts, or pytorch_model.bin"
        raise ConfigError(Problem(place, "no weights", expected))
    stored = sum(path.stat().st_size for path in files)
    if parameters > PER_BYTE * stored:
        actual = f"a config of {parameters:,} parameters, and weights of {size(stored)}"
        raise ConfigError(Problem(place, actual, "a config that fits the weights"))


@contextmanager
def opening(place: str, expected: str) -> Iterator[None]:
    """Turn whatever a library raises over a model's folder into a ConfigError with the place."""
    from pickle import UnpicklingError

    try:
        with refused(place, expected, named=True):
            yield
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, UnpicklingError) or "weights_only" in str(cause):
            actual = f"weights in a file {REFUSED_PICKLE}"
            hint = "Ask their author for safetensors"
            raise ConfigError(Problem(place, actual, "tensors alone", hint)) from error
        if isinstance(cause, MemoryError | TimeoutError):
            actual = "it takes too much memory or time"
            raise ConfigError(Problem(place, actual, expected)) from error
        raise


def limited(render: Callable[[], str], chat: object, origin: str) -> str:
    """Return what `render` makes of a chat, within a rendering's limits.

    Raises ConfigError for a template, of `origin`, that takes more; what it itself raises stays.
    """
    room = LONGEST + TIMES * len(str(chat))
    try:
        with bounded(MEMORY + TIMES * room, SECONDS):
            text = render()
        if len(text) > room:
            raise MemoryError
    except (MemoryError, TimeoutError) as error:
        limits = f"more than {room:,} characters, or takes too much memory or time"
        place = f"the chat template of {origin}"
        actual = f"it makes {limits}"
        raise ConfigError(Problem(place, actual, "a template that ends soon")) from error
    return text


@contextmanager
def bounded(memory: int, seconds: float) -> Iterator[None]:
    """Raise MemoryError in code that takes `memory` more bytes, TimeoutError after CPU seconds.

    Only the main thread, which receives signals, has the limit of time. Only on Linux, which shows
    what the process has, is memory limited.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory
        limit = most if soft == resource.RLIM_INFINITY else min(soft, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    timed = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGVTALRM, _late) if timed else None
    if timed:  # again each second, where the program catches the first
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        yield
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _late(number: int, frame: FrameType | None) -> None:
    raise TimeoutError
