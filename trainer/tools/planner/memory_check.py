"""The check of a run's memory: predicted before it is built, and compared at its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch
from rich.console import Console

from trainer.config import Config
from trainer.config.compiled import FILE, OVERRIDE
from trainer.engines import Machine
from trainer.engines.devices import Device, device_named
from trainer.errors import ConfigError, Problem, first_line
from trainer.run.describe import resolved
from trainer.run.prepare import Prepared
from trainer.run.start.folder import PLAN
from trainer.storage import Json, disk_errors, replace_file
from trainer.supervise.world import NO_GPUS
from trainer.tools.planner.candidates import overrides_of
from trainer.tools.planner.cluster import RESERVED, described, gib
from trainer.trackers import say

SECONDS = 120.0
"""Seconds that a prediction may take; a run begins without one that takes longer."""
RANKS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|SLURM_|OMPI_|PMI_|PMIX_).*"
    r"|RANK|WORLD_SIZE|NODE_RANK"
)
"""Variables by which a launcher tells a process that it is a rank."""
UNKNOWN = Device("unknown", 0, 300e12, 2e12, 100e9)


def check_memory(
    prepared: Prepared, machine: Machine, folder: Path, console: Console
) -> Callable[[], list[str]]:
    """Predict and report the memory that a run takes on its device, if `wanted`. Collective.

    Returns a function that compares the prediction with what was measured, as lines for the user.
    Raises ConfigError if the run needs more than the device has, unless `trainer.plan` is "warn".
    """
    if not wanted(prepared, machine):
        return list
    machine.signs.at("predicting the memory that it takes")
    machine.watch.moves(SECONDS)
    device = device_of(machine)
    needed, lines = machine.ranks.on_first(lambda: predict(prepared, machine, folder, device))
    for line in lines:
        say(console, line)
    return partial(measured, needed, machine)


def wanted(prepared: Prepared, machine: Machine) -> bool:
    """Return True if a prediction is possible and wanted: on GPUs, or with `trainer.plan` given.

    It is not possible for a model or data that the config does not name.
    """
    section = prepared.config.trainer
    possible = prepared.subject.is_named(section) and section.plan != "off"
    return possible and (machine.device.type == "cuda" or is_requested(prepared.config))


def is_requested(config: Config) -> bool:
    """Return True if the config asks for a plan, also on a CPU."""
    return config.origins.get("trainer.plan") in (FILE, OVERRIDE)


def predict(
    prepared: Prepared, machine: Machine, folder: Path, device: Device
) -> tuple[float | None, list[str]]:
    """Predict the bytes on the fullest rank, and lines for the user; write `plan.json`.

    None if the prediction fails, which a line reports. Raises ConfigError if the run needs more
    than the device has, unless `trainer.plan` is "warn", and DiskError for `plan.json`.
    """
    try:
        plan = simulated(prepared, machine, device)
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        return None, [f"memory  not predicted: {first_line(error)}"]
    with disk_errors(folder / PLAN):
        replace_file(folder / PLAN, (json.dumps(plan, indent=2) + "\n").encode())
    needed = plan["needed"]
    owner = "device" if machine.device.type == "cuda" else "host"
    if needed > device.memory and prepared.config.trainer.plan == "refuse":
        missing = f"{gib(needed - device.memory)} too much"
        actual = f"{plan['layout']} needs {gib(needed)} on the fullest rank, {missing}"
        expected = f"at most the {gib(device.memory)} of {device.name}"
        hint = f'trainer.plan="warn" tries anyway{_proposed(plan)}'
        raise ConfigError(Problem("memory", actual, expected, hint))
    room = f"of {gib(device.memory)} that the {owner} has for it"
    lines = [f"memory  {gib(needed)} predicted on the fullest rank, {room}"]
    if not plan["fits"]:
        left = f"with {gib(RESERVED)} left for CUDA and NCCL{_proposed(plan)}"
        lines.append(f"note    predicted to miss by {gib(needed - plan['room'])}, {left}")
    return needed, lines


def measured(needed: float | None, machine: Machine) -> list[str]:
    """Compare predicted with measured bytes on the fullest GPU, in a line. Collective on GPUs.

    `needed`: the predicted bytes; None, without a line, if the prediction failed.
    """
    if needed is None or machine.device.type != "cuda":
        return []
    peak = max(machine.ranks.gather(torch.cuda.max_memory_allocated(machine.device)))
    error = f"{needed / peak - 1:+.1%}"
    return [f"memory  {gib(peak)} measured at the peak, {gib(needed)} predicted ({error})"]


def device_of(machine: Machine) -> Device:
    """Return this rank's device: its own memory; the rest by its name in the table of devices."""
    local = machine.local_world_size or machine.ranks.world_size
    if machine.device.type != "cuda":
        return replace(UNKNOWN, name="the host", memory=psutil.virtual_memory().available / local)
    properties = torch.cuda.get_device_properties(machine.device)
    return named(properties.name, properties.total_memory)


