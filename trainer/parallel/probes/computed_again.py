"""Are the gradients the same if blocks, or tiles of tokens, are computed again?"""

from __future__ import annotations

from torch import nn

from trainer.layout import Recompute
from trainer.models.spec import ModelSpec
from trainer.parallel.forward_backward import Dropout
from trainer.parallel.recompute import activation_checkpointing, tiles
from trainer.probes.inputs import Batch, first_batch
from trainer.probes.probe import Finding, differing_gradient, probe
from trainer.probes.question import Need, Probed, Question

TOLERANCE = 1e-5
TILED = "trainer.tiled_mlp"


def _ask_blocks(about: Probed) -> Finding | None:
    return _compared(about, tiles.tried(about.layout.recompute), "its block is")


def _ask_tiles(about: Probed) -> Finding | None:
    again = tiles.tried(about.layout.recompute)
    return _compared(about, Recompute(tile=again.tile), "a part of its tokens is")


def _compared(about: Probed, recompute: Recompute, part: str) -> Finding | None:
    """Compare with a model that computes all at once, and keeps it."""
    task = about.task
    packed = about.packed

    def change(model: nn.Module, small: ModelSpec) -> nn.Module:
        prepared = task.prepare(model).train()
        activation_checkpointing.apply(prepared, small, recompute)
        return prepared

    def gradients(model: nn.Module, small: ModelSpec, batch: Batch) -> None:
        dropout = Dropout(model, small)
        dropout.start(1, 0)
        task.loss_sum(model, batch).backward()

    def compare(plain: nn.Module, again: nn.Module, small: ModelSpec) -> Finding | None:
        plain = task.prepare(plain).train()
        for model in (plain, again):
            gradients(model, small, first_batch(small, task, packed))
        if (difference := differing_gradient(again, plain, TOLERANCE)) is None:
            return None
        name, share = difference
        different = f"the gradient of {name} is another when {part} computed again"
        return Finding(f"{different}, by {share:.1e}")

    return probe(about.trained, change, compare)


def _tiled(about: Probed) -> bool:
    return bool(about.layout.recompute.tile)


BLOCKS = Question(
    name="what it computes again",
    key="trainer.activation_checkpointing",
    expected='"none"',
    need=Need(
        "`trainer.activation_checkpointing`",
        lambda about: about.layout.recompute.mode != "none",
        lambda about: about.under(recompute=Recompute("full")),
    ),
    ask=_ask_blocks,
    holds="Gradients stay the same when blocks are computed again",
    otherwise="unsupported: a model whose gradients change",
    cost="0.1 s",
)
TILES = Question(
    name="what it computes in tiles",
    key=TILED,
    expected="none, or MLPs that treat each token alone and draw nothing (dropout)",
    need=Need(
        "`trainer.tiled_mlp`",
        _tiled,
        lambda about: about.under(recompute=Recompute(tile=4096)),
    ),
    ask=_ask_tiles,
    holds="Gradients stay the same when MLPs compute some tokens at a time",
    otherwise="unsupported: MLPs that mix tokens, or have dropout",
    cost="0.1 s",
)
