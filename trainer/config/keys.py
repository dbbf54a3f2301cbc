"""DeepSpeed's JSON keys, as of DeepSpeed 0.19.8, in the notation of `grammar`.

Sources: deepspeed/runtime/{config,constants,precision_config,lr_schedules}.py,
runtime/zero/{config,offload_config}.py,
runtime/{activation_checkpointing,tensor_parallel,data_pipeline,model_checkpointing}/config.py,
runtime/swap_tensor, monitor/config.py, comm/config.py, profiling/config.py, compile/config.py, and
`_configure_basic_optimizer`.
"""

from __future__ import annotations

from trainer.config.grammar import Key, parse

KEYS: dict[str, Key] = parse("""
[]
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps : int 1..1e9 auto null
gradient_clipping : float >=0 auto = 1.0
gradient_allreduce_op : str mean
managed_gradient_accumulation : bool =true ! gradient_accumulation_steps says when to update. \
Remove it
prescale_gradients : bool @ they are averaged as they are added up
gradient_predivide_factor : float >0 =1 @ they are averaged as they are added up
zero_allow_untested_optimizer : bool @ the optimizers are PyTorch's own
zero_force_ds_cpu_optimizer : bool =true ; DeepSpeed asks it of optimizers made in code, and the \
JSON names this one
wall_clock_breakdown : bool @ metrics.jsonl has the time of each step
memory_breakdown : bool @ metrics.jsonl has the memory of each step
disable_python_gc : bool @ Python collects its garbage
communication_data_type : str fp32|fp16|bf16 auto null =fp32 @! gradients are added up in float32
log_level : str debug|info|warning|error|critical null @ it is for DeepSpeed's own log
sequence_parallel_size : int =1 ! It is not offered yet. Remove it; \
trainer.activation_checkpointing saves memory too
disable_allgather : bool ; DeepSpeed does not read it
seq_parallel_communication_data_type : str fp32|fp16|bf16 null ; there is no sequence parallelism
dump_state : bool ; config.json in the run's folder has every resolved value
steps_per_print : int >=0 auto null ; trainer.log.every says how often a line is printed
dataloader_drop_last : bool ; the global order of samples fills every batch
vocabulary_size : int >=1 null ; the tokenizer says it
use_data_before_expert_parallelism : bool ; there is no expert parallelism
datastates_ckpt : any ; checkpoints are written by this trainer
allgather_size : int >=0 ; use zero_optimization.allgather_bucket_size
fp32_allreduce : bool ; it was removed from DeepSpeed; use communication_data_type
comms_config : any ; DeepSpeed does not read it; use comms_logger
monitor_config : any ; DeepSpeed does not read it; use trainer.log.trackers
log : any ; DeepSpeed does not read it; use trainer.log
cuda_visible_devices : any ; DeepSpeed does not read it; set the variable CUDA_VISIBLE_DEVICES
amp : any ! Apex AMP was removed from DeepSpeed. Use "bf16" or "fp16"
elasticity : any ! Elastic training was removed from DeepSpeed. Set the batch sizes themselves
nebula : any ! Nebula checkpoints were removed from DeepSpeed. Remove it; checkpoints are written \
by this trainer
compression_training : any ! The compression library was removed from DeepSpeed. Remove it
quantize_training : any ! Mixture-of-Quantization was removed from DeepSpeed. Remove it
eigenvalue : any ! Mixture-of-Quantization was removed from DeepSpeed. Remove it
sparse_gradients : any ! Sparse embedding gradients were removed from DeepSpeed. Remove it
sparse_attention : any ! Sparse attention was removed from DeepSpeed. Use trainer.model.attention
graph_harvesting : any ! Graph harvesting was removed from DeepSpeed. Remove it
progressive_layer_drop : any ! Progressive layer drop was removed from DeepSpeed. Remove it
curriculum_learning : any ! The legacy curriculum was removed from DeepSpeed. Remove it
expert_parallel : any ! Expert parallelism is not offered here. Remove it

[optimizer]
type : str
params : section
legacy_fusion : bool ; it is for float16 without ZeRO, which runs as ZeRO-1 here

[scheduler]
type : str null
params : section

[fp16]
enabled : bool auto
fp16_master_weights_and_grads : bool auto @! the weights that are updated are in float32
auto_cast consecutive_hysteresis : bool auto @ float16 is run by DeepSpeed alone
loss_scale : float >=0 auto =0 @ float16 is run by DeepSpeed alone
initial_scale_power : int 0..126 auto @ float16 is run by DeepSpeed alone
hysteresis min_loss_scale loss_scale_window : int >=0 auto @ float16 is run by DeepSpeed alone

[bf16]
enabled : bool auto
immediate_grad_update : bool auto @ gradients are added up by FSDP2
bf16_master_weights_and_grads : bool auto @! the weights that are updated are in float32
bf16_optimizer_states : bool auto @! the optimizer's state is in float32
check_grad_overflow check_overflow : bool auto =true ; a step that is not finite is always skipped
auto_cast loss_scale initial_scale_power loss_scale_window : any ; bf16 needs no loss scale
hysteresis consecutive_hysteresis min_loss_scale : any ; bf16 needs no loss scale

[bfloat16]
enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads \
bf16_optimizer_states : bool auto

[torch_autocast] ! It picks a precision for each operator, which no engine here proves. Set \
bf16.enabled in its place
enabled : bool
dtype : str float16|bfloat16|fp16|bf16|half|torch.float16|torch.bfloat16
lower_precision_safe_modules : list null

[data_types]
grad_accum_dtype : dtype null =fp32,float32,float @! gradients are added up in float32
buffer_dtype : dtype null =fp32,float32,float @! buffers stay as the model has them
param_dtype : dtype null @ bf16.enabled says in which precision the model computes
keep_in_fp32_modules : list auto @ all buffers stay as the model has them
gradient_accumulation_dtype : str ; DeepSpeed does not read it; use grad_accum_dtype

[zero_optimization]
stage : int 0..3
reduce_bucket_size : int >=1 auto @ PyTorch's buckets are a block each
allgather_bucket_size sub_group_size : int >=0 auto @ PyTorch's buckets are a block each
contiguous_gradients reduce_scatter : bool auto =true @ FSDP2 always does so
allgather_partitions : bool auto =true ; DeepSpeed does not read it
use_multi_rank_bucket_allreduce : bool auto =true @ PyTorch's buckets are a block each
overlap_comm : bool auto null =true @ PyTorch always overlaps
compute_grad_norm : bool auto =true ; the norm is always taken, and logged
ignore_unused_parameters : bool auto =true @ a parameter without a gradient stays as it is
load_from_fp32_weights : bool auto =true ; checkpoints are this trainer's own
elastic_checkpoint pipeline_loading_checkpoint : bool auto ; checkpoints are this trainer's own
legacy_stage1 : bool ! It was removed from DeepSpeed. Remove it
round_robin_gradients : bool auto ; with it DeepSpeed takes one parameter's state for another's, \
also in checkpoints
parameter_alignment save_muon_momentum_buffer_in_memory : bool auto @ it is for DeepSpeed's own \
buffers
memory_efficient_linear override_module_apply : bool auto =true @ it is for DeepSpeed's own ZeRO-3
log_trace_cache_warnings enable_sanity_checks : bool auto @ it is for DeepSpeed's own ZeRO-3
stage3_prefetch_bucket_size stage3_param_persistence_threshold : int >=0 auto @ FSDP2 gathers a \
block ahead
stage3_max_live_parameters stage3_max_reuse_distance : int >=0 auto @ FSDP2 gathers a block ahead
stage3_model_persistence_threshold : int >=0 auto @ FSDP2 gathers a block ahead
stage3_module_granularity_threshold : int >=0 auto =0 @ FSDP2 gathers a block ahead
stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential : bool auto @ FSDP2 gathers a \
block ahead
stage3_gather_16bit_weights_on_model_save : bool auto ; the model's files are always whole: see \
trainer.checkpoint.dtype
stage3_gather_fp16_weights_on_model_save : bool auto ; the model's files are always whole: see \
trainer.checkpoint.dtype
gather_16bit_weights_on_model_save : bool auto ; the model's files are always whole: see \
trainer.checkpoint.dtype
prefetch_bucket_size param_persistence_threshold model_persistence_threshold : int >=0 auto
max_live_parameters max_reuse_distance module_granularity_threshold : int >=0 auto
use_all_reduce_for_fetch_params allgather_sequential : bool auto
zero_hpz_partition_size : int 0..1e6 auto =0,1 @ trainer.mesh.shard keeps the traffic within \
machines
zero_quantized_weights zero_quantized_nontrainable_weights : bool auto @! weights are sent as they \
are
zero_quantized_gradients : bool auto @! gradients are added up in float32
cpu_offload cpu_offload_param : bool null
cpu_offload_use_pin_memory : bool null =true ; DeepSpeed does not read it; use \
offload_optimizer.pin_memory
mics_shard_size : int -1..1e6 =-1,0
mics_hierarchical_params_gather : bool ! MiCS was removed from DeepSpeed. Remove it
zeropp_loco_param : any ! LoCo was removed from DeepSpeed. Remove it

[zero_optimization.offload_param] null
device : str none|cpu|nvme auto
nvme_path : str auto null @ FSDP2 offloads to the CPU
buffer_count buffer_size max_in_cpu : int >=0 auto @ FSDP2 offloads to the CPU
pin_memory : bool auto =true @ FSDP2 pins it on CUDA

[zero_optimization.offload_optimizer] null
device : str none|cpu|nvme auto
nvme_path : str auto null @ FSDP2 offloads to the CPU
buffer_count : int >=0 auto @ FSDP2 offloads to the CPU
pin_memory : bool auto =true @ FSDP2 pins it on CUDA
pipeline_read pipeline_write fast_init super_offload : bool auto @ FSDP2 offloads to the CPU
ratio : float 0..1 auto =1 @ FSDP2 offloads a rank's whole share
cpuadam_cores_perc : float 0..1 auto @ the optimizers are PyTorch's own

[zero_optimization.zenflow] null @! ZenFlow takes late gradients, and PyTorch has no such optimizer
topk_ratio : float 0..1 auto
select_strategy : str step|epoch auto
select_interval update_interval : int >=1 auto
overlap_step offload : bool auto
auto_ratio pt_reserved_cores_perc : float 0..1 auto
full_warm_up_rounds : int >=0 auto =0
steps_per_epoch : int null

[zero_optimization.leaf_module] @ FSDP2 gathers whole blocks
classes names name_suffixes : any

[aio] null @ nothing is read from NVMe
block_size queue_depth intra_op_parallelism : int >=1
single_submit use_gds : bool
overlap_events : bool =true
thread_count : int ; it was renamed: use intra_op_parallelism

[pipeline]
stages : int 1..1e6 auto
partition : str best|parameters|uniform
seed_layers use_reentrant : bool ; no engine here reads it
pipe_partitioned grad_partitioned : bool =true ; no engine here reads it
activation_checkpoint_interval : int >=0

[tensor_parallel]
autotp_size : int 0..1e6 auto
tp_overlap_comm : bool auto @ DTensor does not overlap
dtype : str ; bf16 and fp16 say the precision
keep_module_on_host replace_with_kernel_inject kernel_inject : bool auto ; it is for inference
vocab_parallel_lm_head : bool auto null =false ; the head is whole on every tensor rank
vocab_parallel_ce_backend : str torch|liger ; the head is whole on every tensor rank
tensor_parallel tp partition_config : section ; the model's own plan says what is split
injection_policy_tuple : list null ; the model's own plan says what is split
preset_model : str null ; the model's own plan says what is split

[activation_checkpointing]
partition_activations cpu_checkpointing contiguous_memory_optimization : bool ; only \
deepspeed.checkpointing reads it
profile synchronize_checkpoint_boundary : bool ; only deepspeed.checkpointing reads it
number_checkpoints : int >=0 null ; only deepspeed.checkpointing reads it

[flops_profiler] @ metrics.jsonl has the time and the MFU of each step
enabled : bool
detailed : bool =true
profile_step top_modules : int >=0
module_depth : int >=-1
recompute_fwd_factor : float >=0 =0
output_file : str null

[comms_logger] @ it logs DeepSpeed's own communication
enabled debug : bool auto
prof_all : bool auto =true
verbose : bool auto ; its summary is printed at the end
prof_ops : list

[timers]

[timers.throughput] @ metrics.jsonl has the tokens of each second
enabled synchronized : bool auto =true

[tensorboard] ; use trainer.log.trackers
enabled : bool auto
output_path job_name : str

[csv_monitor] ; metrics.jsonl is always written
enabled : bool auto
output_path job_name : str

[wandb] ; use trainer.log.trackers
enabled : bool auto
group team : str null
project : str

[comet] ; use trainer.log.trackers
enabled : bool auto
samples_log_interval : int
project workspace api_key experiment_name experiment_key mode : str null
online : bool null

[checkpoint] ; checkpoints are written by this trainer: see trainer.checkpoint
tag_validation : str Warn|Ignore|Fail
load_universal checkpoint_serialization : bool
use_node_local_storage : bool ; where machines share no folder, set trainer.run.node_local

[checkpoint.writer] null
type : str mock|python|fast
io_buffer_size io_multiplier : int >=1
io_buffer_double show_statistics decoupled : bool
data_parallel : str replica|socket|machine null

[checkpoint.parallel_write]
pipeline_stage : bool

[compile] ; the model is not compiled
disable deepcompile autoep_non_moe free_activation offload_activation \
offload_activation_pin_memory : bool
offload_opt_states double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce \
: bool
sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors \
keep_all_input_tensors : bool
free_activation_threshold : int
passes : list null
enabled : bool
backend kwargs : any

[hybrid_engine] ; nothing is generated between the steps
enabled release_inference_cache pin_parameters enable_cuda_graph : bool
max_out_tokens : int >=1
inference_tp_size tp_gather_partition_size : int

[data_efficiency] ; the order of the samples is a function of the seed alone
enabled : bool
seed : int

[data_efficiency.data_sampling]
enabled pin_memory : bool
num_epochs num_workers : int >=0

[data_efficiency.data_sampling.curriculum_learning] ! It is not offered here. Set its "enabled" to \
false
enabled : bool
data_cluster_path : str null
curriculum_metrics : section

[data_efficiency.data_sampling.dynamic_batching] ! It is not offered here. Set its "enabled" to \
false
enabled verbose : bool
metrics_path lr_scaling_method sequence_picking_order : str null
min_batch_size max_batch_size max_tokens : int null

[data_efficiency.data_routing]
enabled : bool

[data_efficiency.data_routing.random_ltd] ! It drops tokens, which is not offered here. Set its \
"enabled" to false
enabled : bool
total_layer_num random_ltd_layer_num micro_batch_size global_batch_size sample_idx : int null
random_ltd_layer_id : list
model_mask_name model_type hidden_state_order attention_mask : str null

[data_efficiency.data_routing.random_ltd.random_ltd_schedule]
min_value max_value current_value current_steps : int
schedule_type : str

[data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config]
require_steps seq_per_step : int

[data_efficiency.data_routing.random_ltd.layer_token_lr_schedule]
enabled : bool
total_layer_tokens warmup_layer_tokens : int
warmup_type : str

[autotuning] ; run DeepSpeed's autotuner on its own
enabled fast overwrite tuner_early_stopping zero_optimization : any
results_dir exps_dir metric_path metric tuner_type model_info_path arg_mappings : any
start_profile_step end_profile_step tuner_num_trials max_train_batch_size min_train_batch_size \
mp_size : any
max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes \
: any

[autotuning.model_info] null
profile : bool
num_params hidden_size num_layers : int null

[weight_quantization] ; it is for inference
enabled : bool
num_bits q_groups : int
q_type : str
quantized_initialization post_init_quant : section
""")

