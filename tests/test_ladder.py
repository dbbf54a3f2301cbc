"""The ladder: each rung as a user runs it, at a tiny size, beside one device; small enough to read,
and alone.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.support.commands import ROOT, run
from tests.support.ladder import DOCUMENTED, RUNGS
from tests.support.picture_files import write_fashion_mnist

LADDER = ROOT / "examples" / "ladder"
SCRIPTS = sorted(path for path in LADDER.glob("*.py") if path.name[0].isdigit())
LAST = re.compile(
    r"loss after (\d+) (?:steps|epochs) (\d+\.\d{6}), difference from one device (\d\.\de[+-]\d\d)"
)
EPOCH = re.compile(r"^Epoch \[(\d+)/(\d+)\], Loss: (\S+)$", re.MULTILINE)
SCORE = re.compile(r"^(the loop|Meshloom): loss (\S+), accuracy (\S+)%$", re.MULTILINE)


SAME_MODEL = (
    *("02_data_parallel", "03_ddp", "06_ddp_two_devices", "07_zero", "08_tensor_parallel"),
    *("08_sequence_parallel", "09_fsdp_hsdp", "10_pipeline_zero3", "11_activation_checkpointing"),
)
"""The scripts whose loss is that of `01_one_device.py`."""


ON_IMAGES = ("04_seqnet", "12_mlflow")
"""The scripts that train on FashionMNIST."""


def climb(
    folder: Path, script: str, *arguments: str, images: int = 400
) -> tuple[float, float, str]:
    """Run a copy of one script in an empty folder; its loss, its difference from one device, and
    what it printed.
    """
    shutil.copy(LADDER / f"{script}.py", folder)
    if script in ON_IMAGES:
        write_fashion_mnist(folder, images)
        arguments = (*arguments, "--data", str(folder))
    cold = script == "12_mlflow"  # what is pickled names the module that runs
    command = [sys.executable, folder / f"{script}.py", *arguments]
    result = run(*command, cold=cold, PYTHONPATH=str(ROOT))
    assert result.code == 0, result.output
    lines = [
        line for line in result.output.splitlines() if line.startswith(("loss after", "devices: "))
    ]
    results = LAST.fullmatch(lines[-1])
    assert results and lines[-2].startswith("devices: "), result.output
    return float(results[2]), float(results[3]), result.output


@pytest.fixture(scope="module")
def first_rung(tmp_path_factory: pytest.TempPathFactory) -> float:
    loss, *_ = climb(tmp_path_factory.mktemp("first"), "01_one_device")
    return loss


@pytest.mark.first("one device", "DataParallel", "DDP, torchrun", "sampler", "tensor parallel")
@pytest.mark.parametrize("arguments", RUNGS.values(), ids=RUNGS.keys())
def test_a_rung_has_the_loss_of_one_device(tmp_path, first_rung, arguments):
    loss, difference, output = climb(tmp_path, *arguments)
    assert difference <= 1e-5, output
    if arguments[0] in SAME_MODEL:
        assert loss == pytest.approx(first_rung, abs=2e-5), output


def beside_meshloom(output: str) -> tuple[list[str], list[str]]:
    """Return the lines at the ends of epochs, one by the loop and one by Meshloom for each."""
    lines = [match[0] for match in EPOCH.finditer(output)]
    epochs = int(EPOCH.findall(output)[0][1])
    return lines[:epochs], lines[epochs : 2 * epochs]


@pytest.mark.more
@pytest.mark.parametrize("rung", ["DataParallel, saved", "SeqNet"])
def test_the_loop_and_meshloom_show_the_same_lines(tmp_path, rung):
    """Meshloom's are those of its console."""
    _, _, output = climb(tmp_path, *RUNGS[rung])
    ours, theirs = beside_meshloom(output)
    assert ours == theirs and len(ours) > 1
    if rung == "SeqNet":
        scores = SCORE.findall(output)
        assert scores[0][2] == scores[1][2]
        assert float(scores[0][1]) == pytest.approx(float(scores[1][1]), abs=1e-5)


@pytest.mark.more
def test_mlflow_has_the_same_of_the_loop_and_of_meshloom(tmp_path):
    pytest.importorskip("mlflow")
    _, _, output = climb(tmp_path, *RUNGS["MLflow"])
    (_, theirs, accuracy), (_, ours, own) = SCORE.findall(output)
    assert float(theirs) == pytest.approx(float(ours), abs=1e-5) and accuracy == own
    assert "the same predictions: True" in output and len(EPOCH.findall(output)) == 2


LETTER = (ROOT / "docs" / "from_a_tutorial.md").read_text().partition("## Tutorials to the letter")


