#!/usr/bin/env python3
"""Train on a Ray cluster, a worker for each rank; other arguments are those of launch/train.py."""

import argparse
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path


def run_rank(job: dict[str, list[str]]) -> int:
    """Run a rank; return its exit code. Raises RuntimeError, so that Ray starts all ranks again."""
    # Ray's torch backend has set the variables of torchrun, and serves a store at that address
    environment = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment.pop("ACCELERATE_TORCH_DEVICE", None)
    code = subprocess.run(job["command"], cwd=job["folder"][0], env=environment).returncode
    if code not in (0, 64, 65):  # done; an error of config or data, which would come again
        raise RuntimeError(f"rank {os.environ['RANK']} ended with exit code {code}")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--workers", type=int, required=True, help="the number of ranks")
    parser.add_argument("--cpu", action="store_true", help="workers without a GPU")
    options, arguments = parser.parse_known_args()
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError:
        sys.exit('Ray Train is not installed: pip install "ray[train]" on each node')

    class WithoutGPU(TorchConfig):
        train_func_context = nullcontext  # Ray's own takes memory of the rank's GPU

    command = [sys.executable, str(Path(__file__).resolve().with_name("train.py")), *arguments]
    trainer = TorchTrainer(
        run_rank,
        train_loop_config={"command": command, "folder": [os.getcwd()]},
        torch_config=WithoutGPU(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=not options.cpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    return int(trainer.fit().return_value)


if __name__ == "__main__":
    sys.exit(main())
