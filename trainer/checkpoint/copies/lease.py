"""The lease of a copy: one process at a time writes it, and gives a sign of life now and then."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from threading import Event, Thread

from trainer.checkpoint.copies import marks
from trainer.checkpoint.copies.bucket import Bucket
from trainer.checkpoint.copies.marks import MARK, foreign, mark_of
from trainer.storage import Json, to_json


class Lease:
    """The mark of this process at the copy of a run, renewed until `ended`.

    All methods but `close` raise DiskError if the copy is another folder's, or another process's.
    """

    def __init__(self, address: str, ended: Event) -> None:
        self._address = address
        self._bucket = Bucket(address)
        """The copy, for signs of life, which are no progress."""
        self._ended = ended
        self._mark: Json = {}
        self._foreign: Json | None = None
        """The mark of another writer, if the last look showed one."""
        self._signs = Thread(target=self._give_signs, name="signs of life", daemon=True)

    @property
    def token(self) -> object:
        """The token of the folder whose copy this process writes; None before `take`."""
        return self._mark.get("token")

    def token_there(self) -> object:
        """Return the token of the folder that the copy is of; None if there is no copy."""
        return mark_of(self._bucket).get("token")

    def take(self, own: Json) -> None:
        """Write the mark of this process; `own` is the mark of the run's folder."""
        mark = mark_of(self._bucket)
        if mark and mark["token"] not in (own["token"], own.get("follows")):
            raise foreign(self._address, mark)
        self._mark = {"token": own["token"], "by": f"{socket.gethostname()}, {os.getpid()}"}
        self._sign()

    def begin(self) -> None:
        """Give signs of life from now on."""
        self._signs.start()

    def check(self) -> None:
        """Look whose the copy is by now."""
        mark = mark_of(self._bucket)
        self._foreign = None if self._mark.items() <= mark.items() else mark
        self.refuse_lost()

    def refuse_lost(self) -> None:
        """Raise as `check` does if the last look showed another writer; costs nothing."""
        if (mark := self._foreign) is not None:
            raise foreign(self._address, mark)

    def end(self) -> None:
        """Write that the run has ended, once `ended` is set: another machine need not wait."""
        if self._mark:
            self._signs.join()
            self._sign(ended=True)

    def close(self) -> None:
        """Wait for the last sign of life, once `ended` is set."""
        if self._signs.is_alive():
            self._signs.join()

    def _give_signs(self) -> None:
        while not self._ended.wait(marks.SIGN_SECONDS):
            with suppress(Exception):  # the network's: the next one may arrive
                self.check()
                self._sign()

    def _sign(self, ended: bool = False) -> None:
        own = {"time": time.time(), "ended": ended}
        self._bucket.write(MARK, to_json({**self._mark, **own}))
