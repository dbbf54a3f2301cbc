"""Layers with state along the sequence under context parallelism: whole documents on one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.data.packing import loss_alone, samples_of
from tests.support.models.stateful import STATEFUL
from tests.support.training import Case, spec_of
from trainer.distributed.context_ranks import Division
from trainer.distributed.documents import WholeDocuments
from trainer.tasks.task import IGNORED

MESH = Case(engine="mesh", context=2, micro_batch=4)
THREE = replace(MESH, world_size=3, context=3)
BORDERS = {
    "inside of a share": [[3, 6, 3], [7, 5]],
    "on a rank's border": [[6, 6], [6, 4, 2]],
    "a document over all ranks": [[1, 10, 1], [12]],
    "padding": [[5, 2], [4, 4]],
    "short ones": [[1, 1, 2, 1, 3, 1, 1, 2], [2] * 6],
}


@st.composite
def divided(draw: Any) -> tuple[list[list[int]], Division]:
    division = Division(draw(st.integers(1, 3)) * (groups := draw(st.integers(1, 3))), groups)
    row = division.filled(draw(st.integers(1, 40)))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = draw(st.lists(st.integers(1, row), max_size=6))
        ends = sorted({*cuts, row})
        rows.append(np.diff([0, *ends]).tolist())
    return rows, division


@given(divided(), st.integers(0, 5))
def test_each_document_is_dealt_once_and_no_rank_gets_much_more_than_its_share(drawn, turn):
    lengths, division = drawn
    row = sum(lengths[0])
    documents = WholeDocuments(lengths, division.places(row))
    hands = documents.dealt(turn % division.size)
    tokens = np.zeros((len(lengths), row), dtype=int)
    for document in (document for hand in hands for document in hand):
        tokens[document.row, document.begin : document.begin + document.length] += 1
    assert (tokens == 1).all()
    longest = max(max(row) for row in lengths)
    share = row * len(lengths) / division.size
    assert max(sum(document.length for document in hand) for hand in hands) < share + longest + 1


@given(divided())
def test_places_are_those_of_the_parts(drawn):
    _, division = drawn
    row = division.filled(24)
    whole = torch.arange(row)[None]
    for rank, places in enumerate(division.places(row)):
        assert torch.equal(torch.from_numpy(places), division.part(whole, rank)[0])


def test_long_documents_take_turns():
    documents = WholeDocuments([[12]], Division(3).places(12))
    owners = [[bool(hand) for hand in documents.dealt(turn)].index(True) for turn in range(3)]
    assert owners == [0, 1, 2]


def test_short_documents_stay_where_they_are():
    documents = WholeDocuments([[4, 4, 4]], Division(3).places(12))
    assert [[own.begin for own in hand] for hand in documents.dealt(0)] == [[0], [4], [8]]


def gradients(case: Case, lengths: list[list[int]]) -> dict[str, torch.Tensor]:
    """Train a step on packed documents. Runs on each rank of a pool."""
    import torch.distributed as dist

    from tests.support.training import build
    from trainer.optim.lr_schedules import Update

    engine, result = build(case, dist.get_rank(), packs=True), {}
    batch = engine.job.task.collate(samples_of(lengths))
    metrics = engine.step(
        0, [batch], Update(1e-2), lambda name, g: result.update({name: g.clone()})
    )
    result["loss"] = torch.tensor(metrics.loss())
    engine.close()
    return result


def one_process(case: Case, lengths: list[list[int]]) -> dict[str, torch.Tensor]:
    """The same documents, one by one."""
    from trainer.models.materialise import materialise

    spec = spec_of(case.model)
    model = spec.build()
    materialise(model, spec, seed=5)
    samples = samples_of(lengths)
    counted = sum(int((sample["targets"] != IGNORED).sum()) for sample in samples)
    loss = loss_alone(model.train(), samples) / counted
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {
        "loss": loss.detach()
    }


@pytest.mark.first("lfm2-a document over all ranks", "lfm2-on a rank's border")
@pytest.mark.parametrize("borders", BORDERS)
@pytest.mark.parametrize("name", STATEFUL)
def test_gradients_are_those_of_the_documents_one_by_one(pools, name, borders):
    lengths = BORDERS[borders]
    case = replace(THREE, model=STATEFUL[name])
    alone = one_process(case, lengths)
    for result in pools[case.world_size].run(gradients, case=case, lengths=lengths):
        assert result.keys() == alone.keys()
        largest = max(float(value.abs().max()) for value in alone.values())
        for parameter, value in alone.items():
            # those of a gated delta net's decay are sums of terms a thousand times as large
            scale = max(float(value.abs().max()), 1e-3 * largest)
            assert float((result[parameter] - value).abs().max()) < 5e-6 * scale, parameter
