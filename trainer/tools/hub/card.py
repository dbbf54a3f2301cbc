"""The model card of a run: what was run, on which data, how its loss went, and its certificate."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment

from trainer import checkpoint
from trainer.config import leaves
from trainer.data.formats import locate
from trainer.errors import ConfigError, DataError, DiskError, Problem, named_line
from trainer.run.resume import ENVIRONMENT, FINAL, without_place
from trainer.storage import parse_json, read_file
from trainer.tools.report.run_record import Row, RunRecord, number, read

TEMPLATE = Path(__file__).with_name("card.md.j2")
CARD, CERTIFICATE, PICTURE = "README.md", "certificate.json", "loss.png"
ROWS = 10
"""The most rows of the table of losses."""
LIBRARIES = {
    "adapter_config.json": ("peft", "AutoPeftModelForCausalLM.from_pretrained"),
    "config.json": ("transformers", "AutoModelForCausalLM.from_pretrained"),
}
"""Files that say how a model is opened -> the library, and its function."""


def card_of(folder: Path, repository: str, certificate: str | None = None) -> dict[str, bytes]:
    """Return the model card of the run in `folder`, and its picture, by their names.

    Raises ConfigError if it is the folder of no run, or its certificate can't be read.
    """
    record, environment = read(folder), parse_json(read_file(folder / ENVIRONMENT))
    section, request = record.section, environment["request"]
    kinds = (found for name, found in LIBRARIES.items() if (folder / FINAL / name).exists())
    library, opens = next(kinds, (None, None))
    base = section.get("model", {}).get("name_or_path")
    metadata = ModelCardData(
        base_model=base if _is_hub_id(base) else None,
        datasets=list(filter(_is_hub_id, _data_sets(section.get("data", {})))) or None,
        library_name=library,
        pipeline_tag="text-generation" if library else None,
        tags=["meshloom", *(["lora"] if library == "peft" else [])],
    )
    files = _picture(record)
    path = Path(certificate) if certificate else folder / CERTIFICATE
    proof = read_certificate(path) if certificate or path.exists() else None
    script, *arguments = environment["command"]
    text = (
        Environment(trim_blocks=True)
        .from_string(TEMPLATE.read_text())
        .render(
            metadata=metadata.to_yaml(),
            repository=repository,
            environment=environment,
            base=base,
            opens=opens and f"{library}.{opens}",
            command=shlex.join([Path(script).name, *arguments]),
            data=_data(folder),
            picture=next(iter(files), None),
            losses=list(_losses(record)),
            logged=record.logged,
            certificate=proof,
            differences=_differences(request, proof["config"]) if proof else [],
        )
    )
    return {**files, CARD: text.encode()}


def _is_hub_id(name: Any) -> bool:
    named = isinstance(name, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)
    return bool(named) and not Path(name).exists()


def _data_sets(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield the Hub's names of the data; it may be pushed where the files of others are not."""
    for source in (section, *section.get("sources", ())):
        with suppress(DataError):
            yield locate(source.get("path"), source.get("format", "auto")).hub


def _data(folder: Path) -> Row | None:
    """Return the digest and numbers of the data, which each checkpoint has."""
    for path in reversed(checkpoint.published(folder / "checkpoints")):
        with suppress(DiskError, KeyError):
            return checkpoint.read_description(path)["data"]  # type: ignore[no-any-return]
    return None


def _picture(record: RunRecord) -> dict[str, bytes]:
    if find_spec("matplotlib") is None:
        return {}
    from trainer.tools.report.curves import losses
    from trainer.tools.report.style import drawing, png

    with drawing():
        figure = losses(record).figure
    return {PICTURE: png(figure)} if figure else {}


def _losses(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Yield the step, training loss and held-out loss of up to ROWS logged steps, the last too."""
    held = {row.get("step"): number(row, "evaluation_loss") for row in record.evaluations}
    count = min(ROWS, len(record.steps))
    for index in range(count):
        row = record.steps[(index + 1) * len(record.steps) // count - 1]
        values = (number(row, "loss"), held.get(row["step"], math.nan))
        training, held_out = (f"{value:.4g}" if math.isfinite(value) else "" for value in values)
        yield f"{row['step']:,}", training, held_out


def read_certificate(path: Path) -> Row:
    """Return what the card shows of a certificate. Raises ConfigError for another file."""
    try:
        found = parse_json(read_file(path))
        return {
            "passed": bool(found["passed"]),
            "layout": str(found["layout"]),
            "config": found.get("config"),
            "rows": [
                (row["check"], f"{float(row['error']):.1e}", f"{row['tolerance']:.0e}")
                for row in found["findings"]
            ],
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        place, expected = f"certificate: {path}", "the file that `meshloom verify` writes"
        raise ConfigError(Problem(place, named_line(error), expected)) from error


def _differences(request: Any, certified: Any) -> list[str]:
    """Return the keys in which the config of the certificate is not the one that was trained."""
    ours, theirs = (dict(leaves(without_place(one or {}))) for one in (request, certified))
    return sorted(key for key in ours | theirs if ours.get(key) != theirs.get(key))
