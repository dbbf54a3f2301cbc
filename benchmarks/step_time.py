"""What a step costs beside bare loops and Hugging Face's Trainer, on CPU, interleaved step by step
in one run.

    python benchmarks/step_time.py [--model small|26m] [--steps 60] [--peer trainer|accelerate] [--smoke]
    torchrun --nproc-per-node 2 benchmarks/step_time.py ...

Arms, all with the same model, values, samples, batch size, clipping, schedule and fused AdamW:
  ours, ours again   trainer.run.loop.train with the DeepSpeed engine, the loader, metrics.jsonl every 10 steps
  bare DeepSpeed     forward, backward, step with the same JSON and the same loss module
  bare PyTorch       the same without DeepSpeed (DDP on two ranks)
  bare Accelerate    the same through Accelerator.prepare / backward / clip_grad_norm_
  Trainer            transformers.Trainer with the same JSON; its own loss
Each arm lives in a thread that runs one step when it is its turn; turns are in a random order that all ranks share.
Reported: the median of paired ratios and differences within a round. The run is void when the two arms of ours
differ by over 3 %, or when other processes took over 5 % of the machine.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import psutil
import torch
import torch.distributed as dist

from trainer.data.loader import Batching, BatchLoader, StepBatches
from trainer.data.order import SampleOrder
from trainer.distributed.ranks import Ranks
from trainer.engines import ENGINES, Job, Machine, Metrics
from trainer.layout import Layout, Recompute
from trainer.models import huggingface
from trainer.models.language import model_config
from trainer.models.materialise import materialise
from trainer.optim.lr_schedules import Update, schedule_of
from trainer.recipes.causal_lm.task import CausalLM
from trainer.run.loop import Hooks, LoopPlan, train
from trainer.run.observers.metrics import Meter
from trainer.state import RunState
from trainer.supervise.output import Output
from trainer.supervise.world import environment_of, free_port, world_of
from trainer.tasks.task import ModelWithLoss
from trainer.trackers import JsonLines

MODELS = {
    "small": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 512,
        "sequence": 32,
    },
    "26m": {
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 7,
        "vocab_size": 4096,
        "sequence": 64,
    },
}
BATCH, CLIP, RATE = 2, 1.0, 1e-3
WARM_UP = 5


class Turns:
    """Runs arms one step at a time; `turn` is called by an arm after each of its steps."""

    def __init__(self) -> None:
        self.go: dict[str, threading.Event] = {}
        self.done = threading.Event()
        self.failed: BaseException | None = None

    def start(self, name: str, body: Callable[[Callable[[], None]], None]) -> None:
        self.go[name] = threading.Event()

        def turn() -> None:
            self.done.set()
            self.go[name].wait()
            self.go[name].clear()

        def run() -> None:
            try:
                body(turn)
            except BaseException as error:
                self.failed = error
                self.done.set()

        threading.Thread(target=run, daemon=True, name=name).start()
        self._wait()  # until it is ready for its first step

    def step(self, name: str) -> float:
        """Seconds of one step of an arm."""
        started = time.perf_counter()
        self.go[name].set()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        self.done.wait()
        self.done.clear()
        if self.failed is not None:
            raise self.failed


class Samples:
    """Random tokens; what `BatchLoader` and `Trainer` index."""

    def __init__(self, vocabulary: int, sequence: int) -> None:
        self._ids = np.random.default_rng(0).integers(0, vocabulary, (512, sequence + 1))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"input_ids": self._ids[index, :-1], "targets": self._ids[index, 1:]}


class Bench:
    def __init__(self, model: str, world_size: int, rank: int) -> None:
        sizes = {**MODELS[model]}
        self.sequence = sizes.pop("sequence")
        config = {
            "model_type": "llama",
            **sizes,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
        }
        self.options = argparse.Namespace(
            name_or_path=None, config=config, revision=None, trust_remote_code=False, attention=None
        )
        self.config = model_config.read_config(self.options)
        self.spec = huggingface.spec_of(self.config, self.options)
        self.task = CausalLM(self.spec.language)
        self.samples = Samples(sizes["vocab_size"], self.sequence)
        self.world_size, self.rank = world_size, rank
        self.stage = 1 if world_size > 1 else 0
        self.json: dict[str, Any] = {
            "train_batch_size": BATCH * world_size,
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": self.stage},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": RATE, "weight_decay": 0.01, "torch_adam": True, "fused": True},
            },
        }
        self.scheduler = {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": RATE, "warmup_num_steps": 10},
        }

    def module(self) -> ModelWithLoss:
        model = self.task.prepare(self.spec.build())
        materialise(model, self.spec, seed=0)
        return ModelWithLoss(model, self.task).train()

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        first = (step * self.world_size + self.rank) * BATCH
        return self.task.collate(
            [self.samples[(first + i) % len(self.samples)] for i in range(BATCH)]
        )

    # The arms: each builds, then steps for ever, calling `turn` before every step

    def ours(self, turn: Callable[[], None]) -> None:
        sharded = self.stage > 0
        layout = Layout(
            pipeline=1,
            replicate=1 if sharded else self.world_size,
            shard=self.world_size if sharded else 1,
            tensor=1,
            micro_batch=BATCH,
            accumulation=1,
            zero_stage=self.stage,
            offload_optimizer="none",
            offload_param="none",
            precision="float32",
            recompute=Recompute(),
        )
        device = torch.device("cpu")
        machine = Machine(device, Ranks(self.rank, self.world_size))
        engine = ENGINES["deepspeed"].build(
            Job(layout, self.spec, self.task, self.json, 0, machine)
        )
        lines = JsonLines(Path(tempfile.mkdtemp()) / "metrics.jsonl")
        steps = 10**6
        batching = Batching(BATCH, 1, self.world_size, self.rank)
        loader = BatchLoader(
            self.samples,
            self.task.collate,
            batching,
            range(steps),
            order=SampleOrder(0),
            position=0,
        )
        meter = Meter(steps, device, self.world_size, 1.0, None, RunState())

        class Timed(Hooks):
            def log(self, state: RunState, metrics: Metrics, update: Update) -> None:
                lines.record(meter.record(state, metrics, update, 0))

            def on_step(self, batches: StepBatches, metrics: Metrics) -> None:
                meter.note(batches)
                turn()

        turn()
        schedule = schedule_of({"optimizer": self.json["optimizer"], "scheduler": self.scheduler})
        train(
            engine,
            loader,
            schedule,
            LoopPlan(steps, layout.train_batch, 10, None, None),
            Timed(),
            RunState(),
        )

    def bare_deepspeed(self, turn: Callable[[], None]) -> None:
        import deepspeed

        config = {**self.json, "scheduler": self.scheduler, "steps_per_print": 2**31 - 1}
        module = self.module()
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=list(module.parameters()), config=config
        )
        for step in range(10**6):
            turn()
            loss = engine(self.batch(step)) / (BATCH * self.sequence)
            engine.backward(loss)
            engine.step()

    def bare_pytorch(self, turn: Callable[[], None]) -> None:
        module: Any = self.module()
        optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, fused=True)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        model = torch.nn.parallel.DistributedDataParallel(module) if self.world_size > 1 else module
        for step in range(10**6):
            turn()
            loss = model(self.batch(step)) / (BATCH * self.sequence)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    def bare_accelerate(self, turn: Callable[[], None]) -> None:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        module = self.module()
        optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, fused=True)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        model, optimizer, schedule = accelerator.prepare(module, optimizer, schedule)
        for step in range(10**6):
            turn()
            loss = model(self.batch(step)) / (BATCH * self.sequence)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    def trainer(self, turn: Callable[[], None]) -> None:
        from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

        class Pause(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                turn()

        def collate(samples: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
            ids = torch.from_numpy(
                np.stack([np.append(s["input_ids"], s["targets"][-1]) for s in samples])
            )
            return {"input_ids": ids[:, :-1], "labels": ids[:, :-1]}

        arguments = TrainingArguments(
            tempfile.mkdtemp(),
            deepspeed={**self.json, "scheduler": self.scheduler},
            per_device_train_batch_size=BATCH,
            max_grad_norm=CLIP,
            learning_rate=RATE,
            warmup_steps=10,
            weight_decay=0.01,
            max_steps=10**6,
            logging_steps=10,
            report_to=[],
            remove_unused_columns=False,
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        model = AutoModelForCausalLM.from_config(self.config)
        runner = Trainer(
            model, arguments, data_collator=collate, train_dataset=self.samples, callbacks=[Pause()]
        )
        runner.train()


def other_load(seconds: float, own: float, before: Any) -> float:
    """Share of the machine that processes which are not ours took."""
    after = psutil.cpu_times()
    busy = sum(
        getattr(after, kind) - getattr(before, kind) for kind in ("user", "system", "nice", "steal")
    )
    return max(0.0, busy - own) / (seconds * (os.cpu_count() or 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--peer", choices=("trainer", "accelerate"), default="trainer", help="the sixth arm"
    )
    parser.add_argument("--arm", help="run this arm alone and print its peak memory")
    parser.add_argument(
        "--smoke", action="store_true", help="that it runs: the small model, two steps, no figure"
    )
    options = parser.parse_args()
    if options.smoke:
        options.model, options.steps = "small", 2
    if world_of(os.environ) is None:
        os.environ.update(environment_of(0, 1, free_port()))
    os.environ["DS_ACCELERATOR"] = "cpu"
    world = world_of(os.environ)
    assert world is not None
    output = Output()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_world_size))
    dist.init_process_group("gloo")
    import deepspeed

    deepspeed.init_distributed("gloo")
    bench, turns = Bench(options.model, world.world_size, world.rank), Turns()
    arms = {
        "ours": bench.ours,
        "ours again": bench.ours,
        "bare DeepSpeed": bench.bare_deepspeed,
        "bare PyTorch": bench.bare_pytorch,
        # these two set Accelerate's one state to DeepSpeed and to plain: one of them a run
        **(
            {"Trainer": bench.trainer}
            if options.peer == "trainer"
            else {"bare Accelerate": bench.bare_accelerate}
        ),
    }
    if options.arm:
        arms = {options.arm: arms[options.arm]}
    try:
        report = measure(arms, turns, options, world, output)
    except BaseException:
        import traceback

        print(traceback.format_exc(), file=output.terminal, flush=True)
        os._exit(1)
    if world.rank == 0:
        print(report, file=output.terminal, flush=True)
    dist.barrier()
    os._exit(0)


def measure(arms: dict[str, Any], turns: Turns, options: Any, world: Any, output: Output) -> str:
    for name, body in arms.items():
        turns.start(name, body)
    order, times = random.Random(0), {name: [] for name in arms}
    names = list(arms)
    own, before, started = 0.0, psutil.cpu_times(), time.perf_counter()
    process_before = time.process_time()
    for round_number in range(WARM_UP + options.steps):
        if round_number == WARM_UP:
            process_before, before, started = (
                time.process_time(),
                psutil.cpu_times(),
                time.perf_counter(),
            )
        order.shuffle(names)
        for name in names:
            if world.world_size > 1:
                dist.barrier()
            seconds = turns.step(name)
            if round_number >= WARM_UP:
                times[name].append(seconds)
    own_cpu = torch.tensor([time.process_time() - process_before], dtype=torch.float64)
    dist.all_reduce(own_cpu)
    own = float(own_cpu)
    if options.arm:
        import resource

        return (
            f"{options.arm}: peak "
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
        )
    load = other_load(time.perf_counter() - started, own, before)
    lines = [
        "| arm | median step (ms) | ours / arm | ours - arm (us) |",
        "| --- | ---: | ---: | ---: |",
    ]
    ours = times["ours"]
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(ours, found, strict=True))
        difference = statistics.median(a - b for a, b in zip(ours, found, strict=True)) * 1e6
        lines.append(
            f"| {name} | {statistics.median(found) * 1e3:.2f} | {ratio:.3f} | {difference:+.0f} |"
        )
    spread = abs(
        1 - statistics.median(a / b for a, b in zip(ours, times["ours again"], strict=True))
    )
    verdict = "void" if spread > 0.03 or load > 0.05 else "valid"
    header = f"{options.model}, {world.world_size} rank(s), {options.steps} rounds"
    lines.append(
        f"\n{header}: {verdict}; A/A off by {spread:.1%}, other processes took {load:.1%} of the "
        "machine"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
