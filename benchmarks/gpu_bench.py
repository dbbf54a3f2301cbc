"""A process of gpu.py: it runs one arm on one GPU, and tells what it measured as it goes."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_arms import ARMS, CEILINGS, PEFT, PROFILED, RATE, SAVING
from trainer.supervise.world import world_of

BLOCK = 2**26
"""Bytes of one write, of a raw write."""
ENOUGH = 0.98
"""The share of the planner's memory of a GPU that such a GPU may have: its table is to about 1 %."""


def work(arm: str, folder: str, cuda: bool) -> int:
    """Run an arm by the config in a folder, as one of the processes that the environment names."""
    import torch
    import torch.distributed as dist

    from trainer.supervise.process import grow_segments, place_for_operators

    world = world_of(os.environ)
    assert world is not None
    device = torch.device("cuda", world.local_rank) if cuda else torch.device("cpu")
    if cuda:
        if ARMS[arm].memory:  # which is to be filled as far as a run fills it
            grow_segments()
        torch.cuda.set_device(device)
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
        torch.set_num_threads(1)
    place_for_operators()
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    Bench(world, device, Path(folder)).run(arm)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


class Bench:
    """One rank of one arm: its config, its clock, and its result."""

    def __init__(self, world: Any, device: Any, folder: Path) -> None:
        self.rank: int = world.rank
        self.world_size: int = world.world_size
        self.local: int = world.local_world_size
        self.device = device
        self.cuda: bool = device.type == "cuda"
        self.folder = folder
        self.warm_up, self.steps = (3, 10) if self.cuda else (1, 2)
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.micro_batch: int = self.config["train_micro_batch_size_per_gpu"]
        own = self.config["trainer"]
        self.sequence: int = own["data"]["sequence_length"]
        self.model: dict[str, Any] = own["model"].get("config") or json.loads(
            (Path(own["model"]["name_or_path"]) / "config.json").read_text()
        )
        self.flops: list[float] = []
        """FLOPs a token, by both rules."""
        self.result: dict[str, Any] = {}

    def tell(self, **values: Any) -> None:
        """Add to the result, which the parent process gets even if this arm is stopped."""
        self.result.update(values)
        if self.rank == 0:
            text = json.dumps(self.result)
            (self.folder / "result.new").write_text(text)
            (self.folder / "result.new").replace(self.folder / "result.json")

    def batch(self, step: int) -> dict[str, Any]:
        """Return a rank's micro-batch of random tokens for a step."""
        import torch

        made = torch.Generator().manual_seed(step * self.world_size + self.rank)
        size = (self.micro_batch, self.sequence + 1)
        ids = torch.randint(0, self.model["vocab_size"], size, generator=made)
        parts = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}
        return {name: part.contiguous().to(self.device) for name, part in parts.items()}

    def run(self, arm: str) -> None:
        """Run an arm by its name."""
        if arm == CEILINGS:
            return self.measure_ceilings()
        if self.is_too_small(ARMS[arm].memory):
            return self.tell(note="left out: this GPU has less memory")
        self.count_flops()
        if arm in ("Trainer", PEFT) or arm.startswith("bare"):
            from benchmarks import gpu_peers

            if arm == "Trainer":
                return self.tell_step(*gpu_peers.trainer(self))
            if arm == PEFT:
                return self.tell_step(*gpu_peers.trainer_with_peft(self))
            return self.tell_step(*self.timed(gpu_peers.bare(self, "compiled" in arm)))
        engine, step, kernels = self.engine()
        self.tell(kernels=kernels)
        if ARMS[arm].memory:
            from benchmarks.gpu_longest import lengthen

            return lengthen(self, step)
        if arm == SAVING:
            step(0)
            return self.save(engine, step)
        self.tell_step(*self.timed(step))
        if arm == PROFILED:
            from benchmarks.gpu_profile import profiled

            self.tell(profile=profiled(self, step))

    def measure_ceilings(self) -> None:
        """Measure the ceilings of the config's model."""
        from benchmarks.gpu_ceilings import Sizes, measure
        from trainer.models.huggingface import spec_of

        parameters = spec_of(*self.described(), weights=False).parameters
        self.tell(device=self.device_name())
        measure(self, Sizes.of(self.model, parameters))

    def is_too_small(self, memory: str) -> bool:
        """Limit torch to the memory of a GPU of the planner's table, if this one has it."""
        import torch

        from trainer.tools.planner.cluster import RESERVED, device_of

        if not memory or not self.cuda:
            return False
        whole = torch.cuda.get_device_properties(self.device).total_memory
        least = device_of(memory).memory
        if whole < ENOUGH * least:
            return True
        torch.cuda.set_per_process_memory_fraction((least - RESERVED) / whole, self.device)
        return False

    def count_flops(self) -> None:
        """Count a token's FLOPs by both rules; frozen weights have no gradients."""
        from trainer.config import load
        from trainer.models.finetuning.lora import adapted
        from trainer.models.flops import flops_per_token
        from trainer.models.huggingface import spec_of

        config, options = self.described()
        adapter = load(self.folder / "config.json", []).trainer.adapter
        spec = adapted(spec_of(config, options, weights=False), adapter)
        self.flops = [flops_per_token(spec, self.sequence, causal) for causal in (True, False)]

    def device_name(self) -> str:
        """Return the name of this rank's device."""
        import torch

        return torch.cuda.get_device_name(self.device) if self.cuda else "CPU"

    def tell_step(self, seconds: float, interval: float) -> None:
        """Tell a step's time, waited for and in an interval, and what follows from the first."""
        import torch
        import torch.distributed as dist

        from trainer.engines.devices import peak_of

        most = torch.cuda.max_memory_allocated() if self.cuda else 0
        peak = torch.tensor(float(most), device=self.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        tokens = self.micro_batch * self.sequence / seconds
        top = peak_of(self.device)
        self.tell(
            seconds=seconds,
            interval=interval,
            tokens=tokens * self.world_size,
            mfu=[tokens * flops / top for flops in self.flops] if top else [],
            memory=float(peak) / 2**30,
            device=self.device_name(),
        )

    def timed(self, step: Callable[[int], object]) -> tuple[float, float]:
        """Return the median time of a step with the device waited for, and the time of a step of
        as many in one interval.
        """
        times = [self.once(partial(step, index)) for index in range(self.warm_up + self.steps)]

        def interval() -> None:
            for index in range(self.steps):
                step(index)

        return statistics.median(times[self.warm_up :]), self.once(interval) / self.steps

    def once(self, work: Callable[[], object]) -> float:
        """Return the seconds of a call, with the device waited for before and after."""
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        """Wait for the device."""
        import torch

        if self.cuda:
            torch.cuda.synchronize()

    def described(self) -> tuple[Any, Any]:
        """The model's config for transformers, and the section of the JSON that it is from."""
        from trainer.config import load
        from trainer.models.language import model_config

        section = load(self.folder / "config.json", []).trainer
        return model_config.read_config(section.model), section.model

    def engine(self) -> tuple[Any, Callable[[int], object], list[str]]:
        """The engine that the JSON names, its step, and its notes: of compilation and kernels."""
        import torch

        from trainer.config import RuntimeFacts, load
        from trainer.distributed.ranks import Ranks
        from trainer.engines import Job, Machine
        from trainer.models import huggingface
        from trainer.models.finetuning.lora import adapted
        from trainer.models.spec import NoWeights
        from trainer.optim.lr_schedules import Update
        from trainer.recipes.causal_lm.task import CausalLM
        from trainer.run.compose import compose
        from trainer.tasks.kernel_probes import notes

        config, options = self.described()
        loaded = load(self.folder / "config.json", [])
        adapter = loaded.trainer.adapter
        spec = adapted(huggingface.spec_of(config, options, weights=adapter is None), adapter)
        if adapter is not None:
            spec = spec.with_weights(NoWeights())
        task = CausalLM.of(spec)
        facts = RuntimeFacts(self.world_size, None, None, True, self.device.type, self.local)
        composed = compose(loaded, facts)
        composed = composed.knowing(hidden_size=spec.language.hidden_size, total_steps=10)
        _, kind = composed.engine()
        machine = Machine(self.device, Ranks(self.rank, self.world_size), self.local)
        job = Job(composed.layout, spec, task, composed.config.deepspeed, 0, machine)
        engine = kind.build(job)
        for model in engine.modules:
            self.draw_bits(model)
        attention = (task.attention(), spec, False, torch.bfloat16, self.device)
        kernels = [*engine.notes, *(notes(*attention) if self.cuda else ())]
        return engine, lambda i: engine.step(i, [self.batch(i)], Update(RATE)), kernels

    def draw_bits(self, model: Any) -> None:
        """Give quantised layers random weights: without a base to read they have zeros."""
        import torch

        from trainer.models.finetuning.quantised.quantised_base import quantised_weights

        weights = quantised_weights(model).values()
        seconds = 0.0
        for weight in weights:
            value = torch.randn(weight.form.shape, device=self.device) * 0.02
            seconds += self.once(partial(_quantise, weight, value))
        if weights:
            self.tell(quantised=seconds)

    def write_raw(self, size: int, block: bytes, ranks: Any) -> None:
        """Write as many bytes as a save has, a part by each rank, to the same folder and disk.

        They are those of the block, again and again, and flushed by `fsync`, as a save is.
        """
        path = self.folder / f"raw-{self.rank}"
        left = size // self.world_size
        with open(path, "wb", buffering=0) as file:
            while left > 0:
                left -= file.write(block[:left])
            os.fsync(file.fileno())
        ranks.barrier()
        path.unlink()

    def save(self, engine: Any, step: Callable[[int], object]) -> None:
        """Time a save, a load, the stall of two saves in the background, and a step beside one."""
        import torch

        from trainer import checkpoint
        from trainer.state import RunState

        ranks = engine.job.machine.ranks
        before = torch.cuda.memory_allocated() if self.cuda else 0
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

        def write(name: str, entries: Any, by: Any) -> Any:
            at = self.folder / name
            state = RunState(step=1, samples=1, engine=engine.scalars())
            return checkpoint.save(at, state, entries, {}, checkpoint.ModelFolder(), by)

        path: list[Any] = []
        entries = engine.state_tensors
        self.tell(save=self.once(lambda: path.append(write("one", entries(), ranks))))
        most = torch.cuda.max_memory_allocated() if self.cuda else 0
        self.tell(save_memory=(most - before) / 2**30)
        self.tell(load=self.once(lambda: checkpoint.load(path[0], entries(), ranks)))
        size = sum(one.stat().st_size for one in (self.folder / "one").rglob("*") if one.is_file())
        ranks.barrier()  # all have read
        ranks.on_first(lambda: shutil.rmtree(self.folder / "one"))
        block = os.urandom(BLOCK)
        self.tell(raw=self.once(partial(self.write_raw, size, block, ranks)), written=size)
        alone = [self.once(partial(step, index)) for index in (1, 2, 3)][-1]
        background = checkpoint.Background(ranks.on_host())
        for name in ("first stall", "stall"):
            background.wait()
            ranks.barrier()
            ranks.on_first(lambda: shutil.rmtree(self.folder / "two", ignore_errors=True))
            own = partial(write, "two")
            self.tell(**{name: self.once(partial(background.save, entries(), own))})
            beside = self.once(partial(step, 4))
            self.tell(beside=beside / alone)
        background.wait()


def _quantise(weight: Any, value: Any) -> None:
    """Give a quantised weight its values, of which a rank may have a part."""
    from trainer.distributed.dtensor import local, own_shard

    data = weight.form.stored(value)
    part = own_shard(data, weight.data) if hasattr(weight.data, "device_mesh") else data
    local(weight.data.data).copy_(part)
