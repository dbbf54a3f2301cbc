"""Samples of chats where the config does not say how: packed where that is proven, else padded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.commands import Result, train, write_job
from tests.support.messages import shows
from trainer import checkpoint
from trainer.config import DataSection, load
from trainer.data.text.arrangement import arranged, holds_chats
from trainer.distributed.ranks import ALONE
from trainer.errors import ConfigError
from trainer.run.start.choose import as_begun

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]}
TEXT = {"text": "def f(x): return x"}
ROWS: dict[str, tuple[dict[str, Any], bool]] = {
    "messages": (CHAT, True),
    "conversations": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]},
        True,
    ),
    "instruction": ({"instruction": "Say yes.", "output": "Yes."}, True),
    "text": (TEXT, False),
    "prompt": ({"prompt": "Say", "completion": " yes."}, False),
    "unreadable": ({"nothing": 1}, False),
}


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ROWS)
def test_the_first_row_tells_if_the_data_are_chats(tmp_path: Path, name: str) -> None:
    row, expected = ROWS[name]
    path = write(tmp_path / "rows.jsonl", {"text": ""} if "text" in row else row, row)
    assert holds_chats(DataSection(path=path)) is expected


def test_a_mixture_is_of_chats_if_all_of_it_is(tmp_path: Path) -> None:
    chats, texts = write(tmp_path / "a.jsonl", CHAT), write(tmp_path / "b.jsonl", TEXT)
    for paths, expected in (([chats, chats], True), ([chats, texts], False)):
        sources = [{"path": path, "label": str(at)} for at, path in enumerate(paths)]
        assert holds_chats(DataSection.model_validate({"sources": sources})) is expected
    assert not holds_chats(DataSection())
    assert not holds_chats(DataSection(path="s3://bucket/a.jsonl", stream=True))
    alpaca = write(tmp_path / "c.jsonl", ROWS["instruction"][0])
    assert not holds_chats(DataSection(path=alpaca, records="alpaca"))


def test_chats_are_packed_or_else_padded_and_what_is_stated_stays(tmp_path: Path) -> None:
    chats, texts = write(tmp_path / "a.jsonl", CHAT), write(tmp_path / "b.jsonl", TEXT)

    def decided(refusal: str = "", **data: Any) -> tuple[str, str]:
        return tuple(arranged(DataSection(**data), lambda: refusal, ALONE))  # type: ignore[return-value]

    assert decided(path=chats)[0] == "pack"
    documents, reason = decided("a recurrence", path=chats)
    assert documents == "pad" and reason.endswith("a recurrence")
    assert decided(path=texts) == ("concatenate", "")
    assert decided(path=chats, documents="concatenate") == ("concatenate", "")
    assert decided(path=chats, isolate=True) == ("concatenate", "")
    assert decided(path=chats, too_long="drop")[0] == "pack"
    with pytest.raises(ConfigError, match="too_long"):
        decided(path=texts, too_long="drop")


def test_a_resumed_run_keeps_the_arrangement_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(write_job(tmp_path), [])
    saved: dict[str, Any] = {"config": {"trainer": {"data": {"documents": "concatenate"}}}}
    monkeypatch.setattr(checkpoint, "read_description", lambda source: saved)
    start: Any = SimpleNamespace(source=tmp_path, ranks=ALONE)
    result = as_begun(config, start)
    assert result.trainer.data.documents == "concatenate"
    assert "resumed" in result.origins["trainer.data.documents"]
    stated = load(write_job(tmp_path), ["trainer.data.documents=pad"])
    assert as_begun(stated, start) is stated
    saved["config"] = {}
    assert as_begun(config, start) is config
    assert as_begun(config, SimpleNamespace(source=None, ranks=ALONE)) is config  # type: ignore[arg-type]


def chats_job(folder: Path, **trainer: Any) -> Path:
    rows = write(folder / "chats.jsonl", *[CHAT] * 40)
    data = {"path": rows, "sequence_length": 64, "evaluation_fraction": 0.1}
    return write_job(folder, data=data, **trainer)


def resolved(result: Result) -> str:
    assert result.code == 0, result.output
    return next(line for line in result.lines if line.startswith("  trainer.data.documents = "))


@pytest.mark.more
def test_a_dry_run_says_what_was_decided_and_why(tmp_path: Path) -> None:
    path = chats_job(tmp_path)
    result = train("--config", path, "--dry-run")
    shows(resolved(result), '"pack"  <- auto', "chats")
    assert "of documents kept apart" in result.output
    router = {"model_type": "mixtral", "hidden_size": 32, "output_router_logits": True}
    result = train("--config", chats_job(tmp_path, model={"config": router}), "--dry-run")
    shows(resolved(result), '"pad"  <- auto')
    assert "router" in result.output
    shows(result.output, "note", "trainer.data.documents is pad")


@pytest.mark.more
def test_a_run_that_began_with_the_older_default_is_resumed(tmp_path: Path) -> None:
    path = chats_job(tmp_path, checkpoint={"every": 1})
    old = train("--config", path, "trainer.steps=1", "trainer.data.documents=concatenate")
    assert old.code == 0, old.output
    saved = tmp_path / "runs/job/checkpoints/step-000001"
    result = train("--config", path, "--resume", saved)
    assert result.code == 0, result.output
    assert "step 3/3" in result.output and "kept apart" not in result.output
