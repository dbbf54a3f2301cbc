"""Real runs that wait in a phase, so that a test can interrupt them there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import warm
from tests.support.commands import ROOT, TRAIN, warm_server

# runs before the command, in each of its processes; `slow` holds a phase until the test has seen it
SCRIPT = """
import os, runpy, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
sys.argv[0] = {train!r}
rank, folder = int(os.environ["RANK"]), Path({folder!r})
(folder / f"pid-{{rank}}").write_text(str(os.getpid()))

def slow(module, name, when=lambda *arguments: True):
    real = getattr(module, name)
    def paused(*arguments, **options):
        if when(*arguments) and not (folder / f"reached-{{rank}}").exists():
            (folder / f"reached-{{rank}}").touch()
            time.sleep(2)
        return real(*arguments, **options)
    setattr(module, name, paused)

{code}
runpy.run_path({train!r}, run_name="__main__")
"""
PHASES = {
    "imports": """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and not (folder / f"reached-{rank}").exists():
            (folder / f"reached-{rank}").touch()
            time.sleep(2)
sys.meta_path.insert(0, Finder())""",
    "data preparation": "import trainer.data.text.preparation as m; slow(m, 'prepare')",
    "building the model": "import trainer.parallel.apply as m; slow(m, 'materialise')",
    "first step": (
        "import trainer.engines.torch.engine as m; slow(m.TorchEngine, 'step', lambda "
        "_, "
        "s, *a: s == 0)"
    ),
    "evaluation": "import trainer.run.hooks as m; slow(m, 'held_out_loss')",
    "saving": (
        "import trainer.checkpoint.faults as m; slow(m, 'at', lambda phase: phase in "
        "('flush', 'rename'))"
    ),
}
PHASES["saving beside the training"] = PHASES["saving"]


def command(
    folder: Path, job: Path, code: str = "", does: str = TRAIN, ranks: int = 2
) -> list[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(root=str(ROOT), train=does, folder=str(folder), code=code))
    launch = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from trainer.supervise.launcher "
        "import start; "
    )
    if code != PHASES["imports"]:
        launch += f"sys.executable = {str(warm.PYTHON)!r}; "
    launch += f"sys.exit(start({ranks}, {[str(script), '--config', str(job)]!r}))"
    return [sys.executable, "-c", launch]


def environment(cache: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(cache), warm.SOCKET: warm_server()}


def nothing_left(folder: Path) -> bool:
    result = subprocess.run(
        ["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False
    )
    return result.stdout.split() == []
