"""Which folder a command writes to and what it resumes from, without a model: folders, locks,
damage, changes.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from tests.support.checkpoint_pieces import ALONE, MODEL_FOLDER, STATE, live
from tests.support.commands import write_job
from tests.support.messages import raises, shows, shows_each
from tests.support.run.resuming import begun, finish
from trainer.checkpoint import save
from trainer.config import Config, load
from trainer.errors import ConfigError, DataError, DiskError
from trainer.run.start import choose as choose_module
from trainer.run.start import folder as run_folder
from trainer.run.start.changes import refuse_changed
from trainer.run.start.choose import choose
from trainer.run.start.request import Request
from trainer.supervise import locks, status_files
from trainer.supervise.locks import hold


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(write_job(tmp_path))


def test_the_first_run(config):
    start = choose(config, Request(), ALONE)
    assert (start.folder, start.source, start.lines) == (
        Path(config.trainer.run.folder) / "job",
        None,
        [],
    )


def test_the_same_command_goes_on(config):
    folder = begun(config, 10, 20)
    (folder / "metrics.jsonl").write_text('{"step": 99}\n{"step": 27}\n{"step": 2')
    (folder / "checkpoints" / "step-000030.partial").mkdir()
    start = choose(config, Request(), ALONE)
    assert (start.folder, start.source) == (folder, folder / "checkpoints/step-000020")
    shows_each(
        start.lines,
        f"left over in {folder / 'checkpoints'}: step-000030.partial",
        ("21 to 27 came", "repeated"),
    )


@pytest.mark.parametrize(
    "last", ["\0\0\0\n", '{"step": 5, "lo{"step": 6}\n', "[]\n", '{"step": null}\n', "\n", "7\n"]
)
def test_lines_of_metrics_that_are_none(config, last):
    folder = begun(config, 10)
    (folder / "metrics.jsonl").write_text('{"step": 12}\n' + last)
    shows_each(choose(config, Request(), ALONE).lines, ("11 to 12 came", "repeated"))


@pytest.mark.parametrize("content", ["", "[]", "null", '"request"', "\0"])
def test_a_run_that_does_not_say_how_it_was_started_is_not_this_one(config, content):
    folder = begun(config, 10)
    (folder / "environment.json").write_text(content)
    assert choose(config, Request(), ALONE).folder == folder.with_name("job-2")


@pytest.mark.parametrize("steps", [(), (10,)])
@pytest.mark.parametrize("name", ["job-1", "job-02", "job-0", "2", "lab-2"])
def test_runs_with_names_of_their_own_count_for_nothing(config, name, steps):
    begun(config, name=name)
    if steps:
        begun(config, *steps)
    start = choose(config, Request(), ALONE)
    assert start.folder.name == "job" and (start.source is not None) == bool(steps)


def test_folders_of_others_are_not_looked_into(config, monkeypatch):
    """Such as lost+found, where the folder of runs is a volume's root."""
    folder = begun(config, 10)
    (folder.parent / "lost+found").mkdir()
    monkeypatch.setattr(run_folder, "has_run", has_run := MagicMock(side_effect=run_folder.has_run))
    assert choose(config, Request(), ALONE).folder == folder
    assert {call.args[0] for call in has_run.call_args_list} == {folder}


def test_a_run_that_saved_nothing_starts_again_in_its_folder(config):
    folder = begun(config)
    start = choose(config, Request(), ALONE)
    assert (start.folder, start.source, start.lines) == (folder, None, [])


def test_another_command_starts_a_run_of_its_own(config):
    folder = begun(config, 10, request={"trainer": {"seed": 1}})
    start = choose(config, Request(), ALONE)
    assert (start.folder, start.source) == (folder.with_name("job-2"), None)
    shows_each(start.lines, (f"{folder}", "--resume auto resumes"))


@pytest.mark.parametrize("later", [1.0, -1.0])
def test_a_finished_run_is_left_alone(config, later):
    """A final model older than the run's start is that of a run which then continued with more
    steps.
    """
    folder = begun(config, 10)
    finish(folder, later)
    start = choose(config, Request(), ALONE)
    assert (start.folder, start.finished, start.lines) == (folder, later > 0, [])


def test_a_script_may_make_it_again(config):
    folder = begun(config, 10)
    finish(folder, 1.0)
    assert choose(config, Request(script=True), ALONE).folder == folder.with_name("job-2")


@pytest.mark.parametrize("key", ["log", "checkpoint", "generate", "patience"])
def test_what_is_told_of_a_run_makes_no_other_one(config, key):
    folder = begun(
        config,
        10,
        request={**config.raw, "trainer": {**config.raw.get("trainer", {}), key: {"other": 1}}},
    )
    assert choose(config, Request(), ALONE).folder == folder


def test_auto_goes_on_with_whatever_is_there(config):
    folder = begun(config, 10, request={})
    finish(folder, 1.0)
    assert (
        choose(config, Request(resume="auto"), ALONE).source == folder / "checkpoints/step-000010"
    )


def test_fresh(config):
    folder = begun(config, 10)
    start = choose(config, Request(fresh=True), ALONE)
    assert (start.folder, start.source, start.lines) == (folder.with_name("job-2"), None, [])


def test_a_run_at_work_is_refused_with_who_is(config, monkeypatch):
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.1)
    first = begun(config, 10)
    assert choose(config, Request(), ALONE).folder == first
    with raises(ConfigError, "locked by another process"):
        choose(config, Request(), ALONE)
    status_files.write(first, {"host": socket.gethostname(), "process": os.getpid()})
    with raises(ConfigError, "being trained", f"process {os.getpid()} on {socket.gethostname()}"):
        choose(config, Request(), ALONE)
    assert choose(config, Request(fresh=True), ALONE).folder == first.with_name("job-2")
    assert choose(config, Request(fresh=True), ALONE).folder == first.with_name(
        "job-3"
    )  # before it wrote a config


