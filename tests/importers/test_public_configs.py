"""127 public configs of other trainers: what is imported is what they say, and the rest is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.foreign import PAGE, PLAIN, Config, Result, configs, page, reasons, results
from trainer.config import Config as Ours
from trainer.config import RuntimeFacts, load, resolve
from trainer.config.read import at
from trainer.data.text.chats import chat
from trainer.tools.importers.chat_formats import PLACE
from trainer.tools.importers.tables import read_table
from trainer.tools.importers.translate import decides

TEMPLATES = Path(chat.__file__).parent / "templates"
STEPS = 1000
"""The steps of a run whose length is in epochs."""
SOURCES = [config.origin for config in configs() if config.kind in PLAIN]


def result_of(origin: str) -> Result:
    return next(result for result in results() if result.config.origin == origin)


def name_of(result: Result) -> str:
    return result.config.origin.partition("/")[2]


def checked(result: Result) -> Ours:
    """The config as it is when all is known, on 16 devices."""
    assert result.draft is not None
    ours = load(result.draft.made)
    return resolve(ours, RuntimeFacts(16, 4096, ours.trainer.steps or STEPS, True, "cuda"))


def said(config: Config, *names: str, usual: Any = None) -> Any:
    """What a config says under one of these names, as a number where it is one."""
    given = [config.keys[name] for name in names if config.keys.get(name) is not None]
    value = given[0] if given else usual
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def test_two_thirds_of_the_plain_ones_are_imported_whole_and_none_of_the_others():
    plain = [result for result in results() if result.config.kind in PLAIN]
    assert len(plain) >= 90 and len({result.config.origin for result in plain}) == len(plain)
    assert sum(result.draft is not None for result in plain) >= 2 / 3 * len(plain)
    imported = *PLAIN, "preferences", "quantised"
    others = [result for result in results() if result.config.kind not in imported]
    assert len(others) >= 16 and not [name_of(one) for one in others if one.draft]


def test_those_that_are_not_say_which_keys():
    for result in results():
        named = reasons(result)
        outer = {key.partition(".")[0].partition("[")[0] for key in named}
        known = result.config.keys.keys() | {"do_train", "mllm_demo"}
        assert bool(named) != bool(result.draft) and outer <= known, name_of(result)


@pytest.mark.parametrize("origin", SOURCES)
def test_an_import_trains_what_they_say_or_there_is_none(origin: str):
    """Against a reading of their keys that shares nothing with the importers."""
    result = result_of(origin)
    if result.draft is None:
        assert reasons(result)
        return
    config, ours = result.config, checked(result)
    system, settings, trainer = config.system, ours.settings, ours.trainer
    axolotl, trl = system == "axolotl", system == "trainer"
    lora = config.keys.get("adapter" if axolotl else "finetuning_type") == "lora"
    lora |= bool(config.keys.get("use_peft"))

    assert ours.optimizer.params["lr"] == said(config, "learning_rate", usual=5e-5)
    assert ours.optimizer.params.get("weight_decay", 0) == said(config, "weight_decay", usual=0)
    names = ("micro_batch_size",) if axolotl else ("per_device_train_batch_size",)
    assert settings["train_micro_batch_size_per_gpu"] == said(config, *names, usual=8)
    accumulated = said(config, "gradient_accumulation_steps", usual=1)
    assert settings["gradient_accumulation_steps"] == accumulated
    clipping = said(config, "max_grad_norm", usual=1.0)
    assert settings.get("gradient_clipping", 1.0) == clipping
    assert trainer.seed == said(config, "seed", usual=42)

    if (steps := said(config, "max_steps", usual=-1)) > 0:
        assert trainer.steps == steps
    else:
        usual = 1.0 if axolotl else 3.0
        assert at(result.draft.made, "trainer.epochs") == said(
            config, "num_epochs", "num_train_epochs", usual=usual
        )
    lengths = ("cutoff_len", "sequence_len", "max_length", "max_seq_length")
    assert trainer.data.sequence_length == said(config, *lengths, usual=1024)

    assert (trainer.adapter is not None) == lora == (config.kind == "lora")
    if trainer.adapter is not None:
        assert trainer.adapter.r == said(config, "lora_r", "lora_rank", usual=8)
        alpha = said(config, "lora_alpha", usual=2 * trainer.adapter.r)
        assert (trainer.adapter.alpha, trainer.adapter.dropout) == (
            alpha,
            said(config, "lora_dropout", usual=0),
        )
        check_targets(config, trainer.adapter.targets)
    check_documents(config, trainer.data)
    check_schedule(config, ours, result)
    check_precision(config, settings, result)
    assert trainer.data.loss_on == (
        "all" if trl and not said(config, "assistant_only_loss") else "assistant"
    )


def test_a_quantised_base_is_theirs():
    quantised = [result for result in results() if result.config.kind == "quantised"]
    made = [checked(result).trainer.adapter for result in quantised if result.draft]
    assert len(made) >= 6
    for adapter in made:
        assert adapter is not None and adapter.quantize is not None
    kinds = [adapter.quantize.type for adapter in made if adapter and adapter.quantize]
    assert {"nf4", "int8"} == {*kinds}


def check_documents(config: Config, data: Any) -> None:
    keys = config.keys
    packed = keys.get("sample_packing") or keys.get("packing") or keys.get("neat_packing")
    if keys.get("stage") == "pt":
        assert (data.documents, data.isolate) == ("concatenate", False)
    elif keys.get("pretraining_dataset"):
        assert (data.documents, data.isolate) == ("concatenate", True)
    else:
        assert data.documents == ("pack" if packed else "pad")


def check_targets(config: Config, targets: Any) -> None:
    theirs = config.keys.get("lora_target_modules") or config.keys.get("lora_target")
    if theirs == "all" or config.keys.get("lora_target_linear"):
        assert targets == "all-linear"
    elif isinstance(theirs, str) and "(" not in theirs:
        assert targets == theirs.replace(" ", "").split(",")
    else:
        assert targets == theirs


def check_schedule(config: Config, ours: Ours, result: Result) -> None:
    usual = "cosine" if config.system == "axolotl" else "linear"
    kind = config.keys.get("lr_scheduler") or config.keys.get("lr_scheduler_type") or usual
    assert ours.scheduler is not None and kind.startswith(ours.scheduler.type)
    options = config.keys.get("lr_scheduler_kwargs") or {}
    least = ours.scheduler.params.get("cos_min_ratio", 0)
    assert least == options.get("min_lr_rate", 0)
    warmup = ours.scheduler.params["warmup_num_steps"]
    steps = said(config, "warmup_steps", usual=0)
    if steps >= 1:
        assert warmup == steps
    elif (share := said(config, "warmup_ratio", "warmup_steps", usual=None)) is not None:
        assert abs(warmup - share * (ours.trainer.steps or STEPS)) <= 1


def check_precision(config: Config, settings: Any, result: Result) -> None:
    half = bool(config.keys.get("fp16"))
    low = config.keys.get("bf16") or config.keys.get("torch_dtype") == "bfloat16"
    low = low or (config.system == "axolotl" and not half and config.keys.get("bf16") is None)
    enabled = {name: bool(settings.get(name, {}).get("enabled")) for name in ("fp16", "bf16")}
    assert enabled == {"fp16": half, "bf16": bool(low) and not half}
    if config.keys.get("torch_dtype") == "bfloat16" and config.kind == "full":
        assert any(line.startswith("torch_dtype") for line in result.draft.notes)


@pytest.mark.parametrize("origin", SOURCES)
def test_the_chat_template_of_an_import_is_theirs(origin: str):
    """By name, as a file beside it, or none where the model's own is meant."""
    result = result_of(origin)
    if result.draft is None:
        return
    keys, place = result.config.keys, at(result.draft.made, PLACE)
    text = keys.get("chat_template") if result.config.system == "trainer" else None
    if text:
        assert (result.draft.template, place) == (text, result.draft.template_path)
        return
    shipped = read_table("templates")["shipped"].split()
    name = keys.get("template") or keys.get("chat_template")
    assert result.draft.template is None and (place is None or place in shipped)
    assert name or place is None


