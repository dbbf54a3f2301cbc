"""Rung 12, SeqNet on FashionMNIST with DDP, logged to MLflow, and opened again from there.

    pip install mlflow            # or mlflow-skinny with sqlalchemy and alembic
    python examples/ladder/12_mlflow.py --data DIR

Rank 0 alone logs the parameters, the loss of each step, and the model, into a store of local files. The script then
opens the model from MLflow in another process, and compares its predictions. DIR/FashionMNIST/raw has the four files of
github.com/zalandoresearch/fashion-mnist, unzipped. Where they are not, images are generated and written in their
format. The same by a JSON: `examples/fashion_mnist.json`.
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
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision.datasets import FashionMNIST
from torchvision.transforms import ToTensor

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, default=Path("data"))
parser.add_argument("--store", type=Path, default=Path(tempfile.mkdtemp()))
for name, default in {"steps": 5, "batch": 16}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
GPUS = torch.cuda.device_count() >= 2
PREDICTIONS = args.store / "predictions.pt"


def build():
    torch.manual_seed(0)
    hidden = nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()
    return nn.Sequential(nn.Flatten(1), *hidden, nn.Linear(200, 10))


def first_batch():
    found = FashionMNIST(args.data, train=True, transform=ToTensor())
    return next(iter(DataLoader(found, args.batch)))


def train(model, images, labels, log):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(args.steps + 1):  # the last one shows the loss after `steps` updates
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(step, loss.detach())
    return loss.item()


def work(rank):
    def log(step, loss):
        mean = loss / 2
        dist.all_reduce(mean)
        if rank == 0:
            mlflow.log_metric("loss", mean.item(), step)

    device = f"cuda:{rank}" if GPUS else "cpu"
    images, labels = first_batch()
    dist.init_process_group("nccl" if GPUS else "gloo")
    try:
        model = nn.parallel.DistributedDataParallel(build().to(device))
        if rank == 0:
            mlflow.log_params({"steps": args.steps, "batch": args.batch, "optimizer": "Adam", "lr": 1e-2})
        train(model, images[rank::2].to(device), labels[rank::2].to(device), log)
        if rank == 0:
            trained = model.module.cpu()
            mlflow.pytorch.log_model(trained, name="model", serialization_format="pickle")
            torch.save(trained(images), PREDICTIONS)
    finally:
        dist.destroy_process_group()


def start():
    """Start two ranks in an experiment of their own, then open what they logged."""
    if not (args.data / "FashionMNIST" / "raw").exists():
        args.data = args.store
        write_images(args.store / "FashionMNIST" / "raw")
        print("no FashionMNIST there: images are generated")
    place = (args.store / "files").resolve().as_uri()
    experiment = mlflow.create_experiment(f"ladder-{os.getpid()}", place)
    os.environ["MLFLOW_EXPERIMENT_ID"] = experiment
    words = [*sys.argv, f"--data={args.data}", f"--store={args.store}"]
    torch.distributed.run.main(["--standalone", "--nproc-per-node=2", *words])

    images, labels = first_batch()
    [run] = mlflow.MlflowClient().search_runs([experiment])
    opened = mlflow.pytorch.load_model(f"runs:/{run.info.run_id}/model")
    same = torch.equal(opened(images), torch.load(PREDICTIONS))
    print(f"opened from MLflow, {run.data.params}: the same predictions: {same}")
    loss = run.data.metrics["loss"]
    alone = train(build(), images, labels, log=lambda step, loss: None)
    print(f"devices: 2 {'GPUs' if GPUS else 'ranks on the CPU'}")
    print(f"loss after {args.steps} steps {loss:.6f}, difference from one device {abs(loss - alone):.1e}")


def write_images(folder):
    """Write images whose brightness tells their label: a magic number, the sizes, the bytes."""
    folder.mkdir(parents=True)
    for part, count in {"train": 512, "t10k": 128}.items():
        labels = torch.randint(10, (count,), dtype=torch.uint8)
        pixels = (torch.rand(count, 28, 28) * 128 + 12 * labels[:, None, None]).byte()
        images_head = struct.pack(">4i", 2051, count, 28, 28)
        labels_head = struct.pack(">2i", 2049, count)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images_head + pixels.numpy().tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels_head + labels.numpy().tobytes())


if __name__ == "__main__":
    mlflow.set_tracking_uri(f"sqlite:///{args.store.resolve()}/mlflow.db")
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]))
    else:
        start()
