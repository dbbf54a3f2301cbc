"""The vocabulary split over tensor ranks: no rank has all logits, and all numbers stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tests.support.layouts import SPLIT, SPLIT_4, TIED, family
from tests.support.messages import shows
from tests.support.parallel.eight_billion import EIGHT_B, eight_ranks
from tests.support.training import (
    Case,
    assert_same,
    build,
    spec_of,
    task_of,
    train_by_engine,
    train_plainly,
)
from trainer.models.flops import counted_flops
from trainer.parallel.apply import wrap_blocks
from trainer.parallel.splits.vocabulary import note_of

MESH = replace(SPLIT, engine="mesh")
CAPPED = family("gemma2", tie_word_embeddings=True, head_dim=8)


def test_no_rank_has_a_word_of_another(pools):
    """61 words on two ranks: 31 and 30."""
    for model in (TIED, CAPPED):
        result = pools[2].run(held, case=replace(MESH, model=model))
        assert result == [(31, {31}), (30, {30})]


def held(case: Case) -> tuple[int, set[int]]:
    """Return this rank's rows of the table, and the widths of logits that products give."""
    engine, task = build(case, dist.get_rank()), task_of(spec_of(case.model), case)
    model = engine.modules[0].model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.arange(12).reshape(2, 6)
    with Products() as products:
        task.loss_sum(model.train(), {"input_ids": ids, "targets": ids, "lengths": ids[:, :1]})
    return len(model.lm_head.weight.to_local()), {30, 31, 61} & set(products.widths)


class Products(TorchDispatchMode):
    """Counts the FLOPs of the products of this rank, in the shapes that they have there."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.widths = 0, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it then comes back with the shards
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        # DTensor finds shapes out by products of fake tensors
        if count is not None and not any(issubclass(kind, FakeTensor) for kind in types):
            self.flops += count(*args, **(kwargs or {}), out_val=result)
            self.widths.append(result.shape[-1] if torch.is_tensor(result) else 0)
        return result


@pytest.mark.first("plain head-2")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", [TIED, CAPPED], ids=["plain head", "soft cap"])
def test_smoothed_labels_and_noise_are_those_of_one_process(pools, model, ranks):
    base = replace(SPLIT_4, tensor=4, micro_batch=4) if ranks == 4 else SPLIT
    case = replace(
        base,
        engine="mesh",
        model=model | {"num_key_value_heads": 4},
        label_smoothing=0.1,
        neftune_alpha=5.0,
    )
    reference = train_plainly(case)
    for outcome in pools[ranks].run(train_by_engine, case=case):
        assert_same(outcome, reference, 2e-6)


def test_a_tie_goes_to_the_first_of_equal_words(pools):
    assert pools[2].run(tied_words) == [[0, 3, 4]] * 2


def tied_words() -> list[int]:
    from trainer.distributed.exchange import Exchange, VocabularyShard

    start = 3 * dist.get_rank()
    words = VocabularyShard(6, start, start + 3, 3, Exchange(dist.group.WORLD))
    rows = [[1.0, 1, 1, 1, 1, 1], [0, 1, 0, 2, 2, 2], [1, 1, 1, 0, 3, 3]]
    return [int(word) for word in words.likeliest(torch.tensor(rows)[:, start : start + 3])]


def test_one_of_eight_ranks_of_8b_computes_an_eighth():
    """Megatron's split leaves no product whole; before, head and loss made it 1.49 eighths."""
    spec, task = spec_of(EIGHT_B), task_of(spec_of(EIGHT_B))
    ids = torch.zeros(1, 256, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "targets": ids}
    whole = counted_flops(spec, lambda model: task.loss_sum(task.prepare(model), batch))
    with eight_ranks() as mesh, Products() as own:
        model, _ = wrap_blocks(spec, task, mesh.layout, mesh)
        task.loss_sum(model.train(), batch).backward()
    assert own.flops <= 1.05 * whole / 8


@pytest.mark.parametrize(
    ("model", "ranks", "keys"),
    [
        (TIED, 2, ("table, head", "2 tensor ranks")),
        (TIED | {"vocab_size": 5}, 4, ("vocabulary of 5", "one of 4 ranks")),
        (family("mixtral", output_router_logits=True), 2, ("adds a loss",)),
    ],
    ids=["split", "too few words", "own loss"],
)
def test_what_each_rank_has_is_said(model, ranks, keys):
    shows(note_of(spec_of(model), ranks), *keys)
