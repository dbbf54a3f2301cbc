"""`launch/train.py` as a person meets it: help, dry runs, mistakes, a rank that dies, and going
on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.commands import (
    ROOT,
    TRAIN,
    Result,
    losses,
    metrics,
    run,
    sample_ids,
    start,
    train,
    warm_server,
    write_job,
)
from tests.support.messages import shows

HEAVY = {
    "torch",
    "transformers",
    "deepspeed",
    "datasets",
    "accelerate",
    "pydantic",
    "rich",
    "numpy",
}


UNTIL_TORCH = """
import os, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch":
            print("torch after", repr(os.environ["CUDA_VISIBLE_DEVICES"]), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Finder)
from trainer.command.__main__ import main
main()
"""


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_what_forks_processes_for_the_cpu_hides_gpus_before_torch_can_look(command: str) -> None:
    arguments = ("-c", UNTIL_TORCH, command, "--config", "zero2")
    result = run(sys.executable, *arguments, CUDA_VISIBLE_DEVICES="0", PYTHONPATH=str(ROOT))
    assert result.output.endswith("torch after ''\n"), result.output


def loaded_by(*arguments: str) -> tuple[Result, set[str]]:
    """The command's result and the heavy modules that it had imported at its end."""
    code = (
        "import sys, runpy, atexit, os\n"
        f"sys.argv = {[TRAIN, *arguments]!r}\n"
        "os._exit = lambda code: sys.exit(code)\n"
        "atexit.register(lambda: print('LOADED', *sorted({name.split('.')[0] for name in "
        "sys.modules})))\n"
        f"runpy.run_path({TRAIN!r}, run_name='__main__')\n"
    )
    result = run(sys.executable, "-c", code)
    head, _, loaded = result.output.rpartition("LOADED")
    return Result(result.code, head), HEAVY & set(loaded.split())


def test_help_is_short_and_light():
    result, loaded = loaded_by("--help")
    assert result.code == 0
    assert len(result.output.splitlines()) < 60
    assert "deepspeed launch/train.py --config ds_configs/zero2.json" in result.output
    assert loaded == set()


@pytest.mark.more
@pytest.mark.parametrize(
    ("command", "words", "meant"),
    [
        ("train", ["--confg", "zero2"], "--config"),
        ("train", ["--config", "zero2", "--procesess=2"], "--processes"),
        ("train", ["--config", "zero2", "--dryrun"], "--dry-run"),
        ("plan", ["--config", "zero2", "--nodez", "4"], "--nodes"),
        ("verify", ["--confg", "zero2"], "--config"),
        ("use", ["runs/a", "--prompts", "x"], "--prompt"),
        ("merge", ["a", "b", "--bas", "c", "--baze", "d"], "--base"),
    ],
)
def test_an_option_that_is_misspelt_is_named_with_the_one_that_is_meant(
    capsys, command, words, meant
):
    """Not the one that then seems to be missing."""
    name = "meshloom generate" if command == "use" else f"meshloom {command}"
    with pytest.raises(SystemExit) as caught:
        import_module(f"trainer.command.{command}").main(words, name)
    message = capsys.readouterr().err.splitlines()[-1]
    strange = words[-2] if words[-1][:1] != "-" else words[-1].partition("=")[0]
    assert caught.value.code == 2
    assert (
        f"there is no {strange}" in message
        and f'"{meant}"' in message
        and "required" not in message
    )


@pytest.mark.more
def test_a_command_that_is_misspelt_is_named_with_the_one_that_is_meant(capsys, monkeypatch):
    from trainer.command.__main__ import main

    monkeypatch.setattr(sys, "argv", ["meshloom", "trian", "--config", "zero2"])
    with pytest.raises(SystemExit):
        main()
    assert 'Did you mean "train"' in capsys.readouterr().err


