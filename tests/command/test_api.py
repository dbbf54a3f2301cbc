"""`trainer.train` and `trainer.verify`: your own modules, data and losses, under every engine, from an
own script.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

import trainer
from tests.support.command.own_task import loss, spec_and_task
from tests.support.commands import BIN, ROOT, script
from tests.support.messages import raises, shows
from tests.support.probing import findings_of
from trainer.errors import ConfigError, DataError
from trainer.models.own.module import spec_of
from trainer.tasks.supervised import Supervised

README = (ROOT / "README.md").read_text()
EXAMPLE = next(
    code
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    if "meshloom.train" in code
)
CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "trainer": {"steps": 4, "device": "cpu", "log": {"every": 1}},
}


def test_the_example_is_short():
    assert len(EXAMPLE.splitlines()) <= 25


@pytest.mark.more
@pytest.mark.parametrize(
    ("config", "processes"),
    [("zero3", 2), ("pipeline_zero2", 2), pytest.param("hsdp", 4, marks=pytest.mark.whole)],
)
def test_the_example_learns_and_is_certified(tmp_path, config, processes):
    code = EXAMPLE.replace('"zero3"', f'"{config}"').replace(
        "processes=2", f"processes={processes}"
    )
    code = code.replace("overrides=[", f'overrides=["trainer.run.folder={tmp_path}/runs", ')
    result = script(tmp_path, code)
    assert result.code == 0, result.output
    assert "\nTrue\n" in result.output
    losses = [
        float(x)
        for x in re.findall(r"\d\.\d+", re.findall(r"^\[(.*)\]$", result.output, re.MULTILINE)[-1])
    ]
    assert losses[-1] < losses[0]
    final = tmp_path / "runs" / config / "final"
    names = {name for path in final.glob("*.safetensors") for name in load_file(path)}
    assert {"0.weight", "0.bias"} <= names and (final / "module.json").exists()


OWN = f"""
import torch, trainer
from torch import nn
from torch.nn.functional import cross_entropy

class Data:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        row = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return {{"x": row, "scale": torch.tensor(2.0)}}, (row.sum() > 0).long()

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(16), nn.Linear(16, 16)
    def forward(self, hidden):
        return hidden + self.inner(self.norm(hidden)).tanh()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Linear(6, 16)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 2)
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, 0.25)
    def forward(self, x, scale):
        hidden = self.table(x * scale[:, None])
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)

def loss(output, target):
    return cross_entropy(output, target, reduction="sum"), target.numel()

CONFIG = {CONFIG!r}
own = dict(model=Net, data=Data(), loss=loss, blocks="layers.*")
"""


@pytest.mark.more
def test_under_a_launcher_in_a_notebook_and_again(tmp_path):
    """The same losses in one process and in those of a launcher; a run that is begun again goes
    on.
    """
    runs = f"trainer.run.folder={tmp_path}/runs"
    alone = f"""
for steps in (2, 4):
    result = trainer.train(CONFIG, overrides=["{runs}", "trainer.run.name=one", "trainer.checkpoint.every=2",
        f"trainer.steps={{steps}}", "zero_optimization.stage=2"], **own)
print("LOSSES", [round(loss, 4) for loss in result.losses], result.folder.name)
"""
    several = f"""
result = trainer.train(CONFIG, overrides=["{runs}", "trainer.run.name=two", "zero_optimization.stage=2",
    "trainer.engine=mesh"], **own)
said = [round(loss, 4) for loss in result.losses]
__import__("os").write(1, f"\\nLOSSES {{said}} {{result.folder.name}}\\n".encode())  # at once: two ranks write here
"""
    one = script(tmp_path, OWN + alone)
    assert one.code == 0, one.output
    two = script(tmp_path, OWN + several, str(BIN / "torchrun"), "--nproc-per-node", "2")
    assert two.code == 0, two.output
    result = re.findall(r"^LOSSES \[(.*)\] (\S+)$", one.output + two.output, re.MULTILINE)
    assert [name for _, name in result] == ["one-2", "two", "two"]
    assert result[0][0] == result[1][0] == result[2][0]


@pytest.mark.more
def test_a_run_of_several_ranks_that_stands_still_is_an_error(tmp_path):
    section = {
        **CONFIG["trainer"],
        "patience": 3,
        "run": {"folder": str(tmp_path / "runs"), "name": "own"},
    }
    code = f"""
import os, time, torch, trainer
from torch import nn
from trainer.errors import Stalled

class Data:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if os.environ["RANK"] == "1" and os.path.exists({str(tmp_path / "runs" / "own" / "config.json")!r}):
            time.sleep(1000)
        return torch.full((4,), index / 64), torch.tensor(index % 2)

def loss(output, target):
    return nn.functional.cross_entropy(output, target, reduction="sum"), len(target)

