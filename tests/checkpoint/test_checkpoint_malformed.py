"""Whatever the files of a checkpoint hold: it is named and set aside, and nothing ends in a
traceback.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.checkpoint_pieces import ALONE, DESCRIPTION, MODEL_FOLDER, STATE, live
from trainer.checkpoint import newest, prune, save
from trainer.checkpoint.manifest import hash_file
from trainer.command.checkpoint import main
from trainer.errors import ConfigError
from trainer.storage import to_json

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["../a", "/etc/passwd", "a\0b", "x" * 300, "\ud800", "", ".", "model", "model/x.pt"]
)
SLOW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A good checkpoint, and a newer one to be broken."""
    for step in (10, 20):
        save(
            tmp_path,
            replace(STATE, step=step),
            live().state_tensors(),
            DESCRIPTION,
            MODEL_FOLDER,
            ALONE,
        )
    return tmp_path


def is_set_aside(directory: Path) -> None:
    """The newer checkpoint of `directory` is no reason to stop; afterwards it is where it was, for
    the next example.
    """
    broken = directory / "step-000020"
    for command in ("list", "verify", "show"):
        code, output = ask(command, broken)
        assert code == 74, (command, output)
        assert output.startswith("step-000020  ") and "Traceback" not in output
    prune(directory, 2, keep_best=True)
    result, message = newest(directory)
    assert result == directory / "step-000010"
    assert len(message) == 1
    assert message[0].startswith("step-000020 is damaged: ") and len(message[0]) < 1000
    (directory / "step-000020.damaged").rename(broken)


def ask(command: str, path: Path) -> tuple[int, str]:
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(output):
        return main([command, str(path)], "checkpoint"), output.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"7",
        b'"files"',
        b'{"files": []}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"{}",
    ],
)
def test_a_manifest_that_is_none(directory: Path, content: bytes) -> None:
    (directory / "step-000020" / "manifest.json").write_bytes(content)
    is_set_aside(directory)


@SLOW
@given(st.data())
def test_a_manifest_with_anything_in_any_place(directory: Path, data: st.DataObject) -> None:
    path = directory / "step-000020" / "manifest.json"
    whole = path.read_bytes()
    changed = mutated(json.loads(whole), data)
    try:
        content = to_json(changed)
    except ValueError:
        return
    # a manifest that merely knows fewer files is a good one
    fewer = (
        isinstance(changed, dict)
        and changed.get("format") in (1, 2, 3, 4)
        and is_part(changed.get("files"), json.loads(whole))
    )
    if is_later(changed):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="Install a newer Meshloom"):
            newest(directory)
        path.write_bytes(whole)
    elif content != whole and not fewer:
        path.write_bytes(content)
        is_set_aside(directory)
        path.write_bytes(whole)


def is_later(changed: Any) -> bool:
    """Return True for a manifest of a later version, which is not damaged."""
    if not isinstance(changed, dict) or not isinstance(changed.get("files"), dict):
        return False
    return type(changed.get("format")) is int and changed["format"] > 4


def is_part(files: Any, whole: Any) -> bool:
    return (
        isinstance(files, dict)
        and ("trainer.json" in files or not any("/" in name for name in files))
        and files.items() <= whole["files"].items()
    )


def mutated(value: Any, data: st.DataObject) -> Any:
    """`value` with something else in one place of it, or an entry more or less."""
    if not isinstance(value, dict) or not value or data.draw(st.integers(0, 3)) == 0:
        return data.draw(JSON)
    key = data.draw(st.sampled_from(sorted(value)))
    rest = {name: entry for name, entry in value.items() if name != key}
    change = data.draw(st.sampled_from(["within", "within", "gone", "renamed"]))
    if change == "gone":
        return rest
    if change == "renamed":
        return rest | {data.draw(NAMES | st.text(max_size=9)): value[key]}
    return rest | {key: mutated(value[key], data)}


