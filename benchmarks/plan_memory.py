"""What ranks take at their fullest, against what is planned for them, tensor by tensor, on
processors.

    python benchmarks/plan_memory.py            # each layout that the tests know, under each engine that offers it
    python benchmarks/plan_memory.py lora chunked mesh-zero3       # those whose names contain one of these
    python benchmarks/plan_memory.py --smoke mesh-zero3 # that it runs: nothing is written

Real ranks meet through gloo, build the engine, take two steps and evaluate, while each storage that
is made and freed is written down. The rank that was fullest is then planned: the same engine on
fake tensors. Writes the section "CPU" of benchmarks/results/plan.md; rows of other runs stay there.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.layouts import DATA, LAYOUTS, PRECISIONS, SPLIT_4, STAGES, STAGES_4, by_engine
from tests.support.planned import measured, planned
from tests.support.pool import Pools
from tests.support.training import LLAMA, Case

RESULTS = ROOT / "benchmarks" / "results" / "plan.md"
LORA = {"r": 4, "alpha": 16, "dropout": 0.1}
WIDE = LLAMA | {"vocab_size": 2**18}
"""Its logits are more than one chunk of the loss."""
MORE = {
    "lora, zero2": replace(DATA, zero_stage=2, adapter=LORA),
    "lora, zero3": replace(DATA, zero_stage=3, adapter=LORA),
    "lora, zero3, full": replace(DATA, zero_stage=3, recompute="full", adapter=LORA),
    "lora, pipeline": replace(STAGES, adapter=LORA),
    "lora, pipeline x zero3": replace(STAGES_4, zero_stage=3, adapter=LORA),
    "lora, tensor x zero2": replace(SPLIT_4, zero_stage=2, adapter={"r": 4, "alpha": 16}),
    "chunked loss, ddp": replace(DATA, zero_stage=0, micro_batch=4, model=WIDE),
    "chunked loss, zero3": replace(DATA, zero_stage=3, micro_batch=4, model=WIDE),
    "bfloat16, chunked loss, zero3": replace(
        DATA, zero_stage=3, micro_batch=4, model=WIDE, precision="bfloat16"
    ),
}
PHASES = ("step 1", "step 2", "evaluation")
BUCKETS = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
)
HEAD = "| engine | layout | ranks | fullest in | planned (MiB) | measured (MiB) | error |"


@dataclass(frozen=True)
class Row:
    name: str
    case: Case
    phase: str
    """The phase of the fullest moment, as measured."""
    planned: int
    """Bytes."""
    measured: int

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1

    def __str__(self) -> str:
        engine, _, name = self.name.partition("-")
        sizes = f"{self.planned / 2**20:.3f} | {self.measured / 2**20:.3f}"
        return (
            f"| {engine} | {name} | {self.case.world_size} | {self.phase} | {sizes} | "
            f"{100 * self.error:+.2f} % |"
        )


def in_proportion(case: Case) -> Case:
    """DeepSpeed's buckets of a gigabyte made smaller, as these models are: beside them nothing
    would show.
    """
    buckets = {"zero_optimization": dict.fromkeys(BUCKETS, 20_000)}
    return (
        replace(case, more=case.more | buckets)
        if case.engine == "deepspeed" and case.model is not WIDE
        else case
    )


def compared(name: str, case: Case, pools: Pools) -> Row:
    """Compare the fullest rank's memory with its plan, after building."""
    real: list[Any] = [told.peaks for told in pools[case.world_size].run(measured, case=case)]
    most, rank, phase = max(
        (real[r][phase].size, r, phase) for r in range(case.world_size) for phase in PHASES
    )
    ours = planned(case, rank)[0].peaks
    return Row(name, case, phase, max(ours[phase].size for phase in PHASES), most)


ROW = re.compile(
    r"^\| (\w+) \| (.+?) \| \d+ \| [\w ]+ \| [\d.]+ \| [\d.]+ \| ([+-][\d.]+) % \|$", re.MULTILINE
)


def kept() -> dict[tuple[str, str], str]:
    """The rows of earlier runs, by engine and layout."""
    text = RESULTS.read_text() if RESULTS.exists() else ""
    return {(found[1], found[2]): found[0] for found in ROW.finditer(text)}


def section(rows: dict[tuple[str, str], str], failed: list[str]) -> str:
    errors = sorted(float(ROW.fullmatch(line)[3]) for line in rows.values())  # type: ignore[index]
    sizes = sorted(abs(error) for error in errors)
    lines = [
        "## CPU",
        "",
        "`python benchmarks/plan_memory.py`, with words of the names for a part of it, on two "
        "shared cores. The size "
        "is that of all live storages of the fullest rank at its fullest moment, in two steps and "
        "an evaluation. "
        "DeepSpeed's buckets are made as small as the models, but beside the chunked loss.",
        "",
        f"{len(rows)} combinations: the median error is {statistics.median(sizes):.2f} %; the plan "
        "is at most "
        f"{max(0.0, -errors[0]):.2f} % under and {max(0.0, errors[-1]):.2f} % over; "
        f"{sum(size > 3 for size in sizes)} "
        "of them err by more than 3 %.",
        *(f"\nNo figure: {line}" for line in failed),
        "",
        HEAD,
        "| --- | --- | ---: | --- | ---: | ---: | ---: |",
        *(rows[key] for key in sorted(rows)),
    ]
    return "\n".join(lines) + "\n"


def written(part: str) -> None:
    """Put the section in the place of the one before."""
    text = RESULTS.read_text() if RESULTS.exists() else "# Plans against what was measured\n"
    without = re.sub(r"\n?## CPU\n.*?(?=\n## |\Z)", "", text, flags=re.DOTALL)
    RESULTS.write_text(without.rstrip("\n") + "\n\n" + part)


def in_order(item: tuple[str, Case]) -> tuple[int, bool, str]:
    """DeepSpeed's ZeRO-3 last: it leaves another `F.linear` behind, which keeps what frozen layers
    need not.
    """
    name, case = item
    return case.world_size, name.startswith("deepspeed") and case.zero_stage == 3, name


def main() -> None:
    words, smoke = [word for word in sys.argv[1:] if word != "--smoke"], "--smoke" in sys.argv
    cases = by_engine(LAYOUTS | PRECISIONS | MORE)
    chosen = {
        name: in_proportion(case)
        for name, case in cases.items()
        if not words or any(word in name for word in words)
    }
    pools, rows, failed = Pools(), kept(), []
    for name, case in sorted(chosen.items(), key=in_order)[: 1 if smoke else None]:
        started = time.monotonic()
        try:
            row = compared(name, case, pools)
        except Exception as error:
            failed.append(f"{name}: {str(error).strip().splitlines()[-1]}")
            print(failed[-1], flush=True)
            continue
        print(f"{row} {time.monotonic() - started:.1f} s", flush=True)
        engine, _, layout = name.partition("-")
        rows[engine, layout] = str(row)
        if not smoke:
            written(section(rows, failed))
    pools.close()
    sys.exit(1 if smoke and failed else 0)


if __name__ == "__main__":
    main()
