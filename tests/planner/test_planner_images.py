"""The plan of an image classifier: what it is told of the images, and that ranks take and say what
was planned.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.commands import run
from tests.support.messages import raises, shows
from tests.support.picture_files import write_folder
from tests.support.planned import assert_as_planned, planned, subject_of
from tests.support.training import Case, layout_of
from trainer.config import load
from trainer.engines.devices import DEVICES
from trainer.errors import DataError
from trainer.probes import dispatch_modes
from trainer.tools.planner.cluster import Cluster
from trainer.tools.planner.fakes import pretend
from trainer.tools.planner.from_config import model_on

CLASSES, SIZE = 10, 32
MESH = Case(engine="mesh", clip=1.0, micro_batch=2)
RESNET = ("ResNet", {"block": "Bottleneck", "layers": [1, 1, 1, 1], "width_per_group": 8})
VIT = (
    "VisionTransformer",
    {"patch_size": 8, "num_layers": 4, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24},
)
PUBLISHED = [
    ("resnet50", 4.089e9),
    ("vit_b_16", 17.564e9),
    ("convnext_tiny", 4.456e9),
    ("mobilenet_v2", 0.301e9),
]
CASES = {
    "mesh ddp": replace(MESH, zero_stage=0),
    "mesh zero3, full": replace(MESH, zero_stage=3, recompute="full"),
    "accelerate zero3": replace(MESH, engine="accelerate", zero_stage=3),
    "deepspeed zero2": replace(MESH, engine="deepspeed", zero_stage=2),
    "deepspeed zero3": replace(MESH, engine="deepspeed", zero_stage=3),
    "mesh pipeline": replace(MESH, zero_stage=0, pipeline=2),
    "deepspeed pipeline": replace(MESH, engine="deepspeed", zero_stage=0, pipeline=2),
    "mesh hsdp": replace(MESH, world_size=4, replicate=2, micro_batch=1, zero_stage=3),
}


def classified(case: Case, name: str, arguments: dict[str, Any], together: bool) -> Any:
    from trainer.config import TrainerSection
    from trainer.models.classifiers import Classifier, Images
    from trainer.models.spec import NoWeights
    from trainer.recipes.images.classifier import spec_of
    from trainer.recipes.images.planned import batches_of
    from trainer.recipes.images.task import ImageClassification

    images = Images(tuple(map(str, range(CLASSES))), "RGB", (SIZE, SIZE), (0.0,) * 3, (1.0,) * 3)
    classifier = Classifier(name, arguments)
    spec = spec_of(TrainerSection(), images, classifier).with_weights(NoWeights())
    # what the constructor gives stays on the host, and is made here before anybody counts
    spec.building.constructed("")
    task = ImageClassification(CLASSES, spec.build, spec.blocks)
    spec = spec.tried_on(task.trial([(torch.zeros(3, SIZE, SIZE), 0)] * 2))
    layout = replace(layout_of(case), sync_batch_norm=together)
    return subject_of(case, layout, spec, task, batches_of(images))


def convolutions(num_classes: int = CLASSES, channels: int = 3) -> nn.Module:
    """Of units so small that gloo's own buffers are at no time the most."""
    blocks = [
        nn.Sequential(nn.Conv2d(width, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        for width in (channels, 8, 8, 8)
    ]
    return nn.Sequential(
        *blocks, nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, num_classes))
    )


def resnet(case: Case) -> Any:
    return classified(case, *RESNET, together=False)


def vit(case: Case) -> Any:
    return classified(case, *VIT, together=False)


def own(case: Case) -> Any:
    return classified(case, f"{__name__}:convolutions", {}, together=False)


def synchronised(case: Case) -> Any:
    return classified(case, f"{__name__}:convolutions", {}, together=True)


COMPARED = {
    "mesh ddp": (resnet, synchronised),
    "mesh zero3, full": (vit, synchronised),
    "accelerate zero3": (own,),
    "deepspeed zero2": (resnet,),
    "deepspeed zero3": (vit, own),
    "mesh pipeline": (
        vit,
    ),  # a whole model is tried on the first rank, and on processors counts as its own
    "deepspeed pipeline": (own,),
    "mesh hsdp": (synchronised,),
}


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, id=f"{name}-{kind.__name__}")
        for name, kinds in COMPARED.items()
        for kind in kinds
    ],
)
def test_a_rank_takes_what_was_planned(pools, name, kind):
    assert_as_planned(pools, CASES[name], of=kind)


@pytest.mark.more
def test_what_is_tried_out_is_not_on_the_device():
    """A stage is checked on a whole classifier, on the host: all of its values, gradients and
    stages.
    """
    peaks = planned(CASES["mesh pipeline"], 1, of=vit)[0].peaks
    assert peaks["build"].size < peaks["step 1"].size / 2


def config_of(folder: Path, name: str, **trainer: Any) -> Path:
    path = folder / "config.json"
    section = {
        "task": "image_classification",
        "model": {"name_or_path": name},
        "steps": 3,
        "engine": "mesh",
    } | trainer
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
    path.write_text(
        json.dumps(
            {**sizes, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "trainer": section}
        )
    )
    return path


def plan(path: Path, *arguments: str) -> Any:
    return run("meshloom", "plan", "--config", path, "--gpus", "2", *arguments, timeout=200)


