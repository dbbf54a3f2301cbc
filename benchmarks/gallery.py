#!/usr/bin/env python3
"""The tables of docs/gallery.md: what families of models take of GPUs of 80 GB, as `meshloom plan`
says it.

python benchmarks/gallery.py                # plans every family, and writes the page's tables
python benchmarks/gallery.py llama3-8b      # plans this one; the other rows stay as they are
python benchmarks/gallery.py --missing      # plans rows that are not there, or lack the longest
python benchmarks/gallery.py --check mistral-7b lora 8      # plans one row, and compares it
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from trainer.tools.planner.extrapolate import Plan

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

PAGE = ROOT / "docs" / "gallery.md"
SHAPES = ROOT / "examples" / "gallery"
ROWS = ROOT / "benchmarks" / "results" / "gallery.json"
CERTIFIED = ROOT / "tests" / "support" / "conformance" / "table.json"
FAMILIES = {
    "llama3-8b": "Llama 3.1 8B",
    "llama3-70b": "Llama 3.1 70B",
    "qwen3-8b": "Qwen3 8B",
    "qwen3_5-9b": "Qwen3.5 9B",
    "gemma3-4b": "Gemma 3 4B",
    "gemma4": "Gemma 4, default shape",
    "gpt-oss-20b": "GPT-OSS 20B",
    "deepseek-v3": "DeepSeek-V3",
    "mistral-7b": "Mistral 7B v0.3",
    "olmo3-7b": "OLMo 3 7B",
    "smollm3-3b": "SmolLM3 3B",
    "mixtral-8x7b": "Mixtral 8x7B",
}
MIXTURES = ("gpt-oss-20b", "deepseek-v3", "mixtral-8x7b")
"""The families with experts."""
KINDS = ("full", "lora")
NODES = {1: (1, 1), 8: (1, 8), 64: (8, 8)}
"""The nodes and the devices of each, by the number of devices."""
OFFLOAD = (
    "trainer.engine=deepspeed",
    "zero_optimization.offload_optimizer.device=cpu",
)
HSDP = ("trainer.mesh.replicate=-1", "trainer.mesh.shard=node")
OVER_ALL = ("trainer.mesh.replicate=1", "trainer.mesh.shard=-1")
EXPERTS = ("expert_parallel.enabled=true", "expert_parallel.autoep_size=8")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one device": (),
    "ZeRO-3": (),
    "HSDP": HSDP,
    "ZeRO-3 over all": OVER_ALL,
    "ZeRO-3, experts": EXPERTS,
    "HSDP, experts": (*HSDP, *EXPERTS),
    "ZeRO-3 over all, experts": (*OVER_ALL, *EXPERTS),
    "ZeRO-2, offload": (*OFFLOAD, "zero_optimization.stage=2"),
    "ZeRO-3, offload": (*OFFLOAD, "zero_optimization.offload_param.device=cpu"),
}
"""The changes of a layout to the JSON of the page."""
TRIED = {
    ("full", 1): ("one device", "ZeRO-2, offload", "ZeRO-3, offload"),
    ("lora", 1): ("one device",),
    ("full", 8): ("ZeRO-3", "ZeRO-3, offload"),
    ("lora", 8): ("ZeRO-3",),
    ("full", 64): ("HSDP", "ZeRO-3 over all"),
    ("lora", 64): ("HSDP", "ZeRO-3 over all"),
}
"""The layouts that are planned, in turn, until one fits."""
DIVIDED = {1: (), 8: ("ZeRO-3, experts",), 64: ("HSDP, experts", "ZeRO-3 over all, experts")}
"""Those that are planned for mixtures before these, by the number of devices."""
SHORTEST, LONGEST = 4096, 2**20
"""The sequence of the column of memory, and the longest that is tried."""


class Row(NamedTuple):
    family: str
    kind: str
    devices: int
    layout: str
    fits: bool
    gib: float
    """Of tensors on the fullest device, with sequences of 4,096 tokens."""
    host: float
    """GiB that each process offloads to the host."""
    longest: int
    """The largest power of two of tokens that fits; 0: none from that of the column of memory."""
    billions: float
    """Parameters, an adapter's included."""


def plan(family: str, kind: str, devices: int, layout: str, tokens: int) -> Plan:
    """Plan a row's config with sequences of so many tokens."""
    from trainer.config import load
    from trainer.tools.planner.cluster import Cluster, device_of
    from trainer.tools.planner.from_config import planned

    words = [
        f"trainer.model.name_or_path={SHAPES / family}",
        f"trainer.data.sequence_length={tokens}",
        *LAYOUTS[layout],
    ]
    config = load(SHAPES / f"{kind}.json", words)
    return planned(config, Cluster(*NODES[devices], device_of("h100-80gb")))


def longest(family: str, kind: str, devices: int, layout: str, least: float) -> int:
    """Return the largest power of two of tokens that fits, from `SHORTEST`, which needs `least`.

    Memory is nearly linear in the tokens: a line through two plans names the length, a third plan
    tries it, and those next to it are planned if it was wrong.
    """
    second = 8 * SHORTEST
    known = {second: plan(family, kind, devices, layout, second)}
    slope = (known[second].needed - least) / (second - SHORTEST)
    tokens = SHORTEST
    while tokens < LONGEST and least + slope * (2 * tokens - SHORTEST) <= known[second].room:
        tokens *= 2

    def fits(length: int) -> bool:
        if length not in known:
            known[length] = plan(family, kind, devices, layout, length)
        return known[length].fits

    while tokens > SHORTEST and not fits(tokens):
        tokens //= 2
    return tokens


