"""The model card of a run: what was run, on which data, how its loss went, and its certificate."""

from __future__ import annotations

import shlex
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from trainer import checkpoint
from trainer.data.sources.location import may_be_data_on_hub
from trainer.errors import ConfigError, Problem, listed, refused
from trainer.run.start.changes import differences, without_place
from trainer.storage import parse_json, read_file
from trainer.tools.report.run_record import Row, read

TEMPLATE = Path(__file__).with_name("card.md.j2")
CARD = "README.md"
CERTIFICATE = "certificate.json"
ROWS = 10
"""The table of losses of a long run has at least ROWS rows, and fewer than twice as many."""
LAUNCHED = ("launch", "train.py")
LIBRARIES = {"adapter_config.json": "peft", "config.json": "transformers"}
"""Files that say how a model is opened -> the library that opens it."""


def card_of(folder: Path, repository: str, certificate: str | None = None) -> bytes:
    """Return the model card, README.md, of the run in `folder`.

    `certificate`: the file of the certificate; None: one in `folder` or in the working directory.
    Raises ConfigError if `folder` is not a run's or lacks what it ran, or if the certificate can't
    be read.
    """
    record = read(folder)
    environment = record.environment
    if missing := [key for key in ("command", "request") if key not in environment]:
        hint = "Copy the folder whole, from where the run wrote it"
        path = str(folder / "environment.json")
        raise ConfigError(Problem(path, f"it has no {listed(missing)}", "a run's", hint))
    present = (kind for name, kind in LIBRARIES.items() if (folder / "final" / name).exists())
    library = next(present, None)
    base = record.section.get("model", {}).get("name_or_path")
    data = record.section.get("data", {})
    names = [source.get("path") for source in (data, *data.get("sources", ()))]
    metadata = ModelCardData(
        base_model=base if _is_hub_id(base) else None,
        datasets=list(filter(_is_hub_id, names)) or None,
        library_name=library,
        pipeline_tag="text-generation" if library else None,
        tags=["meshloom", *(["lora"] if library == "peft" else [])],
    )
    script = Path(environment["command"][0])
    # as it is run in a clone; else a command, or a script of one's own
    words = ["python", "launch/train.py"] if script.parts[-2:] == LAUNCHED else [script.name]
    checkpoints = checkpoint.published(folder / "checkpoints")
    return ModelCard.from_template(  # type: ignore[no-any-return]
        metadata,
        template_path=str(TEMPLATE),
        repository=repository,
        environment=environment,
        base=base,
        library=library,
        command=shlex.join([*words, *environment["command"][1:]]),
        data=checkpoint.read_description(checkpoints[-1])["data"] if checkpoints else None,
        steps=record.steps[:: -max(1, len(record.steps) // ROWS)][::-1],
        held_out={row.get("step"): row.get("evaluation_loss") for row in record.evaluations},
        certificate=_certificate(folder, certificate, environment["request"]),
    ).content.encode()


def _is_hub_id(name: object) -> bool:
    return isinstance(name, str) and "/" in name and may_be_data_on_hub(name)


def _certificate(folder: Path, named: str | None, request: object) -> Row | None:
    """Return the certificate in the file `named`, in the run's folder or in the working directory.

    The first of these counts. One in the working directory counts only if it was made for the
    config `request`. Its "differences" list how the config that it was made for differs from that.
    """
    beside = folder / CERTIFICATE
    here = Path(CERTIFICATE)
    path = beside if beside.exists() else here
    if named:
        path = Path(named)
    if not named and not path.exists():
        return None
    proof = read_certificate(path)
    given = (without_place(one or {}) for one in (proof.get("config"), request))
    proof["differences"] = differences(*given)
    return None if path == here and not named and proof["differences"] else proof


def read_certificate(path: Path) -> Row:
    """Return the content of a certificate. Raises ConfigError for any other file."""
    kinds = (OSError, ValueError, KeyError, TypeError)
    expected = "the file that `meshloom verify` writes"
    with refused(f"certificate: {path}", expected, *kinds, named=True):
        content = parse_json(read_file(path))
        return {key: content[key] for key in ("passed", "layout", "findings")} | content  # type: ignore[no-any-return]
