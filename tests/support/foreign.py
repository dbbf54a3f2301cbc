"""Public configs of other trainers, and the page on what becomes of them.

python -m tests.support.foreign        # writes docs/importing.md again
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.support.commands import ROOT
from trainer.errors import ConfigError, Problem
from trainer.storage import Json
from trainer.tools.importers.tables import read_table
from trainer.tools.importers.translate import Draft, translate

TABLE = ROOT / "tests" / "importers" / "import_config" / "public.jsonl"
PAGE = ROOT / "docs" / "importing.md"
PLAIN = ("full", "lora")
"""Kinds of fine-tuning that are plain: of all parameters, or by LoRA on a base in full."""
DATA_SETS = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
    "alpaca_zh_demo": {"file_name": "alpaca_zh_demo.json"},
    "alpaca_en": {"hf_hub_url": "llamafactory/alpaca_en"},
    "alpaca_zh": {"hf_hub_url": "llamafactory/alpaca_zh"},
    "dpo_en_demo": {
        "file_name": "dpo_en_demo.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "text"}},
    "mllm_demo": {
        "file_name": "mllm_demo.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": {"role_tag": "role", "content_tag": "content"},
    },
    "tbench_traces_sharegptv1": {"file_name": "traces.json", "formatting": "sharegpt"},
}
"""The entries of LLaMA-Factory's dataset_info.json that the configs name, and one of a user's."""


class Config(NamedTuple):
    origin: str
    """The repository on GitHub, and the path in it."""
    system: str
    kind: str
    """full, lora, or what keeps it from being plain."""
    keys: Json


class Result(NamedTuple):
    config: Config
    draft: Draft | None
    problems: tuple[Problem, ...]


def configs() -> list[Config]:
    return [Config(**json.loads(line)) for line in TABLE.read_text().splitlines()]


def zero(name: str) -> Json:
    """Return a DeepSpeed config that is like the one with this name, with "auto" throughout."""
    stage = next(int(digit) for mark in ("_z", "zero") for digit in "0123" if mark + digit in name)
    cpu = {"device": "cpu", "pin_memory": True}
    names = ("offload_optimizer", "offload_param") if "offload" in name else ()
    tensor = {"tensor_parallel": {"autotp_size": 4}} if "autotp" in name else {}
    return {
        **{key: "auto" for key in ("train_batch_size", "train_micro_batch_size_per_gpu")},
        **{key: "auto" for key in ("gradient_accumulation_steps", "gradient_clipping")},
        **{name: {"enabled": "auto"} for name in ("fp16", "bf16")},
        "zero_optimization": {"stage": stage, **dict.fromkeys(names, cpu)},
        **tensor,
    }


def put_files(folder: Path, config: Config) -> None:
    """Write the files that a config names, at the root of a repository as theirs."""
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps(DATA_SETS))
    if name := config.keys.get("deepspeed"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(zero(name)))


def imported(config: Config) -> Result:
    """Import a config that stands two folders below the root of its repository."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        put_files(folder, config)
        below = folder / "examples" / "here"
        below.mkdir(parents=True, exist_ok=True)
        try:
            return Result(config, translate(config.system, config.keys, below), ())
        except ConfigError as error:
            return Result(config, None, error.problems)


@cache
def results() -> tuple[Result, ...]:
    return tuple(imported(config) for config in configs())


def reasons(result: Result) -> list[str]:
    """Return the keys that keep a config from being imported."""
    return [problem.place for problem in result.problems if problem.place != "not imported"]


REPOSITORIES = {
    "hiyouga/LLaMA-Factory": "LLaMA-Factory",
    "axolotl-ai-cloud/axolotl": "Axolotl",
    "huggingface/alignment-handbook": "the alignment handbook",
    "huggingface/open-r1": "open-r1",
    "huggingface/trl": "TRL",
}
KINDS = {
    "full": "all parameters",
    "lora": "LoRA",
    "quantised": "a quantised base",
    "other": "another method (GaLore, Muon, PiSSA, DFT, frozen parts, ...)",
    "preferences": "preferences, reinforcement learning",
    "images": "images",
    "preprocessing": "preprocessing alone",
    "inference": "inference",
}


