"""The report on a run: its folder, read and drawn by matplotlib, as one HTML page with the pictures
in it.
"""

from __future__ import annotations

from trainer.tools.report.page import write
from trainer.tools.report.run_record import RunRecord, read

__all__ = ["RunRecord", "read", "write"]
