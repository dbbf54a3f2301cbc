"""The table of families is true: a few of each kind by default, all with --whole."""

from __future__ import annotations

import json

import pytest

from tests.support.conformance.sweep import PAGE, TABLE, TITLE, families, page, verdict

COMMITTED = json.loads(TABLE.read_text())
SAMPLE = {
    "gptj": "ZeRO-3",  # a part of each head turns, no plan, one norm a block
    "deepseek_v3": "pipeline",  # latent attention, dense before experts, a buffer that is stored
    "bamba": "ZeRO-3",  # state space and attention
    "gemma3_text": "pipeline",  # two kinds of windows
    "gemma4_text": "tensor",  # other heads in some layers
    "opt": "pipeline",  # learned positions
    "deepseek_v2": "tensor",  # latent attention, routed experts
    "deepseek_v4": "pipeline",  # several hidden states
    "roc_bert": "pipeline",  # its last stage has the tied table of embeddings that others lack
    "camembert": "ZeRO-3",  # numbers its positions from behind the padding's
}


@pytest.mark.more
@pytest.mark.parametrize(
    ("family", "layout"), [pair for pair in SAMPLE.items() if pair[0] in COMMITTED]
)
def test_a_sampled_row_is_so(pools, family, layout):
    assert verdict(pools[2], family, layout) == COMMITTED[family][layout]


@pytest.mark.whole
@pytest.mark.parametrize("family", COMMITTED)
def test_every_row_is_so(pools, family):
    assert {layout: verdict(pools[2], family, layout) for layout in COMMITTED[family]} == COMMITTED[
        family
    ]


def test_no_family_crashes_or_trains_otherwise():
    wrong = [
        name
        for name, row in COMMITTED.items()
        if {"CRASH", "FAIL"} & {c.split(":")[0] for c in row.values()}
    ]
    assert wrong == []


def test_the_page_is_that_of_the_table():
    assert PAGE.read_text().partition(TITLE)[0] == f"{page(COMMITTED)}\n"
    assert set(COMMITTED) <= set(families())
