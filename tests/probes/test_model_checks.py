"""A model is what it is taken for: what the tiny copy shows at start, and what is refused by it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from tests.support import training
from tests.support.layouts import EXPERTS, family
from tests.support.messages import raises, shows, shows_each
from tests.support.models.families import SMALL
from tests.support.probing import findings_of, layout
from tests.support.training import GPT2, LLAMA, Case, Outcome, spec_of, task_of
from trainer.distributed.ranks import Ranks
from trainer.engines.deepspeed import engine as deepspeed
from trainer.errors import ConfigError
from trainer.layout import Recompute
from trainer.models import huggingface
from trainer.models.language import model_config
from trainer.models.materialise import materialise, on_host
from trainer.models.spec import LanguageModel, OutputHead, TinyCopies
from trainer.parallel.checks import check_layout, checked
from trainer.probes.findings import Draws, Findings, applied
from trainer.probes.questions.stages import check_cut
from trainer.recipes.causal_lm.task import CausalLM
from trainer.tasks.losses.cross_entropy import logits_cross_entropy

MOE = {
    **SMALL,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
}
MIXTRAL = {**SMALL, "model_type": "mixtral", "num_local_experts": 4, "output_router_logits": True}
QWEN_MOE = {**MOE, "model_type": "qwen3_moe", "output_router_logits": True}
OPT = {
    **{
        "model_type": "opt",
        "vocab_size": 61,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 3,
    },
    **{
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    },
}
BERT = {
    **{"model_type": "bert", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 2, "num_attention_heads": 4},
}
BART = {
    **{
        "vocab_size": 61,
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
    },
    **{
        "encoder_layers": 1,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "max_position_embeddings": 64,
    },
}
UNTIED = LLAMA | {"tie_word_embeddings": False}
WINDOWS = {**SMALL, "head_dim": 8, "sliding_window": 8}


def found(model: dict[str, Any]) -> Findings:
    spec = spec_of(model)
    return findings_of(spec, task_of(spec))


def refused(model: dict[str, Any], task: Any = None) -> str:
    spec = spec_of(model)
    with pytest.raises(ConfigError) as caught:
        findings_of(spec, task or task_of(spec))
    return str(caught.value)


PIPELINE = layout(pipeline=2)


@pytest.mark.first("llama", "gpt2")
@pytest.mark.parametrize(
    "model",
    [
        LLAMA,
        GPT2,
        {**WINDOWS, "model_type": "gemma2"},
        {**WINDOWS, "model_type": "mistral"},
        {**MOE, "model_type": "qwen3_moe"},
        QWEN_MOE,
        MIXTRAL,
        {
            "model_type": "mamba",
            "vocab_size": 61,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
        },
        {**BERT, "is_decoder": True},
        OPT,
    ],
    ids=lambda model: str(model["model_type"]),
)
def test_what_is_a_causal_model_with_our_loss_passes(model):
    state = torch.get_rng_state()
    findings = found(model)
    assert findings.unused == () and findings.notes == () and findings.blocks
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.more
@pytest.mark.parametrize(
    "model",
    [
        BERT,
        {**BERT, "model_type": "roberta"},
        {**BERT, "model_type": "xlnet", "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        {**WINDOWS, "model_type": "gemma3_text", "use_bidirectional_attention": True},
        {**LLAMA, "is_causal": False},
    ],
    ids=["bert", "roberta", "xlnet", "gemma3", "llama"],
)
def test_what_sees_later_tokens_is_refused_with_the_numbers(model):
    assert "not causal: token " in (text := refused(model))
    shows(text, "moves the logits")


class Faulty(CausalLM):
    """A task whose loss is another than it says."""

    fault = ""

    def loss_sum(self, model, batch):
        total = super().loss_sum(model, batch)
        if self.fault == "scale":
            return total * 1.001
        if self.fault == "constant":  # the loss alone shows it
            return total + 0.01 * self.targets(batch)
        if self.fault == "detached":  # the gradient alone shows it
            return total.detach() + (total - total.detach()) * 0.99
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        return logits_cross_entropy(logits[:, :-1], batch["targets"][:, 1:])


def language_with(fused: bool, own_loss: bool = False) -> LanguageModel:
    """Return a language model's properties; `fused`: its head is a product and nothing else."""
    return LanguageModel(OutputHead(plain=fused), own_loss=own_loss)


