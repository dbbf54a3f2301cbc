"""`load`: reading, overrides, checks and the exact text of errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.messages import raises, shows, shows_each
from trainer.config import Config, RuntimeFacts, load, resolve, shipped, support
from trainer.config.check import check
from trainer.config.keys import KEYS, OPTIMIZERS, SCHEDULERS, UNBUILT
from trainer.config.keys.hints import unknown, useless
from trainer.config.own_keys import OWN_KEYS
from trainer.config.read import leaves, override, read
from trainer.config.rules import unmet
from trainer.config.sections.trainer import TrainerSection
from trainer.errors import ConfigError
from trainer.layout import layout_of
from trainer.optim.builders import ROWS, No

HERE = Path(__file__).parent
SHIPPED = sorted((HERE.parent.parent / "ds_configs").glob("*.json"))
FOREIGN = sorted((HERE / "foreign_configs").glob("*.json"))
quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def compile_(folder: Path, content: Any, *overrides: str) -> Config:
    path = folder / "c.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return load(path, overrides)


def errors(folder: Path, content: Any, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compile_(folder, content, *overrides)
    assert caught.value.exit_code == 64
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


def test_compiling_imports_nothing_heavy_and_takes_less_than_a_second() -> None:
    code = (
        "import sys, time; from trainer.config import load; from trainer.layout import Layout; "
        "load(sys.argv[1]);"
        "assert not {'torch', 'transformers', 'deepspeed', 'datasets'} & set(sys.modules); "
        "print(time.process_time())"
    )
    command = [sys.executable, "-c", code, str(SHIPPED[0])]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.0


def test_the_help_of_train_reads_no_config() -> None:
    code = "import sys, trainer.command.train; assert 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=HERE.parent, check=True)


@pytest.mark.parametrize("path", FOREIGN, ids=lambda path: path.stem)
def test_configs_of_other_trainers_compile(path: Path) -> None:
    config = load(path)
    assert json.loads(path.read_text()) == config.raw
    assert config.optimizer.type in OPTIMIZERS
    assert len(set(config.notes)) == len(config.notes)


def test_the_shipped_configs_are_short_and_complete() -> None:
    assert [path.stem for path in SHIPPED] == [
        *(
            "ddp",
            "experts",
            "fsdp",
            "hsdp",
            "long_context",
            "megatron_3d",
            "pipeline_zero1",
            "pipeline_zero2",
            "pipeline_zero3",
        ),
        *("tensor_zero2", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"),
    ]
    for path in SHIPPED:
        config = load(path)
        assert len(path.read_text().splitlines()) < 40 and not config.notes
        assert (config.trainer.steps, config.trainer.generate.prompt) == (1450, "auto")


def test_what_deepspeed_swallows_is_rejected_all_at_once(tmp_path: Path) -> None:
    content = {
        "zero_optimisation": {"stage": 3},
        "gradient_clip": 1,
        "optimzer": {},
        "offload_param": {"device": "cpu"},
        "gradient_clipping": -1,
        "zero_optimization": {
            "stage": "auto",
            "reduce_bucket_size": 1.5,
            "offload_optimizer": {"device": "gpu"},
        },
        "optimizer": {"type": "Adamw", "params": {"lrr": 1, "max_grad_norm": 1, "betas": [0.9]}},
        "activation_checkpointing": {"partitioned_activations": True},
        "steps_per_print": "often",
    }
    known = "expected a known key of the top level. Did you mean"
    shows_each(
        errors(tmp_path, content),
        ("zero_optimisation", '{"stage": 3}', f'{known} "zero_optimization"?'),
        f'gradient_clip: saw 1; {known} "gradient_clipping"?',
        f'optimzer: saw {{}}; {known} "optimizer"?',
        ("offload_param", '{"device": "cpu"}', f"{known} zero_optimization.offload_param?"),
        ("gradient_clipping", "-1", "least 0 or"),
        ("zero_optimization.stage", 'saw "auto"', "whole number", "0 to 3"),
        ("zero_optimization.reduce_bucket_size: saw 1.5", "least 1 or"),
        ("zero_optimization.offload_optimizer.device", 'saw "gpu"', '"cpu" or "nvme"'),
        (
            "activation_checkpointing.partitioned_activations",
            "known key",
            '"activation_checkpointing"',
            '"partition_activations"?',
        ),
        ("steps_per_print", 'saw "often"', "0 or", "null"),
        ("optimizer.params.lrr: saw 1", '"optimizer.params"', '"lr"?'),
        ("optimizer.params.betas", "[0.9]", "two numbers", "0 to below 1"),
        ("optimizer.params.max_grad_norm: saw 1", 'top-level "gradient_clipping"'),
    )


ZERO1, ZERO3 = {"stage": 1}, {"stage": 3}
BUILT = ", ".join(name for name in OPTIMIZERS if name not in UNBUILT)
CONFLICTS = [
    (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        ("fp16.enabled: saw true, and bf16.enabled true", "at most one"),
    ),
    (
        {"fp16": {"enabled": True, "loss_scale_window": 0}},
        ("fp16.loss_scale_window: saw 0", "at least 1"),
    ),
    (
        {"zero_optimization": {"cpu_offload": True}},
        (
            "zero_optimization.offload_optimizer: saw device",
            '"cpu"',
            "ZeRO stage 0",
            "expected stage 1, 2 or 3",
            "zero_optimization.stage",
        ),
    ),
    (
        {"zero_optimization": ZERO3 | {"offload_optimizer": {"device": "nvme"}}},
        (("zero_optimization.offload_optimizer.nvme_path: saw none", "the NVMe device")),
    ),
    (
        {"zero_optimization": ZERO1 | {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        (
            (
                "zero_optimization.offload_optimizer.ratio: saw 0.5 with ZeRO stage 1",
                "expected 1, or stage 3",
            )
        ),
    ),
    (
        {"bf16": {"bf16_master_weights_and_grads": True}},
        (
            (
                "bf16.bf16_master_weights_and_grads: saw true",
                "ZeRO stage 0",
                "expected ZeRO stage 1, 2 or 3",
            )
        ),
    ),
    (
        {"zero_optimization": ZERO1, "bf16": {"bf16_optimizer_states": True}},
        ("bf16.bf16_optimizer_states: saw true", "bf16_master_weights_and_grads"),
    ),
    (
        {"bf16": {}, "bfloat16": {"enabled": True}},
        ('bfloat16: saw it beside "bf16"', "one of the two", "Remove bfloat16."),
    ),
    (
        {"zero_optimization": ZERO3 | {"cpu_offload": True, "offload_optimizer": {}}},
        (
            'zero_optimization.cpu_offload: saw it beside "zero_optimization.offload_optimizer"',
            "one of the two",
        ),
    ),
    (
        {"zero_optimization": ZERO3 | {"mics_shard_size": 4}, "trainer": {"mesh": {"shard": 2}}},
        (("zero_optimization.mics_shard_size: saw 4 beside trainer.mesh.shard 2", "of a shard")),
    ),
    (
        {"elasticity": {"enabled": True}},
        ('elasticity: saw {"enabled": true}', "removed from DeepSpeed", "batch sizes"),
    ),
    (
        {
            "data_efficiency": {
                "enabled": True,
                "data_routing": {"enabled": True, "random_ltd": {"enabled": True}},
            }
        },
        ('data_efficiency.data_routing.random_ltd: saw {"enabled": true}', "not offered here"),
    ),
    (
        {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}},
        (
            'data_efficiency.data_sampling.curriculum_learning: saw {"enabled": true}',
            "not offered here",
        ),
    ),
    (
        {
            "data_efficiency": {
                "data_sampling": {"dynamic_batching": {"enabled": True, "max_tokens": 5}}
            }
        },
        (
            'data_efficiency.data_sampling.dynamic_batching: saw {"enabled": true, "max_tokens": 5}',
            "not offered here",
        ),
    ),
    (
        {"sequence_parallel_size": 0},
        ("sequence_parallel_size: saw 0", "at least 1"),
    ),
    (
        {"managed_gradient_accumulation": False},
        ("managed_gradient_accumulation: saw false", "gradient_accumulation_steps", "Remove it."),
    ),
    (
        {"data_types": {"param_dtype": "bf16"}},
        (
            'data_types.param_dtype: saw "bf16"',
            "and a model in fp32",
            'expected "fp32"',
            "fp16.enabled",
        ),
    ),
    *(
        (
            {"zero_optimization": {"stage": 2}, name: value},
            (
                f"{name}: saw {json.dumps(value)} with ZeRO stage 2",
                f"expected {expected}",
                "zero_optimization.reduce_scatter",
            ),
        )
        for name, value, expected in (
            ("prescale_gradients", True, "false"),
            ("gradient_predivide_factor", 2.0, "1.0"),
        )
    ),
    (
        {"zero_optimization.stage": 3},
        ("zero_optimization.stage: saw 3", '"zero_optimization"', "the dot."),
    ),
    (
        {"train_batch_size": 10**18},
        (("train_batch_size: saw 1000000000000000000", "number from 1", "to 1,000,000,000")),
    ),
    (
        {"zero_optimization": {"reduce_bucket_size": 10**30}},
        (
            "zero_optimization.reduce_bucket_size: saw 1000000000000000000000000000000",
            "at least 1",
            '"auto"',
        ),
    ),
    (
        {"autotuning": {"metrc": "flops"}},
        ('autotuning.metrc: saw "flops"', '"autotuning"', '"metric"'),
    ),
    (
        {"checkpoint": {"writer": {"decoupeld": True}}},
        ("checkpoint.writer.decoupeld: saw true", '"checkpoint.writer"', '"decoupled"'),
    ),
    ({"gradient_allreduce_op": "sum"}, ('gradient_allreduce_op: saw "sum"', 'expected "mean"')),
    *(
        (
            {"optimizer": {"type": name, "params": {}}},
            ((f'optimizer.type: saw "{name}"', f"expected one of {BUILT}", "use Adam.")),
        )
        for name in ("OneBitAdam", "OnebitAdam", "ZeroOneAdam", "OneBitLamb")
    ),
    *(
        (
            {"optimizer": {"type": name, "params": {}}},
            (f'optimizer.type: saw "{name}"', f"expected one of {BUILT}", f'"{right}"'),
        )
        for name, right in (
            ("FusedAdam", "Adam"),
            ("CPUAdam", "Adam"),
            ("DeepSpeedCPUAdam", "Adam"),
            ("adamw_torch", "AdamW"),
            ("adamw_torch_fused", "AdamW"),
            ("adamw_hf", "AdamW"),
        )
    ),
    (
        {"optimizer": {"type": "FusedLamb", "params": {}}},
        ('optimizer.type: saw "FusedLamb"', f"expected one of {BUILT}", "runs it."),
    ),
    (
        {"optimizer": {"type": "SGD", "params": {"nesterov": True}}},
        ("optimizer.params.nesterov: saw true", "momentum above 0"),
    ),
    (
        {"optimizer": {"type": "SGD", "params": {"fused": True, "foreach": True}}},
        ("optimizer.params.fused: saw true", "and foreach true", "at most one"),
    ),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {}}},
        (
            "scheduler.params: saw no total_num_steps",
            "expected total_num_steps for WarmupDecayLR",
            '"total_num_steps"',
        ),
    ),
    (
        {"scheduler": {"type": "CosineLR"}},
        (
            (
                'scheduler.type: saw "CosineLR"',
                f"expected one of {', '.join(SCHEDULERS)}",
                '"cosine"?',
            )
        ),
    ),
    (
        {"trainer": {"model": {"name_or_path": "m", "config": {}}}},
        ('trainer.model.name_or_path: saw "m", and trainer.model.config {}', "at most one"),
    ),
    (
        {"trainer": {"model": {"name_or_path": "m", "config": "auto"}}},
        ('trainer.model.name_or_path: saw "m", and trainer.model.config "auto"', "at most one"),
    ),
    (
        {"trainer": {"images": {"size": 8}}},
        ("trainer.images: saw keys", '"image_classification"', '"causal_lm"', "trainer.task"),
    ),
    (
        {"trainer": {"task": "image_classification", "data": {"format": "csv"}}},
        ('trainer.data.format: saw "csv"', 'expected "auto", "parquet" or "hub" of images'),
    ),
    (
        {"trainer": {"steps": 3, "epochs": 1}},
        ("trainer.steps: saw 3, and trainer.epochs 1.0", "at most one"),
    ),
    (
        {"trainer": {"data": {"prompt_column": "q"}}},
        (
            "trainer.data: ",
            'prompt_column "q"',
            "and completion_column null",
            "expected both or neither",
        ),
    ),
    (
        {"trainer": {"data": {"prompt_column": "q", "completion_column": "a"}}},
        (('trainer.data.prompt_column: saw "q" without trainer.data.path', "such a column")),
    ),
    (
        {"torch_autocast": {"enabled": True}},
        ('torch_autocast: saw {"enabled": true}', "no such section", "bf16.enabled"),
    ),
    (
        {"trainer": {"mesh": {"shard": -1, "replicate": -1}}},
        ("trainer.mesh: saw -1 for both axes", "at most one"),
    ),
    (
        {"trainer": {"data": {"pth": 1}}},
        (("trainer.data.pth: saw 1", '"trainer.data"', '"path"?')),
    ),
    ({"trainer": {"steps": True}}, ("trainer.steps: saw true", "expected a number")),
    ({"trainer": {"steps": 1.5}}, ("trainer.steps: saw 1.5", "expected a whole number")),
    ({"trainer": {"seed": -1}}, ("trainer.seed: saw -1", "at least 0")),
    ({"trainer": {"epochs": 0}}, ("trainer.epochs: saw 0", "expected a number above 0")),
    (
        {"trainer": {"data": {"evaluation_fraction": 0.7}}},
        ("trainer.data.evaluation_fraction: saw 0.7", "at most 0.5"),
    ),
    ({"trainer": {"data": {"path": 3}}}, ("trainer.data.path: saw 3", "expected text or a list")),
    (
        {"trainer": {"data": {"path": []}}},
        ("trainer.data.path: saw []", "is not empty"),
    ),
    (
        {"trainer": {"engine": "fsdp"}},
        ('trainer.engine: saw "fsdp"', 'expected "auto", "deepspeed", "accelerate" or "mesh"'),
    ),
    ({"trainer": {"model": 3}}, ("trainer.model: saw 3", "expected a section {...}")),
    (
        {"trainer": {"model": {"config": 3}}},
        ("trainer.model.config: saw 3", "expected a section {...} or text"),
    ),
    (
        {"trainer": {"log": {"trackers": ["comet"]}}},
        ('trainer.log.trackers[0]: saw "comet"', '"tensorboard"', "trainer.plugins"),
    ),
    (
        {"trainer": {"log": {"sample_ids": "maybe"}}},
        ('trainer.log.sample_ids: saw "maybe"', "expected true or false"),
    ),
    (
        {"trainer": {"data": {"path": "a.jsonl", "stream": True}}},
        ("trainer.steps: saw none", "of unknown length", "expected a number"),
    ),
    (
        {"trainer": {"steps": 1, "data": {"sources": [{"path": "a.jsonl"}], "stream": True}}},
        ("trainer.data.stream: saw true, with sources", "expected one trainer.data.path"),
    ),
    (
        {"trainer": {"steps": 1, "data": {"path": "a.jsonl", "stream": True, "max_rows": 3}}},
        ("trainer.data.max_rows: saw 3, with trainer.data.stream", "reads all rows"),
    ),
    (
        {"trainer": {"run": {"name": "a/b"}}},
        ('trainer.run.name: saw "a/b"', "at most 100"),
    ),
    (
        {"trainer": {"activation_checkpointing": "every:0"}},
        ('trainer.activation_checkpointing: saw "every:0"', '"none"', '"every:N"'),
    ),
    (
        {"trainer": {"float8_head": True}},
        ("trainer.float8_head: saw true", 'trainer.float8 "none"', "rowwise"),
    ),
    *(
        (
            {"trainer": {"task": task, "float8": "rowwise", "float8_head": True}},
            ("trainer.float8_head: saw true", 'the task "causal_lm"', task),
        )
        for task in ("masked_lm", "pairs", "distillation", "labels")
    ),
    (
        {"trainer": {"evaluation": {"every": 0}}},
        ("trainer.evaluation.every: saw 0", "off", "trainer.data.evaluation_fraction"),
    ),
    *(
        (
            {
                "trainer": {
                    "checkpoint": {"every": 10, "keep_best": True},
                    "evaluation": {"every": every},
                }
            },
            (
                "trainer.checkpoint.keep_best: saw true",
                "trainer.checkpoint.every 10",
                f"trainer.evaluation.every {every or 'null'}",
                "at each checkpoint",
            ),
        )
        for every in (3, None)
    ),
]


@pytest.mark.parametrize(
    ("content", "keys"), CONFLICTS, ids=[keys[0].split(":")[0] for _, keys in CONFLICTS]
)
def test_what_does_not_fit_is_one_error(
    tmp_path: Path, content: dict[str, Any], keys: tuple[str, ...]
) -> None:
    [error] = errors(tmp_path, content)
    assert error.startswith(keys[0])
    shows(error, *keys)


@pytest.mark.parametrize("every", [5, 10])
def test_the_best_is_kept_where_each_checkpoint_is_evaluated(tmp_path: Path, every: int) -> None:
    section = {"checkpoint": {"every": 10, "keep_best": True}, "evaluation": {"every": every}}
    assert compile_(tmp_path, {"trainer": section}).trainer.checkpoint.keep_best


NO_CONFIG = [
    ("[1]", (": saw [1]", "expected a JSON object {...}")),
    (
        '{"a": 1, "b": {"a": 1,\n "c": "{", "a": 2}}',
        (":2: saw the key", '"a" twice', "in one section", "expected once"),
    ),
    ('{"a": 1, "a": 2}', (":1: saw the key", '"a" twice', "in one section", "expected once")),
    ('{"a": NaN}', (":1:7: saw NaN", "expected a finite number")),
    (
        (
            '{"x": "NaN", "y": [-0.5, 1e400],\n "optimizer": {"params": {\n "betas": [0.9, '
            "-Infinity]}}}"
        ),
        (":3:17: saw -Infinity", "expected a finite number"),
    ),
    (
        f'{{"a": {"9" * 5000}}}',
        (":1:4308: number", 'range at "99999999999999999999"', "expected JSON"),
    ),
    (
        f'{{"a": {"9" * 2000}}}',
        (": a: saw a number", "than 1,000 digits", "expected a finite number"),
    ),
    ('{"a": {"b": 1e999}}', (": a.b: saw Infinity", "expected a finite number")),
    ('{"é": 1, "ß": [NaN]}', (":1:16: saw NaN", "expected a finite number")),
    *(
        (
            text,
            (
                (
                    ": an Accelerate config",
                    "expected a DeepSpeed JSON config",
                    "deepspeed_config_file",
                )
            ),
        )
        for text in (
            '{"compute_environment": "LOCAL_MACHINE"}',
            '{"distributed_type": "DEEPSPEED"}',
        )
    ),
    (
        '{"model_type": "llama", "hidden_size": 8}',
        (": a model's config", "expected a DeepSpeed JSON config", "trainer.model.config"),
    ),
    (
        '{"output_dir": "x", "learning_rate": 1e-4}',
        (
            (
                ": arguments of",
                "Hugging Face's Trainer",
                "expected a DeepSpeed JSON config",
                '"deepspeed"',
            )
        ),
    ),
    *(
        (
            text,
            ((": sections nested", "than 40 deep", "DeepSpeed JSON config")),
        )
        for text in (
            '{"a":' * 900 + "1" + "}" * 900,
            "[" * 100_000,
            '{"a": ' + "[" * 50 + "]" * 50 + "}",
        )
    ),
    (
        '{"a": "x\\u0000"}',
        (': a: saw "x\\u0000"', "halves of characters"),
    ),
    (
        '{"\\ud800": 1}',
        (":1:9: ", 'at "\\": 1}"', "expected JSON"),
    ),
]


@pytest.mark.parametrize(("content", "keys"), NO_CONFIG, ids=range(len(NO_CONFIG)))
def test_json_that_is_no_config(tmp_path: Path, content: str, keys: tuple[str, ...]) -> None:
    [error] = errors(tmp_path, content)
    assert error.startswith(f"c.json{keys[0]}")
    shows(error, *keys)


NO_JSON = {
    "": ":1:1: EOF while parsing a value at the end",
    " \n": ":2:1: EOF while parsing a value at the end",
    "{'a': 1}": ":1:2: ",
    '{"a": True}': ':1:7: expected value at "True}"',
    '{"a": 1,, "b": 2}': ":1:9: ",
    '{"a": 1': ":1:8: EOF while parsing an object at the end",
    '{"a": "x': ":1:9: ",
    '{"a": "x\ty"}': ":1:9: ",
    '{"a": "C:\\dir"}': ":1:11: ",
    '{"a": 1}\n{"a": 2}': ":2:1: trailing characters at ",
    '{\n "a" 1}': ':2:6: expected `:` at "1}"',
    "zero_optimization:\n  stage: 3\n": ':1:1: expected value at "zero_optimization:\\n "',
    "<!DOCTYPE html>": ":1:1: ",
    '{"a": 1 /* x\n */ "b": 2}': ":2:5: ",
}


@pytest.mark.parametrize("content", NO_JSON)
def test_text_that_is_no_json_is_one_sentence_with_its_place(tmp_path: Path, content: str) -> None:
    [line] = errors(tmp_path, content)
    assert line.startswith(f"c.json{NO_JSON[content]}") and line.endswith("; expected JSON")


@pytest.mark.parametrize(
    "text", ['{"' + '\\"' * ((1 << 19) - 2), "/* " * 349_000, '{"a": "' + "\\" * 1_000_000]
)
def test_what_is_never_closed_is_read_once(tmp_path: Path, text: str) -> None:
    """A megabyte takes a moment: if each opening were followed to the end, it would take an
    hour.
    """
    [line] = errors(tmp_path, text)
    assert line.endswith("; expected JSON")


def test_any_line_end_ends_a_comment(tmp_path: Path) -> None:
    for end in ("\n", "\r\n", "\r"):
        (tmp_path / "c.json").write_bytes(
            f'{{"seed": 1, # x{end} "train_batch_size": 8 // y{end}}}'.encode()
        )
        assert read(tmp_path / "c.json") == {"seed": 1, "train_batch_size": 8}
    (tmp_path / "c.json").write_bytes(b'\xef\xbb\xbf{"a":"\xff"}')
    with raises(ConfigError, "byte 9 is", "UTF-8"):
        read(tmp_path / "c.json")


def test_comments_and_a_byte_order_mark_are_read_as_deepspeed_reads_them(tmp_path: Path) -> None:
    from deepspeed.runtime.config import hjson

    text = """// of the whole
    {"train_batch_size": 8, # of all ranks
     /* not "trainer": {"steps": 9}, */
     "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "_": "http://x/*y*/#z"
    }"""
    path = tmp_path / "c.json"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    result = load(path)
    assert result.raw == hjson.loads(text)
    assert result.settings["train_batch_size"] == 8


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "zero2.json").write_bytes(b"{\xff}")
    (tmp_path / "link").symlink_to("gone")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text('{"a": [' + "1," * (1 << 20) + "1]}")
    (tmp_path / "16").write_bytes('{"a": 1}'.encode("utf-16"))
    (tmp_path / "32").write_bytes('{"a": 1}'.encode("utf-32-be"))
    (tmp_path / "zip").write_bytes(b"\0\1\2\3")
    messages = {}
    for name in (
        "zero9.json",
        ".",
        "zero2.json",
        "link",
        "pipe",
        "large",
        "16",
        "32",
        "zip",
        "/dev/zero",
    ):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path / name)
        messages[name] = str(caught.value).replace(str(tmp_path), "F")
    there = f"In F: zero2.json. Shipped: {', '.join(path.stem for path in SHIPPED)}"
    shows_each(
        messages.values(),
        ("F/zero9.json: no such file", there),
        "F: no regular file",
        ("F/zero2.json: byte 1", "not UTF-8"),
        ("F/link: a link to gone", there),
        "F/pipe: no regular file",
        ("F/large", "1.0 MiB"),
        ("F/16: byte 0", "not UTF-8"),
        ("F/32:1:1", "\\u0000"),
        ("F/zip:1:1", "\\u0000\\u0001\\u0002\\u0003", "expected JSON"),
        "/dev/zero: no regular file",
    )


def test_a_config_that_is_shipped_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = HERE.parent.parent / "ds_configs" / "zero2.json"
    assert shipped("zero2") == shipped("zero2.json") == path
    assert load("zero2").path == load(Path("zero2.json")).path == path
    assert [shipped(name) for name in ("", ".json", "zero9", "../ds_configs/zero2", str(path))] == [
        None
    ] * 5
    (tmp_path / "zero2.json").write_text('{"zero_optimization": {"stage": 1}}')
    assert (
        load("zero2.json").settings["zero_optimization"]["stage"] == 1
    )  # a file of one's own comes first
    with raises(ConfigError, "zero9", "such file", "zero2.json", "Shipped"):
        load("zero9")


def test_overrides_are_json_or_text_and_make_sections(tmp_path: Path) -> None:
    config = compile_(
        tmp_path,
        {"zero_optimization": ZERO1},
        "zero_optimization.stage=2",
        "trainer.steps=7",
        "trainer.run.name=x=y",
    )
    assert config.settings["zero_optimization"]["stage"] == 2
    assert (config.trainer.steps, config.trainer.run.name) == (7, "x=y")
    assert {config.origins[key] for key in ("zero_optimization.stage", "trainer.steps")} == {
        "override"
    }
    assert config.origins["trainer.seed"] == "default"
    assert config.raw["trainer"] == {"steps": 7, "run": {"name": "x=y"}}


def test_bad_overrides(tmp_path: Path) -> None:
    shows_each(
        errors(tmp_path, {"train_batch_size": 8}, "nonsense", "train_batch_size.x=1", ".a=1"),
        ("nonsense", "without a key path", "key.path=value"),
        ('train_batch_size.x=1: "train_batch_size" is 8', "itself instead"),
        (".a=1", "without a key path", "key.path=value"),
    )


def test_thousands_of_mistakes_are_twenty_lines_and_a_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.config.keys import hints

    compared: list[str] = []
    alike = hints.get_close_matches
    monkeypatch.setattr(
        hints,
        "get_close_matches",
        lambda name, *a, **k: compared.append(name) or alike(name, *a, **k),
    )
    names = {f"stepss{i}": 1 for i in range(10_000)}
    for content in (
        names,
        {"fp16": names},
        {"trainer": names},
        {"optimizer": {"type": "Adam", "params": names}},
    ):
        compared.clear()
        with pytest.raises(ConfigError) as caught:
            compile_(tmp_path, content)
        lines = caught.value.render().splitlines()
        assert len(lines) == 22
        assert "(10000 problems)" in lines[0] and "9,980 more" in lines[-1]
        assert len(compared) <= 40
    with pytest.raises(ConfigError) as caught:
        compile_(
            tmp_path, {"k" * 1_000_000: "v" * 1000}, "y" * 1_000_000 + "=1", "x=" + "z" * 5_000_000
        )
    assert max(map(len, caught.value.render().splitlines())) < 1000


def test_overrides_are_bounded_and_checked_as_the_file_is(tmp_path: Path) -> None:
    deep = ".".join("a" * 500)
    shows_each(
        errors(
            tmp_path,
            {},
            'fp16={"enabled": true, "enabled": false}',
            "zero_optimization=" + "[" * 200,
        ),
        ('fp16={"enabled"', '"enabled" twice'),
        ("zero_optimization", f"{'[' * 56}...", "section {...}"),
    )
    shows(errors(tmp_path, {}, f"{deep}=1")[0], "without a key path")
    assert (
        "nested more than 40"
        in errors(tmp_path, {}, "trainer.model.config=" + '{"a":' * 50 + "1" + "}" * 50)[0]
    )


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
VALUES = anything | st.sampled_from(
    ["auto", "1", "true", 0, 1, 2, 3, -1, 10**18, 1e308, {}, [], {"enabled": True}]
)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.dictionaries(st.deferred(lambda: st.sampled_from(EVERY_KEY)), VALUES, max_size=8), anything
)
def test_any_json_is_a_config_or_an_error(
    tmp_path: Path, known: dict[str, Any], whole: Any
) -> None:
    content: dict[str, Any] = {}
    for path, value in known.items():
        *sections, name = path.split(".")
        inner = content
        for section in sections:
            if not isinstance(inner.get(section), dict):
                inner[section] = {}
            inner = inner[section]
        inner[name] = deepcopy(value)  # sampled values are one object each time
    for tried in (content, whole):
        try:
            config = compile_(tmp_path, tried)
            config = resolve(config, RuntimeFacts(8, 64, 100, True, "cuda"))
            support.notes(config, "mesh"), support.refusals(config), layout_of(config, 8)
        except ConfigError as error:
            assert error.problems and len(error.render()) < 30_000


names = st.text("abcdefgh_", min_size=1, max_size=4)
texts = st.text(
    st.characters(exclude_characters="\0", exclude_categories=("Cs",))
)  # what no file system takes is refused
values = (
    st.none()
    | st.booleans()
    | st.integers()
    | texts
    | st.floats(allow_nan=False, allow_infinity=False)
)


@quick
@given(st.lists(names, min_size=1, max_size=4), values)
def test_an_override_round_trips(path: list[str], value: Any) -> None:
    text = f"{'.'.join(path)}={json.dumps(value)}"
    result, paths, problems = override({}, [text])
    assert not problems and paths == [".".join(path)]
    assert dict(leaves(result)) == {".".join(path): value}


def one_edit(name: str, kind: int, at: int, letter: str) -> str:
    at %= len(name)
    return [
        name[:at] + name[at + 1 :],
        name[:at] + letter + name[at:],
        name[:at] + letter + name[at + 1 :],
        name[:at] + name[at + 1 : at + 2] + name[at] + name[at + 2 :],
    ][kind]


EVERY_KEY = [*KEYS, *OWN_KEYS]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(EVERY_KEY), st.integers(0, 3), st.integers(0, 60), st.sampled_from("xqz_s"))
def test_one_wrong_letter_names_the_right_key(path: str, kind: int, at: int, letter: str) -> None:
    section, dot, name = path.rpartition(".")
    if len(name) < 3:
        return
    wrong = section + dot + one_edit(name, kind, at, letter)
    if wrong in EVERY_KEY or wrong.startswith(("_", f"{section}{dot}_")):
        return
    problem = unknown(wrong, 1, EVERY_KEY)
    assert f'"{name}"' in problem.hint, problem


def test_a_misspelt_key_fails_through_load(tmp_path: Path) -> None:
    listed = (".sources.", ".parameter_groups.")
    for path in [key for key in EVERY_KEY if not any(part in key for part in listed)][::9]:
        name = path.rpartition(".")[2] + "x"
        result = errors(tmp_path, {}, f"{path.rpartition('.')[0]}.{name}=1".removeprefix("."))
        hint = (
            f'Remove it: "{name[:-1]}", which is like it, does'
            if path in USELESS
            else f'Did you mean "{name[:-1]}"'
        )
        assert any("expected a known key" in text and hint in text for text in result), path


USELESS = {
    path for path in useless(KEYS) if not path.startswith("activation_checkpointing.")
}  # which recomputes


@pytest.mark.parametrize(
    ("override", "leads_to"),
    [
        ("lr=1e-5", "optimizer.params.lr"),
        ("trainer.lr=1e-5", "optimizer.params.lr"),
        ("optimizer.lr=1e-5", "optimizer.params.lr"),
        ("learning_rate=1e-5", "optimizer.params.lr"),
        ("optimizer.params.learning_rate=1e-5", "optimizer.params.lr"),
        ("warmup_ratio=0.1", "trainer.warmup_ratio"),
        ("scheduler.params.warmup_ratio=0.1", "trainer.warmup_ratio"),
        ("scheduler.params.warmup_steps=9", "scheduler.params.warmup_num_steps"),
        ("warmup_num_steps=9", "scheduler.params.warmup_num_steps"),
        ("weight_decay=0.1", "optimizer.params.weight_decay"),
        ("trainer.gradient_clipping=1", "gradient_clipping"),
        ("trainer.zero_optimization.stage=3", "zero_optimization"),
        ("stage=3", "zero_optimization.stage"),
        ("max_steps=9", "trainer.steps"),
        ("trainer.sequence_length=9", "trainer.data.sequence_length"),
        ("trainer.lora.r=8", "trainer.adapter"),
    ],
)
def test_a_key_of_another_section_is_found_by_its_last_name(
    tmp_path: Path, override: str, leads_to: str
) -> None:
    sections = {
        "optimizer": {"type": "AdamW", "params": {}},
        "scheduler": {"type": "WarmupLR", "params": {}},
    }
    (result,) = errors(tmp_path, sections, override)
    assert result.startswith(override.partition("=")[0][: len("trainer.lora")])
    hint = result.rpartition("Did you mean ")[2]
    assert leads_to in re.split(r" or |\?", hint), result


@pytest.mark.parametrize("name", ["warmup_ratio", "min_lr", "cos_max_ratio", "end_lr", "lr_decay"])
def test_no_parameter_with_other_words_is_proposed(tmp_path: Path, name: str) -> None:
    """It would train otherwise."""
    scheduler = {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, name: 0.1}}
    (result,) = errors(tmp_path, {"scheduler": scheduler})
    assert "_min_ratio" not in result and '"warmup_' not in result, result


def test_spaces_around_the_sign_are_named(tmp_path: Path) -> None:
    result = errors(tmp_path, {}, "trainer.steps", "=", "3")
    assert all("without spaces" in one for one in result), result


def test_no_type_at_all_is_not_like_any(tmp_path: Path) -> None:
    (result,) = errors(tmp_path, {"scheduler": {"params": {"warmup_num_steps": 3}}})
    assert "saw no type" in result and "Did you mean" not in result


def hinted(place: str, name: str, value: Any = 1) -> tuple[str, set[str]]:
    """The hint for a key below a section, and the paths that it leads to."""
    hint = check({name: value}, KEYS, ("trainer", *OWN_KEYS), place).problems[0].hint
    names = (
        re.findall(r'"?([\w.]+)"?', hint.removeprefix("Did you mean "))
        if hint.startswith("Did you mean")
        else []
    )
    return hint, {
        name if "." in name and name in EVERY_KEY else place + name
        for name in names
        if name != "or"
    }


def leads_astray(path: str, at: int, kind: int) -> bool:
    section, dot, name = path.rpartition(".")
    wrong = one_edit(name, kind, at, "x")
    if f"{section}{dot}{wrong}" in KEYS or not wrong or wrong.startswith("_"):
        return False
    _, led = hinted(section + dot, wrong)
    return not {path.rstrip(".") for path in led} <= set(EVERY_KEY) - USELESS


def test_no_hint_leads_to_a_key_without_effect_or_to_a_removed_one() -> None:
    places = [(path, at) for path in KEYS for at in range(len(path.rpartition(".")[2]))]
    assert not [case for case in places[::23] if leads_astray(*case, kind=len(case[0]) % 4)]
    shows(hinted("", "elastcity")[0], "Remove it", '"elasticity"', "batch sizes")
    shows(hinted("", "stpes_per_print")[0], "Remove it", '"steps_per_print"', "nothing")
    assert hinted("", "gradient_cliping")[1] == {"gradient_clipping"}
    assert hinted("activation_checkpointing.", "profil")[1] == {"activation_checkpointing.profile"}


@pytest.mark.more
@pytest.mark.parametrize("kind", range(4))
def test_no_typo_of_one_letter_leads_to_a_key_without_effect(kind: int) -> None:
    places = [(path, at) for path in KEYS for at in range(len(path.rpartition(".")[2]))]
    assert not [case for case in places if leads_astray(*case, kind=kind)]


def test_what_a_note_or_a_refusal_names_in_place_of_a_key_is_a_key_with_an_effect() -> None:
    known = set(EVERY_KEY) - USELESS
    named = []
    for path, key in KEYS.items():
        for name in re.findall(
            r"(?:[Uu]se|see|set) ((?:[a-z]+\.)+[a-z_.]+|[a-z]+(?:_[a-z]+)+)",
            key.idle or key.refused,
        ):
            named.append(name)
            assert {
                name,
                f"{path.rpartition('.')[0]}.{name}",
                f"zero_optimization.{name}",
            } & known, (path, name)
    assert len(named) > 12


def test_optimizers_that_no_engine_builds_are_in_no_hint() -> None:
    assert {
        name for name, row in ROWS.items() if all(isinstance(it, No) for it in vars(row).values())
    } == set(UNBUILT)
    for name in ("Lam", "MuAdamm", "muadam_w", "lamb2"):
        with pytest.raises(ConfigError) as caught:
            load({"optimizer": {"type": name, "params": {}}})
        assert not re.search("Lamb|Mu[AS]", str(caught.value).split("expected")[1]), caught.value


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31m", "a\r", "a\u2028b", "a\x85b", "x\n.y"])
def test_a_key_with_a_line_break_or_a_control_character_is_one_line_that_shows_it(
    tmp_path: Path, name: str
) -> None:
    named = {"trainer": {"data": {"evaluation_path": {name: 3}}}}
    for content in (
        {name: 1},
        {"fp16": {name: 1}},
        {"trainer": {name: 1}},
        named,
        {"optimizer": {name: {}}},
    ):
        with pytest.raises(ConfigError) as caught:
            compile_(tmp_path, content)
        lines = caught.value.render().splitlines()
        assert len(lines) == 1 + len(caught.value.problems) and all(
            line.isprintable() for line in lines
        ), lines
        assert len(str(caught.value).splitlines()) == len(caught.value.problems)
    for text in (f"{name}=1", name, f"fp16.{name}=1", f"trainer.{name}={{}}"):
        with pytest.raises(ConfigError) as caught:
            compile_(tmp_path, {}, text)
        assert all(line.isprintable() for line in caught.value.render().splitlines())


# A key on the command line against another of the file

WARM = {"type": "WarmupLR", "params": {"warmup_num_steps": 50}}
AUTO_WARM = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
GIVES_WAY: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    (
        {"trainer": {"steps": 500}},
        "trainer.epochs=1",
        "trainer.steps",
        {"trainer.steps": None, "trainer.epochs": 1},
    ),
    (
        {"trainer": {"epochs": 2}},
        "trainer.steps=9",
        "trainer.epochs",
        {"trainer.steps": 9, "trainer.epochs": None},
    ),
    (
        {"trainer": {"model": {"config": {"n": 1}}}},
        "trainer.model.name_or_path=m",
        "trainer.model.config",
        {"trainer.model.config": None},
    ),
    (
        {"trainer": {"model": {"name_or_path": "m"}}},
        'trainer.model.config={"n": 1}',
        "trainer.model.name_or_path",
        {"trainer.model.name_or_path": None},
    ),
    (
        {"trainer": {"data": {"sources": [{"path": "a"}]}}},
        "trainer.data.path=b",
        "trainer.data.sources",
        {"trainer.data.sources": [], "trainer.data.path": "b"},
    ),
    (
        {"fp16": {"enabled": True}},
        "bf16.enabled=true",
        "fp16.enabled",
        {"bf16.enabled": True, "fp16.enabled": None},
    ),
    (
        {"scheduler": WARM},
        "trainer.warmup_ratio=0.1",
        "scheduler.params.warmup_num_steps",
        {"trainer.warmup_ratio": 0.1},
    ),
    (
        {"scheduler": AUTO_WARM, "trainer": {"warmup_ratio": 0.1}},
        "scheduler.params.warmup_num_steps=5",
        "trainer.warmup_ratio",
        {"scheduler.params.warmup_num_steps": 5, "trainer.warmup_ratio": None},
    ),
    (
        {"zero_optimization": {"stage": 2, "mics_shard_size": 4}},
        "trainer.mesh.shard=2",
        "zero_optimization.mics_shard_size",
        {"trainer.mesh.shard": 2},
    ),
    ({"bfloat16": {"enabled": True}}, "bf16.enabled=false", "bfloat16", {"bf16.enabled": False}),
    (
        {"zero_optimization": {"stage": 3, "cpu_offload": True}},
        'zero_optimization.offload_optimizer={"device": "none"}',
        "zero_optimization.cpu_offload",
        {"zero_optimization.offload_optimizer.device": "none"},
    ),
]
SHORT = {
    "batch": "train_batch_size",
    "micro": "train_micro_batch_size_per_gpu",
    "steps": "gradient_accumulation_steps",
}


@pytest.mark.parametrize(
    ("content", "line", "gone", "values"), GIVES_WAY, ids=[gone for _, _, gone, _ in GIVES_WAY]
)
def test_the_command_line_goes_before_the_file_where_both_can_not_be(
    tmp_path: Path, content: dict[str, Any], line: str, gone: str, values: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        compile_(tmp_path, override(content, [line])[0])  # in one file neither is the stronger
    config = compile_(tmp_path, content, line)
    result = dict(leaves(config.settings)) | dict(leaves({"trainer": config.trainer.model_dump()}))
    assert {path: result.get(path) for path in values} == values
    message = (
        f"gives way to {'bf16' if gone == 'bfloat16' else line.partition('=')[0]} on the "
        "command line"
    )
    assert [note for note in config.notes if note.startswith(f"{gone} ") and note.endswith(message)]
    assert config.origins[gone].startswith("auto: the file's ") and config.origins[gone].endswith(
        message
    )


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ({"batch": 32}, (32, 8, 4)),
        ({"micro": 4}, (16, 4, 4)),
        ({"steps": 4}, (16, 4, 4)),
        ({"micro": 4, "steps": 2}, (8, 4, 2)),
        ({"batch": 8, "steps": 2}, (8, 4, 2)),
        ({"batch": 8, "micro": 8}, (8, 8, 1)),
        ({"batch": 8, "micro": 4, "steps": 2}, (8, 4, 2)),
    ],
)
def test_batch_sizes_of_the_file_give_way_to_those_of_the_command_line(
    tmp_path: Path, line: dict[str, int], wanted: tuple[int, int, int]
) -> None:
    sizes = dict(zip(SHORT.values(), (16, 8, 2), strict=True))
    config = compile_(tmp_path, sizes, *(f"{SHORT[name]}={size}" for name, size in line.items()))
    result = resolve(config, RuntimeFacts(1, 64, 100, False, "cpu")).settings
    assert tuple(result[name] for name in SHORT.values()) == wanted
    assert len(config.notes) == (len(line) < 3)


def test_nothing_gives_way_to_what_asks_for_nothing_or_stands_in_the_same_place(
    tmp_path: Path,
) -> None:
    for text in (
        "trainer.epochs=null",
        "bf16.enabled=false",
        "bf16.enabled=auto",
        "trainer.seed=3",
    ):
        config = compile_(tmp_path, {"trainer": {"steps": 5}, "fp16": {"enabled": True}}, text)
        assert (config.trainer.steps, config.settings["fp16"]["enabled"], config.notes) == (
            5,
            True,
            (),
        )
    shows_each(
        errors(tmp_path, {}, "trainer.steps=3", "trainer.epochs=1"),
        ("trainer.steps: saw 3", "trainer.epochs 1.0", "most"),
    )
    section = {
        "task": "image_classification",
        "model": {"name_or_path": "resnet18", "config": {"a": 1}},
    }
    model = compile_(
        tmp_path, {"trainer": section}, "trainer.model.name_or_path=resnet50"
    ).trainer.model
    assert (model.name_or_path, model.config) == ("resnet50", {"a": 1})


def test_keys_and_texts_of_half_a_megabyte_cost_no_memory_or_time_each(tmp_path: Path) -> None:
    long = {"k" * 300_000: dict.fromkeys(map(str, range(30_000)), 1)}
    started = time.process_time()
    assert "saw NaN" in errors(tmp_path, json.dumps(long)[:-2] + ', "n": NaN}}')[0]
    compile_(tmp_path, {"trainer": {"seed": 1}}, 'trainer.run.folder="' + '\\"' * 100_000)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_takes_epochs_from_the_command_line(path: Path) -> None:
    config = load(path, ["trainer.epochs=1"])
    assert (config.trainer.steps, config.trainer.epochs) == (None, 1)
    shows_each(config.notes, ("trainer.steps 1450 in", "gives way", "trainer.epochs"))


@pytest.mark.parametrize(
    ("content", "noted"),
    [
        ({"cuda_visible_devices": 0}, "cuda_visible_devices"),
        ({"steps_per_print": 0}, "steps_per_print"),
        ({"checkpoint": {"use_node_local_storage": True}}, "checkpoint"),
        ({"pipeline": {"pipe_partitioned": False}}, "pipeline.pipe_partitioned"),
        (
            {"optimizer": {"type": "Adam", "params": {"set_grad_none": True}}},
            "optimizer.params.set_grad_none",
        ),
        ({"fp16": {"loss_scale": 128}}, "fp16"),
        ({"torch_autocast": {"dtype": "bfloat16"}}, "torch_autocast"),
        ({"comms_logger": {"prof_all": False}}, "comms_logger"),
        ({"zero_optimization": {"overlap_comm": True}}, "zero_optimization"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"ratio": 1}}},
            "zero_optimization.offload_optimizer",
        ),
        ({"aio": {"queue_depth": 8}}, "aio"),
        ({"pipeline": {"partition": "uniform"}}, "pipeline.partition"),
        ({"trainer": {"pipeline_schedule": "GPipe"}}, "trainer.pipeline_schedule"),
        ({"tensor_parallel": {"tp_overlap_comm": True}}, "tensor_parallel.tp_overlap_comm"),
        (
            {"data_efficiency": {"data_routing": {"random_ltd": {"total_layer_num": 24}}}},
            "data_efficiency",
        ),
    ],
    ids=str,
)
def test_what_has_no_effect_is_noted(tmp_path: Path, content: dict[str, Any], noted: str) -> None:
    (note,) = compile_(tmp_path, content).notes
    shows(note, f"{noted}", "effect")


def test_values_are_coerced_as_deepspeed_does(tmp_path: Path) -> None:
    zero = {
        "stage": 3.0,
        "reduce_bucket_size": 5e8,
        "overlap_comm": "true",
        "offload_param": {"device": "CPU"},
    }
    settings_ = compile_(tmp_path, {"zero_optimization": zero, "gradient_clipping": "0.5"}).settings
    assert settings_["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 500_000_000,
        "overlap_comm": True,
        "offload_param": {"device": "cpu"},
    }
    assert isinstance(settings_["zero_optimization"]["reduce_bucket_size"], int)
    assert settings_["gradient_clipping"] == 0.5


@pytest.mark.parametrize("value", [True, "x", [1], {"a": 1}, 1e999, 10**400, None])
def test_what_is_no_number(tmp_path: Path, value: Any) -> None:
    (text,) = errors(
        tmp_path, json.dumps({"gradient_predivide_factor": value}).replace("Infinity", "1e999")
    )
    expected = "a finite number" if value == 1e999 else "a number above 0"
    shows(text, "gradient_predivide_factor: saw ", expected)


def test_older_keys_become_the_present_ones(tmp_path: Path) -> None:
    zero = {
        "stage": 3,
        "cpu_offload": True,
        "cpu_offload_param": True,
        "mics_shard_size": 2,
        "max_reuse_distance": 5,
    }
    content = {
        "zero_optimization": zero,
        "bfloat16": {"enabled": True},
        "activation_checkpointing": {"profile": True},
    }
    config = compile_(tmp_path, content)
    assert config.deepspeed == {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "stage3_max_reuse_distance": 5,
        },
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
        },
        "gradient_clipping": 1.0,
    }
    assert (config.trainer.mesh.shard, config.trainer.activation_checkpointing) == (2, "full")
    shows(config.origins["trainer.activation_checkpointing"], "activation_checkpointing section")
    assert config.origins["optimizer.type"] == config.origins["optimizer.params.lr"] == OWN
    assert config.origins["trainer.mesh.shard"] == "auto: from zero_optimization.mics_shard_size"


OWN = "default: Hugging Face's; DeepSpeed has none"
OFF = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "profile")


@pytest.mark.parametrize("off", [False, "false", 0])
def test_a_checkpointing_section_that_is_all_off_recomputes_nothing(
    tmp_path: Path, off: Any
) -> None:
    section = {"_why": "mine", "number_checkpoints": None, "synchronize_checkpoint_boundary": off}
    section |= dict.fromkeys(OFF, off)
    config = compile_(tmp_path, {"activation_checkpointing": section})
    assert (config.trainer.activation_checkpointing, config.notes) == ("none", ())
    for name in OFF:
        config = compile_(tmp_path, {"activation_checkpointing": section | {name: True}})
        mode = "offload" if name == "cpu_checkpointing" else "full"
        assert config.trainer.activation_checkpointing == mode


def test_parameters_are_offloaded_under_zero_3_alone(tmp_path: Path) -> None:
    zero = {"stage": 2, "offload_param": {"device": "cpu", "pin_memory": True}}
    config = compile_(tmp_path, {"zero_optimization": zero})
    shows_each(config.notes, ("zero_optimization.offload_param", "effect", "ZeRO", "is 2"))
    assert config.settings["zero_optimization"] == {"stage": 2}


def test_sections_that_change_nothing_pass(tmp_path: Path) -> None:
    routing = {"enabled": False, "random_ltd": {"enabled": False, "total_layer_num": 24}}
    content = {
        "data_efficiency": {
            "enabled": True,
            "data_routing": routing,
            "data_sampling": {"dynamic_batching": {}},
        },
        "comms_config": {"x": 1},
        "monitor_config": {},
        "log": "info",
        "cuda_visible_devices": "0,1",
    }
    assert [note.split(" ")[0] for note in compile_(tmp_path, content).notes] == [
        "data_efficiency",
        "comms_config",
        "log",
        "cuda_visible_devices",
    ]


@pytest.mark.parametrize(
    "content",
    [
        {"managed_gradient_accumulation": "true"},
        {"optimizer": {"type": "SGD", "params": {"capturable": "false"}}},
        {"torch_autocast": {"enabled": False, "dtype": "fp16"}},
    ],
    ids=str,
)
def test_what_is_refused_passes_at_the_value_that_asks_for_nothing(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    assert compile_(tmp_path, content).notes == ()


def test_the_users_own_recompute_wins(tmp_path: Path) -> None:
    content = {
        "activation_checkpointing": {"profile": True},
        "trainer": {"activation_checkpointing": "every:2"},
    }
    config = compile_(tmp_path, content)
    assert config.trainer.activation_checkpointing == "every:2"
    (note,) = config.notes
    shows(note, "activation_checkpointing.profile", "effect", "deepspeed.checkpointing")


def test_notes_name_keys_without_effect_and_deepspeed_never_sees_them(tmp_path: Path) -> None:
    content = {
        "zero_optimization": {
            "stage": 2,
            "stage3_max_live_parameters": 1e9,
            "round_robin_gradients": True,
            "compute_grad_norm": False,
        },
        "tensor_parallel": {"autotp_size": 1, "preset_model": "llama"},
        "steps_per_print": 10,
        "wandb": {"enabled": True},
        "csv_monitor": {"enabled": False},
        "scheduler": {"type": "warmuplr", "params": {"warmup_num_steps": 0}},
        "_comment": "mine",
    }
    config = compile_(tmp_path, content)
    shows_each(
        config.notes,
        ("zero_optimization.round_robin_gradients", "DeepSpeed", "parameter's state"),
        ("zero_optimization.compute_grad_norm", "always taken"),
        ("tensor_parallel.preset_model", "model's own"),
        ("steps_per_print", "trainer.log.every", "printed"),
        ("wandb", "trainer.log.trackers"),
        ("scheduler.params.warmup_num_steps: 0 is", "as 1", "least", "DeepSpeed"),
        ("zero_optimization.stage3_max_live_parameters", "effect", "ZeRO", "is 2"),
    )
    assert set(config.deepspeed) == {
        "zero_optimization",
        "tensor_parallel",
        "optimizer",
        "gradient_clipping",
    }
    assert config.deepspeed["zero_optimization"].keys() == {"stage", "stage3_max_live_parameters"}
    assert config.deepspeed["tensor_parallel"] == {"autotp_size": 1}
    assert config.scheduler is not None and config.scheduler.type == "WarmupLR"


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (
            {"sources": [{"path": "a", "wieght": 1}]},
            ("trainer.data.sources[0].wieght: saw 1", 'Did you mean "weight"'),
        ),
        ({"sources": [{"weight": 1}]}, ("trainer.data.sources[0].path: ",)),
        (
            {"sources": [{"path": "a", "weight": 0}]},
            ("trainer.data.sources[0].weight: saw 0", "a number above 0"),
        ),
        (
            {"path": "b", "sources": [{"path": "a"}]},
            ('trainer.data.path: saw "b"', 'trainer.data.sources [{"path": "a"}]', "at most one"),
        ),
        (
            {"sources": [{"path": "a", "weight": 1}, {"path": "b"}]},
            ("saw 1 with a weight", "0 with epochs"),
        ),
        ({"sources": [{"path": "a"}, {"path": "a"}]}, ('saw "a" twice', "another label")),
        (
            {"too_long": "drop", "documents": "concatenate"},
            ('trainer.data.too_long: saw "drop"', 'trainer.data.documents "concatenate"'),
        ),
    ],
)
def test_mixtures_that_do_not_fit_say_so(
    tmp_path: Path, data: dict[str, Any], keys: tuple[str, ...]
) -> None:
    result = errors(tmp_path, {"trainer": {"data": data}})
    assert any(all(key in text for key in keys) for text in result), result
    shows("\n".join(result), *keys)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), [0.9, float("nan")]])
@pytest.mark.parametrize(
    "path", ["optimizer.params.betas", "trainer.seed", "zero_optimization.stage", "comms_config"]
)
def test_what_is_no_number_in_a_dictionary_is_named_by_its_key(value: Any, path: str) -> None:
    config: dict[str, Any] = {}
    *sections, name = path.split(".")
    inner = config
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = value
    with pytest.raises(ConfigError) as caught:
        load(config)
    at = "[1]" if isinstance(value, list) else ""
    shown = "-Infinity" if value == float("-inf") else "NaN"
    shows_each(caught.value.problems, (f"{path}{at}", f"{shown}", "finite number"))


def test_a_key_of_a_dictionary_that_is_no_text_is_named() -> None:
    with raises(ConfigError, "the config: optimizer", "saw 1", "text"):
        load({"optimizer": {1: 2}})


OTHER: dict[str, Any] = {
    "pipeline_schedule": "GPipe",
    "data.format": "jsonl",
    "data.split": "test",
    "data.name": "x",
    "data.records": "text",
    "data.text_column": "body",
    "data.chat_column": "turns",
    "data.max_rows": 5,
    "data.stream": True,
    "data.loss_on": "all",
    "data.generation_prompt": "score",
    "data.corrupt": "skip",
    "data.chat_template": "t.jinja",
    "generate.tokens": 7,
    "model.revision": "main",
    "model.keep_untrained": False,
}
"""Keys without effect in a config that says nothing else."""
ELSEWHERE: list[tuple[str, Any, dict[str, Any]]] = [
    ("data.isolate", True, {"data": {"documents": "pack", "path": "x"}}),
    ("data.evaluation_fraction", 0.1, {"data": {"evaluation_path": "x"}}),
    ("evaluation.every", 5, {"data": {"evaluation_fraction": 0.0}}),
    ("evaluation.samples", 5, {"data": {"evaluation_fraction": 0.0}}),
    ("checkpoint.keep_best", True, {"data": {"evaluation_fraction": 0.0}}),
    ("weight_decay_excludes", "nothing", {}),
    ("data.split", "test", {"task": "image_classification"}),
    (
        "images.normalize",
        "none",
        {"task": "image_classification", "images": {"mean": [0.5], "std": [0.5]}},
    ),
]
USED = {
    *(
        "task",
        "data.path",
        "data.documents",
        "data.sequence_length",
        "data.tokenizer",
        "data.fim",
        "data.evaluation_fraction",
    ),
    *(
        "data.evaluation_path",
        "data.sources",
        "data.workers",
        "data.isolate",
        "steps",
        "epochs",
        "seed",
        "freeze",
    ),
    *(
        "model.name_or_path",
        "model.config",
        "model.attention",
        "model.trust_remote_code",
        "model.blocks",
        "adapter",
    ),
    *(
        "run.name",
        "run.folder",
        "run.node_local",
        "tiled_mlp",
        "checkpoint.upload",
        "checkpoint.hash",
        "checkpoint.every",
        "checkpoint.keep_last",
        "checkpoint.keep_best",
    ),
    *(
        "checkpoint.asynchronous",
        "checkpoint.dtype",
        "evaluation.every",
        "evaluation.samples",
        "log.every",
        "profile",
    ),
    *(
        "log.trackers",
        "plugins",
        "log.sample_ids",
        "generate.prompt",
        "engine",
        "mesh.replicate",
        "mesh.shard",
        "device",
        "plan",
    ),
    *(
        "activation_checkpointing",
        "compile",
        "float8",
        "label_smoothing",
        "neftune_alpha",
        "router_bias_update_rate",
        "sync_batch_norm",
        "patience",
    ),
    "parameter_groups",
}
"""Keys that do something in a config that says nothing else; a new key of the section is one of
these, or in a note.
"""
REFUSED = {
    "recipe",
    "warmup_ratio",
    "float8_head",
    "evaluation.patience",
    "evaluation.tasks",
    "log.by_source",
    "data.too_long",
}


def trainer_config(path: str, value: Any, other: dict[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = json.loads(json.dumps(other))
    inner, (*sections, name) = section, path.split(".")
    for one in sections:
        inner = inner.setdefault(one, {})
    inner[name] = value
    return {"trainer": section}


@pytest.mark.parametrize(
    ("path", "value", "other"), [*((path, value, {}) for path, value in OTHER.items()), *ELSEWHERE]
)
def test_a_key_of_the_trainer_without_effect_is_noted(
    path: str, value: Any, other: dict[str, Any]
) -> None:
    [note] = [
        one for one in load(trainer_config(path, value, other)).notes if f"trainer.{path}" in one
    ]
    assert "no effect here: " in note
    plain = load({"trainer": other})
    assert not any(f"trainer.{path}" in one for one in plain.notes)


def test_every_key_of_the_trainer_is_used_noted_or_refused() -> None:
    from trainer.config.sections.section import (
        ANSWERS,
        DISTILLATION,
        EMBEDDINGS,
        IMAGES,
        LABELS,
        MASKED,
        PAIRS,
    )

    keys = {key.removeprefix("trainer.") for key in OWN_KEYS}
    ends = {
        key for key in keys if not any(other.startswith(f"{key}.") for other in keys) or key in USED
    }
    inner = (
        "adapter.",
        "data.fim.",
        "hub.",
        "profile.",
        "parameter_groups.",
        "data.sources.",
        "images.",
        "embeddings.",
        "labels.",
        "masked.",
        "pairs.",
        "distillation.",
    )
    ends -= {
        path.removeprefix("trainer.")
        for path, key in OWN_KEYS.items()
        if key.recipes in (ANSWERS, DISTILLATION, EMBEDDINGS, IMAGES, LABELS, MASKED, PAIRS)
    }
    left = (
        {key for key in ends if not key.startswith(inner)}
        - USED
        - OTHER.keys()
        - {path for path, *_ in ELSEWHERE}
    )
    pairs = {"data.prompt_column", "data.completion_column"}
    assert left - REFUSED - pairs == set()


def test_every_condition_that_a_key_needs_is_known() -> None:
    nothing = TrainerSection.model_validate(
        {
            "data": {"evaluation_path": "x", "documents": "pack"},
            "images": {"mean": [0.5], "std": [0.5]},
            "generate": {"prompt": None},
        }
    )
    needed = {key.needs for key in KEYS.values() if key.needs}
    needed |= {key.needs for key in OWN_KEYS.values() if key.needs}
    unheld = TrainerSection.model_validate({"data": {"evaluation_fraction": 0}})
    assert needed == {**unmet({}, nothing), **unmet({}, unheld)}.keys()


def test_every_key_that_another_excludes_or_is_now_is_known() -> None:
    every = [*OWN_KEYS.values(), *KEYS.values()]
    named = {key.excludes.other for key in every if key.excludes}
    named |= {key.now for key in every if key.now}
    named.discard("scheduler.params.warmup_num_steps")
    assert named <= set(EVERY_KEY)
