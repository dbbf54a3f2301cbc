"""Rung 12, SeqNet on FashionMNIST with DDP, logged to MLflow, as tutorials on data parallelism have it; and Meshloom's.

    pip install mlflow            # or mlflow-skinny with sqlalchemy and alembic
    python examples/ladder/12_mlflow.py --data DIR

A rank is started for each GPU (two on the CPU). Rank 0 alone logs to MLflow: the parameters, the loss of each epoch,
the accuracy on the test set, and the model, into a store of local files. The script then opens the model from there, in
another process, and compares its predictions. `meshloom.train` logs to the same store by `"trackers": ["mlflow"]`; its
`epoch_loss` is the loop's `loss`.

Three lines differ from such a tutorial's: a loss is the mean over all ranks (a tutorial prints rank 0's part), samples
come in Meshloom's order for seed 0, so that the losses can be compared, and the right answers are divided by their
number (a tutorial adds one to it). `ToTensor` divides the images by 255, so that `torch.div` does it a second time:
`04_seqnet.py` shows what that costs. torchvision looks for the images in DIR/FashionMNIST/raw, and puts them there. The
same by a JSON: `examples/fashion_mnist.json`.
"""

import argparse
import os
import tempfile
from pathlib import Path

import mlflow
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import FashionMNIST
from torchvision.transforms import Compose, ToTensor

import meshloom
from meshloom.data.order import KEYED, sample_ids

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="data")
for name, default in {"ranks": torch.cuda.device_count() or 2, "epochs": 10, "batch": 100}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
GPUS = torch.cuda.device_count() >= args.ranks


class SeqNet(nn.Module):
    def __init__(self, input_size, hidden_size1, hidden_size2, output_size):
        super().__init__()
        self.lin1 = nn.Linear(input_size, hidden_size1)
        self.lin2 = nn.Linear(hidden_size1, hidden_size2)
        self.lin3 = nn.Linear(hidden_size2, output_size)

    def forward(self, x):
        x = torch.flatten(x, 1)
        x = self.lin1(x)
        x = F.sigmoid(x)
        x = self.lin2(x)
        x = F.log_softmax(x, dim=1)
        return self.lin3(x)


def build():
    torch.manual_seed(0)
    return SeqNet(784, 200, 200, 10)


class InMeshloomsOrder(DistributedSampler):
    def __iter__(self):
        size = len(self.dataset)
        order = sample_ids(0, self.epoch * size, size, size, KEYED)
        return iter(order[self.rank :: self.num_replicas].tolist())


def train(model, data, ranks, rank, log):
    """Return the mean loss of the last epoch; `log` takes that of each."""
    device = next(model.parameters()).device
    sampler = InMeshloomsOrder(data, ranks, rank)
    loader = DataLoader(data, args.batch * args.ranks // ranks, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_function = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running_loss = torch.zeros((), device=device)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_function(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            running_loss += loss.detach()
        if ranks > 1:
            dist.all_reduce(running_loss)
        average_loss = running_loss.item() / len(loader) / ranks
        log(epoch, average_loss)
    return average_loss


@torch.no_grad()
def predictions(model, data):
    return torch.cat([model(images).argmax(1) for images, _ in DataLoader(data, args.batch)])


def main(rank, store, experiment):
    def log(epoch, loss):
        if rank == 0:
            mlflow.log_metric("loss", loss, step=epoch)
            print(f"Epoch [{epoch + 1}/{args.epochs}], Loss: {loss:.4f}", flush=True)

    data, test = images()
    device = f"cuda:{rank}" if GPUS else "cpu"
    backend = "nccl" if GPUS else "gloo"
    dist.init_process_group(backend, f"file://{store}/meeting", rank=rank, world_size=args.ranks)
    model = DDP(build().to(device))
    if rank == 0:
        mlflow.start_run(experiment_id=experiment)
        mlflow.log_params({"epochs": args.epochs, "lr": 0.01})
    train(model, data, args.ranks, rank, log)
    if rank == 0:
        trained = model.module.cpu().eval()
        found = predictions(trained, test)
        mlflow.log_metric("accuracy", (found == test.targets).float().mean().item())
        mlflow.pytorch.log_model(trained, name="model", serialization_format="pickle")
        torch.save(found, store / "predictions.pt")
        mlflow.end_run()
    dist.destroy_process_group()


def by_meshloom(data, test, store):
    config = {
        "train_batch_size": args.batch * args.ranks,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "trainer": {
            "epochs": args.epochs,
            "evaluation": {"samples": len(test)},
            "log": {"trackers": ["mlflow"]},
            "run": {"folder": str(store)},
        },
    }

    def loss_sum(outputs, labels):
        return F.cross_entropy(outputs, labels, reduction="sum"), len(labels)

    def right(outputs, labels):
        return (outputs.argmax(1) == labels).sum(), len(labels)

    own = {"model": build, "data": data, "evaluation_data": test, "loss": loss_sum}
    return meshloom.train(config, **own, metrics={"right": right}, processes=args.ranks, quiet=True)


def images():
    """Return the training and the test set, divided by 255 twice as in such tutorials."""
    transform = Compose([ToTensor(), lambda image: torch.div(image, 255.0)])
    train = FashionMNIST(args.data, train=True, download=True, transform=transform)
    return train, FashionMNIST(args.data, train=False, download=True, transform=transform)


if __name__ == "__main__":
    store = Path(tempfile.mkdtemp())
    data, test = images()
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{store}/mlflow.db"
    experiment = mlflow.create_experiment("ladder", (store / "files").as_uri())
    mp.spawn(main, (store, experiment), nprocs=args.ranks)
    by_meshloom(data, test, store)
    client = mlflow.MlflowClient()
    [theirs] = client.search_runs([experiment])
    [ours] = client.search_runs([client.get_experiment_by_name("meshloom").experiment_id])
    opened = mlflow.pytorch.load_model(f"runs:/{theirs.info.run_id}/model")
    same = torch.equal(predictions(opened, test), torch.load(store / "predictions.pt"))
    print(f"opened from MLflow, {theirs.data.params}: the same predictions: {same}")
    loss, own = theirs.data.metrics["loss"], ours.data.metrics["epoch_loss"]
    print(f"the loop: loss {loss:.6f}, accuracy {theirs.data.metrics['accuracy']:.2%}")
    print(f"Meshloom: loss {own:.6f}, accuracy {ours.data.metrics['evaluation_right']:.2%}")
    alone = train(build(), data, ranks=1, rank=0, log=lambda epoch, loss: None)
    furthest = max(abs(loss - alone), abs(own - alone))
    print(f"devices: {args.ranks} {'GPUs' if GPUS else 'ranks on the CPU'}")
    print(f"loss after {args.epochs} epochs {loss:.6f}, difference from one device {furthest:.1e}")
