"""SeqNet on FashionMNIST's own files (small ones of the format, as there may be no network): as a
tutorial's loop, and by examples/fashion_mnist.json as DDP and in two stages.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, metrics, run, train
from tests.support.picture_files import write_fashion_mnist

PAGE = ROOT / "docs" / "from_a_tutorial.md"
LAYOUTS = {
    "one process": ["--processes", "1"],
    "DDP": ["--processes", "2"],
    "two stages": ["--processes", "2", "pipeline.stages=2"],
}
Numbers = tuple[list[float], float]


@pytest.fixture(scope="module")
def by_the_loop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Numbers]:
    """The folder of the data, and the losses and the accuracy of the tutorial's loop."""
    root = tmp_path_factory.mktemp("data")
    write_fashion_mnist(root)
    result = run(sys.executable, "examples/fashion_mnist.py", "--root", root, "--epochs", "1")
    assert result.code == 0, result.output
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", result.output)]
    [accuracy] = re.findall(r"accuracy (\S+)%", result.output)
    return root, (losses, float(accuracy) / 100)


@pytest.mark.more
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_config_has_the_losses_and_the_accuracy_of_the_loop(tmp_path, by_the_loop, layout):
    mlflow = pytest.importorskip("mlflow")
    root, (losses, accuracy) = by_the_loop
    options = [f"trainer.images.root={root}", f"trainer.run.folder={tmp_path}"]
    options += ["trainer.run.name=a", "trainer.epochs=1", "trainer.log.every=1"]
    result = train("--config", "examples/fashion_mnist.json", *options, *LAYOUTS[layout])
    assert result.code == 0, result.output
    rows = metrics(tmp_path / "a")
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(losses, abs=2e-6)
    assert len(losses) == 10 and 0.5 < accuracy < 0.9
    assert rows[-1]["evaluation_accuracy"] == accuracy
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'a' / 'mlflow.db'}")
    [logged] = client.search_runs(
        [results.experiment_id for results in client.search_experiments()]
    )
    assert logged.data.metrics["evaluation_accuracy"] == accuracy
    assert logged.data.metrics["loss"] == pytest.approx(losses[-1], abs=2e-6)


def test_the_page_shows_these_losses(by_the_loop):
    """The first table of docs/from_a_tutorial.md, its loop and JSON, which are those of the files.

    test_ladder.py has the rest.
    """
    _, (losses, accuracy) = by_the_loop
    page, _, _ = PAGE.read_text().partition("## Tutorials to the letter")
    rows = re.findall(r"^\| (\d+) \| (\S+) \| (\S+) \|$", page, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == list(range(1, 11))
    for _, theirs, ours in rows:
        assert float(theirs) == pytest.approx(float(ours), abs=2e-6)
    assert [float(theirs) for _, theirs, _ in rows] == pytest.approx(losses, abs=1e-4)
    assert f"{accuracy:.1%}" in page
    model, loop = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    source = (ROOT / "examples" / "fashion_mnist.py").read_text()
    own = [line.strip() for line in source.splitlines()]
    assert [line for line in (model + loop).splitlines() if line.strip() not in own] == []
    [config] = re.findall(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert config == (ROOT / "examples" / "fashion_mnist.json").read_text()