@pytest.mark.first("fused-scale")
@pytest.mark.parametrize("fault", ["scale", "constant", "detached", "shifted twice"])
@pytest.mark.parametrize(
    "model", [LLAMA, {**WINDOWS, "model_type": "gemma2"}], ids=["fused", "logits"]
)
def test_a_loss_that_is_not_the_models_own_is_an_error_with_the_numbers(model, fault):
    spec = spec_of(model)
    task = Faulty(language_with(spec.language.head.plain and fault != "shifted twice"))
    task.fault = fault
    shows(text := refused(model, task), "tiny copy")
    assert "its own" in text


@pytest.mark.parametrize("model", [MIXTRAL, QWEN_MOE], ids=["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_routers_loss_that_is_dropped_is_an_error(model, fused):
    spec = spec_of(model)
    findings_of(spec, CausalLM(language_with(fused, own_loss=True)))
    assert "expected its own, " in refused(model, CausalLM(language_with(fused)))


@pytest.mark.more
def test_a_routers_loss_is_not_asked_for_by_default():
    assert not spec_of({**MOE, "model_type": "qwen3_moe"}).language.own_loss


@pytest.mark.more
def test_a_router_loss_is_no_sum_over_stages():
    spec = spec_of(QWEN_MOE)
    with raises(ConfigError, "pipeline.stages: qwen3_moe", "router's loss"):
        checked(spec, task_of(spec), PIPELINE, Ranks())


def test_what_no_text_reaches_is_frozen_and_said():
    """A decoder with cross-attention, trained alone."""
    spec = spec_of({"model_type": "bart", **BART, "is_encoder_decoder": False})
    findings = findings_of(spec, task_of(spec))
    assert findings.unused and all("encoder_attn" in name for name in findings.unused)
    (note,) = findings.notes
    assert (
        note.startswith("20 parameters (")
        and "are frozen: model.decoder.layers.*.encoder_attn.*" in note
    )
    model = applied(spec, findings).build()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert len(frozen) == 2 * 10 and all("encoder_attn" in name for name in frozen)


def saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.more
def test_a_folder_with_an_encoder_is_refused(tmp_path):
    config = AutoConfig.for_model("bart", **BART)
    folder = saved(AutoModelForSeq2SeqLM.from_config(config), tmp_path)
    with raises(ConfigError, "BartConfig", "encoder", "is_encoder_decoder"):
        spec_of({}, folder)


@pytest.mark.more
def test_a_folder_with_vision_is_trained_as_text_and_says_what_stays(tmp_path):
    text = {**SMALL, "head_dim": 8, "num_hidden_layers": 2}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 8, "patch_size": 4}
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    folder = saved(AutoModelForImageTextToText.from_config(config), tmp_path)
    spec = replace(spec_of({}, folder), tiny=TinyCopies())  # it is as small as one

    def read() -> dict[str, torch.Tensor]:
        model = spec.build()
        materialise(model, spec, seed=0)
        return {name: value.clone() for name, value in model.state_dict().items()}

    before = read()
    (note,) = findings_of(spec, task_of(spec)).notes
    assert all(
        torch.equal(value, before[name]) for name, value in read().items()
    )  # a run goes on to train these
    assert "are frozen: model.vision_tower.*, model.multi_modal_projector.*" in note
    assert spec.blocks == ("model.language_model.layers.0", "model.language_model.layers.1")


@pytest.mark.more
def test_what_a_folder_has_beside_the_text_model_is_said(tmp_path):
    text = {
        **SMALL,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
    }
    text |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "depth": 1,
        "num_heads": 2,
        "out_hidden_size": 32,
    }
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    folder = saved(AutoModelForImageTextToText.from_config(config), tmp_path)
    spec = spec_of({}, folder)
    message, left = spec.notes
    shows(message, "says", "Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
    shows(left, "Qwen3_5ForCausalLM", "as they are", "model.visual.*")


@pytest.mark.more
def test_a_head_that_the_folder_lacks_is_not_made_up(tmp_path):
    folder = saved(
        AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**UNTIED)), tmp_path
    )
    with raises(ConfigError, "lm_head.weight: absent"):
        on_host(spec_of({}, folder), 0)


