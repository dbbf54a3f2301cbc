"""Closed forms of memory and time, which rank candidates before they are simulated.

There are thousands of candidates for a large model, and a simulation of each takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainer.layout import Layout
from trainer.models.names import expert_stacks
from trainer.tools.planner.cluster import Cluster, Traffic, time_of
from trainer.tools.planner.extrapolate import Plan
from trainer.tools.planner.routing import share_of_tokens

BLOCK_BYTES = 34
"""Bytes of a block's activations per hidden value, without attention (arXiv 2205.05198, eq. 1)."""
SHARED_BYTES = 10
"""The part of BLOCK_BYTES that tensor parallelism does not split (arXiv 2205.05198, eq. 2)."""
GATHERED = 5.0
"""Blocks that FSDP2 holds at once: two gathered, both as received, and gradients to reduce."""
SELECTIVE = 0.7
"""The share of a block's activations that selective recomputation keeps."""


@dataclass(frozen=True)
class ClosedForm:
    """Estimates for layouts of one model on a cluster, corrected by the plan of one of them."""

    cluster: Cluster
    parameters: int
    learned: int
    blocks: int
    hidden: int
    """The number of values in one sample's hidden state."""
    flops: float
    """FLOPs of a step: forward and backward of all samples."""
    gathered: float = GATHERED
    """Blocks whose weights ZeRO-3 holds at once, as sent or gathered."""
    routed: int = 0
    """The number of parameters in routed experts."""
    experts: int = 0
    """The routed experts of a block."""
    chosen: float = 0.0
    """The routed experts of a token in a block."""
    correction: float = 1.0
    """The ratio of simulated to estimated bytes, at least 1."""

    @classmethod
    def of(cls, plan: Plan) -> ClosedForm:
        """Return the estimates for a plan's model and cluster, corrected by that plan."""
        spec = plan.workload.spec
        layout = plan.workload.layout
        model = spec.build()
        layers = map(model.get_submodule, expert_stacks(model, spec.blocks))
        stacked = [p for layer in layers for p in layer.parameters()]
        routed = sum(p.numel() for p in stacked)
        experts = min(map(len, stacked), default=0)
        form = cls(
            cluster=plan.cluster,
            parameters=spec.parameters,
            learned=spec.parameters - sum(spec.training.frozen.values()),
            blocks=max(1, len(spec.blocks)),
            hidden=plan.workload.sample.hidden,
            flops=plan.step_flops,
            routed=routed,
            experts=experts,
            chosen=experts * (1 - spec.language.idle_parameters / max(1, routed)),
        )
        if layout.zero_stage == 3:
            form = replace(form, gathered=plan.on_device(("communication",)) / form._block(layout))
        return replace(form, correction=max(1.0, plan.needed / form.bytes(layout)))

    def bytes(self, layout: Layout) -> float:
        """Estimate the bytes on the fullest device."""
        gathered = self.gathered * self._block(layout) if layout.zero_stage == 3 else 0.0
        parts = self._state(layout) + gathered + self._activations(layout)
        return self.correction * max(1.0, parts)

    def _block(self, layout: Layout) -> float:
        """Return the bytes of a block's weights on a tensor rank."""
        alike = self.parameters - self.routed
        per_rank = alike / layout.tensor + self.routed / _parts_of_experts(layout)
        return _value(layout) * per_rank / self.blocks

    def _ring(self, layout: Layout, ranks: int) -> float:
        """Return the bytes that a rank sends for a block gathered from `ranks` shards.

        Ranks that divide the experts gather them only from those who have the same ones.
        """
        alike = (self.parameters - self.routed) / layout.tensor * (ranks - 1) / ranks
        parts = _parts_of_experts(layout)
        same = max(1.0, ranks * layout.tensor / parts)
        routed = self.routed / parts * (same - 1) / same
        return _value(layout) * (alike + routed) / self.blocks

    def _state(self, layout: Layout) -> float:
        """Sum the bytes of weights, gradients and optimizer (ZeRO, arXiv 1910.02054, section 3)."""
        state = 12 if layout.updated == "float32" else 6
        weights, optimizer = (4, 8) if layout.precision == "float32" else (2, state)
        learned = self.learned / self.parameters
        sizes = {3: weights, 2: weights * learned, 1: optimizer * learned}
        # gradients are made on the device, wherever they are kept
        if layout.offloads:
            sizes[1] = 0
        if layout.offload_param != "none":
            sizes[3] = 0
        shares = {stage: layout.shard if layout.zero_stage >= stage else 1 for stage in sizes}
        each = sum(size / shares[stage] for stage, size in sizes.items())
        if layout.regathered:  # the second copy, which the backward pass reads
            each += _value(layout) / layout.regathered
        return each * self.parameters / _model_ranks(layout)

    def _activations(self, layout: Layout) -> float:
        values = self.hidden / layout.context * layout.micro_batch * _value(layout) / 2
        block = values * (SHARED_BYTES + (BLOCK_BYTES - SHARED_BYTES) / layout.tensor)
        blocks = self.blocks / layout.pipeline * min(layout.pipeline, layout.accumulation)
        mode = layout.recompute.mode
        every = layout.recompute.every
        if mode in ("none", "selective"):
            return block * blocks * (SELECTIVE if mode == "selective" else 1)
        return block + blocks * ((mode != "offload") * 2 * values + (1 - 1 / every) * block)

    def seconds(self, layout: Layout) -> float:
        """Estimate the seconds of a step, midway between all messages hidden and none."""
        traffic = self._traffic(layout, True), self._traffic(layout, False)
        host = _host_bytes(layout) * self.learned / _model_ranks(layout) / layout.shard
        return time_of(layout, self.cluster.device, self.flops, traffic, 0.0, host).middle

    def _destinations(self, ranks: int) -> float:
        """Return how many other ranks a token is sent to in a block: once to each."""
        if ranks == 1:
            return 0.0
        return (ranks - 1) * float(share_of_tokens(self.experts, round(self.chosen), ranks))

    def _traffic(self, layout: Layout, inside: bool) -> Traffic:
        sent = [one for one in self._sent(layout) if (one[0] <= self.cluster.devices) is inside]
        return Traffic(sum(count for _, count, _ in sent), sum(size for *_, size in sent))

    def _sent(self, layout: Layout) -> Iterator[tuple[int, float, float]]:
        """Yield (ranks spanned, messages, bytes) sent by one rank in rings, for each axis."""
        shard = layout.shard
        replicate = layout.replicate
        tensor = layout.tensor
        blocks = self.blocks / layout.pipeline
        rounds = layout.accumulation
        weights = _value(layout) * self.parameters / _model_ranks(layout)
        hidden = _value(layout) * self.hidden / layout.context * layout.micro_batch * rounds
        if shard > 1:
            gathers = 2 * rounds if layout.zero_stage == 3 else 1
            gathers -= rounds if layout.regathered else 0
            rings = gathers + (rounds if layout.zero_stage >= 2 else 1)
            yield shard * tensor, rings * blocks, rings * blocks * self._ring(layout, shard)
            if few := layout.regathered:
                yield few * tensor, rounds * blocks, rounds * blocks * self._ring(layout, few)
        if others := self._destinations(
            layout.expert
        ):  # to the experts and back, forward and backward
            yield layout.expert, 8 * blocks * rounds, 4 * blocks * hidden * others
        if replicate > 1:
            size = 2 * weights / shard * (replicate - 1) / replicate
            yield shard * tensor * replicate, blocks, size
        if tensor > 1:
            times = 4 * blocks
            yield tensor, times * rounds, times * hidden * 2 * (tensor - 1) / tensor
        if layout.context > 1:  # queries, keys and values together, and output, in both passes
            size = 8 * blocks * hidden / tensor * (layout.context - 1) / layout.context
            yield tensor * layout.context, 4 * blocks * rounds, size
        if layout.pipeline > 1:
            yield layout.world_size, 2 * rounds, 2 * hidden


def _value(layout: Layout) -> int:
    """Return the bytes of a weight in forward and backward passes."""
    return 4 if layout.precision == "float32" else 2


def _host_bytes(layout: Layout) -> int:
    """Return the bytes of a parameter's training state that cross to the host in a step."""
    if layout.offload_param != "none":
        return 16
    return 12 if layout.offloads else 0


def _parts_of_experts(layout: Layout) -> int:
    """Return the number of ranks over which a block's routed experts are divided."""
    return layout.expert if layout.expert > 1 else layout.tensor


def _model_ranks(layout: Layout) -> int:
    return layout.pipeline * layout.tensor
