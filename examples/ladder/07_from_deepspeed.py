"""Rung 7 again, what ZeRO writes: `save_checkpoint`, `load_checkpoint`, and the import into Meshloom.

    python examples/ladder/07_from_deepspeed.py

A bare DeepSpeed loop trains a tiny Llama under ZeRO-2 on two ranks. All ranks call `save_checkpoint`: each writes its
own part of the optimizer's state, as pickles that the same number of ranks reads again by `load_checkpoint`. The
import,

    meshloom checkpoint import FOLDER TARGET --model MODEL

makes of them one folder of safetensors: its `model/` opens with `from_pretrained`, and any layout resumes from it, with
`--resume`. The next loss of each of the three is printed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.run
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, default=Path(tempfile.mkdtemp()))
for name, default in {"steps": 5, "batch": 16, "width": 32, "blocks": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
DEVICES = "2 GPUs" if torch.cuda.device_count() >= 2 else "2 ranks on the CPU"
tokens = torch.randint(100, (args.batch, 16), generator=torch.Generator().manual_seed(1))
ADAM = {"lr": 1e-4, "torch_adam": True}  # DeepSpeed's own would be compiled first
CONFIG = {
    "train_batch_size": args.batch,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 50_000},  # not 5e8, which takes 2 GB
    "optimizer": {"type": "Adam", "params": ADAM},
}


def build():
    torch.manual_seed(0)
    sizes = {"hidden_size": args.width, "intermediate_size": 4 * args.width, "num_hidden_layers": args.blocks}
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, num_attention_heads=4, **sizes))


def work(rank):
    import deepspeed

    trained, *_ = deepspeed.initialize(model=build(), config=CONFIG)
    try:
        own = tokens[rank::2].to(trained.device)
        for _ in range(args.steps):
            trained.backward(trained(input_ids=own, labels=own).loss)
            trained.step()
        trained.save_checkpoint(args.folder / "deepspeed")
        show("save_checkpoint", trained, own, rank)

        loaded, *_ = deepspeed.initialize(model=build(), config=CONFIG)
        loaded.load_checkpoint(args.folder / "deepspeed")
        show("load_checkpoint", loaded, own, rank)
    finally:
        dist.destroy_process_group()


def show(label, engine, own, rank):
    loss = engine(input_ids=own, labels=own).loss.detach() / 2
    dist.all_reduce(loss)
    if rank == 0:
        print(f"next loss after {label} {loss:.6f}", flush=True)


def write_model():
    """Write what a checkpoint of DeepSpeed lacks: the model's config and tokenizer."""
    build().config.save_pretrained(args.folder / "llama")
    words = WordLevel({str(number): number for number in range(100)}, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(args.folder / "llama")


def imported():
    paths = [args.folder / "deepspeed", args.folder / "imported", "--model", args.folder / "llama"]
    subprocess.run([sys.executable, "-m", "trainer.command", "checkpoint", "import", *paths], check=True)
    return AutoModelForCausalLM.from_pretrained(args.folder / f"imported/step-{args.steps:06}/model")


def one_device():
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(args.steps):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]))
    else:
        ranks = ["--standalone", "--nproc-per-node=2"]
        torch.distributed.run.main([*ranks, *sys.argv, f"--folder={args.folder}"])
        write_model()
        loss = imported()(input_ids=tokens, labels=tokens).loss.item()
        alone = one_device()(input_ids=tokens, labels=tokens).loss.item()
        print(f"devices: {DEVICES}, then one for the import")
        print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
