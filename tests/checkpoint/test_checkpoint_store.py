"""Checkpoints of one process: the format, every kind of damage, a death between any two phases,
pruning.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.support.checkpoint_pieces import (
    ALONE,
    DESCRIPTION,
    MODEL_FOLDER,
    STATE,
    Live,
    files,
    live,
    same,
)
from tests.support.messages import raises, shows, shows_each
from trainer.checkpoint import (
    WEIGHTS_ALONE,
    ModelFolder,
    ModelForm,
    export,
    leftovers,
    load,
    newest,
    prune,
    read_description,
    save,
    verify,
)
from trainer.checkpoint.manifest import hash_file
from trainer.checkpoint.safetensors_stream import SharedFile
from trainer.errors import ConfigError, DiskError
from trainer.state import WEIGHT, Part, StateTensor
from trainer.storage import ensure_writable, to_json


class Killed(BaseException):
    """Not an Exception: nothing may clean up after it, as nothing does after kill -9."""


def saved(
    folder: Path, step: int = 100, state: Live | None = None, dtype: torch.dtype | None = None
) -> Path:
    entries = (state or live()).state_tensors()
    return save(
        folder,
        replace(STATE, step=step),
        entries,
        DESCRIPTION,
        replace(MODEL_FOLDER, form=ModelForm(dtype)),
        ALONE,
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that no test changes."""
    return saved(tmp_path_factory.mktemp("good"))


# The format


def test_round_trip(good: Path) -> None:
    state, back = live(), live().blank()
    assert load(good, back.state_tensors(), ALONE) == STATE
    assert same(state, back)
    assert read_description(good) == DESCRIPTION | {
        "stateless": ["c.buffer"],
        "position": {
            "step": 100,
            "samples": 3200,
            "tokens": 51_000,
            "engine": {"optimizer_step": 100.0},
        },
    }


@pytest.mark.parametrize("gone", [["exp_avg", "exp_avg_sq", "step"], ["step"]])
def test_optimizer_state_of_one_parameter_that_is_gone_is_an_error(
    tmp_path: Path, gone: list[str]
) -> None:
    """Its manifest agrees; a parameter that had none when it was saved is as it was."""
    tensors = {
        key: value for key, value in live().tensors.items() if key[0] != "empty" or key[1] == WEIGHT
    }
    tensors |= {(name, "step"): torch.tensor(4.0) for name in ("a.weight", "b.weight", "scale")}
    path = save(tmp_path, STATE, Live(tensors).state_tensors(), DESCRIPTION, MODEL_FOLDER, ALONE)

    def entries() -> list[StateTensor]:
        """An engine's before its first step: state is made where a checkpoint has some."""
        results = {
            (entry.name, entry.key): entry for entry in Live(tensors).blank().state_tensors()
        }

        def keep(name: str) -> Callable[[Mapping[str, tuple[int, ...]]], list[StateTensor]]:
            return lambda shapes: [results[name, key] for key in shapes]

        return [
            replace(entry, keep=keep(name))
            for (name, key), entry in results.items()
            if key == WEIGHT
        ]

    load(path, entries(), ALONE)
    kept = load_file(path / "optimizer/optimizer.safetensors")
    kept = {
        name: value
        for name, value in kept.items()
        if name not in {f"b.weight.{key}" for key in gone}
    }
    save_file(kept, path / "optimizer/optimizer.safetensors")
    agree(path, "optimizer/optimizer.safetensors")
    assert verify(path) == []
    with raises(DiskError, "missing", "1 parameters (b.weight)", "resume-weights-only"):
        load(path, entries(), ALONE)
    load(path, entries(), ALONE, weights_only=True)


