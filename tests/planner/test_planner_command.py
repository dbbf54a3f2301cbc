"""`meshloom plan`: what a run will take, for a person and for programs, and what it says to what
can't be planned.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support.commands import run, write_job
from tests.support.messages import shows
from trainer.command import plan as command
from trainer.supervise import output

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}


IMAGES = {"task": "image_classification", "model": {"name_or_path": "resnet18"}, "data": None}
SIZED = {**IMAGES, "images": {"size": 128, "classes": 10}}


def without_blocks(num_classes: int = 10) -> nn.Module:
    return WithoutBlocks(num_classes)


class WithoutBlocks(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, num_classes)

    def forward(self, images: Any) -> Any:
        return self.head(self.first(images).mean((2, 3)))


def config(folder: Path, **trainer: Any) -> Path:
    path = folder / "config.json"
    section = {
        "steps": 3,
        "engine": "mesh",
        "model": {"config": TINY},
        "data": {"sequence_length": 64},
    } | trainer
    path.write_text(
        json.dumps(
            {
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 4,
                "gradient_clipping": 1.0,
                "zero_optimization": {"stage": 3},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "trainer": {name: value for name, value in section.items() if value is not None},
            }
        )
    )
    return path


def plan(folder: Path, *arguments: str, **trainer: Any) -> Any:
    return run(
        "meshloom", "plan", "--config", str(config(folder, **trainer)), *arguments, timeout=120
    )


@pytest.mark.more
def test_it_says_what_each_rank_takes_and_sends(tmp_path):
    result = plan(tmp_path, "--nodes", "2", "--gpus", "8")
    assert result.code == 0, result.output
    for word in (
        "memory  fits",
        "optimizer",
        "all-gather along shard, 8 ranks, inside a node",
        "along replicate",
    ):
        assert word in result.output, result.output
    assert len(result.lines) < 30
    assert max(map(len, result.lines)) < 400


def test_what_takes_a_moment_has_a_line_on_standard_error(monkeypatch, capsys):
    """Without a terminal too; a program, which asks for JSON, gets none."""
    monkeypatch.setattr(output, "_MOMENT", 0.05)
    with command._sign_of_life(quiet=False):
        shown = ""
        while "\n" not in shown:
            time.sleep(0.05)
            shown += capsys.readouterr().err
    assert "planning" in shown and shown.count("\n") == 1
    with command._sign_of_life(quiet=True):
        time.sleep(0.3)
    assert capsys.readouterr() == ("", "")


@pytest.mark.more
def test_a_program_is_told_the_same_and_no_more(tmp_path):
    result = plan(
        tmp_path, "--json", "--gpus", "4", "pipeline.stages=2", "zero_optimization.stage=2"
    )
    assert result.code == 0, result.output
    results = json.loads(result.output)
    assert [role["name"] for role in results["roles"]] == ["first stage", "last stage"]
    assert (
        results["memory"]["peak_bytes"]
        == sum(results["memory"]["by_kind"].values())
        <= results["needed"]
    )
    sends = [sent for role in results["roles"] for sent in role["sent"] if sent["what"] == "send"]
    assert [sent["count"] for sent in sends] == [4, 4]  # one for each micro-batch
    assert all(sent["bytes"] == 4 * 2 * 64 * 64 * 4 for sent in sends)


@pytest.mark.more
def test_the_config_of_a_model_is_enough(tmp_path):
    """What is trained from weights is planned without: of a model of the Hub none are
    downloaded.
    """
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**TINY, "architectures": ["LlamaForCausalLM"]}))
    result = plan(tmp_path, "--gpus", "2", model={"name_or_path": str(model)})
    assert result.code == 0, result.output
    assert f"model   {model}: 0." in result.output


@pytest.mark.more
def test_what_does_not_fit_says_by_how_much(tmp_path):
    small = "memory=2.1GB,peak=1TFLOPS,bandwidth=1TB/s,link=1GB/s"
    result = plan(tmp_path, "--gpus", "2", "--device", small)
    assert result.code == 1
    assert "DOES NOT FIT" in result.output
    assert "too much" in result.output
    shows(result.lines[-1], "propose --propose", "20 seconds")  # each is a plan of its own


@pytest.mark.more
def test_a_terminal_is_told_that_it_works(capsys, monkeypatch):
    """And nothing else is at once: a pipe of standard error stays empty for two seconds."""
    with command._sign_of_life(quiet=False):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    with command._sign_of_life(quiet=False):
        pass
    assert "planning" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "trainer", "words"),
    [
        (("--device", "h1000"), {}, ("--device: h1000", "h100-80gb", "memory=80GB")),
        (("--device", "memory=80GB,peak=1TFLOPS"), {}, ("without bandwidth, link",)),
        (("--device", "H200"), {}, ("Did you mean h200-141gb",)),
        (("--device", "memory=80GB,pike=1"), {}, ("--device: pike=1", "peak")),
        (("--device", "v100-32gb", "bf16.enabled=true"), {}, ("bf16.enabled", "8.0", "fp16")),
        (("--device", "a100-80gb", "trainer.float8=rowwise"), {}, ("trainer.float8", "a100-80gb")),
        (("--nodes", "0"), {}, ("--nodes, --gpus: 0 nodes",)),
        (("--gpus", "6", "tensor_parallel.autotp_size=4"), {}, ("6",)),
        ((), IMAGES, ("trainer.images.size, trainer.images.classes", "trainer.images.size=224")),
        (
            ("trainer.model.name_or_path=inception_v3",),
            SIZED,
            ("inception_v3", "the meta device"),
        ),
        ((), {**IMAGES, "images": {"size": 32, "classes": 10**9}}, ("at most 10,000,000 classes",)),
        (
            (
                "trainer.model.name_or_path=tests.planner.test_planner_command:without_blocks",
                "trainer.activation_checkpointing=full",
            ),
            SIZED,
            ("without_blocks", "block by block"),
        ),
        (("trainer.model.name_or_path=builtins:dict",), SIZED, ("dict",)),
        (("tensor_parallel.autotp_size=2",), SIZED, ("tensor_parallel.autotp_size: resnet18",)),
    ],
    ids=[
        "device",
        "half a device",
        "a family of devices",
        "no such number",
        "no bfloat16",
        "no float8",
        "no nodes",
        "does not divide",
        "images",
        "auxiliary scores",
        "many classes",
        "no blocks",
        "no model",
        "tensor",
    ],
)
def test_what_cant_be_planned_says_why(tmp_path, arguments, trainer, words):
    result = plan(tmp_path, *arguments, **trainer)
    assert result.code == 64, result.output
    assert all(word in result.output for word in words), result.output
    assert len(result.lines) <= 6, result.output


@pytest.mark.more
def test_a_plan_for_accelerate_does_not_wait_for_threads_that_a_forked_process_lacks(tmp_path):
    """Accelerate sets PyTorch's threads, unless the environment does."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    model = {"config": {"model_type": "llama", "tie_word_embeddings": True, **sizes, **heads}}
    path = write_job(tmp_path, model=model)
    command = [
        sys.executable,
        "-m",
        "trainer.command",
        "plan",
        "--config",
        str(path),
        "--gpus",
        "1",
    ]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    result = subprocess.run(
        [*command, "trainer.engine=accelerate"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert "engine accelerate" in result.stdout, result.stderr
