"""The pages on moving here: each command, with the files of its page, writes the config of its page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT
from trainer.command.import_config import main
from trainer.config import load

BLOCK = re.compile(r"^```(?:yaml|json)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILES = {
    "from_axolotl": ("lora.yml", "lora.json"),
    "from_llamafactory": ("lora.yaml", "data/dataset_info.json", "lora.json"),
    "from_trainer": ("ds.json", "clm.json"),
}
"""The files of a page's blocks, in their order; the last is the config that the command writes."""


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def imports(text: str) -> list[list[str]]:
    """Return the words of each import of a page, after `meshloom import`."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [shlex.split(line) for line in re.findall(r"^    meshloom import (.+)$", joined, re.M)]


def run_import(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run an import in a folder, and return the config that it wrote."""
    monkeypatch.chdir(folder)
    assert main(words, "import") == 0
    written = json.loads((folder / words[words.index("--output") + 1]).read_text())
    assert isinstance(written, dict)
    return written


@pytest.mark.parametrize("name", FILES)
def test_the_command_of_a_page_writes_its_config(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page(name)
    blocks = BLOCK.findall(text)
    assert len(blocks) == len(FILES[name])
    for file, block in zip(FILES[name][:-1], blocks[:-1], strict=True):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(block)
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "chats.jsonl").write_text("{}\n")
    [words] = imports(text)
    assert run_import(words, tmp_path, monkeypatch) == json.loads(blocks[-1])


def test_the_imports_from_trl_write_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = [run_import(words, tmp_path, monkeypatch) for words in imports(page("from_trl"))]
    sft, dpo, adapted = written
    assert sft["trainer"]["data"]["loss_on"] == "assistant"
    assert dpo["trainer"]["task"] == "pairs"
    assert dpo["optimizer"]["params"]["lr"] == 5e-7
    adapter = load(adapted).trainer.adapter
    assert adapter is not None
    assert (adapter.r, adapter.alpha, adapter.dropout) == (16, 32, 0)


@pytest.mark.parametrize(
    "path", ["docs/from_torchtune.md", "docs/finetuning.md", "skills/train/SKILL.md"]
)
def test_the_config_of_a_page_is_one(path: str) -> None:
    text = re.sub(r"^   (?=[ `{}])", "", (ROOT / path).read_text(), flags=re.MULTILINE)
    [block] = BLOCK.findall(text)
    config = load(json.loads(block), [])
    assert config.trainer.model.name_or_path and config.trainer.data.path
