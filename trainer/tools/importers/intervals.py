"""The steps at which a foreign trainer evaluates, saves and logs."""

from __future__ import annotations

import math
from collections.abc import Callable

from trainer.config.validate import evaluated_at
from trainer.tools.importers.draft import Draft, Entry, Roles
from trainer.tools.importers.sources import has_rows_to_evaluate

_NO_ROWS = "no rows to evaluate on are known here: set trainer.data.evaluation_path"
Leave = Callable[..., None]
"""Reports a key that is not carried over, with a reason of its own if there is one."""


def in_steps(draft: Draft, entry: Entry) -> int | None:
    """Return a number of steps, or a share of all steps as one; None if their number is unknown."""
    if entry.value >= 1:
        return int(entry.value)
    total = draft.get("trainer.steps")
    return None if total is None else max(1, math.ceil(entry.value * total))


def evaluation(draft: Draft, keys: Roles) -> None:
    """Convert when to evaluate.

    What can't be converted is lost if evaluations end the run or choose its checkpoint, else noted.
    """
    patience = keys["early_stopping_patience"]
    best = keys["load_best_model_at_end"]
    leave = draft.lose if patience.value or best.value else draft.note
    if not has_rows_to_evaluate(draft):
        requested = [keys[name] for name in ("eval_strategy", "eval_steps", "evals_per_epoch")]
        for entry in requested:
            if entry.is_set and entry.value != "no":
                leave(entry, _NO_ROWS)
            draft.skip(entry)
        return
    _interval(draft, keys, "eval", "trainer.evaluation.every", leave)
    if patience.value and draft.get("trainer.evaluation.every"):
        draft.put(patience, "trainer.evaluation.patience", int(patience.value))
        if not draft.get("trainer.evaluation.samples"):  # theirs evaluates on all held-out rows
            draft.put(patience, "trainer.evaluation.samples", 10**9)


def saving(draft: Draft, keys: Roles) -> None:
    limit = keys["save_total_limit"]
    best = keys["load_best_model_at_end"]
    _interval(draft, keys, "save", "trainer.checkpoint.every", lambda entry, *_: draft.skip(entry))
    if limit.value:
        draft.put(limit, "trainer.checkpoint.keep_last", max(1, int(limit.value)))
    if not best.value:
        return
    saves, evaluates = (draft.get(f"trainer.{name}.every") for name in ("checkpoint", "evaluation"))
    if has_rows_to_evaluate(draft) and (saves is None or evaluated_at(saves, evaluates)):
        draft.put(best, "trainer.checkpoint.keep_best", True)
    draft.lose(best, "final/ has the last step; keep_best keeps the best checkpoint beside it")


def logging(draft: Draft, keys: Roles) -> None:
    """Convert how often to log; ours is in steps, so one line for each epoch has no counterpart."""
    steps = keys["logging_steps"]
    strategy = keys["logging_strategy"]
    draft.skip(strategy)
    counted = (steps.value or 0) > 0 and _kind(strategy) == "steps"
    if counted and (whole := in_steps(draft, steps)):
        draft.put(steps, "trainer.log.every", whole)
    else:
        draft.skip(steps)


def _kind(strategy: Entry) -> str:
    """Return the kind of a strategy: "steps" if its key was not given."""
    return str(strategy.value) if strategy.key else "steps"


def _interval(draft: Draft, keys: Roles, name: str, path: str, leave: Leave) -> None:
    """Set an interval, in steps or as a share of all; call `leave` for a key that is neither."""
    strategy = keys[f"{name}_strategy"]
    steps = keys[f"{name}_steps"]
    often = keys[f"{name}s_per_epoch"]
    kind = _kind(strategy)
    if kind in ("no", "False"):
        draft.skip(strategy, steps, often)
    elif often.value:
        draft.skip(steps)
        _each_epoch(draft, often, often.value, path, leave)
    elif kind == "steps" and steps.value:
        draft.skip(strategy)
        draft.put(steps, path, in_steps(draft, steps) or float(steps.value))
    elif kind == "epoch":
        draft.skip(steps)
        _each_epoch(draft, strategy, 1, path, leave)
    elif kind != "steps":
        leave(strategy, "not known")
    elif name == "save":
        draft.skip(steps)


def _each_epoch(draft: Draft, entry: Entry, often: float, path: str, leave: Leave) -> None:
    """Set an interval of `often` per epoch as a share of all steps, if the epochs are known."""
    epochs = draft.get("trainer.epochs")
    if not epochs or isinstance(epochs, str):
        leave(entry, f"--dry-run says how many steps an epoch has: set {path}")
    elif often * epochs > 1:
        draft.put(entry, path, 1 / (often * epochs))
    else:
        draft.skip(entry)
