"""`trainer.hub` and `meshloom push` against a Hub on this machine (tests/support/hub.py)."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils._http import default_client_factory

import trainer
from tests.support.command.own_module import OWN, config
from tests.support.commands import TRAIN, run, start, write_job
from tests.support.hub import Handler, Hub, Repository, serving
from tests.support.marked import MARK, ended, processes, sweep
from tests.support.messages import shows
from trainer.certify.certificate import Certificate, write
from trainer.certify.finding import CheckResult
from trainer.command import push
from trainer.errors import ConfigError, HubError
from trainer.run.start.changes import without_place
from trainer.supervise import status_files
from trainer.supervise.signals import stop_signals
from trainer.tools.hub import repository
from trainer.tools.hub.card import CARD, card_of

LORA = {"r": 4, "targets": ["q_proj", "down_proj"]}
PASSED = Certificate("shard 2", "mesh", (), (CheckResult("loss", 0, 1e-8, 1e-5),), None)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty Hub, which this process uses."""
    with serving() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_mine")
        yield served
    set_client_factory(default_client_factory)


def trained(folder: Path, **section: Any) -> Path:
    folder.mkdir(exist_ok=True)
    job = write_job(folder, device="cpu", engine="mesh", **section)
    return trainer.train(job, quiet=True).folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("base"))


def pushed(*arguments: str | Path) -> int:
    return push.main(list(map(str, arguments)), "meshloom push")


def metadata(files: dict[str, bytes]) -> dict[str, Any]:
    return yaml.safe_load(files[CARD].decode().split("---")[1])


def section_of(files: dict[str, bytes], title: str) -> str:
    return files[CARD].decode().split(f"## {title}\n")[1].split("\n## ")[0]


def test_an_adapter_is_pushed_at_the_end_of_its_run_and_opens_from_the_hub(
    hub: Hub, base: Path, tmp_path: Path
) -> None:
    section = {"repository": "tiny", "checkpoints": True}
    model = {"name_or_path": str(base / "final")}
    folder = trained(tmp_path, adapter=LORA, hub=section, model=model)
    result = hub.repositories["me/tiny"]
    assert result.private and len(result.commits) == 2
    local = {path.name: path.read_bytes() for path in (folder / "final").iterdir()}
    local |= {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.glob("checkpoints/step-000003/**/*")
        if path.is_file()
    }
    assert {"adapter_model.safetensors", "checkpoints/step-000003/trainer.json"} <= local.keys()
    assert {name: result.files[name] for name in local} == local
    assert result.files.keys() - local.keys() == {".gitattributes", CARD}
    digest = json.loads(local["checkpoints/step-000003/trainer.json"])["data"]["fingerprint"]
    assert digest in section_of(result.files, "Data")
    assert metadata(result.files)["library_name"] == "peft"
    shows(result.files[CARD].decode(), "machine that trained")
    downloaded = huggingface_hub.snapshot_download("me/tiny", cache_dir=tmp_path / "cache")
    from peft import AutoPeftModelForCausalLM

    tokens = torch.arange(16)[None]
    before, after = (
        AutoPeftModelForCausalLM.from_pretrained(path)(tokens).logits
        for path in (folder / "final", downloaded)
    )
    assert torch.equal(before, after)


def test_the_repository_is_looked_at_before_the_data(hub: Hub, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match="401") as caught:
        trained(
            tmp_path, hub={"repository": "me/tiny"}, data={"path": str(tmp_path / "none.jsonl")}
        )
    assert "none.jsonl" not in str(caught.value) and hub.repositories == {}
    assert not (tmp_path / "runs" / "job" / "config.json").exists()


