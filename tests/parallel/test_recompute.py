"""What each way of activation checkpointing computes again, keeps, and keeps on the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.conformance.sweep import NEEDED, families
from tests.support.layouts import LAYOUTS
from tests.support.training import LLAMA, layout_of, spec_of
from trainer.distributed.seeding import seed_generators
from trainer.engines import ENGINES
from trainer.errors import ConfigError
from trainer.layout import Recompute
from trainer.models.materialise import materialise
from trainer.models.names import gradients_of
from trainer.parallel.forward_backward import Dropout
from trainer.parallel.recompute import activation_checkpointing, offload
from trainer.probes import inputs, probe
from trainer.probes.findings import Findings, applied
from trainer.recipes.causal_lm.task import CausalLM

MOE = {
    **{"model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 48, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
    **{"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    **{"vocab_size": 64, "mlp_only_layers": [], "experts_implementation": "grouped_mm"},
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64}
FAMILIES = {  # dropout in attention would take its plain kernel
    "llama": LLAMA | {"attention_dropout": 0.0, "num_hidden_layers": 2},
    "qwen3_moe": MOE,
    "gpt2": GPT2 | {"attn_pdrop": 0.0},
}


class Counted(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func._opname] += 1
        return func(*args, **(kwargs or {}))


def step(family: str, recompute: Recompute, draws: bool = True) -> tuple[Any, Counter[str]]:
    """Return the gradients of one step, and the operators of its backward pass."""
    spec = spec_of(FAMILIES[family])
    spec = replace(spec, training=replace(spec.training, draws=draws))
    task = CausalLM.of(spec)
    model = task.prepare(spec.build()).train()
    activation_checkpointing.apply(model, spec, recompute)
    dropout = Dropout(model, spec)
    materialise(model, spec, seed=1)
    dropout.start(1, 0)
    ids = torch.arange(24).reshape(2, 12) % 50
    loss = task.loss_sum(model, {"input_ids": ids, "targets": ids})
    with Counted() as counted:
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, counted.found


def again(family: str, mode: str, every: int = 1) -> Counter[str]:
    """Count what is computed again beyond a backward pass of kept activations."""
    gradients, plain = step(family, Recompute())
    others, result = step(family, Recompute(mode, every))  # type: ignore[arg-type]
    for name, gradient in gradients.items():
        assert torch.equal(gradient, others[name]), name
    return result - plain


@pytest.mark.parametrize("family", FAMILIES)
def test_each_mode_computes_again_what_it_says(family):
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    product = "addmm" if family == "gpt2" else "mm"
    full, kept = again(family, "full"), again(family, "selective")
    assert full[attention] == 2 and full[product] >= 4
    assert not {attention, product, "_grouped_mm", "topk"} & kept.keys(), kept
    assert kept["mul"] and kept["mul"] == full["mul"]
    half = again(family, "selective", 2)
    assert attention not in half and half[product] == pytest.approx(full[product] / 2, abs=2)
    assert again(family, "offload")[attention] == 2
    if family == "qwen3_moe":
        assert full["_grouped_mm"] == 4 and full["topk"] == 2
        assert 0 < half["_grouped_mm"] < 4


class InPlace(torch.autograd.Function):
    """A linear layer as DeepSpeed's for ZeRO-3, which adds its bias to the product."""

    @staticmethod
    def forward(rows: Any, matrix: Any, bias: Any) -> Any:
        product = rows.matmul(matrix.t())
        product += bias
        return product

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        rows, matrix, _ = ctx.saved_tensors
        flat = gradient.flatten(0, 1)
        return gradient @ matrix, flat.t() @ rows.flatten(0, 1), flat.sum(0)


def added(rows: Any, matrix: Any, bias: Any) -> Any:
    product = rows @ matrix.t()
    product += bias
    return product


def chosen(rows: Any, matrix: Any, bias: Any) -> Any:
    values, places = (rows @ matrix.t() + bias).topk(4)
    values.view(-1).mul_(2.0)
    return torch.zeros_like(rows).scatter(-1, places, values)