@pytest.mark.more
def test_a_tensor_of_the_file_that_nothing_reads_is_said(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**UNTIED))
    model.mtp = torch.nn.Linear(2, 2)
    spec = spec_of({}, saved(model, tmp_path))
    shows_each(spec.notes, ("2 tensors", f"{tmp_path}", "LlamaForCausalLM", "as they are"))


@pytest.mark.more
def test_an_expert_that_no_token_came_to_is_not_frozen():
    assert found({**QWEN_MOE, "num_experts": 64, "num_experts_per_tok": 1}).unused == ()


# Randomness


def test_where_a_model_draws():
    assert found(LLAMA | {"attention_dropout": 0.0}).draws == Draws()
    assert found(LLAMA).draws == Draws(any=True)
    assert found(MIXTRAL | {"router_jitter_noise": 0.1}).draws == Draws(any=True)
    assert found(OPT | {"layerdrop": 0.01}).draws == Draws(any=True, between=True, skips=True)


def test_layerdrop_runs_on_one_process_alone():
    spec = spec_of(OPT | {"layerdrop": 0.01})
    checked(spec, task_of(spec), layout(), Ranks())
    for several in (layout(replicate=2), PIPELINE):
        with raises(ConfigError, "leaves out blocks"):
            check_layout(spec, task_of(spec), several, found(OPT | {"layerdrop": 0.01}))