@pytest.mark.more
@pytest.mark.parametrize(
    ("words", "key"),
    [
        ([], "--config"),
        (["--config"], "--config"),
        (["--config", "zero2", "--processes", "x"], "--processes"),
        (["job.json", "trainer.steps=3"], "--config job.json"),
    ],
)
def test_what_is_missing_or_wrong_is_still_said(capsys, words, key):
    from trainer.command.train import options_of

    with pytest.raises(SystemExit):
        options_of(words, "meshloom train")
    line = capsys.readouterr().err.splitlines()[-1]
    assert "there is no" not in line
    shows(line, key)


@pytest.mark.more
def test_negative_numbers_are_no_options():
    from trainer.command.train import options_of

    assert options_of(["--config", "a", "--preview", "-1"], "meshloom train").preview == -1


@pytest.mark.more
def test_a_model_with_its_initial_values_has_no_note_on_loaded_weights():
    from types import SimpleNamespace

    from trainer.models.spec import MadeWeights, NoWeights, Weights
    from trainer.run.describe import _rate_notes

    class Loaded(Weights):
        def read(self, name: str) -> None: ...

    def notes(weights: Any) -> list[str]:
        optimizer = SimpleNamespace(type="Adam", params={"lr": 1e-2})
        config = SimpleNamespace(
            optimizer=optimizer, scheduler=None, trainer=SimpleNamespace(adapter=None)
        )
        subject = SimpleNamespace(spec=SimpleNamespace(building=SimpleNamespace(weights=weights)))
        prepared: Any = SimpleNamespace(config=config, subject=subject, steps=9)
        return _rate_notes(prepared)

    assert notes(NoWeights()) == notes(MadeWeights(dict)) == []
    assert "weights are loaded" in notes(Loaded())[0]


@pytest.mark.parametrize(
    ("learned", "spared", "shown"),
    [(90, 10, "on 80 of 90 parameters"), (8, 0, "on all trained parameters"), (8, 2, "but 2")],
)
def test_how_many_values_an_adapter_has_is_not_said_of_its_update(learned, spared, shown):
    from types import SimpleNamespace

    from trainer.run.describe import _update_line

    optimizer = SimpleNamespace(type="AdamW", params={"weight_decay": 0.1})
    section = SimpleNamespace(weight_decay_excludes="nothing")
    prepared: Any = SimpleNamespace(
        config=SimpleNamespace(optimizer=optimizer, trainer=section),
        subject=SimpleNamespace(spec=SimpleNamespace(parameters=90)),
        learned=learned,
        undecayed={"norm": spared},
    )
    line = _update_line(prepared)
    assert shown in line and ("90" in line) is (learned == 90)


def test_the_help_lists_each_command_once(monkeypatch, capsys):
    from trainer.command import __main__ as command

    monkeypatch.setattr(sys, "argv", ["meshloom", "--help"])
    with pytest.raises(SystemExit):
        command.main()
    words = re.findall(r"[a-z]+", capsys.readouterr().out)
    others = " ".join(command.COMMANDS.values())
    once = [name for name in command.COMMANDS if name not in others]
    assert len(once) > 3 and all(words.count(name) == 1 for name in once)


@pytest.mark.more
def test_compiling_promises_no_minute(monkeypatch):
    from types import SimpleNamespace

    from trainer.engines.deepspeed import machine

    monkeypatch.setattr(machine, "_missing", lambda *given: iter(["async_io"]))
    messages: list[str] = []
    signs = SimpleNamespace(at=lambda text, stays: messages.append(text))
    given: Any = SimpleNamespace(signs=signs, device=None)
    machine.announce(None, given)  # type: ignore[arg-type]
    assert "async_io" in messages[0] and "about a minute" not in messages[0]


