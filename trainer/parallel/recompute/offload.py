"""Activations kept in the host's memory between the forward and the backward pass."""

from __future__ import annotations

from functools import cache

import torch
from torch.autograd.graph import saved_tensors_hooks


def on_host() -> saved_tensors_hooks:
    """Return a context in which a forward pass keeps hidden states on the host for its backward.

    On a GPU they are copied to pinned memory on a stream of their own, beside the computation:
    `torch.autograd.graph.save_on_cpu` would wait for each copy.
    """
    return saved_tensors_hooks(_keep, _restore)


def _keep(tensor: torch.Tensor) -> object:
    """Return the copy on the host and its device; without gradient, what is saved is shared."""
    if not tensor.requires_grad:  # masks and position embeddings, the same for all blocks
        return tensor
    host = host_like(tensor)
    if not tensor.is_cuda:
        return tensor.device, host.copy_(tensor.detach())
    stream = _stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        host.copy_(tensor.detach(), non_blocking=True)
    tensor.record_stream(stream)
    return tensor.device, host


def _restore(kept: torch.Tensor | tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    device, host = kept
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device))
    return host.to(device, non_blocking=True)


def host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor of this shape on the host, pinned if `tensor` is on a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
