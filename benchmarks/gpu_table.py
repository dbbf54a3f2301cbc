"""The table of gpu.py: a line for each row, and what stands below it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu_arms import ARMS

Row = Mapping[str, Any]
COLUMNS = (
    "shape",
    "arm",
    "step (ms)",
    "in one interval (ms)",
    "tokens/s, all",
    "of the ceiling",
    "MFU, causal / full",
    "planned (GiB)",
    "peak (GiB)",
    "certified",
    "besides",
)


def of_ceiling(row: Row, earlier: Sequence[Row]) -> dict[str, float]:
    """Return the share that a row's tokens/s are of the ceiling of earlier rows, if there are both.

    An arm that trains an adapter has that without gradients of weights.
    """
    name = "frozen_ceiling" if ARMS[row["arm"]].adapter else "ceiling"
    ceilings = [other[name] for other in earlier if name in other]
    if not ceilings or "tokens" not in row:
        return {}
    return {"share": row["tokens"] / ceilings[-1]}


def line(row: Row) -> str:
    """Return the row as a line of the table."""
    cells = dict.fromkeys(COLUMNS, "")
    cells["shape"] = row["shape"]
    cells["arm"] = row["arm"]
    cells["planned (GiB)"] = f"{row['planned']:.2f}" if row.get("planned") else "-"
    if "seconds" in row:
        cells["step (ms)"] = f"{row['seconds'] * 1e3:.0f}"
        cells["in one interval (ms)"] = f"{row['interval'] * 1e3:.0f}"
        cells["tokens/s, all"] = f"{row['tokens']:,.0f}"
        cells["of the ceiling"] = f"{row['share']:.1%}" if "share" in row else "-"
        cells["MFU, causal / full"] = " / ".join(f"{part:.1%}" for part in row["mfu"]) or "-"
        cells["peak (GiB)"] = f"{row['memory']:.2f}"
    cells["certified"] = row.get("certified", "-")
    rest = [row["note"]] if "note" in row else []
    rest += [*of_save(row), *of_lengths(row), *of_rates(row)]
    cells["besides"] = "; ".join(rest)
    return f"| {' | '.join(cells.values())} |"


def of_save(row: Row) -> list[str]:
    """Return the times of quantising, saving and loading that a row has."""
    parts = []
    if "quantised" in row:
        parts.append(f"quantised in {row['quantised']:.1f} s")
    if "save" in row:
        parts.append(f"save {row['save']:.1f} s")
    if "save_memory" in row:
        parts[-1] += f" and {row['save_memory']:.2f} GiB on the GPU"
    if "load" in row:
        parts.append(f"load {row['load']:.1f} s")
    if "raw" in row:
        parts.append(f"raw write {row['raw']:.1f} s for {row['written'] / 1e9:.2f} GB")
    for name in ("first stall", "stall"):
        parts += [f"{name} {row[name]:.2f} s"] if name in row else []
    if "beside" in row:
        parts.append(f"step beside it x {row['beside']:.2f}")
    return parts


def of_lengths(row: Row) -> list[str]:
    """Return the longest sequence that was predicted, and those that were tried."""
    parts = []
    if "predicted" in row:
        parts.append(f"longest sequence predicted {row['predicted']:,}")
    if "longest" in row:
        parts.append(f"ran {row['longest']:,}")
    if "too_long" in row:
        parts.append(f"out of memory at {row['too_long']:,}")
    return parts


def of_rates(row: Row) -> list[str]:
    """Return the rates of the ceilings."""
    parts = []
    if "copy" in row:
        parts.append(f"copy {row['copy'] / 1e9:,.0f} GB/s")
    if "products" in row:
        rates = ", ".join(f"{name} {rate / 1e12:,.1f}" for name, rate in row["products"].items())
        parts.append(f"products {rates} TFLOP/s")
    for size, times in row.get("attention", {}).items():
        rates = ", ".join(f"{name} {rate / 1e12:,.1f}" for name, rate in times.items())
        parts.append(f"attention, heads of {size}: {rates or 'no kernel'} TFLOP/s")
    if "ceiling" in row:
        both = f"{row['ceiling']:,.0f} tokens/s, {row['frozen_ceiling']:,.0f}"
        parts.append(f"ceiling {both} for an adapter")
    return parts


def below(row: Row) -> list[str]:
    """Return what stands under the table: notes on kernels, and the classes of a profile."""
    lines = list(row.get("kernels", []))
    if row.get("profile"):
        classes = row["profile"]
        parts = ", ".join(f"{name} {value:.1f}" for name, value in classes.items())
        where = f"{row['shape']}, {row['arm']}"
        lines.append(f"Kernels of a step of {where}: {parts}; {sum(classes.values()):.1f} ms.")
    return lines


def shown(row: Row) -> list[str]:
    """Return a row's line, and what stands under the table, to be printed as it is there."""
    return [line(row), *below(row)]


def report(rows: Sequence[Row], count: int, words: Sequence[str]) -> str:
    """Return the page: the command with its `words`, the versions and the table."""
    from trainer.run.describe import versions

    device = next((row["device"] for row in rows if "device" in row), "no device")
    made = ", ".join(f"{name} {version}" for name, version in versions().items())
    head = [
        f"# On {count} x {device}",
        "",
        f"    {shlex.join(['python', 'benchmarks/gpu.py', *words])}",
        "",
        made + ".",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"| --- | --- |{' ---: |' * (len(COLUMNS) - 4)} --- | --- |",
    ]
    rest = dict.fromkeys(text for row in rows for text in below(row))
    return "\n".join([*head, *map(line, rows), "", *rest]).rstrip() + "\n"
