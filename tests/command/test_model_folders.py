"""Folders of models that others made, hostile or broken: no command runs, hangs or crashes."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command.language_model import plain_model, tokenizer, write_task
from tests.support.messages import shows
from trainer.command import checkpoint, merge, use
from trainer.errors import ConfigError, MeshloomError

TEMPLATE = "{% for turn in messages %}{{ turn.content }} {% endfor %}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    plain_model().save_pretrained(path)
    tokenizer(chat_template=TEMPLATE).save_pretrained(path)
    return path


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture(autouse=True)
def ends_soon() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(90)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def changed(name: str, **values: Any) -> Callable[[Path], None]:
    """Change values of a JSON file."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(content | values))

    return change


def written(name: str, content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(content)

    return write


def fifo(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def a_socket(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    here = os.getcwd()
    os.chdir(folder)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as listens:
        listens.bind("model.safetensors")
    os.chdir(here)


def a_device(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"a": Runs(folder / "ran")}, folder / "pytorch_model.bin")


def an_index(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(content)

    return write


def header(folder: Path) -> None:
    """Weights whose header is longer than the file."""
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


def own_code(folder: Path) -> None:
    changed("config.json", model_type="own", auto_map={"AutoConfig": "own.Config"})(folder)
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(folder / 'ran')!r})\n")


def splits_by(pattern: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        split = {"type": "Split", "pattern": {"Regex": pattern}}
        content["pre_tokenizer"] = split | {"behavior": "Isolated", "invert": False}
        path.write_text(json.dumps(content))

    return change


# what is done to the folder, and a key word of what is said of it
READ: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights that are a pipe": (fifo("model.safetensors"), "model.safetensors: "),
    "weights that are a socket": (a_socket, "model.safetensors: "),
    "weights that are a device": (a_device, "model.safetensors: "),
    "a config that is a pipe": (fifo("config.json"), "config.json: "),
    "a tokenizer that is a pipe": (fifo("tokenizer.json"), "tokenizer.json: "),
    "an old pickle that is a pipe": (fifo("pytorch_model.bin"), "pytorch_model.bin: "),
    "an index of a list": (an_index("[]"), "index.json: "),
    "an index without a map": (an_index("{}"), "weight_map"),
    "an index of another folder": (an_index('{"weight_map": {"a": "../b"}}'), "index.json: "),
    "an index of what is not there": (
        an_index('{"weight_map": {"a": "b.safetensors"}}'),
        "b.safetensors",
    ),
    "10^7 layers": (
        changed("config.json", num_hidden_layers=10**7, layer_types=None),
        "num_hidden_layers",
    ),
    "10^7 experts": (changed("config.json", num_local_experts=10**7), "num_local_experts"),
    "layers below zero": (changed("config.json", num_hidden_layers=-1, layer_types=None), "model"),
    "no heads": (changed("config.json", num_attention_heads=0), "model"),
    "a config of a list": (written("config.json", "[]"), "config.json: "),
    "half a config": (written("config.json", '{"model_type": '), "config.json: "),
    "a deep config": (written("config.json", "[" * 10**6), "config.json: "),
    "a kernel to fetch": (changed("config.json", attn_implementation="a/kernel"), "a/kernel"),
    "code of its own": (own_code, "model"),
    "settings of a list": (written("tokenizer_config.json", "[]"), "tokenizer_config.json: "),
}
WEIGHED = {
    "a hostile pickle": (a_pickle, "a pickle that does more"),
    "a long header": (header, "model"),
    "10^12 words": (changed("config.json", vocab_size=10**12), "parameters"),
    "wide layers": (changed("config.json", intermediate_size=10**9), "parameters"),
    "a text as width": (changed("config.json", hidden_size="x"), "model"),
}
WRITES = {
    "a regex that never ends": splits_by(r"(x+x+)+y"),
    "a regex that is none": splits_by("("),
    "a tokenizer of a list": written("tokenizer.json", "[]"),
}


def code_of(command: str, folder: Path) -> int:
    """Run a command on a folder; return its exit code."""
    out = str(folder.parent / "out")
    text = "x" * 40
    if command == "generate":
        return use.main([str(folder), "--prompt", text, "--tokens", "2"], "meshloom generate")
    if command == "chat":
        return use.main([str(folder), "--tokens", "2"], "meshloom chat")
    if command == "import":
        try:
            checkpoint._copy_model_files(str(folder), folder.parent)
        except MeshloomError as error:
            print(error.render(), file=sys.stderr)
            return error.exit_code
        return 0
    adapter = folder.parent / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return merge.main([str(adapter), out, "--base", str(folder)], "meshloom merge")


@pytest.mark.parametrize("command", ["generate", "merge", "import"])
@pytest.mark.parametrize("kind", READ)
def test_a_folder_that_is_broken_is_one_sentence(folder, capfd, monkeypatch, command, kind):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    change, words = READ[kind]
    change(folder)
    assert code_of(command, folder) in (64, 65)
    shown = capfd.readouterr().err
    assert "error:\n" in shown and words in shown.partition("error:\n")[2], shown
    assert "Traceback" not in shown and not (folder / "ran").exists()


@pytest.mark.parametrize("kind", WEIGHED)
def test_weights_that_do_not_fit_are_one_sentence(folder, capfd, kind):
    change, words = WEIGHED[kind]
    change(folder)
    assert code_of("generate", folder) == 64
    shown = capfd.readouterr().err
    assert words in shown.partition("error:\n")[2], shown
    assert "Traceback" not in shown and not (folder / "ran").exists()
    assert "weights_only" not in shown


@pytest.mark.parametrize("kind", WRITES)
def test_a_tokenizer_that_fails_is_one_sentence(folder, capfd, kind):
    WRITES[kind](folder)
    assert code_of("generate", folder) in (64, 65)
    shown = capfd.readouterr().err
    assert "error:\n" in shown and "Traceback" not in shown, shown


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10**10 }}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{{ 'xxxxxxxx' }}{% endfor %}{% endfor %}",
        "{% set t = namespace(x='x' * 1000) %}"
        "{% for a in range(30) %}{% set t.x = t.x + t.x %}{% endfor %}{{ t.x }}",
    ],
    ids=["memory", "length", "doubling"],
)
def test_a_template_has_the_bounds_that_it_has_in_training(folder, capfd, monkeypatch, template):
    import resource

    monkeypatch.setattr("trainer.models.door.SECONDS", 2.0)
    tokenizer(chat_template=template).save_pretrained(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("w6\n"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert code_of("chat", folder) == 64
    shows(capfd.readouterr().err, "ends soon")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**21  # 2 GiB


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval")
def test_a_template_has_them_in_an_evaluation_too(folder, tmp_path, capfd):
    tokenizer(chat_template="{{ 'x' * 10**10 }}").save_pretrained(folder)
    task = str(write_task(tmp_path, [("w5", ["w6", "w7"], 0)]))
    words = [str(folder), "--tasks", task, "--chat-template"]
    assert use.main(words, "meshloom evaluate") == 64
    shows(capfd.readouterr().err, "ends soon")


def test_the_base_of_an_adapter_passes_the_same_door(folder, tmp_path):
    import trainer

    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    assert trainer.open(tmp_path / "adapter") is not None
    changed("config.json", attn_implementation="a/kernel")(folder)
    with pytest.raises(ConfigError, match="a/kernel"):
        trainer.open(tmp_path / "adapter")
    fifo("model.safetensors")(folder)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        trainer.open(tmp_path / "adapter")
    fifo("adapter_model.safetensors")(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"):
        trainer.open(tmp_path / "adapter")


@pytest.mark.parametrize("content", ["", "[]", "7", '{"model": 7}', '{"module": 7}', "{}"])
def test_a_classifier_that_says_nothing_of_itself_is_one_sentence(tmp_path, content):
    import trainer
    from trainer.models.classifiers import DESCRIPTION

    (tmp_path / DESCRIPTION).write_text(content)
    for opens in (trainer.open, trainer.open_classifier):
        with pytest.raises(ConfigError):
            opens(tmp_path)