def named(name: str, memory: float) -> Device:
    """Return a device such as `NVIDIA H100 80GB HBM3`, with `memory` bytes."""
    return replace(device_named(name, memory) or UNKNOWN, name=name, memory=memory)


def simulated(prepared: Prepared, machine: Machine, device: Device) -> Json:
    """Return the plan of this run as `meshloom plan --json` prints it, from a process of its own.

    If it does not fit, with proposals. Raises OSError, SubprocessError or ValueError if that fails.
    """
    known = prepared.predicted
    names = prepared.layout.describe(), prepared.engine.name
    if known is None or (known["layout"], known["engine"]) != names:
        known = None  # the choice of what is recomputed has planned another engine
    elif known["fits"]:
        return known
    config = resolved(prepared)
    config["trainer"]["engine"] = prepared.engine.name
    prepared.subject.describe_to(config["trainer"])
    plan = known or planned(config, machine, device)
    return plan if plan["fits"] else planned(config, machine, device, more=["--propose"])


def planned(
    config: Json,
    machine: Machine,
    device: Device,
    simulations: int = 1,
    more: Sequence[str] = (),
) -> Json:
    """Return what `meshloom plan --json` prints of a config on this run's devices.

    It may take so many times `SECONDS`. Raises OSError, SubprocessError or ValueError if that
    fails.
    """
    world = machine.ranks.world_size
    local = machine.local_world_size or world
    # on a host nothing is reserved for CUDA
    memory = device.memory + (0 if machine.device.type == "cuda" else RESERVED)
    text = described(replace(device, memory=memory))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "trainer.command", "plan", "--config", str(path), "--json"]
        command += ["--nodes", str(world // local), "--gpus", str(local), "--device", text]
        return _answer([*command, *more], simulations)


def _answer(command: list[str], simulations: int = 1) -> dict[str, object]:
    seconds = simulations * SECONDS
    environment = alone(os.environ)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(  # type: ignore[call-overload]
        command, **pipes, env=environment, start_new_session=True, text=True
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        limit = f"it takes more than {seconds:.0f} seconds; `meshloom plan` has no limit"
        raise ValueError(limit) from None
    finally:
        with suppress(ProcessLookupError):  # its forks end with it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode and not output:  # a plan that does not fit ends with 1, too
        last = errors.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise ValueError(last[0][:300])
    return json.loads(output)  # type: ignore[no-any-return]


def alone(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that is no rank and has no GPU."""
    kept = {name: value for name, value in environment.items() if not RANKS.fullmatch(name)}
    root = str(Path(__file__).parents[3])
    paths = os.pathsep.join(filter(None, [root, kept.get("PYTHONPATH", "")]))
    return {**kept, **NO_GPUS, "PYTHONPATH": paths}


def _proposed(plan: Json) -> str:
    """Return the sentence on the first proposal; empty without one."""
    if not plan.get("proposals"):
        return ""
    first = plan["proposals"][0]
    if not first["fits"]:
        return f". {first['comparison']}"
    return f". {' '.join(overrides_of(first['changes']))} would do: {first['comparison']}"