@pytest.mark.more
def test_the_page_has_the_lines_of_the_script():
    own = {line.strip() for line in (LADDER / "04_seqnet.py").read_text().splitlines()}
    blocks = re.findall(r"^```python\n(.*?)^```", LETTER[2], re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    lines = {line.strip() for block in blocks for line in block.splitlines()}
    assert lines - own == {""}


@pytest.mark.more
@pytest.mark.parametrize("divided", ["255", "1"])
def test_the_page_shows_what_dividing_twice_costs(tmp_path, divided):
    """Ten epochs of float32 multiply what another processor rounds otherwise."""
    _, _, output = climb(tmp_path, "04_seqnet", "--divide", divided, images=1000)
    [row] = re.findall(rf"^\| 255 and {divided} \|(.*)\|$", LETTER[2], re.MULTILINE)
    loop, ours, right, ours_right = (cell.strip() for cell in row.split("|"))
    (_, loss, accuracy), (_, own, own_accuracy) = SCORE.findall(output)
    assert float(loss) == pytest.approx(float(loop), rel=0.02)
    assert float(own) == pytest.approx(float(ours), rel=0.02)
    assert float(accuracy) == pytest.approx(float(right.rstrip("%")), abs=3)
    assert float(own_accuracy) == pytest.approx(float(ours_right.rstrip("%")), abs=3)
    if divided == "255":
        shown = re.findall(r"^\| (\d+) \| (\S+) \| (\S+) \|$", LETTER[2], re.MULTILINE)
        assert [int(epoch) for epoch, _, _ in shown] == list(range(1, 11))
        for lines, column in zip(beside_meshloom(output), (2, 1), strict=True):
            results = [float(EPOCH.match(line)[3]) for line in lines]
            assert [float(row[column]) for row in shown] == pytest.approx(results, rel=0.02)


@pytest.mark.more
@pytest.mark.parametrize(
    "script", ["02_data_parallel_saved", "03_ddp", "09_fsdp_hsdp", "09_traffic", "12_mlflow"]
)
def test_there_is_a_rank_for_each_gpu(monkeypatch, script):
    if script == "12_mlflow":
        pytest.importorskip("mlflow")
    monkeypatch.setattr(sys, "argv", [script])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert runpy.run_path(str(LADDER / f"{script}.py"))["args"].ranks == 3
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert runpy.run_path(str(LADDER / f"{script}.py"))["args"].ranks == 2


@pytest.mark.more
def test_ddp_takes_one_device_in_a_process(tmp_path):
    """As `06_ddp_two_devices.py` says; several were taken up to PyTorch 1.8."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="device_ids"):
            torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), device_ids=[0, 1])
    finally:
        torch.distributed.destroy_process_group()


def test_a_documented_command_has_a_smallest_form_of_its_script():
    for command, rung in DOCUMENTED.items():
        assert command.split(".")[0] == RUNGS[rung][0]


def test_every_script_is_a_rung():
    assert {script for script, *_ in RUNGS.values()} == {path.stem for path in SCRIPTS}
    assert sorted({path.name[:2] for path in SCRIPTS}) == [
        f"{number:02}" for number in range(1, 14)
    ]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_rung_is_a_screen_and_stands_alone(path):
    """120 lines beside its docstring, blank lines and imports, none of those of a sibling; nothing
    private, and no statement that assigns several values at once for want of a line.
    """
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    after = text.splitlines()[tree.body[0].end_lineno :]
    assert (
        sum(bool(line.strip()) and not line.startswith(("import ", "from ")) for line in after)
        <= 120
    )
    private = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr)
    ]
    assert not private
    packed = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(value, ast.Call) for value in node.value.elts)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    ]
    assert not packed
    modules = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    known = {
        *sys.stdlib_module_names,
        "torch",
        "torchvision",
        "deepspeed",
        "mlflow",
        "safetensors",
        "tokenizers",
        "transformers",
        "meshloom",
    }
    assert {module.split(".")[0] for module in modules} <= known


@pytest.mark.more
def test_what_a_rung_costs_is_measured():
    """Of ranks that the script starts itself: DDP reduces each gradient once, and Adam keeps two of
    each parameter.
    """
    spec = importlib.util.spec_from_file_location("climb", LADDER / "climb.py")
    climb = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(climb)
    result = climb.run("03_ddp", "--steps", "4")
    assert "reason" not in result, result
    assert result["ranks"] == 2 and result["communicated"] == {"all_reduce": result["parameters"]}
    assert (
        result["gradients"] == result["parameters"]
        and 2 <= result["optimizer"] / result["parameters"] < 2.01
    )
    assert result["activations"] > result["parameters"] and result["seconds"] > 0


def test_which_names_configs_that_are_there():
    text = (ROOT / "docs" / "which.md").read_text()
    assert (named := re.findall(r"ds_configs/(\w+)\.json", text))
    names = set(named) | set(re.findall(r"`((?:zero|hsdp|fsdp|ddp|pipeline_|megatron_)\w*)`", text))
    assert names <= {path.stem for path in (ROOT / "ds_configs").glob("*.json")}