def agree(path: Path, name: str) -> None:
    """Have the manifest say what the file `name` is."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    record = hash_file(path / name)
    manifest["files"][name] = record.to_json()
    (path / "manifest.json").write_bytes(to_json(manifest))


def test_layout_on_disk(good: Path) -> None:
    assert good.name == "step-000100"
    assert (good.parent / "latest").read_text() == "step-000100\n"
    listed = [
        "model/config.json",
        "model/model.safetensors",
        "optimizer/optimizer.safetensors",
        "trainer.json",
    ]
    assert files(good) == ["manifest.json", *listed]
    assert sorted(json.loads((good / "manifest.json").read_text())["files"]) == listed
    assert files(good.parent) == ["latest", *(f"step-000100/{name}" for name in files(good))]


def test_narrowed_weights_come_back_exactly(tmp_path: Path) -> None:
    state, back = live(), live().blank()
    path = saved(tmp_path, state=state, dtype=torch.bfloat16)
    load(path, back.state_tensors(), ALONE)
    assert same(state, back)
    weights = load_file(path / "model/model.safetensors")
    assert weights["a.weight"].dtype == torch.bfloat16
    assert weights["c.buffer"].dtype == torch.int64


def test_transformers_opens_the_model_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    tensors = {(name, WEIGHT): parameter.data for name, parameter in model.named_parameters()}
    assert ("lm_head.weight", WEIGHT) not in tensors  # tied: the name is no state tensor
    entries = Live(tensors).state_tensors()
    model_folder = ModelFolder(config.save_pretrained)
    path = save(tmp_path / "checkpoints", STATE, entries, DESCRIPTION, model_folder, ALONE)
    low = replace(model_folder, form=ModelForm(torch.bfloat16))
    final = export(tmp_path / "final", entries, low, ALONE)
    for folder, dtype in ((path / "model", torch.float32), (final, torch.bfloat16)):
        opened = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        for (name, parameter), other in zip(
            model.named_parameters(), opened.parameters(), strict=True
        ):
            assert torch.equal(parameter.to(dtype), other), name
        assert opened.lm_head.weight is opened.model.embed_tokens.weight


def test_export_replaces_an_older_one(tmp_path: Path) -> None:
    final = tmp_path / "final"
    export(final, live().state_tensors(), MODEL_FOLDER, ALONE)
    before = (final / "model.safetensors").read_bytes()
    export(final, live(seed=1).state_tensors(), MODEL_FOLDER, ALONE)
    assert files(tmp_path) == [
        "final/config.json",
        "final/manifest.json",
        "final/model.safetensors",
    ]
    assert (final / "model.safetensors").read_bytes() != before
    assert verify(final) == []


# What does not fit


def test_state_that_does_not_fit_is_one_error_before_anything_is_written(good: Path) -> None:
    other = live().blank().tensors
    other["new.weight", WEIGHT] = torch.zeros(2)
    other["a.weight", "exp_avg"] = torch.full((3, 4), 1.0)
    del other["b.weight", "exp_avg_sq"]
    back = Live(other)
    with pytest.raises(ConfigError) as caught:
        load(good, back.state_tensors(), ALONE)
    hint = (
        "expected the tensors of this run. Resume with the model and the optimizer that it was "
        "saved with"
    )
    shows_each(
        str(caught.value).splitlines(),
        (f"{good}: 1 tensors missing", "new.weight", f"{hint}"),
        (f"{good}: 1 tensors", "part", "b.weight.exp_avg_sq", f"{hint}"),
        (f"{good}: 1 tensors", "shape", "a.weight.exp_avg", "[4, 3]", "[3, 4]", f"{hint}"),
    )
    assert torch.equal(other["a.weight", WEIGHT], torch.full((4, 3), 1.0))


def test_a_published_step_is_never_overwritten(tmp_path: Path) -> None:
    path = saved(tmp_path)
    before = {name: (path / name).read_bytes() for name in files(path)}
    with pytest.raises(DiskError) as caught:
        saved(tmp_path, state=live(seed=1))
    shows(caught.value, f"{path}: already published")
    assert {name: (path / name).read_bytes() for name in files(path)} == before


# Damage


@given(st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_single_flipped_bit_anywhere_is_found(good: Path, data: st.DataObject) -> None:
    path = good / data.draw(st.sampled_from(files(good)))
    content = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        path.write_bytes(damaged)
        problems = verify(good)
        assert problems, f"bit {bit} of {path.name}"
        assert path == good / "manifest.json" or [problem.place for problem in problems] == [
            str(path)
        ]
    finally:
        path.write_bytes(content)
    assert verify(good) == []


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "longer"])
def test_damage_of_any_file_falls_back_to_the_checkpoint_before(
    tmp_path: Path, damage: str
) -> None:
    older, newer = saved(tmp_path, 50), saved(tmp_path, 100)
    assert newest(tmp_path) == (newer, [])
    for name in files(newer):
        path = newer / name
        content = path.read_bytes()
        path.unlink()
        if damage != "missing":
            path.write_bytes(
                {"empty": b"", "truncated": content[:-1], "longer": content + b"\n"}[damage]
            )
        with pytest.raises(DiskError):
            load(newer, live().state_tensors(), ALONE)
        before = {name: (newer / name).read_bytes() for name in files(newer)}
        result, message = newest(tmp_path)
        assert result == older
        assert len(message) == 1
        assert message[0].startswith(f"step-000100 is damaged: {path}: ")
        shows(message[0], "now step-000100.damaged", "50 steps")
        aside = tmp_path / "step-000100.damaged"
        assert {name: (aside / name).read_bytes() for name in files(aside)} == before
        assert newest(tmp_path) == (older, [])
        aside.rename(newer)
        path.write_bytes(content)
    assert newest(tmp_path) == (newer, [])


@pytest.mark.parametrize("latest", [None, "", "step-000777\n", "\xff"])
def test_latest_is_for_people(tmp_path: Path, latest: str | None) -> None:
    newer = saved(tmp_path)
    (tmp_path / "latest").unlink()
    if latest is not None:
        (tmp_path / "latest").write_text(latest, encoding="latin-1")
    assert newest(tmp_path) == (newer, [])
    saved(tmp_path, 200)
    assert (tmp_path / "latest").read_text() == "step-000200\n"


def test_what_is_set_aside_is_never_removed(tmp_path: Path) -> None:
    older = saved(tmp_path, 50)
    for number in range(3):
        os.truncate(saved(tmp_path, 100, live(seed=number)) / "trainer.json", 3)
        assert newest(tmp_path)[0] == older
    for step in (110, 120, 130):
        saved(tmp_path, step)
        prune(tmp_path, 1)
    names = ["step-000100.damaged", "step-000100.damaged-2", "step-000100.damaged-3"]
    assert [path.name for path in leftovers(tmp_path)] == names
    contents = {(tmp_path / name / "model/model.safetensors").read_bytes() for name in names}
    assert len(contents) == 3


def test_the_text_of_damage(tmp_path: Path) -> None:
    path = saved(tmp_path)
    weights = path / "model/model.safetensors"
    count = weights.stat().st_size
    os.truncate(weights, 5)
    (path / "trainer.json").unlink()
    shows_each(
        list(map(str, verify(path))),
        (f"{weights}: 5 bytes", f"{count}", "older checkpoint"),
        (f"{path}/trainer.json", "directory"),
    )
    fault = f"{weights}: 5 bytes; expected {count} bytes (and 1 more)"
    message = (
        f"step-000100 is damaged: {fault}; it is now step-000100.damaged, and 100 steps are lost"
    )
    assert newest(tmp_path) == (None, [message])
    assert newest(tmp_path / "nothing") == (None, [])


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("../latest", ("leaves the folder", "'../latest'")),
        ("/etc/passwd", ("leaves the folder", "'/etc/passwd'")),
        ("model/pytorch_model.bin", ("a pickle", "'model/pytorch_model.bin'")),
    ],
)
def test_a_manifest_that_names_what_is_never_opened_is_refused(
    tmp_path: Path, name: str, keys: tuple[str, ...]
) -> None:
    path = saved(tmp_path)
    manifest = path / "manifest.json"
    listed = json.loads(manifest.read_text())
    listed["files"][name] = listed["files"].pop("trainer.json")
    manifest.write_bytes(to_json(listed))
    shows_each([problem.actual for problem in verify(path)], keys)


def test_weights_alone_need_no_optimizer_state(tmp_path: Path) -> None:
    state, path = live(), saved(tmp_path)
    shutil.rmtree(path / "optimizer")
    shows_each(
        [problem.hint for problem in verify(path)], ("optimizer's state", "--resume-weights-only")
    )
    assert newest(tmp_path, below=WEIGHTS_ALONE) == (path, [])
    tensors = state.blank().tensors
    tensors["a.weight", "master"] = torch.zeros(4, 3)
    back = Live(tensors)
    assert load(path, back.state_tensors(), ALONE, weights_only=True) == STATE
    for (name, part), tensor in back.tensors.items():
        kept = torch.full_like(tensor, 1)
        assert torch.equal(
            tensor, state.tensors[name, WEIGHT] if part in (WEIGHT, "master") else kept
        )
    (path / "model/model.safetensors").unlink()
    with pytest.raises(DiskError):
        load(path, back.state_tensors(), ALONE, weights_only=True)


@pytest.mark.parametrize("part", [WEIGHT, "exp_avg"])
def test_a_placeholder_is_never_written(tmp_path: Path, part: str) -> None:
    """What is left of a partitioned parameter on one rank: no elements."""
    entries = [
        replace(entry, parts=lambda: [Part(torch.empty(0))])
        if (entry.name, entry.key) == ("a.weight", part)
        else entry
        for entry in live().state_tensors()
    ]
    with raises(ValueError, "a.weight", "(0,)", "(4, 3)", "planned"):
        save(tmp_path, STATE, entries, DESCRIPTION, MODEL_FOLDER, ALONE)
    assert files(tmp_path) == []


# A death between any two phases


@pytest.mark.parametrize("phase", ["os.fsync", "os.rename", "os.replace"])
def test_a_run_that_dies_while_saving_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    older = saved(tmp_path, 50)
    real = getattr(os, phase.partition(".")[2])
    survived = 0
    for deadly in range(30):
        calls = iter(range(1000))

        def dying(*arguments: object, deadly: int = deadly, calls: object = calls) -> object:
            if next(calls) == deadly:  # type: ignore[call-overload]
                raise Killed
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(phase, dying)
            try:
                saved(tmp_path, 100)
            except Killed:
                survived += 1
        result, skipped = newest(tmp_path)
        assert skipped == []
        assert result in (older, tmp_path / "step-000100")
        assert (tmp_path / (tmp_path / "latest").read_text().strip()).is_dir()
        assert load(result, live().blank().state_tensors(), ALONE).step == int(result.name[-6:])
        if next(calls) <= deadly:
            break  # there were not so many calls: this save went through
        if result == older:
            saved(tmp_path, 100)  # the same step again, over what the dead run left
        assert not list(tmp_path.glob("*.partial"))
        shutil.rmtree(tmp_path / "step-000100")
        (tmp_path / "latest").write_text(older.name)
    assert survived == {"os.fsync": 11, "os.rename": 1, "os.replace": 1}[phase]


@pytest.mark.parametrize("deadly", [0, 1])
def test_export_that_dies_between_its_renames_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadly: int
) -> None:
    final = tmp_path / "final"
    export(final, live().state_tensors(), MODEL_FOLDER, ALONE)
    real, calls = os.rename, iter(range(9))

    def dying(old: Path, new: Path) -> None:
        if next(calls) == deadly:
            raise Killed
        real(old, new)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("os.rename", dying)
        export(final, live(seed=1).state_tensors(), MODEL_FOLDER, ALONE)
    export(final, live(seed=1).state_tensors(), MODEL_FOLDER, ALONE)
    assert verify(final) == []
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


# A full or forbidden disk


def test_a_full_disk_while_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = saved(tmp_path, 50)

    def full(self: SharedFile, place: object, content: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SharedFile, "write", full)
    with pytest.raises(DiskError) as caught:
        saved(tmp_path, 100)
    [problem] = caught.value.problems
    assert problem.place == str(tmp_path / "step-000100.partial")
    shows(problem.actual, "space left")
    assert problem.actual.endswith(" free")
    shows(problem.expected, "place", "takes 1.2 KiB")
    assert newest(tmp_path) == (older, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000050"]


def test_space_is_looked_at_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3 * 2**10))
    ensure_writable(tmp_path, 3 * 2**10)
    with pytest.raises(DiskError) as caught:
        ensure_writable(tmp_path / "run", 5 * 2**30)
    shows(caught.value, f"{tmp_path}/run: 3.0 KiB free", "least 5.0 GiB")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    with raises(DiskError, "100 bytes free", "least 1.2 KiB"):
        saved(tmp_path / "checkpoints")
    assert files(tmp_path) == []


def test_what_a_killed_probe_left_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(Path, "unlink", Mock(side_effect=KeyboardInterrupt))
        ensure_writable(tmp_path)
    assert files(tmp_path) != []
    ensure_writable(tmp_path)
    assert files(tmp_path) == []


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(DiskError) as caught:
        ensure_writable(tmp_path / "runs" / "mine", 1024)
    [problem] = caught.value.problems
    assert problem.place == f"{tmp_path}/runs/mine"
    assert problem.actual.startswith("Not a directory, ")
    shows(problem.expected, "place", "takes 1.0 KiB")


def test_a_description_that_is_no_json_publishes_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        save(tmp_path, STATE, live().state_tensors(), {"device": object()}, MODEL_FOLDER, ALONE)
    assert files(tmp_path) == []


# Pruning


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


def test_prune_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    for step, loss in {10: 3.0, 20: 2.0, 30: None, 40: 2.5, 1_000_000: 2.2}.items():
        description = DESCRIPTION | {"evaluation_loss": loss}
        state = replace(STATE, step=step, samples=32 * step)
        save(tmp_path, state, live().state_tensors(), description, MODEL_FOLDER, ALONE)
    assert prune(tmp_path, 2, keep_best=True) == [
        tmp_path / "step-000010",
        tmp_path / "step-000030",
    ]
    assert steps(tmp_path) == [20, 40, 1_000_000]
    (tmp_path / "step-000020/trainer.json").write_text("{")
    prune(tmp_path, 0, keep_best=True)
    assert steps(tmp_path) == [1_000_000]


def test_prune_never_removes_the_last_good_one(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        saved(tmp_path, step)
    for step in (30, 40):
        os.truncate(tmp_path / f"step-{step:06d}/trainer.json", 3)
    prune(tmp_path, 1)
    assert steps(tmp_path) == [20, 40]
    assert newest(tmp_path)[0] == tmp_path / "step-000020"


def test_leftovers_of_dead_runs_are_ignored_and_cleaned(tmp_path: Path) -> None:
    for name in ("step-000007.partial", "step-000003.deleting"):
        shutil.copytree(saved(tmp_path / "elsewhere"), tmp_path / name)
        shutil.rmtree(tmp_path / "elsewhere")
    (tmp_path / "step-notes.partial").mkdir()
    assert newest(tmp_path) == (None, [])
    saved(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-000100",
        "step-notes.partial",
    ]