def rewritten(path: Path, name: str, content: bytes) -> None:
    """File `name` of a checkpoint made `content`, and the manifest made to agree."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_bytes())
    record = hash_file(path / name)
    manifest["files"][name] = record.to_json()
    (path / "manifest.json").write_bytes(to_json(manifest))


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


TENSORS = {
    "nothing": b"",
    "a length beyond the file": (2**62).to_bytes(8, "little") + b"{}",
    "no JSON": header(b"{"),
    "a list": header(b"[]"),
    "deep": header(b"[" * 100_000),
    "no dtype": header(b'{"a": {}}'),
    "an unknown dtype": header(b'{"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}'),
    "a list as dtype": header(b'{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}'),
    "offsets of text": header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}'),
    "a shape of text": header(
        b'{"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}1234'
    ),
    "data beyond the file": header(
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    ),
    "a size that is not the shape's": header(
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}1234'
    ),
}


@pytest.mark.parametrize("part", ["model", "optimizer"])
@pytest.mark.parametrize("name", TENSORS)
def test_a_file_of_tensors_that_is_none(directory: Path, name: str, part: str) -> None:
    rewritten(directory / "step-000020", f"{part}/{part}.safetensors", TENSORS[name])
    is_set_aside(directory)


def positioned(whole: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return whole | {"position": whole["position"] | fields}


DESCRIPTIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda whole: [],
    "no position": lambda whole: {key: value for key, value in whole.items() if key != "position"},
    "a position of text": lambda whole: whole | {"position": "here"},
    "a position without its step": lambda whole: (
        whole | {"position": {"samples": 3, "tokens": 4, "engine": {}}}
    ),
    "a position with more": lambda whole: whole | {"position": whole["position"] | {"mood": 1}},
    "a step of text": lambda whole: whole | {"position": whole["position"] | {"step": "20"}},
    "a config that is a list": lambda whole: whole | {"config": []},
    "samples of text": lambda whole: whole | {"position": whole["position"] | {"samples": None}},
    "a step before the first": lambda whole: positioned(whole, step=-20),
    "a step that is not the folder's": lambda whole: positioned(whole, step=21),
    "a step beyond numbers": lambda whole: positioned(whole, step=10**400),
    "samples below nothing": lambda whole: positioned(whole, samples=-3),
    "samples of fewer than a step has": lambda whole: positioned(whole, samples=19),
    "samples beyond numbers": lambda whole: positioned(whole, samples=2**63),
    "tokens below nothing": lambda whole: positioned(whole, tokens=-1),
    "a scalar of text": lambda whole: positioned(whole, engine={"optimizer_step": "20"}),
    "samples that its steps do not make": lambda whole: (
        positioned(whole, samples=3201)
        | {"since": {"step": 0, "samples": 0}, "layout": {"train_batch": 160}}
    ),
    "an epoch that is a list": lambda whole: whole | {"epoch": [1.0, 2.0]},
    "an epoch of text": lambda whole: whole | {"epoch": {"loss": "1", "targets": 2.0}},
    "a loss of text": lambda whole: whole | {"evaluation_loss": "low"},
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_description_that_is_none(directory: Path, name: str) -> None:
    path = directory / "step-000020"
    whole = json.loads((path / "trainer.json").read_bytes())
    rewritten(path, "trainer.json", to_json(DESCRIPTIONS[name](whole)))
    is_set_aside(directory)


@pytest.mark.parametrize("field", ["step", "samples", "tokens"])
def test_a_position_that_can_not_be_is_told_by_its_field(directory: Path, field: str) -> None:
    path = directory / "step-000020"
    rewritten(
        path,
        "trainer.json",
        to_json(positioned(json.loads((path / "trainer.json").read_bytes()), **{field: -7})),
    )
    assert f"position.{field} is -7" in newest(directory)[1][0]


def test_a_position_after_another_batch_size_counts_from_where_the_run_went_on(
    directory: Path,
) -> None:
    path = directory / "step-000020"
    whole = json.loads((path / "trainer.json").read_bytes())
    grown = {"since": {"step": 10, "samples": 1600}, "layout": {"train_batch": 160}}
    rewritten(path, "trainer.json", to_json(whole | grown))
    assert newest(directory) == (path, [])


def test_a_folder_without_its_description(directory: Path) -> None:
    path = directory / "step-000020"
    (path / "trainer.json").unlink()
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["files"]["trainer.json"]
    (path / "manifest.json").write_bytes(to_json(manifest))
    is_set_aside(directory)


@pytest.mark.parametrize(
    "name", ["manifest.json", "trainer.json", "model/config.json", "model/model.safetensors"]
)
@pytest.mark.parametrize("kind", ["a pipe", "a pipe that is announced", "a folder"])
def test_what_is_no_regular_file_is_never_opened(directory: Path, name: str, kind: str) -> None:
    path, manifest = directory / "step-000020" / name, directory / "step-000020" / "manifest.json"
    if kind == "a pipe that is announced":  # of the size that a pipe has
        content = json.loads(manifest.read_bytes())
        content["files"].setdefault(name, {"sha256": "0" * 64})["size"] = 0
        manifest.write_bytes(to_json(content))
    path.unlink()
    path.mkdir() if kind == "a folder" else os.mkfifo(path)
    is_set_aside(directory)
