"""From nothing to an adapter: pretrain a small model, then fine-tune it on chats, all of it and by LoRA.

    python examples/finetune/finetune.py

Every run is the command that a user types; what it left is then opened by transformers and PEFT alone, and asked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LORA = json.dumps({"type": "lora", "r": 16, "alpha": 32, "dropout": 0.05})


def command(config: Path, name: str, *more: str) -> None:
    runs = [f"trainer.run.folder={OPTIONS.runs}", f"trainer.run.name={name}", "trainer.device=cpu"]
    line = [sys.executable, str(ROOT / "launch" / "train.py"), "--config", str(config), "--fresh", "--processes", "2"]
    print(f"\n$ {' '.join(line[1:])} {' '.join(more)}", flush=True)
    subprocess.run([*line, *runs, *more], check=True)


@torch.no_grad()
def loss_of(model: torch.nn.Module, tokenizer, chats: list[dict]) -> float:
    """Nats per token of the answers: what comes after the prompt for one, its end with it."""
    total, count = 0.0, 0
    for chat in chats:
        prompt = tokenizer.apply_chat_template(chat["messages"][:-1], tokenize=False, add_generation_prompt=True)
        whole = prompt + chat["messages"][-1]["content"] + tokenizer.eos_token
        ids = tokenizer(whole, return_tensors="pt", add_special_tokens=False).input_ids[:, :192]
        labels = ids.clone()
        labels[:, : len(tokenizer(prompt, add_special_tokens=False).input_ids)] = -100
        if (learned := int((labels[:, 1:] != -100).sum())) > 0:
            total, count = total + float(model(input_ids=ids, labels=labels).loss) * learned, count + learned
    return total / count


def answer(model: torch.nn.Module, tokenizer, chat: dict) -> str:
    prompt = tokenizer.apply_chat_template(chat["messages"][:-1], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    torch.manual_seed(0)
    written = model.generate(
        input_ids=ids, max_new_tokens=40, do_sample=True, temperature=0.7, pad_token_id=tokenizer.eos_token_id
    )
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


def main() -> None:
    runs = OPTIONS.runs
    (runs / "chats").mkdir(parents=True)
    subprocess.run([sys.executable, str(HERE / "chats.py"), str(runs / "chats")], check=True)
    data = [f"trainer.data.path={runs}/chats/chats.jsonl", f"trainer.data.evaluation_path={runs}/chats/held.jsonl"]
    base = [*data, f"trainer.model.name_or_path={runs}/base/final"]
    steps = [f"trainer.steps={OPTIONS.steps}"] if OPTIONS.steps else []
    command(HERE / "base.json", "base", *steps)
    command(HERE / "chat.json", "full", *base, *steps, "trainer.engine=deepspeed")
    lora = [f"trainer.adapter={LORA}", "optimizer.params.lr=5e-3", "trainer.engine=accelerate"]
    command(HERE / "chat.json", "lora", *base, *steps, *lora)

    held = [json.loads(line) for line in (runs / "chats" / "held.jsonl").read_text().splitlines()][: OPTIONS.asked]
    tokenizer = AutoTokenizer.from_pretrained(runs / "full" / "final")
    models = {
        "base": AutoModelForCausalLM.from_pretrained(runs / "base" / "final"),
        "full": AutoModelForCausalLM.from_pretrained(runs / "full" / "final"),
        "lora": AutoPeftModelForCausalLM.from_pretrained(runs / "lora" / "final"),
    }
    print(f"\nloss on {len(held)} held-out answers, by transformers and PEFT alone")
    for name, model in models.items():
        print(f"  {name}: {loss_of(model.eval(), tokenizer, held):.3f}")
    for chat in held[1:4]:
        print(f"\n{chat['messages'][0]['content']}")
        for name, model in models.items():
            print(f"  {name}: {answer(model, tokenizer, chat)!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, help="a folder for the runs that is not there yet (default: a free one)")
    parser.add_argument("--steps", type=int, help="of each run, in place of the configs'")
    parser.add_argument("--asked", type=int, default=60, help="held-out chats that the loss is of")
    OPTIONS = parser.parse_args()
    names = (Path("runs", f"finetune-{number}") for number in range(1, 1000))
    OPTIONS.runs = OPTIONS.runs or next(path for path in names if not path.exists())
    main()