def test_no_key_that_decides_what_is_trained_is_ever_only_noted():
    for result in results():
        if result.draft is None or result.config.kind == "preferences":
            continue  # with pairs, TRL's disable_dropout decides over an adapter's
        carried = {line.partition(" ")[0] for line in result.draft.carried}
        noted = {line.partition(" ")[0] for line in result.draft.notes} - carried
        assert not [key for key in noted if decides(key)], name_of(result)


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="the templates come with another change")
def test_every_name_of_a_template_is_that_of_a_file():
    content = read_table("templates")
    names = {
        rule["to"]
        for name in ("llamafactory", "axolotl")
        for rule in content[name].values()
        if "to" in rule
    }
    names |= set(content["ends"])
    files = {path.stem for path in TEMPLATES.glob("*.jinja")}
    assert names <= set(content["shipped"].split()) <= files


TURNS = {
    "chatml": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n",
    "qwen3_nothink": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n",
    "llama3": "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{}<|eot_id|>",
    "gemma": "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n{}<end_of_turn>\n",
    "mistral": "[INST] {}[/INST] {}</s>",
    "phi4": "<|im_start|>user<|im_sep|>{}<|im_end|><|im_start|>assistant<|im_sep|>{}<|im_end|>",
    "deepseek3": "<｜User｜>{}<｜Assistant｜>{}</s>",
}
"""Two turns as LLaMA-Factory's templates format them, after the token of the beginning."""


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="the templates come with another change")
@pytest.mark.parametrize("theirs", TURNS)
def test_a_template_of_a_name_here_renders_the_turns_of_theirs(theirs: str):
    from transformers.utils.chat_template_utils import render_jinja_template

    roles = ("user", "assistant", "user", "assistant")
    turns = [{"role": role, "content": f"{role} {at}"} for at, role in enumerate(roles)]
    name = read_table("templates")["llamafactory"][theirs]["to"]
    texts, _ = render_jinja_template(
        conversations=[turns],
        chat_template=(TEMPLATES / f"{name}.jinja").read_text(),
        bos_token="<s>",
        eos_token="</s>",
    )
    text = texts[0].removeprefix("<s>").replace("<｜end▁of▁sentence｜>", "</s>")
    words = [turn["content"] for turn in turns]
    assert text == TURNS[theirs].format(*words[:2]) + TURNS[theirs].format(*words[2:])


def test_the_page_is_up_to_date():
    # python -m tests.support.foreign writes it anew
    assert PAGE.read_text() == page()


def test_the_table_holds_no_path_of_a_machine():
    text = "\n".join(str(config.keys) for config in configs())
    assert "/home/" not in text and "/mnt/" not in text
