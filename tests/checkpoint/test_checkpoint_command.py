"""`meshloom checkpoint`: what a person asks of a folder of checkpoints."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoint_pieces import ALONE, MODEL_FOLDER, STATE, live
from tests.support.commands import Result, run
from tests.support.messages import shows, shows_each
from trainer.checkpoint import export, save

LAYOUT = {"pipeline": 2, "replicate": 1, "shard": 4, "tensor": 1, "zero_stage": 3}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The folder of a run with two checkpoints."""
    description = {"seed": 7, "engine": "mesh", "layout": LAYOUT, "versions": {"torch": "2"}}
    for step in (10, 20):
        save(
            tmp_path / "checkpoints",
            replace(STATE, step=step),
            live().state_tensors(),
            description,
            MODEL_FOLDER,
            ALONE,
        )
    return tmp_path


def ask(command: str, path: Path) -> Result:
    return run("meshloom", "checkpoint", command, path)


def test_list(directory):
    for path in (directory, directory / "checkpoints"):
        result = ask("list", path)
        assert result.code == 0, result.output
        first, second = result.output.splitlines()
        assert first.startswith("step-000010  ") and second.startswith("step-000020  ")
        shows(first, "3,200 samples", "pipeline 2 x shard", "4, ZeRO-3")


def test_what_is_left_over_is_listed(directory):
    for name in ("step-000015.damaged", "step-000021.partial"):
        (directory / "checkpoints" / name).mkdir()
    lines = ask("list", directory).output.splitlines()
    assert lines[2:] == ["step-000015.damaged  left over", "step-000021.partial  left over"]


@pytest.mark.parametrize("command", ["list", "verify", "show"])
def test_torch_is_not_waited_for(directory, command):
    arguments = ["meshloom", "checkpoint", command, str(directory)]
    code = (
        f"import runpy, sys; sys.argv = {arguments!r}; sys.exit = print; "
        "runpy.run_module('trainer.command', run_name='__main__')"
    )
    result = run(
        sys.executable,
        "-c",
        f"{code}; assert not {{'torch', 'numpy', 'transformers'}} & set(sys.modules)",
    )
    assert result.code == 0, result.output


def test_verify_names_the_one_that_is_damaged(directory):
    shows_each(ask("verify", directory).lines, ("step-000010", "good"), ("step-000020", "good"))
    path = next((directory / "checkpoints" / "step-000010" / "optimizer").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    result = ask("verify", directory)
    assert result.code == 74
    assert (
        f"step-000010  {path}: SHA-256 " in result.output and "step-000020  good" in result.output
    )
    path.write_bytes(b"")
    result = ask("list", directory)
    assert result.code == 74
    shows(result.output, "step-000010", f"damaged: {path}: 0 bytes")


def foreign(kind: str, checkpoint: Path) -> Path:
    """Put something into a checkpoint that its manifest does not list."""
    path = checkpoint / "model" / {"index": "model.safetensors.index.json"}.get(kind, kind)
    if kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "folder link":
        path.symlink_to(checkpoint.parent.parent)
    elif kind == "a listed link":
        path = checkpoint / "model" / "config.json"
        elsewhere = checkpoint.parent.parent / "elsewhere.json"
        elsewhere.write_bytes(path.read_bytes())
        path.unlink()
        path.symlink_to(elsewhere)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(b"x")
    return path


@pytest.mark.parametrize(
    "kind",
    [
        *("pytorch_model.bin", "other.safetensors", "x.pt", "index", "link", "folder link"),
        *("a listed link", "fifo"),
    ],
)
def test_verify_names_what_no_hash_vouches_for(directory, kind):
    """A library would read these in place of the checkpoint's own files."""
    from trainer.errors import DiskError
    from trainer.run.start.folder import model_in

    checkpoint = directory / "checkpoints" / "step-000010"
    path = foreign(kind, checkpoint)
    result = ask("verify", directory)
    assert result.code == 74, result.output
    assert f"step-000010  {path}: " in result.output and "step-000020  good" in result.output
    with pytest.raises(DiskError, match=re.escape(str(path))):
        model_in(checkpoint)


def test_verify_notes_other_files_and_takes_links_within(directory):
    model = directory / "checkpoints" / "step-000010" / "model"
    (model / "notes.txt").write_text("mine")
    (model / "settings.json").symlink_to("config.json")
    result = ask("verify", directory)
    assert result.code == 0
    first, second = result.output.splitlines()
    assert first.startswith("step-000010  good") and "model/notes.txt" in first
    assert second == "step-000020  good"


def test_one_of_a_later_format_does_not_hide_the_others(directory):
    path = directory / "checkpoints" / "step-000010" / "manifest.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 9'))
    for command in ("verify", "list"):
        result = ask(command, directory)
        assert result.code == 64
        first, second = result.output.splitlines()
        assert first.startswith("step-000010  ") and "Install a newer Meshloom" in first
        assert second.startswith("step-000020  ")


def test_show(directory):
    result = ask("show", directory / "checkpoints" / "step-000020")
    assert result.code == 0, result.output
    assert '"step": 20' in result.output and '"torch": "2"' in result.output
    shows(result.output, "model/model.safetensors: a.weight", "float32 4 x 3", "48 bytes")
    shows(
        result.output,
        "optimizer/optimizer.safetensors: a.weight.exp_avg",
        "float32 4 x 3",
        "48 bytes",
    )


def test_a_model_alone(directory):
    export(directory / "final", live().state_tensors(), MODEL_FOLDER, ALONE)
    assert ask("verify", directory / "final").output == "final  good\n"
    result = ask("show", directory / "final")
    assert result.code == 0
    shows(result.output, "model.safetensors: a.weight", "float32 4 x 3", "48 bytes")


def test_nothing_there(tmp_path):
    result = ask("list", tmp_path)
    assert result.code == 64
    shows(result.output, f"{tmp_path}: no checkpoint")
