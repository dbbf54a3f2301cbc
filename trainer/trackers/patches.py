"""A patch of Accelerate's trackers, 1.11 to 1.15."""

from __future__ import annotations

import logging
from typing import Any


def without_state(kind: type[object]) -> type[Any]:
    """Return a class of trackers that does not need Accelerate's state.

    Symptom without it: methods raise "You must initialize the accelerate state", which chooses the
    process's device. Can go when trackers and their logger do not ask for the main process.
    """
    from accelerate import tracking

    tracking.logger = logging.getLogger(tracking.__name__)
    return type(kind.__name__, (kind,), {"main_process_only": False})
