"""One HTML page of a run, with its pictures inside and beside it; it loads nothing from elsewhere."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterator
from html import escape
from pathlib import Path

from trainer.errors import printable
from trainer.report import curves, history
from trainer.report.records import RunRecord, finite, number
from trainer.report.style import DPI, Section, drawing, png
from trainer.storage import disk_errors, replace_file

STYLE = """
* { box-sizing: border-box; }
body { margin: 0; background: #f4f6f8; color: #27313b; font: 15px/1.55 system-ui, "Segoe UI", Helvetica, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 36px 20px 64px; }
h1 { margin: 0; font-size: 27px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: 0 0 4px; font-size: 17px; }
p { margin: 0 0 12px; color: #55616d; max-width: 92ch; overflow-wrap: anywhere; }
.under { margin: 4px 0 22px; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(122px, 1fr)); gap: 12px; margin: 0 0 24px; }
dl div, section { background: #fff; border: 1px solid #e3e7eb; border-radius: 10px; padding: 12px 16px; min-width: 0; }
section { padding: 20px 22px; margin: 0 0 18px; }
dt, footer { color: #6b7682; font-size: 12.5px; }
dd { margin: 2px 0 0; font-size: 17px; font-weight: 600; overflow-wrap: anywhere; }
img { display: block; width: 100%; height: auto; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin-top: 12px; font-size: 13.5px; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-top: 1px solid #e9edf0; overflow-wrap: anywhere; }
th { color: #6b7682; border-top: 0; }
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def sections(record: RunRecord) -> list[Section]:
    """Return all sections of the report, in reading order."""
    parts = (curves.losses, curves.rates, curves.throughput, curves.times, curves.memory, history.history)
    with drawing():
        return [part(record) for part in parts]


def write(record: RunRecord, path: Path) -> list[Path]:
    """Write the page `path`, and PNGs to a folder of its name beside it; return all paths. Raises DiskError."""
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


def html(record: RunRecord, parts: list[Section], pictures: dict[str, bytes]) -> str:
    title = _safe(f"Run {record.name}")
    facts = "".join(f"<div><dt>{_safe(name)}</dt><dd>{_safe(value)}</dd></div>" for name, value in _facts(record))
    notes = "".join(f"<p>{_safe(note)}.</p>" for note in record.notes)
    notes = f'<section id="notes"><h2>What could not be read</h2>{notes}</section>' if notes else ""
    body = "".join(_part(part, pictures.get(part.key)) for part in parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body><main><h1>{title}</h1>"
        f'<p class="under">{_safe(_under(record))}</p><dl>{facts}</dl>{notes}{body}'
        f"<footer>Written by meshloom report from {_safe(str(record.folder))}</footer></main></body></html>\n"
    )


def _part(part: Section, picture: bytes | None) -> str:
    image = table = ""
    if picture is not None and part.figure is not None:
        width, height = (round(size * DPI) for size in part.figure.get_size_inches())
        source = b64encode(picture).decode()
        size = f'width="{width}" height="{height}"'
        image = f'\n<img {size} alt="{_safe(part.title)}" src="data:image/png;base64,{source}">'
    if part.table:
        head = "".join(f"<th>{_safe(cell)}</th>" for cell in part.table[0])
        rows = "".join("<tr>" + "".join(f"<td>{_safe(cell)}</td>" for cell in row) + "</tr>" for row in part.table[1:])
        table = f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return f'<section id="{part.key}"><h2>{_safe(part.title)}</h2><p>{_safe(part.text)}</p>{image}{table}</section>\n'


def _under(record: RunRecord) -> str:
    model = record.section.get("model")
    name = model.get("name_or_path") if isinstance(model, dict) else None
    words = [f"model {name}" if name else "", record.layout.describe() if record.layout else ""]
    words.append(f"engine {record.engine}" if record.engine else "")
    return ". ".join(filter(None, words))


def _facts(record: RunRecord) -> Iterator[tuple[str, str]]:
    last = record.steps[-1] if record.steps else {}
    made = history.sessions(record)
    yield "state", made[-1].how if made else "not known"
    total = number(last, "total_steps")
    yield "steps", f"{last['step']:,}{f' of {total:,.0f}' if math.isfinite(total) else ''}" if last else "none logged"
    for name, rows, key in (("loss", record.steps, "loss"), ("held-out loss", record.evaluations, "evaluation_loss")):
        if rows:
            value = number(rows[-1], key)
            yield name, f"{value:.4g}" if math.isfinite(value) else "not finite"
    for key, name in curves.ACCURACIES.items():
        if known := finite(record.evaluations, key):
            yield name, f"{known[-1]:.2%}"
    if rates := sorted(finite(record.steps, "tokens_per_second")):
        yield "median rate", f"{rates[len(rates) // 2]:,.0f} /s"
    if peak := max(finite(record.steps, "memory_gib"), default=0.0):
        yield "most memory", f"{peak:.2f} GiB"
    if made:
        yield "time at work", _clock(sum(one.ended - one.begun for one in made))


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"


def _safe(text: str) -> str:
    return escape(printable(text), quote=True)
