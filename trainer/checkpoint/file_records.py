"""The record of a finished file: its size, and a hash of each part that a rank wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from trainer.storage import Json, required

PARTS = "manifest-parts.jsonl"
"""The file with the hashes of what several ranks wrote: a line for each of them."""


class Span(NamedTuple):
    """Bytes of a file: runs of `run` bytes, one every `step` bytes from `start` on, up to `end`."""

    start: int
    end: int
    run: int
    step: int

    @property
    def size(self) -> int:
        """Bytes in all runs."""
        return ((self.end - self.start - self.run) // self.step + 1) * self.run

    def runs(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield start and end of each run, or of pieces of it that have at most `most` bytes."""
        for start in range(self.start, self.end, self.step):
            for piece in range(start, start + self.run, most):
                yield piece, min(piece + most, start + self.run)


def span(start: int, end: int) -> Span:
    """Return the span of all bytes from `start` to before `end`."""
    return Span(start, end, end - start, max(1, end - start))


Hashed = tuple[Span, str]
"""A part of a file, and its digest: hex digits, of BLAKE3 after `blake3:`, else of SHA-256."""


def kind_of(digest: str) -> str:
    """Return the name of the hash that made a digest: sha256 or blake3."""
    return "blake3" if digest.startswith("blake3:") else "sha256"


class Hash(Protocol):
    """A hash that is being computed, of `hashlib` or `blake3`."""

    @property
    def name(self) -> str: ...
    def update(self, content: bytes | memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


def new_hash(kind: str) -> Hash:
    """Return a hash of no bytes yet. Raises ConfigError if BLAKE3's package is missing."""
    if kind == "blake3":
        return required(
            "blake3.blake3", "checkpoints hashed by BLAKE3", "meshloom[blake3]"
        ).blake3()
    return hashlib.sha256()


def digest_of(content: Hash) -> str:
    """Return the digest of a hash, as a manifest has it."""
    return f"{'blake3:' if content.name == 'blake3' else ''}{content.hexdigest()}"


def shown(digest: str) -> str:
    """Return a digest's hash and first 12 digits, for the user."""
    name = {"blake3": "BLAKE3", "sha256": "SHA-256"}[kind_of(digest)]
    return f"{name} {digest.removeprefix('blake3:')[:12]}..."


@dataclass(frozen=True)
class FileRecord:
    """The size and the hashes of a finished file."""

    size: int
    """Bytes."""
    parts: tuple[Hashed, ...]
    """Its parts: one, if one rank wrote it; none, if they are in the file `PARTS`."""

    @classmethod
    def whole(cls, size: int, sha256: str) -> FileRecord:
        return cls(size, ((span(0, size), sha256),))

    @property
    def in_blake3(self) -> bool:
        return any(kind_of(digest) == "blake3" for _, digest in self.parts)

    def to_json(self) -> Json:
        """Return the file's entry in a manifest."""
        if not self.parts:
            return {"size": self.size, "parts": PARTS}
        if is_whole(self.parts, self.size) and not self.in_blake3:
            return {"size": self.size, "sha256": self.parts[0][1]}
        return {"size": self.size, "parts": parts_to_json(self.parts)}

    @classmethod
    def of(cls, size: int, sha256: str | None = None, parts: Any = ()) -> FileRecord:
        """Return the record of a manifest's entry. Raises TypeError or ValueError if it is none."""
        if sha256 is not None:
            return cls.whole(size, sha256)
        if parts == PARTS:
            return cls(size, ())
        own = parts_from_json(parts, size)
        if not own or sum(place.size for place, _ in own) != size:
            raise ValueError("parts that are not the whole file")
        return cls(size, own)


Records = Mapping[str, FileRecord]
"""Files by their paths below a folder."""


def is_whole(parts: Sequence[Hashed], size: int) -> bool:
    """Return True if a file of `size` bytes has one part, of all its bytes."""
    return [place for place, _ in parts] == [span(0, size)]


def parts_to_json(parts: Iterable[Hashed]) -> list[list[int | str]]:
    """Return parts as a checkpoint's files have them: without run and step if they have no gaps."""
    plain = [(place, place == span(place.start, place.end), digest) for place, digest in parts]
    return [[*(place[:2] if whole else place), digest] for place, whole, digest in plain]


def parts_from_json(parts: Any, size: int) -> tuple[Hashed, ...]:
    """Return parts of a file of `size` bytes, as they were read.

    Raises TypeError or ValueError if they are none.
    """
    places = [Span(*at) if at[2:] else span(*at) for *at, _ in parts]
    if any(type(number) is not int for place in places for number in place):
        raise TypeError("parts without places")
    if any(type(digest) is not str for *_, digest in parts):
        raise TypeError("parts without hashes")
    if not all(0 <= p.start < p.end <= size and 0 < p.run <= p.step for p in places):
        raise ValueError("parts outside the file")
    return tuple(zip(places, (digest for *_, digest in parts), strict=True))
