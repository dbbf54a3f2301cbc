"""The README's recipe for your own model, data and loss: killed, the same script resumes bit for bit."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import ROOT, run

CALL = """
import os, signal
class Killed(meshloom.Callback):
    def on_step_end(self, step):
        if step == int(os.environ.get("KILLED_AT", 0)):
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    folder, *more = sys.argv[1:]
    overrides = ["trainer.steps=12", "trainer.checkpoint.every=3", "trainer.run.folder=" + folder, *more]
    own = {"model": model, "data": data, "loss": loss, "processes": 2}
    meshloom.train("zero3", overrides=overrides, callbacks=[Killed()], **own)
"""


def recipe() -> str:
    """The last block of Python of the README that defines a model, up to its calls."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    block = next(block for block in blocks if "def model" in block)
    return "import sys\n" + block.partition("if __name__")[0] + CALL


@pytest.mark.more
def test_the_recipe_of_the_readme_goes_on_in_another_process(tmp_path: Path) -> None:
    script = tmp_path / "recipe.py"
    script.write_text(recipe())
    plain = run(sys.executable, script, tmp_path / "whole", cold=True)
    assert plain.code == 0, plain.output
    killed = run(sys.executable, script, tmp_path / "killed", cold=True, KILLED_AT="7")
    assert killed.code != 0, killed.output
    again = run(sys.executable, script, tmp_path / "killed", cold=True)
    assert again.code == 0 and "step 6, " in again.output, again.output
    models = [next((tmp_path / name).glob("*/final/*.safetensors")) for name in ("whole", "killed")]
    whole, resumed = map(load_file, models)
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


@pytest.mark.more
def test_other_data_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "recipe.py"
    script.write_text(recipe())
    killed = run(sys.executable, script, tmp_path / "runs", cold=True, KILLED_AT="4")
    assert killed.code != 0, killed.output
    script.write_text(recipe().replace("> 4", "> 5"))
    again = run(sys.executable, script, tmp_path / "runs", cold=True)
    assert again.code != 0 and "fingerprint" in again.output, again.output
