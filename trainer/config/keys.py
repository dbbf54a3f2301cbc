"""DeepSpeed's JSON keys, as of DeepSpeed 0.19.8, in the notation of `grammar`.

Sources: deepspeed/runtime/{config,constants,precision_config,lr_schedules}.py, runtime/zero/{config,offload_config}.py,
runtime/{activation_checkpointing,tensor_parallel,data_pipeline,model_checkpointing}/config.py, runtime/swap_tensor,
monitor/config.py, comm/config.py, profiling/config.py, compile/config.py, and `_configure_basic_optimizer`.
"""

from __future__ import annotations

from trainer.config.grammar import Key, parse

KEYS: dict[str, Key] = parse("""
[]
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps : int >=1 auto null
gradient_clipping : float >=0 auto
gradient_allreduce_op : str mean
managed_gradient_accumulation : bool
prescale_gradients zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather : bool
wall_clock_breakdown memory_breakdown dump_state disable_python_gc : bool
gradient_predivide_factor : float >0
communication_data_type : str fp32|fp16|bf16 auto null
seq_parallel_communication_data_type : str fp32|fp16|bf16 null
log_level : str debug|info|warning|error|critical null
sequence_parallel_size : int 1..1
steps_per_print : int >=0 auto null ; trainer.log.every says how often a line is printed
dataloader_drop_last : bool ; the global order of samples fills every batch
vocabulary_size : int >=1 null ; the tokenizer says it
use_data_before_expert_parallelism : bool ; there is no expert parallelism
datastates_ckpt : any ; checkpoints are written by this trainer
allgather_size : int >=0 ; use zero_optimization.allgather_bucket_size
fp32_allreduce : bool ; it was removed from DeepSpeed; use communication_data_type
amp : any ! Apex AMP was removed from DeepSpeed. Use "bf16" or "fp16"
elasticity : any ! Elastic training was removed from DeepSpeed. Set the batch sizes themselves
nebula : any ! Nebula checkpoints were removed from DeepSpeed. Remove it; checkpoints are written by this trainer
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
legacy_fusion : bool

[scheduler]
type : str null
params : section

[fp16]
enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads : bool auto
loss_scale : float >=0 auto
initial_scale_power hysteresis min_loss_scale loss_scale_window : int >=0 auto

[bf16]
enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states : bool auto
check_overflow : bool ; it was renamed: use check_grad_overflow
auto_cast loss_scale initial_scale_power loss_scale_window : any ; bf16 needs no loss scale
hysteresis consecutive_hysteresis min_loss_scale : any ; bf16 needs no loss scale

[bfloat16]
enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states : bool auto

[torch_autocast]
enabled : bool
dtype : str float16|bfloat16|fp16|bf16|half|torch.float16|torch.bfloat16
lower_precision_safe_modules : list null

[data_types]
grad_accum_dtype param_dtype buffer_dtype : str fp32|fp16|bf16 null
keep_in_fp32_modules : list auto
gradient_accumulation_dtype : str ; DeepSpeed does not read it; use grad_accum_dtype

[zero_optimization]
stage : int 0..3
reduce_bucket_size : int >=1 auto
allgather_bucket_size sub_group_size : int >=0 auto
contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions : bool auto
overlap_comm : bool auto null
compute_grad_norm load_from_fp32_weights elastic_checkpoint ignore_unused_parameters : bool auto
legacy_stage1 : bool ! It was removed from DeepSpeed. Remove it
round_robin_gradients : bool auto ; with it DeepSpeed takes one parameter's state for another's, also in checkpoints
parameter_alignment memory_efficient_linear pipeline_loading_checkpoint : bool auto
override_module_apply log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory : bool auto
stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold : int >=0 auto
stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold : int >=0 auto
stage3_gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params : bool auto
stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save : bool auto
prefetch_bucket_size param_persistence_threshold model_persistence_threshold : int >=0 auto
max_live_parameters max_reuse_distance module_granularity_threshold : int >=0 auto
gather_16bit_weights_on_model_save use_all_reduce_for_fetch_params allgather_sequential : bool auto
zero_hpz_partition_size : int >=0 auto
zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients : bool auto
cpu_offload cpu_offload_param : bool null
cpu_offload_use_pin_memory : bool null ; DeepSpeed does not read it; use offload_optimizer.pin_memory
mics_shard_size : int >=-1
mics_hierarchical_params_gather : bool ! MiCS was removed from DeepSpeed. Remove it
zeropp_loco_param : any ! LoCo was removed from DeepSpeed. Remove it

[zero_optimization.offload_param] null
device : str none|cpu|nvme auto
nvme_path : str auto null
buffer_count buffer_size max_in_cpu : int >=0 auto
pin_memory : bool auto

[zero_optimization.offload_optimizer] null
device : str none|cpu|nvme auto
nvme_path : str auto null
buffer_count : int >=0 auto
pin_memory pipeline_read pipeline_write fast_init super_offload : bool auto
ratio cpuadam_cores_perc : float 0..1 auto

[zero_optimization.zenflow] null
topk_ratio : float 0..1 auto
select_strategy : str step|epoch auto
select_interval update_interval : int >=1 auto
overlap_step offload : bool auto
auto_ratio pt_reserved_cores_perc : float 0..1 auto
full_warm_up_rounds : int >=0 auto
steps_per_epoch : int null

[zero_optimization.leaf_module]
classes names name_suffixes : any

[aio]
block_size queue_depth intra_op_parallelism : int >=1
single_submit overlap_events use_gds : bool
thread_count : int ; it was renamed: use intra_op_parallelism

[pipeline]
stages : int >=1 auto
partition : str best|parameters|uniform
seed_layers pipe_partitioned grad_partitioned use_reentrant : bool ; no engine here reads it
activation_checkpoint_interval : int >=0

[tensor_parallel]
autotp_size : int >=0 auto
dtype : str
tp_overlap_comm keep_module_on_host replace_with_kernel_inject kernel_inject : bool auto
vocab_parallel_lm_head : bool auto null ; the head is whole on every tensor rank
vocab_parallel_ce_backend : str torch|liger ; the head is whole on every tensor rank
tensor_parallel tp partition_config : section ; the model's own plan says what is split
injection_policy_tuple : list null ; the model's own plan says what is split
preset_model : str null ; the model's own plan says what is split

[activation_checkpointing]
partition_activations cpu_checkpointing contiguous_memory_optimization : bool ; only deepspeed.checkpointing reads it
profile synchronize_checkpoint_boundary : bool ; only deepspeed.checkpointing reads it
number_checkpoints : int >=0 null ; only deepspeed.checkpointing reads it

[flops_profiler]
enabled detailed : bool
profile_step top_modules : int >=0
module_depth : int >=-1
recompute_fwd_factor : float >=0
output_file : str null

[comms_logger]
enabled prof_all verbose debug : bool auto
prof_ops : list

[timers]

[timers.throughput]
enabled synchronized : bool auto

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
load_universal use_node_local_storage checkpoint_serialization : bool
writer : any

[checkpoint.parallel_write]
pipeline_stage : bool

[compile] ; the model is not compiled
disable deepcompile autoep_non_moe free_activation offload_activation offload_activation_pin_memory : bool
offload_opt_states double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce : bool
sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors : bool
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
data_sampling data_routing : section

[autotuning] ; run DeepSpeed's autotuner on its own
enabled fast overwrite tuner_early_stopping zero_optimization : any
results_dir exps_dir metric_path metric tuner_type model_info_path arg_mappings model_info : any
start_profile_step end_profile_step tuner_num_trials max_train_batch_size min_train_batch_size mp_size : any
max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes : any

[weight_quantization] ; it is for inference
enabled : bool
num_bits q_groups : int
q_type : str
quantized_initialization post_init_quant : section
""")

