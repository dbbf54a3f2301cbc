"""From the command to the first step: `launch/train.py` against a minimal script around
transformers.Trainer.

    python benchmarks/startup.py [--repeats 5]

Both start as `python SCRIPT` on one CPU process with the same DeepSpeed JSON, model config and
prepared text, and end after one step. They alternate; the whole command is timed, its end included.
One run of each comes first, so that caches are warm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.supervise.world import environment_of, free_port

MODEL = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
DEEPSPEED = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "weight_decay": 0.0}},
}
TRAINER = """
import sys, json
from datasets import load_dataset
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer,
                          TrainingArguments)
folder, tokenizer_folder = sys.argv[1:3]
setup = json.load(open(folder + "/setup.json"))
tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
tokenizer.pad_token = tokenizer.eos_token
data = load_dataset("json", data_files=folder + "/text.jsonl", split="train")
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=128), batched=True,
                remove_columns=["text"])
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**setup["model"]))
arguments = TrainingArguments(folder + "/out", deepspeed=setup["deepspeed"], per_device_train_batch_size=8, max_steps=1,
                              learning_rate=1e-3, report_to=[], disable_tqdm=True, use_cpu=True)
Trainer(model, arguments, train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)).train()
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    # what a launcher sets: DeepSpeed under Trainer does not start without it
    environment = {**os.environ, **environment_of(0, 1, free_port())}
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "meshloom"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [
            json.dumps({"text": f"def function_{i}(value): return value + {i}\n" * 20})
            for i in range(400)
        ]
        (folder / "text.jsonl").write_text("\n".join(lines))
        (folder / "setup.json").write_text(json.dumps({"model": MODEL, "deepspeed": DEEPSPEED}))
        (folder / "trainer.py").write_text(TRAINER)
        section = {
            "model": {"config": MODEL},
            "data": {"path": str(folder / "text.jsonl"), "sequence_length": 128},
            "steps": 1,
            "run": {"folder": str(folder / "runs")},
        }
        (folder / "ours.json").write_text(json.dumps({**DEEPSPEED, "trainer": section}))
        ours = [
            sys.executable,
            str(ROOT / "launch/train.py"),
            "--config",
            str(folder / "ours.json"),
        ]
        subprocess.run(ours, check=True, capture_output=True, env=environment)
        tokenizer = next(path for path in cache.iterdir() if (path / "tokenizer.json").is_file())
        theirs = [sys.executable, str(folder / "trainer.py"), str(folder), str(tokenizer)]
        subprocess.run(theirs, check=True, capture_output=True, env=environment)
        times: dict[str, list[float]] = {"launch/train.py": [], "Trainer": []}
        for _ in range(repeats):
            for arm, command in (("launch/train.py", ours), ("Trainer", theirs)):
                started = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True, env=environment)
                times[arm].append(time.perf_counter() - started)
    print("| arm | median (s) | all (s) |\n| --- | ---: | --- |")
    for arm, found in times.items():
        print(
            f"| {arm} | {statistics.median(found):.2f} | "
            f"{', '.join(f'{value:.2f}' for value in sorted(found))} |"
        )


if __name__ == "__main__":
    main()
