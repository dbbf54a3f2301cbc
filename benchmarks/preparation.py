"""Preparing data: tokens per second of a core against datasets.map with the same tokenizer, and
memory.

    python benchmarks/preparation.py speed [--megabytes 12] [--workers 2]
    python benchmarks/preparation.py memory [--documents 10000000]
    python benchmarks/preparation.py check [--megabytes 2000]

speed: documents are the functions and classes of the standard library's files, as JSONL. Each way
runs in a process of its own, from the file to what a training reads, with one thread for the
tokenizer; seconds are of CPU, of it and its children. memory: that many short documents through all
but the tokenizer, packed; the peak is of the process. check: what a start takes to compare prepared
data, which memory holds already, and what the comparison beside the first steps does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import datasets
import numpy as np

from trainer.config import DataSection
from trainer.data.sealed import flaw, seal
from trainer.data.text.cutting import Cut, CutDocuments, PartWriter
from trainer.data.text.preparation import prepare
from trainer.data.text.token_files import Origin, PreparedSource
from trainer.data.text.tokenizer import embedded_tokenizer

LENGTH = 1024


def corpus(path: Path, megabytes: float) -> None:
    room = megabytes * 1e6
    with open(path, "w") as file:
        for source in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
            text = source.read_text(errors="ignore")
            for part in text.split("\n\n\n"):
                room -= file.write(json.dumps({"text": part}) + "\n")
            if room < 0:
                return


def ours(path: Path, folder: Path, workers: int | None) -> int:
    options = DataSection(
        path=str(path), sequence_length=LENGTH, evaluation_fraction=0, workers=workers
    )
    source = PreparedSource(
        prepare(options, embedded_tokenizer(folder), folder / f"ours-{workers}") / "train"
    )
    return source.summary.tokens


def mapped(path: Path, folder: Path, workers: int | None) -> int:
    """Tokenised alone: no samples are cut of it, and no ends of texts are in it."""
    tokenizer = embedded_tokenizer(folder)
    rows = datasets.load_dataset(
        "json", data_files=str(path), split="train", cache_dir=str(folder / f"map-{workers}")
    )

    def tokenised(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": tokenizer(batch["text"], add_special_tokens=False)["input_ids"]}

    found = rows.map(
        tokenised, batched=True, remove_columns=["text"], num_proc=workers if workers != 1 else None
    )
    return sum(len(ids) for ids in found.with_format("numpy")["input_ids"])


def arranged(folder: Path, documents: int) -> int:
    rng = np.random.default_rng(0)
    writer = PartWriter(folder / "part")
    for count in np.diff(np.linspace(0, documents, 1001).astype(int)):
        some = CutDocuments()
        lengths = np.clip(rng.lognormal(2.5, 0.8, count), 2, 64).astype(np.int64)
        some.tokens += rng.integers(0, 4096, lengths.sum(), np.int32).tobytes()
        some.counted += np.ones(lengths.sum(), np.bool_).tobytes()
        some.lengths.frombytes(lengths.tobytes())
        writer.append(some)
    return writer.finish(Cut(64, "pack"), Origin()).counts.documents or documents


def spent() -> float:
    return sum(
        u.ru_utime + u.ru_stime
        for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def measured(work: Callable[..., int], *arguments: Any) -> dict[str, float]:
    """In a fork."""

    def child(pipe: Any) -> None:
        cpu, wall = spent(), time.perf_counter()
        count = work(*arguments)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        pipe.send(
            {
                "count": count,
                "cpu": spent() - cpu,
                "wall": time.perf_counter() - wall,
                "peak_mib": peak,
            }
        )

    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(False)
    process = context.Process(target=child, args=(send,))
    process.start()
    send.close()
    found = receive.recv()
    process.join()
    return found  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["speed", "memory", "check"])
    parser.add_argument("--megabytes", type=float, default=12)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--documents", type=int, default=10_000_000)
    given = parser.parse_args()
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if given.what == "memory":
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            found = measured(arranged, folder, given.documents)
            print(
                f"{given.documents:,} documents: peak {found['peak_mib']:,.0f} MiB, {before:,.0f} "
                "of them libraries;"
            )
            print(
                f"{found['wall']:.0f} s, {found['cpu']:.0f} s of CPU; load {os.getloadavg()[0]:.0f}"
            )
            return
        if given.what == "check":
            (folder / "tokens.bin").write_bytes(os.urandom(1 << 20) * int(given.megabytes))
            seal(folder)
            for what, rest in (("a start", False), ("the rest, in one thread", True)):
                begun = time.perf_counter()
                assert not flaw(folder, rest=rest)
                print(
                    f"{what}: {time.perf_counter() - begun:.2f} s of {given.megabytes / 1024:.1f} "
                    "GiB"
                )
            print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
            return
        corpus(folder / "rows.jsonl", given.megabytes)
        embedded_tokenizer(folder)
        for name, work, workers in (
            ("datasets.map", mapped, 1),
            ("prepare", ours, 1),
            (f"prepare, {given.workers} processes", ours, given.workers),
            ("prepare, found", ours, 1),
        ):
            found = measured(work, folder / "rows.jsonl", folder, workers)
            line = (
                f"{found['count']:,} tokens, {found['count'] / found['cpu']:,.0f} a second of "
                "a "
                "core"
            )
            print(
                f"| {name} | {line} | {found['wall']:.1f} s | peak {found['peak_mib']:,.0f} MiB |",
                flush=True,
            )
        print(f"load {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
