"""Axolotl's YAML."""

from __future__ import annotations

from trainer.config.grammar import show
from trainer.config.habits import arguments
from trainer.config.habits.draft import Asked, Draft, Group, Roles, fill, parse
from trainer.config.habits.sources import put_sources
from trainer.config.read import Json
from trainer.errors import ConfigError, Problem

_KERNELS = "no kernel of the model is changed"
_QUANTISED = "the base is kept in 16 or 32 bits: no quantised one is trained here"
_SHARED = ("optimizer", "saving", "evaluation", "precision", "recomputation", "sharding", "clipping", "logging")
TABLE = {
    key: row for key, row in arguments.TABLE.items() if row.group in _SHARED or not (row.group or row.path)
} | parse(f"""
base_model : trainer.model.name_or_path
model_revision revision_of_model : trainer.model.revision
trust_remote_code : trainer.model.trust_remote_code
base_model_config model_type type_of_model cls_model_config
processor_type : - =AutoModelForCausalLM,LlamaForCausalLM,MistralForCausalLM the class follows from the model's config
tokenizer_config : trainer.data.tokenizer
tokenizer_type tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common
tokenizer_save_jinja_files : - =AutoTokenizer,LlamaTokenizer,true the tokenizer is as its files say
special_tokens tokens added_tokens_overrides resize_token_embeddings_to_32x shrink_embeddings
fix_untrained_tokens : - save a tokenizer that has these tokens, and name it in trainer.data.tokenizer
is_falcon_derived_model is_llama_derived_model
is_mistral_derived_model is_qwen_derived_model strict : - =true the family follows from the model's config
model_config
overrides_of_model_config model_kwargs overrides_of_model_kwargs rope_scaling : - the model is as its files say
output_dir : @run folder

datasets : @data train
test_datasets : @data test
pretraining_dataset : @data stream
val_set_size : @data held
dataset_prepared_path push_dataset_to_hub
dataset_keep_in_memory skip_prepare_dataset : - data are prepared once, in the cache folder, and found by content
dataset_processes
dataset_num_proc dataset_shard_num dataset_shard_idx : - data are prepared once, and found by content
dataset_exact_deduplication : - rows are read as they are
shuffle_merged_datasets
curriculum_sampling shuffle_before_merging_datasets : - =true the order is a function of seed and epoch
sequence_len : @samples longest
excess_length_strategy : @samples excess
sample_packing : @samples packing
eval_sequence_len min_sample_len max_prompt_len : - all samples have trainer.data.sequence_length
pad_to_sequence_len eval_sample_packing sample_packing_group_size
sample_packing_bin_size : - =true padding changes no loss; samples to evaluate on are packed as those to train on
sample_packing_sequentially
multipack_real_batches batch_flattening pretrain_multipack_buffer_size : - =auto documents are packed best-fit
sample_packing_eff_est total_num_tokens total_supervised_tokens : - the data are counted
pretraining_sample_concatenation
pretrain_multipack_attn streaming streaming_multipack_buffer_size : - =true data are prepared, not streamed
train_on_inputs : - prompts never count in the loss
chat_template : @template name
chat_template_jinja : @template text
default_system_message eot_tokens : - the chat template and the data say it

adapter : @adapter kind
lora_r : @adapter r
lora_alpha : @adapter alpha
lora_dropout : @adapter dropout
lora_target_modules : @adapter targets
lora_target_linear : @adapter linear
lora_modules_to_save : @adapter save
peft_use_dora : @adapter dora
peft_use_rslora : @adapter rslora
lora_model_dir : @adapter path
lora_fan_in_fan_out lora_on_cpu
lora_target_parameters peft_autocast_adapter_dtype peft_ensure_weight_tying : - =true layers are found by PEFT
peft_layers_to_transform peft_layers_pattern peft_layer_replication peft_init_lora_weights
peft_trainable_token_indices : - =true modules are named by trainer.adapter.targets, and start as PEFT's do
loraplus_lr_ratio loraplus_lr_embedding : - =0.000001 a trainer.parameter_groups of *.lora_B.* has it as lr_multiplier
merge_lora merge_method : - =memory_efficient set trainer.adapter.merge
relora relora_steps
relora_warmup_steps relora_prune_ratio relora_cpu_offload jagged_restart_steps : - the adapter is one and stays
load_in_8bit load_in_4bit gptq bnb_config_kwargs peft qlora_sharded_model_loading : - {_QUANTISED}
unfrozen_parameters : - trainer.freeze names what stays, not what is trained: {show("*.embed_tokens.*")} for one
lora_mlp_kernel lora_qkv_kernel lora_o_kernel unsloth_cross_entropy_loss unsloth_lora_mlp : - {_KERNELS}
unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope plugins cut_cross_entropy : - {_KERNELS}
liger_rope liger_rms_norm liger_layer_norm liger_glu_activation liger_swiglu : - {_KERNELS}
liger_cross_entropy liger_fused_linear_cross_entropy : - the loss is chunked here, so that logits are never whole
flash_attn_cross_entropy
flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp flash_optimum use_kernels : - {_KERNELS}
flash_attention : @attention flash
sdp_attention : @attention sdpa
eager_attention : @attention eager
flex_attention : @attention flex
xformers_attention : @attention xformers
attn_implementation : @attention name
s2_attention flex_attn_compile_kwargs : - attention is whole

micro_batch_size : train_micro_batch_size_per_gpu
batch_size : train_batch_size
gradient_accumulation_steps : gradient_accumulation_steps
eval_batch_size : - an evaluation has the micro-batch of a step
num_epochs : @length epochs
max_steps : @length steps
seed : trainer.seed
optimizer : @optimizer name
lr_scheduler : @scheduler type
lr_scheduler_kwargs : @scheduler options
cosine_min_lr_ratio : @scheduler least
warmup_steps : @scheduler steps
warmup_ratio : @scheduler share
lr_quadratic_warmup
cosine_constant_lr_ratio lr_div_factor : - one learning rate, by scheduler
lr_groups embedding_lr embedding_lr_scale : - trainer.parameter_groups has rates by patterns of names
adam_epsilon2 adam_beta3 torchdistx_path : - the optimizers take the parameters of optimizer.params alone
noisy_embedding_alpha neftune_noise_alpha : trainer.neftune_alpha
orpo_alpha rpo_alpha simpo_gamma cpo_alpha rl_beta kto_desirable_weight kto_undesirable_weight : - it is not offered
rl reward_model process_reward_model : @stage other
gradient_checkpointing : @recomputation on
activation_offloading : - blocks are computed again, not offloaded
bfloat16 : @precision pure
float16 : @precision fp16
float32 fp8 fp8_enable_fsdp_float8_all_gather : - bf16 and fp16 are what is offered
evals_per_epoch : @evaluation per_epoch
saves_per_epoch : @saving per_epoch
auto_resume_from_checkpoints : - =true running the same command again goes on
loss_watchdog_threshold loss_watchdog_patience : - a step that is not finite is an error
gc_steps profiler_steps experimental_skip_move_to_device
low_cpu_mem_usage max_memory gpu_memory_limit device_map device ddp : - =auto,true the engine sets it
do_causal_lm_eval eval_causal_lm_metrics
do_bench_eval bench_dataset eval_table_size eval_max_new_tokens : - an evaluation is of the loss
tensor_parallel_size dp_shard_size dp_replicate_size
context_parallel_size sequence_parallel_degree : - =1 tensor_parallel.autotp_size and trainer.mesh say the layout
heads_k_stride
ring_attn_func fsdp_version fsdp_final_state_dict_type hf_use_auth_token : - =1,2,FULL_STATE_DICT the layout says it
use_wandb wandb_project : @trackers wandb
wandb_mode wandb_entity wandb_watch
wandb_name wandb_log_model wandb_run_id : - a run is called by trainer.run.name; WANDB_ENTITY and WANDB_MODE are read
use_mlflow mlflow_tracking_uri mlflow_experiment_name : @trackers mlflow
mlflow_run_name hf_mlflow_log_artifacts : - MLFLOW_TRACKING_URI is read; a run is called by trainer.run.name
use_tensorboard : @trackers tensorboard
use_comet comet_project_name comet_workspace comet_api_key comet_mode : - trackers are tensorboard, mlflow, wandb
gradio_title
gradio_share gradio_server_name gradio_server_port use_ray ray_run_name ray_num_workers : - =1 it is not for training
""")
_SOURCE = parse("""
path : @source path
data_files : @source files
type : @source type
ds_type : @source format
field : @source field
field_messages : @source messages
conversation : - the chat template says how turns are written
message_property_mappings : @source names_of
message_field_role
message_field_content : - =role,content,from,value messages have role and content, or from and value
name : name
split : split
revision trust_remote_code : - the newest version of a hub id is read
shards shards_idx preprocess_shards : - give a smaller file
chat_template : - =tokenizer_default set trainer.data.chat_template, a file
chat_template_jinja : - set trainer.data.chat_template, a file
roles_to_train : @source learned
train_on_eos : - =turn the end of each of the assistant's turns counts, and no other
train_on_inputs : - prompts never count in the loss
message_field_training : - =train,weight a message counts as its own "train" or "weight" says
message_field_training_detail : - a turn counts as a whole
roles field_human field_model : - roles are user, assistant, system and tool, or as ShareGPT has them
drop_system_message : - system turns are the data's
field_tools field_system : - =tools,system the columns have to be called tools and system
field_thinking template_thinking_key split_thinking : - =reasoning_content the chat template reads what a message has
input_format input_transform : - rows are read as they are
""")
_FORMATS = {"json": "jsonl", "jsonl": "jsonl", "parquet": "parquet", "arrow": "arrow", "csv": "csv", "text": "text"}
_PLACES = {"train": "trainer.data: ", "stream": "trainer.data: ", "test": "of those held out: "}
_TURNS = "the user's turn is as the chat template has it, not Axolotl's own prompt"