def test_config_errors_come_before_torch(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(
        '{"zero_optimisation": {"stage": 3}, "train_batch_size": 3, "gradient_accumulation_steps": '
        "2}"
    )
    result, loaded = loaded_by("--config", str(path), "--processes", "1")
    assert result.code == 64
    assert 'Did you mean "zero_optimization"?' in result.output
    assert not loaded & {"torch", "transformers", "deepspeed", "datasets", "accelerate"}


def test_a_dry_run_shows_everything_and_writes_nothing(tmp_path):
    job = write_job(tmp_path, generate={"prompt": "def "})
    long = "scheduler.params.warmup_num_steps=3"
    unused = "trainer.data.chat_template=chatml"
    result = train("--config", job, "trainer.seed=11", long, unused, "--dry-run")
    assert result.code == 0, result.output
    for text in (
        "layout  one process, ZeRO-2, float32, batch 8 = 4 x 2 x 1 (engine deepspeed)",
        "plan    3 steps, 24 samples",
        "note    scheduler.params.warmup_num_steps is 3, and the run has 3 steps: all of it is",
        "note    trainer.data.chat_template has no effect",
        "train_micro_batch_size_per_gpu = 4  <- auto: from",
        '"seed": 11',
        "sample 0: 16 tokens, 15 count in the loss (+)",
        "f0(x): return x + 0<|endoftext|>",
    ):
        assert text in result.output, result.output
    config = result.output.split("config\n", 1)[1].split("\nsamples", 1)[0]
    assert json.loads(config)["scheduler"]["params"]["total_num_steps"] == 3
    assert not (tmp_path / "runs").exists()


@pytest.mark.whole
def test_the_breakdowns_that_deepspeed_prints_reach_the_terminal(tmp_path):
    requests = [
        "wall_clock_breakdown=true",
        "memory_breakdown=true",
        "comms_logger.enabled=true",
        "flops_profiler.enabled=true",
    ]
    result = train("--config", write_job(tmp_path), *requests)
    assert result.code == 0, result.output
    for text in (
        "time (ms) | fwd_microstep: ",
        "Engine after backward",
        "Comm. Op",
        "DeepSpeed Flops Profiler",
    ):
        assert text in result.output, result.output
    assert "ignores" not in result.output
    result = train(
        "--config",
        write_job(tmp_path),
        *requests,
        "trainer.engine=mesh",
        "--fresh",
        "zero_optimization.stage=0",
    )
    assert result.code == 0, result.output
    notes = "\n".join(line for line in result.lines if "the mesh engine ignores" in line)
    assert all(name.split("=")[0] in notes for name in requests)


def text_file(name: str, content: bytes) -> Any:
    def make(folder: Path) -> list[str]:
        (folder / name).write_bytes(content)
        return [f"trainer.data.path={folder / name}"]

    return make


def folder_without_weights(folder: Path) -> list[str]:
    from trainer.data.text.tokenizer import embedded_tokenizer

    embedded_tokenizer(folder / "cache").save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    return ["trainer.model.config=null", f"trainer.model.name_or_path={folder / 'model'}"]


def folder_is_a_file(folder: Path) -> list[str]:
    (folder / "runs").write_text("")
    return []


# what is wrong -> (overrides, exit code, what the message says)
MISTAKES: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "missing model": (
        [
            "trainer.model.config=null",
            "trainer.model.name_or_path=./nowhere",
            "trainer.data.tokenizer=null",
        ],
        64,
        ("./nowhere",),
    ),
    "model without weights": (
        folder_without_weights,
        64,
        ("no weights", "expected model.safetensors"),
    ),
    "missing data": (["trainer.data.path=/nowhere/*.jsonl"], 65, ("/nowhere/*.jsonl",)),
    "a line that is not JSON": (
        text_file("bad.jsonl", b'{"text": "a"}\n{"text": \n'),
        65,
        ("bad.jsonl:2: ",),
    ),
    "a missing column": (text_file("other.jsonl", b'{"txt": "a"}\n'), 65, ('Did you mean "txt"',)),
    "an empty file": (text_file("empty.jsonl", b""), 65, ("empty.jsonl: ",)),
    "not UTF-8": (
        text_file("latin.txt", "na\u00efve".encode("latin-1") * 9),
        65,
        ("latin.txt: byte 2",),
    ),
    "a small embedding": (
        ["trainer.model.config.vocab_size=100"],
        64,
        ("trainer.model.config.vocab_size: 100", "at least 4,096"),
    ),
    "a long sequence": (
        ["trainer.model.config.max_position_embeddings=8"],
        64,
        ("trainer.data.sequence_length: 16", "8 positions"),
    ),
    "a long sequence for a model that counts from behind its padding": (
        [
            (
                'trainer.model.config={"model_type": "camembert", "is_decoder": true, '
                '"max_position_embeddings": 16, "pad_token_id": 1}'
            )
        ],
        64,
        ("trainer.data.sequence_length: 16", "14 positions"),
    ),
    "a run folder that can't be made": (folder_is_a_file, 74, ("runs",)),
    "a batch that does not fit": (["train_batch_size=7"], 64, ("train_batch_size",)),
    "a mesh that does not fit": (
        ["trainer.mesh.replicate=2", "trainer.mesh.shard=1"],
        64,
        ("trainer.mesh: saw 2 (replicate) x 1 (shard)", "product of 1"),
    ),
    "an axis that no engine has": (
        [
            *(
                "pipeline.stages=2",
                "--processes",
                "2",
                "zero_optimization.stage=3",
                "gradient_accumulation_steps=4",
            ),
            "trainer.pipeline_schedule=ZBVZeroBubble",
        ],
        64,
        ("ZBVZeroBubble with ZeRO-3", "wrong gradients"),
    ),
    "micro-batches fewer than stages": (
        ["pipeline.stages=4", "--processes", "4"],
        64,
        (
            (
                "gradient_accumulation_steps: 2 micro-batches",
                "4 pipeline stages",
                "expected at least 4",
            )
        ),
    ),
    "stages more than blocks": (
        ["pipeline.stages=4", "--processes", "4", "gradient_accumulation_steps=4"],
        64,
        ("pipeline.stages: llama: 2 blocks", "4 pipeline stages", "one block"),
    ),
    "heads that can't be divided": (
        ["tensor_parallel.autotp_size=4", "--processes", "4"],
        64,
        (
            (
                "tensor_parallel.autotp_size: llama: 2 key-value heads = 0 x 4 + 2",
                "expected a multiple of 4",
            )
        ),
    ),
    "a checkpoint that is not there": (
        ["--resume", "/nowhere/step-1"],
        64,
        ("--resume: /nowhere/step-1: no such folder",),
    ),
}


