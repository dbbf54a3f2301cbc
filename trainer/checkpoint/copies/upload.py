"""Copies of a run at an address of fsspec, such as `s3://bucket/runs`, made behind the training.

Each checkpoint of the run is in one of four states, which is what is on the two disks:

    local     it is in the run's folder, and nothing of it is at the copy
    copying   files of it are at the copy, without the manifest
    whole     its manifest is at the copy: it was written last, after all other files
    pruned    the manifest was removed first, then the files

and these are the edges between them:

    local -> copying    the newest that is not whole is taken first. It is kept: until it is whole,
                        the run does not remove it here, however slow the copying is
    copying -> copying  a failure, or a death: it is begun again, at the next checkpoint or start
    copying -> whole    the manifest is written, if the copy is still this run's own
    whole -> pruned     if the run has removed it here, a newer one of the run is whole, and as many
                        whole ones as the run keeps remain
    whole -> copying    a restore has found the copy damaged: its manifest is removed, and the files
                        stay until a newer one is whole

`final/` and `final-merged/` have the same states; `models.json` at the copy stands for the
manifest. A run is finished when all that it keeps is whole; a later start of the same command sees
what is not, and copies it. One process at a time decides what is written to the copy of a run: its
mark is there, with a sign of life every few seconds (`lease.py`). The large files may be copied by
all ranks (`shares.py`); the manifest is written when the files of all of them are there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from trainer.checkpoint.copies.bucket import Bucket, in_streams
from trainer.checkpoint.copies.lease import Lease
from trainer.checkpoint.copies.marks import KEY, copying, marked_at, order
from trainer.checkpoint.copies.rank_share import RankShare
from trainer.checkpoint.copies.share_store import Closed, ShareStore
from trainer.checkpoint.copies.shares import Shares, takes_part
from trainer.checkpoint.directory import prune, published
from trainer.checkpoint.manifest import MANIFEST, STEP_FOLDER, check_sizes
from trainer.errors import MeshloomError, listed, named_line, refused
from trainer.storage import Json, parse_json, to_json

RECORDS = ("config.json", "environment.json", "metrics.jsonl")
"""The files of a run by which it is known, and resumes where it was."""
MODELS = ("final", "final-merged")
MODELS_MARK = "models.json"
"""The folders of the final model, and the file at a copy that says which of them are whole."""
ATTEMPTS = 3
"""Failures in a row, without a file that was copied, after which a newer checkpoint is taken."""


def check(address: str) -> None:
    """Raise ConfigError unless the address can be written, DiskError if it does not answer."""
    expected = "an address of fsspec that you may write, such as s3://bucket/runs"
    with refused(f"{KEY}: {address}", expected, named=True):
        Bucket(address).probe(".meshloom")


class Upload:
    """The copy of one run's folder, which a thread brings up to date."""

    def __init__(self, address: str, folder: Path) -> None:
        self._address = f"{address.rstrip('/')}/{folder.name}"
        self._folder = folder
        self._bucket = Bucket(self._address, self._moves)
        self._moved: Callable[[int], object] = lambda count: None
        self._thread: Thread | None = None
        self._choosing = Lock()
        """Locked while a local checkpoint is chosen to be copied, and while others are removed."""
        self._kept: Path | None = None
        self._requested = False
        self._whole: set[str] = set()
        """The checkpoints that were whole at the copy when it was last looked at."""
        self._skipped: list[str] = []
        self._done: set[str] = set()
        """The files that have arrived of the checkpoint that is copied, from any rank."""
        self._fruitless = 0
        self._ended = Event()
        self._lease = Lease(self._address, self._ended)
        self._shares: Shares | None = None
        self._own_share: RankShare | None = None

    def claim(self, own: Json) -> None:
        """Become the only writer of the copy until `finish`; `own` is the mark of the run's folder.

        Raises DiskError if the copy is of another folder.
        """
        with copying(self._address, "Check the address"):
            self._lease.take(own)
            for name in own.get("damaged", ()):
                self._bucket.remove_file(f"checkpoints/{name}/{MANIFEST}")
        self._lease.begin()

    def share(self, rank: int, world_size: int, store: Any) -> None:
        """Have all ranks copy large files until `stop_sharing`. Called on each, after the claim.

        `store`: PyTorch's store of all ranks, of which each thread makes a connection of its own.
        """
        if world_size > 1 and takes_part(rank, world_size):
            own = ShareStore(store, rank)
            if rank == 0:
                others = sum(takes_part(other, world_size) for other in range(1, world_size))
                token = self._lease.token
                check = self._lease.refuse_lost
                self._shares = Shares(own, others, token, self._address, self._moves, check)
            else:
                self._own_share = RankShare(own, rank, self._address, self._folder)

    def stop_sharing(self) -> None:
        """Use the store no more, in no thread; what is being copied by several ranks fails."""
        for share in (self._shares, self._own_share):
            if share is not None:
                share.close()

    def lacking(self, own: Mapping[str, object]) -> list[str]:
        """List the checkpoints and models of the run's folder that are not whole at the copy.

        `own` is the folder's mark; all are listed if the copy is of another folder. Raises
        DiskError if the copy can't be read.
        """
        with copying(self._address, "Check the address"):
            if own and self._lease.token_there() == own["token"]:
                return self._missing()
            return [*(path.name for path in self._local()), *self._models()]

    def _missing(self) -> list[str]:
        whole = self._whole_there()
        there = self._models_there()
        here = [path.name for path in self._local() if path.name not in whole]
        return [*here, *(name for name, own in self._models().items() if there.get(name) != own)]

    def soon(self, note: Callable[[str], None]) -> None:
        """Have the copy brought up to date, at once or after the update at work.

        `note` is called with a line if an update fails; the next one copies what is missing.
        """
        with self._choosing:
            self._requested = True
            if self._thread is None:
                self._thread = Thread(target=self._run, args=(note,), name="upload", daemon=True)
                self._thread.start()

    def prune(self, keep_last: int, keep_best: bool) -> list[Path]:
        """Remove checkpoints of the run as `directory.prune` does, but not the one being copied."""
        with self._choosing:
            copied = [self._kept] if self._kept else []
            gone = prune(self._folder / "checkpoints", keep_last, keep_best, copied)
            self._skipped += [path.name for path in gone if path.name not in self._whole]
            return gone

    def finish(
        self,
        moved: Callable[[int], object] = lambda count: None,
        keep: tuple[int, bool] | None = None,
    ) -> str:
        """Bring the copy up to date, with the final model; return its address.

        `moved` is called with the number of bytes of each block. `keep` has the arguments of
        `prune`, which then removes older checkpoints, here and at the copy. Raises DiskError if the
        copy is not whole.
        """
        self._moved = moved
        with self._choosing:
            thread = self._thread
            self._requested = False
        if thread is not None:
            thread.join()
        hint = f"All is in {self._folder}: the same command copies what is missing"
        with copying(self._address, hint):
            self._update(lambda line: None)
            if keep is not None:  # what was being copied stayed longer
                self.prune(*keep)
                self._prune_there()
            self._copy_models()
            if missing := self._missing():
                raise OSError(f"not whole: {listed(missing)}")
            self._ended.set()
            self._lease.end()
        return self._address

    def close(self) -> None:
        """Give no more signs of life, and begin no update; the one at work ends."""
        self._requested = False
        self._ended.set()
        self._lease.close()
        if (thread := self._thread) is not None:
            thread.join()

    # the thread

    def _run(self, note: Callable[[str], None]) -> None:
        while self._goes_on():
            try:
                self._update(note)
            except Closed:
                continue
            except MeshloomError as error:
                note(f"note: not copied: {error}")
            except Exception as error:  # the file system's, its client's or the network's
                why = f"{self._address} ({named_line(error)})"
                note(f"note: not copied to {why}; the next checkpoint tries again")

    def _goes_on(self) -> bool:
        with self._choosing:
            requested = self._requested
            self._requested = False
            self._thread = self._thread if requested else None
            return requested

    def _update(self, note: Callable[[str], None]) -> None:
        self._lease.check()
        for line in self._shares.notes() if self._shares else ():
            note(line)
        for name in RECORDS[:2]:  # by which a checkpoint belongs to a run
            self._copy_record(name)
        while (path := self._next()) is not None:
            before = len(self._done)
            try:
                self._copy(path)
            except BaseException:
                self._fruitless = 0 if len(self._done) > before else self._fruitless + 1
                if self._fruitless == ATTEMPTS:
                    self._kept = None
                raise
            self._prune_there()  # here: slow copying may go on to the end of the run
            with self._choosing:
                skipped = self._skipped
                self._skipped = []
            if skipped:
                slow = f"note: copying to {self._address} is slower than saving"
                note(f"{slow}: {listed(skipped)} went before it was copied")
        self._lease.check()
        self._prune_there()
        with suppress(FileNotFoundError):
            self._bucket.put(self._folder / RECORDS[2], RECORDS[2])

    def _next(self) -> Path | None:
        """Keep and return the checkpoint to copy: the one begun, else the newest not whole."""
        self._whole = self._whole_there()
        with self._choosing:
            missing = [path for path in self._local() if path.name not in self._whole]
            if self._kept not in missing:
                self._kept = missing[-1] if missing else None
                self._done.clear()
                self._fruitless = 0
            return self._kept

    def _local(self) -> list[Path]:
        """List the run's checkpoints, oldest first, without those that have lost something."""
        return [p for p in published(self._folder / "checkpoints") if not check_sizes(p)]

    def _copy(self, path: Path) -> None:
        to = f"checkpoints/{path.name}"
        self._put_all(path, to, [one for one in _files(path) if one != MANIFEST])
        self._lease.check()
        self._bucket.write(f"{to}/{MANIFEST}", (path / MANIFEST).read_bytes())

    def _put_all(self, folder: Path, to: str, names: Sequence[str]) -> None:
        def put(name: str) -> None:
            self._bucket.put(folder / name, f"{to}/{name}")
            arrived(name)

        def arrived(name: str) -> None:
            self._done.add(f"{to}/{name}")

        missing = [name for name in names if f"{to}/{name}" not in self._done]
        if self._shares is None:
            in_streams(put, missing)
        else:
            self._shares.copy(folder, to, missing, put, arrived)

    def _moves(self, count: int) -> None:
        """Report bytes that moved, or an answer. Raises DiskError once another has the lease."""
        self._lease.refuse_lost()
        self._moved(count)

    def _copy_record(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._bucket.write(name, (self._folder / name).read_bytes())

    def _whole_there(self) -> set[str]:
        """Return the checkpoints whose manifest is there, and was not cut off by a death."""
        whole = set()
        for name in marked_at(self._bucket):
            with suppress(FileNotFoundError, ValueError):
                parse_json(self._bucket.read(f"checkpoints/{name}/{MANIFEST}"))
                whole.add(name)
        return whole

    def _prune_there(self) -> None:
        own = {path.name for path in published(self._folder / "checkpoints")}
        whole = self._whole_there()
        if not whole & own:
            return
        newest = max(map(order, whole & own))
        there = set(filter(STEP_FOLDER.fullmatch, self._bucket.names("checkpoints")))
        for name in sorted(there - own, key=order):
            if order(name) < newest and (name not in whole or len(whole) > len(own)):
                self._bucket.remove(f"checkpoints/{name}", MANIFEST)
                whole.discard(name)

    # the final model

    def _models(self) -> dict[str, str]:
        models = {name: identity(self._folder / name) for name in MODELS}
        return {name: one for name, one in models.items() if one}

    def _models_there(self) -> Json:
        with suppress(FileNotFoundError, ValueError, TypeError):  # or of a write that was cut off
            return dict(parse_json(self._bucket.read(MODELS_MARK)))
        return {}

    def _copy_models(self) -> None:
        there = self._models_there()
        for name, own in self._models().items():
            if there.get(name) != own:
                self._bucket.write(MODELS_MARK, to_json({**there, name: None}))
                self._bucket.remove(name, "config.json")
                self._done.clear()
                self._put_all(self._folder / name, name, _files(self._folder / name))
                self._lease.check()
                there[name] = own
                self._bucket.write(MODELS_MARK, to_json(there))


def identity(folder: Path) -> str:
    """Return a hash of a folder's file names, sizes and times; empty if it has no files."""
    lines = [
        (name, about.st_size, about.st_mtime_ns)
        for name in _files(folder)
        for about in [(folder / name).stat()]
    ]
    return hashlib.sha256(repr(lines).encode()).hexdigest() if lines else ""


def _files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
