"""A layout by its sizes."""

from __future__ import annotations

from trainer.layout import Layout, Recompute


def layout(
    pipeline: int, replicate: int, shard: int, tensor: int, micro: int, accumulation: int
) -> Layout:
    return Layout(
        pipeline=pipeline,
        replicate=replicate,
        shard=shard,
        tensor=tensor,
        micro_batch=micro,
        accumulation=accumulation,
        zero_stage=1,
        offload_optimizer="none",
        offload_param="none",
        precision="float32",
        recompute=Recompute(),
    )