@pytest.mark.first("missing model", "a batch that does not fit", "a mesh that does not fit")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message(name, tmp_path):
    given, code, keys = MISTAKES[name]
    job = write_job(tmp_path)
    arguments = given if isinstance(given, list) else given(tmp_path)
    result = train("--config", job, *arguments)
    assert result.code == code, result.output
    shows(result.output, *keys)
    assert "Traceback" not in result.output
    assert len(re.findall(r" error( \(\d+ problems\))?:", result.output)) == 1, result.output
    assert len(result.output.splitlines()) <= 4, result.output
    assert not list(tmp_path.glob("runs/**/checkpoints/*")), "half-written"


@pytest.mark.more
def test_a_mistake_on_two_ranks_is_one_message(tmp_path):
    job = write_job(tmp_path)
    result = train("--config", job, "--processes", "2", "trainer.data.path=/nowhere/x.jsonl")
    assert result.code == 65
    assert result.output.count("/nowhere/x.jsonl") == 1, result.output
    assert result.output.count("error") == 1


DYING = """
import sys, runpy, os
sys.path.insert(0, {root!r})
sys.argv[0] = {train!r}
from trainer.engines.deepspeed.engine import DeepSpeedEngine
step = DeepSpeedEngine.step
def dying(self, number, *args, **kwargs):
    if number == 1 and os.environ["RANK"] == "1":
        raise RuntimeError("planted")
    return step(self, number, *args, **kwargs)
DeepSpeedEngine.step = dying
runpy.run_path({train!r}, run_name="__main__")
"""