RECOMPUTES = "activation_checkpointing."
"""The section whose keys all have the same effect here: blocks are recomputed."""

LOW_PRECISION = ("communication_data_type", "data_types.grad_accum_dtype")
DIFFERS = {
    "optimizer": "Hugging Face's; DeepSpeed has none",
    **dict.fromkeys(
        LOW_PRECISION, "mesh and accelerate add up in float32, DeepSpeed in the model's precision"
    ),
}
"""Keys whose default differs from DeepSpeed's, with the reason; `--dry-run` shows it."""

ZERO = "zero_optimization."
OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
"""Keys of that section that DeepSpeed reads as `{"device": "cpu"}` of another."""
RENAMED = {
    "bfloat16": "bf16",
    **{
        old: name
        for name, key in KEYS.items()
        if "stage3_" in name and (old := name.replace("stage3_", "")) in KEYS and not key.idle
    },
}
"""Other names that DeepSpeed accepts for a key."""

_FREED = "set_grad_none : bool ; gradients are freed after each step\n"
_TORCH = """
maximize : bool
capturable : bool ! No step here is captured into a CUDA graph. Remove it
differentiable : bool ! Nothing here is differentiated through a step. Remove it
foreach : bool null
"""


def _usual(lr: float, eps: float | None = 1e-8, betas: bool = True) -> str:
    """Return the rows that most optimizers share."""
    rows = f"lr : float >=0 auto = {lr}\nweight_decay : float >=0 auto = 0\n"
    rows += f"eps : float >0 auto = {eps}\n" if eps else ""
    return rows + ("betas : list auto = [0.9, 0.999]\n" if betas else "")


