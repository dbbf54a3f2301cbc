"""Each command of README, docs, examples and benchmarks runs, in its smallest form; one that is new
has to say how.

The cheapest are run by default, the others with `--more`. `{tiny}` stands for overrides that make a
config that ships tiny, `{job}` for a config of a tiny model, `{run}` for a run of it, `{text}` for
its data and `{out}` for an empty folder. A command of which another test runs that very thing is
named with it.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support import ladder
from tests.support.commands import ROOT, SCRIPTS, run, write_job

COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:python3?|deepspeed|torchrun|accelerate|meshloom"
    r"|pip|pipx|uv|uvx|sbatch|srun|pytest|ruff|mypy|mkdocs|docker|git) +[^\s=|&>,.]"
)
SHELL = ("sh", "bash", "shell", "console")
"""The languages of fenced blocks in which every line is a command or its output."""
TRAIN = "launch/train.py --config"
OPTION = re.compile(r" \[[^\]]*\]")


def documents() -> list[Path]:
    results = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
    results += [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("benchmarks/results/*.md")]
    results += [*ROOT.glob("skills/**/*.md"), ROOT / "docs" / "diagrams.py"]
    return [*results, *ROOT.glob("examples/**/*.py")]


def code_of(path: Path) -> Iterator[str]:
    """Lines of code, joined where they end in a backslash, and code within a line."""
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    fenced = False
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        fenced ^= line.lstrip().startswith("```")
        if fenced or line.startswith("    ") or path.suffix == ".py":
            yield line.strip().removeprefix("$ ")
    yield from (" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text))


def commands_of(path: Path) -> set[str]:
    """Without a comment at the end, options in brackets, and spaces beyond one."""
    results = {
        re.split(r"\s+# ", code, maxsplit=1)[0] for code in code_of(path) if COMMAND.match(code)
    }
    return {" ".join(OPTION.sub("", command).split()) for command in results}


@cache
def documented() -> dict[str, list[str]]:
    """Command -> the documents that have it."""
    results: dict[str, list[str]] = {}
    for path in documents():
        for command in commands_of(path):
            results.setdefault(command, []).append(str(path.relative_to(ROOT)))
    return results


HOSTS = "torchrun --nnodes 1 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0"
FULL = "trainer.activation_checkpointing=full"
LAYOUTS = "torchrun --nproc-per-node 2 benchmarks/layouts.py"
STEPS = "benchmarks/step_time.py --smoke"
PREPARATION = "python benchmarks/preparation.py"
FOREIGN = "tests/importers/import_config"
CHECKPOINT = "meshloom checkpoint"
CHATS = (
    "trainer.model.name_or_path=runs/base/final trainer.data.path=examples/chats.jsonl "
    "trainer.data.documents=pad trainer.data.evaluation_fraction=0"
)
FORTY = "trainer.epochs=40 trainer.log.every=10"
LORA = """trainer.adapter='{"type": "lora", "r": 8, "alpha": 16}' optimizer.params.lr=1e-2"""
TINY_CHATS = (
    f"{CHATS.replace('runs/base', '{run}')} trainer.epochs=2 trainer.data.sequence_length=128 "
    "trainer.run.folder={out}"
)
TEACHER_ALONE = (
    "meshloom train --config examples/distillation.json --teacher-only "
    "trainer.distillation.column={out}/teacher trainer.data.tokenizer={run}/final "
    "trainer.distillation.teacher.name_or_path={run}/final"
)
OWN = "trainer.model.name_or_path={run}/final trainer.model.config=null trainer.data.path={text}"
SHORT = "trainer.data.sequence_length=16 trainer.run.folder={out} trainer.epochs=0.1"

SMALL: dict[str, tuple[str, ...]] = {
    # README
    f"deepspeed -q {TRAIN} ds_configs/zero2.json": (
        f"deepspeed -q {TRAIN} ds_configs/zero2.json {{tiny}}",
    ),
    "meshloom --help": ("meshloom --help",),
    "meshloom train --config zero2": ("meshloom train --config zero2 {tiny}",),
    f"deepspeed {TRAIN} C.json": (f"deepspeed {TRAIN} {{job}}",),
    f"torchrun --nproc-per-node 8 {TRAIN} C.json": (
        f"torchrun --nproc-per-node 2 {TRAIN} {{job}}",
    ),
    f"torchrun --nproc-per-node 2 {TRAIN} ds_configs/long_context.json": (
        f"torchrun --nproc-per-node 2 {TRAIN} ds_configs/long_context.json {{tiny}}",
    ),
    f"torchrun --nproc-per-node 4 {TRAIN} ds_configs/experts.json": (
        f"torchrun --nproc-per-node 4 {TRAIN} ds_configs/experts.json trainer.steps=2 "
        "trainer.data.sequence_length=16 trainer.run.folder={out}",
    ),
    f"accelerate launch {TRAIN} C.json": (f"accelerate launch {TRAIN} {{job}}",),
    f"python {TRAIN} C.json": (f"python {TRAIN} {{job}}",),
    **{
        "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HEAD:29500 "
        f"{TRAIN} ds_configs/{name}.json": (f"{HOSTS} {TRAIN} ds_configs/{name}.json {{tiny}}",)
        for name in ("fsdp", "hsdp")
    },
    "meshloom plan --config zero3 --nodes 8 --gpus 8 --device h100-80gb": (
        "meshloom plan --config zero3 --nodes 8 --gpus 8 --device h100-80gb {tiny}",
    ),
    **dict.fromkeys(
        (
            'meshloom generate runs/NAME --prompt "def main("',
            'meshloom generate runs/zero2 --prompt "def main("',
        ),
        ('meshloom generate {run} --prompt "def main(" --tokens 2',),
    ),
    "meshloom --print-completion > ~/.local/share/bash-completion/completions/meshloom": (
        "meshloom --print-completion",
    ),
    "meshloom report runs/NAME": ("meshloom report {run} --output {out}/page.html",),
    f"deepspeed -q {TRAIN} ds_configs/zero3.json trainer.model.name_or_path=Qwen/Qwen3-8B "
    "trainer.data.path=chats.jsonl trainer.epochs=3 optimizer.params.lr=2e-5": (
        f"deepspeed -q {TRAIN} ds_configs/zero3.json {OWN} {SHORT}",
        (
            f"deepspeed {TRAIN} ds_configs/zero3.json {OWN} {SHORT} trainer.data.documents=pack "
            "--preview 2"
        ),
    ),
    f"{CHECKPOINT} list|verify|show PATH": tuple(
        f"{CHECKPOINT} {word} {{run}}" for word in ("list", "verify", "show")
    ),
    f"deepspeed {TRAIN} examples/finetune.json": (
        f"deepspeed {TRAIN} examples/finetune.json trainer.model.name_or_path={{run}}/final "
        f"trainer.run.folder={{out}} "
        "trainer.epochs=0.1",
    ),
    "python examples/embeddings.py": ("python examples/embeddings.py --steps 2 --runs {out}",),
    f"deepspeed {TRAIN} examples/distillation.json": (
        f"deepspeed {TRAIN} examples/distillation.json trainer.run.folder={{out}} trainer.steps=2 "
        "trainer.distillation.teacher.name_or_path={run}/final trainer.data.tokenizer={run}/final",
    ),
    f"deepspeed {TRAIN} examples/labels.json": (
        f"deepspeed {TRAIN} examples/labels.json trainer.run.folder={{out}} trainer.epochs=0.1",
    ),
    f"deepspeed {TRAIN} examples/masked.json": (
        f"deepspeed {TRAIN} examples/masked.json trainer.run.folder={{out}} trainer.steps=2",
    ),
    f"deepspeed {TRAIN} examples/qlora.json": (
        f"deepspeed {TRAIN} examples/qlora.json trainer.model.name_or_path={{run}}/final "
        f"trainer.run.folder={{out}} "
        "trainer.epochs=0.1",
    ),
    f"deepspeed {TRAIN} examples/preferences.json": (
        f"deepspeed {TRAIN} examples/preferences.json trainer.model.name_or_path={{run}}/final "
        f"trainer.run.folder={{out}} "
        "trainer.epochs=0.1",
    ),
    "python examples/one_curve.py": (
        "python examples/one_curve.py --steps 2 --output {out}/a.png",
    ),
    # docs
    f"python {TRAIN} ds_configs/zero2.json trainer.run.name=base trainer.steps=300": (
        f"python {TRAIN} ds_configs/zero2.json {{tiny}} trainer.run.name=base",
    ),
    f"python {TRAIN} ds_configs/zero2.json trainer.model.name_or_path=runs/base/final "
    "trainer.data.path=examples/chats.jsonl trainer.data.documents=pad --preview 2": (
        f"python {TRAIN} ds_configs/zero2.json trainer.model.name_or_path={{run}}/final "
        "trainer.data.path=examples/chats.jsonl trainer.data.documents=pad --preview 2",
    ),
    f"python {TRAIN} ds_configs/zero2.json trainer.run.name=chat {CHATS} {FORTY} optimizer.params.lr=3e-3": (
        f"python {TRAIN} ds_configs/zero2.json trainer.run.name=chat {TINY_CHATS}",
    ),
    f"python {TRAIN} ds_configs/zero2.json trainer.run.name=lora {CHATS} {FORTY} {LORA}": (
        f"python {TRAIN} ds_configs/zero2.json trainer.run.name=lora {TINY_CHATS} {LORA}",
    ),
    **{
        f"meshloom plan --config {words} MODEL": (f"meshloom plan --config {words} {{tiny}}",)
        for words in ("zero2 --gpus 1", "ddp --gpus 8", "zero3 --gpus 8")
    },
    "meshloom plan --config hsdp --nodes 8 --gpus 8 MODEL": (
        "meshloom plan --config hsdp --nodes 8 --gpus 8 {tiny} train_micro_batch_size_per_gpu=1",
    ),
    "meshloom plan --config long_context --nodes NODES --gpus 8 "
    "trainer.model.config=examples/llama_8b.json trainer.engine=mesh "
    "trainer.data.sequence_length=TOKENS train_micro_batch_size_per_gpu=1 sequence_parallel_size=N "
    "trainer.activation_checkpointing=MODE": (
        "meshloom plan --config long_context --nodes 1 --gpus 8 {tiny} trainer.engine=mesh "
        f"train_micro_batch_size_per_gpu=1 sequence_parallel_size=2 {FULL}",
    ),
    "meshloom plan --config examples/gallery/full.json zero_optimization.stage=1 "
    "tensor_parallel.autotp_size=8 tensor_parallel.sequence_parallel=true "
    "trainer.data.sequence_length=32768 trainer.activation_checkpointing=MODE": (
        "meshloom plan --config examples/gallery/full.json --gpus 2 {tiny} "
        "zero_optimization.stage=1 tensor_parallel.autotp_size=2 "
        f"tensor_parallel.sequence_parallel=true {FULL}",
    ),
    "meshloom plan --config examples/gallery/lora.json --gpus 8 "
    "trainer.model.name_or_path=examples/gallery/llama3-70b": (
        "meshloom plan --config examples/gallery/lora.json --gpus 8 "
        "trainer.model.name_or_path=examples/gallery/llama3-70b trainer.data.sequence_length=128",
    ),
    "meshloom plan --config examples/gallery/lora.json --gpus 1 zero_optimization.stage=1 "
    "trainer.data.sequence_length=4096 trainer.activation_checkpointing=selective": (
        "meshloom plan --config examples/gallery/lora.json --gpus 1 zero_optimization.stage=1 "
        "trainer.data.sequence_length=128 trainer.activation_checkpointing=selective",
    ),
    "python launch/verify.py --config ds_configs/zero2.json": (
        "python launch/verify.py --config ds_configs/zero2.json {tiny}",
    ),
    "meshloom schema > schema.json": ("meshloom schema",),
    # AGENTS
    f"python {TRAIN} C.json --dry-run": (f"python {TRAIN} {{job}} --dry-run",),
    f"python {TRAIN} C.json --preview 2": (f"python {TRAIN} {{job}} --preview 2",),
    "meshloom plan --config C.json --nodes 8 --gpus 8": (
        "meshloom plan --config {job} --nodes 1 --gpus 4",
    ),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 3 "
    "--rdzv-backend c10d --rdzv-endpoint HEAD:29500 "
    f"{TRAIN} my.json trainer.checkpoint.every=200": (f"{HOSTS} --max-restarts 3 {TRAIN} {{job}}",),
    "meshloom status runs/NAME": ("meshloom status {run}",),
    "meshloom import --from axolotl full.yml --output full.json": (
        (
            f"meshloom import --from axolotl {FOREIGN}/axolotl_full.yml --partial --output "
            f"{{out}}/full.json"
        ),
    ),
    "meshloom import --from llamafactory llama3_full_sft.yaml --output full.json": (
        (
            f"meshloom import --from llamafactory {FOREIGN}/llamafactory_pretrain.yaml --output "
            f"{{out}}/full.json"
        ),
    ),
    (
        "meshloom import --from trl-dpo --output dpo.json -- --model_name_or_path my-sft-model "
        "--dataset_name pairs.jsonl --learning_rate 5e-7 --beta 0.1"
    ): (
        "meshloom import --from trl-dpo --output {out}/dpo.json -- --model_name_or_path "
        "my-sft-model --dataset_name pairs.jsonl --learning_rate 5e-7 --beta 0.1",
    ),
    "meshloom train --config distill.json --teacher-only "
    "trainer.distillation.column=/shared/teacher zero_optimization.stage=3 "
    "tensor_parallel.autotp_size=8": (f"{TEACHER_ALONE} zero_optimization.stage=3",),
    "meshloom train --config distill.json trainer.distillation.column=/shared/teacher": (
        TEACHER_ALONE.replace(" --teacher-only", "") + " trainer.steps=2 trainer.run.folder={out}",
    ),
    **{
        f"meshloom train --config full.json{more}": (
            f"meshloom train --config examples/finetune.json trainer.model.name_or_path={{run}}/final "
            f"trainer.epochs=0.1 trainer.run.folder={{out}}{more}",
        )
        for more in ("", " --dry-run", " --preview 2")
    },
    "meshloom train --config examples/finetune.json": (
        "meshloom train --config examples/finetune.json trainer.model.name_or_path={run}/final "
        "trainer.epochs=0.1 trainer.run.folder={out}",
    ),
    "meshloom train --config sft.json --preview 2": (
        "meshloom train --config examples/finetune.json trainer.model.name_or_path={run}/final "
        "--preview 2",
    ),
    "meshloom train --config dpo.json --preview 2": (
        "meshloom train --config examples/preferences.json trainer.model.name_or_path={run}/final "
        "--preview 2",
    ),
    "meshloom train --config dpo.json": (
        "meshloom train --config examples/preferences.json trainer.model.name_or_path={run}/final "
        "trainer.epochs=null trainer.steps=1",
    ),
    (
        "meshloom import --output clm.json -- --model_name_or_path gpt2 --dataset_name wikitext "
        "--learning_rate 1e-5"
    ): (
        "meshloom import --output {out}/clm.json -- --model_name_or_path gpt2 --dataset_name "
        "wikitext "
        "--learning_rate 1e-5",
    ),
    "meshloom plan --config ds_configs/zero3.json --nodes 8 --gpus 8 --device h100-80gb "
    "trainer.model.name_or_path=...": (
        "meshloom plan --config ds_configs/zero3.json --nodes 8 --gpus 8 --device h100-80gb {tiny} "
        "trainer.model.config=null trainer.model.name_or_path={run}/final",
    ),
    "meshloom plan --config megatron_3d --nodes 128 --gpus 8 --device h100-80gb "
    "trainer.model.name_or_path=LLAMA-405B trainer.data.sequence_length=8192 pipeline.stages=16 "
    "tensor_parallel.autotp_size=8 trainer.mesh.shard=8 train_micro_batch_size_per_gpu=1 "
    "gradient_accumulation_steps=64 trainer.activation_checkpointing=full trainer.engine=mesh": (
        "meshloom plan --config megatron_3d --nodes 1 --gpus 8 --device h100-80gb {tiny} "
        "pipeline.stages=2 "
        "tensor_parallel.autotp_size=2 trainer.mesh.shard=2 train_micro_batch_size_per_gpu=1 "
        f"gradient_accumulation_steps=4 {FULL} trainer.engine=mesh",
    ),
    "meshloom plan --config zero2 --nodes 1 --gpus 1 trainer.model.name_or_path=BASE "
    "trainer.adapter.r=16 QUANTIZE trainer.engine=mesh bf16.enabled=true "
    "trainer.data.sequence_length=4096 train_batch_size=1 gradient_accumulation_steps=1 "
    f"{FULL}": (
        "meshloom plan --config zero2 --nodes 1 --gpus 1 trainer.model.name_or_path={run}/final "
        "trainer.adapter.r=4 trainer.adapter.quantize.double_quant=true trainer.engine=mesh "
        "bf16.enabled=true trainer.data.sequence_length=32 train_batch_size=1 "
        f"gradient_accumulation_steps=1 {FULL}",
    ),
    f"deepspeed {TRAIN} ds_configs/zero2.json trainer.model.name_or_path=my-7b "
    "trainer.data.path='data/*.jsonl' trainer.data.sequence_length=4096 train_batch_size=1024 "
    f"train_micro_batch_size_per_gpu=1 gradient_accumulation_steps=auto {FULL}": (
        f"deepspeed {TRAIN} ds_configs/zero2.json {OWN} {SHORT} train_batch_size=4 "
        f"train_micro_batch_size_per_gpu=1 gradient_accumulation_steps=auto {FULL}",
    ),
    "torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HEAD:29500 "
    f"{TRAIN} ds_configs/hsdp.json MODEL": (f"{HOSTS} {TRAIN} ds_configs/hsdp.json {{tiny}}",),
    "python launch/verify.py --config ds_configs/hsdp.json": (
        "python launch/verify.py --config ds_configs/hsdp.json {tiny}",
    ),
    # the ladder; what trains in float32 is in test_ladder.py
    "torchrun --nproc-per-node 2 examples/ladder/03_ddp.py": (
        "torchrun --nproc-per-node 2 examples/ladder/03_ddp.py --steps 1",
    ),
    "python examples/ladder/07_zero.py --stage 2 --offload --precision bf16": (
        "python examples/ladder/07_zero.py --stage 2 --offload --precision bf16 --steps 1",
    ),
    "python -m tests.support.picture_files generated": (
        "python -m tests.support.picture_files {out}",
    ),
    "python examples/ladder/climb.py --only FSDP": (
        "python examples/ladder/climb.py --only FSDP --output {out}",
    ),
    # benchmarks
    "torchrun --nproc-per-node 2 benchmarks/checkpoints.py": (
        "torchrun --nproc-per-node 2 benchmarks/checkpoints.py --smoke --folder {out}",
    ),
    "python benchmarks/loads.py": ("python benchmarks/loads.py --smoke --folder {out}",),
    "python benchmarks/ends.py overhead": ("python benchmarks/ends.py overhead --smoke",),
    "python benchmarks/ends.py faults": ("python benchmarks/ends.py faults --smoke",),
    "python benchmarks/guide.py 3": ("python benchmarks/guide.py 3",),
    "python benchmarks/images.py --smoke": ("python benchmarks/images.py --smoke",),
    "python benchmarks/layouts.py time": ("python benchmarks/layouts.py time --smoke",),
    f"{LAYOUTS} pipeline": (f"{LAYOUTS} pipeline --smoke",),
    "python benchmarks/layouts.py memory": ("python benchmarks/layouts.py memory --smoke",),
    "python benchmarks/layouts.py build": ("python benchmarks/layouts.py build --smoke",),
    "python benchmarks/loss_memory.py": ("python benchmarks/loss_memory.py --smoke --repeats 1",),
    "python benchmarks/packing.py": (
        "python benchmarks/packing.py --rounds 1 --steps 3 --rows 2 --sequence 64 --median 20",
    ),
    "python benchmarks/plan_memory.py --smoke mesh-zero3": (
        "python benchmarks/plan_memory.py --smoke mesh-zero3",
    ),
    "python benchmarks/plan_order.py": ("python benchmarks/plan_order.py --smoke",),
    "python benchmarks/labels.py": ("python benchmarks/labels.py --smoke --rounds 1 --steps 2",),
    "python benchmarks/embeddings.py": (
        "python benchmarks/embeddings.py --smoke --rounds 1 --times 2 --pairs 2",
    ),
    "python benchmarks/preferences.py": ("python benchmarks/preferences.py --smoke --rounds 1",),
    f"{PREPARATION} speed": (f"{PREPARATION} speed --megabytes 0.1",),
    f"{PREPARATION} memory": (f"{PREPARATION} memory --documents 2000",),
    f"{PREPARATION} check": (f"{PREPARATION} check --megabytes 4",),
    "python benchmarks/soak.py --smoke": ("python benchmarks/soak.py --smoke",),
    "python benchmarks/startup.py": ("python benchmarks/startup.py --repeats 1",),
    "python benchmarks/step_time.py": (f"python {STEPS}", f"python {STEPS} --arm ours"),
    "torchrun --nproc-per-node 2 benchmarks/step_time.py ...": (
        f"torchrun --nproc-per-node 2 {STEPS}",
        f"torchrun --nproc-per-node 2 {STEPS} --peer accelerate",
    ),
    # a command's name alone
    **{
        f"meshloom {name}": (f"meshloom {name} --help",)
        for name in ("plan", "verify", "status", "report", "checkpoint", "import", "train")
        + ("generate", "chat", "evaluate")
    },
}
"""Command -> its smallest form, or forms."""

SAME: dict[str, str] = {
    'meshloom generate runs/NAME --prompt "def main(" --tokens 100 --temperature 0.7 --top-p 0.9 '
    "--seed 1": 'meshloom generate runs/NAME --prompt "def main("',
    **{
        words: "python launch/verify.py --config ds_configs/zero2.json"
        for words in ("python launch/verify.py", "python launch/verify.py --config C.json")
    },
    "accelerate launch": f"accelerate launch {TRAIN} C.json",
    "python benchmarks/preferences.py --rounds 10": "python benchmarks/preferences.py",
    "OMP_NUM_THREADS=1 python benchmarks/packing.py --steps 4": "python benchmarks/packing.py",
    "python benchmarks/guide.py": "python benchmarks/guide.py 3",
    "python -m tests.support.picture_files data": "python -m tests.support.picture_files generated",
    "python benchmarks/images.py": "python benchmarks/images.py --smoke",
    "python benchmarks/loss_memory.py --repeats 5": "python benchmarks/loss_memory.py",
    "python benchmarks/plan_memory.py": "python benchmarks/plan_memory.py --smoke mesh-zero3",
    "python benchmarks/plan_memory.py lora chunked mesh-zero3": (
        "python benchmarks/plan_memory.py --smoke mesh-zero3"
    ),
    "python benchmarks/plan_order.py --ranks 2 4 --layouts 10": "python benchmarks/plan_order.py",
    "python benchmarks/startup.py --repeats 5": "python benchmarks/startup.py",
    "python benchmarks/step_time.py --model 26m --steps 10 --arm ARM": (
        "python benchmarks/step_time.py"
    ),
    "python benchmarks/step_time.py --model 26m --steps 60": "python benchmarks/step_time.py",
    "python benchmarks/step_time.py --model small --steps 200": "python benchmarks/step_time.py",
    **{
        f"torchrun --nproc-per-node 2 benchmarks/step_time.py {words}": (
            "torchrun --nproc-per-node 2 benchmarks/step_time.py ..."
        )
        for words in ("--model 26m --steps 30", "--model small --steps 200")
    },
    "torchrun --nproc-per-node 2 benchmarks/checkpoints.py --rounds 5": (
        "torchrun --nproc-per-node 2 benchmarks/checkpoints.py"
    ),
    "python benchmarks/loads.py --rounds 5": "python benchmarks/loads.py",
    "torchrun --nproc-per-node 4 benchmarks/checkpoints.py --rounds 5 --blocks 2": (
        "torchrun --nproc-per-node 2 benchmarks/checkpoints.py"
    ),
    "python benchmarks/ends.py faults --times 3 --minutes 21": "python benchmarks/ends.py faults",
    "python benchmarks/ends.py overhead --steps 4400": "python benchmarks/ends.py overhead",
    "python benchmarks/soak.py --faults 340": "python benchmarks/soak.py --smoke",
    "python benchmarks/soak.py --faults 200": "python benchmarks/soak.py --smoke",
    f"{LAYOUTS} pipeline --rounds 10": f"{LAYOUTS} pipeline",
    f"{PREPARATION} speed --megabytes 8": f"{PREPARATION} speed",
    f"{PREPARATION} memory --documents 10000000": f"{PREPARATION} memory",
    f"{PREPARATION} check --megabytes 8000": f"{PREPARATION} check",
}
"""Command -> the one of `SMALL` that it is with other sizes."""

ELSEWHERE: dict[str, str] = {
    **{
        f"meshloom import --from {words}": (
            "test_moving_pages.py::test_the_command_of_a_page_writes_its_config"
        )
        for words in (
            "axolotl lora.yml --output lora.json",
            "llamafactory lora.yaml --output lora.json",
            "trainer --output clm.json -- --model_name_or_path Qwen/Qwen3-8B --train_file mine.jsonl "
            "--block_size 2048 --learning_rate 1e-5 --per_device_train_batch_size 1 "
            "--gradient_accumulation_steps 8 --num_train_epochs 3 --bf16 true --deepspeed ds.json "
            "--output_dir runs/mine",
        )
    },
    "meshloom import --from trainer --output sft.json -- --model_name_or_path Qwen/Qwen3-0.6B "
    "--dataset_name chats.jsonl --learning_rate 2e-5 --max_length 2048 --assistant_only_loss true "
    "--output_dir runs/sft": "test_moving_pages.py::test_the_imports_from_trl_write_a_config",
    "meshloom import --from trl-dpo --output dpo-lora.json -- --model_name_or_path my-sft-model "
    "--dataset_name pairs.jsonl --use_peft --lora_r 16 --lora_alpha 32 --lora_dropout 0 "
    "--lora_target_modules q_proj v_proj": (
        "test_moving_pages.py::test_the_imports_from_trl_write_a_config"
    ),
    **dict.fromkeys(
        (
            'meshloom chat runs/NAME --system "You answer in one sentence."',
            "meshloom chat runs/chat --temperature 0",
        ),
        "test_use.py::test_a_chat_keeps_its_history",
    ),
    'meshloom generate runs/ONE runs/TWO --prompt "def main("': (
        "test_use.py::test_several_adapters_on_one_base_each_write"
    ),
    "meshloom chat runs/ONE runs/TWO": "test_use.py::test_a_chat_switches_between_adapters",
    "meshloom evaluate runs/NAME --tasks my_task.yaml": (
        "test_use.py::test_a_task_of_ones_own_is_scored"
    ),
    **{
        f"sbatch {words}": f"test_slurm.py::{test}"
        for words, test in {
            "launch/slurm.sbatch C.json": "test_a_torchrun_for_each_node",
            "launch/slurm.sbatch my.json": "test_a_torchrun_for_each_node",
            "--nodes=4 --gpus-per-node=4 --time=8:00:00 launch/slurm.sbatch my.json "
            "trainer.steps=5000": "test_a_torchrun_for_each_node",
            "--ntasks-per-node=8 --cpus-per-task=8 launch/slurm.sbatch my.json": (
                "test_a_task_for_each_rank"
            ),
        }.items()
    },
    **{
        f"srun {words}": "test_slurm.py::test_ranks_of_srun_are_told_as_torchrun_tells_its"
        for words in (
            "python launch/train.py --config C.json",
            "--nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 "
            "python launch/train.py --config my.json",
        )
    },
    **{
        f"meshloom push{more}": "test_hub.py::test_parts_of_an_earlier_push_go_and_other_files_stay"
        for more in ("", " runs/NAME", " runs/NAME --repository me/my-model")
    },
    "meshloom push runs/NAME --to FOLDER": (
        "test_hub.py::test_a_folder_gets_what_the_hub_would_get"
    ),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2:4 --nproc-per-node 8 --max-restarts "
    "20 --shutdown-timeout 540 --rdzv-backend c10d --rdzv-endpoint HEAD:29500 "
    f"{TRAIN} my.json train_batch_size=1024 train_micro_batch_size_per_gpu=2 "
    "gradient_accumulation_steps=auto": (
        "test_elastic.py::test_a_node_is_lost_and_another_one_joins"
    ),
    "python launch/ray_train.py --workers 16 --config my.json": (
        "test_ray.py::test_two_workers_train_and_go_on_after_a_rank_was_killed"
    ),
    "meshloom merge": "test_merge.py::test_a_run_and_another_base_are_named",
    "meshloom merge runs/NAME OUT": "test_merge.py::test_a_run_and_another_base_are_named",
    "meshloom merge runs/qlora OUT --quantised-base": (
        "test_merge.py::test_a_quantised_base_is_merged_as_it_was_trained"
    ),
    f"python {TRAIN} bad.json": (
        "test_documented_commands.py::test_the_errors_of_a_bad_config_are_those_of_the_page"
    ),
    **dict.fromkeys(
        (
            "python benchmarks/gallery.py",
            "python benchmarks/gallery.py llama3-8b",
            "python benchmarks/gallery.py --missing",
            "python benchmarks/gallery.py --check mistral-7b lora 8",
        ),
        "test_gallery.py::test_a_row_is_planned_again",
    ),
    "meshloom plan --config examples/gallery/lora.json --gpus 1 "
    "trainer.model.name_or_path=examples/gallery/llama3-8b": (
        "test_gallery.py::test_a_row_is_planned_again"
    ),
    "python -m tests.support.notebooks": (
        "test_notebooks.py::test_a_notebook_runs_from_top_to_bottom"
    ),
    "python docs/diagrams.py": "test_site.py::test_the_diagrams_are_those_of_their_script",
    "mkdocs build --strict": (
        "test_site.py::test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere"
    ),
    "python -m tests.conformance.test_any_to_any": (
        "test_any_to_any.py::test_any_layout_goes_on_in_any_other"
    ),
    "meshloom train --config job.json trainer.compile=blocks": (
        "test_compilation.py::test_a_run_compiles_its_blocks_and_says_where_graphs_are_kept"
    ),
    "meshloom verify --config job.json --compile": (
        "test_compilation.py::test_a_run_is_certified_with_compiled_blocks"
    ),
    "meshloom train --config parity.json": "test_hooks_page.py::test_the_plugin_trains",
    "python -m tests.support.budget": "test_communication.py::test_the_docs_have_the_tables",
    "python -m tests.support.foreign": "test_public_configs.py::test_the_page_is_up_to_date",
    "meshloom schema": (
        "test_schema.py::test_the_schema_is_one_and_the_file_of_the_wheel_is_what_the_command_prints"
    ),
    "meshloom schema > trainer/config/schema.json": (
        "test_schema.py::test_the_schema_is_one_and_the_file_of_the_wheel_is_what_the_command_prints"
    ),
    "python -m tests.support.reference": "test_site.py::test_the_reference_is_that_of_the_code",
    f"python {TRAIN} examples/digits.json": "test_images.py::test_digits_are_learned",
    f"python {TRAIN} examples/digits.json trainer.seed=S": "test_images.py::test_digits_are_learned",
    **{
        f"python examples/ladder/{command}": "test_ladder.py::test_a_rung_has_the_loss_of_one_device"
        for command in ladder.DOCUMENTED
    },
    **{
        command: "test_ladder.py::test_a_rung_has_the_loss_of_one_device"
        for command in (
            f"{CHECKPOINT} import FOLDER TARGET --model MODEL",
            "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d "
            "--rdzv-endpoint HEAD:29500 examples/ladder/06_ddp_two_devices.py",
        )
    },
    **{
        f"python {words}": f"test_fashion_mnist.py::{test}"
        for words, test in {
            "examples/fashion_mnist.py --root data --epochs 1": "test_the_page_shows_these_losses",
            **dict.fromkeys(
                (
                    f"{TRAIN} examples/fashion_mnist.json trainer.images.root=data "
                    "trainer.epochs=1",
                    f"{TRAIN} examples/fashion_mnist.json --processes 2",
                    f"{TRAIN} examples/fashion_mnist.json --processes 2 pipeline.stages=2",
                ),
                "test_the_config_has_the_losses_and_the_accuracy_of_the_loop",
            ),
        }.items()
    },
    "python examples/ladder/climb.py": "test_ladder.py::test_what_a_rung_costs_is_measured",
    "python examples/finetune/finetune.py": (
        "test_finetune.py::test_the_example_goes_from_nothing_to_an_adapter_that_peft_opens"
    ),
    f"{CHECKPOINT} import old/checkpoint-500 imported --model my-llama": (
        "test_from_deepspeed.py::test_a_run_goes_on_from_it"
    ),
    "python examples/planted_bug.py": "test_verify.py::test_the_example_of_a_planted_bug_names_it",
    "python examples/planted_bug.py --without": (
        "test_verify.py::test_the_example_of_a_planted_bug_names_it"
    ),
    **dict.fromkeys(
        (
            "python benchmarks/gpu_certificates.py",
            'python benchmarks/gpu_certificates.py --shapes 1B --arms mesh "mesh, compiled"',
        ),
        "test_gpu_benchmark.py::test_a_config_of_the_kit_is_certified",
    ),
    "python -m tests.support.conformance.sweep": "families/test_families.py::test_a_sampled_row_is_so",
    "python -m tests.support.whole_table": (
        "test_whole.py::test_the_page_of_families_says_what_comes_back"
    ),
    **{
        command: "test_gpu_benchmark.py::test_it_makes_its_table_at_tiny_size"
        for command in (
            "python benchmarks/gpu.py",
            "python benchmarks/gpu.py --smoke",
            "python benchmarks/gpu.py --shapes Qwen3-0.6B",
            'python benchmarks/gpu.py --arms mesh "bare FSDP2" accelerate',
            'python benchmarks/gpu.py --shapes 1B 8B --arms "mesh, LoRA" "mesh, QLoRA"',
            "python benchmarks/gpu.py --shapes 8B --sequence 4096 "
            '--arms ceilings "mesh, LoRA" "Trainer + PEFT"',
            "python benchmarks/gpu.py --shapes 8B "
            '--arms "longest in 24 GB" "longest in 48 GB" "longest in 80 GB"',
            "python -m benchmarks.gpu_longest CONFIG GPUS DEVICE",
        )
    },
}
"""Command -> the test that runs it."""

NOT_HERE: dict[str, str] = {
    "deepspeed run_clm.py": "it is another trainer's",
    "python -m pytest --rewrite-messages": "it rewrites tests/messages.txt in place",
    "python -m pytest tests/test_shape.py tests/test_rules.py tests/test_sizes.py "
    "tests/test_words.py tests/test_rules_of_tests.py": "a first run has these files",
    "meshloom evaluate runs/NAME --tasks arc_easy,hellaswag --limit 100": (
        "their data is on the hub; test_use.py runs a task of its own"
    ),
    "docker build -t meshloom .": "needs a builder; test_wheel.py checks the Dockerfile's text",
    **{
        f"pip install {words}": "installing, from an index: .ci/run does, and test_wheel.py without"
        for words in ("-e .", "-e '.[test]'", "-e '.[ladder]'")
        + (
            "'meshloom[digits]'",
            "'meshloom[float8]'",
            "'meshloom[evaluate]'",
            "'meshloom[blake3]'",
            "'meshloom[quantised]'",
        )
        + (
            "mlflow",
            "torch torchvision --index-url https://download.pytorch.org/whl/cpu",
            "torch torchvision && pip install -e '.[test]'",
        )
        + ("trainer", "meshloom")
    },
    "pip uninstall deepspeed": "test_versions.py hides it instead",
    "pipx run meshloom train --config zero2": "it is from PyPI; test_wheel.py trains by the wheel",
    "uvx meshloom train --config zero2": "it is from PyPI; test_wheel.py trains by the wheel",
    **{
        words: ".ci/run runs it"
        for words in (
            "ruff check .",
            "ruff format --check .",
            "mypy meshloom trainer launch tests benchmarks",
        )
        + ("ruff format . && ruff check . && mypy meshloom trainer launch tests benchmarks",)
    },
    "python -m pytest tests/ROOM": "it stands for any room",
    "python -m pytest tests/test_rules.py tests/test_shape.py": "they are tests themselves",
    "python -m pytest --more": ".ci/run runs it, a part for each commit",
    "pytest --whole tests/conformance/families": "hours; test_families.py samples it",
    "pytest --whole tests/probes/test_expert_parts.py": "it is a test itself",
    "python -m pytest -s tests/budgets/test_saves.py": "it is a test itself",
    "python -m pytest -s tests/budgets/test_starts.py": "it is a test itself",
    "python -m pytest": "it is what runs this",
    "python -m pytest --record-durations": "it runs every test, and writes how long each takes",
    "python -m pytest -m gpu": "it needs GPUs; without, all of it is skipped",
    "python SCRIPT": "it stands for any script",
    "torchrun --max-restarts 1": "part of a sentence on a test, tests/supervise/test_launchers.py",
}
"""Command -> why it can't be run here."""

