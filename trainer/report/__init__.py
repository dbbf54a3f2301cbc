"""The report on a run: its folder, read and drawn by matplotlib, as one HTML page with the pictures in it."""

from __future__ import annotations

from trainer.report.page import write
from trainer.report.records import RunRecord, read

__all__ = ["RunRecord", "read", "write"]
