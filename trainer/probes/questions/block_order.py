"""Do the blocks run once each, in order?"""

from __future__ import annotations

from trainer.models.language.blocks import blocks_of
from trainer.probes.dispatch_modes import Alone
from trainer.probes.inputs import sequence_of
from trainer.probes.question import Probed, Question
from trainer.probes.questions.can_run import ALL
from trainer.probes.questions.randomness import watched_pass


def _ask(about: Probed) -> None:
    small, model = about.tiny
    model.eval()
    if about.is_language:
        run = blocks_of(model, sequence_of(small)[None])
        about.learn(blocks=bool(small.blocks) and run == small.blocks)
        return
    with Alone():
        modules = watched_pass(model, small).modules
    in_order = tuple(name for name in modules if name in small.blocks) == small.blocks
    about.learn(blocks=in_order)
    if small.blocks and not in_order:
        blocks = f"the blocks of {small.name} do not run once each, in order"
        about.learn(f"{blocks}: layouts that need blocks are refused")


QUESTION = Question(
    name="what its blocks are",
    key="trainer.model",
    need=ALL,
    ask=_ask,
    holds="The blocks each run once, in order, from hidden state to hidden state",
    otherwise=(
        "ZeRO-3, FSDP, pipelines, recomputation and tensor parallelism, which work block by block, "
        "are unsupported"
    ),
    cost="0.01 s",
)
