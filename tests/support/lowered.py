"""What PyTorch's compiler makes of a function for a GPU that is not there; nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

H200 = {"major": 9, "minor": 0, "multi_processor_count": 132, "warp_size": 32}
H200 |= {"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048}
ANSWERS: dict[str, Any] = {
    "torch.cuda._get_device_properties": lambda *_: SimpleNamespace(**H200),
    "torch.cuda.get_device_properties": lambda *_: SimpleNamespace(**H200),
    "torch.cuda.get_device_capability": lambda *_: (9, 0),
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.device_count": lambda: 1,
    "torch.cuda.current_device": lambda: 0,
    "torch.cuda._lazy_init": lambda: None,
    "torch.utils._triton.triton_hash_with_backend": lambda: "",
}
"""What a machine with an H200 says."""


class Lowered(NamedTuple):
    """What the compiler would run."""

    kernels: list[int]
    """The bytes of the tensors that each kernel reads or writes: each tensor once a kernel."""
    code: str
    """Their source, in Triton."""


def lowered(
    function: Callable[..., Any],
    inputs: Callable[[], tuple[torch.Tensor, ...]],
    device: str = "cuda:0",
) -> Lowered:
    """Lower a function of tensors on a device, as `torch.compile` does.

    Matrix products on a GPU need its driver: their order can be seen on the CPU. A tensor on a GPU
    gives PyTorch a device, even a fake one: call this in a process of its own.
    """
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.virtualized import V
    from torch.utils._triton import has_triton

    has_triton.cache_clear()  # what was lowered before may have been for another device
    with ExitStack() as stack:
        for name, answer in ANSWERS.items() if device != "cpu" else ():
            stack.enter_context(patch(name, answer, create=True))
        stack.enter_context(patch("torch.compiler._is_compiling_flag", True))
        mode = stack.enter_context(FakeTensorMode())
        stack.enter_context(torch.device(device))
        tensors = inputs()
        pure = torch.func.functionalize(function)
        module = make_fx(pure, decomposition_table=select_decomp_table())(*tensors)
        stack.enter_context(V.set_fake_mode(mode))
        post_grad_passes(module, is_inference=True)
        graph = GraphLowering(module, example_inputs=tensors, is_inference=True)
        stack.enter_context(DebugContext())
        stack.enter_context(V.set_graph_handler(graph))
        graph.run(*tensors)
        code = graph.codegen()[0].value
        kernels = [node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes]
    DeviceProperties.create.cache_clear()
    return Lowered(kernels, code)
