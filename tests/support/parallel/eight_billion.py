"""A model of 8 billion parameters on eight fake ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.layouts import family
from tests.support.run.layout import layout
from trainer.parallel.parallel_mesh import parallel_mesh_of

EIGHT_B = family(
    "llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=8,
)


@contextmanager
def eight_ranks(sequence: bool = False) -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        eight = replace(layout(1, 1, 1, 8, 1, 1), sequence_parallel=sequence)
        yield parallel_mesh_of(eight, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