@pytest.mark.parametrize(
    ("model", "bias"),
    [
        (EXPERTS, ""),
        (
            family("glm4_moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
            "model.layers.*.mlp.gate.e_score_correction_bias",
        ),
        (
            family("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=16),
            "model.layers.*.mlp.gate.moe_statics.e_score_correction_bias",
        ),
    ],
    ids=["none", "of one dimension", "of two"],
)
def test_a_bias_that_balances_experts_and_that_nothing_moves_is_noted(model, bias):
    spec = spec_of(model)
    notes = [note for note in checked(spec, task_of(spec), layout(), Ranks())[1] if "loads" in note]
    key = "set trainer.router_bias_update_rate to balance experts by their loads"
    message = f"by which experts are chosen, stays as it is: {key}"
    assert notes == ([f"{bias}, {message}"] if bias else [])


def test_layerdrop_is_seen_where_no_blocks_are_known():
    spec = replace(spec_of(OPT | {"layerdrop": 0.01}), blocks=(), tiny=TinyCopies())
    assert findings_of(spec, task_of(spec)).draws.skips


@pytest.mark.more
def test_jitter_and_dropout_are_the_same_in_stages_and_recomputed():
    for model in (
        MIXTRAL | {"router_jitter_noise": 0.1, "output_router_logits": False},
        GPT2,
        LLAMA,
    ):
        spec = spec_of(model)
        findings = findings_of(spec, task_of(spec))
        assert findings.draws.any
        check_layout(spec, task_of(spec), replace(PIPELINE, recompute=Recompute("full")), findings)


def with_noise(noise: Any) -> Any:
    """A Llama with `noise` in its MLPs."""
    spec = spec_of(LLAMA)

    def build():
        model = spec.build()
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(
                lambda module, inputs, output: output * noise() if module.training else None
            )
        return model

    return replace(spec.built_by(build), tiny=TinyCopies())


@pytest.mark.more
@pytest.mark.parametrize(
    "noise",
    [lambda: random.random(), lambda: torch.rand((), generator=torch.Generator().manual_seed(0))],
    ids=["python", "generator"],
)
def test_random_numbers_that_nobody_replays_are_refused(noise):
    spec = with_noise(noise)
    with raises(ConfigError, "NumPy", "generator"):
        findings_of(spec, task_of(spec))


@pytest.mark.more
def test_noise_that_depends_on_what_ran_before_is_refused_in_stages():
    calls = iter(range(10**6))
    spec = with_noise(lambda: 1 + torch.rand(()) * next(calls))
    with raises(ConfigError, "other logits"):
        check_layout(spec, task_of(spec), PIPELINE, Findings(draws=Draws(any=True)))


# What a forward pass depends on


def with_mlp_of(hook: Any) -> Any:
    """A Llama with `hook` behind the MLP of its second layer, in each model that is built again."""
    plain = spec_of(LLAMA | {"attention_dropout": 0.0})

    def build():
        model = plain.build()
        model.model.layers[1].mlp.register_forward_hook(hook())
        return model

    return replace(plain.built_by(build), tiny=TinyCopies())


@pytest.mark.more
def test_a_model_whose_logits_padding_moves_is_told():
    def scaled(module, args, output):
        return output * (1 + output.shape[1] // 24)

    spec = with_mlp_of(lambda: scaled)
    (note,) = findings_of(spec, task_of(spec)).notes
    shows(note, "padding moves", "20 tokens", "28 by")


@pytest.mark.more
def test_a_model_that_keeps_something_from_row_to_row_is_refused():
    def remembering():
        longest = 0

        def scaled(module, args, output):
            nonlocal longest
            longest = max(longest, output.shape[1]) if module.training else 0
            return output * (1 + longest // 20)

        return scaled

    spec = with_mlp_of(remembering)
    with raises(ConfigError, "leaves something behind"):
        findings_of(spec, task_of(spec))


def test_a_first_pass_that_draws_more_than_the_next_is_refused():
    def drawing():
        passes = iter(range(10**6))
        return lambda module, args, output: (
            torch.rand(1) * output if module.training and not next(passes) else output
        )

    spec = with_mlp_of(drawing)
    with raises(ConfigError, "leaves something behind"):
        findings_of(spec, task_of(spec))


@pytest.mark.first("<lambda>-where it draws random numbers")
@pytest.mark.parametrize(
    ("fails", "what"),
    [
        (lambda model, words: model.training, "where it draws random numbers"),
        (lambda model, words: "labels" in words, "whether its loss is ours"),
        (
            lambda model, words: model.training and len(words["input_ids"]) > 40,
            "whether it is causal",
        ),
        (lambda model, words: len(words["input_ids"]) == 16, "which parameters have no gradient"),
    ],
)
def test_what_a_models_own_code_raises_is_told(fails, what):
    plain = spec_of(LLAMA | {"attention_dropout": 0.0})

    def planted(model, args, words):
        if fails(model, words):
            raise IndexError("planted\nbelow")

    def build():
        model = plain.build()
        model.extra = torch.nn.Linear(2, 2, device="meta")  # has no gradient, so that more is tried
        model.register_forward_pre_hook(planted, with_kwargs=True)
        return model

    spec = replace(plain.built_by(build), tiny=TinyCopies())
    with raises(ConfigError, "trainer.model: llama", f"not show {what}", "IndexError: planted"):
        findings_of(spec, CausalLM(LanguageModel()))


@pytest.mark.more
def test_a_token_is_in_the_table_and_in_the_head():
    spec = spec_of(
        {"model_type": "moshi", **SMALL, "head_dim": 8, "ffn_dim": 48, "num_codebooks": 1}
    )
    table, head = (getattr(spec.build(), f"get_{end}_embeddings")() for end in ("input", "output"))
    assert spec.language.vocabulary == len(head.weight) < len(table.weight)


# Stages


@pytest.mark.more
def test_a_norm_on_both_sides_of_the_blocks_runs_once_before_and_once_behind_all_stages():
    assert check_cut(spec_of({"model_type": "nanochat", **SMALL}), 2).around == ("model.norm",)


@pytest.mark.more
def test_what_text_never_runs_is_no_part_of_later_stages():
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 8, "patch_size": 4}
    text = {**SMALL, "model_type": "gemma3_text", "head_dim": 8}
    spec = spec_of(
        {
            "model_type": "gemma3",
            "text_config": text,
            "vision_config": vision,
            "mm_tokens_per_image": 4,
        }
    )
    assert {"model.vision_tower", "model.multi_modal_projector"} <= set(check_cut(spec, 2).before)


# Blocks


@pytest.mark.more
def test_blocks_are_found_where_the_config_does_not_count_them():
    llama4 = spec_of(
        {"model_type": "llama4_text", **MOE, "num_local_experts": 2, "intermediate_size_mlp": 48}
    )
    assert llama4.blocks == tuple(f"model.layers.{index}" for index in range(3))
    assert llama4.build().base_model is not llama4.build()
    longcat = model_config.read_config(
        type("Options", (), {"name_or_path": None, "config": {"model_type": "longcat_flash"}})
    )
    options = type(
        "Options",
        (),
        {"name_or_path": None, "revision": None, "trust_remote_code": False, "attention": None},
    )
    assert huggingface.spec_of(longcat, options).blocks == tuple(
        f"model.layers.{i}" for i in range(28)
    )


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (
            {"shard": 2, "zero_stage": 3},
            "zero_optimization.stage",
        ),
        ({"pipeline": 2}, "pipeline.stages"),
        ({"recompute": Recompute("full")}, "trainer.activation_checkpointing"),
        ({"tensor": 2}, "tensor_parallel.autotp_size"),
    ],
)
def test_a_layout_that_needs_blocks_says_that_there_are_none(change, key):
    spec = replace(spec_of(LLAMA), blocks=())
    with raises(ConfigError, f"{key}: llama", "no list of modules"):
        check_layout(spec, task_of(spec), layout(**change), Findings())
    check_layout(spec, task_of(spec), layout(), Findings())


TILED = layout(recompute=Recompute("full", tile=4096))


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (OPT, "no module of its blocks"),
        ({**MOE, "model_type": "qwen3_moe"}, "no module of its blocks"),
        (GPT2, "is another when a part of its tokens is computed again"),
    ],
    ids=["no MLP", "experts", "dropout in it"],
)
def test_mlps_that_can_not_be_computed_in_tiles_are_refused(model, match):
    spec = spec_of(model)
    with pytest.raises(ConfigError, match=f"trainer.tiled_mlp: .*{match}"):
        check_layout(spec, task_of(spec), TILED, Findings())


