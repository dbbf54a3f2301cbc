"""What training costs on this machine's GPUs: our engines, Hugging Face's Trainer with the same
JSON, and a bare loop.

    python benchmarks/gpu.py            # on one GPU at most ten minutes; writes results/gpu.md
    python benchmarks/gpu.py --smoke    # that it runs: two processes without GPUs, no figures

A Llama of 1 billion parameters (on several GPUs one of 8, too, for ten minutes more) in bfloat16,
random tokens, AdamW, clipping, ZeRO-3 (ZeRO-1 on one GPU); sequences of 8,192 tokens, micro-batches
of 2, `selective` recomputation. Each arm has processes of its own, one after the other, and is
stopped after its seconds in `ARMS` and what earlier ones left; they and `PLANNING` are 600 in all.
An arm that is stopped, runs out of memory or fails is a row that says so; what it had found is
kept. A step's time is the median after the warm-up. MFU is by `flops_per_token`, which counts
attention to earlier tokens alone, and by the rule that counts all, as torchtitan's. Memory: what
`meshloom plan` predicts of this JSON (blocks are planned uncompiled), and the most that torch
allocated on a GPU. "mesh, saving" times a save and a load, and how long the loop waits for a save
in the background, the first time and when its buffers are there. The bare loop is plain PyTorch
with the same units and the same recomputation; Trainer recomputes whole blocks, as it has nothing
in between.
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
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.supervise.world import environment_of, free_port, gpu_count, world_of

LLAMA = {"model_type": "llama", "rope_theta": 500000.0, "max_position_embeddings": 8192}
WIDE = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
SHAPES: dict[str, dict[str, Any]] = {
    "1B": dict(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True
    )
    | WIDE,
    "8B": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32) | WIDE,
    # as wide as float8 wants
    "tiny": dict(hidden_size=1024, intermediate_size=1024, num_hidden_layers=2)
    | WIDE
    | {"vocab_size": 128},
}
RATE, MICRO_BATCH, RECOMPUTE = 1e-5, 2, "selective"
PLANNING = 60
"""The seconds that `meshloom plan` has for all arms, at once."""


@dataclass(frozen=True)
class Arm:
    seconds: int
    """After which it is stopped, with those that earlier arms left."""
    own: dict[str, object] = field(default_factory=dict)
    """Keys of the section `trainer`; without them it is not one of ours."""


LORA = {"r": 16, "alpha": 32}
NF4 = {"type": "nf4", "double_quant": True}
ARMS = {
    "mesh": Arm(50, {"engine": "mesh", "compile": "none"}),
    "mesh, compiled": Arm(70, {"engine": "mesh", "compile": "blocks"}),
    "mesh, compiled, float8": Arm(
        75, {"engine": "mesh", "compile": "blocks", "float8": "tensorwise"}
    ),
    "mesh, saving": Arm(110, {"engine": "mesh", "compile": "none"}),
    "bare FSDP2": Arm(35),
    "bare FSDP2, compiled": Arm(60),
    "accelerate": Arm(35, {"engine": "accelerate", "compile": "none"}),
    "deepspeed": Arm(60, {"engine": "deepspeed", "compile": "none"}),
    "Trainer": Arm(45),
    "mesh, LoRA": Arm(130, {"engine": "mesh", "compile": "blocks", "adapter": LORA}),
    "mesh, QLoRA": Arm(
        150, {"engine": "mesh", "compile": "blocks", "adapter": LORA | {"quantize": NF4}}
    ),
}
ADAPTERS = ("mesh, LoRA", "mesh, QLoRA")
"""Arms that run only if they are named."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model and two steps, on processors"
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: 1B; with GPUs, 8B")
    usual = [arm for arm in ARMS if arm not in ADAPTERS]
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=usual)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/gpu.md")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)  # a worker's arm and folder
    options = parser.parse_args()
    if options.work:
        return work(*options.work, cuda=not options.smoke)
    count = 2 if options.smoke else gpu_count()
    if not count:
        print("no GPU here; --smoke shows that it runs")
        return 0
    shapes = ["tiny"] if options.smoke else options.shapes or ["1B", "8B"][: min(count, 2)]
    slower = 10 if options.smoke else 1  # on a CPU
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        given = json_of(shape, count, options.smoke)
        predicted = plans(given, count, options.arms, slower * PLANNING)
        ends = time.monotonic()
        for arm in options.arms:
            ends += slower * ARMS[arm].seconds
            found = measured(arm, given, count, options.smoke, ends)
            rows.append({"shape": shape, "arm": arm, "planned": predicted.get(arm), **found})
            print(*(line(rows[-1]), *rows[-1].get("kernels", [])), sep="\n", flush=True)
    options.output.write_text(report(rows, count, options))
    print(f"written to {options.output}")
    return 0


