"""Checkpoints that DeepSpeed itself wrote: every value as DeepSpeed has it, and nothing in a pickle
is ever run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import Result, run, train, write_job
from tests.support.messages import raises, shows
from tests.support.pool import Pools
from trainer.distributed.ranks import ALONE
from trainer.engines.deepspeed import patches
from trainer.errors import ConfigError, DataError
from trainer.state import MASTER, WEIGHT
from trainer.tools.importers.deepspeed_checkpoint import read_deepspeed

# odd sizes: parameters that no number of ranks divides, and that cross the cuts between ranks
MODEL: dict[str, Any] = dict(
    model_type="llama",
    vocab_size=61,
    hidden_size=12,
    intermediate_size=17,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=True,
)
Values = dict[tuple[str, str], torch.Tensor]


def trained(
    folder: Path,
    stage: int,
    precision: str,
    frozen: bool = False,
    gradients: str | None = None,
    **zero: Any,
) -> Values:
    """Two steps of plain DeepSpeed and its checkpoint; the state that DeepSpeed holds then. Runs on
    each rank.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
    if frozen:
        model.lm_head.register_buffer("scale", torch.tensor([0.5, 2.0]))
        model.model.layers[0].mlp.up_proj.weight.requires_grad = False
    learned = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    groups = [
        {
            "params": [p for name, p in learned if ("norm" in name) == norm],
            "weight_decay": 0.0 if norm else 0.1,
        }
        for norm in (False, True)
    ]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": precision == "bfloat16"},
        "data_types": {"grad_accum_dtype": gradients},
    }
    patches.forget_earlier_engines()  # of tests before this one in the same process
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=groups, dist_init_required=False
    )
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        ids = torch.randint(0, 61, (2, 8))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(str(folder))
    if stage < 3:
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    results: Values = {}
    for name, parameter in learned:
        results[name, MASTER] = safe_get_full_fp32_param(parameter).clone()
        for part in ("exp_avg", "exp_avg_sq"):
            results[name, part] = safe_get_full_optimizer_state(parameter, part).clone()
    engine.destroy()
    return results


@pytest.mark.first("2-2-bfloat16-{'elastic_checkpoint': True}")
@pytest.mark.parametrize(
    ("ranks", "stage", "precision", "options"),
    [
        (2, 1, "float32", {}),
        (2, 1, "bfloat16", {}),
        (2, 1, "bfloat16", {"gradients": "fp32"}),
        (4, 1, "bfloat16", {"gradients": "fp32"}),
        (4, 2, "float32", {}),
        (4, 2, "bfloat16", {"frozen": True}),
        (2, 2, "bfloat16", {"elastic_checkpoint": True}),
        (4, 1, "float32", {"parameter_alignment": True}),
        (2, 3, "float32", {"frozen": True}),
        (4, 3, "bfloat16", {"sub_group_size": 100}),
        (1, 3, "float32", {}),
    ],
    ids=str,
)
def test_every_value_is_that_of_deepspeed(
    tmp_path: Path, pools: Pools, ranks: int, stage: int, precision: str, options: dict[str, Any]
) -> None:
    truth = pools[ranks].run(trained, folder=tmp_path, stage=stage, precision=precision, **options)[
        0
    ]
    imported = read_deepspeed(tmp_path)
    results = {(entry.name, entry.key): entry.read(ALONE) for entry in imported.state_tensors}
    for entry in imported.state_tensors:
        tensor = results[entry.name, entry.key]
        assert tensor is not None and (tuple(tensor.shape), tensor.dtype) == (
            entry.shape,
            entry.dtype,
        )
    low = getattr(torch, precision)
    for (name, part), value in truth.items():
        kept = part if part != MASTER or precision != "float32" else WEIGHT
        assert torch.equal(results.pop((name, kept)), value), (name, part)
        if kept == MASTER:
            assert torch.equal(results.pop((name, WEIGHT)), value.to(low)), name
    rest = (
        {"lm_head.scale", "model.layers.0.mlp.up_proj.weight"} if options.get("frozen") else set()
    )
    assert results.keys() == {(name, WEIGHT) for name in rest}
    if rest:
        assert torch.equal(results["lm_head.scale", WEIGHT].float(), torch.tensor([0.5, 2.0]))
    assert (imported.state.step, imported.state.samples) == (2, 4 * ranks)
    assert imported.state.engine["optimizer_step"] == 2.0


