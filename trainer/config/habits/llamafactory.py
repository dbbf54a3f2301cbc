"""LLaMA-Factory's YAML: the Trainer's arguments with those of its own, and data sets that `dataset_info.json` knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.config.grammar import show
from trainer.config.habits import arguments
from trainer.config.habits.draft import Asked, Draft, Group, Roles, fill, names, number, parse
from trainer.config.habits.reading import beside
from trainer.config.habits.sources import put_sources
from trainer.config.read import Json, read
from trainer.errors import ConfigError, Problem

_OTHER = "optimizers are those of DeepSpeed's names, and of what they say"
TABLE = {key: row for key, row in arguments.TABLE.items() if row.group not in ("rows", "adapter")} | parse(f"""
stage : @stage kind
finetuning_type : @adapter kind
lora_rank : @adapter r
lora_alpha : @adapter alpha
lora_dropout : @adapter dropout
lora_target : @adapter targets
additional_target : @adapter save
use_rslora : @adapter rslora
use_dora : @adapter dora
loraplus_lr_ratio loraplus_lr_embedding : - =0.000001 a trainer.parameter_groups of *.lora_B.* has it as lr_multiplier
pissa_init pissa_iter pissa_convert create_new_adapter : - =16 an adapter starts as PEFT's do
adapter_name_or_path : @adapter path
adapter_folder : - --resume goes on from a run's own checkpoint
freeze_trainable_layers
freeze_trainable_modules freeze_extra_modules : - =all trainer.freeze names what stays, not what is trained
quantization_bit quantization_method quantization_type double_quantization
quantization_device_map : - =bnb,bitsandbytes,nf4,true the base is kept in 16 or 32 bits: no quantised one is trained
fp8 fp8_backend fp8_enable_fsdp_float8_all_gather : - =auto bf16 and fp16 are what is offered
use_galore use_apollo use_badam use_adam_mini use_muon use_llama_pro use_dft_loss use_mca : - {_OTHER}
pure_bf16 : @precision pure
flash_attn : @attention name
shift_attn mixture_of_depths
rope_scaling resize_vocab add_tokens add_special_tokens : - the model and the tokenizer are as their files say
new_special_tokens_config
init_special_tokens split_special_tokens : - =noise_init the model and the tokenizer are as their files say
moe_aux_loss_coef : - the model's own config has its coefficient
train_from_scratch : - set trainer.model.config in place of name_or_path
disable_gradient_checkpointing : @recomputation off
gradient_checkpointing : @recomputation on
use_reentrant_gc upcast_layernorm
upcast_lmhead_output : - =true blocks are recomputed without re-entrance; norms and the loss are in float32
use_unsloth use_unsloth_gc enable_liger_kernel use_v1_kernels use_kv_cache : - =true no kernel is changed
infer_backend infer_dtype offload_folder print_param_status : - =huggingface,hf,auto,offload it is for inference
hf_hub_token ms_hub_token om_hub_token : - log in with the hub's own command
export_dir
export_size export_device export_quantization_bit export_legacy_format : - final/ is there when the run is done

