"""Rung 12, SeqNet on FashionMNIST with DDP, logged to MLflow, and opened again from there.

    pip install mlflow            # or mlflow-skinny with sqlalchemy and alembic
    python examples/ladder/12_mlflow.py --data DIR

Parameters, the loss of each step and the model go into a store of local files, by rank 0 alone; another process of this
script then opens the model from MLflow, and its predictions are compared. FashionMNIST: the four files of
github.com/zalandoresearch/fashion-mnist, unzipped, in DIR/FashionMNIST/raw. Where they are not, images are generated
and written in the very format.
"""

import argparse
import os
import struct
import sys
import tempfile
from pathlib import Path

import mlflow
import torch
import torch.distributed as dist
import torch.distributed.run
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, default=Path("data"))
parser.add_argument("--store", type=Path, default=Path(tempfile.mkdtemp()))
for name, default in {"steps": 5, "batch": 16}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args, GPUS = parser.parse_args(), torch.cuda.device_count() >= 2
mlflow.set_tracking_uri(f"sqlite:///{args.store.resolve()}/mlflow.db")


def write_images(folder):
    (raw := folder / "FashionMNIST" / "raw").mkdir(parents=True)
    for part, count in (("train", 512), ("t10k", 128)):
        labels = torch.randint(10, (count,), dtype=torch.uint8)
        pixels = (torch.rand(count, 28, 28) * 128 + 12 * labels[:, None, None]).byte().numpy().tobytes()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + pixels)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.numpy().tobytes())
    return folder


def build():
    torch.manual_seed(0)
    hidden = nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU()
    return nn.Sequential(nn.Flatten(1), *hidden, nn.Linear(64, 10))


def train(model, images, labels, log=lambda step, loss: None):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(step, loss.detach().clone())
    return loss.item()


def work(rank, images, labels):
    def log(step, loss):
        dist.all_reduce(loss)
        rank or mlflow.log_metric("loss", loss.item() / 2, step)

    dist.init_process_group("nccl" if GPUS else "gloo")
    device = f"cuda:{rank}" if GPUS else "cpu"
    model = nn.parallel.DistributedDataParallel(build().to(device))
    if rank == 0:
        mlflow.log_params({"steps": args.steps, "batch": args.batch, "optimizer": "Adam", "lr": 1e-3})
    train(model, images[rank::2].to(device), labels[rank::2].to(device), log)
    if rank == 0:
        mlflow.pytorch.log_model(model.module.cpu(), name="model", serialization_format="pickle")
        torch.save(model.module(images), args.store / "predictions.pt")


if __name__ == "__main__":
    if not (raw := args.data / "FashionMNIST" / "raw").exists():
        print(f"no {raw}: images are generated; how to place the real ones is said in the head of this file")
        args.data = write_images(args.store)
    loaded = torchvision.datasets.FashionMNIST(args.data, True, torchvision.transforms.ToTensor())
    images, labels = next(iter(torch.utils.data.DataLoader(loaded, args.batch)))
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), images, labels)
    else:
        experiment = mlflow.create_experiment(f"ladder-{os.getpid()}", (args.store / "files").resolve().as_uri())
        os.environ["MLFLOW_EXPERIMENT_ID"], given = experiment, [f"--data={args.data}", f"--store={args.store}"]
        torch.distributed.run.main(["--standalone", "--nproc-per-node", "2", *sys.argv, *given])
        run = mlflow.MlflowClient().search_runs([experiment])[0]
        opened = mlflow.pytorch.load_model(f"runs:/{run.info.run_id}/model")(images)
        print(f"opened from MLflow, {run.data.params}:", end=" ")
        print(f"the same predictions: {torch.equal(opened, torch.load(args.store / 'predictions.pt'))}")
        loss, alone = run.data.metrics["loss"], train(build(), images, labels)
        print(f"devices: 2 {'GPUs' if GPUS else 'ranks on the CPU'}")
        print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")