_ZERO = "zero_optimization."
RENAMED = {
    "bfloat16": "bf16",
    _ZERO + "stage3_gather_fp16_weights_on_model_save": _ZERO + "stage3_gather_16bit_weights_on_model_save",
    **{name.replace("stage3_", ""): name for name in KEYS if "stage3_" in name and name.replace("stage3_", "") in KEYS},
}
"""Other names that DeepSpeed reads for a key."""

_ADAM = """
lr : float >=0 auto
betas : list auto
eps : float >0 auto
weight_decay : float >=0 auto
bias_correction amsgrad adam_w_mode torch_adam fp32_optimizer_states set_grad_none : bool
foreach : bool null
"""
_TORCH = """
lr : float >=0 auto
weight_decay : float >=0 auto
maximize differentiable capturable : bool
foreach : bool null
"""
_EPS = "eps : float >0 auto\n"
_BETAS = "betas : list auto\n"
_MUP = _TORCH + "impl : str\n"

OPTIMIZERS: dict[str, dict[str, Key]] = {
    name: parse(table)
    for name, table in {
        "AdamW": _ADAM,
        "Adam": _ADAM,
        "Lamb": "lr weight_decay max_coeff min_coeff : float >=0 auto\nbias_correction eps_inside_sqrt : bool\n"
        + _BETAS
        + _EPS,
        "Lion": "lr weight_decay : float >=0 auto\nset_grad_none fp32_optimizer_states : bool\n" + _BETAS,
        "Adagrad": _TORCH + _EPS + "lr_decay initial_accumulator_value : float >=0\nfp32_optimizer_states : bool",
        "Muon": _ADAM + "muon_lr adam_lr momentum : float >=0\nns_method : str\nns_steps : int >=1\nnesterov : bool",
        "MuAdam": _MUP + _BETAS + _EPS,
        "MuAdamW": _MUP + _BETAS + _EPS,
        "MuSGD": _MUP + "momentum dampening : float >=0\nnesterov : bool",
        "SGD": _TORCH + "momentum dampening : float >=0\nnesterov : bool\nfused : bool null",
        "RMSprop": _TORCH + _EPS + "alpha momentum : float >=0\ncentered : bool",
        "Adamax": _TORCH + _BETAS + _EPS,
        "NAdam": _TORCH + _BETAS + _EPS + "momentum_decay : float >=0\ndecoupled_weight_decay : bool",
        "RAdam": _TORCH + _BETAS + _EPS + "decoupled_weight_decay : bool",
        "Adadelta": _TORCH + _EPS + "rho : float 0..1",
    }.items()
}
"""The parameters of each optimizer: DeepSpeed's own, then those of torch.optim that it passes through."""

