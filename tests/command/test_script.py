"""`trainer.train` from plain Python: signals, what is resumed, what it left opened again, the words
of errors.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer
from tests.support.command.own_module import OWN, ROWS, build, config, loss
from tests.support.commands import ROOT
from tests.support.messages import raises, shows
from trainer.errors import FLAGS, ConfigError, Problem, in_python
from trainer.run.start.request import Request

STOPPED = """
import os, signal, sys, threading, time
sys.path.insert(0, {root!r})
from pathlib import Path
import trainer
from tests.support.command.own_module import OWN, config
from trainer.errors import Stopped

folder = Path({folder!r})
def interrupt():  # as Jupyter does it: this process alone is told
    while not [*(folder / "runs/own/checkpoints").glob("step-??????")]:  # the first may be pruned by now
        time.sleep(0.05)
    os.kill(os.getpid(), signal.{name})
threading.Thread(target=interrupt, daemon=True).start()
before = signal.getsignal(signal.SIGINT)
try:
    trainer.train(config(folder, 100000, checkpoint={{"every": 2, "keep_last": 2}}), processes={processes}, **OWN)
except Stopped as error:
    print("STOPPED", error, error.exit_code)
print("RESTORED", signal.getsignal(signal.SIGINT) is before)
last = sorted((folder / "runs/own/checkpoints").glob("step-??????"))[-1]
steps = int(last.name[5:]) + 1
trainer.train(config(folder, steps), processes={processes}, resume="auto", resume_anyway=True, **OWN)
print("FINISHED", steps, (folder / "runs/own/final").is_dir())
"""


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "processes"), [("SIGINT", 2), pytest.param("SIGTERM", 1, marks=pytest.mark.more)]
)
def test_a_signal_to_a_script_or_a_notebook_saves_and_is_raised(
    tmp_path: Path, name: str, processes: int
) -> None:
    code = STOPPED.format(root=str(ROOT), folder=str(tmp_path), name=name, processes=processes)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    shows(result.stdout, f"STOPPED stopped by {name}", "checkpoint saved", "same call")
    assert re.search(r"STOPPED .* 75\n", result.stdout)
    assert "RESTORED True" in result.stdout
    assert re.search(r"FINISHED \d+ True", result.stdout)


LAUNCHED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
import torch, trainer
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from tests.support.command.own_module import OWN, config
from trainer.errors import Stopped

folder = Path({folder!r})
class Ends(trainer.Callback):
    def on_step_end(self, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            if {fails}: raise ValueError("boom")
own = config(folder, 4) | {{"zero_optimization": {{"stage": 3}}}}
own["trainer"] |= {{"engine": "deepspeed"}}
given = OWN | {{"blocks": "1"}}
for callbacks in ([Ends()], []):
    try:
        losses = trainer.train(own, callbacks=callbacks, resume="auto", **given).losses
        print("ENDED", len(losses))
    except (Stopped, ValueError) as error:
        print("FAILED", error)
    print("LEFT", torch.nn.functional.linear is not torch._C._nn.linear, len(FWD_MODULE_STACK))
"""


@pytest.mark.more
@pytest.mark.parametrize("fails", [False, True])
def test_a_launchers_process_is_as_before_after_a_run_that_fails(
    tmp_path: Path, fails: bool
) -> None:
    """And the same call resumes: a run's folder was still locked, by the same process."""
    code = LAUNCHED.format(root=str(ROOT), folder=str(tmp_path), fails=fails)
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | place | {"MASTER_PORT": "0"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    messages = [line for line in result.stdout.splitlines() if re.match("ENDED|FAILED|LEFT", line)]
    assert [line[:6] for line in messages[::2]] == ["FAILED", "ENDED "], result.stdout
    assert messages[1::2] == ["LEFT False 0"] * 2, result.stdout


@pytest.mark.more
def test_the_ranks_of_a_script_that_is_killed_save_and_leave(tmp_path: Path) -> None:
    code = STOPPED.format(root=str(ROOT), folder=str(tmp_path), name="SIGKILL", processes=1)
    result = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=300)
    assert result.returncode == -signal.SIGKILL
    status, deadline = tmp_path / "runs/own/.lock", time.monotonic() + 60
    import fcntl

    with status.open() as file:
        while time.monotonic() < deadline:  # who trains holds it
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.2)
    pytest.fail("its rank trains on")


def test_a_run_goes_on_or_begins_anew_as_it_is_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = trainer.train(config(tmp_path, 2, checkpoint={"every": 1}), **OWN)
    assert first.folder.name == "own"
    longer = trainer.train(config(tmp_path, 3), **OWN, resume="auto")
    assert longer.folder == first.folder
    again = trainer.train(config(tmp_path, 3), **OWN, fresh=True)
    assert again.folder.name == "own-2"
    other = trainer.train(
        config(tmp_path, 3),
        **OWN,
        resume=first.folder / "checkpoints" / "step-000003",
        resume_weights_only=True,
    )
    assert other.folder.name == "own-3"
    with raises(ConfigError, "resume: /nowhere", "folder"):
        trainer.train(config(tmp_path), **OWN, resume="/nowhere")