def test_an_mlp_that_mixes_tokens_is_not_computed_in_tiles():
    spec = with_mlp_of(lambda: lambda module, inputs, output: output)
    check_layout(spec, task_of(spec), TILED, Findings())

    def mixing():
        model = spec.build()
        for block in model.model.layers:
            block.mlp.down_proj.register_forward_hook(lambda m, i, o: o + o.cumsum(1) / 9)
        return model

    mixed = spec.built_by(mixing)
    with raises(ConfigError, "trainer.tiled_mlp", "treat each token"):
        check_layout(mixed, task_of(spec), TILED, Findings())


@pytest.mark.more
def test_blocks_without_such_an_mlp_are_said():
    model = {**MOE, "model_type": "qwen3_moe", "mlp_only_layers": [0]}
    spec = spec_of(model)
    notes = checked(spec, task_of(spec), TILED, Ranks())[1]
    shows(notes, "trainer.tiled_mlp: 1 of 3", "blocks", "MLP")


def test_blocks_that_do_not_run_once_each_are_no_blocks():
    spec = spec_of(LLAMA)

    def build():
        model = spec.build()
        model.model.layers[1].register_forward_hook(
            lambda module, args, output: model.model.layers[2](output)
        )
        return model

    twice = replace(spec.built_by(build), tiny=TinyCopies())
    assert applied(twice, replace(Findings(), blocks=False)).blocks == ()


