"""The model card of a run: what was run, on which data, how its loss went, and its certificate."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment

from trainer import checkpoint
from trainer.config import leaves
from trainer.data.formats import locate
from trainer.errors import ConfigError, DataError, Problem, named_line
from trainer.run.resume import ENVIRONMENT, without_place
from trainer.storage import parse_json, read_file
from trainer.tools.report.run_record import Row, RunRecord, read

TEMPLATE = Path(__file__).with_name("card.md.j2")
CARD, CERTIFICATE, PICTURE = "README.md", "certificate.json", "loss.png"
ROWS = 10
"""The number of rows of the table of losses, about."""
LIBRARIES = {"adapter_config.json": "peft", "config.json": "transformers"}
"""Files that say how a model is opened -> the library that opens it."""


def card_of(folder: Path, repository: str, certificate: str | None = None) -> dict[str, bytes]:
    """Return the model card of the run in `folder`, and its picture, by their names.

    Raises ConfigError if it is the folder of no run, or its certificate can't be read.
    """
    record, environment = read(folder), parse_json(read_file(folder / ENVIRONMENT))
    present = (kind for name, kind in LIBRARIES.items() if (folder / "final" / name).exists())
    library, base = next(present, None), record.section.get("model", {}).get("name_or_path")
    metadata = ModelCardData(
        base_model=base if _is_hub_id(base) else None,
        datasets=list(filter(_is_hub_id, _data_sets(record.section.get("data", {})))) or None,
        library_name=library,
        pipeline_tag="text-generation" if library else None,
        tags=["meshloom", *(["lora"] if library == "peft" else [])],
    )
    proof, path = None, Path(certificate or folder / CERTIFICATE)
    if certificate or path.exists():
        proof = read_certificate(path)
        proof["differences"] = _differences(environment["request"], proof.get("config"))
    script, *arguments = environment["command"]
    files, checkpoints = _picture(record), checkpoint.published(folder / "checkpoints")
    text = (
        Environment(trim_blocks=True)
        .from_string(TEMPLATE.read_text())
        .render(
            metadata=metadata.to_yaml(),
            repository=repository,
            environment=environment,
            base=base,
            library=library,
            command=shlex.join([Path(script).name, *arguments]),
            data=checkpoint.read_description(checkpoints[-1])["data"] if checkpoints else None,
            picture=next(iter(files), None),
            steps=record.steps[:: -max(1, len(record.steps) // ROWS)][::-1],
            held_out={row.get("step"): row.get("evaluation_loss") for row in record.evaluations},
            certificate=proof,
        )
    )
    return {**files, CARD: text.encode()}


def _is_hub_id(name: Any) -> bool:
    named = isinstance(name, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)
    return bool(named) and not Path(name).exists()


def _data_sets(section: Row) -> Iterator[str]:
    """Yield the Hub's names of data; where it is pushed later, files may be gone."""
    for source in (section, *section.get("sources", ())):
        with suppress(DataError):
            yield locate(source.get("path"), source.get("format", "auto")).hub


def _picture(record: RunRecord) -> dict[str, bytes]:
    if find_spec("matplotlib") is None:
        return {}
    from trainer.tools.report.curves import losses
    from trainer.tools.report.style import drawing, png

    with drawing():
        figure = losses(record).figure
    return {PICTURE: png(figure)} if figure else {}


def read_certificate(path: Path) -> Row:
    """Return the content of a certificate's file. Raises ConfigError for another file."""
    try:
        found = parse_json(read_file(path))
        return {key: found[key] for key in ("passed", "layout", "findings")} | found  # type: ignore[no-any-return]
    except (OSError, ValueError, KeyError, TypeError) as error:
        place, expected = f"certificate: {path}", "the file that `meshloom verify` writes"
        raise ConfigError(Problem(place, named_line(error), expected)) from error


def _differences(request: Any, certified: Any) -> list[str]:
    """Return the keys in which the config of the certificate is not the one that was trained."""
    ours, theirs = (dict(leaves(without_place(one or {}))) for one in (request, certified))
    return sorted(key for key in ours | theirs if ours.get(key) != theirs.get(key))
