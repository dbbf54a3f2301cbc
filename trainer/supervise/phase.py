"""The phases of a rank: what it does now, to the watchdog, to the timeline and to its user."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """A phase, in the order of a run and of a step; its text is what files and tables have."""

    PREPARING = "preparing"
    BUILDING = "building"
    WAITING = "waiting for data"
    TRAINING = "training"
    PROFILING = "profiling"
    """The time that the profiler takes besides the recorded phases: to begin, and to write."""
    LOGGING = "logging"
    EVALUATING = "evaluating"
    SAVING = "saving"
    FINISHING = "finishing"
    LEAVING = "leaving"

    @property
    def patience(self) -> float:
        """The multiple of a step's patience that it may take."""
        return _LONG.get(self, 1.0)


_LONG = {
    **dict.fromkeys((Phase.PREPARING, Phase.BUILDING, Phase.FINISHING), 15.0),
    **dict.fromkeys((Phase.EVALUATING, Phase.SAVING, Phase.LEAVING), 5.0),
}