_ADAM = (
    _usual(1e-3)
    + _FREED
    + """
bias_correction amsgrad adam_w_mode torch_adam fp32_optimizer_states : bool
foreach : bool null
"""
)
_SGD = (
    _TORCH
    + _usual(1e-3, eps=None, betas=False)
    + "momentum dampening : float >=0 = 0\nnesterov : bool\n"
)

OPTIMIZERS: dict[str, dict[str, Key]] = {
    name: parse(table)
    for name, table in {
        "AdamW": _ADAM,
        "Adam": _ADAM,
        "Lamb": _usual(1e-3)
        + (
            "max_coeff : float >=0 = 10\nmin_coeff : float >=0 = 0.01\nbias_correction "
            "eps_inside_sqrt : bool"
        ),
        "Lion": _usual(1e-3, eps=None) + _FREED + "fp32_optimizer_states : bool",
        "Adagrad": _TORCH
        + _usual(1e-2, eps=1e-10, betas=False)
        + "lr_decay initial_accumulator_value : float >=0 = 0\nfp32_optimizer_states : bool",
        "Muon": _ADAM
        + (
            "muon_lr adam_lr momentum : float >=0\nns_method : str\nns_steps : int >=1\nnesterov : "
            "bool"
        ),
        "MuAdam": _TORCH + _usual(1e-3) + "impl : str",
        "MuAdamW": _TORCH + _usual(1e-3) + "impl : str",
        "MuSGD": _SGD + "impl : str",
        "SGD": _SGD + "fused : bool null",
        "RMSprop": _TORCH
        + _usual(1e-2, betas=False)
        + "alpha : float >=0 = 0.99\nmomentum : float >=0 = 0\ncentered : bool",
        "Adamax": _TORCH + _usual(2e-3),
        "NAdam": _TORCH
        + _usual(2e-3)
        + "momentum_decay : float >=0 = 0.004\ndecoupled_weight_decay : bool",
        "RAdam": _TORCH + _usual(1e-3) + "decoupled_weight_decay : bool",
        "Adadelta": _TORCH + _usual(1.0, eps=1e-6, betas=False) + "rho : float 0..1 = 0.9",
    }.items()
}
"""The parameters of each optimizer with DeepSpeed's defaults: those of its own optimizers, and of
torch.optim's that it passes through."""

