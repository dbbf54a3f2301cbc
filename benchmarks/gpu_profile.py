"""A step's kernels in eight classes, for gpu.py: by their names, in ms of a step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu_bench import Bench

CLASSES = (
    "products",
    "attention",
    "loss",
    "norm and elementwise",
    "copies",
    "collectives",
    "optimizer",
    "other",
)
LOSS = r"amax.*(exp|log|gather)|logsumexp|log_softmax|softmax|nll_loss|cross_entropy"
ELEMENTWISE = "norm and elementwise"
COMPILED = r"^(triton|cpp)_(?!tem)"
"""The beginning of compiled kernels that are neither products nor attention by a template: their
names are of the operators that became one."""
OTHERS = (
    ("collectives", r"nccl|gloo|c10d"),
    ("attention", r"flash|fmha|sdpa|attention|compute_dot_do_o|convert_dq"),
    ("optimizer", r"adam|multi_tensor|_foreach_|lpnorm|^Optimizer"),
    (
        "products",
        r"gemm|nvjet|cutlass|cublas|splitk|gemv|triton_tem|(^|[_:])(mm|addmm|bmm|_scaled_mm)(_|$)",
    ),
    ("loss", LOSS),
    ("copies", r"memcpy|memset|copy|catarray|split_with_sizes|fill|aten::(cat|clone)$"),
    (ELEMENTWISE, r"elementwise|vectorized|reduce|norm|embedding|indexing|aten::(mul|add|silu)"),
)
"""Classes of the other kernels and, on a CPU, operators; the first that matches is taken."""
STEPS = 2
"""Steps that are recorded."""


def class_of(name: str) -> str:
    """Return the class of a kernel, or of an operator of a CPU, by its name.

    Compiled kernels come first: their names may have those of their neighbours, as of attention.
    The head's product is among the products, and the rest of the loss is the loss.
    """
    if re.search(COMPILED, name):
        return "loss" if re.search(LOSS, name) else ELEMENTWISE
    for kind, pattern in OTHERS:
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return "other"


def by_class(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the sums of the values, as ms, of kernels by class; each class is there."""
    totals = dict.fromkeys(CLASSES, 0.0)
    for name, value in kernels:
        totals[class_of(name)] += value
    return totals


def profiled(bench: Bench, step: Callable[[int], object]) -> dict[str, float]:
    """Return the ms of a step's kernels by class: on a CPU, of its operators by themselves.

    Kernels that overlap count each, so that the sum may be more than the step takes. Empty if the
    profiler may see none.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA][: bench.cuda]]
    with profile(activities=activities) as run:
        for index in range(STEPS):
            step(index)
        bench.wait()
    kind = DeviceType.CUDA if bench.cuda else DeviceType.CPU
    kernels = []
    for event in run.events() or ():
        if event.device_type == kind and not event.is_user_annotation:
            lasts = event.time_range.elapsed_us() if bench.cuda else event.self_cpu_time_total
            kernels.append((event.name, lasts / 1e3 / STEPS))
    return by_class(kernels) if kernels else {}