def defaults(given: Json) -> Json:
    """What Axolotl does where it is not told, and this trainer would do otherwise."""
    sized = "batch_size" in given
    return {
        **({} if sized and "micro_batch_size" in given else {"micro_batch_size": 1}),
        **({} if sized else {"gradient_accumulation_steps": 1}),
        "num_epochs": 1.0,
        "seed": 42,
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "cosine",
        "warmup_ratio": 0.03,
        "max_grad_norm": 1.0,
        "bf16": "auto",
        "sequence_len": 512,
        "excess_length_strategy": "drop",
        "val_set_size": 0.0,
        "save_total_limit": 4,
        **({} if {"save_steps", "saves_per_epoch"} & given.keys() else {"save_strategy": "epoch"}),
    }


def _stage(draft: Draft, roles: Roles) -> None:
    """Raises ConfigError for what is no training on text: it would be another one."""
    if (asked := roles.get("other")) and asked.value:
        raise ConfigError(Problem(asked.key, f"saw {show(asked.value)}", "nothing: other stages are not offered"))


def _samples(draft: Draft, roles: Roles) -> None:
    longest, packing, excess = roles["longest"], roles.get("packing"), roles["excess"]
    draft.put(longest, "trainer.data.sequence_length", longest.value)
    packs = bool(packing and packing.value)
    kinds = [str(part.get("type", "")) for part in _parts(Asked("datasets", draft.given.get("datasets")))]
    asked = packing or longest
    if (kinds and all(kind.startswith("completion") for kind in kinds)) or draft.given.get("pretraining_dataset"):
        draft.put(asked, "trainer.data.documents", "concatenate", "long texts are cut into samples, and none is lost")
        draft.put(asked, "trainer.data.isolate", packs)
        return
    draft.put(asked, "trainer.data.documents", "pack" if packs else "pad")
    ours = {"raise": "error", "truncate": "truncate"}.get(str(excess.value), "drop")
    draft.put(excess, "trainer.data.too_long", ours)


