"""What training costs on this machine's GPUs: our engines, Hugging Face's Trainer with the same
JSON, and a bare loop.

    python benchmarks/gpu.py                        # all GPUs, at most ten minutes; writes results/gpu.md
    python benchmarks/gpu.py --device cpu --tiny    # that it runs: two processes, a model of nothing

Llamas of 1 and 8 billion parameters in bfloat16, random tokens, AdamW, clipping, ZeRO-3 (ZeRO-1 on
one GPU). Each arm has processes of its own, one after the other. A step's time is the median after
three warm-up steps; MFU by `flops_per_token`; memory is the most that torch allocated on a GPU. A
shape whose states do not fit is left out, and said. `mesh` also saves and loads a checkpoint; what
a save adds to the memory of the GPU is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.supervise.world import environment_of, free_port, gpu_count, world_of

LLAMA = {"model_type": "llama", "rope_theta": 500000.0, "max_position_embeddings": 8192}
SHAPES: dict[str, dict[str, Any]] = {
    "1B": dict(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
    ),
    "8B": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
    "tiny": dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    ),
}
ARMS = ("mesh", "accelerate", "deepspeed", "Trainer", "bare FSDP2")
WARM_UP, STEPS, RATE, MICRO_BATCH = 3, 10, 1e-5, 1
STATE_BYTES = 18
"""A parameter's float32 weight and two moments, its gradient, and its bfloat16 value while it is
used.
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and two steps")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1B", "8B"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="arms that would begin later are left out"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/gpu.md")
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # a worker's own
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        return work(options)
    count = gpu_count() if options.device == "cuda" else 2
    if not count:
        print("no GPU here; --device cpu --tiny shows that it runs")
        return 0
    deadline = time.monotonic() + 60 * options.minutes
    rows = []
    for shape in ["tiny"] if options.tiny else options.shapes:
        for arm in options.arms:
            rows.append(
                {"shape": shape, "arm": arm, **measured(arm, shape, count, options, deadline)}
            )
            print(*(line(rows[-1]), *rows[-1].get("kernels", [])), sep="\n", flush=True)
    options.output.write_text(report(rows, count, options))
    print(f"written to {options.output}")
    return 0


def measured(arm: str, shape: str, count: int, options: Any, deadline: float) -> dict[str, Any]:
    """What an arm's first process found; or why there is nothing."""
    left = deadline - time.monotonic()
    if left < 20:
        return {"note": "left out: the time is used up"}
    with tempfile.TemporaryDirectory() as folder:
        own = [
            "--device",
            options.device,
            "--arm",
            arm,
            "--shape",
            shape,
            "--output",
            f"{folder}/found.json",
        ]
        command, port = (
            [sys.executable, __file__, *own, *(["--tiny"] if options.tiny else [])],
            free_port(),
        )
        logs = [open(f"{folder}/{rank}.log", "w+") for rank in range(count)]
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **environment_of(rank, count, port)},
                stdout=logs[rank],
                stderr=logs[rank],
            )
            for rank in range(count)
        ]
        ends = time.monotonic() + left
        while any(p.poll() is None for p in processes) and time.monotonic() < ends:
            if any(p.poll() for p in processes):  # the others wait for it
                time.sleep(2)
                break
            time.sleep(0.2)
        for process in processes:
            process.kill()
            process.wait()
        found = Path(f"{folder}/found.json")
        if found.is_file():
            return dict(json.loads(found.read_text()))
        first = next((rank for rank, p in enumerate(processes) if p.returncode > 0), 0)
        logs[first].seek(0)
        lines = [text.strip() for text in logs[first] if "Error" in text or "refus" in text]
        return {"note": f"failed: {(lines or ['it took too long'])[-1][:160]}"}


# A worker


