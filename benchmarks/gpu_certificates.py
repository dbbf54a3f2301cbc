"""Certificates of the configs that gpu.py measures, made on this machine's processors.

    python benchmarks/gpu_certificates.py                       # all shapes and arms; a minute each
    python benchmarks/gpu_certificates.py --shapes 1B --arms mesh "mesh, compiled"

Each config goes to `meshloom verify`, compiled where the arm is. results/gpu_certificates.json has
the results by a digest of the config: a row of gpu.py's table names the certificate of exactly the
config that it measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_arms import (
    ARMS,
    RESULTS,
    SEQUENCE,
    SHAPES,
    digest_of,
    json_of,
    missing,
    own_json,
)

CERTIFIED = [name for name, arm in ARMS.items() if arm.own and not arm.memory]
"""The arms that are our engines; those of the longest sequences change theirs as they run."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1B", "Qwen3-0.6B", "8B"])
    parser.add_argument("--arms", nargs="+", choices=CERTIFIED, default=CERTIFIED)
    parser.add_argument("--gpus", type=int, default=1, help="those of gpu.py's machine, up to 8")
    parser.add_argument("--sequence", type=int, default=SEQUENCE, help="that of gpu.py's run")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    verdicts: dict[str, bool] = {}
    for shape in options.shapes:
        for arm in options.arms:
            if reason := missing(arm):
                print(f"{shape}, {arm}: {reason}")
                continue
            with tempfile.TemporaryDirectory() as folder:
                shared = json_of(shape, options.gpus, smoke=False, sequence=options.sequence)
                config = own_json(arm, shared, Path(folder))
                digest = digest_of(config)
                if digest in verdicts:  # an arm that repeats another, or saves besides
                    continue
                result = certify(config, options.gpus, Path(folder))
            verdicts[digest] = result["passed"]
            print(f"{shape}, {arm}: {result}", flush=True)
            results[digest] = {"shape": shape, "arm": arm, **result}
            options.output.write_text(json.dumps(results, indent=1) + "\n")
    return int(not all(verdicts.values()))


def certify(config: dict[str, Any], ranks: int, folder: Path) -> dict[str, Any]:
    """Return whether a config's certificate passes, its layout, and where and when it was made."""
    path = folder / "config.json"
    output = folder / "certificate.json"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "trainer.command", "verify", "--config", str(path)]
    command += ["--world-size", str(ranks), "--output", str(output)]
    if config["trainer"].get("compile", "auto") != "none":
        command.append("--compile")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if not output.exists():
        raise SystemExit(f"no certificate:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    certificate = json.loads(output.read_text())
    head = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "passed": certificate["passed"],
        "layout": certificate["layout"],
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
    }


if __name__ == "__main__":
    sys.exit(main())