def test_a_rank_that_dies_ends_the_run(tmp_path):
    job = write_job(tmp_path)
    script = tmp_path / "dying.py"
    script.write_text(DYING.format(root=str(ROOT), train=TRAIN))
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from trainer.supervise.launcher import "
        "start; "
        f"sys.executable = {str(warm.PYTHON)!r}; sys.exit(start(2, [{str(script)!r}, '--config', "
        f"{str(job)!r}]))"
    )
    result = run(sys.executable, "-c", code, timeout=300, **{warm.SOCKET: warm_server()})
    assert result.code == 70, result.output
    where = rf"internal error \(rank 1 on {re.escape(socket.gethostname())}, step 2, training\)"
    last = result.output.splitlines()[-1]
    assert re.match(where, last), result.output
    shows(last, "RuntimeError: planted", "traceback")
    assert "planted" in (tmp_path / "runs" / "job" / "logs" / "rank-1.log").read_text()
    left = subprocess.run(
        ["pgrep", "-f", str(script)], capture_output=True, text=True, check=False
    ).stdout.split()
    assert left == []


@pytest.mark.more
@pytest.mark.parametrize("stage", [2, 3])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, stage):
    from safetensors.torch import load_file

    job = write_job(
        tmp_path, steps=4, checkpoint={"every": 2, "keep_last": 9}, data={"sequence_length": 16}
    )
    common = ["--config", job, "--processes", "2", f"zero_optimization.stage={stage}"]
    whole = train(*common)
    assert whole.code == 0, whole.output
    first, second = tmp_path / "runs" / "job", tmp_path / "runs" / "again"
    resumed = train(
        *common, "--resume", first / "checkpoints" / "step-000002", "trainer.run.name=again"
    )
    assert resumed.code == 0, resumed.output
    shows(
        resumed.output, "resumed", f"{first / 'checkpoints' / 'step-000002'}: step 2, 16", "samples"
    )
    assert losses(second) == losses(first)[2:]
    assert sample_ids(second) == {step: ids for step, ids in sample_ids(first).items() if step >= 2}
    ours, theirs = ({}, {})
    for result, folder in ((ours, first), (theirs, second)):
        for path in (folder / "final").glob("*.safetensors"):
            result.update(load_file(path))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)


