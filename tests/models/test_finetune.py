"""Fine-tuning by the command, as a user does: their rows, one command, a model that is asked as it
was taught.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, Result, losses, metrics, run, train, write_job
from tests.support.messages import shows

TURNS = [
    {"role": "user", "content": "What is {n}+{n}?"},
    {"role": "assistant", "content": "It is {twice}."},
]


TWO = ("--processes", "2", "trainer.steps=2")


def filled(value: Any, n: int) -> Any:
    return json.loads(json.dumps(value).replace("{n}", str(n)).replace("{twice}", str(2 * n)))


FORMATS: dict[str, dict[str, Any]] = {
    "messages": {"messages": TURNS},
    "conversations": {
        "conversations": [
            {"from": "human", "value": TURNS[0]["content"]},
            {"from": "gpt", "value": TURNS[1]["content"]},
        ]
    },
    "instruction": {"instruction": TURNS[0]["content"], "output": TURNS[1]["content"]},
    "prompt and completion of messages": {"prompt": TURNS[:1], "completion": TURNS[1:]},
}


def job(folder: Path, row: dict[str, Any], **data: Any) -> Path:
    path = write_job(folder)
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(filled(row, n)) + "\n" for n in range(40))
    )
    config = json.loads(path.read_text())
    config["trainer"]["data"] = {
        "path": str(folder / "rows.jsonl"),
        "sequence_length": 64,
        "documents": "pack",
        "evaluation_fraction": 0.1,
        **data,
    }
    path.write_text(json.dumps(config))
    return path


def done(result: Result) -> Result:
    assert result.code == 0, result.output
    return result


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run on OpenAI's messages."""
    folder = tmp_path_factory.mktemp("reference")
    done(train("--config", job(folder, FORMATS["messages"]), *TWO, "trainer.engine=mesh"))
    return losses(folder / "runs" / "job")


@pytest.mark.first("messages-accelerate", "conversations-deepspeed", "instruction-mesh")
@pytest.mark.parametrize(
    ("name", "engine"),
    [(name, engine) for name in FORMATS for engine in ("deepspeed", "accelerate", "mesh")],
)
def test_each_format_trains_under_each_engine(tmp_path, reference, name, engine):
    """The same chat in each: the same samples, and so the same losses."""
    from transformers import AutoTokenizer

    result = done(train("--config", job(tmp_path, FORMATS[name]), *TWO, f"trainer.engine={engine}"))
    data = next(line for line in result.lines if line.startswith("data"))
    shows(data, "2 roles", "2 turns", "plain template")
    assert "36 documents" in data and "% full" in data
    assert losses(tmp_path / "runs" / "job") == pytest.approx(reference, rel=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "runs" / "job" / "final")
    requested = tokenizer.apply_chat_template(
        filled(TURNS[:1], 4), tokenize=False, add_generation_prompt=True
    )
    assert requested == "<|user|>\nWhat is 4+4?\n<|assistant|>\n"


def test_an_evaluation_of_several_sources_has_a_loss_of_each(tmp_path):
    path = job(tmp_path, FORMATS["messages"])
    named = {name: str(tmp_path / "rows.jsonl") for name in ("one", "two")}
    result = done(
        train(
            "--config", path, f"trainer.data.evaluation_path={json.dumps(named)}", "trainer.steps=1"
        )
    )
    line = metrics(tmp_path / "runs" / "job")[-1]
    assert line["evaluation_loss/one"] == line["evaluation_loss/two"] == line["evaluation_loss"]
    assert 0 <= line["evaluation_accuracy"] <= 1
    assert f"| one {line['evaluation_loss']:.3f} | two " in result.output


def test_a_preview_shows_what_is_learned_and_trains_nothing(tmp_path):
    result = done(
        train("--config", job(tmp_path, FORMATS["messages"], documents="pad"), "--preview", "2")
    )
    shows(result.lines[-1], "+ It is")
    assert result.lines[-1].endswith(".<|endoftext|>")
    shows(result.lines[-2], "<|user|>⏎What is")
    assert not (tmp_path / "runs").exists()


@pytest.mark.more
def test_the_example_goes_from_nothing_to_an_adapter_that_peft_opens(tmp_path):
    pytest.importorskip("peft")
    result = run(
        sys.executable,
        ROOT / "examples/finetune/finetune.py",
        "--runs",
        tmp_path / "runs",
        "--steps",
        "2",
        "--asked",
        "4",
    )
    done(result)
    results = [
        line.split(":")[0].strip() for line in result.lines if line.startswith("  ") and ":" in line
    ]
    assert results == ["base", "full", "lora"] * 4, result.output
    assert (tmp_path / "runs/lora/final/adapter_model.safetensors").exists()


@pytest.mark.more
def test_a_chat_that_is_wrong_is_named_by_its_row(tmp_path):
    path = job(tmp_path, FORMATS["messages"])
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write(
            json.dumps({"messages": [{"role": "user", "content": [{"type": "image"}]}]}) + "\n"
        )
    result = train("--config", path)
    assert result.code == 65
    shows(result.output, "rows.jsonl:41: messages[0]", "type image")
