"""The certificate of embeddings: every layout passes or is refused, and what is wrong is caught."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.certify.certifying import certified
from tests.support.certify.faults.planting import around
from tests.support.embeddings import bert_folder, llama_folder
from tests.support.pool import Pools
from trainer.errors import ConfigError

BERT = {
    "model_type": "bert", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "attention_dropout": 0.1,
}  # fmt: skip
PLAIN = QWEN3 | {"attention_dropout": 0.0}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
BERT_BASE = {"model_type": "bert"}
LLAMA_BASE = {"model_type": "llama"}
"""Bases that are written first."""
LORA = 'trainer.adapter={"r": 2, "dropout": 0.1, "merge": true}'
ZERO2 = "zero_optimization.stage=2"
ZERO3 = "zero_optimization.stage=3"
PIPELINE = "pipeline.stages=2"
TENSOR = "tensor_parallel.autotp_size=2"
CONTEXT = "sequence_parallel_size=2"
EXPERT = ["expert_parallel.enabled=true", "expert_parallel.autoep_size=2"]
SYMMETRIC = "trainer.embeddings.symmetric=true"
LAST = "trainer.embeddings.pooling=lasttoken"
FIRST = "trainer.embeddings.pooling=cls"
DOT = ["trainer.embeddings.similarity=dot", "trainer.embeddings.scale=0.05"]
FULL = "trainer.activation_checkpointing=full"

EXACT: dict[str, tuple[dict[str, Any], str, int, list[str]]] = {
    "ddp, mesh": (BERT, "mesh", 2, []),
    "ddp, accelerate, last token": (QWEN3, "accelerate", 2, [LAST]),
    "ddp, deepspeed, dot": (BERT, "deepspeed", 2, DOT),
    "zero2, mesh, symmetric": (BERT, "mesh", 2, [ZERO2, SYMMETRIC]),
    "zero2, deepspeed": (QWEN3, "deepspeed", 2, [ZERO2, LAST]),
    "zero3, mesh, recomputed": (QWEN3, "mesh", 3, [ZERO3, LAST, FULL]),
    "zero3, accelerate": (BERT, "accelerate", 2, [ZERO3, FIRST]),
    "zero3, deepspeed, recomputed": (BERT, "deepspeed", 2, [ZERO3, FULL]),
    "hsdp, mesh": (BERT, "mesh", 4, [ZERO3, "trainer.mesh.shard=2"]),
    "tensor x zero2, mesh": (BERT, "mesh", 4, [ZERO2, TENSOR, LAST]),
    "tensor x zero2, deepspeed": (PLAIN, "deepspeed", 4, [ZERO2, TENSOR, LAST]),
    "expert, mesh": (QWEN3_MOE, "mesh", 4, [ZERO2, *EXPERT, LAST]),
    "LoRA, ddp, mesh": (LLAMA_BASE, "mesh", 2, [LORA, LAST]),
    "LoRA, zero3, deepspeed": (BERT_BASE, "deepspeed", 2, [LORA, ZERO3]),
    "prompts not pooled": (BERT, "mesh", 2, ["trainer.embeddings.include_prompt=false"]),
    "normalised, four negatives": (
        BERT, "mesh", 2, ["trainer.embeddings.normalize=true", "trainer.embeddings.negatives=4"],
    ),
    "duplicates kept": (BERT, "mesh", 2, ["trainer.embeddings.duplicates=keep"]),
}  # fmt: skip
REFUSED = {
    "pipeline, mesh": (QWEN3, "mesh", 2, [PIPELINE], ("pipeline.stages", "runs twice")),
    "pipeline, deepspeed": (QWEN3, "deepspeed", 2, [PIPELINE], ("pipeline.stages", "runs twice")),
    "context, mesh": (QWEN3, "mesh", 2, [CONTEXT], ("sequence_parallel_size", "pool a part")),
}
"""The layouts that do not run, with the place and a key word of the reason."""


def config(folder: Path, model: dict[str, Any], engine: str) -> str:
    write = {"bert": bert_folder, "llama": llama_folder} if len(model) == 1 else {}
    base = write[model["model_type"]](folder / "base") if write else None
    content = {
        "train_batch_size": 64,
        "gradient_clipping": 0.1,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "trainer": {
            "task": "embeddings",
            "engine": engine,
            "model": {"name_or_path": str(base)} if base else {"config": model},
            "data": {"path": "pairs.jsonl"},
        },
    }
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.more
@pytest.mark.parametrize(("model", "engine", "ranks", "more"), EXACT.values(), ids=EXACT.keys())
def test_a_layout_trains_as_one_process_does(
    model: dict[str, Any], engine: str, ranks: int, more: list[str], pools: Pools, tmp_path: Path
) -> None:
    path = config(tmp_path, model, engine)
    results = pools[ranks].run(certified, path=path, world_size=ranks, overrides=more)
    assert results[0][0], results[0][2]


@pytest.mark.more
@pytest.mark.parametrize(
    ("model", "engine", "ranks", "more", "words"), REFUSED.values(), ids=REFUSED.keys()
)
def test_a_layout_is_refused_with_the_reason(
    model: dict[str, Any],
    engine: str,
    ranks: int,
    more: list[str],
    words: tuple[str, str],
    pools: Pools,
    tmp_path: Path,
) -> None:
    path = config(tmp_path, model, engine)
    results = pools[ranks].run(refusal, path=path, world_size=ranks, overrides=more)
    for word in words:
        assert word in results[0]


def refusal(path: str, world_size: int, overrides: list[str]) -> str:
    """Runs on each rank: the text of the error."""
    try:
        certified(path, world_size, overrides=overrides)
    except ConfigError as error:
        return str(error)
    return ""


# Planted faults


def gathered_without_gradient(engine: str) -> Any:
    """A rank's vectors get the gradient of its own anchors' losses alone."""
    from trainer.recipes.embeddings import contrast

    def alone(real: Any, self: Any, own: Any, group: Any) -> Any:
        with mock.patch.object(contrast.dist, "all_reduce", lambda *_, **__: None):
            return real(self, own, group)

    return around(contrast.Contrast, "gradients", alone)


def counted_once_a_rank(engine: str) -> Any:
    from trainer.recipes.embeddings.contrast import Contrast

    def twice(real: Any, self: Any, own: Any, group: Any) -> Any:
        losses, gradients = real(self, own, group)
        return losses, gradients * group.size()

    return around(Contrast, "gradients", twice)


def own_positive_as_a_negative(engine: str) -> Any:
    from trainer.recipes.embeddings.contrast import Contrast

    def unmasked(real: Any, self: Any, *given: Any) -> Any:
        return real(replace(self, masks=False), *given)

    return around(Contrast, "losses", unmasked)


def other_dropout_in_the_second_pass(engine: str) -> Any:
    from trainer.parallel.forward_backward import GradientAccumulation

    def later(real: Any, self: Any, seed: int, *given: Any) -> Any:
        return real(self, seed + 1, *given)

    return around(GradientAccumulation, "train", later)


def padding_pooled(engine: str) -> Any:
    from trainer.recipes.embeddings.task import EmbeddingTask

    def every(real: Any, self: Any, samples: Any) -> Any:
        batch = real(self, samples)
        return {**batch, "pools": batch["pools"].fill_(1)}

    return around(EmbeddingTask, "collate", every)


def mean_of_means(engine: str) -> Any:
    """Each micro-batch has a loss of its own."""
    from trainer.recipes.embeddings.task import EmbeddingTask

    return around(EmbeddingTask, "compared", lambda real, self, batches, outputs: batches)


def never_gathered(engine: str) -> Any:
    from trainer.recipes.embeddings.task import EmbeddingTask

    def nowhere(real: Any, self: Any, context: Any, batch: Any = None) -> None:
        return real(self, context, None)

    return around(EmbeddingTask, "placed", nowhere)


def positives_of_the_next_sample(engine: str) -> Any:
    """On one rank the positives are exchanged."""
    import torch.distributed as dist

    from trainer.recipes.embeddings.task import EmbeddingTask

    def exchanged(real: Any, self: Any, samples: Any) -> Any:
        batch = real(self, samples)
        if dist.get_rank() == 1:
            batch["input_ids"][:, 1] = batch["input_ids"][:, 1].roll(1, 0)
        return batch

    return around(EmbeddingTask, "collate", exchanged)


def prompt_pooled(engine: str) -> Any:
    from trainer.recipes.embeddings.task import EmbeddingTask

    def whole(real: Any, self: Any, samples: Any) -> Any:
        batch = real(self, samples)
        return {**batch, "pools": batch["attention_mask"]}

    return around(EmbeddingTask, "collate", whole)


NOT_POOLED = ["trainer.embeddings.include_prompt=false"]
PLANTED: dict[Callable[[str], Any], tuple[str, list[str]]] = {
    gathered_without_gradient: ("gradient", []),
    counted_once_a_rank: ("gradient", []),
    own_positive_as_a_negative: ("loss", []),
    other_dropout_in_the_second_pass: ("output", []),
    padding_pooled: ("loss", []),
    mean_of_means: ("loss", []),
    never_gathered: ("loss", []),
    positives_of_the_next_sample: ("output", []),
    prompt_pooled: ("loss", NOT_POOLED),
}
"""The faults, and the check that finds each first."""


@pytest.mark.more
@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught(
    fault: Callable[[str], Any], pools: Pools, tmp_path: Path
) -> None:
    check, more = PLANTED[fault]
    given: Any = {"path": config(tmp_path, QWEN3, "mesh"), "world_size": 2, "overrides": more}
    passed, first, table = pools[2].run(certified, fault=fault, **given)[0]
    assert not passed
    assert first == check, table