dataset : @data train
eval_dataset : @data test
dataset_dir : @data folder
val_size : @data held
mix_strategy : @data mix
interleave_probs : @data weights
template : @samples template
cutoff_len : @samples longest
packing : @samples packing
neat_packing : @samples neat
mask_history : @samples last
train_on_prompt : - the prompt never counts in the loss
max_samples : - give a smaller file
default_system enable_thinking reasoning_effort tool_format : - =true the chat template and the data say it
media_dir
image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps video_maxlen : - only text is trained on
freeze_vision_tower freeze_multi_modal_projector freeze_language_model : - =true only text is trained on
streaming buffer_size preprocessing_batch_size
tokenized_path data_shared_file_system : - =16384,1000 data are prepared once, and memory-mapped
overwrite_cache preprocessing_num_workers : - =true data are prepared once, and found by content
ignore_pad_token_for_loss : - =true padding never counts in the loss
eval_on_each_dataset : - =true several are evaluated by name
eval_num_beams compute_accuracy : - an evaluation is of the loss, and of what follows from it
disable_shuffling : - the order is a function of seed and epoch
early_stopping_steps : @evaluation patience
plot_loss include_effective_tokens_per_second : - =true metrics.jsonl has the losses and the tokens per second
use_swanlab swanlab_project swanlab_workspace
swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir : - trackers are tensorboard, mlflow, wandb
ray_run_name ray_storage_path ray_num_workers
resources_per_worker placement_strategy ray_init_kwargs : - =./saves,1,PACK the launcher starts the processes
""")
_ENTRY = parse("""
file_name hf_hub_url : @source path
ms_hub_url om_hub_url script_url cloud_file_name revision folder : - files and Hugging Face's hub are read
formatting : @source formatting
subset : name
split : split
columns : @source columns
tags : @source tags
num_samples : - give a smaller file
ranking : - its rows are preferences, which are not trained on
""")
_TAGS = {
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant", "bot", "model"),
    "observation_tag": ("observation", "tool", "function_response"),
    "function_tag": ("function_call",),
    "system_tag": ("system",),
}
"""What the messages of a chat may call things."""


def defaults(given: Json) -> Json:
    """As the Trainer's, with LoRA of 8 ranks, a cut at 2048 tokens, and recomputation."""
    lora = given.get("finetuning_type", "lora") == "lora"
    rank = number(given.get("lora_rank"))
    rank = rank if isinstance(rank, int) else 8
    return {
        **{key: value for key, value in arguments.defaults({}).items()},
        "stage": "sft",
        "finetuning_type": "lora",
        **({"lora_rank": 8, "lora_alpha": 2 * rank, "lora_target": "all"} if lora else {}),
        "cutoff_len": 2048,
        "gradient_checkpointing": True,
        "dataset_dir": "data",
        "val_size": 0.0,
    }


def _stage(draft: Draft, roles: Roles) -> None:
    """Raises ConfigError for what is no training on text: it would be another one."""
    asked = roles["kind"]
    if asked.value not in ("sft", "pt"):
        raise ConfigError(Problem(asked.key, f"saw {show(asked.value)}", "sft or pt: no other is offered"))
    freeze = draft.given.get("finetuning_type")
    if freeze not in (None, "lora", "full"):
        expected = "lora or full: of freeze, trainer.freeze names the parameters that stay"
        raise ConfigError(Problem("finetuning_type", f"saw {show(freeze)}", expected))
    records = "documents in one stream" if asked.value == "pt" else "chats, instructions and pairs"
    draft.change(asked, f"what is learned is found from the rows: {records}")


def _samples(draft: Draft, roles: Roles) -> None:
    draft.put(roles["longest"], "trainer.data.sequence_length", roles["longest"].value)
    packing, neat = roles.get("packing"), roles.get("neat")
    stream = draft.given.get("stage") == "pt" and not (packing and packing.value is False)
    if neat and neat.value:
        draft.put(neat, "trainer.data.documents", "pack")
    elif packing and packing.value and not stream:
        why = "documents in one sample do not see one another, as with neat_packing"
        draft.put(packing, "trainer.data.documents", "pack", why)
    elif stream:
        draft.put(packing or roles["longest"], "trainer.data.documents", "concatenate")
    else:
        draft.put(packing or roles["longest"], "trainer.data.documents", "pad")
    if (last := roles.get("last")) and last.value:
        draft.put(last, "trainer.data.loss_on", "last_assistant")
    if template := roles.get("template"):
        draft.change(template, "the tokenizer's own chat template is used; trainer.data.chat_template takes a file")


