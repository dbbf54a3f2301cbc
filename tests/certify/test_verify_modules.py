"""The certificate of your own modules: what is right passes, what can't be is refused in a sentence, and
nothing hangs.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.messages import shows
from tests.support.pool import Pools, machine_here


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.leave = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class HeldByItsAuthor(Small):
    def __init__(self) -> None:
        super().__init__()
        self.enter.bias.requires_grad_(False)
        self.blocks[1].requires_grad_(False)


class IndexParameter(Small):
    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.tensor([3, 1, 0, 2]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, self.order])


class SparseTable(Small):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.table((x[:, 0] > 0).long()))


class WeightUsedTwice(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.linear(x.repeat(1, 2), self.blocks[0][0].weight)[:, :4])  # type: ignore[index]


class Ranker(nn.Module):
    """A score for each of five items, with biases that shift all scores alike."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Mixing(32) for _ in range(3))
        self.score = nn.Linear(32, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return scores [batch, items] of words [batch, items, length]."""
        x = self.table(words).flatten(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.score(x.unflatten(1, (words.shape[1], -1)).mean(2))[..., 0]


class Mixing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query, key, value)
        return x + self.down(self.up(x).tanh())


def order(scores: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, int]:
    """ListMLE, Xia et al., ICML 2008: the same for scores that are all larger by one number."""
    ranked = scores.gather(1, places.argsort(1))
    left = ranked.flip(1).logcumsumexp(1).flip(1)
    return (left - ranked).sum(), places.numel()


def shuffled(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [
        (torch.randint(0, 64, (5, 6), generator=draw), torch.randperm(5, generator=draw))
        for _ in range(count)
    ]


class Centred(Small):
    """Centres its inputs by a running mean, which a training pass moves first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0).to(self.mean), 0.1)
        return super().forward(x - self.mean.to(x))


def classes(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output, target, reduction="sum"), len(target)


def pairs(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Contrastive: each sample against the others of its micro-batch."""
    like = F.normalize(output, dim=-1) @ F.normalize(output, dim=-1).T
    return F.cross_entropy(3 * like, torch.arange(len(target)), reduction="sum"), len(target)


def reduced(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    total, count = classes(output, target)
    torch.distributed.all_reduce(total.detach())
    return total, count


def certified(model: str, loss: str, engine: str, stage: int) -> str:
    """The last line of the table, or the error. Runs on each rank of a pool."""
    from trainer.certify.certificate import certify
    from trainer.certify.worker import tiny_run_of
    from trainer.errors import ConfigError
    from trainer.recipe import HandedIn

    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, generator=generator), index % 3) for index in range(64)]
    config: dict[str, Any] = {
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "trainer": {"engine": engine},
    }
    given = HandedIn(globals()[model], data, globals()[loss], blocks="blocks.*")
    try:
        small = tiny_run_of(config, [], 2)
        return str(certify(small, machine_here(), given)).splitlines()[-1]
    except ConfigError as error:
        return str(error)


def ranked(seed: int, shift: float) -> str:
    """The last line of the table of a ranker; `shift` is added to the gradient of its last bias."""
    from trainer.certify.certificate import certify, table
    from trainer.certify.worker import tiny_run_of
    from trainer.recipe import HandedIn
    from trainer.tasks.supervised import Supervised

    real = Supervised.loss_sum

    def shifted(self: Supervised, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        name = "blocks.2.down.bias"
        bias = dict(model.named_parameters())[name]
        return real(self, model, batch) + shift * batch["count"] * (bias - bias.detach()).sum()

    config: dict[str, Any] = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 0 if shift else 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "trainer": {"engine": "mesh", "seed": seed},
    }
    given = HandedIn(Ranker, shuffled(64), order, blocks="blocks.*")
    with mock.patch.object(Supervised, "loss_sum", shifted) if shift else nullcontext():
        return table(certify(tiny_run_of(config, [], 2), machine_here(), given))


def centred(factor: float) -> str:
    """The table of a module that moves a buffer; a bias's gradient is multiplied by `factor`."""
    from trainer.certify.certificate import certify, table
    from trainer.certify.worker import tiny_run_of
    from trainer.recipe import HandedIn
    from trainer.tasks.supervised import Supervised

    real = Supervised.loss_sum

    def multiplied(self: Supervised, model: nn.Module, batch: Any) -> torch.Tensor:
        bias = dict(model.named_parameters())["blocks.0.0.bias"]
        if not bias._backward_hooks:
            bias.register_hook(lambda gradient: gradient * factor)
        return real(self, model, batch)

    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, generator=generator), index % 3) for index in range(64)]
    config: dict[str, Any] = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "trainer": {"engine": "mesh"},
    }
    given = HandedIn(Centred, data, classes, blocks="blocks.*")
    with mock.patch.object(Supervised, "loss_sum", multiplied) if factor != 1 else nullcontext():
        return table(certify(tiny_run_of(config, [], 1), machine_here(), given))