@pytest.mark.more
def test_resume_auto_takes_the_newest_good_one_and_says_what_it_skipped(tmp_path):
    job = write_job(tmp_path, steps=2, checkpoint={"every": 1})
    assert train("--config", job).code == 0
    directory = tmp_path / "runs" / "job" / "checkpoints"
    damaged = next((directory / "step-000002" / "model").glob("*.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    (directory / "step-000002").rename(
        directory / "step-000009"
    )  # out of the way of the step that is trained again
    result = train("--config", job, "--resume", "auto")
    assert result.code == 0, result.output
    shows(result.output, "step-000009", f"damaged: {directory}")
    shows(result.output, "now step-000009.damaged", "8 steps")
    shows(result.output, "2 to 2 came", "repeated")
    shows(result.output, "resumed", f"{directory / 'step-000001'}: step 1, 8", "samples")
    assert (directory / "step-000009.damaged" / "manifest.json").is_file()
    assert [line["step"] for line in metrics(tmp_path / "runs" / "job") if "loss" in line] == [
        1,
        2,
        2,
    ]


@pytest.mark.more
def test_the_trained_model_opens_anywhere(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    job = write_job(tmp_path, log={"every": 1, "trackers": ["tensorboard"]})
    assert train("--config", job).code == 0
    folder = tmp_path / "runs" / "job"
    assert list((folder / "tensorboard").glob("events.*"))
    for path in (folder / "final", folder / "checkpoints" / "step-000003" / "model"):
        model, notes = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not notes["missing_keys"]
        assert not notes["unexpected_keys"]
        assert len(AutoTokenizer.from_pretrained(path)) <= model.config.vocab_size
    saved = json.loads((folder / "config.json").read_text())
    assert saved["train_micro_batch_size_per_gpu"] == 4
    again = train("--config", folder / "config.json", "trainer.run.name=again")
    assert again.code == 0, again.output
    assert losses(tmp_path / "runs" / "again") == losses(folder)


@pytest.mark.more
def test_the_dtype_of_the_models_files(tmp_path):
    job = write_job(tmp_path, steps=2, checkpoint={"dtype": "bfloat16", "asynchronous": True})
    assert train("--config", job).code == 0
    folder = tmp_path / "runs" / "job"
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    for path in (folder / "final", folder / "checkpoints" / "step-000002" / "model"):
        assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
        assert {p.dtype for p in AutoModelForCausalLM.from_pretrained(path).parameters()} == {
            torch.bfloat16
        }
    exact = load_file(
        folder / "checkpoints" / "step-000002" / "optimizer" / "optimizer.safetensors"
    )
    assert exact["model.embed_tokens.weight.weight"].dtype == torch.float32
    again = train("--config", job, "trainer.steps=3", "trainer.run.name=job", "--resume", "auto")
    assert again.code == 0, again.output
    assert "resumed from" in again.output


@pytest.mark.more
def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path):
    """A rate at which the loss explodes after the warm-up."""
    best = {"every": 1, "keep_last": 1, "keep_best": True}
    job = write_job(tmp_path, steps=4, checkpoint=best, evaluation={"samples": 4, "every": 1})
    assert train("--config", job, "optimizer.params.lr=5").code == 0
    folder = tmp_path / "runs" / "job"
    held_out = {
        line["step"]: line["evaluation_loss"]
        for line in metrics(folder)
        if "evaluation_loss" in line
    }
    lowest = min(held_out, key=lambda step: held_out[step])
    kept = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert lowest < 4 and kept == [f"step-00000{lowest}", "step-000004"]
    for step in (lowest, 4):
        description = json.loads(
            (folder / f"checkpoints/step-00000{step}/trainer.json").read_text()
        )
        assert description["evaluation_loss"] == held_out[step]


@pytest.mark.more
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_goes_on(tmp_path, number):
    job = write_job(tmp_path, steps=400)
    process = start(sys.executable, TRAIN, "--config", job, "--processes", "2")
    folder = tmp_path / "runs" / "job"
    deadline = time.monotonic() + 400
    while not (folder / "metrics.jsonl").exists() or not metrics(folder):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 75, output
    name = signal.Signals(number).name
    shows(output, f"stopped by {name}", "checkpoint saved")
    assert output.count(f"stopped by {name}") == 1, output
    (saved,) = (folder / "checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    assert 0 < step < 400
    assert not (folder / "final").exists()
    # the rest would take long: it is enough that it starts at the right place
    process = start(sys.executable, TRAIN, "--config", job, "--processes", "2")
    while not any(line["step"] > step for line in metrics(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    assert f"resumed from {saved}: step {step}, {step * 8} samples seen" in output
    assert sample_ids(folder).keys() == set(range(max(sample_ids(folder)) + 1)), "a step is missing"


def cut_off(tmp_path: Path, **trainer: Any) -> Path:
    """A config whose run ended after 2 of 4 steps, with a checkpoint; returns its path."""
    job = write_job(tmp_path, steps=4, checkpoint={"every": 2, "keep_last": 9}, **trainer)
    done = train("--config", job)
    assert done.code == 0, done.output
    folder = tmp_path / "runs" / "job"
    shutil.rmtree(folder / "final")
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    return job


@pytest.mark.more
def test_the_same_command_goes_on_and_another_one_does_not(tmp_path):
    job = cut_off(tmp_path)
    whole = losses(tmp_path / "runs" / "job")
    other = train("--config", job, "trainer.steps=2")
    assert other.code == 0, other.output
    shows(other.output, "not finished", "--resume auto")
    assert (tmp_path / "runs" / "job-2" / "final").is_dir()
    shutil.rmtree(tmp_path / "runs" / "job-2")
    again = train("--config", job)
    assert again.code == 0, again.output
    shows(again.output, "3 to 4 came", "repeated")
    shows(again.output, "step 2, 16 samples", "seen")
    assert losses(tmp_path / "runs" / "job") == [*whole, *whole[2:]]
    # finished: nothing is left to do
    finished = train("--config", job, "trainer.steps=4")
    assert (finished.code, len(finished.lines)) == (0, 1), finished.output
    assert finished.output.startswith(
        f"finished: {tmp_path / 'runs' / 'job' / 'final'} is there already"
    )
    assert not (tmp_path / "runs" / "job-2").exists()


@pytest.mark.more
def test_fresh_leaves_the_unfinished_run_alone(tmp_path):
    job = cut_off(tmp_path)
    assert train("--config", job, "--fresh").code == 0
    assert (tmp_path / "runs" / "job-2" / "final").is_dir()
    assert not (tmp_path / "runs" / "job" / "final").exists()


@pytest.mark.more
def test_what_changed_since_the_checkpoint_is_refused_with_the_difference(tmp_path):
    job = cut_off(tmp_path)
    text = tmp_path / "text.jsonl"
    text.write_text(text.read_text().replace("x + 7", "x * 7"))
    changed = train("--config", job)
    assert changed.code == 65, changed.output
    assert "data or tokenizer: " in changed.output and 'fingerprint "' in changed.output
    shows(changed.output, "--resume-anyway")
    assert train("--config", job, "--resume-anyway").code == 0


@pytest.mark.more
def test_another_model_is_refused_and_another_rate_is_told(tmp_path):
    job = cut_off(tmp_path)
    path = tmp_path / "runs" / "job" / "checkpoints" / "step-000002"
    model = train(
        "--config",
        job,
        "--resume",
        path,
        "trainer.model.config.rope_theta=500",
        "trainer.run.name=other",
    )
    assert model.code == 64, model.output
    assert f"model: {path}: " in model.output and "rope_theta" in model.output
    rate = train(
        "--config", job, "--resume", path, "optimizer.params.lr=0.02", "trainer.run.name=other"
    )
    assert rate.code == 0, rate.output
    shows(rate.output, "changed since", "optimizer.params.lr 0.01 -> 0.02")


@pytest.mark.more
def test_missing_optimizer_state_is_an_error_unless_only_weights_are_wanted(tmp_path):
    from trainer.checkpoint.manifest import MANIFEST, write_manifest

    job = cut_off(tmp_path)
    path = tmp_path / "runs" / "job" / "checkpoints" / "step-000002"
    shutil.rmtree(path / "optimizer")
    (path / MANIFEST).unlink()
    write_manifest(path, {})
    missing = train("--config", job)
    assert missing.code == 74, missing.output
    shows(missing.output, "missing", "21 parameters (lm_head.weight")
    shows(missing.output, "optimizer's state", "--resume-weights-only")
    done = train("--config", job, "--resume-weights-only")
    assert done.code == 0, done.output
    shows(done.output, "step 2, 16 samples", "seen")


@pytest.mark.more
def test_a_running_run_is_refused(tmp_path):
    job = cut_off(tmp_path)
    from trainer.supervise import status_files
    from trainer.supervise.locks import hold, release

    assert hold(tmp_path / "runs" / "job")
    status_files.write(
        tmp_path / "runs" / "job", {"host": socket.gethostname(), "process": os.getpid()}
    )
    refused = train("--config", job)
    release()
    assert refused.code == 64, refused.output
    shows(refused.output, "being trained", f"{os.getpid()}", f"{socket.gethostname()}")
    assert not (tmp_path / "runs" / "job-2").exists()
