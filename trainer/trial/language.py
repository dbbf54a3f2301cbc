"""Checks, on a tiny copy of a language model, that it is causal and that its loss is ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn

from trainer.distributed.seeding import seed_generators
from trainer.errors import ConfigError, Problem, named_line, refused
from trainer.models.language_model import blocks_of
from trainer.models.names import gradients_of, pattern_of
from trainer.models.spec import ModelSpec
from trainer.trial import setup
from trainer.trial.findings import Findings, observe_draws, say_unused
from trainer.trial.forward_state import check_forward_state
from trainer.trial.setup import IGNORED, LENGTH, TOLERANCE, WIDER, Batch, TrialTask


def check_model(spec: ModelSpec, task: TrialTask) -> Findings:
    """Try a tiny copy: is it causal, its loss ours, all of it trained, and where is it random?

    Takes about a second, and leaves the random generators as they were. Raises ConfigError, with
    the numbers, for a model that can't be trained on next tokens as it is.
    """
    with setup.own_randomness():
        try:
            small, model = setup.tiny(spec)
            spreads = _logits(model.eval(), setup.row_of(small)[None]).std(1)
            same = not float(spreads.max()) > 0
            reason = "its logits are not finite, or all the same" if same else ""
        except Exception as error:  # what a model's own code raises about unexpected sizes
            reason = named_line(error)
        if reason:
            unproven = f"it is not proven that {spec.name} is causal, nor that its loss is ours"
            return Findings(unproven=reason, notes=(f"{unproven}: {reason}",))
        with _trying(spec, "whether it is causal"):
            check_causal(model, small)
            notes = tuple(_say_padding(model, small))
        with _trying(spec, "where it draws random numbers"):
            draws = observe_draws(model, small)
        with _trying(spec, "whether it computes the same again"):
            moves = check_again(small)
        with _trying(spec, "whether it is causal in training"):
            if not draws.any:  # else the draws change the rows
                check_causal(model.train(), small)
        with _trying(spec, "whether its loss is ours"):
            notes += check_loss(model, small, task)
        with _trying(spec, "which parameters have no gradient"):
            patterns, sometimes = unused(model, small, task)
        with _trying(spec, "what its blocks are"):
            found = blocks_of(model.eval(), setup.row_of(small)[None])
            in_order = bool(small.blocks) and found == small.blocks
    notes += tuple(say_unused(spec, patterns))
    return Findings(patterns, sometimes, draws, in_order, moves, notes=notes)


def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of rows of tokens: [rows, tokens, vocabulary]."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def _trying(spec: ModelSpec, what: str) -> AbstractContextManager[None]:
    """Raise an error of the model's own code as a ConfigError that says what was not shown."""
    expected = "a model that computes logits and its loss from tokens alone"
    start = f"a tiny copy of it does not show {what}: "
    return refused(f"trainer.model: {spec.name}", expected, named=True, start=start)


# Causal


def check_causal(model: nn.Module, spec: ModelSpec) -> None:
    """Raise ConfigError if a later token, or padding in its place, changes an earlier logit."""
    row = setup.row_of(spec)
    changed = row.repeat(2 * LENGTH, 1)
    for position in range(LENGTH):
        changed[position, position] = 1 + row[position] % (spec.language.vocabulary - 1)
        changed[LENGTH + position, position:] = 0  # as collation pads
    logits = _logits(model, torch.cat([row[None], changed]))
    moved = (logits[1:] - logits[0]).abs().amax(-1)  # [2 x changed position, position]
    moved *= (torch.arange(LENGTH)[None] < torch.arange(LENGTH)[:, None]).repeat(2, 1)
    spread = float(logits[0].std(0).max())  # of one token's logit over the positions
    if not (worst := float(moved.max())) <= TOLERANCE * spread:
        later, earlier = divmod(int(moved.nan_to_num(torch.inf).argmax()), LENGTH)
        tokens = f"token {later % LENGTH} moves the logits of token {earlier}"
        seen = f"not causal: {tokens} by {worst:.1e}; their spread is {spread:.1e}"
        mend = 'Set "is_decoder": true where the family has it, or take a decoder.'
        raise ConfigError(Problem(f"trainer.model: {spec.name}", seen, "a causal model", mend))


