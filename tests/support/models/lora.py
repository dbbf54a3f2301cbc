"""A base in a folder, adapters on it, and a run of a config on each rank of a pool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.commands import write_job
from tests.support.pool import machine_here
from tests.support.training import LLAMA

LORA = {"r": 4, "alpha": 16, "dropout": 0.2}
UNTIED = {**LLAMA, "tie_word_embeddings": False}


def write_base(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A base with its tokenizer, as `save_pretrained` writes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.data.text.tokenizer import embedded_tokenizer
    from trainer.supervise.process import cache_folder

    torch.manual_seed(seed)
    values = {**UNTIED, "vocab_size": 4096, "initializer_range": 0.2, **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    model.save_pretrained(folder)
    embedded_tokenizer(cache_folder()).save_pretrained(folder)
    return folder


def train_here(
    path: Path, overrides: Sequence[str] = (), resume: str | None = None
) -> list[float] | str:
    """The run of a config on each rank of a pool: its losses, or what it says is wrong."""
    import os

    from rich.console import Console

    from trainer.config import load
    from trainer.errors import MeshloomError
    from trainer.run.run import execute
    from trainer.run.session import Session
    from trainer.run.start.request import Request
    from trainer.supervise.signals import NoSignals

    with open(os.devnull, "w") as nowhere:
        try:
            request = Request(resume=resume, fresh=resume is None, script=True)
            session = Session(request, machine_here(), Console(file=nowhere), NoSignals())
            result = execute(session, load(path, overrides))
        except MeshloomError as error:
            return error.render()
    assert result is not None
    return result.losses


def job(
    folder: Path,
    base: Path,
    engine: str,
    stage: int,
    adapter: dict[str, Any] | None,
    **trainer: Any,
) -> Path:
    """A config of four steps from a base on a small text, saved after two."""
    path = write_job(
        folder,
        engine=engine,
        model={"name_or_path": str(base)},
        adapter=adapter,
        steps=4,
        **trainer,
    )
    config = json.loads(path.read_text())
    config["zero_optimization"]["stage"] = stage
    config["trainer"]["checkpoint"] = {"every": 2, **trainer.get("checkpoint", {})}
    path.write_text(json.dumps(config))
    return path