@pytest.mark.more
def test_what_was_trained_opens_again(tmp_path: Path) -> None:
    result = trainer.train(
        config(tmp_path, 2, checkpoint={"every": 2}, mesh={"shard": -1})
        | {"zero_optimization": {"stage": 2}},
        **OWN,
        processes=2,
    )
    final = result.folder / "final"
    assert [path.name for path in final.glob("*.safetensors*")] == ["model.safetensors"]
    assert len(list((result.folder / "checkpoints/step-000002/model").glob("*.safetensors"))) >= 1
    results = [
        trainer.open(final, build),
        trainer.open(result.folder / "checkpoints" / "step-000002", model=build),
    ]
    start = build().state_dict()
    for module in results:
        assert not module.training and module(ROWS[0][0]).shape == (2,)
        assert all(
            torch.equal(value, results[0].state_dict()[name])
            for name, value in module.state_dict().items()
        )
    assert any(
        not torch.equal(value, start[name]) for name, value in results[0].state_dict().items()
    )
    for folder, own, message in (
        (tmp_path, build, "a folder without a model"),
        (final, None, "model=, which builds torch.nn.modules.container.Sequential"),
        (
            final,
            lambda: nn.Linear(4, 8),
            (
                "a torch.nn.modules.container.Sequential; expected the tensors of a "
                "torch.nn.modules.linear.Linear"
            ),
        ),
        (
            final,
            lambda: nn.Sequential(nn.Linear(4, 9)),
            r"size mismatch for 0.weight: .*\[8, 4\].*\[9, 4\]",
        ),
        (final, lambda: nn.Sequential(nn.Linear(4, 8)), 'Unexpected key.* "2.weight"'),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer.open(folder, own)


@pytest.mark.more
def test_a_hugging_face_model_opens_without_a_callable(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))
    model.save_pretrained(tmp_path / "step-000001" / "model")
    opened = trainer.open(tmp_path / "step-000001")
    assert all(
        torch.equal(value, model.state_dict()[name]) for name, value in opened.state_dict().items()
    )
    with pytest.raises(ConfigError, match="expected the folder alone"):
        trainer.open(tmp_path / "step-000001", build)


COMMANDS_ALONE = ("command", "tools", "certify/worker.py")
FOR_PYTHON_TOO = (
    "tools/planner/memory_check.py",
    "tools/planner/recompute_choice.py",
    "tools/planner/from_config.py",
    "tools/importers/deepspeed_checkpoint.py",
)


@pytest.mark.more
def test_an_unknown_keyword_is_refused_and_the_known_ones_are_documented() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'modle'"):
        trainer.train("zero3", modle=build)  # type: ignore[call-arg]
    documented = re.findall(r"^ *`(\w+)[`(]", trainer.train.__doc__ or "", re.MULTILINE)
    assert set(inspect.signature(trainer.train).parameters) == set(documented) - {"torch"}


def test_no_error_of_python_advises_a_flag() -> None:
    """What the command line has is an argument of `trainer.train`, under the name that errors give
    it.
    """
    for path in (ROOT / "trainer").rglob("*.py"):
        place = path.relative_to(ROOT / "trainer").as_posix()
        if (place.startswith(COMMANDS_ALONE) and place not in FOR_PYTHON_TOO) or place in (
            "errors.py",
            "supervise/world.py",
            "supervise/ending.py",
        ):
            continue
        tree = ast.parse(path.read_text())
        started = {
            id(word) for node in ast.walk(tree) if isinstance(node, ast.List) for word in node.elts
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in started
            ):
                assert not re.search(
                    r"(^|\s)--[a-z]|[Rr]un the same command", in_python(node.value)
                ) or ("`" in node.value or "--logdir" in node.value), f"{place}:{node.lineno}"
    parameters = inspect.signature(trainer.train).parameters
    arguments = {re.split(r"\W", argument)[0] for argument in FLAGS.values() if " " not in argument}
    assert arguments <= parameters.keys() and Request(script=True).script
    error = ConfigError(Problem("--resume: x", "saw", "one", "start one with --fresh"))
    error.reword_for_python()
    shows(error, "resume", "fresh=True")


@pytest.mark.more
@pytest.mark.parametrize("call", [trainer.train, trainer.verify])
def test_forks_that_cannot_use_the_gpus_of_this_machine_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    own = {key: value for key, value in OWN.items() if key != "quiet"}
    with raises(ConfigError, "CUDA", "call"):
        call(config(tmp_path, device="auto"), **own)


@pytest.mark.more
def test_a_certificate_hides_gpus_from_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    def seen(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "not hidden"
        return loss(output, target)

    assert trainer.verify(config(tmp_path), model=build, data=ROWS, loss=seen).passed
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
