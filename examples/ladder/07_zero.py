"""Rung 7, ZeRO by DeepSpeed: optimizer state (1), gradients (2) and parameters (3) are sharded over the ranks.

    python examples/ladder/07_zero.py --stage 2 --offload --precision bf16      # by `trainer.train`
    python examples/ladder/07_zero.py --stage 2 --by deepspeed                  # a bare DeepSpeed loop, the same JSON

Bucket sizes are numbers of elements that are reduced or gathered at once: smaller ones take less memory, larger ones
fewer messages. What `save_checkpoint` is to DeepSpeed is `trainer.checkpoint.every` here: a folder that any layout goes
on from. What each run ends with is `final/`, plain safetensors, which one process opens below. bf16 runs on any
device, fp16 too, but both round: the difference from one device in float32 is then that of the precision.
"""

import argparse
import os
import sys
import tempfile

import torch
import torch.distributed.run
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("--by", choices=("deepspeed", "meshloom"), default="meshloom")
parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
parser.add_argument("--offload", action="store_true")
for name, default in {"stage": 2, "bucket": 50_000, "steps": 5, "batch": 16, "width": 32, "blocks": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args, seeded, GPUS = parser.parse_args(), torch.Generator().manual_seed(1), torch.cuda.device_count() >= 2
images, labels = torch.randn(args.batch, 28, 28, generator=seeded), torch.randint(10, (args.batch,), generator=seeded)
zero = {"stage": args.stage, "reduce_bucket_size": args.bucket, "allgather_bucket_size": args.bucket}
if args.offload:
    zero["offload_optimizer"] = {"device": "cpu"}
config = {"train_batch_size": args.batch, "gradient_clipping": 0.0, "zero_optimization": zero}
config |= {"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "weight_decay": 0.0}}}
if args.precision != "fp32":
    config[args.precision] = {"enabled": True}


def build():
    torch.manual_seed(0)
    block = {"dim_feedforward": 4 * args.width, "dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = (nn.TransformerEncoderLayer(args.width, args.width // 16, **block) for _ in range(args.blocks))
    return nn.Sequential(nn.Linear(28, args.width), *layers, nn.Flatten(1), nn.Linear(28 * args.width, 10))


def bare(rank):
    import deepspeed

    config["optimizer"]["params"]["torch_adam"] = True  # its own is compiled first, which takes minutes
    engine = deepspeed.initialize(model=build(), config=config)[0]
    for _ in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        output = engine(images[rank::2].to(engine.device, engine.get_data_types()[0]))
        loss = cross_entropy(output.float(), labels[rank::2].to(engine.device))
        engine.backward(loss)
        engine.step()
    torch.distributed.all_reduce(loss := loss.detach() / 2)
    if rank == 0:
        finish(loss.item())


def finish(loss):
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(args.steps + 1):
        alone = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        alone.backward()
        optimizer.step()
    print(f"devices: 2 {'GPUs' if GPUS else 'ranks on the CPU'}, ZeRO-{args.stage} {args.precision} by {args.by}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone.item()):.1e}")


if __name__ == "__main__":
    if args.by == "meshloom":
        import trainer

        config["trainer"] = {"steps": args.steps + 1, "data": {"evaluation_fraction": 0}, "engine": "deepspeed"}
        given = {"model": build, "data": torch.utils.data.TensorDataset(images, labels), "processes": 2, "quiet": True}
        given["loss"] = lambda output, target: (cross_entropy(output, target, reduction="sum"), len(target))
        result = trainer.train(config, overrides=[f"trainer.run.folder={tempfile.mkdtemp()}"], **given)
        files = [load_file(path) for path in (result.folder / "final").glob("*.safetensors")]
        (model := build()).load_state_dict({name: tensor for file in files for name, tensor in file.items()})
        print(f"final/ in one process, an update later: {cross_entropy(model(images), labels):.6f}")
        finish(result.losses[-1])
    elif "RANK" in os.environ:
        bare(int(os.environ["RANK"]))
    else:
        torch.distributed.run.main(["--standalone", "--nproc-per-node", "2", *sys.argv])