def row(family: str, kind: str, devices: int, search: bool = True) -> Row:
    """Plan the layouts of a row until one fits; if none does, the row has that which needs least."""
    divided = DIVIDED[devices] if family in MIXTURES else ()
    planned: dict[str, Plan] = {}
    for layout in (*divided, *TRIED[kind, devices]):
        planned[layout] = plan(family, kind, devices, layout, SHORTEST)
        if planned[layout].fits:
            break
    else:
        layout = min(planned, key=lambda name: planned[name].needed)
    one = planned[layout]
    tokens = longest(family, kind, devices, layout, one.needed) if one.fits and search else 0
    return Row(
        family=family,
        kind=kind,
        devices=devices,
        layout=layout,
        fits=one.fits,
        gib=round(one.needed / 2**30, 2),
        host=round(one.on_host / 2**30, 2),
        longest=tokens,
        billions=round(one.workload.spec.parameters / 1e9, 2),
    )


def rows() -> list[Row]:
    return [Row(*values) for values in json.loads(ROWS.read_text())] if ROWS.exists() else []


def certified(family: str) -> str:
    """Return the layouts in which the family's class passed, by tests/support/conformance."""
    name = json.loads((SHAPES / family / "config.json").read_text())["model_type"]
    passed = json.loads(CERTIFIED.read_text())[name]
    return ", ".join(layout for layout, result in passed.items() if result == "pass")


def shown(found: Row) -> str:
    """Return a line of a table of memory."""
    host = f", {found.host:.0f} GiB on the host" if found.host else ""
    size = f"{found.gib:.1f} GiB{host}"
    if not found.fits:
        return (
            f"| {FAMILIES[found.family]} | {found.devices} | none fits; {found.layout} | {size} | |"
        )
    more = " or more" if found.longest == LONGEST else ""
    tokens = f"{found.longest:,}{more}" if found.longest else ""
    return f"| {FAMILIES[found.family]} | {found.devices} | {found.layout} | {size} | {tokens} |"


def table(name: str, found: list[Row]) -> str:
    """Return the table of full training, of LoRA, or of the certificate."""
    if name == "certified":
        lines = ["| family | folder | parameters | certified |", "| --- | --- | --- | --- |"]
        sizes = {one.family: one.billions for one in found if one.kind == "full"}
        return "\n".join(
            [
                *lines,
                *(
                    f"| {title} | `{folder}` | {sizes[folder]} B | {certified(folder)} |"
                    for folder, title in FAMILIES.items()
                    if folder in sizes
                ),
            ]
        )
    head = (
        f"| family | devices | layout | fullest device at {SHORTEST:,} tokens | longest sequence |"
    )
    return "\n".join(
        [
            head,
            "| --- | --- | --- | --- | --- |",
            *(shown(one) for one in found if one.kind == name),
        ]
    )


def page(found: list[Row]) -> str:
    """Return docs/gallery.md with the tables of these rows."""
    text = PAGE.read_text()
    for name in (*KINDS, "certified"):
        begin = f"<!-- begin {name}: python benchmarks/gallery.py -->\n"
        before, rest = text.split(begin)
        text = f"{before}{begin}{table(name, found)}\n<!-- end{rest.split('<!-- end', 1)[1]}"
    return text


def save(done: dict[tuple[str, str, int], Row]) -> None:
    """Write the rows in order, and the page."""
    keys = product(FAMILIES, KINDS, NODES)
    order = [done[key] for key in keys if key in done]
    ROWS.write_text("[\n" + ",\n".join(json.dumps(one) for one in order) + "\n]\n")
    PAGE.write_text(page(order))


def measure(families: list[str], missing: bool) -> None:
    """Plan the rows of these families, or the missing ones, and write each as it is done."""
    done = {one[:3]: one for one in rows()}
    whole = {key for key, one in done.items() if missing and (one.longest or not one.fits)}
    for key in product(families, KINDS, NODES):
        if key in whole:
            continue
        done[key] = row(*key)
        print(*done[key], flush=True)
        save(done)


def check(family: str, kind: str, devices: int) -> int:
    """Plan a row again; return 1 if it is not the one that is written."""
    written = {one[:3]: one for one in rows()}.get((family, kind, devices))
    now = row(family, kind, devices, search=False)
    print(f"written {written}\nnow     {now}")
    return int(written is None or now != written._replace(longest=0))


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", nargs="*", help=f"one of {', '.join(FAMILIES)}")
    parser.add_argument("--missing", action="store_true", help="leave whole rows as they are")
    parser.add_argument("--check", nargs=3, metavar=("FAMILY", "KIND", "DEVICES"))
    options = parser.parse_args()
    unknown = sorted({*options.family} - {*FAMILIES})
    if unknown:
        parser.error(f"no such family: {', '.join(unknown)}")
    if options.check:
        family, kind, devices = options.check
        return check(family, kind, int(devices))
    measure(options.family or [*FAMILIES], options.missing)
    return 0


if __name__ == "__main__":
    sys.exit(main())
