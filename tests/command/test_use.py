"""`meshloom generate`, `chat` and `evaluate`, on what every layout saves, and the completion of all
commands.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command.language_model import (
    PLAIN,
    TEMPLATE,
    WORDS,
    plain_model,
    tokenizer,
    write_task,
)
from tests.support.commands import ROOT, losses, metrics, run, write_job
from tests.support.messages import shows
from tests.support.training import (
    TRAIN_BATCH,
    Case,
    build,
    data_rank_of,
    shares,
    spec_in,
    task_of,
    whole_weights,
)
from trainer.command import use

PROMPT = "w7 w8 w9"
GREEDY = ["--temperature", "0", "--tokens", "8"]


def greedy(model: Any, text: str, count: int = 8) -> str:
    """Return the likeliest words, one after another, by the logits of the whole row."""
    ids = [WORDS.index(word) for word in text.split()]
    start = len(ids)
    with torch.no_grad():
        while len(ids) < start + count and ids[-1] != 0:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return " ".join(WORDS[n] for n in ids[start:] if n > 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a model that takes chats."""
    path = tmp_path_factory.mktemp("model")
    plain_model().save_pretrained(path)
    tokenizer(chat_template=TEMPLATE).save_pretrained(path)
    return path


def save(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """Make a step, save a checkpoint of it, and return the weights. Runs on each rank."""
    import torch.distributed as dist

    from trainer import checkpoint
    from trainer.distributed.ranks import Ranks
    from trainer.optim.lr_schedules import Update
    from trainer.state import RunState

    rank, spec = dist.get_rank(), spec_in(case)
    engine = build(case, rank)
    engine.step(
        0,
        [task_of(spec).collate(one) for one in shares(case, 0, data_rank_of(case, rank))],
        Update(1e-2),
    )

    def files(target: Path) -> None:
        spec.files.save_config(target, None)
        tokenizer().save_pretrained(target)

    model = checkpoint.ModelFolder(files)
    state = RunState(step=1, samples=TRAIN_BATCH, engine=engine.scalars())
    ranks = Ranks(rank, case.world_size)
    checkpoint.save(folder / "checkpoints", state, engine.state_tensors(), {}, model, ranks)
    weights = whole_weights(engine, case)
    engine.close()
    return weights


TWO = Case("mesh", model=PLAIN, micro_batch=1)
CASES = {
    "accelerate DDP": replace(TWO, engine="accelerate", zero_stage=0),
    "accelerate FSDP": replace(TWO, engine="accelerate", zero_stage=3),
    "deepspeed ZeRO-3": replace(TWO, engine="deepspeed", zero_stage=3),
    "deepspeed pipeline": replace(TWO, engine="deepspeed", pipeline=2, zero_stage=0),
    "mesh ZeRO-3": replace(TWO, zero_stage=3),
    "mesh pipeline": replace(TWO, pipeline=2, zero_stage=0),
    "mesh tensor": replace(TWO, tensor=2, zero_stage=0),
}


@pytest.mark.first("deepspeed ZeRO-3", "mesh ZeRO-3")
@pytest.mark.parametrize("name", CASES)
def test_the_text_is_that_of_one_process_with_the_weights(pools, tmp_path, capsys, name):
    weights = pools[2].run(save, case=CASES[name], folder=tmp_path)[0]
    model = plain_model()
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not missing and not unknown
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "step-000001"):
        code = use.main([str(path), "--prompt", PROMPT, *GREEDY], "meshloom generate")
        shown = capsys.readouterr()
        assert (code, shown.out.strip()) == (0, greedy(model, PROMPT)), shown.err
    # a text that depends on all weights
    assert len({*shown.out.split()}) > 3


