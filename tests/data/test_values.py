"""Fingerprints of a user's own data: the same in every process, and other ones for other values."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trainer.data.dataset import pairs_of
from trainer.data.values import ValueHash, digest_of_samples

# what samples of users hold; each line is evaluated in several processes
SAMPLES = """
import dataclasses, datetime, decimal, enum, pathlib, types, uuid
from collections import Counter, OrderedDict, UserDict, deque, namedtuple
import numpy as np, torch
from PIL import Image
Point = namedtuple("Point", "x y")
class Colour(enum.Enum):
    RED = 1
@dataclasses.dataclass
class Sample:
    image: object
    label: int
class Plain:
    def __init__(self, value):
        self.value, self.again = value, value
class Slotted:
    __slots__ = ("value",)
    def __init__(self, value):
        self.value = value
base = torch.arange(12.0).reshape(3, 4)
ring = [1]; ring.append(ring)
VALUES = {
    "pair": (base[1], torch.tensor(3)),
    "view": (base.t(), base[:, 1::2]),
    "bfloat16": base.bfloat16(),
    "float8": base.to(torch.float8_e4m3fn),
    "complex": torch.view_as_complex(base.reshape(6, 2)).conj(),
    "bool": base > 3,
    "empty": torch.empty(0, 3),
    "sparse": base.relu().sub(5).relu().to_sparse(),
    "csr": base.sub(5).relu().to_sparse_csr(),
    "quantised": torch.quantize_per_tensor(base, 0.1, 10, torch.quint8),
    "leaf": torch.nn.Parameter(base),
    "grad": torch.nn.Parameter(base) * 2,
    "array": np.arange(6).reshape(2, 3)[:, ::2],
    "masked": np.ma.masked_array([1, 2, 3], [0, 1, 0]),
    "structured": np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    "objects": np.array(["one", None, {"a": 1}], dtype=object),
    "dict": {"b": base, "a": {"x", "y", "z", "w"}, 3: frozenset("abcdef")},
    "user dict": UserDict(a=1), "ordered": OrderedDict(a=1), "counter": Counter("abca"),
    "deque": deque([1, base]), "point": Point(1, base), "colour": Colour.RED,
    "sample": Sample(base, 3), "plain": Plain(base), "slots": Slotted(base),
    "space": types.SimpleNamespace(a=base), "image": Image.new("RGB", (3, 2), (1, 2, 3)),
    "times": (datetime.datetime(2020, 1, 1), decimal.Decimal("1.5"), uuid.UUID(int=5)),
    "places": (pathlib.Path("a"), torch.float16, torch.device("cpu"), torch.Size([2]), slice(1)),
    "function": Plain(len), "class": Plain, "bytes": (b"a", bytearray(b"a")), "ring": ring,
    "numbers": (1, 1.0, True, None, float("nan"), 1j, "\\ud800", 10**30),
}
"""
HASHED = """
from trainer.data.values import ValueHash
for name, value in VALUES.items():
    own = ValueHash()
    print(name, own.of((value, value)).hex(), sorted(own.unknown))
"""


def values() -> dict[str, Any]:
    results: dict[str, Any] = {"__name__": "__main__"}
    exec(SAMPLES, results)
    return dict(results["VALUES"])


def test_values_have_one_digest_in_every_process() -> None:
    """Each process has hashes of strings, and addresses, of its own."""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SAMPLES + HASHED],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for seed in ("1", "2", "3")
    ]
    assert outputs[0] == outputs[1] == outputs[2] and len(outputs[0]) == len(values())
    assert [line for line in outputs[0] if not line.endswith("[]")] == []
    assert len({line.split()[-2] for line in outputs[0]}) == len(outputs[0])


CHANGES: dict[str, tuple[Any, Any]] = {
    "a value": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
    "dtype": (torch.zeros(2), torch.zeros(2).double()),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "order": ((1, 2), (2, 1)),
    "nesting": ((1, (2, 3)), ((1, 2), 3)),
    "key": ({"a": 1}, {"b": 1}),
    "swapped": ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
    "texts": (("ab", "c"), ("a", "bc")),
    "kinds": (1, True),
    "bytes": (b"ab", bytearray(b"ab")),
    "mask": (np.ma.masked_array([1, 2], [0, 1]), np.ma.masked_array([1, 2], [1, 0])),
    "deep": ([[[[{"a": torch.ones(1)}]]]], [[[[{"a": torch.zeros(1)}]]]]),
    "array of objects": (np.array([1, None], object), np.array([2, None], object)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_another_value_has_another_digest(kind: str) -> None:
    before, now = CHANGES[kind]
    assert ValueHash().of(before) != ValueHash().of(now)


def test_equal_values_are_equal_however_they_are_stored() -> None:
    base = torch.arange(6.0)
    own = base[2:4].clone()
    assert ValueHash().of((base[2:4], base[2:4])) == ValueHash().of((own, own.clone()))
    assert ValueHash().of({"a": 1, "b": 2}) == ValueHash().of({"b": 2, "a": 1})


class Drawn:
    """Samples that `draw` changes."""

    def __init__(self, draw: Callable[[int], Any]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index]), self.draw(index)


OWN = np.random.default_rng()
RANDOM: dict[str, Callable[[int], Any]] = {
    "torch": lambda index: torch.rand(3),
    "numpy": lambda index: np.random.rand(3),
    "python": lambda index: random.random(),
    "rarely": lambda index: random.random() < 0.02,
    "a generator of its own": lambda index: OWN.random(),
    "an address": lambda index: id(object()) + OWN.integers(9),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_samples_that_are_drawn_anew_count_by_their_number_and_it_is_said(kind: str) -> None:
    state = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    result, again = (pairs_of(Drawn(RANDOM[kind]), None, 0.0) for _ in range(2))
    assert result.fingerprint == again.fingerprint
    assert len(result.notes) == 1 and "differ" in result.notes[0]
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1:] == (random.getstate(), str(np.random.get_state()))


def test_samples_that_seed_the_generators_are_the_same() -> None:
    def drawn(index: int) -> torch.Tensor:
        torch.manual_seed(index)
        return torch.rand(3)

    result = pairs_of(Drawn(drawn), None, 0.0)
    assert result.notes == ()
    assert result.fingerprint != pairs_of(Drawn(lambda index: drawn(index) + 1), None, 0.0)


def test_what_cannot_be_compared_is_said_and_never_refuses() -> None:
    data = [(torch.tensor(1), threading.Lock()) for _ in range(3)]
    result = pairs_of(data, None, 0.0)
    other = pairs_of([(torch.tensor(1), threading.Lock()) for _ in range(3)], None, 0.0)
    assert result.fingerprint == other.fingerprint and "lock" in result.notes[0]
    changed = pairs_of([(torch.tensor(2), threading.Lock()) for _ in range(3)], None, 0.0)
    assert result.fingerprint != changed.fingerprint


def test_many_objects_that_know_one_another_are_looked_at_once() -> None:
    class Node:
        def __init__(self) -> None:
            self.others: list[Any] = []

    nodes = [Node() for _ in range(40)]
    for node in nodes:
        node.others = nodes
    unknown: set[str] = set()
    assert digest_of_samples(nodes.__getitem__, range(3), unknown) and not unknown