CHEAP = ("meshloom import", "meshloom status --help", "meshloom plan --help")
"""The beginnings of forms that a first run has."""


def test_every_command_is_run_or_says_why_not():
    known = SMALL.keys() | SAME.keys() | ELSEWHERE.keys() | NOT_HERE.keys()
    missing = {command: places for command, places in documented().items() if command not in known}
    # tests/test_documented_commands.py has to say how each is run
    assert missing == {}


def test_the_tables_have_no_command_that_nobody_documents():
    assert {*SMALL, *SAME, *ELSEWHERE, *NOT_HERE} - documented().keys() == set()
    assert set(SAME.values()) <= SMALL.keys()


def unknown_commands(text: str) -> list[str]:
    """Return lines after a prompt, or in a fenced block of a shell, of programs not in `COMMAND`."""
    text = re.sub(r"\\\n\s*", "", text)
    prompts = re.findall(r"^ *\$ (.+)$", text, re.MULTILINE)
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language in SHELL and "$ " not in block:
            prompts += [line for line in block.splitlines() if line and not line.startswith("#")]
    return [line for line in prompts if not COMMAND.match(line)]


def test_every_line_of_a_shell_is_a_command_that_is_known():
    results = {
        path.name: unknown_commands(path.read_text())
        for path in documents()
        if path.suffix == ".md"
    }
    assert not any(results.values()), f"{results}: COMMAND needs them"
    page = "```sh\nls -l\n```\n\n    $ cat a\n    b\n"
    assert unknown_commands(page) == ["cat a", "ls -l"]