PASS = ("PASS: trains",)
CASES: dict[tuple[str, str, str, int], tuple[str, ...]] = {
    ("HeldByItsAuthor", "classes", "mesh", 2): PASS,
    ("HeldByItsAuthor", "classes", "deepspeed", 2): PASS,
    ("Small", "pairs", "mesh", 0): PASS,
    (
        "Small",
        "reduced",
        "mesh",
        0,
    ): ("a collective operation", "(c10d.allreduce_.default)"),
    (
        "IndexParameter",
        "classes",
        "mesh",
        0,
    ): ("order is a parameter", "torch.int64", "floating point"),
    (
        "SparseTable",
        "classes",
        "mesh",
        0,
    ): ("table.weight", "a sparse gradient", "dense ones"),
    (
        "WeightUsedTwice",
        "classes",
        "mesh",
        3,
    ): ("a block's weight", "used outside it"),
    ("WeightUsedTwice", "classes", "deepspeed", 3): PASS,
    ("Small", "classes", "accelerate", 3): PASS,
}


@pytest.mark.first(
    "HeldByItsAuthor-classes-mesh-2",
    "Small-reduced-mesh-0",
    "IndexParameter-classes-mesh-0",
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_it_passes_or_is_refused_with_the_reason(pools, case):
    model, loss, engine, stage = case
    for text in pools[2].run(
        certified, timeout=100, model=model, loss=loss, engine=engine, stage=stage
    ):
        shows(text, *CASES[case])


@pytest.mark.parametrize(
    ("shift", "verdict"),
    [
        pytest.param(0.0, ("PASS", "trains as"), id="healthy"),
        pytest.param(1e-4, ("FAIL", "gradient blocks.2.down.bias"), id="wrong"),
    ],
)
def test_a_gradient_that_is_zero_by_symmetry(
    pools: Pools, shift: float, verdict: tuple[str, ...]
) -> None:
    """A shift of all scores changes no order: the last bias of the blocks gets rounding alone, of
    which two processes and one differ by more than the tolerance. A wrong gradient still shows."""
    for text in pools[2].run(ranked, timeout=100, seed=1234, shift=shift):
        shows(text.splitlines()[-1], *verdict)


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1.0, ("PASS", "trains as")), (1.009, ("FAIL", "gradient blocks.0.0.bias"))],
    ids=["healthy", "wrong"],
)
def test_what_a_moved_buffer_changes_is_not_taken_for_rounding(
    pools: Pools, factor: float, verdict: tuple[str, ...]
) -> None:
    """The step was repeated from the buffers that it had left."""
    [text] = pools[1].run(centred, timeout=100, factor=factor)
    shows(text.splitlines()[-1], *verdict)


def test_a_copy_that_lacks_what_its_loss_needs_is_not_the_last_that_is_tried():
    """The first layers of this one have no router, and the model's own code fails on an empty list
    of their logits.
    """
    from tests.support.probing import findings_of
    from trainer.config.sections.model_and_data import ModelSection
    from trainer.models import huggingface
    from trainer.models.language import model_config
    from trainer.recipes.causal_lm.task import CausalLM

    sizes = {"hidden_size": 64, "vocab_size": 200, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    heads |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 2,
    }
    experts |= {
        "shared_expert_intermediate_size": 32,
        "output_router_logits": True,
        "mlp_only_layers": [1],
    }
    wanted = {"model_type": "qwen3_next", **sizes, **heads, "linear_value_head_dim": 16, **experts}
    options = ModelSection(config=wanted)
    spec = huggingface.spec_of(model_config.read_config(options), options)
    assert spec.tiny.copy is not None
    assert "gate" in {
        name.split(".")[-2] for name, _ in spec.tiny.copy().build().named_parameters()
    }
    assert findings_of(spec, CausalLM.of(spec)).unproven == ""
