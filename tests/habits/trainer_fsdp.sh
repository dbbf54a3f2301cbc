#!/bin/bash
# fine-tune with --flags
export WANDB_MODE=offline
LR=2e-5
deepspeed --num_gpus 8 run_clm.py \
  --model_name_or_path gpt2 --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 \
  --do_train --do_eval --learning_rate $LR --per_device_train_batch_size=4 \
  --fsdp "full_shard auto_wrap" --fsdp_config '{"transformer_layer_cls_to_wrap": ["GPT2Block"]}' \
  --max_steps 1000 --warmup_ratio 0.03 --lr_scheduler_type cosine --report_to wandb tensorboard --bf16 True \
  --save_strategy steps --save_steps 0.1 --evaluation_strategy no --output-dir out/gpt2 && echo done