@pytest.mark.first("True-2-1-float32")
@pytest.mark.parametrize(("ranks", "stage", "precision"), [(4, 2, "bfloat16"), (2, 1, "float32")])
@pytest.mark.parametrize("aligned", [False, True])
def test_an_order_that_deepspeed_itself_gets_wrong(
    tmp_path: Path, pools: Pools, ranks: int, stage: int, precision: str, aligned: bool
) -> None:
    """With `round_robin_gradients` its own accessors mix parameters up; the truth is the same run
    without.
    """
    results = []
    for turns in (False, True):
        options = {"round_robin_gradients": turns, "parameter_alignment": aligned, "frozen": True}
        pools[ranks].run(
            trained, folder=tmp_path / str(turns), stage=stage, precision=precision, **options
        )
        results.append(
            {
                (p.name, p.key): p.read(ALONE)
                for p in read_deepspeed(tmp_path / str(turns)).state_tensors
            }
        )
    assert results[0].keys() == results[1].keys()
    for key, value in results[0].items():
        assert torch.equal(results[1][key], value), key


@pytest.mark.more
def test_weights_that_differ_from_their_masters_are_refused(tmp_path: Path, pools: Pools) -> None:
    pools[2].run(trained, folder=tmp_path, stage=2, precision="bfloat16")
    [file] = tmp_path.glob("*/mp_rank_00_model_states.pt")
    content = torch.load(file, weights_only=False)
    content["module"]["model.norm.weight"][3] += 1
    torch.save(content, file)
    with pytest.raises(DataError, match=r"values of model\.norm\.weight that differ"):
        for entry in read_deepspeed(tmp_path).state_tensors:
            entry.read(ALONE)


def ask(*arguments: str | Path) -> Result:
    return run("meshloom", "checkpoint", "import", *arguments)


@pytest.mark.more
def test_a_run_goes_on_from_it(tmp_path: Path, pools: Pools) -> None:
    """Imported beside the files of Hugging Face's Trainer, and trained on without DeepSpeed."""
    job = write_job(tmp_path, steps=1, engine="mesh")
    assert train("--config", job).code == 0
    final = tmp_path / "runs" / "job" / "final"
    for path in final.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((final / "config.json").read_text())
    pools[2].run(_trained_as, folder=tmp_path, config=config)
    result = ask(tmp_path, tmp_path / "imported")
    assert result.code == 0, result.output
    assert "step-000002" in result.output and "--resume" in result.output
    again = train(
        "--config", job, "trainer.steps=3", "--resume", tmp_path / "imported" / "step-000002"
    )
    assert again.code == 0, again.output
    shows(again.output, "step 2, 8 samples", "seen")
    assert "changed" not in again.output


def _trained_as(folder: Path, config: dict[str, Any]) -> None:
    global MODEL
    MODEL, kept = (
        {key: value for key, value in config.items() if key != "transformers_version"},
        MODEL,
    )
    try:
        trained(folder, 2, "float32")
    finally:
        MODEL = kept


class Bomb:
    """What a pickle can do to whoever opens it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A checkpoint in DeepSpeed's layout, by hand: one rank, one parameter."""
    folder = tmp_path / "ds" / "global_step7"
    folder.mkdir(parents=True)
    (tmp_path / "ds" / "latest").write_text("global_step7")
    model = {
        "module": {"a": torch.arange(3.0)},
        "buffer_names": [],
        "param_shapes": [{"a": torch.Size([3])}],
        "global_steps": 7,
        "global_samples": 70,
    }
    from deepspeed.utils.tensor_fragment import fragment_address

    inner = {"state": {0: {"step": 7, "exp_avg": torch.ones(4)}}}
    state = {
        "zero_stage": 2,
        "partition_count": [1],
        "single_partition_of_fp32_groups": [torch.arange(4.0)],
        "base_optimizer_state": inner,
        "param_slice_mappings": [{"a": fragment_address(3, 0)}],
    }
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    torch.save(
        {"optimizer_state_dict": state}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )
    return tmp_path / "ds"


def test_what_was_written_by_hand(written: Path) -> None:
    for path in (written, written / "global_step7"):
        weight, moment = read_deepspeed(path).state_tensors
        assert torch.equal(weight.read(ALONE), torch.arange(3.0))
        assert (moment.key, moment.name) == ("exp_avg", "a") and torch.equal(
            moment.read(ALONE), torch.ones(3)
        )


