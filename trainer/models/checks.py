"""Checks, on a tiny copy of the same architecture, that a model is what it is taken for (contract 10)."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.distributed.seeding import seed_generators
from trainer.errors import ConfigError, MeshloomError, Problem, named_line
from trainer.models.blocks import blocks_of
from trainer.models.forward_state import check_forward_state
from trainer.models.materialise import materialise
from trainer.models.names import in_short, pattern_of
from trainer.models.spec import ModelSpec

IGNORED = -100
LENGTH = 20
"""The number of tokens in a row: more than two attention windows of the tiny copy."""
WIDER = LENGTH + 8
"""The number of tokens in a padded row."""
SINGLE = 4
"""The number of rows of one token, tried for parameters that they leave without a gradient."""
TOLERANCE = 1e-4
"""The relative error allowed of logits, losses and gradients in float32: rounding is smaller, a mistake is larger."""


class Task(Protocol):
    def prepare(self, model: nn.Module) -> nn.Module: ...
    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]: ...
    def loss_sum(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor: ...


@dataclass(frozen=True)
class Draws:
    """The places in a training forward pass that draw random numbers which change its result."""

    any: bool = False
    between: bool = False
    """True if it draws outside the blocks, after the first."""
    skips: bool = False
    """True if the numbers drawn decide which blocks run."""


@dataclass(frozen=True)
class Findings:
    unused: tuple[str, ...] = ()
    """Patterns of the names of parameters that get no gradient, numbers replaced by `*`."""
    sparse: tuple[str, ...] = ()
    """Patterns of the names of parameters that only some rows leave without a gradient."""
    draws: Draws = Draws()
    blocks: bool = True
    """True if the spec's blocks run once each, in their order."""
    moves_buffers: str = ""
    """The name of a buffer that a forward pass in training changes and that is no running statistic; else empty."""
    normalises: str = ""
    """The name of a module that keeps running statistics of its input (batch norm); else empty."""
    unproven: str = ""
    """Why nothing could be tried; every other field is then a guess."""
    notes: tuple[str, ...] = ()
    """Notes for the user, a line each."""


def check_model(spec: ModelSpec, task: Task) -> Findings:
    """Try a tiny copy: is it causal, is the task's loss its own, which parameters get no gradient, where is it random?

    Takes about a second, and leaves the random generators as they were.
    Raises ConfigError, with the numbers, for a model that can't be trained on next tokens as it is.
    """
    with own_randomness():
        try:
            small, model = tiny(spec)
            with torch.no_grad():
                logits = model.eval()(input_ids=_row(small)[None], use_cache=False).logits
            reason = "" if float(logits.std(1).max()) > 0 else "its logits are not finite, or all the same"
        except Exception as error:  # whatever a model's own code raises about sizes it does not expect
            reason = named_line(error)
        if reason:
            note = f"it is not proven that {spec.name} is causal, nor that its loss is ours: {reason}"
            return Findings(unproven=reason, notes=(note,))
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
            found = bool(small.blocks) and blocks_of(model.eval(), _row(small)[None]) == small.blocks
    said = (*notes, *say_unused(spec, patterns))
    return Findings(patterns, sometimes, draws, found, moves, notes=said)


@contextmanager
def _trying(spec: ModelSpec, what: str) -> Iterator[None]:
    """Raise what the model's own code raises as a ConfigError that says what could not be determined."""
    try:
        yield
    except MeshloomError:
        raise
    except Exception as error:  # whatever a model's own code raises
        seen = f"a tiny copy of it does not show {what}: {named_line(error, 300)}"
        expected = "a model that computes logits and its loss from tokens alone"
        raise ConfigError(Problem(f"trainer.model: {spec.name}", seen, expected)) from error


def applied(spec: ModelSpec, findings: Findings) -> ModelSpec:
    """Return the spec with gradient-less parameters frozen, and without blocks that do not run once, in order."""

    def build() -> nn.Module:
        model = spec.build()
        for name, parameter in model.named_parameters():
            if pattern_of(name) in findings.unused:
                parameter.requires_grad_(False)
        return model

    return replace(
        spec,
        build=build if findings.unused else spec.build,
        blocks=spec.blocks if findings.blocks else (),
        training=replace(spec.training, sparse=findings.sparse),
    )


def tiny(spec: ModelSpec) -> tuple[ModelSpec, nn.Module]:
    """Return a tiny copy and its spec, on the CPU in float32; the same values at each call.

    No weight is left at zero: an initial value of zero would hide what it multiplies.
    """
    small = spec.tiny.shrunk() if spec.tiny.shrunk else spec
    return small, drawn(small)