def json_of(shape: str, count: int, smoke: bool) -> dict[str, Any]:
    """The config that all arms share."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": not smoke},
        "zero_optimization": {"stage": 3 if count > 1 else 1},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": RATE, "weight_decay": 0.1, "torch_adam": smoke},
        },
        "trainer": {
            "model": {"config": {**LLAMA, **SHAPES[shape]}},
            "data": {"path": "random tokens", "sequence_length": 16 if smoke else 8192},
            "steps": 10,
            "activation_checkpointing": RECOMPUTE,
        },
    }


def own_json(arm: str, given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config of an arm; what it names is written into `folder`."""
    own = {**given["trainer"], **ARMS[arm].own}
    if arm in ADAPTERS:  # an adapter is one to a base: here a folder with its config alone
        base = folder / f"base of {arm}"
        base.mkdir()
        described = {**own["model"]["config"], "architectures": ["LlamaForCausalLM"]}
        (base / "config.json").write_text(json.dumps(described))
        own["model"] = {"name_or_path": str(base)}
    return {**given, "trainer": own}


def plans(given: dict[str, Any], count: int, arms: list[str], seconds: float) -> dict[str, float]:
    """The GiB that `meshloom plan` predicts on the fullest GPU, by arm."""
    running: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for index, arm in enumerate(arm for arm in arms if missing(arm) is None and ARMS[arm].own):
            config = own_json(arm, given, Path(folder))
            config["trainer"].pop("compile")  # planned uncompiled
            text = json.dumps(config)
            if text not in running:
                path = Path(folder) / f"{index}.json"
                path.write_text(text)
                command = [sys.executable, "-m", "trainer.command", "plan", "--json"]
                command += ["--config", str(path), "--nodes", "1", "--gpus", str(count)]
                process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
                )
                running[text] = [process]
            running[text].append(arm)
        found, ends = {}, time.monotonic() + seconds
        for process, *names in running.values():
            try:
                output, errors = process.communicate(timeout=max(0.1, ends - time.monotonic()))
                size = json.loads(output)["needed"] / 2**30
            except (subprocess.TimeoutExpired, ValueError) as error:
                process.kill()
                _, errors = process.communicate()
                print(f"no plan of {', '.join(names)}: {error}\n{errors[-2000:]}", flush=True)
                continue
            found.update(dict.fromkeys(names, size))
    return found


def missing(arm: str) -> str | None:
    """Why an arm can't run on this machine."""
    if "float8" in ARMS[arm].own and find_spec("torchao") is None:
        return "left out: torchao is not installed (pip install 'meshloom[float8]')"
    if arm in ("deepspeed", "Trainer") and find_spec("deepspeed") is None:
        return "left out: deepspeed is not installed (pip install 'meshloom[deepspeed]')"
    return None