def test_the_errors_of_a_bad_config_are_those_of_the_page(tmp_path: Path):
    bad = {
        "train_batch_size": 8,
        "gradient_acumulation_steps": 8,
        "zero_optimisation": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lrr": 1e-4}},
        "fp16": {"enabled": True},
        "bf16": {"enabled": True},
        "trainer": {"steps": 1, "model": {"name_or_pth": "my-llama"}},
    }
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    result = run(sys.executable, "launch/train.py", "--config", tmp_path / "bad.json", cold=True)
    page = (ROOT / "docs/configs.md").read_text()
    [block] = re.findall(r"--config bad.json\n((?:    .*\n)+)", page)
    expected = [line.strip() for line in block.splitlines()]
    assert result.code == 64
    assert sorted(line.strip() for line in result.lines) == sorted(expected)


def test_each_block_of_python_is_python():
    for path in documents():
        for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S):
            compile(block, str(path), "exec")


@pytest.mark.more
def test_the_model_of_the_tutorial_answers(trained: str, tmp_path: Path):
    words = TINY_CHATS.format(run=trained, out=tmp_path).split()
    config = "ds_configs/zero2.json"
    result = run(
        sys.executable, "launch/train.py", "--config", config, "trainer.run.name=chat", *words
    )
    assert result.code == 0, result.output
    [block] = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/first_chat_model.md").read_text(), re.M | re.S
    )
    result = run(sys.executable, "-c", block.replace("runs/chat", f"{tmp_path}/chat"))
    assert result.code == 0 and "<|assistant|>" in result.output, result.output


