"""One HTML page of a run, with its pictures inside and beside it; it loads nothing else."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

from jinja2 import Environment

from trainer.errors import printable
from trainer.storage import disk_errors, replace_file
from trainer.tools.report import curves, history
from trainer.tools.report.run_record import RunRecord
from trainer.tools.report.style import DPI, Chapter, drawing, png

TEMPLATE = Path(__file__).with_name("page.html.j2")


def sections(record: RunRecord) -> list[Chapter]:
    """Return all sections of the report, in reading order."""
    over_steps = (curves.losses, curves.rates, curves.throughput, curves.times, curves.memory)
    with drawing():
        return [part(record) for part in (*over_steps, history.history)]


def write(record: RunRecord, path: Path) -> list[Path]:
    """Write the page to `path`, and its pictures as PNGs to a folder beside it; return all paths.

    Raises DiskError if they can't be written.
    """
    parts = sections(record)
    pictures = {part.key: png(part.figure) for part in parts if part.figure is not None}
    beside = path.with_suffix("") if path.suffix else path.with_name(f"{path.name}-pictures")
    written = [beside / f"{key}.png" for key in pictures]
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.mkdir(exist_ok=True)
        for part in parts:  # remove the picture of an earlier report whose section now has none
            (beside / f"{part.key}.png").unlink(missing_ok=True)
        for target, content in zip(written, pictures.values(), strict=True):
            replace_file(target, content)
        replace_file(path, html(record, parts, pictures).encode())
    return [path, *written]


def html(record: RunRecord, parts: list[Chapter], pictures: dict[str, bytes]) -> str:
    """Return the page, with its pictures inside."""
    page = Environment(
        autoescape=True, trim_blocks=True, finalize=lambda value: printable(str(value))
    )
    shown = {part.key: _picture(part, pictures[part.key]) for part in parts if part.key in pictures}
    return page.from_string(TEMPLATE.read_text()).render(record=record, parts=parts, pictures=shown)


def _picture(part: Chapter, picture: bytes) -> dict[str, object]:
    assert part.figure is not None
    width, height = (round(size * DPI) for size in part.figure.get_size_inches())
    return {"width": width, "height": height, "source": b64encode(picture).decode()}