def drawn(small: ModelSpec) -> nn.Module:
    """Build the tiny model anew, so that nothing is left over from an earlier pass."""
    model = small.build()
    materialise(model, small, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    spread(model, seed=0)
    return model


def spread(model: nn.Module, seed: int) -> None:
    """Draw the weights anew, such that activations keep their scale; what they were read from stays as it is."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scaled = noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else parameter.data + 0.1 * noise
        parameter.data = scaled.to(parameter.dtype)


# Causal


def check_causal(model: nn.Module, spec: ModelSpec) -> None:
    """Raise ConfigError if a later token changes an earlier logit, by its value or by padding in its place."""
    row = _row(spec)
    changed = row.repeat(2 * LENGTH, 1)
    for position in range(LENGTH):
        changed[position, position] = 1 + row[position] % (spec.language.vocabulary - 1)
        changed[LENGTH + position, position:] = 0  # as collation pads
    with torch.no_grad():
        logits = model(input_ids=torch.cat([row[None], changed]), use_cache=False).logits.float()
    moved = (logits[1:] - logits[0]).abs().amax(-1)  # [2 x changed position, position]
    moved *= (torch.arange(LENGTH)[None] < torch.arange(LENGTH)[:, None]).repeat(2, 1)
    spread = float(logits[0].std(0).max())  # of one token's logit over the positions
    if not (worst := float(moved.max())) <= TOLERANCE * spread:
        later, earlier = divmod(int(moved.nan_to_num(torch.inf).argmax()), LENGTH)
        seen = (
            f"token {later % LENGTH} moves the logits of token {earlier} by {worst:.1e}; their spread is {spread:.1e}"
        )
        expected, mend = "a causal model", 'Set "is_decoder": true where the family has it, or take a decoder.'
        raise ConfigError(Problem(f"trainer.model: {spec.name}", f"not causal: {seen}", expected, mend))


def _say_padding(model: nn.Module, spec: ModelSpec) -> Iterator[str]:
    """Yield a line if padding changes the logits: if the beginning of a row alone has other logits than within the row.

    Models that select by rank do this: how a tie is broken depends on the width. Repeated tokens make ties.
    """
    row = _row(spec)[: WIDER // 2].repeat(2)[None]
    moved: dict[int, float] = {}
    with torch.no_grad():
        logits = model(input_ids=row, use_cache=False).logits.float()
        for length in range(LENGTH - 4, WIDER, 4):
            alone = model(input_ids=row[:, :length], use_cache=False).logits.float()
            moved[length] = float((alone - logits[:, :length]).abs().max())
    worst, spread = max(moved, key=lambda length: moved[length]), float(logits[0].std(0).max())
    if not moved[worst] <= TOLERANCE * spread:
        yield (
            f"padding moves its logits: on a tiny copy, those of {worst} tokens in a row of {WIDER} by "
            f"{moved[worst]:.1e}; their spread is {spread:.1e}. Its loss depends on which samples share a micro-batch"
        )


def check_again(spec: ModelSpec) -> str:
    """Return the name of a persistent buffer that a forward pass in training changes, or an empty string.

    Raises ConfigError if a pass leaves anything else behind. Rows have several lengths, which shows
    a module that keeps the longest it has seen.
    """
    row = _row(spec)
    rows = (torch.stack([row[4:], row[:-4]]), row[None])

    def run(model: nn.Module, which: int) -> torch.Tensor:
        return model(input_ids=rows[which], use_cache=False).logits  # type: ignore[no-any-return]

    return next(iter(check_forward_state(spec.name, lambda: drawn(spec), run)), "")


# The loss


def check_loss(model: nn.Module, spec: ModelSpec, task: Task) -> tuple[str, ...]:
    """Raise ConfigError unless the task's loss and gradients are those of the model's own `forward(labels=...)`.

    Both run in training with the same random numbers; the model's mean loss is multiplied by its targets.
    """
    ours = task.prepare(copy.deepcopy(model)).train()
    own = copy.deepcopy(model).train()
    shifts = _shifts_labels(own, spec)
    for batch in batches(spec, task):
        ids, targets = batch["input_ids"], batch["targets"]
        counted = int((targets != IGNORED).sum())
        shifted = torch.cat([torch.full_like(targets[:, :1], IGNORED), targets[:, :-1]], 1)
        labels = shifted if shifts else targets
        seed_generators(1)
        mine = task.loss_sum(ours, batch)
        mine.backward()
        if not counted:  # the model's own mean of nothing is NaN
            wrong = [p for p in ours.parameters() if p.grad is not None and bool((p.grad != 0).any())]
            if wrong or bool(mine != 0):
                raise _other(spec, f"{float(mine.detach()):g} without a target", "0, and no gradient")
            continue
        seed_generators(1)
        loss = own(input_ids=ids, labels=labels, use_cache=False).loss
        if loss is None:
            return (f"{spec.name} has no loss of its own that ours could be compared with",)
        theirs = loss * counted
        theirs.backward()
        if not abs(float(mine.detach() - theirs.detach())) <= TOLERANCE * abs(float(theirs.detach())):
            raise _other(spec, f"loss {float(mine.detach()) / counted:.6g}", f"its own, {float(loss.detach()):.6g}")
        _compare_gradients(spec, ours, own)
        ours.zero_grad()
        own.zero_grad()
    return ()


def _shifts_labels(model: nn.Module, spec: ModelSpec) -> bool:
    """Return True if the model's own loss shifts labels and so ignores the first one (BART's does not)."""
    ids = _row(spec)[None]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=torch.where(torch.arange(LENGTH) > 0, IGNORED, ids), use_cache=False).loss
    return loss is None or not bool(loss.isfinite())


def _compare_gradients(spec: ModelSpec, ours: nn.Module, own: nn.Module) -> None:
    mine = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    theirs = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    largest = max((float(g.abs().max()) for g in theirs.values() if g.numel()), default=0.0)
    for name in dict.fromkeys([*theirs, *mine]):
        zeros = torch.zeros(())
        a, b = mine.get(name, zeros), theirs.get(name, zeros)
        error, scale = float((a - b).abs().max()), max(float(b.abs().max()), 1e-3 * largest)
        if not error <= 10 * TOLERANCE * scale:
            seen = f"the gradient of {name} is off by {error / max(scale, 1e-30):.1%} of its largest entry"
            raise _other(spec, seen, "that of its own loss")


def _other(spec: ModelSpec, seen: str, expected: str) -> ConfigError:
    mend = "It adds what this trainer does not know (a router's loss, a scale); it is not trained without it."
    return ConfigError(Problem(f"trainer.model: {spec.name}", f"on a tiny copy of it: {seen}", expected, mend))


# Parameters without a gradient


def unused(model: nn.Module, spec: ModelSpec, task: Task) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return patterns of the names of parameters that no row gives a gradient, and of those that some rows do not.

    Tried with single tokens and with short and long rows; a parameter without a gradient then is
    tried with many more tokens and other weights, since a token may be routed to it.
    """
    ours = task.prepare(copy.deepcopy(model)).train()
    names = [name for name, p in ours.named_parameters() if p.requires_grad]
    ids = [[1 + token % (spec.language.vocabulary - 1)] for token in range(SINGLE)]
    rows = [task.collate([{"input_ids": row, "targets": row}]) for row in ids]
    with_gradient: set[str] = set()
    sometimes: dict[str, None] = {}
    for batch in (*rows, *batches(spec, task)):
        if bool((batch["targets"] != IGNORED).any()):
            found = _with_gradient(ours, batch, task)
            sometimes |= dict.fromkeys(pattern_of(name) for name in names if name not in found)
            with_gradient |= {pattern_of(name) for name in found}
    seeds = iter(range(4))
    while (never := [name for name in sometimes if name not in with_gradient]) and (
        seed := next(seeds, None)
    ) is not None:
        spread(ours, seed)
        tokens = torch.randint(1, spec.language.vocabulary, (16, LENGTH), generator=torch.Generator().manual_seed(seed))
        found = _with_gradient(ours, {"input_ids": tokens, "targets": tokens}, task)
        with_gradient |= {pattern_of(name) for name in found}
    return tuple(never), tuple(name for name in sometimes if name in with_gradient)