def _data(draft: Draft, roles: Roles) -> None:
    folder = str(roles["folder"].value)
    info_path = beside(draft.folder, f"{folder}/dataset_info.json")
    info = read(info_path) if info_path else {}
    draft.keep(roles["folder"], "where dataset_info.json is")
    for role, asked in roles.items():
        if role not in ("train", "test") or not asked.value:
            continue
        found = str(info_path.parent if info_path else folder)
        parts = [_entry(draft, asked, name, info, found) for name in names(asked.value)]
        shares = [float(text) for text in names(roles["weights"].value)] if "weights" in roles else []
        if role == "train" and len(shares) == len(parts) > 1:
            parts = [part | {"weight": share} for part, share in zip(parts, shares, strict=True)]
            draft.change(roles["weights"], "each source has this share of the samples of an epoch")
        put_sources(draft, asked, parts, names(asked.value), test=role == "test")
    held = roles["held"]
    if held.value > 1:
        draft.leave(
            held, "of the documents a share is held out, not a number: 0.01, or trainer.data.evaluation_fraction"
        )
    elif "test" not in roles:
        draft.put(held, "trainer.data.evaluation_fraction", held.value)


def _entry(draft: Draft, asked: Asked, name: str, info: dict[str, Any], folder: str) -> Json:
    """A data set by its name in `dataset_info.json`."""
    entry = info.get(name)
    if not isinstance(entry, dict):
        draft.leave(asked, f"{folder}/dataset_info.json has no {name}: set trainer.data.path")
        return {"path": str(Path(folder) / name)}
    part = Draft(entry, draft.folder, "trainer.data: ", f"{name}.")
    if "file_name" in entry and "hf_hub_url" not in entry:
        part.given = entry | {"file_name": str(Path(folder) / str(entry["file_name"]))}
    fill(part, _ENTRY, {"formatting": "alpaca"}, {"source": _source})
    return draft.take(part)


def _source(part: Draft, roles: Roles) -> None:
    if path := roles.get("path"):
        part.put(path, "path", str(path.value))
    asked = roles.get("columns") or roles["formatting"]
    columns = asked.value if isinstance(asked.value, dict) else {}
    if roles["formatting"].value == "alpaca":
        _instructions(part, asked, columns)
        return
    part.put(roles["formatting"], "records", "chat")
    column = columns.get("messages", "messages" if roles["formatting"].value == "openai" else "conversations")
    part.put(asked, "chat_column", column)
    if tags := roles.get("tags"):
        strange = [tag for tag, value in tags.value.items() if value not in _TAGS.get(tag, (value,))]
        for tag in strange:
            part.leave(tags, f"{tag} {show(tags.value[tag])}: messages have {' or '.join(_TAGS[tag])} there")
        if not strange:
            part.keep(tags, "messages are read so")
    _renamed(part, asked, {"system": "system", "tools": "tools"}, columns)


def _instructions(part: Draft, asked: Asked, columns: Json) -> None:
    """Alpaca's columns; of one column alone, its text; of a prompt and a response with other names, a pair."""
    if set(columns) == {"prompt"}:
        part.put(asked, "records", "text")
        part.put(asked, "text_column", columns["prompt"])
        return
    usual = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
    if all(columns.get(key, usual[key]) == usual[key] for key in ("prompt", "response")):
        part.put(asked, "records", "instruction", "instruction and input are the user's turn, by the chat template")
        _renamed(part, asked, {key: usual[key] for key in ("query", "system", "history")}, columns)
        return
    part.put(asked, "records", "prompt_completion", "text is not put into a chat template")
    for key, ours in (("prompt", "prompt_column"), ("response", "completion_column")):
        part.put(asked, ours, columns.get(key, usual[key]))
    for key in ("query", "system", "history"):
        if columns.get(key):
            part.leave(asked, f"{key} {show(columns[key])}: a pair has a prompt and a completion alone")


def _renamed(part: Draft, asked: Asked, usual: dict[str, str], columns: Json) -> None:
    for key, name in usual.items():
        if columns.get(key, name) not in (name, None, ""):
            part.leave(asked, f"{key} {show(columns[key])}: the column has to be called {name}")


GROUPS: dict[str, Group] = {"stage": _stage, **arguments.SHARED, "samples": _samples, "data": _data}