def work(options: Any) -> int:
    import torch
    import torch.distributed as dist

    world = world_of(os.environ)
    assert world is not None
    cuda = options.device == "cuda"
    device = torch.device("cuda", world.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    bench = Bench(options.shape, world.rank, world.world_size, device, options.tiny)
    needed = STATE_BYTES * bench.spec.parameters / world.world_size
    if cuda and needed > (total := torch.cuda.get_device_properties(device).total_memory):
        found = {
            "note": (
                f"left out: {needed / 2**30:.0f} GiB of state for each GPU of "
                f"{total / 2**30:.0f} GiB"
            )
        }
    else:
        found = bench.run(options.arm)
    if world.rank == 0:
        options.output.write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


class Bench:
    def __init__(self, shape: str, rank: int, world_size: int, device: Any, tiny: bool) -> None:
        from trainer.models import huggingface
        from trainer.tasks.causal_lm import CausalLM

        self.rank, self.world_size, self.device = rank, world_size, device
        self.sequence, self.warm_up, self.steps = (16, 1, 2) if tiny else (4096, WARM_UP, STEPS)
        options = SimpleNamespace(
            name_or_path=None,
            config={**LLAMA, **SHAPES[shape]},
            revision=None,
            trust_remote_code=False,
            attention=None,
        )
        self.config = huggingface.read_config(options)
        self.spec = huggingface.spec_of(self.config, options)
        self.task = CausalLM.of(self.spec)
        self.recompute = "full" if shape == "8B" else "none"
        self.low = device.type == "cuda"
        self.json: dict[str, Any] = {
            "train_batch_size": MICRO_BATCH * world_size,
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": self.low},
            "zero_optimization": {"stage": 3 if world_size > 1 else 1},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": RATE, "weight_decay": 0.1, "torch_adam": not self.low},
            },
        }

    def batch(self, step: int) -> dict[str, Any]:
        import torch

        made = torch.Generator().manual_seed(step * self.world_size + self.rank)
        ids = torch.randint(
            0, self.spec.language.vocabulary, (MICRO_BATCH, self.sequence + 1), generator=made
        )
        parts = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}
        return {name: part.contiguous().to(self.device) for name, part in parts.items()}

    def run(self, arm: str) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        from trainer.engines.devices import peak_of
        from trainer.models.spec import flops_per_token

        if arm == "Trainer":
            seconds, more = self.trainer(), {}
        elif arm == "bare FSDP2":
            seconds, more = self.timed(self.bare()), {}
        else:
            engine, step = self.engine(arm)
            if engine is None:
                return {"note": step}
            kernels = self.kernels()
            seconds = self.timed(step)
            more = {"kernels": kernels, **(self.saved(engine) if arm == "mesh" else {})}
        cuda = self.device.type == "cuda"
        peak = torch.tensor(
            float(torch.cuda.max_memory_allocated() if cuda else 0), device=self.device
        )
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        tokens = MICRO_BATCH * self.sequence / seconds
        top = peak_of(self.device)
        mfu = tokens * flops_per_token(self.spec, self.sequence) / top if top else None
        found = {
            "seconds": seconds,
            "tokens": tokens * self.world_size,
            "mfu": mfu,
            "memory": float(peak) / 2**30,
        }
        return {
            **found,
            "device": torch.cuda.get_device_name(self.device) if cuda else "CPU",
            **more,
        }

    def timed(self, step: Callable[[int], object]) -> float:
        """The median time of a step, with the device waited for."""
        times = []
        for index in range(self.warm_up + self.steps):
            self.wait()
            started = time.perf_counter()
            step(index)
            self.wait()
            times.append(time.perf_counter() - started)
        return statistics.median(times[self.warm_up :])

    def wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def engine(self, name: str) -> tuple[Any, Any]:
        """An engine of ours and its step; or None and why it can't."""
        from trainer.distributed.ranks import Ranks
        from trainer.engines import ENGINES, Job, Machine
        from trainer.layout import Layout, Recompute
        from trainer.optim.lr_schedules import Update

        layout = Layout(
            pipeline=1,
            replicate=1,
            shard=self.world_size,
            tensor=1,
            micro_batch=MICRO_BATCH,
            accumulation=1,
            zero_stage=self.json["zero_optimization"]["stage"],
            offload_optimizer="none",
            offload_param="none",
            precision="bfloat16" if self.low else "float32",
            recompute=Recompute(self.recompute),
        )
        if reason := ENGINES[name].refusal(layout):
            return None, reason
        machine = Machine(self.device, Ranks(self.rank, self.world_size))
        engine = ENGINES[name].build(Job(layout, self.spec, self.task, self.json, 0, machine))
        return engine, lambda index: engine.step(index, [self.batch(index)], Update(RATE))

    def kernels(self) -> list[str]:
        """The lines on the kernels of attention with which a run begins, whose order they set."""
        import torch

        from trainer.tasks.attention import notes

        if self.device.type != "cuda":
            return []
        return list(notes(self.task.attention(), self.spec, False, torch.bfloat16, self.device))

    def saved(self, engine: Any) -> dict[str, Any]:
        """How long a checkpoint takes to write and to read, and what writing it adds to the GPU's
        memory.
        """
        import torch

        from trainer import checkpoint
        from trainer.state import RunState

        cuda, ranks = self.device.type == "cuda", engine.job.machine.ranks
        kept = torch.cuda.max_memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        folder = Path(ranks.on_first(lambda: tempfile.mkdtemp(prefix="meshloom-gpu-")))
        started = time.perf_counter()
        state = RunState(step=1, samples=1, engine=engine.scalars())
        path = checkpoint.save(
            folder, state, engine.state_tensors(), {}, lambda target: None, ranks
        )
        written = time.perf_counter() - started
        added = (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else 0.0
        started = time.perf_counter()
        checkpoint.load(path, engine.state_tensors(), ranks)
        read = time.perf_counter() - started
        ranks.barrier()  # all have read
        ranks.on_first(lambda: shutil.rmtree(folder))
        return {
            "save": written,
            "load": read,
            "save_memory": added,
            **({"memory": kept / 2**30} if cuda else {}),
        }

    def bare(self) -> Callable[[int], object]:
        """What one writes from the PyTorch tutorials: fully_shard, bfloat16, the model's own loss,
        fused AdamW.
        """
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            if self.low
            else MixedPrecisionPolicy()
        )
        if self.recompute == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for block in model.model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        model.to_empty(device=self.device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
        model.model.rotary_emb = type(model.model.rotary_emb)(self.config).to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, fused=True)

        def step(index: int) -> None:
            batch = self.batch(index)
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), batch["targets"].flatten()
            ).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def trainer(self) -> float:
        """The median time of a step of transformers.Trainer with the same JSON."""
        import deepspeed
        import torch
        from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

        deepspeed.init_distributed(
            torch.distributed.get_backend()
        )  # else it takes this process for the only one
        times: list[float] = []
        wait = self.wait

        class Clock(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                wait()
                times.append(time.perf_counter())

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                wait()
                times[-1] = time.perf_counter() - times[-1]

        made = torch.Generator().manual_seed(0)
        size = (self.warm_up + self.steps) * self.world_size * MICRO_BATCH
        rows = torch.randint(
            0, self.spec.language.vocabulary, (size, self.sequence), generator=made
        )
        arguments = TrainingArguments(
            tempfile.mkdtemp(),
            deepspeed=self.json,
            per_device_train_batch_size=MICRO_BATCH,
            learning_rate=RATE,
            weight_decay=0.1,
            bf16=self.low,
            gradient_checkpointing=self.recompute == "full",
            max_steps=self.warm_up + self.steps,
            logging_steps=10,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=not self.low,
        )
        model = AutoModelForCausalLM.from_config(self.config)
        data = [{"input_ids": row, "labels": row} for row in rows]
        Trainer(model, arguments, train_dataset=data, callbacks=[Clock()]).train()
        return statistics.median(times[self.warm_up :])


# The table


def line(row: dict[str, Any]) -> str:
    if "note" in row:
        return f"| {row['shape']} | {row['arm']} | {row['note']} | | | | |"
    mfu = f"{row['mfu']:.1%}" if row["mfu"] else "-"
    saved = (
        f"{row['save']:.1f} s, +{row['save_memory']:.2f} GiB; {row['load']:.1f} s"
        if "save" in row
        else ""
    )
    step = f"{row['seconds'] * 1e3:.0f} | {row['tokens']:,.0f} | {mfu} | {row['memory']:.1f}"
    return f"| {row['shape']} | {row['arm']} | {step} | {saved} |"


def report(rows: list[dict[str, Any]], count: int, options: Any) -> str:
    from trainer.run.describe import versions

    found = next((row["device"] for row in rows if "device" in row), "no device")
    made = ", ".join(f"{name} {version}" for name, version in versions().items())
    head = [
        f"# On {count} x {found}",
        "",
        (
            "    python benchmarks/gpu.py --device "
            f"{options.device}{' --tiny' if options.tiny else ''}"
        ),
        "",
        made + ".",
        "",
        "| shape | arm | step (ms) | tokens/s, all | MFU | peak (GiB) | save; load |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    kernels = dict.fromkeys(text for row in rows for text in row.get("kernels", []))
    return "\n".join([*head, *map(line, rows), "", *kernels]).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
