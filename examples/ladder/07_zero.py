"""Rung 7, ZeRO by DeepSpeed: optimizer state (1), gradients (2) and parameters (3) are sharded over the ranks.

    python examples/ladder/07_zero.py --stage 3 --by deepspeed                  # a bare DeepSpeed loop
    python examples/ladder/07_zero.py --stage 2 --offload --precision bf16      # the same JSON by `meshloom.train`

`--bucket` is the number of elements that are reduced or gathered at once: smaller buckets take less memory, larger ones
fewer messages. `--offload` keeps the optimizer state in the host's memory. bf16 and fp16 round, so that the difference
from one device in float32 is that of the precision. What `meshloom.train` leaves in `final/` are plain safetensors,
which one process opens below; what DeepSpeed's `save_checkpoint` leaves: `07_from_deepspeed.py`.
"""

import argparse
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.run
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--by", choices=("deepspeed", "meshloom"), default="meshloom")
parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
parser.add_argument("--offload", action="store_true")
for name, default in {"stage": 2, "bucket": 50_000, "steps": 5, "batch": 16, "width": 32, "blocks": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
GPUS = torch.cuda.device_count() >= 2
seeded = torch.Generator().manual_seed(1)
images = torch.randn(args.batch, 28, 28, generator=seeded)
labels = torch.randint(10, (args.batch,), generator=seeded)

config = {
    "train_batch_size": args.batch,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
    "zero_optimization": {
        "stage": args.stage,
        "reduce_bucket_size": args.bucket,
        "allgather_bucket_size": args.bucket,
    },
}
if args.offload:
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
if args.precision != "fp32":
    config[args.precision] = {"enabled": True}


def build():
    torch.manual_seed(0)
    block = {"dim_feedforward": 4 * args.width, "dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = (nn.TransformerEncoderLayer(args.width, args.width // 16, **block) for _ in range(args.blocks))
    return nn.Sequential(nn.Linear(28, args.width), *layers, nn.Flatten(1), nn.Linear(28 * args.width, 10))


def by_deepspeed(rank):
    import deepspeed

    config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's own would be compiled first
    engine, *_ = deepspeed.initialize(model=build(), config=config)
    try:
        loss = train(engine, rank)
        if rank == 0:
            finish(loss)
    finally:
        dist.destroy_process_group()


def train(engine, rank):
    own_images = images[rank::2].to(engine.device, engine.get_data_types()[0])
    own_labels = labels[rank::2].to(engine.device)
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(engine(own_images).float(), own_labels)
        engine.backward(loss)
        engine.step()
    loss = loss.detach() / 2
    dist.all_reduce(loss)
    return loss.item()


def by_meshloom():
    import meshloom

    config["trainer"] = {
        "engine": "deepspeed",
        "steps": args.steps + 1,
        "data": {"evaluation_fraction": 0},
        "run": {"folder": tempfile.mkdtemp()},
    }

    def loss_sum(outputs, labels):
        return cross_entropy(outputs, labels, reduction="sum"), len(labels)

    data = TensorDataset(images, labels)
    result = meshloom.train(config, model=build, data=data, loss=loss_sum, processes=2, quiet=True)
    model = build()
    model.load_state_dict(load_file(result.folder / "final" / "model.safetensors"))
    print(f"loss of final/ in one process, an update later {cross_entropy(model(images), labels):.6f}")
    finish(result.losses[-1])


def one_device():
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(args.steps + 1):
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def finish(loss):
    alone = one_device()
    print(f"devices: 2 {'GPUs' if GPUS else 'ranks on the CPU'}, ZeRO-{args.stage} {args.precision} by {args.by}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")


if __name__ == "__main__":
    if args.by == "meshloom":
        by_meshloom()
    elif "RANK" in os.environ:
        by_deepspeed(int(os.environ["RANK"]))
    else:
        torch.distributed.run.main(["--standalone", "--nproc-per-node=2", *sys.argv])
