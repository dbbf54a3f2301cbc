"""What others wrote is shown, and never run."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.checkpoint_pieces import ALONE, DESCRIPTION, MODEL_FOLDER, STATE, live
from tests.support.messages import raises, shows
from tests.support.training import LLAMA
from trainer.checkpoint import save
from trainer.checkpoint.safetensors_stream import read_header
from trainer.command import checkpoint as command
from trainer.config import load
from trainer.config.sections.model_and_data import ModelSection
from trainer.data.text.preview import _line
from trainer.errors import ConfigError, Problem, printable
from trainer.models.language.model_config import read_config
from trainer.models.pretrained.files import stored_tensors

STRANGE = "a\x1b[2J\x07\x9b\u202eb\x00\ud800"
SHOWN = r"a\x1b[2J\x07\x9b\u202eb\x00\ud800"


def test_what_would_steer_a_terminal_is_shown():
    assert printable(STRANGE) == SHOWN
    plain = "é ü 日本語 👩\u200d💻 हिन्दी\u200d, two\nlines ⏎"
    assert printable(plain) == plain
    assert str(Problem(STRANGE, STRANGE, STRANGE, STRANGE)).count(SHOWN) == 4
    assert (
        ConfigError(Problem(STRANGE, "x", "y")).render().isprintable() is False
    )  # for its line break alone
    assert _line("+", f"{STRANGE}\n", 100) == f"  + {SHOWN}⏎"


def test_what_a_run_says_is_shown():
    from rich.console import Console

    from trainer.trackers import say

    output = io.StringIO()
    say(Console(file=output, highlight=False), f"sample  {STRANGE}")
    assert output.getvalue() == f"sample  {SHOWN}\n"


def test_a_key_is_shown(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"gradient\x1b[2J": 1, "trainer": {"data": {"path\u202e": 1}}}))
    with pytest.raises(ConfigError) as caught:
        load(path)
    text = caught.value.render()
    assert "\x1b" not in text and "\u202e" not in text
    assert r"\x1b[2J" in text


def options(config: dict[str, Any] | None = None, path: Path | None = None) -> SimpleNamespace:
    name = None if path is None else str(path)
    return ModelSection(name_or_path=name, config=config)


@pytest.mark.parametrize(
    "name", ["kernels-community/flash-attn2", "somebody/their-kernel", "paged|sdpa", "a/b@v1:c"]
)
@pytest.mark.parametrize(
    "key", ["attn_implementation", "_attn_implementation", "experts_implementation"]
)
@pytest.mark.parametrize("saved", [False, True])
def test_a_kernel_that_a_models_config_names_is_not_fetched(
    tmp_path, monkeypatch, name, key, saved
):
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", pytest.fail)
    if saved:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | {key: name}))
    given = options(path=tmp_path) if saved else options(LLAMA | {key: name})
    with raises(ConfigError, "fetched and run"):
        read_config(given)


def test_a_kernel_in_a_part_of_a_config_is_found():
    with pytest.raises(ConfigError, match="somebody/their-kernel"):
        read_config(
            options(
                {
                    "model_type": "llava",
                    "attn_implementation": {"text_config": "somebody/their-kernel"},
                }
            )
        )


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2", None])
def test_kernels_that_are_known_may_be_named(name):
    assert read_config(options(LLAMA | {"attn_implementation": name})).model_type == "llama"


def test_import_never_runs_a_folders_code(tmp_path, monkeypatch):
    """Nor asks whether it may."""
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n")
    config = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Config", "AutoTokenizer": [None, "own.T"]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    with pytest.raises(ConfigError, match="--model: "):
        command._copy_model_files(str(tmp_path), tmp_path / "made")
    assert not (tmp_path / "ran").exists()


def tensors(path: Path, offsets: dict[str, list[int]], data: int) -> Path:
    entries = {
        name: {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
        for name, (start, end) in offsets.items()
    }
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(data))
    return path


@pytest.mark.parametrize(
    ("offsets", "good"),
    [
        ({"a": [0, 4], "b": [4, 8], "none": [4, 4]}, True),
        ({"b": [4, 8], "a": [0, 4]}, True),
        ({"a": [0, 4], "b": [0, 4]}, False),
        ({"a": [0, 5], "b": [3, 6]}, False),
        ({"a": [0, 2], "b": [4, 10]}, False),
        ({"a": [-2, 2], "b": [2, 6]}, False),
    ],
)
def test_tensors_that_overlap_are_damage(tmp_path, offsets, good):
    path = tensors(tmp_path / "x.safetensors", offsets, 8)
    if good:
        assert {name: size for name, (*_, size) in read_header(path).items()} == {
            name: end - start for name, (start, end) in offsets.items()
        }
        return
    with pytest.raises(ValueError, match="no whole file"):
        read_header(path)


def ask(name: str, path: Path) -> tuple[int, str]:
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(output):
        return command.main([name, str(path)], "checkpoint"), output.getvalue()


@pytest.mark.parametrize("name", ["list", "verify", "show"])
def test_a_checkpoint_that_is_pruned_meanwhile_is_no_error(tmp_path, monkeypatch, name):
    for step in (10, 20):
        save(
            tmp_path,
            replace(STATE, step=step),
            live().state_tensors(),
            DESCRIPTION,
            MODEL_FOLDER,
            ALONE,
        )
    work, first = command.COMMANDS[name], tmp_path / "step-000010"

    def pruned(path: Path) -> tuple[int, list[str]]:
        if path == first:
            first.rename(tmp_path / "step-000010.deleting")
            shutil.rmtree(tmp_path / "step-000010.deleting")
        return work(path)

    monkeypatch.setitem(command.COMMANDS, name, pruned)
    code, output = ask(name, tmp_path)
    assert code == 0, output
    shows(output, "step-000010", "removed meanwhile", "step-000020")
    (tmp_path / "step-000020" / "manifest.json").unlink()
    (tmp_path / "step-000020" / "manifest.json").write_text("{}")
    assert ask(name, tmp_path)[0] == 74


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_weights_in_a_hostile_pickle_are_refused_in_our_words(tmp_path):
    import torch

    torch.save({"a": Runs(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with raises(ConfigError, "pickle that does") as caught:
        stored_tensors(tmp_path, None).names()
    assert "weights_only" not in str(caught.value) and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": 7}', '{"weight_map": {"a": 7}}', "9" * 5000]
)
def test_an_index_of_weights_that_is_damaged_is_named(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json: "):
        stored_tensors(tmp_path, None)
