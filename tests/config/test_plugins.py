"""Plug-ins: a package of its own brings a task, an optimizer, a source and a tracker."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import raises, shows, shows_each
from tests.support.plugins import PACKAGE, command
from trainer import plugins
from trainer.config import RuntimeFacts, load
from trainer.data.sources.location import locate, rows_of
from trainer.errors import ConfigError, DataError
from trainer.run.compose import compose


def job(folder: Path, **trainer: Any) -> dict[str, Any]:
    section = {"plugins": ["parity"], "device": "cpu", "run": {"folder": str(folder / "runs")}}
    return {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "parity:SignSGD", "params": {"lr": 1e-3, "momentum": 0.8}},
        "trainer": section
        | {"steps": 4, "task": "parity:parity", "log": {"every": 2, "trackers": ["parity:list"]}}
        | trainer,
    }


@pytest.mark.more
def test_a_package_of_its_own_trains(tmp_path: Path) -> None:
    result = command(tmp_path, job(tmp_path), "train", "--processes", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    folder = tmp_path / "runs" / "job"
    assert "SignSGD" in result.stdout + result.stderr and (folder / "final").is_dir()
    first, second, last = (folder / "list.txt").read_text().splitlines()
    assert (first, second) == ("step 2", "step 4") and last.startswith("right ")
    described = json.loads(next(folder.glob("checkpoints/*/trainer.json")).read_text())
    assert described["engine"] == "accelerate"  # DeepSpeed builds no optimizers but its own


@pytest.mark.more
def test_its_certificate_passes(tmp_path: Path) -> None:
    result = command(
        tmp_path, job(tmp_path, engine="mesh", mesh={"shard": -1}), "verify", "--world-size", "2"
    )
    assert result.returncode == 0 and "PASS" in result.stdout, result.stdout + result.stderr


def test_what_can_not_be_had_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken_plugin.py").write_text("raise ValueError('not today')\n")
    section = {"plugins": ["no.such", "broken_plugin"], "task": "parity:parity"}
    result = command(tmp_path, {"train_batch_size": 8, "trainer": section}, "train")
    assert result.returncode == ConfigError.exit_code
    shows_each(
        result.stderr.splitlines()[:4],
        "config error (3 problems):",
        ("trainer.plugins[0]", '"no.such"', "plug-in", "ModuleNotFoundError", "'no'"),
        ("trainer.plugins[1]", '"broken_plugin"', "plug-in", "ValueError: not today"),
        ("trainer.task", '"parity:parity"', '"causal_lm"', "trainer.plugins"),
    )


def test_a_module_beside_the_config_is_found_and_may_not_end_the_command(tmp_path: Path) -> None:
    """Wherever the command runs; a name of another plug-in is not taken over in silence."""
    jobs, register = tmp_path / "jobs", "from trainer.plugins import register\n"
    jobs.mkdir()
    (jobs / "beside_plugin.py").write_text(f"{register}@register('task', 'x:y')\ndef f(_): ...\n")
    (jobs / "twice_plugin.py").write_text(f"{register}@register('task', 'x:y')\ndef f(_): ...\n")
    (jobs / "ends_plugin.py").write_text("import sys\nsys.exit(0)\n")
    names = ["beside_plugin", "twice_plugin", "ends_plugin"]
    (jobs / "own.json").write_text(json.dumps({"trainer": {"plugins": names, "task": "x:y"}}))
    expected = "expected a plug-in that can be imported"
    with pytest.raises(ConfigError) as caught:
        load(jobs / "own.json")
    shows_each(
        str(caught.value).splitlines(),
        ("trainer.plugins[1]", '"twice_plugin"', f"{expected} (ValueError", "beside_plugin"),
        f'trainer.plugins[2]: saw "ends_plugin"; {expected} (SystemExit: 0)',
    )


def test_the_plugin_of_another_config_is_not_taken_for_its_own(tmp_path: Path) -> None:
    """Of two configs in one process, the second was trained by the first one's, in silence."""
    for name in ("first", "second"):
        (folder := tmp_path / name).mkdir()
        (folder / "own_plugin.py").write_text(
            "from trainer.plugins import register\n@register('task', 'own:task')\ndef f(_): ...\n"
        )
        (folder / "job.json").write_text(
            json.dumps({"trainer": {"plugins": ["own_plugin"], "task": "own:task"}})
        )
    for _ in range(2):
        load(tmp_path / "first/job.json")
        with pytest.raises(ConfigError) as caught:
            load(tmp_path / "second/job.json")
        shows(
            caught.value,
            "trainer.plugins[0]",
            '"own_plugin"',
            "plug-in",
            f"{tmp_path / 'second'}",
            "imported",
            f"{tmp_path / 'first'}",
        )


