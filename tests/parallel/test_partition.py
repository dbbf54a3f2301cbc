"""Blocks to stages, and stages to ranks."""

from __future__ import annotations

from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.layouts import family as sized
from tests.support.models.families import family
from tests.support.run.layout import layout
from tests.support.training import LLAMA, spec_of
from trainer.engines.owners import owners
from trainer.layout import PIPELINE_SCHEDULES, Partition, PipelineSchedule
from trainer.models.cut import cut
from trainer.parallel import partition
from trainer.parallel.partition import block_ranges, divide
from trainer.probes.questions.stages import check_cut

costs = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(costs, st.integers(0, 20), st.integers(0, 20), st.integers(1, 8))
def test_the_dearest_stage_is_as_cheap_as_any_division_makes_it(
    costs: list[float], first: int, last: int, stages: int
) -> None:
    if stages > len(costs):
        with pytest.raises(ValueError, match=f"{len(costs)} blocks for {stages} stages"):
            divide(costs, first, last, stages)
        return
    result = divide(costs, first, last, stages)
    assert [index for part in result for index in part] == list(range(len(costs)))
    assert all(len(part) > 0 for part in result) and len(result) == stages

    def dearest(cuts: tuple[int, ...]) -> float:
        bounds = [0, *cuts, len(costs)]
        sums = [sum(costs[start:stop]) for start, stop in pairwise(bounds)]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    best = min(dearest(cuts) for cuts in combinations(range(1, len(costs)), stages - 1))
    assert dearest(tuple(part.start for part in result[1:])) == best


def rule(partition: Partition, row: int = 1) -> PipelineSchedule:
    return PipelineSchedule("1F1B", partition=partition, row=row)


def test_a_dear_head_leaves_the_last_stage_fewer_blocks():
    spec = spec_of(LLAMA | {"num_hidden_layers": 6, "vocab_size": 400})
    block = sum(p.numel() for p in spec.build().get_submodule(spec.blocks[0]).parameters())
    assert spec.language.head.parameters > block
    model = spec.build()
    assert [len(blocks) for blocks in block_ranges(model, spec, rule("uniform"), 2)] == [3, 3]
    assert [len(blocks) for blocks in block_ranges(model, spec, rule("best"), 2)] == [4, 2]
    assert [len(blocks) for blocks in block_ranges(model, spec, rule("parameters"), 2)] == [
        3,
        3,
    ]  # the tied table is on both


def test_one_stage_has_all_blocks_and_nothing_is_counted(monkeypatch):
    spec = spec_of(LLAMA | {"num_hidden_layers": 6})
    monkeypatch.setattr(partition, "counted", lambda spec: pytest.fail("counted"))
    assert block_ranges(spec.build(), spec, rule("best"), 1) == [range(6)]


def test_experts_that_a_token_is_not_routed_to_are_no_work():
    """The dense block is as much work as three of experts, each of which is larger."""
    narrow = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}
    narrow |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "num_key_value_heads": 4}
    experts = {"n_routed_experts": 64, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    known = family("llama") | {"model_type": "deepseek_v3", "vocab_size": 8, **narrow, **experts}
    known |= {"num_hidden_layers": 4, "first_k_dense_replace": 1, "intermediate_size": 400}
    spec = spec_of(known | {"n_group": 1, "topk_group": 1})
    model = spec.build()
    assert [len(blocks) for blocks in block_ranges(model, spec, rule("best"), 2)] == [1, 3]
    assert [len(blocks) for blocks in block_ranges(model, spec, rule("parameters"), 2)] == [2, 2]


HALVES = [["full_attention"] * 4, ["sliding_attention"] * 4, ["conv"] * 4]
ATTENDING = {
    name: sized(kind, num_hidden_layers=8, **more)
    for name, kind, more in (
        ("windows first", "gemma3_text", {"layer_types": HALVES[1] + HALVES[0]}),
        ("attention after convolutions", "lfm2", {"layer_types": HALVES[2] + HALVES[0]}),
        ("alike", "llama", {}),
    )
}
ATTENDING["windows first"] |= {"sliding_window": 16}


@pytest.mark.parametrize(
    ("model", "short", "long"),
    [
        ("windows first", [4, 4], [6, 2]),
        ("attention after convolutions", [4, 4], [6, 2]),
        ("alike", [4, 4], [4, 4]),
    ],
)
def test_attention_over_long_rows_is_work(model: str, short: list[int], long: list[int]) -> None:
    spec = spec_of(ATTENDING[model])
    for row, counts in ((16, short), (1 << 16, long)):
        result = block_ranges(spec.build(), spec, rule("best", row), 2)
        assert [len(blocks) for blocks in result] == counts


def test_attention_is_as_many_parameters_as_its_flops_are() -> None:
    """Of `6 H T` FLOPs a token and block (arXiv 2204.02311, halved), six are a parameter's."""
    from trainer.parallel.partition import _attention

    spec = spec_of(ATTENDING["alike"])
    width = spec.language.attention.width
    assert _attention(spec, SimpleNamespace(), 4096) == [width * 4096] * 8


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_every_stage_is_on_one_rank(schedule):
    from dataclasses import replace

    for ranks in (2, 3, 4):
        result = replace(
            layout(ranks, 1, 1, 1, 1, 2 * ranks), schedule=PIPELINE_SCHEDULES[schedule]
        )
        placed = [result.stages_of(rank) for rank in range(ranks)]
        assert sorted(index for indices in placed for index in indices) == list(
            range(result.stages)
        )
        if PIPELINE_SCHEDULES[schedule].folded:
            assert placed[0] == [0, result.stages - 1]


FAMILIES = {
    **{
        name: {}
        for name in (
            "llama",
            "mistral",
            "qwen2",
            "olmo2",
            "gpt_neox",
            "gpt2",
            "granite",
            "cohere",
            "olmo",
        )
    },
    **{name: {"head_dim": 8} for name in ("qwen3", "gemma", "gemma2", "gemma3_text")},
    "phi3": {"pad_token_id": 0},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    },
    "bloom": {"n_head": 4},
    "falcon": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "deepseek_v3": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_family_computes_the_same_logits_in_stages(name, tied):
    known = family(name) if name == "gpt2" else family("llama") | {"model_type": name}
    spec = spec_of(known | FAMILIES[name] | {"tie_word_embeddings": tied})
    boundary = check_cut(spec, 3)
    assert boundary.before and boundary.after
    # each parameter is on one stage, but for a tied table, which is on the first and the last
    kept = []
    for index in range(3):
        model = spec.build()
        cut(model, spec, boundary, range(index, index + 1))
        kept.append({name for name, _ in model.named_parameters()})
    assert set().union(*kept) == {name for name, _ in spec.build().named_parameters()}
    assert not kept[0] & kept[1] and not kept[1] & kept[2]
    assert kept[0] & kept[2] == set(spec.tied.values())


def test_ranks_write_about_as_much_each():
    """A parameter counts with all its optimizer state, except a step count."""
    shapes = {
        "table": (4096, 32),
        **{f"layers.{i}.weight": (32, 32) for i in range(8)},
        "head": (4096, 32),
    }
    kinds = {
        (name, key, () if key == "step" else shape, torch.float32): 0
        for name, shape in shapes.items()
        for key in ("weight", "exp_avg", "step")
    }
    mesh: Any = SimpleNamespace(layout=SimpleNamespace(ranks_of=lambda stage: range(2)))
    result = owners(kinds, mesh)
    assert result["table"] != result["head"]
