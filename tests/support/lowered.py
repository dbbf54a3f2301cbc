"""What PyTorch's compiler makes of a function for a GPU that is not there; nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

H200 = {"major": 9, "minor": 0, "multi_processor_count": 132, "warp_size": 32}
H200 |= {"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048}
ANSWERS: dict[str, Any] = {
    "torch.cuda._get_device_properties": lambda *_: SimpleNamespace(**H200),
    "torch.cuda.get_device_properties": lambda *_: SimpleNamespace(name="H200", **H200),
    "torch.cuda.get_device_capability": lambda *_: (9, 0),
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.device_count": lambda: 1,
    "torch.cuda.current_device": lambda: 0,
    "torch.cuda._lazy_init": lambda: None,
    "torch.utils._triton.triton_hash_with_backend": lambda: "",
}
"""What a machine with an H200 says."""
GPU = "cuda:0"


class Kernel(NamedTuple):
    """What runs at once."""

    name: str
    """The function of a library, or "" for one that is generated."""
    size: int
    """The bytes of the tensors that it reads or writes, each tensor once."""


class Lowered(NamedTuple):
    """What the compiler would run."""

    kernels: list[Kernel]
    code: str
    """Their source, in Triton."""


def lowered(
    function: Callable[..., Any],
    inputs: Callable[[], tuple[torch.Tensor, ...]],
    device: str = GPU,
) -> Lowered:
    """Lower a function of tensors on a device, as `torch.compile` does.

    A tensor on a GPU gives PyTorch a device, even a fake one: call this in a process of its own.
    """
    from torch._inductor.decomposition import select_decomp_table

    with _pretended(device):
        with torch.device(device):
            tensors = inputs()
        pure = torch.func.functionalize(function)
        module = make_fx(pure, decomposition_table=select_decomp_table())(*tensors)
        return _lowered(module, tensors, is_inference=True)


def of_any_size(size: int) -> int:
    """Return a size that may be any in the lowered code, such as this one, to `inputs`."""
    from torch._dynamo.source import ConstantSource
    from torch._inductor.virtualized import V
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    shapes: Any = V.fake_mode.shape_env
    source = ConstantSource("size")
    symbol = shapes.create_symbol(
        size, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
    )
    return shapes.create_symintnode(symbol, hint=size, source=source)  # type: ignore[no-any-return]


def lowered_on_gpu(module: GraphModule, inputs: Sequence[object]) -> Lowered:
    """Lower a graph of tensors on the CPU as if they were on a GPU, as it is trained."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    def moved(value: Any) -> Any:
        return torch.device(GPU) if isinstance(value, torch.device) else value

    for node in module.graph.nodes:
        node.args = tuple(map(moved, node.args))
        node.kwargs = {key: moved(value) for key, value in node.kwargs.items()}
    module.recompile()
    with _pretended(GPU) as mode:
        tensors = [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)
            if isinstance(value, torch.Tensor)
            else value
            for value in inputs
        ]
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*tensors)
        return _lowered(module, tensors, is_inference=False)


@contextmanager
def _pretended(device: str) -> Iterator[FakeTensorMode]:
    """Have fake tensors alone, and a machine that answers as one with the device."""
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.virtualized import V
    from torch.utils._triton import has_triton

    has_triton.cache_clear()  # what was lowered before may have been for another device
    with ExitStack() as stack:
        for name, answer in ANSWERS.items() if device != "cpu" else ():
            stack.enter_context(patch(name, answer, create=True))
        stack.enter_context(patch("torch.compiler._is_compiling_flag", True))
        mode = stack.enter_context(FakeTensorMode(shape_env=ShapeEnv()))
        stack.enter_context(V.set_fake_mode(mode))
        yield mode
    DeviceProperties.create.cache_clear()


def _lowered(module: GraphModule, inputs: Sequence[object], is_inference: bool) -> Lowered:
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    post_grad_passes(module, is_inference=is_inference)
    shapes = V.fake_mode.shape_env
    graph = GraphLowering(
        module, example_inputs=inputs, shape_env=shapes, is_inference=is_inference
    )
    with DebugContext(), V.set_graph_handler(graph):
        graph.run(*inputs)
        code = graph.codegen()[0].value
        kernels = [
            Kernel(
                getattr(node.node, "python_kernel_name", None) or "",
                node.get_read_write_buffers_sizes(),
            )
            for node in graph.scheduler.nodes
        ]
    return Lowered([kernel for kernel in kernels if kernel.name or kernel.size], code)
