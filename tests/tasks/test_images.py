"""Image classification by the very command: learning, accuracy, resuming, other engines, what a run
leaves.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from tests.support.commands import ROOT, Result, metrics, train
from tests.support.messages import raises, shows, shows_each
from tests.support.picture_files import write_folder
from trainer.errors import ConfigError
from trainer.models import classifiers
from trainer.models.classifiers import Classifier, Images, chain_of
from trainer.models.materialise import materialise
from trainer.models.own import module

VIT = {
    "patch_size": 4,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 16,
    "mlp_dim": 24,
    "dropout": 0.1,
}
RESNET = {"block": "BasicBlock", "layers": [1, 1, 1, 1]}


def job(folder: Path, model: dict[str, Any] | None = None, **trainer: Any) -> Path:
    data = (
        write_folder(folder / "pictures", 36, size=(8, 8))
        if not (folder / "pictures").exists()
        else folder / "pictures"
    )
    config = {
        "train_batch_size": 12,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "trainer": {
            "task": "image_classification",
            "model": model or {"name_or_path": "VisionTransformer", "config": VIT},
            "data": {"path": str(data), "evaluation_fraction": 0.2},
            "images": {"augment": {"crop_padding": 1, "flip": 0.5}},
            "steps": 4,
            "seed": 3,
            "run": {"folder": str(folder / "runs")},
            "log": {"every": 1},
            "checkpoint": {"every": 2},
        }
        | trainer,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(config))
    return path


def run(path: Path, name: str, *overrides: str) -> Result:
    result = train("--config", path, f"trainer.run.name={name}", *overrides)
    assert result.code == 0, result.output
    return result


def numbers(folder: Path) -> list[tuple[float, ...]]:
    """The losses of each step; of evaluations loss and accuracy."""
    names = ("loss", "evaluation_loss", "evaluation_accuracy")
    return [tuple(line[name] for name in names if name in line) for line in metrics(folder)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for path in folder.glob("*.safetensors")
        for name, value in load_file(path).items()
    }


@pytest.mark.more
def test_a_run_resumes_bit_for_bit_and_leaves_what_torchvision_opens(tmp_path):
    from torchvision.models import VisionTransformer

    import trainer

    path, runs = job(tmp_path), tmp_path / "runs"
    result = run(path, "whole", "trainer.images.workers=1")
    shows(result.output, "29 colour images", "8 x 8, 3", "classes, 7 held")
    shows(result.output, "augmented", "crop_padding 1, flip 0.5")
    shows(result.output, "1 workers", "rank")
    assert (
        "accuracy" in result.output
        and "img/s" in result.output
        and "meshloom.open_classifier" in result.output
    )
    run(path, "parts", "trainer.steps=2")
    again = train("--config", path, "trainer.run.name=parts", "--resume", "auto")
    assert again.code == 0 and "resumed from" in again.output, again.output
    whole, parts = weights(runs / "whole" / "final"), weights(runs / "parts" / "final")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)

    plain = VisionTransformer(image_size=8, num_classes=3, **VIT)
    plain.load_state_dict(whole)
    opened = trainer.open_classifier(runs / "whole" / "final")
    assert type(opened.model) is VisionTransformer and opened.classes == ("ant", "bee", "cat")
    image = Image.open(tmp_path / "pictures" / "bee" / "001.png")
    with torch.no_grad():
        scores = opened.model(opened.transform(image)[None])
        torch.testing.assert_close(plain.eval()(opened.transform(image)[None]), scores)
    inner = runs / "whole" / "checkpoints" / "step-000004" / "model"
    torch.testing.assert_close(
        trainer.open_classifier(inner).model(opened.transform(image)[None]), scores
    )
    tuned = run(
        job(tmp_path, {"name_or_path": str(runs / "whole" / "final")}), "tuned", "trainer.steps=1"
    )
    assert "VisionTransformer" in tuned.output


LAYOUTS = {
    "zero3": ["zero_optimization.stage=3"],
    "fsdp": ["trainer.engine=accelerate", "zero_optimization.stage=3"],
    "pipeline": ["trainer.engine=mesh", "pipeline.stages=2", "zero_optimization.stage=2"],
}


@pytest.mark.more
def test_the_same_under_every_engine_and_from_each_others_checkpoints(tmp_path):
    """Without dropout, one run; each resumes from the other's checkpoint in its middle. Accuracy is
    counted exactly.
    """
    model = {"name_or_path": "VisionTransformer", "config": VIT | {"dropout": 0.0}}
    path, runs = job(tmp_path, model), tmp_path / "runs"
    run(path, "alone")
    expected = numbers(runs / "alone")
    before = "alone"
    for name, overrides in LAYOUTS.items():
        run(path, name, *overrides, "--processes", "2")
        result = numbers(runs / name)
        assert [len(line) for line in result] == [len(line) for line in expected]
        for ours, theirs in zip(result, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=2e-5), name
            assert len(ours) == 1 or ours[1] == theirs[1]
        source = runs / before / "checkpoints" / "step-000002"
        crossed = [*overrides, "--processes", "2", "--resume", str(source)]
        run(path, f"{name}-from-{before}", *crossed)
        assert numbers(runs / f"{name}-from-{before}")[-1] == pytest.approx(
            expected[-1], abs=2e-5
        ), (name, before)
        before = name


@pytest.mark.more
def test_digits_are_learned(tmp_path):
    pytest.importorskip("sklearn")
    result = run(Path("examples/digits.json"), "digits", f"trainer.run.folder={tmp_path}")
    assert metrics(tmp_path / "digits")[-1]["evaluation_accuracy"] > 0.97, result.output


@pytest.mark.first("channels")
@pytest.mark.parametrize(
    ("options", "overrides", "code", "keys"),
    [
        (
            {},
            ["trainer.model.name_or_path=resnet5"],
            64,
            ('saw "resnet5"', "torchvision.models"),
        ),
        ({}, ["trainer.model.name_or_path=nowhere:model"], 64, ("No module named 'nowhere'",)),
        ({}, ["trainer.images.mode=L"], 65, ("grey images", "1 channel", "3 channels")),
        ({}, ["trainer.data.path=nowhere/at/all"], 65, ("nowhere/at/all", "no such file")),
        (
            {},
            ["trainer.model.config.num_classes=2"],
            64,
            ("output is [4, 2]", "scores [4, 3]"),
        ),
        (
            {},
            ["tensor_parallel.autotp_size=2", "--processes", "2"],
            64,
            ("nothing says", "layers of an image"),
        ),
        (
            {"model": {"name_or_path": "shufflenet_v2_x0_5"}},
            [
                "pipeline.stages=2",
                "train_batch_size=8",
                "trainer.images.size=32",
                "--processes",
                "2",
            ],
            64,
            # its forward takes means itself, behind its blocks
            ("shufflenet_v2_x0_5: cut into stages: ",),
        ),
        (
            {},
            ["pipeline.stages=2", "gradient_accumulation_steps=1", "--processes", "2"],
            64,
            ("2",),
        ),
        (
            {"model": {"name_or_path": "ResNet", "config": RESNET}},
            ["train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=12"],
            64,
            ("no statistics",),
        ),
    ],
    ids=[
        "name",
        "import",
        "channels",
        "path",
        "classes",
        "tensor",
        "split",
        "micro-batches",
        "one image",
    ],
)
def test_what_does_not_fit_says_so(tmp_path, options, overrides, code, keys):
    result = train("--config", job(tmp_path, **options), *overrides)
    assert result.code == code, result.output
    shows(result.output, *keys)


# Chains


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet50", "vit_b_32", "convnext_tiny", "vgg11_bn", "efficientnet_b0"]
)
def test_a_chain_is_the_model(name):
    from torchvision import models

    arguments = {"image_size": 64} if name.startswith("vit") else {}
    torch.manual_seed(0)
    model = models.get_model(name, num_classes=5, **arguments).eval()
    for inner in model.modules():  # a head of zeros would hide all else
        if isinstance(inner, nn.Linear):
            nn.init.normal_(inner.weight, std=0.1)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected, chain = model(images), chain_of(model)
        assert chain is not None
        torch.testing.assert_close(chain(images), expected)
    published = classifiers.published_names(model, chain)
    assert sorted(published.values()) == sorted(model.state_dict())


def test_what_a_name_is_completed_with():
    images = Images(("a", "b"), "RGB", (32, 32), (0.0,), (1.0,))
    assert Classifier("vit_b_16").completed(images).arguments == {
        "num_classes": 2,
        "image_size": 32,
    }
    assert Classifier("resnet18", {"num_classes": 7}).completed(images).arguments == {
        "num_classes": 7
    }
    assert (
        Classifier("torch.nn:Identity").completed(images).arguments["num_classes"] == 2
    )  # it takes any
    with pytest.raises(ConfigError, match='Did you mean "resnet50"'):
        classifiers.named("resnet500", {})


def test_who_trains_text_waits_for_no_image_library():
    """Ours are imported where they are used; what other libraries import is theirs."""
    for path in (ROOT / "trainer").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                assert not {name.split(".")[0] for name in names} & {
                    "torchvision",
                    "PIL",
                    "sklearn",
                }, path


# Pretrained weights by name, and blocks of own callables


def cached_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Where torchvision keeps what it has downloaded: a file of the name, without counts of batches
    as old ones are.
    """
    from torchvision import models

    torch.manual_seed(5)
    known = models.resnet18().state_dict()
    state = {
        name: value for name, value in known.items() if not name.endswith("num_batches_tracked")
    }
    cache = folder / "torch" / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    torch.save(state, cache / models.ResNet18_Weights.IMAGENET1K_V1.url.rpartition("/")[2])
    return state


