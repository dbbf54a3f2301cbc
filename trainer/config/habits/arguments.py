"""The arguments of Hugging Face's Trainer, with those that TRL's and transformers' own scripts add."""

from __future__ import annotations

from trainer.config.habits.draft import Draft, Group, Roles, parse
from trainer.config.habits.training import GROUPS
from trainer.config.read import Json

TABLE = parse("""
output_dir : @run folder
run_name : - =auto a run is called by the last part of output_dir: see trainer.run.name
overwrite_output_dir : - =true --fresh starts anew where there is a run
per_device_train_batch_size per_gpu_train_batch_size : train_micro_batch_size_per_gpu
gradient_accumulation_steps : gradient_accumulation_steps
num_train_epochs : @length epochs
max_steps : @length steps
seed : trainer.seed

learning_rate : @optimizer lr
optim : @optimizer name
weight_decay : @optimizer decay
adam_beta1 : @optimizer beta1
adam_beta2 : @optimizer beta2
adam_epsilon : @optimizer eps
max_grad_norm : @clipping norm
lr_scheduler_type : @scheduler type
lr_scheduler_kwargs : @scheduler options
warmup_steps : @scheduler steps
warmup_ratio : @scheduler share
optim_args optim_target_modules : - the optimizers take the parameters of optimizer.params alone
adafactor : - it is not offered: AdamW
label_smoothing_factor : trainer.label_smoothing
neftune_noise_alpha : trainer.neftune_alpha

bf16 : @precision bf16
fp16 : @precision fp16
fp16_opt_level half_precision_backend fp16_backend : - =O1,auto Apex is not used
bf16_full_eval fp16_full_eval : - an evaluation computes as a step does
tf32 : - set torch.backends.cuda.matmul.fp32_precision in an own script
gradient_checkpointing activation_checkpointing : @recomputation on
gradient_checkpointing_kwargs activation_checkpointing_kwargs : - blocks are recomputed without re-entrance
deepspeed : @sharding deepspeed
fsdp : @sharding fsdp
fsdp_config : @sharding options
fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params : - =0 each block of the model is a unit
parallelism_config : - pipeline.stages, tensor_parallel.autotp_size and trainer.mesh say the layout
accelerator_config : - =true the global order of samples says what each rank sees

eval_strategy evaluation_strategy : @evaluation strategy
eval_steps : @evaluation steps
save_strategy : @saving strategy
save_steps : @saving steps
save_total_limit : @saving limit
load_best_model_at_end : @saving best
metric_for_best_model greater_is_better : - =loss,eval_loss the best is that of the lowest held-out loss
logging_steps : @logging steps
logging_strategy : @logging strategy
report_to : @trackers names
resume_from_checkpoint : - say --resume PATH; meshloom checkpoint import makes one of a ZeRO checkpoint
ignore_data_skip : - a run goes on with the samples that are next

do_train do_eval do_predict evaluate_during_training : - =true a run trains, and evaluates as trainer.evaluation says
per_device_eval_batch_size per_gpu_eval_batch_size : - =8 an evaluation has the micro-batch of a step
eval_accumulation_steps eval_delay prediction_loss_only eval_do_concat_batches : - =0,true no predictions are kept
eval_use_gather_object batch_eval_metrics include_for_metrics include_inputs_for_metrics : - no predictions are kept
eval_on_start : - evaluations are at each trainer.evaluation.every steps, and at the end
average_tokens_across_devices : - =true the loss is always over the targets of the whole batch
use_liger_kernel
liger_kernel_config : - the loss is chunked here, so that logits are never whole; no other kernel is changed
use_cache : - nothing is generated within a step
torch_compile torch_compile_backend torch_compile_mode torchdynamo : - the model is not compiled
torch_empty_cache_steps auto_find_batch_size : - the batch sizes are those that the config says
use_cpu no_cuda : - set trainer.device to "cpu"
use_mps_device use_ipex
jit_mode_eval tpu_num_cores tpu_metrics_debug xpu_backend past_index mp_parameters : - =-1 it is for other devices
full_determinism data_seed : - trainer.seed says the order of the samples and all else that is random
group_by_length length_column_name
train_sampling_strategy : - =length,random documents are packed, not sorted by length
dataloader_num_workers
dataloader_pin_memory dataloader_persistent_workers : - =0,true text is read memory-mapped, a batch ahead
dataloader_prefetch_factor dataloader_multiprocessing_context
dataloader_in_order dispatch_batches split_batches : - =true,2 text is read memory-mapped, a batch ahead
dataloader_drop_last : - =true the order of samples fills every batch
remove_unused_columns label_names : - =true columns are found: see trainer.data.records
ddp_find_unused_parameters
ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout : - =1800,true the engine sets it
local_rank world_size sharded_ddp : - =-1 the launcher says it
logging_first_step log_on_each_node logging_nan_inf_filter
logging_dir : - =true metrics.jsonl has all logged steps; a step that is not finite is never hidden
log_level log_level_replica
disable_tqdm debug skip_memory_metrics : - =passive,warning,true lines are printed as trainer.log.every says
include_num_input_tokens_seen include_tokens_per_second : - =no,"no" each line has the tokens per second
project trackio_space_id trackio_bucket_id trackio_static_space_id : - =huggingface,trackio it is for Trackio
push_to_hub hub_token hub_private_repo
hub_model_id hub_strategy hub_always_push hub_revision : - =every_save,<HUB_TOKEN> upload final/ when it is there
push_to_hub_model_id
push_to_hub_organization push_to_hub_token : - =<PUSH_TO_HUB_TOKEN> upload final/ when it is there
save_only_model save_on_each_node
save_safetensors enable_jit_checkpoint : - =true a checkpoint is whole, in safetensors, and written once
restore_callback_states_from_checkpoint ray_scope : - =last there are no such callbacks
predict_with_generate
generation_max_length generation_num_beams generation_config sortish_sampler : - nothing is generated in an evaluation
early_stopping_patience : @evaluation patience

model_name_or_path : trainer.model.name_or_path
model_revision : trainer.model.revision
trust_remote_code : trainer.model.trust_remote_code
tokenizer_name tokenizer_name_or_path : trainer.data.tokenizer
attn_implementation : @attention name
torch_dtype dtype : - =auto weights are kept in float32; bf16.enabled says in what the model computes
low_cpu_mem_usage use_fast_tokenizer use_auth_token token cache_dir : - =true a model is never whole in memory
dataset_name : @rows hub
train_file : @rows file
dataset_config_name dataset_config : trainer.data.name
dataset_train_split : trainer.data.split
validation_file : trainer.data.evaluation_path
validation_split_percentage : @rows held
dataset_text_field : @rows text
block_size : @rows window
max_length max_seq_length model_max_length : @rows longest
packing : @rows packing
packing_strategy
eval_packing padding_free pad_to_multiple_of : - =bfd,true documents are packed best-fit, and never see one another
assistant_only_loss
completion_only_loss : - =true of a chat the assistant's turns count, of a pair the completion
chat_template_path : trainer.data.chat_template
dataset_num_proc
preprocessing_num_workers overwrite_cache dataset_batch_size : - data are prepared once, and found by content
max_train_samples max_eval_samples streaming dataset_test_split : - =test give a smaller file
use_peft : @adapter kind
lora_r : @adapter r
lora_alpha : @adapter alpha
lora_dropout : @adapter dropout
lora_target_modules : @adapter targets
lora_modules_to_save : @adapter save
use_rslora : @adapter rslora
use_dora : @adapter dora
lora_task_type lora_target_parameters : - =CAUSAL_LM modules are named by trainer.adapter.targets
load_in_8bit load_in_4bit
use_bnb_nested_quant bnb_4bit_quant_type : - =nf4 the base is kept in 16 or 32 bits: no quantised one is trained here
""")