config = {CONFIG | {"trainer": section}!r}
try:
    trainer.train(config, model=lambda: nn.Sequential(nn.Linear(4, 2)), data=Data(), loss=loss, processes=2)
except Stalled as error:
    print("caught", error)
"""
    result = script(tmp_path, code)
    assert result.code == 0, result.output
    shows(result.output, "stalled", "no progress")
    assert "rank 1 on " in result.output
    shows(result.output, "caught processes")


@pytest.mark.more
def test_errors_are_those_of_the_command(tmp_path):
    code = """
from trainer.errors import ConfigError
try:
    trainer.train(CONFIG, overrides=["zero_optimisation.stage=3"], processes=2, **own)
except ConfigError as error:
    print("CAUGHT", error.render())
try:
    trainer.train(CONFIG, overrides=["pipeline.stages=2", "gradient_accumulation_steps=2"], processes=2,
        **(own | {"blocks": "layer.*"}))
except ConfigError as error:
    print("CAUGHT", error.render())
"""
    result = script(tmp_path, OWN + code)
    assert result.code == 0, result.output
    caught = result.output.split("CAUGHT ")[1:]
    assert "Did you mean" in caught[0] and "zero_optimization" in caught[0]
    shows(caught[1], "Net is named")


# What is handed in


def small():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def test_values_are_those_of_the_constructor_in_every_process():
    def build():
        model = small()
        nn.init.constant_(model[2].bias, 0.5)
        model.register_buffer("table", torch.arange(3.0))
        return model

    spec, _ = spec_and_task(build)
    assert spec.blocks == ("0", "1", "2")
    weights = {name: spec.building.weights.read(name) for name in ("0.weight", "2.bias", "table")}
    assert torch.equal(weights["2.bias"], torch.full((2,), 0.5)) and torch.equal(
        weights["table"], torch.arange(3.0)
    )
    same = spec_of(build, None, seed=3).building.weights
    assert torch.equal(weights["0.weight"], same.read("0.weight"))
    assert not torch.equal(
        weights["0.weight"], spec_of(build, None, seed=4).building.weights.read("0.weight")
    )
    spec.building.weights.release()
    assert not any(isinstance(value, dict) for value in vars(spec.building.weights).values())
    assert torch.equal(weights["0.weight"], spec.building.weights.read("0.weight"))


def test_what_is_found_of_a_module():
    class Extra(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.never = small(), nn.Linear(2, 2)

        def forward(self, rows):
            return self.body(rows)

    findings = findings_of(*spec_and_task(Extra, blocks="body.*"))
    assert findings.unused == ("never.weight", "never.bias") and findings.blocks
    assert not findings_of(*spec_and_task(Extra, blocks="never")).blocks


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"build": lambda: "text"}, ("model: str", "builds an nn.Module")),
        ({"build": lambda: nn.Linear(6, 2, device="cpu")}, ("Leave `device=` out",)),
        (
            {"loss": lambda output, target: output.sum()},
            ("as a scalar tensor", "number of targets"),
        ),
        (
            {"loss": lambda o, t: (loss(o, t)[0] / 0, 1)},
            ("inf", "the first samples", "a finite number"),
        ),
        (
            {"loss": lambda o, t: (loss(o, t)[0], int((o != 0).sum()))},
            ("a count", "the target alone"),
        ),
        ({"blocks": "layers.*"}, ("no module of Sequential", "layers.*")),
    ],
    ids=["no module", "on a device", "no count", "not finite", "count of the output", "no blocks"],
)
def test_what_can_not_be_trained_says_why(change, keys):
    given = {"build": small, "loss": loss, "blocks": None, **change}
    with raises(ConfigError, *keys):
        findings_of(*spec_and_task(**given))


class Scaled(nn.Parameter):
    """A kind of parameter of its own."""


def parameter(value: torch.Tensor, **attributes: Any) -> nn.Parameter:
    result = nn.Parameter(value, requires_grad=value.is_floating_point() or value.is_complex())
    vars(result).update(attributes)
    return result


def hooked(register: str) -> nn.Parameter:
    result = nn.Parameter(torch.zeros(2))
    getattr(result, register)(lambda *_: None)
    return result


LOST = {
    "complex": (
        lambda: parameter(torch.zeros(2, dtype=torch.complex64)),
        ("torch.complex64; expected",),
    ),
    "bfloat16": (
        lambda: parameter(torch.zeros(2, dtype=torch.bfloat16)),
        ("torch.bfloat16; expected",),
    ),
    "float64": (
        lambda: parameter(torch.zeros(2, dtype=torch.float64)),
        ("torch.float64; expected",),
    ),
    "integers": (
        lambda: parameter(torch.zeros(2, dtype=torch.int8)),
        ("torch.int8; expected",),
    ),
    "a hook": (lambda: hooked("register_hook"), ("has a hook",)),
    "a hook after": (lambda: hooked("register_post_accumulate_grad_hook"), ("has a hook",)),
    "an attribute": (lambda: parameter(torch.zeros(2), scale=2.0), ("has an attribute scale",)),
    "a subclass": (
        lambda: Scaled(torch.zeros(2)),
        ("is a tests.command.test_api.Scaled", "expected an nn.Parameter"),
    ),
    "no size yet": (
        nn.UninitializedParameter,
        ("is a torch.nn.parameter.UninitializedParameter", "known size"),
    ),
}


@pytest.mark.more
@pytest.mark.parametrize("name", LOST)
def test_what_of_a_parameter_would_be_lost_is_refused_with_its_name(name):
    make, keys = LOST[name]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = small()
            self.body.own = make()

    with raises(ConfigError, "model: body.own ", *keys):
        spec_of(Net, None, seed=3)


@pytest.mark.more
def test_what_transformers_marks_its_parameters_with_is_allowed():
    from transformers import AutoConfig, AutoModelForCausalLM

    for family in ("llama", "mamba", "bamba"):
        config = AutoConfig.for_model(family, num_hidden_layers=2)
        assert spec_of(
            lambda config=config: AutoModelForCausalLM.from_config(config), None, seed=3
        ).parameters


def test_samples_that_are_no_pairs():
    spec = spec_of(small, None, seed=3)
    task = Supervised(loss, spec.build)
    with raises(DataError, "(input, target)", "batch"):
        task.collate([(torch.zeros(6), 0), (torch.zeros(7), 1)])


@pytest.mark.more
def test_a_hidden_state_that_is_no_tensor_is_refused_by_a_pipeline_alone():
    from trainer.probes.questions.stages import check_cut

    class Block(nn.Linear):
        def forward(self, pair):
            return super().forward(pair[0]), pair[1]

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(Block(6, 6), Block(6, 6))

        def forward(self, rows):
            return self.layers((rows, rows))[0]

    spec, task = spec_and_task(Pairs, blocks="layers.*")
    assert findings_of(spec, task).blocks
    with raises(ConfigError, "stage sends", "one tensor"):
        check_cut(spec, 2)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, rows):
        if self.training:
            self.seen += rows.sum().detach()
        return rows


def test_a_buffer_that_training_changes_is_one_processs():
    from tests.support.probing import layout
    from trainer.parallel.checks import check_layout

    spec, task = spec_and_task(lambda: nn.Sequential(nn.Linear(6, 8), Counter(), nn.Linear(8, 2)))
    findings = findings_of(spec, task)
    check_layout(spec, task, layout(), findings)
    with raises(ConfigError, "buffer 1.seen"):
        check_layout(spec, task, layout(replicate=2), findings)


@pytest.mark.more
def test_neither_tokenizers_nor_records_are_sent_between_ranks(tmp_path, monkeypatch):
    """Each rank loads the one, and keeps what it saw of the other."""
    import pickle

    from tests.support.commands import write_job
    from trainer.config import load
    from trainer.distributed.ranks import Ranks
    from trainer.recipe import HandedIn, RunContext
    from trainer.recipes.causal_lm import subject

    def context(config: Any) -> RunContext:
        layout: Any = None  # of no consequence for a tokenizer
        return RunContext(config, HandedIn(), layout, Ranks())

    sent: list[bytes] = []

    def noted(plain: Any) -> Any:
        def one(self: Ranks, *values: Any) -> Any:
            sent.append(pickle.dumps(values[-1]))
            assert b"trainer.trackers" not in sent[-1]
            return plain(self, *values)

        return one

    for name in ("send", "gather"):
        monkeypatch.setattr(Ranks, name, noted(getattr(Ranks, name)))
    config = load(write_job(tmp_path))
    tokenizer = subject._tokenizer(context(config))
    assert len(tokenizer) and len(sent) == 1 and len(sent[0]) < 100  # that rank 0 has trained it
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    named = load(write_job(tmp_path), [f"trainer.data.tokenizer={tmp_path / 'tokenizer'}"])
    assert len(subject._tokenizer(context(named))) == len(tokenizer)
    assert len(sent) == 1
    section = {
        **CONFIG["trainer"],
        "engine": "mesh",
        "run": {"folder": str(tmp_path / "runs")},
        "steps": 2,
    }
    rows = [(torch.full((4,), i / 8), torch.tensor(i % 2)) for i in range(8)]
    loss = lambda output, target: (cross_entropy(output, target, reduction="sum"), len(target))  # noqa: E731
    own = {"model": lambda: nn.Sequential(nn.Linear(4, 2)), "data": rows, "loss": loss}
    assert len(trainer.train(CONFIG | {"trainer": section}, **own, quiet=True).records) == 2
