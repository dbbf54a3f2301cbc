"""The certificate's one process reads freeze, groups, adapters and weights by itself: a fault in
ours is caught.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.certify.certifying import config
from tests.support.messages import shows
from tests.support.pool import machine_here

FREEZE = {"freeze": ["*.wpe.*", "transformer.h.[2-5].*", "*.ln_1.bias"]}
GROUPS = {
    "parameter_groups": [
        {"names": "*.wte.*", "weight_decay": 0.0},
        {"names": ["transformer.h.[0-3].*"], "lr_multiplier": 0.2},
    ]
}
LORA = {
    "adapter": {
        "r": 4,
        "alpha": 6,
        "dropout": 0.2,
        "targets": ["c_attn", "mlp.c_fc"],
        "rslora": True,
    }
}
DORA = {
    "adapter": {"r": 4, "dora": True, "bias": "lora_only"},
    "freeze": ["*.lora_A.*"],
    "parameter_groups": [
        {"names": ["*.h.[3-5].*.lora_B.*"], "lr_multiplier": 16, "weight_decay": 0.2}
    ],
}


def other_names(names: Any, model: Any) -> set[str]:
    """Of each parameter the one after it."""
    known = [name for name, _ in model.named_parameters()]
    return {known[(known.index(name) + 1) % len(known)] for name in names}


def another_parameter_is_held() -> Any:
    from trainer.models.finetuning import frozen

    real = frozen._holding
    return mock.patch.object(
        frozen, "_holding", lambda spec, names: real(spec, other_names(names, spec.build()))
    )


def nothing_is_held() -> Any:
    from trainer.models.finetuning import frozen

    return mock.patch.object(frozen, "_holding", lambda spec, names: spec)


def rates_of_other_parameters() -> Any:
    """As `fnmatch` is not: a pattern that is found anywhere in a name."""
    from trainer.models.finetuning import tuned

    return mock.patch.object(
        tuned, "fnmatchcase", lambda name, pattern: pattern.strip("*.[0-3]") in name
    )


def of_adapters(**changed: Any) -> Any:
    from trainer.models.finetuning import lora

    real = lora._peft_config

    def other(*args: Any) -> Any:
        config = real(*args)
        for key, value in changed.items():
            setattr(config, key, value)
        return config

    return mock.patch.object(lora, "_peft_config", other)


def other_alpha() -> Any:
    return of_adapters(lora_alpha=8)


def other_rank() -> Any:
    return of_adapters(r=5)


def scaled_by_the_rank() -> Any:
    return of_adapters(use_rslora=False)


def no_dropout_of_adapters() -> Any:
    return of_adapters(lora_dropout=0.0)


def a_target_left_out() -> Any:
    from trainer.models.finetuning import lora

    real = lora.chosen_targets
    return mock.patch.object(
        lora, "chosen_targets", lambda *args: [n for n in real(*args) if "mlp" not in n]
    )


def biases_learn() -> Any:
    return of_adapters(bias="all")


def of_files(change: Callable[[Any, str], Any]) -> Any:
    from trainer.models.pretrained.weights import SafetensorsFolder

    real = SafetensorsFolder.__getitem__
    return mock.patch.object(
        SafetensorsFolder, "__getitem__", lambda self, name: change(lambda n: real(self, n), name)
    )


def a_matrix_transposed() -> Any:
    def turned(read: Any, name: str) -> Any:
        return read(name).T.contiguous() if name.endswith("h.1.attn.c_proj.weight") else read(name)

    return of_files(turned)


def two_norms_swapped() -> Any:
    return of_files(lambda read, name: read(name.replace("h.1.ln_1", "h.1.ln_2")))


def certified(path: str, fault: str | None) -> tuple[bool, str]:
    """Runs on each rank of a pool: the checks at start refuse some of these faults, and are left
    out.
    """
    from trainer.certify import certificate as module
    from trainer.certify.tiny_run import tiny_run

    with contextlib.ExitStack() as stack:
        if fault:
            stack.enter_context(mock.patch.object(module, "checked", lambda spec, *_: (spec, ())))
            stack.enter_context(globals()[fault]())
        certificate = module.certify(tiny_run(path, [], 2), machine_here())
    return certificate.passed, module.table(certificate)


FAULTS: dict[Callable[[], Any], tuple[dict[str, Any], str]] = {
    another_parameter_is_held: (FREEZE, "gradient"),
    nothing_is_held: (FREEZE, "gradient"),
    rates_of_other_parameters: (GROUPS, "update"),
    other_alpha: (LORA, "gradient"),
    scaled_by_the_rank: (LORA, "gradient"),
    other_rank: (LORA, "initial"),
    no_dropout_of_adapters: (LORA, "output"),
    a_target_left_out: (LORA, "initial"),
    biases_learn: (LORA, "gradient"),
    a_matrix_transposed: (LORA, "initial"),
    two_norms_swapped: ({}, "initial"),
}
LIKE_ANOTHER = (
    nothing_is_held,
    scaled_by_the_rank,
    a_target_left_out,
    biases_learn,
    a_matrix_transposed,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: Any) -> str:
    """A folder with the architecture: its weights are not read, the tiny copy has made-up ones of
    its own.
    """
    from transformers import GPT2Config

    from tests.support.training import GPT2

    folder: Path = tmp_path_factory.mktemp("base")
    GPT2Config(**{**GPT2, "n_layer": 6}).save_pretrained(folder)
    return str(folder)


@pytest.mark.more
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(f, marks=pytest.mark.more if f in LIKE_ANOTHER else (), id=f.__name__)
        for f in FAULTS
    ],
)
def test_a_fault_in_what_both_sides_shared_is_caught(pools, tmp_path, base, fault):
    trainer, check = FAULTS[fault]
    path = config(tmp_path, "mesh", 2, **trainer, model={"name_or_path": base})
    for passed, table in pools[2].run(certified, path=path, fault=fault.__name__):
        assert not passed
        shows(table.splitlines()[-1], f"rank 0: {check}")


@pytest.mark.more
@pytest.mark.parametrize("trainer", [FREEZE | GROUPS, LORA, DORA], ids=["freeze", "lora", "dora"])
def test_what_is_right_passes(pools, tmp_path, base, trainer):
    path = config(tmp_path, "mesh", 3, **trainer, model={"name_or_path": base})
    for passed, table in pools[2].run(certified, path=path, fault=None):
        assert passed, table