def test_a_hub_that_is_gone_at_the_end_loses_nothing(hub: Hub, tmp_path: Path, capsys) -> None:
    def gone(method: str, path: str) -> None:
        if "/commit/" in path:
            raise ConnectionError

    hub.before = gone
    with pytest.raises(HubError) as caught:
        own = config(tmp_path, hub={"repository": "me/tiny"})
        trainer.train(own, **OWN)
    folder = tmp_path / "runs" / "own"
    assert caught.value.exit_code == 69
    assert f"`meshloom push {folder}` pushes {folder / 'final'}" in str(caught.value)
    assert len(hub.repositories["me/tiny"].commits) == 1
    hub.before = lambda method, path: None
    (folder / "certificate.json").write_text("{}")
    assert pushed(folder) == 69
    shown = capsys.readouterr().err
    assert "certificate.json: KeyError" in shown and "Nothing is lost" in shown
    (folder / "certificate.json").unlink()
    assert pushed(folder) == 0
    files = hub.repositories["me/tiny"].files
    assert metadata(files) == {"tags": ["meshloom"]}
    assert files["model.safetensors"] == (folder / "final" / "model.safetensors").read_bytes()


def test_parts_of_an_earlier_push_go_and_other_files_stay(hub: Hub, base: Path) -> None:
    earlier = dict.fromkeys(
        (
            *("adapter_config.json", "adapter_model.safetensors", "model-00001-of-2.safetensors"),
            *("model.safetensors.index.json", "checkpoints/step-000009/trainer.json"),
            *("notes.txt", "onnx/config.json"),
        ),
        b"old",
    )
    hub.repositories["me/tiny"] = Repository("me", True, [{".gitattributes": b"", **earlier}])
    assert pushed(base, "--repository", "me/tiny") == 0
    kept = {"notes.txt", "onnx/config.json", "checkpoints/step-000009/trainer.json"}
    assert hub.repositories["me/tiny"].files.keys() & earlier.keys() == kept
    assert pushed(base, "--repository", "me/tiny", "--checkpoints") == 0
    result = hub.repositories["me/tiny"]
    assert result.files.keys() & earlier.keys() == kept - {"checkpoints/step-000009/trainer.json"}
    assert "checkpoints/step-000003/trainer.json" in result.files and len(result.commits) == 3


@pytest.mark.parametrize(
    ("arguments", "token", "code", "keys"),
    [
        (("--repository", "me/new"), "hf_wrong", 64, ("401",)),
        (("--repository", "they/new"), "hf_mine", 64, ("403", "the rights")),
        (("--repository", "they/open", "--public"), "hf_mine", 64, ("403, Forbidden",)),
        (("--repository", "me/open"), "hf_mine", 64, ("it is public", "a private one")),
        (("--repository", "a/b/c"), "hf_mine", 64, ("HFValidationError",)),
        ((), "hf_mine", 64, ("Name it by --repository",)),
        (("--repository", "me/new", "--certificate", "no.json"), "hf_mine", 64, ("no.json",)),
    ],
)  # fmt: skip
def test_what_can_not_be_pushed_is_one_sentence(
    hub: Hub, base: Path, monkeypatch, capsys, arguments, token, code, keys
) -> None:
    hub.repositories |= {"they/open": Repository("they", False), "me/open": Repository("me", False)}
    monkeypatch.setenv("HF_TOKEN", token)
    assert pushed(base, *arguments) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    shows(lines[1], *keys)
    assert {len(result.commits) for result in hub.repositories.values()} == {1}


def test_a_folder_gets_what_the_hub_would_get(hub: Hub, base: Path, tmp_path: Path, capsys) -> None:
    assert pushed(base, "--repository", "me/tiny", "--checkpoints") == 0
    hub.requests.clear()
    target = tmp_path / "me" / "tiny"
    words = (base, "--to", target, "--checkpoints", "--repository", "me/tiny")
    capsys.readouterr()
    assert pushed(*words) == 0 and hub.requests == []
    shows(capsys.readouterr().out, "written: ", "hf upload")
    files = dict(hub.repositories["me/tiny"].files)
    del files[".gitattributes"]
    written = {str(one.relative_to(target)): one for one in target.rglob("*") if one.is_file()}
    assert {name: path.read_bytes() for name, path in written.items()} == files
    assert [path.name for path in target.parent.iterdir()] == ["tiny"]
    assert pushed(*words) == 64
    shows(capsys.readouterr().err, str(target), "already")


