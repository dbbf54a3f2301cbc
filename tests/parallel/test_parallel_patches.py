"""PyTorch shows the symptoms for which modules are changed in place: one that fails can go."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from trainer.parallel import patches


def test_pytorchs_checkpoint_wrapper_renames_parameters():
    model = nn.Sequential(nn.Linear(2, 2))
    names = [name for name, _ in model.named_parameters()]
    block = model[0]
    patches.replace_forward(block, lambda given: nn.Linear.forward(block, given))
    model(torch.ones(1, 2))
    assert [name for name, _ in model.named_parameters()] == names
    model[0] = checkpoint_wrapper(model[0])
    assert [name for name, _ in model.named_parameters()] != names


def error_of_synchronised_batch_norm() -> str:
    """Runs on each rank."""
    plain = nn.Sequential(nn.BatchNorm1d(2))
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    assert synchronised[0].weight is plain[0].weight
    assert type(synchronised[0]) is nn.SyncBatchNorm
    with pytest.raises(ValueError) as caught:
        synchronised(torch.ones(2, 2))
    return str(caught.value)


def test_pytorchs_synchronised_batch_norm_is_another_module_and_for_gpus(pools):
    [error] = pools[1].run(error_of_synchronised_batch_norm)
    assert "expected input tensor to be on" in error


def test_a_norms_statistics_are_those_of_its_last_batch_by_its_momentum_alone():
    plain, last = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    patches.keep_last_statistics(last)
    batch = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    for norm in (plain, last):
        norm(batch)
    assert torch.equal(last.running_mean, batch.mean(0))
    assert not torch.equal(plain.running_mean, batch.mean(0))