def test_of_an_unfinished_run_it_is_the_newest_checkpoint_that_is_whole(tmp_path):
    from tests.support.checkpoint_pieces import ALONE, MODEL_FOLDER, STATE, live
    from trainer.checkpoint import export, save
    from trainer.run.start.folder import model_in

    checkpoints = tmp_path / "checkpoints"
    for step in (10, 20):
        state = replace(STATE, step=step)
        save(checkpoints, state, live().state_tensors(), {}, MODEL_FOLDER, ALONE)
    assert model_in(tmp_path) == checkpoints / "step-000020" / "model"
    next((checkpoints / "step-000020" / "optimizer").iterdir()).unlink()  # it is not needed
    assert model_in(tmp_path) == checkpoints / "step-000020" / "model"
    next((checkpoints / "step-000020" / "model").glob("*.safetensors")).write_bytes(b"half")
    assert model_in(tmp_path) == checkpoints / "step-000010" / "model"
    export(tmp_path / "final", live().state_tensors(), MODEL_FOLDER, ALONE)
    assert model_in(tmp_path) == tmp_path / "final"
    (tmp_path / "environment.json").touch()
    os.utime(tmp_path / "final", (1, 1))  # the run goes on after its end
    assert model_in(tmp_path) == checkpoints / "step-000010" / "model"


def test_an_adapter_is_opened_on_its_base(folder, tmp_path, capsys):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert use.main([str(tmp_path), "--prompt", PROMPT, *GREEDY], "meshloom generate") == 0
    shown = capsys.readouterr().out.strip()
    assert shown == greedy(adapted, PROMPT) != greedy(plain_model(), PROMPT)


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Any]]:
    """Two adapters on one base, with other targets and ranks, each beside its model opened alone."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    made = []
    for seed, (rank, targets) in enumerate([(2, ["q_proj", "down_proj"]), (4, ["v_proj"])]):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(folder)
        options = {"r": rank, "lora_alpha": 64, "target_modules": targets}
        config = peft.LoraConfig(**options, init_lora_weights=False)
        path = tmp_path_factory.mktemp("adapter")
        adapted = peft.get_peft_model(base, config).eval()
        adapted.save_pretrained(path)
        tokenizer(chat_template=TEMPLATE).save_pretrained(path)
        made.append((path, adapted))
    return made


def test_several_adapters_on_one_base_each_write(adapters, capsys):
    paths = [str(path) for path, _ in adapters]
    assert use.main([*paths, "--prompt", PROMPT, *GREEDY], "meshloom generate") == 0
    shown = capsys.readouterr()
    texts = [greedy(model, PROMPT) for _, model in adapters]
    assert shown.out.splitlines() == texts
    assert texts[0] != texts[1]
    assert all(f"adapter {path}" in shown.err for path in paths)


def test_a_chat_switches_between_adapters(adapters, capsys, monkeypatch):
    lines = "w5 w6\n/adapter 2\nw7\n/adapter 3\n/adapter 1\nw8\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    paths = [str(path) for path, _ in adapters]
    assert use.main([*paths, "--system", "w4", *GREEDY], "meshloom chat") == 0
    chat = "<system> w4"
    answers = []
    for word, (_, model) in zip(("w5 w6", "w7", "w8"), [*adapters, adapters[0]], strict=True):
        chat += f" <user> {word} <assistant>"
        answers.append(greedy(model, chat))
        chat += f" {answers[-1]}"
    shown = capsys.readouterr()
    assert shown.out.splitlines() == answers
    shows(shown.err, "/adapter 2", paths[1])


@pytest.mark.parametrize("other", ["a model", "another base", "a quantised base"])
def test_what_is_no_adapter_on_the_same_base_is_refused(folder, adapters, tmp_path, capsys, other):
    if other == "a model":
        without(folder, tmp_path)
    else:
        without(adapters[1][0], tmp_path)
    if other == "another base":
        path = tmp_path / "adapter_config.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"base_model_name_or_path": "another/base"}))
    elif other == "a quantised base":
        stated = {"quant_method": "bitsandbytes", "load_in_8bit": True}
        (tmp_path / "quantization_config.json").write_text(json.dumps(stated))
    paths = [str(adapters[0][0]), str(tmp_path)]
    assert use.main([*paths, "--prompt", PROMPT, *GREEDY], "meshloom generate") == 64
    shows(capsys.readouterr().err, f"open: {tmp_path}")


@pytest.mark.more
def test_a_seed_draws_the_same_again(folder, capsys):
    drawn = [
        (
            use.main([str(folder), "--prompt", "", "--seed", seed], "meshloom generate"),
            capsys.readouterr().out,
        )
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.more
def test_a_prompt_and_a_seed_of_any_kind_are_taken(folder, capsys):
    words = ["--prompt", "w7 \udcff", "--seed", str(2**70), "--tokens", "3"]
    assert use.main([str(folder), *words], "meshloom generate") == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.more
def test_tabs_are_shown_as_they_are_and_escapes_are_not(capsys):
    from trainer.tasks.generation import Shown

    Shown(tokenizer()).on_finalized_text("if x:\n\ty\x1b[2J", stream_end=True)
    assert capsys.readouterr().out == "if x:\n\ty\\x1b[2J\n"


@pytest.mark.more
def test_a_chat_with_a_closed_or_a_broken_input_ends(folder):
    command = f'"{sys.executable}" -m trainer.command chat "{folder}" --tokens 2'
    for given in (f"{command} <&-", f"printf 'w5 \\377\\nw6\\n' | {command}"):
        result = run("bash", "-c", given)
        assert result.code == 0 and "Traceback" not in result.output, result.output


@contextmanager
def at_most(seconds: float, process: subprocess.Popen[Any]) -> Iterator[None]:
    """Kill a process that a test would otherwise wait for without end."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.mark.more