def _head() -> Iterator[str]:
    yield "# What `meshloom import` carries"
    yield ""
    yield "*Made by `python -m tests.support.foreign`; a test compares it.*"
    yield ""
    yield (
        f"{len(configs())} public configs of five repositories, all under the Apache License 2.0, "
        "were imported as they are."
    )
    yield (
        "Keys and values are kept in `tests/importers/import_config/public.jsonl`, without comments, "
        "with short chat templates in place of long ones."
    )
    yield (
        "A test compares each import with its source: learning rate, batch, accumulation, clipping, "
        "epochs or steps, sequence length, schedule, warm-up, seed, dtype, rank, alpha, dropout and "
        "targets. How to import: [Fine-tune](moving.md)."
    )
    yield ""


def _counts() -> Iterator[str]:
    yield "## How many"
    yield ""
    yield "| configs | imported whole | of |"
    yield "| --- | --- | --- |"
    for repository, name in REPOSITORIES.items():
        own = [one for one in results() if one.config.origin.startswith(f"{repository}/")]
        yield _count(f"plain ones of {name}", [one for one in own if one.config.kind in PLAIN])
    yield _count("**all plain ones**", [one for one in results() if one.config.kind in PLAIN])
    for kind, text in KINDS.items():
        if kind not in PLAIN:
            yield _count(text, [one for one in results() if one.config.kind == kind])
    yield ""
    yield (
        "Plain means text, with all parameters trained or by LoRA, on a base that is not quantised. "
        "Of the others, preferences are imported; each other one is refused by the key that asks for "
        "what is not offered."
    )
    yield ""


def _count(name: str, found: Sequence[Result]) -> str:
    return f"| {name} | {sum(one.draft is not None for one in found)} | {len(found)} |"


def _reasons() -> Iterator[str]:
    yield "## Why the other plain ones are not"
    yield ""
    yield "| key | configs | why, of the first |"
    yield "| --- | --- | --- |"
    plain = [one for one in results() if one.config.kind in PLAIN]
    counts = Counter(key for one in plain for key in dict.fromkeys(reasons(one)))
    for key, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])):
        yield f"| `{key}` | {count} | {_why(plain, key)} |"
    yield ""


def _why(found: Sequence[Result], key: str) -> str:
    """Return the reason that the first config with this key gets, without paths of this machine."""
    problems = (problem for one in found for problem in one.problems if problem.place == key)
    reason = next(problems).actual.partition(" (")[2].removesuffix(")").partition(";")[0]
    return re.sub(r"/\S*/(?=data/)", "", reason)


def _templates() -> Iterator[str]:
    content = read_table("templates")
    yield "## Chat templates"
    yield ""
    yield (
        "LLaMA-Factory's `template` and Axolotl's `chat_template` are carried by name. A template in "
        "the config itself (TRL's `chat_template`, Axolotl's `chat_template_jinja`) goes to a file "
        "beside the new config. Other names are errors."
    )
    yield ""
    yield "| theirs | here | known difference |"
    yield "| --- | --- | --- |"
    for system, name in (("llamafactory", "LLaMA-Factory"), ("axolotl", "Axolotl")):
        for theirs, rule in content[system].items():
            ours = f"`{rule['to']}`" if "to" in rule else ""
            if "own" in rule:
                own = f"the model's own, if its name fits `{rule['own']}`".replace("|", "\\|")
                ours = f"{own}; else {ours}" if ours else own
            note = str(rule.get("note", "")).replace("|", "\\|").replace("<", "&lt;")
            yield f"| {name}'s `{theirs}` | {ours} | {note} |"


def page() -> str:
    return "\n".join([*_head(), *_counts(), *_reasons(), *_templates(), ""])


if __name__ == "__main__":
    PAGE.write_text(page())