def test_what_can_not_be_tried_runs_on_one_process_alone():
    def build():
        model = plain.build()
        model.register_forward_pre_hook(lambda *_: 1 / 0)
        return model

    plain = spec_of(LLAMA)
    spec = replace(plain.built_by(build), tiny=TinyCopies())
    findings = findings_of(spec, task_of(spec))
    shows_each(findings.notes, "ZeroDivisionError: division")
    check_layout(spec, task_of(spec), layout(), findings)
    with raises(ConfigError, "processes: llama", "no tiny copy", "ZeroDivisionError"):
        check_layout(spec, task_of(spec), layout(replicate=2), findings)


def only_longer(module: torch.nn.Module, args: Any, output: Any) -> Any:
    return output + module.extra(args[0]) if args[0].shape[1] > 8 else output


def only_shorter(module: torch.nn.Module, args: Any, output: Any) -> Any:
    return output + module.extra(args[0]) if args[0].shape[1] < 8 else output


@pytest.mark.parametrize("hook", [only_longer, only_shorter])
def test_what_some_rows_leave_without_a_gradient_is_found(hook):
    plain = spec_of(LLAMA)

    def build():
        model = plain.build()
        mlp = model.model.layers[1].mlp
        mlp.extra = torch.nn.Linear(32, 32, bias=False, device="meta")
        mlp.register_forward_hook(hook)
        return model

    spec = replace(plain.built_by(build), tiny=TinyCopies())
    findings = findings_of(spec, task_of(spec))
    assert (findings.unused, findings.sparse) == ((), ("model.layers.*.mlp.extra.weight",))
    with raises(ConfigError, "engine deepspeed: llama", "without a gradient"):
        deepspeed.check(applied(spec, findings), layout())


# What was found, in engines


def train_checked(case: Case) -> Outcome:
    """Runs on each rank of a pool."""
    spec = spec_of(case.model)
    as_run = applied(spec, findings_of(spec, task_of(spec)))
    with mock.patch.object(training, "spec_of", lambda model, path: as_run):
        return training.train_by_engine(case)


ENGINES = [
    Case("mesh", zero_stage=0),
    Case("mesh", zero_stage=3, recompute="full"),
    Case("accelerate", zero_stage=2),
    Case("deepspeed", zero_stage=0),
    Case("deepspeed", zero_stage=3, recompute="selective"),
]


@pytest.mark.first("accelerate-2")
@pytest.mark.parametrize("case", ENGINES, ids=lambda case: f"{case.engine}-{case.zero_stage}")
def test_a_routers_loss_under_every_engine(pools, case):
    case = replace(case, model=QWEN_MOE | {"attention_dropout": 0.1, "router_aux_loss_coef": 0.1})
    reference = training.train_plainly(case)
    for outcome in pools[2].run(train_checked, case=case):
        training.assert_same(outcome, reference, tolerance=1e-5)


@pytest.mark.first("mesh-3")
@pytest.mark.parametrize("case", ENGINES, ids=lambda case: f"{case.engine}-{case.zero_stage}")
def test_what_is_frozen_stays_as_it_is_and_is_saved(pools, case):
    case = replace(case, model=GPT2 | {"add_cross_attention": True})
    reference = training.train_plainly(case)
    for outcome in pools[2].run(train_checked, case=case):
        assert any("crossattention" in name for name in outcome.weights)
        training.assert_same(outcome, reference, tolerance=1e-5)


@pytest.mark.more
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("dense", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}])
def test_a_routers_loss_without_a_layer_that_routes_is_refused(family, dense):
    """transformers itself fails on the empty list of their logits, in the first step."""
    model = {**QWEN_MOE, "model_type": family, "num_hidden_layers": 1, **dense}
    with raises(ConfigError, "router's loss", "route to"):
        spec_of(model)
    assert not spec_of({**model, "output_router_logits": False}).language.own_loss
