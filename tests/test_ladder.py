"""The ladder: each rung as a user runs it, at a tiny size, beside one device; small enough to read,
and alone.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, run

LADDER = ROOT / "examples" / "ladder"
SCRIPTS = sorted(path for path in LADDER.glob("*.py") if path.name[0].isdigit())
LAST = re.compile(
    r"loss after (\d+) steps (\d+\.\d{6}), difference from one device (\d\.\de[+-]\d\d)"
)
IMAGES = ("--steps", "1", "--batch", "4")

RUNGS: dict[str, tuple[str, ...]] = {
    "one device": ("01_one_device",),
    "DataParallel": ("02_data_parallel", "--devices", "3"),
    "DDP, torchrun": ("03_ddp", "--ranks", "3"),
    "DDP, spawn": ("03_ddp", "--by", "spawn"),
    "DDP, trainer": ("03_ddp", "--by", "meshloom"),
    "sampler": ("03_distributed_sampler", "--ranks", "4"),
    "ToyModel": ("04_toy_model",),
    "SeqNet": ("04_two_devices", "--model", "seqnet", "--devices", "3"),
    "ResNet-50": ("04_two_devices", "--model", "resnet50", *IMAGES),
    "pipelined": ("05_pipelined", "--repeats", "2", "--splits", "1", "2", "--split", "2", *IMAGES),
    "pipelined by stages": (
        *("05_pipelined_by_stages", "--schedule", "1F1B", "--split", "2"),
        *("--splits", "2", *IMAGES),
    ),
    "DDP x two devices": ("06_ddp_two_devices",),
    "ZeRO-1": ("07_zero", "--stage", "1"),
    "ZeRO-2, offload": ("07_zero", "--stage", "2", "--offload"),
    "ZeRO-3": ("07_zero", "--stage", "3"),
    "ZeRO-3, bare": ("07_zero", "--stage", "3", "--by", "deepspeed"),
    "import": ("07_from_deepspeed",),
    "tensor parallel": ("08_tensor_parallel",),
    "sequence parallel": ("08_sequence_parallel",),
    "FSDP": ("09_fsdp_hsdp", "--ranks", "3"),
    "HSDP": ("09_fsdp_hsdp", "--mesh", "2", "2"),
    "HSDP, 2 x 4": ("09_fsdp_hsdp", "--mesh", "2", "4"),
    "HSDP, trainer": ("09_fsdp_hsdp", "--mesh", "2", "2", "--by", "meshloom"),
    "traffic of FSDP": ("09_traffic", "--ranks", "4"),
    "traffic of HSDP": ("09_traffic", "--mesh", "2", "2"),
    "FSDP in DDP": ("09_hybrid_inside_ddp",),
    "pipeline x ZeRO-3": ("10_pipeline_zero3",),
    "3-D": ("10_three_axes", "--steps", "1"),
    "recomputation": ("11_activation_checkpointing", "--blocks", "2"),
    "MLflow": ("12_mlflow",),
    "own module": ("13_own_module",),
}
DOCUMENTED: dict[str, str] = {
    "01_one_device.py": "one device",
    "02_data_parallel.py": "DataParallel",
    "03_ddp.py --ranks 4": "DDP, torchrun",
    "03_ddp.py --by spawn": "DDP, spawn",
    "03_ddp.py --by meshloom": "DDP, trainer",
    "03_distributed_sampler.py --ranks 4": "sampler",
    "04_toy_model.py": "ToyModel",
    "04_two_devices.py --model resnet50": "ResNet-50",
    "04_two_devices.py --model seqnet --devices 3": "SeqNet",
    "05_pipelined.py": "pipelined",
    "05_pipelined.py --batch 120 --splits 1 3 5 8 10 12 20 40 60": "pipelined",
    "05_pipelined_by_stages.py --schedule 1F1B": "pipelined by stages",
    "05_pipelined_by_stages.py --batch 120 --split 20 --splits 10 20 40": "pipelined by stages",
    "06_ddp_two_devices.py": "DDP x two devices",
    "07_zero.py --stage 3 --by deepspeed": "ZeRO-3, bare",
    "07_from_deepspeed.py": "import",
    "08_tensor_parallel.py": "tensor parallel",
    "08_sequence_parallel.py": "sequence parallel",
    "09_fsdp_hsdp.py --ranks 2": "FSDP",
    "09_fsdp_hsdp.py --mesh 2 4": "HSDP, 2 x 4",
    "09_fsdp_hsdp.py --mesh 2 2 --by meshloom": "HSDP, trainer",
    "09_traffic.py --ranks 4": "traffic of FSDP",
    "09_traffic.py --mesh 2 2": "traffic of HSDP",
    "09_hybrid_inside_ddp.py": "FSDP in DDP",
    "10_pipeline_zero3.py": "pipeline x ZeRO-3",
    "10_three_axes.py": "3-D",
    "11_activation_checkpointing.py": "recomputation",
    "12_mlflow.py --data DIR": "MLflow",
    "13_own_module.py": "own module",
}
"""What follows `python examples/ladder/` in a docstring -> the rung that is its smallest form."""


SAME_MODEL = (
    *("02_data_parallel", "03_ddp", "06_ddp_two_devices", "07_zero", "08_tensor_parallel"),
    *("08_sequence_parallel", "09_fsdp_hsdp", "10_pipeline_zero3", "11_activation_checkpointing"),
)
"""The scripts whose loss is that of `01_one_device.py`."""


def climb(folder: Path, script: str, *arguments: str) -> tuple[float, float, str]:
    """Run a copy of one script in an empty folder; its loss, its difference from one device, and
    what it printed.
    """
    shutil.copy(LADDER / f"{script}.py", folder)
    result = run(sys.executable, folder / f"{script}.py", *arguments, PYTHONPATH=str(ROOT))
    assert result.code == 0, result.output
    lines = [
        line for line in result.output.splitlines() if line.startswith(("loss after", "devices: "))
    ]
    found = LAST.fullmatch(lines[-1])
    assert found and lines[-2].startswith("devices: "), result.output
    return float(found[2]), float(found[3]), result.output


@pytest.fixture(scope="module")
def first_rung(tmp_path_factory: pytest.TempPathFactory) -> float:
    loss, *_ = climb(tmp_path_factory.mktemp("first"), "01_one_device")
    return loss


@pytest.mark.parametrize("arguments", RUNGS.values(), ids=RUNGS.keys())
def test_a_rung_has_the_loss_of_one_device(tmp_path, first_rung, arguments):
    loss, difference, output = climb(tmp_path, *arguments)
    assert difference <= 1e-5, output
    if arguments[0] in SAME_MODEL:
        assert loss == pytest.approx(first_rung, abs=2e-5), output


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
        "trainer",
    }
    assert {module.split(".")[0] for module in modules} <= known


def test_what_a_rung_costs_is_measured():
    """Of ranks that the script starts itself: DDP reduces each gradient once, and Adam keeps two of
    each parameter.
    """
    spec = importlib.util.spec_from_file_location("climb", LADDER / "climb.py")
    climb = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(climb)
    found = climb.run("03_ddp", "--steps", "4")
    assert "reason" not in found, found
    assert found["ranks"] == 2 and found["communicated"] == {"all_reduce": found["parameters"]}
    assert (
        found["gradients"] == found["parameters"]
        and 2 <= found["optimizer"] / found["parameters"] < 2.01
    )
    assert found["activations"] > found["parameters"] and found["seconds"] > 0


def test_which_names_configs_that_are_there():
    text = (ROOT / "docs" / "which.md").read_text()
    assert (named := re.findall(r"ds_configs/(\w+)\.json", text))
    names = set(named) | set(re.findall(r"`((?:zero|hsdp|fsdp|ddp|pipeline_|megatron_)\w*)`", text))
    assert names <= {path.stem for path in (ROOT / "ds_configs").glob("*.json")}