def test_an_installed_plugin_may_have_its_source_beside_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = "from trainer.plugins import register\n@register('task', 'there:task')\n"
    for folder in ("site", "source"):
        (tmp_path / folder / "there_plugin").mkdir(parents=True)
        (tmp_path / folder / "there_plugin/__init__.py").write_text(f"{register}def f(_): ...\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    section = {"plugins": ["there_plugin"], "task": "there:task"}
    (tmp_path / "source/job.json").write_text(json.dumps({"trainer": section}))
    assert load(tmp_path / "source/job.json").trainer.task == "there:task"


def test_one_plugin_may_have_several_paths(tmp_path: Path) -> None:
    """By a link to its folder; and a file beside the config may be called as a part of a package."""
    (tmp_path / "real/linked_package").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    register = "from trainer.plugins import register\n@register('task', 'linked:task')\n"
    (tmp_path / "real/linked_package/tasks.py").write_text(f"{register}def f(_): ...\n")
    (tmp_path / "real/linked_package/__init__.py").touch()
    (tmp_path / "real/tasks.py").touch()
    section = {"plugins": ["linked_package.tasks"], "task": "linked:task"}
    (tmp_path / "real/job.json").write_text(json.dumps({"trainer": section}))
    for folder in ("real", "link"):
        assert load(tmp_path / folder / "job.json").trainer.task == "linked:task"


def test_a_source_yields_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PACKAGE)
    file = tmp_path / "a.words"
    file.write_text("one,two\nthree\n")
    section = {"plugins": ["parity"], "data": {"path": str(tmp_path), "format": "parity:words"}}
    data = load({"train_batch_size": 8, "trainer": section}).trainer.data
    where = locate(data.path, data.format)
    assert [row.columns["text"] for row in rows_of(where, data, ["text"])] == ["one two", "three"]
    file.write_bytes(b"\xff")
    with raises(DataError, "a.words: UnicodeDecodeError", "rows"):
        list(rows_of(where, data, ["text"]))


def test_an_optimizer_is_checked_and_kept_from_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PACKAGE)
    config = job(Path("runs"))
    config["zero_optimization"]["stage"] = 3  # which each version of DeepSpeed runs
    config["optimizer"]["params"]["lr"] = "much"
    with pytest.raises(ConfigError, match="^optimizer.params.lr: saw "):
        load(config)
    config["optimizer"]["params"]["lr"], config["trainer"]["engine"] = 1e-3, "deepspeed"
    composed = compose(load(config), RuntimeFacts(2, None, None, False, "cpu"))
    with raises(ConfigError, "engine deepspeed", "parity:SignSGD", "own"):
        composed.engine()
    assert composed.engine("auto")[0] == "accelerate"


def test_an_entry_point_is_a_name_of_a_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = tmp_path / "meshloom_parity-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: meshloom-parity\nVersion: 1.0\n"
    )
    (information / "entry_points.txt").write_text("[meshloom.plugins]\nodd-bits = parity\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(PACKAGE)
    plugins.NAMED["task"].clear()
    monkeypatch.delitem(sys.modules, "parity", raising=False)
    load({"train_batch_size": 8, "trainer": {"plugins": ["odd-bits"]}})
    assert "parity:parity" in plugins.NAMED["task"]
