"""The way of tokens to the ranks of their experts: what goes there, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.parallel.spread_experts import Routing
from trainer.parallel.splits.row_copies import RowCopies, picked, starts_of
from trainer.tools.planner.routing import share_of_tokens


def drawn(experts: int, tokens: Sequence[int], chosen: int, among: int, seed: int) -> Routing:
    """Draw different experts of each token, all among the first so many."""
    generator = torch.Generator().manual_seed(seed)
    lists = [
        [torch.randperm(among, generator=generator)[:chosen] for _ in range(n)] for n in tokens
    ]
    return Routing(experts, [torch.stack(rows) if rows else _none(chosen) for rows in lists])


def _none(chosen: int) -> torch.Tensor:
    return torch.empty(0, chosen, dtype=torch.int64)


@st.composite
def routings(draw: Any) -> Routing:
    """Draw sizes, and choices among all experts or few of them: then ranks are idle."""
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    experts = ranks * draw(st.integers(1, 4))
    chosen = draw(st.integers(1, experts))
    among = draw(st.integers(chosen, experts))
    tokens = draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks))
    return drawn(experts, tokens, chosen, among, draw(st.integers(0, 99)))


@settings(max_examples=40, deadline=None)
@given(routings())
@example(drawn(8, [3, 2], 4, 4, 0))  # all of a token on one rank; the other is idle
@example(drawn(8, [3, 2, 4, 1], 7, 8, 0))  # more experts of a token than ranks
@example(drawn(8, [3, 2, 4, 1], 1, 8, 0))
@example(drawn(8, [0, 3, 0, 0], 2, 8, 0))  # ranks without tokens
@example(drawn(8, [0, 0], 2, 8, 0))
@example(drawn(3, [4], 2, 3, 0))  # one rank
@example(Routing(4, [torch.tensor([[0, 3], [0, 0]]), torch.tensor([[2, 1], [0, 0]])]))  # padding
def test_ranks_compute_what_one_does_and_send_a_token_once_to_each(routing):
    whole = routing.whole()
    for rank, (values, sent) in enumerate(routing.on_ranks()):
        for name, value in values.items():
            assert value is not None, name
            expected = routing.part(whole[name], name, rank)
            expected = torch.zeros_like(value) if expected is None else expected
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12, msg=name)
        there, here = routing.couples(rank), routing.rows(rank)
        chosen = routing.chosen[rank].shape[1]
        states = 2 * (there + here) * routing.hidden
        assert sent[torch.float64] == 8 * (states + (there + here) * chosen)
        assert sent[torch.int32] == 4 * there * chosen
        assert sent[torch.int64] == 16 * (routing.ranks - 1)


@pytest.mark.parametrize(("ranks", "chosen", "hidden"), [(8, 8, 1024), (4, 4, 1024), (8, 2, 2048)])
def test_little_is_sent_beside_hidden_states(ranks, chosen, hidden):
    """In both passes and directions: once for each distinct rank, and at most 5% more."""
    sizes = drawn(32, [48] * ranks, chosen, 32, 7)
    routing = Routing(32, sizes.chosen, hidden=hidden, dtype=torch.bfloat16)
    sent = [sum(counts.values()) for _, counts in routing.on_ranks()]
    states = 4 * hidden * 2 * sum(map(routing.couples, range(ranks)))
    assert states <= sum(sent) <= 1.05 * states


class Operators(TorchDispatchMode):
    """Records the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_copies_are_summed_in_one_order_and_rounded_once():
    """On a GPU `index_add` has no order, and the gradient of an index sorts."""
    mask = torch.tensor([[True] * 9, [False] * 9, [True] + [False] * 8])
    rows = picked(torch.arange(3)[:, None].expand(3, 9), mask, 10)
    copies = RowCopies(rows, torch.arange(10).flip(0), starts_of(mask))
    parts = torch.full((10, 2), 2.0**-9, dtype=torch.bfloat16)
    parts[9] = 1  # of row 0, from whose sum alone each other copy would be rounded away
    parts.requires_grad_()
    with Operators() as operators:
        result = copies.sum(parts)
        assert result[:, 0].tolist() == [1 + 2.0**-6, 0, 2.0**-9]
        back = copies.expand(result.detach().requires_grad_())
        torch.autograd.backward([result, back], [torch.ones(3, 2).bfloat16(), parts.detach()])
    assert not operators.names & {"index_add", "index_put", "_index_put_impl_", "sort", "scatter"}


@pytest.mark.parametrize(
    ("experts", "chosen", "ranks"), [(8, 2, 4), (6, 3, 2), (6, 5, 2), (4, 1, 4), (5, 3, 1)]
)
def test_a_plan_expects_as_many_rows_as_all_choices_have(experts, chosen, ranks):
    numbers = torch.combinations(torch.arange(experts), chosen)
    share = (numbers // (experts // ranks) == ranks - 1).any(1).double().mean()
    assert float(share_of_tokens(experts, chosen, ranks)) == pytest.approx(float(share))