@pytest.mark.more
def test_pretrained_weights_are_torchvisions_but_for_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    state = cached_weights(tmp_path)
    images = Images(("a", "b", "c"), "RGB", (32, 32), (0.5,) * 3, (0.5,) * 3)
    for weights in ("IMAGENET1K_V1", "DEFAULT"):
        result = classifiers.named("resnet18", {}, weights).completed(images)
        spec = classifiers.spec_of(result, None, seed=3)
        model = spec.build()
        materialise(model, spec, seed=3)
        own = {spec.files.published[name]: value for name, value in model.state_dict().items()}
        assert all(
            torch.equal(own[name], value)
            for name, value in state.items()
            if not name.startswith("fc.")
        )
        assert own["fc.weight"].shape == (3, 512) and own["fc.weight"].abs().sum() > 0
        shows_each(
            spec.notes,
            ("ResNet18_Weights.IMAGENET1K_V1", "fc.weight, fc.bias", "initialised at random"),
        )
        assert result.normalised_by == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    whole = classifiers.spec_of(
        classifiers.named("resnet18", {"num_classes": 1000}, "DEFAULT"), None, seed=3
    )
    assert torch.equal(whole.building.weights.read("head.fc.weight"), state["fc.weight"])


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "weights", "keys"),
    [
        (
            "resnet18",
            "IMAGENET",
            ('saw "IMAGENET" of resnet18', "IMAGENET1K_V1, DEFAULT"),
        ),
        ("VisionTransformer", "DEFAULT", ("none: ", "no weights")),
        ("inception_v3", "DEFAULT", ("none: ", "no weights")),
        ("torch.nn:Identity", "DEFAULT", ("none: ", "no weights")),
    ],
)
def test_weights_that_there_are_not_are_named(
    name: str, weights: str, keys: tuple[str, ...]
) -> None:
    with raises(ConfigError, *keys):
        classifiers.named(name, {}, weights)