GONE_OPTIMIZERS = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
"""Optimizers that DeepSpeed removed."""

_WARMUP = """
warmup_min_lr : float >=0 auto
warmup_max_lr : float >=0 auto null
warmup_num_steps : int >=0 auto
warmup_type : str log|linear
last_batch_iteration : int >=-1
"""
SCHEDULERS: dict[str, dict[str, Key]] = {
    name: parse(table)
    for name, table in {
        "WarmupLR": _WARMUP,
        "WarmupDecayLR": _WARMUP + "total_num_steps : int >=1 auto",
        "WarmupCosineLR": """
            total_num_steps : int >=1 auto
            warmup_num_steps : int >=0 auto
            warmup_min_ratio cos_min_ratio : float 0..1
            warmup_type : str log|linear
            last_batch_iteration : int >=-1""",
        "OneCycle": """
            cycle_min_lr cycle_max_lr decay_lr_rate decay_mom_rate : float >=0
            cycle_first_step_size : int >=1
            cycle_second_step_size cycle_second_stair_count : int >=0 null
            cycle_first_stair_count decay_step_size : int >=0
            cycle_momentum : bool
            cycle_min_mom cycle_max_mom : float 0..1
            last_batch_iteration : int >=-1""",
        "LRRangeTest": """
            lr_range_test_min_lr lr_range_test_step_rate : float >=0
            lr_range_test_step_size : int >=1
            lr_range_test_staircase : bool
            last_batch_iteration : int >=-1""",
    }.items()
}
"""The parameters of each of DeepSpeed's schedulers."""

NEEDED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
"""Parameters without a default."""