UNBUILT = ("Lamb", "Muon", "MuAdam", "MuAdamW", "MuSGD")
"""Optimizers of the table that each engine refuses, with its reason."""

GONE_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")
"""Optimizers that DeepSpeed removed, in lower case."""

_START = "last_batch_iteration : int >=-1 =-1 ! A run counts its own steps. Remove it"
_WARMUP = f"""
warmup_min_lr : float >=0 auto
warmup_max_lr : float >=0 auto null
warmup_num_steps : int >=0 auto
warmup_type : str log|linear
{_START}
"""
SCHEDULERS: dict[str, dict[str, Key]] = {
    name: parse(table)
    for name, table in {
        "WarmupLR": _WARMUP,
        "WarmupDecayLR": _WARMUP + "total_num_steps : int >=1 auto",
        "WarmupCosineLR": f"""
            total_num_steps : int >=1 auto
            warmup_num_steps : int >=0 auto
            warmup_min_ratio cos_min_ratio : float 0..1
            warmup_type : str log|linear
            {_START}""",
        "OneCycle": f"""
            cycle_min_lr cycle_max_lr decay_lr_rate decay_mom_rate : float >=0
            cycle_first_step_size : int >=1
            cycle_second_step_size cycle_second_stair_count : int >=0 null
            cycle_first_stair_count decay_step_size : int >=0
            cycle_momentum : bool
            cycle_min_mom cycle_max_mom : float 0..1
            {_START}""",
        "LRRangeTest": f"""
            lr_range_test_min_lr lr_range_test_step_rate : float >=0
            lr_range_test_step_size : int >=1
            lr_range_test_staircase : bool
            {_START}""",
        "linear": "warmup_num_steps : int >=0 auto\ntotal_num_steps : int >=1 auto",
        "cosine": (
            "warmup_num_steps : int >=0 auto\ntotal_num_steps : int >=1 auto\ncos_min_ratio "
            ": float 0..1"
        ),
        "constant_with_warmup": "warmup_num_steps : int >=0 auto",
    }.items()
}
"""The parameters of each of DeepSpeed's schedulers, and of three of transformers' by its names."""

NEEDED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    **dict.fromkeys(("linear", "cosine"), ("total_num_steps",)),
}
"""Parameters without a default."""