def _template(draft: Draft, roles: Roles) -> None:
    name, text = roles.get("name"), roles.get("text")
    if text and text.value:
        if "{" in str(text.value):
            draft.leave(text, "write it to a file, and name that in trainer.data.chat_template")
        else:
            draft.put(text, "trainer.data.chat_template", str(text.value))
    if name and name.value not in (None, "", "tokenizer_default", "jinja"):
        draft.leave(name, "the tokenizer's own template is used; trainer.data.chat_template takes a file with another")


def _data(draft: Draft, roles: Roles) -> None:
    for role in ("train", "stream", "test"):
        if (asked := roles.get(role)) is None or not asked.value:
            continue
        given = _parts(asked)
        parts = []
        for at, own in enumerate(given):
            part = Draft(own, draft.folder, _PLACES[role], f"{asked.key}[{at}].")
            fill(part, _SOURCE, {"type": ""}, {"source": _rows})
            parts.append(draft.take(part))
        put_sources(draft, asked, parts, [str(part.get("path")) for part in given], test=role == "test")
    held = roles["held"]
    if held.value > 1:
        draft.leave(
            held, "of the documents a share is held out, not a number: 0.01, or trainer.data.evaluation_fraction"
        )
    elif not draft.has("trainer.data.evaluation_path"):
        draft.put(held, "trainer.data.evaluation_fraction", held.value)