def test_a_folder_needs_no_name_and_is_whole_or_not_there(
    base: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    target = tmp_path / "card"
    target.mkdir()

    def full(source: Path, copy: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)
        assert pushed(base, "--to", target) == 74
    assert list(target.iterdir()) == [] and list(tmp_path.iterdir()) == [target]
    assert pushed(base, "--to", target, "--certificate", "no.json") == 64
    assert list(target.iterdir()) == []
    assert pushed(base, "--to", target) == 0
    card = (target / CARD).read_text()
    assert 'from_pretrained("card")' in card and "import transformers" in card
    final = {path.name for path in (base / "final").iterdir()}
    assert {path.name for path in target.iterdir()} == final | {CARD}


def test_without_a_hub_it_is_another_code(hub: Hub, base: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://me:secret@127.0.0.1:9")
    assert pushed(base, "--repository", "me/tiny") == 69
    line = shows(capsys.readouterr().err, "ConnectError", "http://127.0.0.1:9", "--to FOLDER")
    assert "you may write" not in line and "secret" not in line
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pushed(base, "--repository", "me/tiny") == 64
    shows(capsys.readouterr().err, "HF_HUB_OFFLINE is set", "--to FOLDER")


@pytest.mark.parametrize(
    ("status", "content", "kind", "keys"),
    [
        (503, "busy", "text/plain", ("503, busy",)),
        (200, "<html></html>", "text/html", ("not as a Hub",)),
        (200, "{}", "application/json", ("not as a Hub",)),
        (404, "<html></html>", "text/html; charset=utf-8", ("404", "HTML")),
    ],
)
def test_a_server_that_is_no_hub_is_no_lack_of_rights(
    hub: Hub, base: Path, monkeypatch, capsys, status, content, kind, keys
) -> None:
    def other(handler: Handler) -> None:
        handler.send(status, content.encode(), {"Content-Type": kind})

    for method in ("do_GET", "do_POST"):
        monkeypatch.setattr(Handler, method, other)
    assert pushed(base, "--repository", "me/tiny") == 69
    line = shows(capsys.readouterr().err, hub.url, "HF_ENDPOINT", "HTTPS_PROXY", *keys)
    assert "you may write" not in line


@pytest.mark.more
def test_a_hub_that_does_not_answer_is_given_up(hub: Hub, base: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(repository, "SILENCE", 1.0)
    hub.before = lambda method, path: time.sleep(20)
    begun = time.monotonic()
    assert pushed(base, "--repository", "me/tiny") == 69
    assert time.monotonic() - begun < 15 and "Timeout" in capsys.readouterr().err


def test_where_a_run_is_pushed_makes_no_other_run_of_it() -> None:
    section = {"steps": 3, "hub": {"repository": "me/tiny"}}
    assert without_place({"trainer": section}) == {"trainer": {"steps": 3}}


def test_the_run_has_to_have_ended(hub: Hub, base: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "environment.json").write_bytes((base / "environment.json").read_bytes())
    assert pushed(tmp_path, "--repository", "tiny") == 64
    shows(capsys.readouterr().err, "final/", "ended")
    assert hub.repositories == {}


def test_the_card_says_for_which_config_its_certificate_was_made(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "certificate.json")
    request = json.loads((base / "environment.json").read_text())["request"]

    def certified(certificate: Certificate, config: Any) -> str:
        write(certificate, Path(path), config)
        return section_of({CARD: card_of(base, "me/tiny", path)}, "Certificate")

    placed = request | {"trainer": request["trainer"] | {"run": {}, "log": {}}}
    text = certified(PASSED, placed)
    assert "**PASS**" in text
    assert "shard 2" in text
    shows(text, "made for this")
    shows(text, "| loss", "1.0e-08", "1e-05")
    other = {**request, "gradient_clipping": 0.25}
    differs = "what was trained differs in gradient_clipping 0.25 -> "
    assert differs in certified(PASSED, other)
    shows(certified(PASSED, None), "name the config")
    failed = replace(PASSED, first_failure=CheckResult("loss", 0, float("nan"), 1e-5))
    assert "**FAIL**" in certified(failed, request)
    assert "None: `meshloom verify`" in section_of({CARD: card_of(base, "me/tiny")}, "Certificate")
    monkeypatch.chdir(tmp_path)  # where verify writes it, unless it is told another place
    for made_for, shown in ((placed, "It was made for this config."), (other, "None: `meshloom")):
        write(PASSED, Path(path), made_for)
        assert shown in section_of({CARD: card_of(base.resolve(), "me/tiny")}, "Certificate")
    Path(path).write_text("[]")
    with pytest.raises(ConfigError, match=re.escape(path)):
        card_of(base, "me/tiny", path)


@pytest.mark.parametrize("content", ["[]", '{"command": ["train"]}', "{"])
def test_a_damaged_environment_is_a_config_error(base: Path, tmp_path: Path, content: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(base, run)
    (run / "environment.json").write_text(content)
    with pytest.raises(ConfigError, match=r"environment\.json"):
        card_of(run, "me/tiny")


def test_the_card_names_what_is_on_the_hub_alone(base: Path, tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    for name in ("environment.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((base / name).read_bytes())
    sources = [{"path": "HuggingFaceFW/fineweb"}, {"path": str(tmp_path / "own.jsonl")}]
    section = {"model": {"name_or_path": "meta/llama"}, "data": {"sources": sources}}
    (tmp_path / "config.json").write_text(json.dumps({"trainer": section}))
    files = {CARD: card_of(tmp_path, "me/tiny")}
    tags = {"tags": ["meshloom"], "base_model": "meta/llama", "datasets": ["HuggingFaceFW/fineweb"]}
    assert metadata(files) == tags
    assert "| 3 | " in section_of(files, "Loss") and "from `meta/llama`" in files[CARD].decode()
    assert "No checkpoint is left" in section_of(files, "Data")
    environment = json.loads((base / "environment.json").read_text())
    environment["command"] = ["/somewhere/launch/train.py", "--config", "job.json"]
    (tmp_path / "environment.json").write_text(json.dumps(environment))
    ran = section_of({CARD: card_of(tmp_path, "me/tiny")}, "What was run")
    assert "\npython launch/train.py --config job.json\n" in ran


@pytest.mark.more
def test_a_pushed_checkpoint_goes_on_training(hub: Hub, base: Path, tmp_path: Path) -> None:
    assert pushed(base, "--repository", "me/tiny", "--checkpoints") == 0
    downloaded = huggingface_hub.snapshot_download("me/tiny", cache_dir=tmp_path / "cache")
    source = Path(downloaded, "checkpoints", "step-000003")
    job = base.parents[1] / "job.json"
    overrides = ["trainer.steps=4", f"trainer.run.folder={tmp_path}"]
    result = trainer.train(job, resume=source, overrides=overrides, quiet=True)
    assert [record.step for record in result.records] == [4]


def stopped_while_it_uploads(hub: Hub, process: Any, number: int) -> None:
    """Send a signal once a file is on its way, which the Hub never takes."""
    deadline = time.monotonic() + 300
    while not any(method == "PUT" for method, _ in hub.requests):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)


def held(method: str, path: str) -> None:
    if method == "PUT":
        time.sleep(1000)


@pytest.mark.more
def test_a_push_that_is_killed_leaves_the_repository_as_it_was(hub: Hub, base: Path) -> None:
    hub.repositories["me/tiny"] = Repository("me", True, [{"model.safetensors": b"old"}])
    hub.before = held
    words = ("meshloom", "push", base, "--repository", "me/tiny")
    process = start(*words, cold=True, **hub.environment())
    stopped_while_it_uploads(hub, process, signal.SIGKILL)
    process.communicate(timeout=60)
    assert hub.repositories["me/tiny"].files == {"model.safetensors": b"old"}
    hub.before = lambda method, path: None
    assert run(*words, cold=True, **hub.environment()).code == 0
    weights = (base / "final" / "model.safetensors").read_bytes()
    assert hub.repositories["me/tiny"].files["model.safetensors"] == weights
    assert hub.blobs[hashlib.sha256(weights).hexdigest()] == weights


@pytest.mark.more
def test_a_signal_ends_the_push_of_two_ranks_and_the_model_stays(hub: Hub, tmp_path: Path) -> None:
    hub.before = held
    job = write_job(tmp_path, device="cpu", engine="mesh", hub={"repository": "me/tiny"})
    words = ("python", TRAIN, "--processes", "2", "--config", job)
    process = start(*words, cold=True, **hub.environment(), **{MARK: str(tmp_path)})
    try:
        stopped_while_it_uploads(hub, process, signal.SIGTERM)
        output = process.communicate(timeout=100)[0]
        assert ended(str(tmp_path), 30), [one.cmdline() for one in processes(str(tmp_path))]
    finally:
        sweep(str(tmp_path))
    folder = tmp_path / "runs" / "job"
    assert process.returncode == 69, output
    shows(output, "push")
    assert f"meshloom push {folder}" in output
    assert status_files.read_end(folder)["code"] == 69
    assert len(hub.repositories["me/tiny"].commits) == 1
    hub.before = lambda method, path: None
    again = run(*words, cold=True, **hub.environment())
    assert again.code == 0 and f"pushed: {hub.url}/me/tiny" in again.output, again.output
    assert "model.safetensors.index.json" in hub.repositories["me/tiny"].files
    assert status_files.read_end(folder) is None
    hub.requests.clear()
    again = run(*words, cold=True, **hub.environment())
    assert again.code == 0 and "finished: " in again.output and hub.requests == []


@pytest.mark.more
def test_a_finished_run_is_pushed_once_its_config_names_a_repository(
    hub: Hub, tmp_path: Path
) -> None:
    job = write_job(tmp_path, device="cpu", steps=1)
    words = ("meshloom", "train", "--config", job)
    environment = hub.environment()
    assert run(*words, cold=True, **environment).code == 0 and hub.repositories == {}
    hub.before = refused
    failed = run(*words, "trainer.hub.repository=me/tiny", cold=True, **environment)
    assert failed.code == 69 and "finished: " not in failed.output, failed.output
    hub.before = lambda method, path: None
    made_up = run(*words, "trainer.hub.repository=me/tiny", cold=True, **environment)
    assert made_up.code == 0 and "pushed: " in made_up.output, made_up.output
    assert "finished: " in made_up.output
    commits = len(hub.repositories["me/tiny"].commits)
    again = run(*words, "trainer.hub.repository=me/tiny", cold=True, **environment)
    assert again.code == 0 and "pushed: " not in again.output, again.output
    assert len(hub.repositories["me/tiny"].commits) == commits
    other = run(*words, "trainer.hub.repository=me/other", cold=True, **environment)
    assert other.code == 0 and "me/other" in hub.repositories, other.output


def refused(method: str, path: str) -> None:
    if "/commit/" in path:
        raise ConnectionError


@pytest.mark.more
def test_a_signal_while_the_model_is_saved_ends_the_push() -> None:
    with stop_signals() as signals:
        signals.saving()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(HubError):
            signals.saved(HubError())


@pytest.mark.more
def test_a_long_push_is_no_hang(hub: Hub, tmp_path: Path) -> None:
    def slow(method: str, path: str) -> None:
        if method == "PUT":
            time.sleep(45)  # 15 times the patience is 30

    hub.before = slow
    section = {"hub": {"repository": "me/tiny"}, "patience": 2}
    job = write_job(tmp_path, device="cpu", engine="mesh", **section)
    words = ("python", TRAIN, "--processes", "2", "--config", job)
    result = run(*words, cold=True, **hub.environment())
    assert result.code == 0 and f"pushed: {hub.url}/me/tiny" in result.output, result.output