def test_without_locks_a_heartbeat_tells(config, monkeypatch):
    def refused(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(locks.fcntl, "flock", refused)
    folder = begun(config, 10)
    status_files.write(folder, {"host": "elsewhere", "process": 1})
    with raises(ConfigError, "process 1 on elsewhere", "0 s ago"):
        choose(config, Request(), ALONE)
    monkeypatch.setattr(status_files, "FRESH_SECONDS", 0.0)
    assert choose(config, Request(), ALONE).folder == folder


def test_a_lock_ends_with_its_process(config):
    folder = begun(config)
    if (child := os.fork()) == 0:
        os._exit(not hold(folder))
    assert os.waitpid(child, 0)[1] == 0
    assert choose(config, Request(), ALONE).folder == folder


def damage(checkpoint: Path) -> None:
    path = checkpoint / "trainer.json"
    content = bytearray(path.read_bytes())
    content[9] ^= 2
    path.write_bytes(content)


def test_damage_is_told_and_costs_steps(config):
    folder = begun(config, 10, 20, 30)
    for step in (20, 30):
        damage(folder / f"checkpoints/step-0000{step}")
    start = choose(config, Request(), ALONE)
    assert start.source == folder / "checkpoints/step-000010"
    message, before, left = start.lines
    assert message.startswith(
        f"step-000030 is damaged: {folder}/checkpoints/step-000030/trainer.json: SHA-256 "
    )
    shows(message, "now step-000030.damaged", "20 steps")
    shows(before, "now step-000020.damaged", "10 steps")
    assert left == f"left over in {folder}/checkpoints: step-000020.damaged, step-000030.damaged"


@pytest.mark.parametrize("again", [False, True])
def test_nothing_but_damage_is_an_error_until_a_person_decides(config, again):
    folder = begun(config, 10)
    if again:
        (folder / "checkpoints/step-000010").rename(folder / "checkpoints/step-000010.damaged")
    else:
        damage(folder / "checkpoints/step-000010")
    with pytest.raises(DiskError) as caught:
        choose(config, Request(), ALONE)
    assert "step-000010.damaged" in str(caught.value)
    shows(caught.value, "Repair", "--resume", "--fresh")
    assert choose(config, Request(fresh=True), ALONE).folder == folder.with_name("job-2")


def test_a_path_starts_a_run_of_its_own(config):
    folder = begun(config, 10, 20)
    start = choose(config, Request(resume=str(folder / "checkpoints/step-000010")), ALONE)
    assert (start.folder, start.source) == (
        folder.with_name("job-2"),
        folder / "checkpoints/step-000010",
    )


def test_paths_that_are_no_checkpoint(config, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    (tmp_path / "foreign/global_step9").mkdir(parents=True)
    (tmp_path / "foreign/global_step9/mp_rank_00_model_states.pt").write_bytes(b"cos\nsystem\n")
    for name, actual in {
        "nowhere": "no such folder",
        "empty": "a folder without a manifest.json",
        "model": "a model alone",
        "foreign": "a folder with a pickle (mp_rank_00_model_states.pt), which is never opened",
    }.items():
        with pytest.raises(ConfigError, match=f"{name}: ") as caught:
            choose(config, Request(resume=str(tmp_path / name)), ALONE)
        shows(caught.value, f"{actual}", "folder such", "runs/NAME/checkpoints/step-000100")


def test_a_damaged_path_is_an_error_and_stays(config):
    folder = begun(config, 10)
    damage(folder / "checkpoints/step-000010")
    with pytest.raises(DiskError, match="SHA-256"):
        choose(config, Request(resume=str(folder / "checkpoints/step-000010")), ALONE)
    assert (folder / "checkpoints/step-000010").is_dir()


def test_changes(config):
    folder = Path(config.trainer.run.folder)
    was = {
        "data": {"fingerprint": "a", "samples": 75},
        "model": {"rope_theta": 1e4},
        "config": {"optimizer": {"params": {"lr": 1.0}}},
    }
    path = save(folder, STATE, live().state_tensors(), was, MODEL_FOLDER, ALONE)
    assert refuse_changed(path, was) == []
    other = {**was, "config": {"optimizer": {"params": {"lr": 2.0}}}}
    shows_each(refuse_changed(path, other), ("changed since", "optimizer.params.lr 1.0 -> 2.0"))
    with raises(DataError, 'fingerprint "a"', "75 -> 74"):
        refuse_changed(path, {**was, "data": {"fingerprint": "b", "samples": 74}})
    with raises(ConfigError, "model", "rope_theta 10000.0 -> 500", "checkpoint"):
        refuse_changed(path, {**was, "model": {"rope_theta": 500}})


def test_own_data_of_an_earlier_version_is_not_refused_and_it_is_said(config: Config) -> None:
    """Its fingerprint was the digest of a pickle, which is another one in each process."""
    folder = Path(config.trainer.run.folder)
    was = {"data": {"fingerprint": "0" * 64, "samples": 75}, "model": {}}
    path = save(folder, STATE, live().state_tensors(), was, MODEL_FOLDER, ALONE)
    now = {**was, "data": {"fingerprint": "values-a", "samples": 75}}
    assert "not compared" in refuse_changed(path, now)[0]
    with pytest.raises(DataError, match="samples 75 -> 74"):
        refuse_changed(path, {**now, "data": {"fingerprint": "values-a", "samples": 74}})


def test_a_pipe_in_place_of_what_a_run_was_asked_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / choose_module.ENVIRONMENT)
    assert choose_module._request(tmp_path) is None