def measured(
    arm: str, given: dict[str, Any], count: int, smoke: bool, ends: float
) -> dict[str, Any]:
    """What an arm's first process found; or why there is nothing."""
    if reason := missing(arm):
        return {"note": reason}
    with tempfile.TemporaryDirectory(prefix="meshloom-gpu-") as folder:
        config = own_json(arm, given, Path(folder))
        (Path(folder) / "config.json").write_text(json.dumps(config))
        command = [sys.executable, __file__, "--work", arm, folder, *["--smoke"][:smoke]]
        port, started = free_port(), time.monotonic()
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
        while any(p.poll() is None for p in processes) and time.monotonic() < ends:
            if any(p.poll() for p in processes):  # the others wait for it
                time.sleep(2)
                break
            time.sleep(0.2)
        codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
        path = Path(f"{folder}/found.json")
        found = dict(json.loads(path.read_text())) if path.is_file() else {}
        if any(codes):
            first = next(rank for rank, code in enumerate(codes) if code)
            logs[first].seek(0)
            lines = [text.strip() for text in logs[first] if "Error" in text or "refus" in text]
            found["note"] = f"failed: {(lines or [f'exit code {codes[first]}'])[-1][:160]}"
        elif None in codes:
            found["note"] = f"stopped after {time.monotonic() - started:.0f} s"
        return found


# A worker