@pytest.mark.first("by its name")
@pytest.mark.parametrize("where", ["by its name", "as the config says", "as it is"])
def test_the_command_knows_the_images(tmp_path, where):
    """A known data set is not looked for, far less downloaded; a folder that is here is looked
    at.
    """
    name, small = f"{__name__}:convolutions", write_folder(tmp_path / "here", size=(16, 16))
    grey = {
        "model": {"name_or_path": name, "config": {"channels": 1}},
        "data": {"path": "far/away"},
    }
    trainer, message = {
        "by its name": ({"data": {"path": "cifar10"}}, "3 x 32 x 32, 10 classes"),
        "as the config says": (
            {**grey, "images": {"size": [24, 32], "classes": 7, "mode": "L"}},
            "1 x 24 x 32, 7 classes",
        ),
        "as it is": ({"data": {"path": str(small)}}, "3 x 16 x 16, 3 classes"),
    }[where]
    result = plan(config_of(tmp_path, name, **trainer))
    assert result.code == 0, result.output
    shows(result.output, "images", f"{message}")
    assert "images/s" in result.output, result.output


@pytest.mark.more
@pytest.mark.parametrize(
    "changes", [["pipeline.stages=2"], ["zero_optimization.stage=3"]], ids=["pipeline", "zero3"]
)
def test_the_command_plans_what_torchvision_has(tmp_path, changes):
    """A vision transformer has parameters that only its constructor fills; a layout is checked on
    its real values.
    """
    path = config_of(tmp_path, "VisionTransformer", images={"size": 32, "classes": 10})
    model = json.dumps({**VIT[1], "image_size": 32})
    result = plan(path, *changes, f"trainer.model.config={model}")
    assert result.code == 0, result.output


@pytest.mark.more
@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({"data": {"path": "HERE", "evaluation_path": "cifar10"}}, "3 x 16 x 16, 3 classes"),
        (
            {"data": {"path": "HERE", "format": "hub"}, "images": {"size": 24, "classes": 5}},
            "3 x 24 x 24, 5 classes",
        ),
        (
            {"model": {"name_or_path": "FOLDER"}, "images": {"size": 24, "classes": 5}},
            "3 x 24 x 24, 5 classes",
        ),
        (
            {
                "model": {"name_or_path": "resnet18", "config": {"weights": "DEFAULT"}},
                "data": {"path": "mnist"},
            },
            "1 channel",
        ),
    ],
    ids=["evaluation", "hub", "folder", "weights"],
)
def test_nothing_is_downloaded_or_read(tmp_path, monkeypatch, trainer, said):
    """Nor are weights needed beside what describes a trained classifier."""
    from trainer.data.images import image_sets

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a download")

    monkeypatch.setattr(image_sets, "_torchvision", never)
    monkeypatch.setattr("datasets.load_dataset", never)
    monkeypatch.setattr("torch.hub.load_state_dict_from_url", never)
    (tmp_path / "final").mkdir()
    own = {"name": f"{__name__}:convolutions", "arguments": {}}
    (tmp_path / "final" / "module.json").write_text(json.dumps({"model": own}))
    text = json.dumps(trainer).replace("HERE", str(write_folder(tmp_path / "here", size=(16, 16))))
    trainer = json.loads(text.replace("FOLDER", str(tmp_path / "final")))
    config = load(
        config_of(tmp_path, f"{__name__}:convolutions", **trainer), ["train_batch_size=16"]
    )
    try:
        assert said in model_on(config, Cluster(1, 2, DEVICES["h100-80gb"])).workload.sample.kind
    except DataError as error:
        assert said in str(error)


@pytest.mark.more
def test_less_is_proposed_where_it_does_not_fit(tmp_path):
    path = config_of(
        tmp_path, f"{__name__}:convolutions", data={"path": "cifar10"}, images={"size": 256}
    )
    device = "memory=2.2GB,peak=1TFLOPS,bandwidth=1TB/s,link=1GB/s"
    result = plan(path, "--propose", "--device", device, "train_micro_batch_size_per_gpu=8")
    assert result.code == 1 and "propose 1. fits" in result.output, result.output
    assert "+ train_micro_batch_size_per_gpu: " in result.output, result.output


@pytest.mark.parametrize(("name", "products"), PUBLISHED)
def test_flops_are_those_that_torchvision_publishes(tmp_path, name, products):
    """Products of a forward pass (torchvision's tables of weights), two FLOPs each; twice as many
    go back.

    But none to the images.
    """
    config = load(config_of(tmp_path, name, images={"size": 224, "classes": 1000}))
    sample = model_on(config, Cluster(1, 1, DEVICES["h100-80gb"])).workload.sample
    assert 0.96 < sample.flops / (6 * products) < 1.0


def test_a_loop_that_waits_for_a_value_ends(monkeypatch):
    """Rejection sampling, say: a pretended value never changes."""
    monkeypatch.setattr(dispatch_modes, "MOST_READS", 50)
    with raises(RuntimeError, "loop waits"), pretend.pretending(0, 2, 2):
        drawn = torch.zeros(4).normal_()
        while (drawn > 1).any():
            drawn = drawn.normal_()


def test_truncated_normals_are_drawn_without_end(monkeypatch):
    monkeypatch.setattr(dispatch_modes, "MOST_READS", 50)
    with pretend.pretending(0, 2, 2):
        nn.init.trunc_normal_(torch.empty(64, 64))
