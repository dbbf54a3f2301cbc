"""Checks of a model's folder from an unknown source, made before a library reads it.

Every command that reads such a folder uses them, so that all are protected as training is. Files
must be regular and of plausible sizes, and configs must have plausible counts. Rendering a chat
template is limited in memory and time. Whatever a library raises becomes a ConfigError with the
place.
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

from trainer.errors import ConfigError, Problem, refused, suggestion
from trainer.storage import REFUSED_PICKLE, Json, check_regular, parse_json, read_file, size

LONGEST = 1 << 18
TIMES = 16
MEMORY = 1 << 30
SECONDS = 60.0
"""The limits of rendering a chat template.

In order: characters of the result, more of these for each character of the chat, bytes of memory,
and CPU seconds.
"""
BUILD_MEMORY = 1 << 34
BUILD_SECONDS = 120.0
"""The limits of building a model without values, in bytes and CPU seconds.

Kimi's trillion parameters take a few seconds.
"""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""The endings of weight files, which may have any size."""
NOT_ON_HUB = (*WEIGHTS, ".json", ".jsonl", ".yaml", ".yml", ".txt")
"""The endings of files, which no model on the Hub has in its name."""
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
HUB_TRIED = "no such folder here, and the Hub, which was tried then: "
"""The begin of an error for a name that may be one on the Hub."""
CHECK_PATH = "Correct the path, or reach the Hub (HF_ENDPOINT, HTTPS_PROXY)"
LARGEST = 1 << 28
"""The most bytes of any other file: the largest tokenizers have 35 MB."""
MOST_MODULES = 10_000
"""The most layers, or experts in a layer: the largest models have hundreds."""
PER_BYTE = 64
"""The most parameters for each byte of weights: no quantisation has more than eight."""
OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json", "adapter_config.json")
_INDEX = ".index.json"
_MODULES = re.compile(r"(n|num)_(\w+_)?(layers?|blocks?|experts?)|(encoder|decoder)_layers")
"""The keys of a config that count modules, each of which is built."""


def may_be_on_hub(name: str) -> bool:
    """Return True if a model's name is that of no folder or file here, and may be one on the Hub.

    A name in a folder of runs, such as runs/NAME, is that of a run.
    """
    path = Path(name)
    if path.exists() or not HUB_ID.fullmatch(name) or path.suffix.lower() in NOT_ON_HUB:
        return False
    return "/" not in name or not any(path.parent.glob("*/environment.json"))


def check_name(name: str, place: str) -> None:
    """Raise ConfigError at once for a name that is no folder here, nor may be one on the Hub."""
    path = Path(name)
    expected = "a folder that save_pretrained wrote"
    if path.is_file():
        raise ConfigError(Problem(place, "a file", expected, "Name the folder that it is in"))
    if not path.is_dir() and not may_be_on_hub(name):
        beside = [str(one) for one in path.parent.glob("*") if one.is_dir()]
        hint = suggestion(name, beside)
        raise ConfigError(Problem(place, "no such folder", f"{expected}, or a hub id", hint))


def check_folder(folder: Path) -> None:
    """Raise ConfigError unless a model's folder is safe to read; reads no weights.

    Each entry must be a folder or, with links followed, a regular file of a plausible size. Each of
    `OBJECTS` must be a JSON object with plausible counts. An index must name files in the folder.
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
        # a single file takes precedence over its index
        if not path.with_name(path.name.removesuffix(_INDEX)).is_file():
            _check_index(path)


def object_in(path: Path) -> Json:
    """Return the object in a JSON file. Raises ConfigError for anything else."""
    with refused(str(path), "a JSON object", OSError, ValueError):
        content = parse_json(read_file(path, LARGEST))
    if not isinstance(content, dict):
        raise ConfigError(Problem(str(path), f"a {type(content).__name__}", "a JSON object"))
    return content


def check_counts(config: Mapping[str, object], place: str) -> None:
    """Raise ConfigError if a number of layers or experts, in any part of a config, is implausible.

    Building too many would take forever.
    """
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
    """Raise ConfigError unless an index maps names to files that exist in its own folder."""
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
    """Raise ConfigError for a folder without weights, or with far too few for its `parameters`.

    A library would give the missing ones initial values, in more memory than any machine has.
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
def opening(place: str, expected: str, start: str = "", hint: str = "") -> Iterator[None]:
    """Turn whatever a library raises for a model's folder into a ConfigError with the place.

    `start` and `hint` are as for `refused`.
    """
    from pickle import UnpicklingError

    try:
        with refused(place, expected, named=True, start=start, hint=hint):
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
    """Return the text that `render` makes of a chat, within the limits of rendering.

    `origin`: the source of the template, for the error. Raises ConfigError for a template over a
    limit. Any other error of the template itself is passed on.
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
    """Raise MemoryError in code that takes `memory` more bytes, TimeoutError after CPU `seconds`.

    Time is limited only in the main thread, which receives signals. Memory is limited only on
    Linux, which shows how much the process has.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory
        limit = most if soft == resource.RLIM_INFINITY else min(soft, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    timed = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGVTALRM, _late) if timed else None
    if timed:  # again each second, in case the code inside catches the first
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