def _with_gradient(model: nn.Module, batch: dict[str, torch.Tensor], task: Task) -> set[str]:
    model.zero_grad()
    seed_generators(1)
    task.loss_sum(model, batch).backward()
    return {name for name, p in model.named_parameters() if p.grad is not None}


def say_unused(spec: ModelSpec, patterns: Sequence[str]) -> Iterator[str]:
    sizes = {name: parameter.numel() for name, parameter in spec.build().named_parameters()}
    names = [name for name in sizes if pattern_of(name) in patterns]
    if names:
        values = f"{len(names)} parameters ({sum(sizes[name] for name in names) / 1e6:,.1f} M values)"
        where = in_short(names, sizes.keys() - names)
        source = " from text" if spec.tiny.input is None else ""
        yield f"{values} get no gradient{source}; they stay as they are: {where}"


# Randomness


def observe_draws(model: nn.Module, spec: ModelSpec) -> Draws:
    """Find where the model draws random numbers. Raises ConfigError if they are not from torch's default generator."""
    model.train()
    outside = _outside_torch()
    _, places, private, _ = _watched(model, spec, None)
    if private or _outside_torch() != outside:
        seen = "draws random numbers from Python, NumPy or a generator of its own: no other layout could replay them"
        raise ConfigError(Problem(f"trainer.model: {spec.name}", seen, "torch's default generator"))
    if "between" not in places:
        return Draws(any=bool(places))
    ends = [_watched(model, spec, held) for held in (0.0, 1.0 - 2.0**-24)]
    skips = any(ran != ends[0][3] for *_, ran in ends)
    return Draws(True, skips or not torch.equal(ends[0][0], ends[1][0]), skips)