def _say_padding(model: nn.Module, spec: ModelSpec) -> Iterator[str]:
    """Yield a line if the beginning of a row has other logits alone than in it: padding moves them.

    Models that select by rank do this: how a tie is broken depends on the width. Repeated tokens
    make ties.
    """
    row = setup.row_of(spec)[: WIDER // 2].repeat(2)[None]
    logits = _logits(model, row)
    moved = {
        length: float((_logits(model, row[:, :length]) - logits[:, :length]).abs().max())
        for length in range(LENGTH - 4, WIDER, 4)
    }
    worst, spread = max(moved, key=lambda length: moved[length]), float(logits[0].std(0).max())
    if not moved[worst] <= TOLERANCE * spread:
        yield (
            f"padding moves its logits: on a tiny copy, those of {worst} tokens in a row of "
            f"{WIDER} by {moved[worst]:.1e}; their spread is {spread:.1e}. Its loss depends on "
            "which samples share a micro-batch"
        )


def check_again(spec: ModelSpec) -> str:
    """Return the persistent buffer that a forward pass in training changes; else an empty string.

    Raises ConfigError if a pass leaves anything else behind. Rows have several lengths, which shows
    a module that keeps the longest it has seen.
    """
    row = setup.row_of(spec)
    rows = (torch.stack([row[4:], row[:-4]]), row[None])

    def run(model: nn.Module, which: int) -> torch.Tensor:
        return model(input_ids=rows[which], use_cache=False).logits  # type: ignore[no-any-return]

    return next(iter(check_forward_state(spec.name, lambda: setup.drawn(spec), run)), "")


# The loss


def check_loss(model: nn.Module, spec: ModelSpec, task: TrialTask) -> tuple[str, ...]:
    """Raise ConfigError unless the task's loss and gradients are those of `forward(labels=...)`.

    Both run in training with the same random numbers; the model's mean loss is multiplied by its
    targets.
    """
    ours = task.prepare(copy.deepcopy(model)).train()
    own = copy.deepcopy(model).train()
    shifts = _shifts_labels(own, spec)
    for batch in setup.batches(spec, task):
        ids, targets = batch["input_ids"], batch["targets"]
        counted = int((targets != IGNORED).sum())
        shifted = torch.cat([torch.full_like(targets[:, :1], IGNORED), targets[:, :-1]], 1)
        labels = shifted if shifts else targets
        seed_generators(1)
        mine = task.loss_sum(ours, batch)
        mine.backward()
        if not counted:  # the model's own mean of nothing is NaN
            gradients = gradients_of(ours).values()
            if bool(mine != 0) or any(bool((gradient != 0).any()) for gradient in gradients):
                seen = f"{float(mine.detach()):g} without a target"
                raise _other(spec, seen, "0, and no gradient")
            continue
        seed_generators(1)
        if (loss := own(input_ids=ids, labels=labels, use_cache=False).loss) is None:
            return (f"{spec.name} has no loss of its own that ours could be compared with",)
        theirs = loss * counted
        theirs.backward()
        mine, theirs = mine.detach(), theirs.detach()
        if not abs(float(mine - theirs)) <= TOLERANCE * abs(float(theirs)):
            expected = f"its own, {float(loss.detach()):.6g}"
            raise _other(spec, f"loss {float(mine) / counted:.6g}", expected)
        if found := setup.differing_gradient(ours, own):
            seen = f"the gradient of {found[0]} is off by {found[1]:.1%} of its largest entry"
            raise _other(spec, seen, "that of its own loss")
        ours.zero_grad()
        own.zero_grad()
    return ()


def _shifts_labels(model: nn.Module, spec: ModelSpec) -> bool:
    """Return True if the model's own loss shifts labels, and ignores the first; BART's does not."""
    ids = setup.row_of(spec)[None]
    labels = torch.where(torch.arange(LENGTH) > 0, IGNORED, ids)
    with torch.no_grad():
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    return loss is None or not bool(loss.isfinite())


def _other(spec: ModelSpec, actual: str, expected: str) -> ConfigError:
    place, seen = f"trainer.model: {spec.name}", f"on a tiny copy of it: {actual}"
    unknown = "It adds what this trainer does not know (a router's loss, a scale)"
    return ConfigError(Problem(place, seen, expected, f"{unknown}; it is not trained without it."))


# Parameters without a gradient


def unused(
    model: nn.Module, spec: ModelSpec, task: TrialTask
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return name patterns of parameters that no row gives a gradient, and that some rows do not.

    Tried with single tokens and with short and long rows; a parameter without a gradient then is
    tried with many more tokens and other weights, since a token may be routed to it.
    """
    ours = task.prepare(copy.deepcopy(model)).train()
    names = [name for name, p in ours.named_parameters() if p.requires_grad]
    ids = [[1 + token % (spec.language.vocabulary - 1)] for token in range(setup.SINGLE)]
    rows = [task.collate([{"input_ids": row, "targets": row}]) for row in ids]
    with_gradient: set[str] = set()
    sometimes: dict[str, None] = {}
    for batch in (*rows, *setup.batches(spec, task)):
        if bool((batch["targets"] != IGNORED).any()):
            found = _with_gradient(ours, batch, task)
            sometimes |= dict.fromkeys(pattern_of(name) for name in names if name not in found)
            with_gradient |= {pattern_of(name) for name in found}
    seeds = iter(range(4))
    while (never := [name for name in sometimes if name not in with_gradient]) and (
        seed := next(seeds, None)
    ) is not None:
        setup.spread(ours, seed)
        drawing = torch.Generator().manual_seed(seed)
        tokens = torch.randint(1, spec.language.vocabulary, (16, LENGTH), generator=drawing)
        found = _with_gradient(ours, {"input_ids": tokens, "targets": tokens}, task)
        with_gradient |= {pattern_of(name) for name in found}
    return tuple(never), tuple(name for name in sometimes if name in with_gradient)


def _with_gradient(model: nn.Module, batch: Batch, task: TrialTask) -> set[str]:
    model.zero_grad()
    seed_generators(1)
    task.loss_sum(model, batch).backward()
    return set(gradients_of(model))
