"""Does a forward pass leave something behind that changes a later one, or what is saved?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from trainer.distributed.seeding import seed_generators
from trainer.errors import listed
from trainer.models.materialise import on_host
from trainer.models.names import gradients_of
from trainer.models.own.module import running_norms
from trainer.models.spec import ModelSpec
from trainer.probes.dispatch_modes import Alone
from trainer.probes.inputs import Batch, sequence_of
from trainer.probes.kept_state import snapshot
from trainer.probes.probe import Differs, Finding, drawn, observe, tiny_spec
from trainer.probes.question import Probed, Question
from trainer.probes.questions.can_run import ALL

TOLERANCE = 1e-5
"""The error allowed of an output, relative to its largest value, for another order of sums."""
TRAIN = True
EVAL = False
BY_ITSELF = ((TRAIN, 0), (EVAL, 1), (TRAIN, 1), (TRAIN, 0), (EVAL, 0), (TRAIN, 0))
"""The passes of the first copy: training or evaluation, and the input. Some over input 0 are an odd
number of passes apart, which shows what alternates; changes in the last two in training never
settle.
"""
AFTER_OTHERS = ((TRAIN, 1), (TRAIN, 0), (EVAL, 0))
"""The passes of another copy, which show a module that keeps the first input that it sees."""

Run = Callable[[nn.Module, int], torch.Tensor]
"""`run(model, number)` returns the output of a forward pass over input 0 or 1."""


class Pass(NamedTuple):
    training: bool
    number: int
    """The number of the input."""
    before: dict[str, str]
    after: dict[str, str]
    values: dict[str, torch.Tensor]
    """The output, and in training the norm of each gradient: backward hooks may leave things."""


def moved_buffers(make: Callable[[], nn.Module], run: Run) -> list[str]:
    """Return the persistent buffers that a forward pass in training changes.

    `make` gives the same model each time, and each pass starts from the buffers' first values.
    Raises Differs, with the place, if a pass changes a parameter, if one in evaluation changes a
    persistent buffer, if anything left behind changes a later output, and if an attribute never
    settles, such as a count.
    State that settles and changes no output is allowed, such as a mask.
    """
    by_itself, moved = _passes(make(), run, BY_ITSELF)
    others, _ = _passes(make(), run, AFTER_OTHERS)
    for training in (TRAIN, EVAL):
        passes = [one for one in (*by_itself, *others) if one.training == training]
        first, *later = [one for one in passes if one.number == 0]
        for one in later:
            _compare(first, one)
    before = by_itself[3].after
    after = by_itself[5].after
    if restless := _changed(before, after):
        places = _shown(restless, before, after)
        raise Differs(
            f"each forward pass leaves something behind that never settles: {places}. Checkpoints "
            "do not have it, and it differs on ranks that run other passes. A count of training "
            "passes can be a buffer (register_buffer), which checkpoints have"
        )
    return moved


def _passes(
    model: nn.Module,
    run: Run,
    order: Sequence[tuple[bool, int]],
) -> tuple[list[Pass], list[str]]:
    """Run the passes; return them, and the persistent buffers that those in training change."""
    parameters = dict(model.named_parameters(remove_duplicate=False)).keys()
    buffers = {key: value for key, value in model.state_dict().items() if key not in parameters}
    first = {key: value.clone() for key, value in buffers.items()}
    passes = list[Pass]()
    moved = dict[str, None]()
    after = snapshot(model)
    for training, number in order:
        for key, value in first.items():
            buffers[key].copy_(value)
        before = snapshot(model) if first else after
        seed_generators(1)
        with torch.set_grad_enabled(training):
            output = run(model.train(training), number).float()
        result = {"something else": output.detach().clone()}
        if output.requires_grad:
            output.square().sum().backward()
            norms = [gradient.norm() for gradient in gradients_of(model).values()]
            result["other gradients"] = torch.stack(norms)
            model.zero_grad()
        after = snapshot(model)
        changed = _changed(before, after)
        fixed = parameters if training else {*parameters, *buffers}
        if wrong := [key for key in changed if key in fixed]:
            mode = "training" if training else "evaluation"
            actual = f"a forward pass in {mode} changes {_shown(wrong, before, after)}"
            effect = "What is trained and saved would depend on when it is evaluated"
            raise Differs(f"{actual}. {effect}")
        moved |= dict.fromkeys(key for key in changed if key in buffers)
        passes.append(Pass(training, number, before, after, result))
    return passes, list(moved)


def _compare(first: Pass, later: Pass) -> None:
    for what, value in first.values.items():
        moved = float((later.values[what] - value).abs().max())
        largest = float(value.abs().max())
        if not moved <= TOLERANCE * largest and bool(value.isfinite().all()):
            changed = _changed(first.before, later.before)
            where = f": {_shown(changed, first.before, later.before)}" if changed else ""
            actual = (
                f"the same input with the same random numbers gives {what} after other passes, by "
                f"{moved:.1e} of {largest:.1e}: a pass leaves something behind{where}"
            )
            raise Differs(f"{actual}. Ranks run different sequences")


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def _shown(places: Sequence[str], before: dict[str, str], after: dict[str, str]) -> str:
    values = {key: (before.get(key, "nothing"), after.get(key, "nothing")) for key in places}
    tensors = {key for key, pair in values.items() if pair[1].startswith("a tensor")}
    shown = [key if key in tensors else f"{key} ({' -> '.join(values[key]):.80})" for key in places]
    return listed(shown, most=3)


def _ask(about: Probed) -> Finding | None:
    result = observe(lambda: _moved_of_tokens(about) if about.is_language else _moved_of_own(about))
    if isinstance(result, Finding):
        return result
    about.learn(moves_buffers=result)
    return None


def _moved_of_tokens(about: Probed) -> str:
    """Return a buffer that moves. The lengths of sequences differ: a longest one may be kept."""
    small, _ = about.tiny
    ids = sequence_of(small)
    inputs = (torch.stack([ids[4:], ids[:-4]]), ids[None])

    def run(model: nn.Module, number: int) -> torch.Tensor:
        return model(input_ids=inputs[number], use_cache=False).logits  # type: ignore[no-any-return]

    return next(iter(moved_buffers(lambda: drawn(small), run)), "")


@Alone()
def _moved_of_own(about: Probed) -> str:
    """Return a buffer of your own module that moves and is no running statistic."""
    about.release()  # a module may be large
    has_copy = about.spec.tiny.copy is not None
    spec = tiny_spec(about.spec)
    task = about.task
    assert spec.tiny.input is not None
    halves = _halves(spec.tiny.input.batches[0])

    def run(model: nn.Module, number: int) -> torch.Tensor:
        return task.loss_sum(model, halves[number])

    moved = moved_buffers(lambda: drawn(spec) if has_copy else on_host(spec), run)
    statistics = _statistics(spec) if moved else set()
    return next((name for name in moved if name not in statistics), "")


def _statistics(spec: ModelSpec) -> set[str]:
    norms = running_norms(spec.build())
    return {f"{name}.{key}" for name, norm in norms.items() for key in norm._buffers}


def _halves(batch: Batch) -> list[Batch]:
    """Return the first and the last two samples of a batch: batch norm can't train on one."""
    size = max((len(value) for value in batch.values() if value.ndim), default=0)
    stacked = {key for key, value in batch.items() if value.ndim and len(value) == size}
    parts = slice(min(2, size)), slice(max(0, size - 2), size)
    return [batch | {key: batch[key][part].clone() for key in stacked} for part in parts]


QUESTION = Question(
    name="whether it computes the same again",
    key="trainer.model",
    expected="a forward pass that depends on its input, weights and torch's random numbers alone",
    need=ALL,
    ask=_ask,
    holds=(
        "A forward pass changes no parameter and, in evaluation, no persistent buffer. It leaves "
        "nothing behind, wherever it is kept, that "
        "changes a later output. State that settles is accepted, such as a cached mask; a counter "
        "in an attribute does not settle"
    ),
    otherwise=(
        "error, with the module, the attribute and both values: weights that are divided in "
        "evaluation, rotary embeddings that keep the longest sequence so far (`dynamic`, in "
        "sequences beyond `max_position_embeddings`), counters, statistics of the first sequences, "
        "generators in an attribute. RWKV is built without its division, and saved with it"
    ),
    cost="0.1 s",
)