def test_ctrl_c_while_the_model_is_loaded_is_no_traceback(folder):
    with (
        subprocess.Popen(
            [sys.executable, "-m", "trainer.command", "generate", str(folder), "--prompt", "w5"],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
        at_most(120, process),
    ):
        assert process.stderr and process.stderr.readline().startswith("model ")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130 and "Traceback" not in process.stderr.read()


def test_a_chat_keeps_its_history(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w6\n\nw7\n"))
    assert use.main([str(folder), "--system", "w4", *GREEDY], "meshloom chat") == 0
    first = greedy(plain_model(), chat := "<system> w4 <user> w5 w6 <assistant>")
    second = greedy(plain_model(), f"{chat} {first} <user> w7 <assistant>")
    assert capsys.readouterr().out.splitlines() == [first, second]


@pytest.mark.more
def test_ctrl_c_ends_the_answer_and_the_end_of_the_input_the_chat(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 10**6, "eos_token_id": None})
    )
    endless = {"suppress_tokens": [0, 1, 2, 3]}
    (tmp_path / "generation_config.json").write_text(json.dumps(endless))
    command = [sys.executable, "-m", "trainer.command", "chat", tmp_path, "--tokens", "1000000"]
    with (
        subprocess.Popen(
            [*map(str, command), "--seed", "1"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        ) as process,
        at_most(120, process),
    ):
        assert process.stdin and process.stdout
        for message in (b"w5\n", b"w6 w7\n"):
            process.stdin.write(message)
            process.stdin.flush()
            assert process.stdout.read(1).strip(), "the answer begins"
            process.send_signal(signal.SIGINT)
            # it ends in a line
            assert len(process.stdout.readline()) > 1
        process.stdin.close()
        assert process.wait(60) == 0


def without(folder: Path, target: Path, *names: str) -> Path:
    for path in folder.iterdir():
        if path.name not in names:
            (target / path.name).write_bytes(path.read_bytes())
    return target


def torn(folder: Path, target: Path) -> Path:
    path = without(folder, target) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    return target


def with_a_block_too_many(folder: Path, target: Path) -> Path:
    config = json.loads((without(folder, target) / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (target / "config.json").write_text(json.dumps(config | {"layer_types": None}))
    return target


def a_run_that_saved_nothing(folder: Path, target: Path) -> Path:
    (target / "config.json").write_text("{}")
    (target / "environment.json").write_text("{}")
    return target


def half_a_checkpoint(folder: Path, target: Path) -> Path:
    from trainer.checkpoint.manifest import write_manifest

    (target / "model").mkdir()
    without(folder, target / "model")
    (target / "trainer.json").write_text(
        json.dumps({"position": {"step": 1, "samples": 8, "tokens": 8, "engine": {}}})
    )
    write_manifest(target, {})
    (target / "model" / "model.safetensors").unlink()
    return target


def a_classifier(folder: Path, target: Path) -> Path:
    from trainer.models.classifiers import DESCRIPTION

    (target / DESCRIPTION).write_text(json.dumps({"model": {"name": "resnet18", "arguments": {}}}))
    return target


def a_transformers_vision_model(folder: Path, target: Path) -> Path:
    from transformers import ViTConfig

    ViTConfig().save_pretrained(target)
    return target


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
BAD: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "no folder": (
        lambda folder, target: target / "none",
        64,
        ("none: no such folder",),
    ),
    "an empty folder": (lambda folder, target: target, 64, ("a folder without a model",)),
    "no tokenizer": (without, 65, ("the tokenizer's files",)),
    "no weights": (without, 64, ("model.safetensors",)),
    "torn weights": (torn, 64, ("open: ",)),
    "weights that are missing": (with_a_block_too_many, 64, ("no model.layers.4.",)),
    "a run that saved nothing": (
        a_run_that_saved_nothing,
        64,
        ("final: no such folder",),
    ),
    "half a checkpoint": (half_a_checkpoint, 74, ("meshloom checkpoint verify",)),
    "a vision model of transformers": (a_transformers_vision_model, 64, ("ViTConfig",)),
    "a vision model": (a_classifier, 64, ("a classifier",)),
}
REMOVED = {"no tokenizer": TOKENIZER, "no weights": ("model.safetensors",)}


@pytest.mark.parametrize("name", BAD)
def test_a_path_without_a_whole_language_model_is_one_sentence(folder, tmp_path, capsys, name):
    make, code, keys = BAD[name]
    path = make(folder, tmp_path, *REMOVED.get(name, ()))
    assert use.main([str(path), "--prompt", PROMPT], "meshloom generate") == code
    shown = capsys.readouterr()
    error = shown.err[shown.err.index("error:\n") :].splitlines()
    assert not shown.out and len(error) == 2, shown.err
    shows(error[1], *keys)


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["--prompt", "w5 " * 70], 64, "but is -6."),
        (["--prompt", PROMPT, "--temperature", "-1"], 64, "strictly positive float"),
        (["--prompt", PROMPT, "--tokens", "0"], 64, "but is 0."),
        (["--prompt", PROMPT, "--temperature", "1e-320"], 64, "probability tensor contains"),
        (["--prompt", "more", "--tokens", "4"], 64, "index out of range"),
    ],
)
def test_an_option_that_does_not_fit_is_one_sentence(folder, tmp_path, capsys, words, code, error):
    config = json.loads((without(folder, tmp_path) / "config.json").read_text())
    limited = json.dumps(config | {"max_position_embeddings": 64})
    (tmp_path / "config.json").write_text(limited)
    larger = tokenizer()
    larger.add_tokens(["more"])  # it has no row in the model
    larger.save_pretrained(tmp_path)
    assert use.main([str(tmp_path), *words], "meshloom generate") == code
    assert error in capsys.readouterr().err