def defaults(given: Json) -> Json:
    """What the Trainer does where it is not told, and this one would do otherwise."""
    return {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 3.0,
        "seed": 42,
        "bf16": False,
        "fp16": False,
        "learning_rate": 5e-5,
        "optim": "adamw_torch_fused",
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "eval_strategy": "no",
        "save_strategy": "steps",
        "save_steps": 500,
        "logging_strategy": "steps",
        "logging_steps": 500,
        **({"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05} if given.get("use_peft") else {}),
    }


def logging(draft: Draft, roles: Roles) -> None:
    steps, strategy = roles.get("steps"), roles.get("strategy")
    if strategy and strategy.value != "steps":
        draft.leave(strategy, "trainer.log.every is a number of steps")
    elif strategy:
        draft.keep(strategy, "intervals are of steps")
    if steps and steps.value >= 1:
        draft.put(steps, "trainer.log.every", int(steps.value))
    elif steps and steps.value:
        draft.leave(steps, "trainer.log.every is a number of steps")


def _rows(draft: Draft, roles: Roles) -> None:
    """What the scripts of transformers (`block_size`) and of TRL (`max_length`, `packing`) say of the data."""
    for role in ("hub", "file"):
        if asked := roles.get(role):
            draft.put(asked, "trainer.data.path", asked.value)
    if asked := roles.get("window"):
        draft.put(asked, "trainer.data.sequence_length", asked.value)
    if asked := roles.get("longest"):
        draft.put(asked, "trainer.data.sequence_length", asked.value)
    if (asked := roles.get("packing") or roles.get("longest")) and "window" not in roles:
        draft.put(asked, "trainer.data.documents", "pack" if asked.value is True else "pad")
    if asked := roles.get("text"):
        draft.put(asked, "trainer.data.text_column", asked.value)
    if asked := roles.get("held"):
        draft.put(asked, "trainer.data.evaluation_fraction", asked.value / 100)


SHARED: dict[str, Group] = {**GROUPS, "logging": logging}
SCRIPTS: dict[str, Group] = {**SHARED, "rows": _rows}
