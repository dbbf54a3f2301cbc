"""The rendezvous: missing ranks are named, taken ports and unreachable hosts are errors."""

from __future__ import annotations

import datetime
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.commands import run, write_job
from tests.support.messages import raises, shows
from trainer.errors import ConfigError
from trainer.supervise import meeting
from trainer.supervise.notes import Notes, notes_of
from trainer.supervise.world import reserved_port

TIMEOUT = datetime.timedelta(seconds=20)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with raises(ConfigError, "another program", f"127.0.0.1:{port}"):
            meeting.serve("127.0.0.1", port, TIMEOUT)


def test_it_listens_where_it_must_and_nowhere_else() -> None:
    store = meeting.serve("127.0.0.1", 0, TIMEOUT)
    listening = [
        line.split()[1]
        for line in Path("/proc/net/tcp").read_text().splitlines()
        + Path("/proc/net/tcp6").read_text().splitlines()
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{store.port:04X}")
    ]
    assert listening == [f"0100007F:{store.port:04X}"]


def test_a_machine_that_nobody_answers_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "REACH_SECONDS", 0.5)
    with raises(ConfigError, "rank 3 on", "can't reach", "0 at no-such-host.invalid:29500"):
        meeting.reach("no-such-host.invalid", 29500, 3, TIMEOUT, print)


def test_one_that_has_not_started_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "REACH_SECONDS", 0.1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begun = threading.Timer(1.0, lambda: stores.append(meeting.serve("127.0.0.1", port, TIMEOUT)))
    stores: list[object] = []
    messages: list[str] = []
    begun.start()
    assert meeting.reach("127.0.0.1", port, 1, TIMEOUT, messages.append).port == port
    assert messages
    assert "rank 1 on" in messages[0]
    shows(messages[0], "can't reach", "0 at 127.0.0.1")


def test_who_is_missing_is_said_and_then_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "TELL_SECONDS", 0.5)
    store, message = meeting.serve("127.0.0.1", 0, TIMEOUT), []
    others = [meeting.reach("127.0.0.1", store.port, rank, TIMEOUT, print) for rank in (1, 2, 3)]
    with ThreadPoolExecutor(3) as pool:
        alone = pool.submit(meeting.session, others[0], 1, 4, 2.0)
        store.wait(["meshloom/asks/1"])
        with raises(ConfigError, "2 of 4 ranks", "come: rank 2", "rank 3"):
            meeting.session(store, 0, 4, 1.5, message.append)
        assert message
        shows(message[0], "waiting", "rank 2", "3 of 4 for")
        with raises(ConfigError, "1 met rank 0", "came"):
            alone.result()
        message.clear()
        for rank, other in enumerate(others, 1):
            pool.submit(meeting.session, other, rank, 4, 20.0)
        meeting.session(store, 0, 4, 20.0, message.append)
    assert message == []


def test_a_reserved_port_is_nobody_elses_but_who_listens_on_purpose() -> None:
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        assert meeting.serve("127.0.0.1", port, TIMEOUT).port == port


def test_notes_between_a_launcher_and_its_ranks(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    assert notes_of({}) is None
    assert notes.end(0) is None and notes.place(0) is None
    notes.write_place(1, "step 3, training")
    notes.write_end(1, "first", 70, follows=True)
    notes.write_end(1, "second", 74)
    assert notes.place(1) == "step 3, training"
    assert (end := notes.end(1)) and (end.text, end.code, end.follows) == ("first", 70, True)
    (tmp_path / "end-0").write_text("{")
    assert notes.end(0) is None


@pytest.mark.more
def test_verify_names_the_rank_that_is_missing(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    script = (
        "import sys; from trainer.supervise import meeting; meeting.TELL_SECONDS, "
        "meeting.MEET_SECONDS = 0.3, 1.0; "
        "from trainer.command.verify import main; sys.exit(main(sys.argv[1:], 'verify'))"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    certificate = ("--output", tmp_path / "certificate.json")
    result = run(
        sys.executable, "-c", script, "--config", job, *certificate, **alone, MASTER_PORT=str(port)
    )
    assert result.code == 64
    shows(result.output, "waiting", "1 of 2 for")
    shows(result.output.splitlines()[-1], "rendezvous: 1 of 2", "ranks", "rank 1")