def test_a_chat_says_why_there_can_be_none(folder, tmp_path, capsys, monkeypatch):
    without(folder, tmp_path, *TOKENIZER, "chat_template.jinja")
    for template, words in (
        (None, "chat_template is not set"),
        ("{{ raise_exception('only w5') }}", "TemplateError: only w5"),
    ):
        tokenizer(chat_template=template).save_pretrained(tmp_path)
        monkeypatch.setattr(sys, "stdin", io.StringIO("w6\n"))
        assert use.main([str(tmp_path)], "meshloom chat") == 64
        assert words in capsys.readouterr().err


def test_evaluating_without_lm_eval_says_how_to_install_it(folder, capsys, monkeypatch):
    monkeypatch.setattr("trainer.storage.installed", lambda name: False)
    assert use.main([str(folder), "--tasks", "arc_easy"], "meshloom evaluate") == 64
    assert "pip install 'meshloom[evaluate]'" in capsys.readouterr().err


LAYOUTS = [
    ("trainer.engine=mesh", "zero_optimization.stage=3"),
    ("trainer.engine=deepspeed", "zero_optimization.stage=3"),
    ("trainer.engine=mesh", "pipeline.stages=2", "zero_optimization.stage=0"),
]
with_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval")


@pytest.mark.more
@with_lm_eval
def test_a_task_of_ones_own_is_scored(folder, tmp_path, capsys):
    model, questions, right = plain_model(), [], 0
    for n in range(10, 20):
        text, options = f"w{n} w{n + 1}", ["w30", "w31"]
        logits = model(torch.tensor([[n, n + 1]])).logits[0, -1]
        right += bool(logits[30] > logits[31])
        questions.append((text, options, 0))
    task = write_task(tmp_path, questions)
    assert use.main([str(folder), "--tasks", str(task)], "meshloom evaluate") == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("|own"))
    assert [cell.strip() for cell in row.split("|")][7] == f"{right / 10:g}"
    assert use.main([str(folder), "--tasks", "no_such_task"], "meshloom evaluate") == 64
    assert "no_such_task" in capsys.readouterr().err