class ByName:
    """As Python 3.11.0 to 3.11.3 pickles a member of an enumeration, or what somebody else would
    have `getattr` get.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        from deepspeed.runtime.zero.config import ZeroStageEnum

        return getattr, (ZeroStageEnum, self.name)


@pytest.mark.more
def test_a_stage_by_its_name(written: Path) -> None:
    file = next(written.rglob("*optim_states.pt"))
    result = torch.load(file, weights_only=False)
    result["optimizer_state_dict"]["zero_stage"] = ByName("gradients")
    torch.save(result, file)
    assert len(read_deepspeed(written).state_tensors) == 2
    result["optimizer_state_dict"]["zero_stage"] = ByName("__class__")
    torch.save(result, file)
    with pytest.raises(DataError, match="asks for '__class__'"):
        read_deepspeed(written)


@pytest.mark.first("True-mp_rank_00_model_states.pt")
@pytest.mark.parametrize(
    "name", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
)
@pytest.mark.parametrize("archive", [True, False])
def test_a_pickle_is_never_run(written: Path, name: str, archive: bool) -> None:
    file = written / "global_step7" / name
    torch.save({"module": Bomb(written / "boom")}, file, _use_new_zipfile_serialization=archive)
    result = ask(written, written.parent / "imported", "--model", written)
    assert result.code == 65, result.output
    assert "Traceback" not in result.output and str(file) in result.output
    assert "weights_only" not in result.output and "trust" not in result.output  # PyTorch's advice
    if archive:
        assert (
            "a pickle that names" in result.output and "mkdir; expected data alone" in result.output
        )
    assert not (written / "boom").exists() and not (written.parent / "imported").exists()


@pytest.mark.parametrize(
    ("spoil", "error", "keys"),
    [
        (
            lambda p: (p / "latest").write_text("../elsewhere"),
            DataError,
            ("a path", "leaves the folder"),
        ),
        (
            lambda p: (p / "latest").write_text("global_step9"),
            ConfigError,
            ("no ZeRO checkpoint",),
        ),
        (
            lambda p: next(p.rglob("*optim_states.pt")).write_bytes(b"PK"),
            DataError,
            ("torch.save wrote",),
        ),
        (
            lambda p: next(p.rglob("*model_states.pt")).unlink(),
            ConfigError,
            ("no *_model_states.pt",),
        ),
        (
            lambda p: (p / "global_step7/zero_pp_rank_0_mp_rank_01_optim_states.pt").touch(),
            ConfigError,
            (("zero_pp_rank_0_mp_rank_01_optim_states.pt", "data-parallel ranks alone")),
        ),
        (
            lambda p: (p / "global_step7/zero_pp_rank_1_mp_rank_00_optim_states.pt").write_bytes(
                (p / "global_step7/zero_pp_rank_0_mp_rank_00_optim_states.pt").read_bytes()
            ),
            ConfigError,
            ("ZeRO stage 2", "2 of 1 files"),
        ),
        (
            lambda p: torch.save({"optimizer_state_dict": {}}, next(p.rglob("*optim_states.pt"))),
            ConfigError,
            ("ZeRO stage 0", "1 of None files"),
        ),
        (
            lambda p: torch.save([], next(p.rglob("*optim_states.pt"))),
            DataError,
            ("torch.save wrote",),
        ),
        (
            lambda p: torch.save({"param_shapes": []}, next(p.rglob("*model_states.pt"))),
            DataError,
            ("not what DeepSpeed writes",),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", value),  # no address, which differs by process
)
def test_what_is_no_checkpoint(
    written: Path, spoil: Any, error: type[Exception], keys: tuple[str, ...]
) -> None:
    spoil(written)
    with raises(error, *keys):
        read_deepspeed(written)


def test_it_wants_a_model(written: Path) -> None:
    result = ask(written, written.parent / "imported")
    assert result.code == 64, result.output
    shows(result.output, "config.json", "model's config", "--model")


@pytest.mark.more
@pytest.mark.parametrize(
    "name", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
)
def test_a_pipe_is_never_opened(written: Path, name: str) -> None:
    (written / "global_step7" / name).unlink()
    os.mkfifo(written / "global_step7" / name)
    with pytest.raises(DataError, match="no regular file"):
        read_deepspeed(written)
