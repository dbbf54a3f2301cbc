"""A run's folder, read and drawn: pictures by matplotlib, and one HTML page that holds them."""

from __future__ import annotations

from trainer.report.page import write
from trainer.report.records import RunRecord, read

__all__ = ["RunRecord", "read", "write"]