@pytest.mark.more
@with_lm_eval
@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_a_run_of_two_ranks_is_scored_as_it_trains_and_trains_the_same(tmp_path, layout):
    questions = [(f"def f{n}(x): return x +", [f" {n}", " zebra"], 0) for n in range(9)]
    task = write_task(tmp_path, questions)
    job = write_job(tmp_path, evaluation={"samples": 4, "every": 2})
    common = [*layout, "--processes", "2"]
    folders = []
    for name, words in {"plain": [], "scored": [f'trainer.evaluation.tasks=["{task}"]']}.items():
        words = [*common, f"trainer.run.name={name}", *words]
        result = run(sys.executable, "launch/train.py", "--config", job, *words)
        assert result.code == 0, result.output
        folders.append(tmp_path / "runs" / name)
    assert losses(folders[0]) == losses(folders[1])
    scores = [line["evaluation_own/acc"] for line in metrics(folders[1]) if "loss" not in line]
    assert len(scores) == 2 and all(0 <= score <= 1 for score in scores)
    assert "own/acc" in result.output and not (folders[1] / "evaluated").exists()


@pytest.mark.more
@with_lm_eval
def test_a_task_that_cannot_be_loaded_is_found_before_training(tmp_path):
    job = write_job(tmp_path, evaluation={"tasks": ["no_such_task"]})
    result = run(sys.executable, "launch/train.py", "--config", job)
    assert result.code == 64 and "tasks no_such_task: " in result.output, result.output
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


@pytest.mark.more
def test_an_own_module_has_no_tasks():
    import trainer
    from trainer.errors import ConfigError

    config = {"train_batch_size": 2, "trainer": {"evaluation": {"tasks": ["arc_easy"]}}}
    data = [(torch.ones(2), torch.ones(1))] * 8
    loss = lambda output, target: ((output - target).square().sum(), len(target))  # noqa: E731
    with pytest.raises(ConfigError, match="trainer.evaluation.tasks"):
        trainer.train(config, model=lambda: torch.nn.Linear(2, 1), data=data, loss=loss)


COMPLETED = {
    "meshloom ev": "evaluate",
    "meshloom checkpoint imp": "import",
    "meshloom generate --pro": "--prompt",
    "meshloom train --config ": "",
}


def test_bash_completes_commands_and_options(tmp_path):
    called = f'#!/bin/sh\nexec "{sys.executable}" -m trainer.command "$@"\n'
    (tmp_path / "meshloom").write_text(called)
    (tmp_path / "meshloom").chmod(0o755)
    tries = "".join(
        f'words="{line}" && COMP_WORDS=($words) && '
        '[[ $words == *" " ]] && COMP_WORDS+=("")\n'
        "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _meshloom; printf '%s\\n' \"${COMPREPLY[0]}\"\n"
        for line in COMPLETED
    )
    script = f'eval "$(meshloom --print-completion)"\n{tries}complete -p meshloom\n'
    places = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, env=os.environ | places
    )
    assert result.stdout.splitlines()[:-1] == list(COMPLETED.values()), result.stderr
    assert "-o default" in result.stdout.splitlines()[-1], "files"
