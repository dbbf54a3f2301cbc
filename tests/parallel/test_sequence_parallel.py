"""Sequence parallelism: what a rank has between the split matrices, what is sent, what is refused.

`tests/conformance/` compares its numbers with those of one process.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.layouts import PARTS, SPLIT, TIED, family
from tests.support.messages import raises, shows
from tests.support.parallel.eight_billion import EIGHT_B, eight_ranks
from tests.support.run.layout import layout
from tests.support.training import Case, build, spec_of, task_of
from trainer.engines import ENGINES
from trainer.errors import ConfigError
from trainer.parallel.apply import wrap_blocks
from trainer.parallel.probes.tensor_parts import check

WHOLE_ROWS = layout(1, 1, 1, 2, 1, 1)
DIVIDED = replace(WHOLE_ROWS, sequence_parallel=True)


def test_between_split_matrices_a_rank_has_a_part_of_the_tokens(pools):
    """Seven tokens on two ranks: four each, the last of which is none."""
    case = replace(SPLIT, engine="mesh", more=PARTS)
    expected = {"input_layernorm": 4, "self_attn.o_proj": 7, "mlp.gate_proj": 7, "model.norm": 7}
    assert pools[2].run(lengths, case=case) == [expected] * 2


def lengths(case: Case) -> dict[str, int]:
    """Return how many tokens some modules of the model see. Runs on each rank."""
    module = build(case, dist.get_rank()).modules[0]
    found: dict[str, int] = {}
    for name, part in module.model.named_modules():
        short = name.removeprefix("model.layers.1.")
        if short in ("input_layernorm", "self_attn.o_proj", "mlp.gate_proj", "model.norm"):
            note = lambda _, args, short=short: found.update({short: args[0].shape[1]})  # noqa: E731
            part.register_forward_pre_hook(note)
    ids = torch.arange(14).reshape(2, 7)
    module.train()({"input_ids": ids, "targets": ids})
    return found


class Sent(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in str(func):
            self.count[func._opname] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sequence", [False, True])
def test_a_block_sends_as_often_as_megatrons(sequence):
    """Two all-reduces in each pass, or for each of them a reduce-scatter and an all-gather."""
    found = []
    for layers in (1, 2):
        spec = spec_of(EIGHT_B | {"num_hidden_layers": layers})
        task = task_of(spec)
        ids = torch.zeros(1, 256, dtype=torch.long, device="meta")
        with eight_ranks(sequence) as mesh, Sent() as sent:
            model, _ = wrap_blocks(spec, task, mesh.layout, mesh)
            task.loss_sum(model.train(), {"input_ids": ids, "targets": ids}).backward()
        found.append(sent.count)
    a_block = {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4}
    assert found[1] - found[0] == (a_block if sequence else {"all_reduce": 4})


def changed(name: str, change: Any) -> Any:
    """Return the spec of a model whose tiny copy has `change` added to what a module gives."""
    spec = spec_of(TIED)
    assert spec.tiny.copy is not None
    small = spec.tiny.copy()

    def build() -> torch.nn.Module:
        model = small.build()
        module = model.get_submodule(f"model.layers.0.{name}")
        plain = module.forward
        vars(module)["forward"] = lambda hidden: plain(hidden) + change(hidden)
        return model

    tiny = replace(spec.tiny, copy=lambda **_: small.built_by(build))
    return replace(spec, tiny=tiny)


@pytest.mark.more
def test_dropout_by_a_function_between_split_matrices_is_refused():
    spec = spec_of(family("starcoder2", residual_dropout=0.1))
    check(spec, WHOLE_ROWS)
    with raises(ConfigError, "draws random", "process draws"):
        check(spec, DIVIDED)


def test_tokens_mixed_between_split_matrices_are_refused():
    spec = changed("input_layernorm", lambda hidden: hidden.mean(1, keepdim=True))
    check(spec, WHOLE_ROWS)
    with raises(ConfigError, "input_layernorm computes something") as caught:
        check(spec, DIVIDED)
    assert "tensor_parallel.sequence_parallel: llama" in str(caught.value)


def test_a_use_of_hidden_states_beside_the_split_layers_is_refused():
    """Its gradient would count once on each rank."""
    spec = changed("mlp", lambda hidden: hidden)
    with raises(ConfigError, "gradient of", "layernorm.weight", "ranks"):
        check(spec, WHOLE_ROWS)


def test_deepspeed_has_none():
    shows(ENGINES["deepspeed"].refusal(DIVIDED) or "", "sequence parallelism")