def test_a_new_command_is_found_wherever_it_stands(tmp_path: Path):
    text = (
        "Say `torchrun x.py`,\n\n    python a.py \\\n        --b  # c\n\n```sh\nmeshloom plan "
        "--config d\n```\n"
    )
    (tmp_path / "a.md").write_text(f"{text}or deepspeed e.py, `python = 3` and `a python b`.\n")
    assert commands_of(tmp_path / "a.md") == {
        "torchrun x.py",
        "python a.py --b",
        "meshloom plan --config d",
    }
    (tmp_path / "b.py").write_text(
        '"""Prose.\n\n    accelerate launch f.py [--g 1]\n"""\n\npython = "python h.py"\n'
    )
    assert commands_of(tmp_path / "b.py") == {"accelerate launch f.py"}


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_the_tests_that_run_the_others_are_there(test: str):
    name, _, function = test.partition("::")
    [path] = (ROOT / "tests").rglob(name)
    assert f"def {function}(" in path.read_text()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All but the run, which is made where a command asks for it."""
    folder = tmp_path_factory.mktemp("documented")
    job = write_job(folder)
    section = json.loads(job.read_text())["trainer"]
    tiny = {
        "model.config": section["model"]["config"] | {"attention_dropout": 0.0},
        "data.path": section["data"]["path"],
        "data.sequence_length": 16,
        "steps": 1,
        "evaluation.samples": 2,
        "generate.tokens": 2,
    }
    words = [
        f"trainer.{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in tiny.items()
    ]
    return {
        "tiny": shlex.join(words),
        "job": str(job),
        "text": section["data"]["path"],
        "folder": str(folder),
    }


@pytest.fixture(scope="module")
def trained(places: dict[str, str]) -> str:
    folder = Path(places["folder"]) / "trained"
    result = run(
        sys.executable, "launch/train.py", "--config", places["job"], f"trainer.run.folder={folder}"
    )
    assert result.code == 0, result.output
    return str(next(folder.iterdir()))


FORMS = list(dict.fromkeys(form for forms in SMALL.values() for form in forms))


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(
            form, id=f"{at} {form[:70]}", marks=() if form.startswith(CHEAP) else pytest.mark.more
        )
        for at, form in enumerate(FORMS)
    ],
)
def test_it_runs(request: pytest.FixtureRequest, places: dict[str, str], tmp_path: Path, form: str):
    values = {**places, "out": str(tmp_path)}
    if "{run}" in form:
        values["run"] = request.getfixturevalue("trained")
    words = shlex.split(re.sub(r"\{(\w+)\}", lambda match: values[match[1]], form))
    first = {"python": [sys.executable]}
    if "{job}" in form or "{tiny}" in form:
        words.append(f"trainer.run.folder={tmp_path}")
    before = state_of_results()
    result = run(
        *first.get(words[0], [words[0]]), *words[1:], timeout=800, cold=form.startswith(CHEAP)
    )
    assert words[0] in SCRIPTS or words[0] in first
    assert result.code == 0, result.output[-4000:]
    # a smallest form writes nothing into the tree
    assert state_of_results() == before


def state_of_results() -> dict[str, float]:
    """The times of the files that full benchmarks write."""
    return {
        str(path): path.stat().st_mtime
        for path in [*ROOT.glob("benchmarks/results/*"), ROOT / "docs/which.md"]
    }