def _parts(asked: Asked) -> list[Json]:
    """The data sets of a list; a path alone is one, too."""
    listed = asked.value if isinstance(asked.value, list) else [asked.value] if asked.value else []
    parts = [{"path": part} if isinstance(part, str) else part for part in listed]
    if not all(isinstance(part, dict) and {"path", "data_files"} & part.keys() for part in parts):
        raise ConfigError(Problem(asked.key, f"saw {show(asked.value)}", "a list of sections with a path"))
    return parts


def _rows(part: Draft, roles: Roles) -> None:
    path, files, kind = roles.get("path"), roles.get("files"), roles.get("format")
    where = files or path
    if where is not None:
        part.put(where, "path", where.value)
    if path and files and path.value in _FORMATS:
        part.put(path, "format", _FORMATS[path.value])
    elif path and files:
        part.leave(path, "its files are read, not the hub's list of them")
    if kind:
        part.put(kind, "format", _FORMATS.get(str(kind.value), str(kind.value)))
    _records(part, roles, roles["type"])
    if learned := roles.get("learned"):
        usual = [*map(str, learned.value or [])] in (["assistant"], ["gpt"])
        (part.keep if usual else part.leave)(learned, "the assistant's turns count in the loss, and no others")
    if mapping := roles.get("names_of"):
        known = {"role": ("role", "from"), "content": ("content", "value")}
        usual = all(name in known.get(key, (key,)) for key, name in mapping.value.items())
        (part.keep if usual else part.leave)(mapping, "messages have role and content, or from and value")


def _records(part: Draft, roles: Roles, kind: Asked) -> None:
    """What a row is, by Axolotl's `type`."""
    name, _, field = (kind.value if isinstance(kind.value, str) else "own").partition(":")
    messages = roles.get("messages")
    if name in ("chat_template", "sharegpt"):
        part.put(kind, "records", "chat")
        usual = "conversations" if name == "sharegpt" else "messages"
        part.put(messages or kind, "chat_column", str(messages.value) if messages else usual)
    elif name.startswith("alpaca"):
        part.put(kind, "records", "instruction", _TURNS)
    elif name in ("completion", "pretrain"):
        part.put(kind, "records", "text")
        column = roles.get("field") or (Asked(kind.key, field) if field else None)
        if column:
            part.put(column, "text_column", column.value)
    elif isinstance(kind.value, dict):
        _own_prompt(part, kind)
    elif kind.value:
        part.change(kind, "what a row is follows from its columns")


def _own_prompt(part: Draft, kind: Asked) -> None:
    """Columns of a prompt and a completion, in a format of one's own."""
    given = kind.value
    part.put(kind, "records", "prompt_completion", "a pair of texts, without a chat template")
    part.put(kind, "prompt_column", given.get("field_instruction") or "instruction")
    part.put(kind, "completion_column", given.get("field_output") or "output")
    for key in ("format", "no_input_format", "system_prompt", "system_format", "field_system", "field_input"):
        if given.get(key) and given[key] != "{instruction}":
            part.leave(kind, f"{key} {show(given[key])}: the prompt is the column as it is")


GROUPS: dict[str, Group] = {
    "stage": _stage,
    **arguments.SHARED,
    "samples": _samples,
    "template": _template,
    "data": _data,
}