@pytest.mark.more
def test_weights_that_can_not_be_had_say_where_they_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def unreachable(*arguments: Any, **more: Any) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    with raises(ConfigError, "can't", "OSError", "resnet18-f37072fd.pth", "file"):
        classifiers.named("resnet18", {}, "DEFAULT").state()
    hostile = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    torch.save({"fc.weight": Classifier("x")}, hostile)
    with pytest.raises(ConfigError, match="can't be loaded: UnpicklingError"):
        classifiers.named("resnet18", {}, "DEFAULT").state()


@pytest.mark.more
def test_a_run_begins_with_pretrained_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    state = cached_weights(tmp_path)
    path = job(tmp_path, {"name_or_path": "resnet18", "weights": "DEFAULT"}, steps=1)
    result = run(path, "tuned", "optimizer.params.lr=1e-8", "trainer.engine=mesh")
    shows(
        " ".join(result.output.split()),
        "std: ((0.485, 0.456, 0.406",
        "(0.229, 0.224, 0.225)) (trainer.images.norm",
    )
    final = load_file(tmp_path / "runs" / "tuned" / "final" / "model.safetensors")
    torch.testing.assert_close(final["conv1.weight"], state["conv1.weight"], rtol=0, atol=1e-5)


def wrapped(num_classes: int = 2) -> nn.Module:
    from torchvision import models

    return models.resnet18(num_classes=num_classes)


class Encoder(nn.Module):
    """As Hugging Face's are: a list of blocks, each with modules of its own, below other
    modules.
    """

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Flatten(), nn.Linear(192, 16))
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)
        )
        self.head = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, num_classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(images)[:, None]
        for layer in self.encoder.layer:
            hidden = layer(hidden)
        return self.head(hidden[:, 0])  # type: ignore[no-any-return]


@pytest.mark.more
def test_blocks_of_an_own_callables_model_are_found() -> None:
    own = classifiers.spec_of(
        Classifier("tests.tasks.test_images:wrapped", {"num_classes": 2}), None, seed=3
    )
    named = classifiers.spec_of(Classifier("resnet18", {"num_classes": 2}), None, seed=3)
    assert (
        own.blocks == named.blocks
        and len(own.blocks) == 10
        and own.files.published == named.files.published
    )
    layers = tuple(f"encoder.layer.{index}" for index in range(3))
    assert (
        classifiers.spec_of(Classifier("tests.tasks.test_images:Encoder"), None, seed=3).blocks
        == layers
    )
    assert module.spec_of(Encoder, None, seed=3).blocks == layers
    assert module.spec_of(wrapped, None, seed=3).blocks == tuple(
        f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)
    )
    assert module.spec_of(lambda: nn.Linear(2, 2), None, seed=3).blocks == ()


@pytest.mark.more
def test_a_model_whose_forward_is_another_is_no_chain() -> None:
    model = wrapped()
    model.forward = lambda images: images  # type: ignore[method-assign]
    assert chain_of(model) is None

    class Other(type(wrapped())):  # type: ignore[misc]
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images

    from torchvision.models.resnet import BasicBlock

    assert chain_of(Other(BasicBlock, [1, 1, 1, 1])) is None