def _watched(model: nn.Module, spec: ModelSpec, held: float | None) -> tuple[torch.Tensor, set[str], bool, list[str]]:
    """Run one forward pass; return its output, where it drew, if a private generator did, and the modules that ran.

    Where no blocks are known, the whole model counts as between them.
    """
    place, left, ran = "before" if spec.blocks else "between", 0, list[str]()

    def enter(*_: Any) -> None:
        nonlocal place
        place = "block"

    def leave(*_: Any) -> None:
        nonlocal place, left
        left += 1
        place = "between" if left < len(spec.blocks) else "after"

    hooks = [
        module.register_forward_hook(lambda *_, name=name: ran.append(name)) for name, module in model.named_modules()
    ]
    for name in spec.blocks:
        block = model.get_submodule(name)
        hooks += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    ids = None if spec.tiny.input else _row(spec)[None]
    run = spec.tiny.input.output if spec.tiny.input else lambda model: model(input_ids=ids, use_cache=False).logits
    seed_generators(1)
    try:
        with torch.no_grad(), DrawWatch(lambda: place, {"between": held} if held is not None else {}) as watch:
            output = run(model)
    finally:
        for hook in hooks:
            hook.remove()
    return output, watch.places, watch.private, ran


class DrawWatch(TorchDispatchMode):
    """A dispatch mode that notes where random numbers are drawn, and in places of `held` sets them to its value."""

    def __init__(self, place: Callable[[], str], held: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.private = False
        self._place = place
        self._held = held or {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = torch.get_rng_state()
        result = func(*args, **kwargs)
        generators = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
        if any(generator is not torch.default_generator for generator in generators):
            self.private = True
        elif not torch.equal(before, torch.get_rng_state()):
            self.places.add(self._place())
            if self._place() in self._held and torch.is_tensor(result):
                result.fill_(self._held[self._place()])
        return result


class Alone(ContextDecorator, TorchDispatchMode):
    """A dispatch mode that refuses collective operations where one rank runs alone: no other would join."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            seen = f"a collective operation ({func}) in a forward pass or a loss"
            mend = "The sum of the loss and the number of targets are added up over the ranks for it."
            raise ConfigError(Problem("model, loss", seen, "what each rank computes by itself", mend))
        return func(*args, **(kwargs or {}))


def _outside_torch() -> tuple[Any, ...]:
    numpy = np.random.get_state(legacy=False)["state"]
    return random.getstate(), numpy["key"].tobytes(), numpy["pos"]


@contextmanager
def own_randomness() -> Iterator[None]:
    """Restore the random generators of Python, NumPy and torch at the end."""
    outside = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(outside[0])
        np.random.set_state(outside[1])


# Inputs of the tiny copy


def _row(spec: ModelSpec) -> torch.Tensor:
    """Draw the ids of one row, [LENGTH], none of them 0, which is the padding."""
    return 1 + torch.randint(spec.language.vocabulary - 1, (LENGTH,), generator=torch.Generator().manual_seed(2))


def batches(spec: ModelSpec, task: Task) -> Iterator[dict[str, torch.Tensor]]:
    """Yield ragged rows, one of them without a target; then one row alone; then a micro-batch without a target."""
    ids = np.asarray(_row(spec))
    for lengths, silent in (((LENGTH, 3, 11, 7), {2}), ((LENGTH,), set[int]()), ((5, 9), {0, 1})):
        targets = [np.full(n, IGNORED) if row in silent else np.roll(ids, -1)[:n] for row, n in enumerate(lengths)]
        targets = [np.append(t[:-1], IGNORED) for t in targets]  # labels are as long as the ids: no place for the last
        batch = task.collate([{"input_ids": ids[: len(t)], "targets": t} for t in targets])
        yield {**batch, "input_ids": batch["input_ids"] % spec.language.vocabulary}  # the task's padding may be larger
