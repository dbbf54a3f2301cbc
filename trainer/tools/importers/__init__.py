"""Other trainers' configs and DeepSpeed's checkpoints, converted to those of this one."""
