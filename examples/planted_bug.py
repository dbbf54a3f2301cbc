"""A bug that training does not notice, and what the certificate says about it.

    python examples/planted_bug.py
    python examples/planted_bug.py --without    # the same run without the bug: it passes

A tied embedding stands on the first and the last pipeline stage, which have to add up its gradient.
Here they do not: the loss still falls, and the two copies drift apart.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer.command import run_command
from trainer.command.verify import main
from trainer.parallel.gradients import GradientSync

MODEL = '{"model_type": "gpt2", "n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 4096}'
CONFIG = ["--config", "pipeline_zero2", f"trainer.model.config={MODEL}"]

if __name__ == "__main__":
    arguments = [word for word in sys.argv[1:] if word != "--without"]
    if "--without" not in sys.argv:
        GradientSync.reduce = lambda self: None  # type: ignore[method-assign]
    run_command(main, [*CONFIG, *arguments], "examples/planted_bug.py")
