"""Whether FSDP can gather a model block by block, and its table and head by themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.support.layouts import UNTIED
from tests.support.messages import raises
from tests.support.training import GPT2, LLAMA, Case, layout_of, spec_of

MESH = Case(engine="mesh")


def test_blocks_that_share_parameters_are_no_units():
    """Zamba uses one hybrid block several times: FSDP2 fails in the first step."""
    from tests.support.probing import layout
    from trainer.errors import ConfigError
    from trainer.parallel.probes.fsdp_units import check_shardable

    spec = spec_of({"model_type": "zamba2"}).tiny.copy()
    sharded = layout(shard=2, accumulation=1, zero_stage=3)
    with raises(ConfigError, "FSDP2 shards block", "model.layers"):
        check_shardable(spec, sharded)


def reading(spec: Any, change: Any) -> Any:
    """Return the spec whose tiny copy is built with a change."""
    small = spec.tiny.copy()

    def build() -> torch.nn.Module:
        model = small.build()
        change(model)
        return model

    return replace(spec, tiny=replace(spec.tiny, copy=lambda: small.built_by(build)))


def head_for_dtype(model: Any) -> None:
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda module, inputs, out: out.to(model.lm_head.weight.dtype))


def past_the_norm(model: Any) -> None:
    hidden: list[torch.Tensor] = []
    model.model.norm.register_forward_hook(lambda module, inputs, out: hidden.append(inputs[0]))
    model.lm_head.register_forward_hook(
        lambda module, inputs, out: out + hidden.pop().mean(-1, keepdim=True)
    )


def head_twice(model: Any) -> None:
    model.model.norm.register_forward_hook(
        lambda module, inputs, out: out + 0 * model.lm_head(out).mean()
    )


def test_embedding_and_head_are_units_where_the_model_needs_their_weights_nowhere_else():
    from trainer.parallel.probes.fsdp_units import ends_of
    from trainer.parallel.shard import Ends

    layout, spec = layout_of(replace(MESH, zero_stage=3)), spec_of(UNTIED)
    own = Ends(("model.embed_tokens",), ("model.norm", "lm_head"))
    assert ends_of(spec, layout) == (own, ())
    assert ends_of(reading(spec, lambda model: None), layout) == ends_of(spec, layout)
    (tables, head), _ = ends_of(spec_of(GPT2 | {"tie_word_embeddings": False}), layout)
    assert tables == ("transformer.wte", "transformer.wpe")
    assert head == ("transformer.ln_f", "lm_head")
    assert ends_of(spec_of(LLAMA), layout) == (Ends(), ())  # tied: the root has both
    for change in (head_for_dtype, past_the_norm, head_twice):
        none, (note,) = ends_of(reading(spec, change), layout)
        assert none == Ends() and "uses their weights elsewhere" in note, change.__name__