def adapted(rows: Any, matrix: Any, bias: Any) -> Any:
    """A linear layer with an adapter, whose output the block writes over."""
    output = torch.add(rows @ matrix.t(), rows @ matrix, alpha=2.0)
    output.view(-1).add_(1.0)
    return output + bias


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("layer", [InPlace.apply, added, chosen, adapted])
def test_a_block_may_write_over_what_is_kept(layer: Any, every: int) -> None:
    """PyTorch finds no change after a view, and takes the new values for the old ones."""
    torch.manual_seed(0)
    rows, matrix, bias = torch.randn(3, 5, 8), torch.randn(8, 8), torch.randn(8)
    inputs = [tensor.requires_grad_() for tensor in (rows, matrix, bias)]

    def block(values: Any) -> Any:
        return (torch.tanh(layer(values, matrix, bias)) @ matrix).pow(2)

    written: set[str] = set()
    kind = Recompute("selective", every)
    expected = torch.autograd.grad(block(rows).sum(), inputs)
    # the first one shows it, the others know it
    passes = [
        activation_checkpointing._recomputed(block, kind, False, written, rows) for _ in "abc"
    ]
    for result in passes:
        for mine, theirs in zip(torch.autograd.grad(result.sum(), inputs), expected, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert written == {chosen: {"topk"}, adapted: {"add"}}.get(layer, {"mm"})


@pytest.mark.parametrize("scale", [torch.max, lambda values: values.amax(-1, keepdim=True)])
def test_scales_of_float8_are_kept(scale: Any) -> None:
    """They are small, and each costs a pass over a large tensor."""
    rows, matrix = torch.randn(3, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def block(values: Any) -> Any:
        values = torch.tanh(values)
        return (values / scale(values.detach().abs())) @ matrix

    result = activation_checkpointing._recomputed(block, Recompute("selective"), False, set(), rows)
    with Counted() as counted:
        mine = torch.autograd.grad(result.sum(), [rows, matrix])
    assert counted.found["tanh"] == 1  # it is recomputed
    assert not counted.found["max"] + counted.found["amax"]
    torch.testing.assert_close(mine, torch.autograd.grad(block(rows).sum(), [rows, matrix]))


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_halves_of_a_backward_pass_do_not_share_what_is_kept(schedule: str) -> None:
    """It was PyTorch's error in the first step."""
    split = replace(LAYOUTS[f"pipeline, {schedule}"], engine="mesh")
    for mode, refused in (("selective", True), ("full", False)):
        result = ENGINES["mesh"].refusal(layout_of(replace(split, recompute=mode)))
        assert ("in each half" in (result or "")) is refused, result


def test_a_compiled_part_of_a_block_runs_compiled() -> None:
    """Else its forward pass would keep other tensors than its recomputation."""
    made: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return aot_autograd(fw_compiler=lambda made, given: make_boxed_func(made))(graph, inputs)

    part = torch.compile(lambda x: torch.sin(x.exp()) * torch.cos(x * x), backend=backend)
    matrix, rows = torch.randn(8, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)

    def block(values: Any) -> Any:
        return part(values @ matrix) @ matrix

    kind = Recompute("selective")
    result = activation_checkpointing._recomputed(block, kind, False, set(), rows)
    assert made
    mine = torch.autograd.grad(result.sum(), [rows, matrix])
    theirs = torch.autograd.grad(block(rows).sum(), [rows, matrix])
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("family", "known"), [("llama", set()), ("qwen3_moe", {"topk"})])
def test_nothing_is_copied_that_no_block_writes_over(
    family: str, known: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[set[str]] = []
    real = activation_checkpointing._selective

    def noted(every: int, written: set[str]) -> Any:
        results.append(written)
        return real(every, written)

    monkeypatch.setattr(activation_checkpointing, "_selective", noted)
    step(family, Recompute("selective"))
    assert results == [known, known]


def of_two_steps(small: Any, recompute: Recompute) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of two passes of a tiny copy: the first may show what the second knows."""
    task = CausalLM.of(small)
    model = task.prepare(probe.drawn(small)).train()
    activation_checkpointing.apply(model, small, recompute)
    row = inputs.sequence_of(small)
    ids, result = torch.stack([row, row.flip(0)]), []
    for _ in range(2):
        seed_generators(1)
        model.zero_grad()
        task.loss_sum(model, {"input_ids": ids, "targets": ids}).backward()
        result.append({name: value.clone() for name, value in gradients_of(model).items()})
    return result


@pytest.mark.more
@pytest.mark.parametrize("family", families())
def test_no_family_has_other_gradients_with_recomputation(family: str) -> None:
    """gemma3n_text had, by as much as they are large: it writes over a product after a view."""
    try:
        small, _ = probe.tiny(spec_of({"model_type": family, **NEEDED.get(family, {})}))
        with probe.own_randomness():
            plain = of_two_steps(small, Recompute())
    except (ConfigError, ValueError) as error:  # it is refused
        pytest.skip(str(error))
    with probe.own_randomness():
        for recompute in map(
            Recompute, ("full", "selective", "selective", "offload"), (1, 1, 2, 1)
        ):
            for mine, theirs in zip(of_two_steps(small, recompute), plain, strict=True):
                assert mine.keys() == theirs.keys()
                for name, value in theirs.items():
                    assert torch.equal(mine[name], value), f"{recompute}: {name}"


class Kept(saved_tensors_hooks):
    """Collects what a forward pass keeps, parameters included."""

    def __init__(self) -> None:
        self.found: list[torch.UntypedStorage] = []
        super().__init__(self._pack, lambda kept: kept)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.found.append(tensor.untyped_storage())
        return tensor

    @property
    def bytes(self) -> int:
        return sum({result.data_ptr(): result.nbytes() for result in self.found}.values())


BACKWARD, AGAIN = 2 * (3 - 1) * 3 * 2, 2 * 3 * 2
"""Products of two blocks' MLPs in three tiles: two more tiles' gradients of three matrices and
what enters them; and two of each tile again, as nothing needs its last one."""


@pytest.mark.parametrize(
    ("recompute", "outer"),
    [
        (Recompute(), 0),
        # the block's pass computes two tiles and ends before the third; without tiles two products
        (Recompute("full"), 2 * (2 * 3 - 2)),
        (Recompute("offload"), 2 * (2 * 3 - 2)),
        # nothing in a tile is kept
        (Recompute("selective"), 2 * 2 * 3),
        (Recompute("selective", 2), 2 * (2 * 3 - 1)),
    ],
    ids=str,
)
def test_a_tile_of_an_mlp_is_computed_again_by_itself(recompute, outer):
    whole, plain = step("llama", recompute)
    tiled, result = step("llama", replace(recompute, tile=5))
    for name, gradient in whole.items():
        torch.testing.assert_close(tiled[name], gradient, rtol=1e-5, atol=1e-6)
    assert result["mm"] - plain["mm"] == BACKWARD + AGAIN + outer


def test_less_is_kept_of_mlps_in_tiles():
    """Of two blocks' MLPs not 4 values [2, 12, 48] (gate, activation, up, product), nor matrices."""
    sizes = []
    for tile in (0, 5):
        kept = Kept()
        with kept:
            step("llama", Recompute(tile=tile))
        sizes.append(kept.bytes)
    assert sizes[0] - sizes[1] == 2 * 4 * (4 * 2 * 12 * 48 + 3 * 32 * 48)


def test_the_input_of_each_block_is_on_the_host_until_the_backward_pass(monkeypatch):
    kept: list[tuple[int, ...]] = []
    plain = offload.host_like

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return plain(tensor)

    monkeypatch.setattr(offload, "host_like", watched)
    step("llama", Recompute("offload"))
    assert kept == [(2, 12, LLAMA["hidden_size"])] * 2


@pytest.mark.parametrize("draws", [True, False])
def test_generators_are_saved_only_if_numbers_are_drawn(draws, monkeypatch):
    saved: list[bool] = []
    plain = activation_checkpointing.checkpoint

    def watched(*args: Any, preserve_rng_state: bool, **kwargs: Any) -> Any:
        saved.append(preserve_rng_state)
        return plain(*args, preserve_rng_state=preserve_rng_state, **kwargs)

    monkeypatch.setattr(activation_checkpointing, "checkpoint", watched)
    seeded: list[int] = []
    monkeypatch.setattr(
        "trainer.parallel.forward_backward.seed_generators", lambda seed: seeded.append(seed)
    )
    step("llama", Recompute("full"), draws)
    assert saved == [draws] * 2
    assert len(seeded) == (3 if draws else 1)  # each micro-batch, and each block in it


def test_a_trial_says_if_numbers_are_drawn():
    spec = spec_of(LLAMA)
    assert spec.training.draws and not applied(spec, Findings()).training.draws
    assert applied(spec, Findings(unproven="it does not run")).training.draws