def work(arm: str, folder: str, cuda: bool) -> int:
    import torch
    import torch.distributed as dist

    from trainer.supervise.process import place_for_operators

    world = world_of(os.environ)
    assert world is not None
    device = torch.device("cuda", world.local_rank) if cuda else torch.device("cpu")
    if cuda:
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
    def __init__(self, world: Any, device: Any, folder: Path) -> None:
        self.rank, self.world_size, self.device = world.rank, world.world_size, device
        self.local = world.local_world_size
        self.cuda, self.folder = device.type == "cuda", folder
        self.warm_up, self.steps = (3, 10) if self.cuda else (1, 2)
        self.given: dict[str, Any] = json.loads((folder / "config.json").read_text())
        own = self.given["trainer"]
        self.sequence: int = own["data"]["sequence_length"]
        self.model: dict[str, Any] = own["model"].get("config") or json.loads(
            (Path(own["model"]["name_or_path"]) / "config.json").read_text()
        )
        self.found: dict[str, Any] = {}

    def tell(self, **found: Any) -> None:
        """What the parent process gets even if this arm is stopped."""
        self.found.update(found)
        if self.rank == 0:
            text = json.dumps(self.found)
            (self.folder / "found.new").write_text(text)
            (self.folder / "found.new").replace(self.folder / "found.json")

    def batch(self, step: int) -> dict[str, Any]:
        import torch

        made = torch.Generator().manual_seed(step * self.world_size + self.rank)
        size = (MICRO_BATCH, self.sequence + 1)
        ids = torch.randint(0, self.model["vocab_size"], size, generator=made)
        parts = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}
        return {name: part.contiguous().to(self.device) for name, part in parts.items()}

    def run(self, arm: str) -> None:
        from trainer.models.flops import flops_per_token
        from trainer.models.huggingface import spec_of

        config, options = self.described()
        spec = spec_of(config, options, weights=False)
        self.flops = [flops_per_token(spec, self.sequence, causal) for causal in (True, False)]
        if arm == "Trainer" or arm.startswith("bare"):
            import gpu_peers

            if arm == "Trainer":
                return self.tell_step(gpu_peers.trainer(self))
            return self.tell_step(self.timed(gpu_peers.bare(self, "compiled" in arm)))
        engine, step, kernels = self.engine()
        self.tell(kernels=kernels)
        if arm in ADAPTERS:  # the products of frozen weights have no gradient of them
            self.flops = []
        if arm == "mesh, saving":
            step(0)
            self.save(engine, step)
        else:
            self.tell_step(self.timed(step))

    def tell_step(self, seconds: float) -> None:
        import torch
        import torch.distributed as dist

        from trainer.engines.devices import peak_of

        most = torch.cuda.max_memory_allocated() if self.cuda else 0
        peak = torch.tensor(float(most), device=self.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        tokens, top = MICRO_BATCH * self.sequence / seconds, peak_of(self.device)
        self.tell(
            seconds=seconds,
            tokens=tokens * self.world_size,
            mfu=[tokens * flops / top for flops in self.flops] if top else [],
            memory=float(peak) / 2**30,
            device=torch.cuda.get_device_name(self.device) if self.cuda else "CPU",
        )

    def timed(self, step: Callable[[int], object]) -> float:
        """The median time of a step, with the device waited for."""
        times = []
        for index in range(self.warm_up + self.steps):
            times.append(self.once(partial(step, index)))
        return statistics.median(times[self.warm_up :])

    def once(self, work: Callable[[], object]) -> float:
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
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

    def save(self, engine: Any, step: Callable[[int], object]) -> None:
        """Time a save, a load, the stall of two saves in the background, and a step beside one."""
        import torch

        from trainer import checkpoint
        from trainer.state import RunState

        ranks, held = engine.job.machine.ranks, torch.cuda.memory_allocated() if self.cuda else 0
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

        def write(name: str, entries: Any, by: Any) -> Any:
            at, state = self.folder / name, RunState(step=1, samples=1, engine=engine.scalars())
            return checkpoint.save(at, state, entries, {}, checkpoint.ModelFolder(), by)

        path: list[Any] = []
        entries = engine.state_tensors
        self.tell(save=self.once(lambda: path.append(write("one", entries(), ranks))))
        most = torch.cuda.max_memory_allocated() if self.cuda else 0
        self.tell(save_memory=(most - held) / 2**30)
        self.tell(load=self.once(lambda: checkpoint.load(path[0], entries(), ranks)))
        ranks.barrier()  # all have read
        ranks.on_first(lambda: shutil.rmtree(self.folder / "one"))
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


# The table


def _quantise(weight: Any, value: Any) -> None:
    """Give a quantised weight its values, of which a rank may have a part."""
    from trainer.distributed.dtensor import local, own_shard

    data = weight.form.stored(value)
    part = own_shard(data, weight.data) if hasattr(weight.data, "device_mesh") else data
    local(weight.data.data).copy_(part)


def line(row: dict[str, Any]) -> str:
    planned = f"{row['planned']:.2f}" if row.get("planned") else "-"
    cells, rest = ["", "", "", planned, ""], [row["note"]] if "note" in row else []
    if "seconds" in row:
        mfu = " / ".join(f"{share:.1%}" for share in row["mfu"]) or "-"
        step = f"{row['seconds'] * 1e3:.0f}"
        cells = [step, f"{row['tokens']:,.0f}", mfu, planned, f"{row['memory']:.2f}"]
    if "quantised" in row:
        rest.append(f"quantised in {row['quantised']:.1f} s")
    if "save" in row:
        rest.append(f"save {row['save']:.1f} s")
    if "save_memory" in row:
        rest[-1] += f" and {row['save_memory']:.2f} GiB on the GPU"
    if "load" in row:
        rest.append(f"load {row['load']:.1f} s")
    for name in ("first stall", "stall"):
        rest += [f"{name} {row[name]:.2f} s"] if name in row else []
    if "beside" in row:
        rest.append(f"step beside it x {row['beside']:.2f}")
    return f"| {row['shape']} | {row['arm']} | {' | '.join(cells)} | {'; '.join(rest)} |"


def report(rows: list[dict[str, Any]], count: int, options: Any) -> str:
    from trainer.run.describe import versions

    found = next((row["device"] for row in rows if "device" in row), "no device")
    made = ", ".join(f"{name} {version}" for name, version in versions().items())
    head = [
        f"# On {count} x {found}",
        "",
        f"    python benchmarks/gpu.py{' --smoke' if options.smoke else ''}",
        "",
        made + ".",
        "",
        "| shape | arm | step (ms) | tokens/s, all | MFU, causal / full | planned (GiB) | peak (GiB) | besides |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    kernels = dict.fromkeys(text for row in rows for text in row.get("kernels", []))
    return "\n".join([*head, *map(line, rows), "", *kernels]).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
