"""The order in which SDPA tries its kernels on a GPU: cuDNN first for whole rows, never for a mask.

cuDNN before 9.15.1 reads beyond rows that are no multiple of 128 long (pytorch#169849; PyTorch 2.10
may ship it, and does not take it by itself), and its gradients of queries under a mask may be NaN
(pytorch#196678, rows of 64 modulo 128). A model's own code may hand SDPA any mask: so the process
has no cuDNN, and rows without a mask get it in a context of their own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from importlib.util import find_spec

import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PLAIN = ("flash", "efficient", "math")
"""The order with a mask, and before Hopper."""
SAFE_TORCH = "2.11"
SAFE_CUDNN = 91501
NEWER_FLASH = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute")}
"""By the GPU's generation: the flash attention that PyTorch can call, and its module."""
_KEPT = ExitStack()
_FIRST: list[SDPBackend] = []
"""The kernels of rows without a mask, if they are others than the process's."""


@cache
def prefer(generation: int, dropout: float) -> tuple[str, ...]:
    """Set the order in which SDPA tries its kernels in this process; return that of whole rows.

    A newer flash attention, which has no dropout, is used where it is installed.
    """
    name, module = NEWER_FLASH.get(generation, ("", ""))
    newer = name in attention.list_flash_attention_impls() and not dropout
    if newer := newer and bool(find_spec(module.partition(".")[0]) and find_spec(module)):
        attention.activate_flash_attention_impl(name)
    with_cudnn = generation >= 9 and not newer and _is_sound()
    order = ("cuDNN", *PLAIN) if with_cudnn else PLAIN
    _FIRST[:] = [BACKENDS[name] for name in order] if with_cudnn else []
    own = [BACKENDS[name] for name in PLAIN]
    _KEPT.enter_context(sdpa_kernel(own, set_priority=True))
    return order


def _is_sound() -> bool:
    """Return True if cuDNN computes rows of any length without a mask."""
    return torch.__version__ >= SAFE_TORCH and (torch.backends.cudnn.version() or 0) >= SAFE_CUDNN


def kernels_for(mask: object) -> AbstractContextManager[object]:
    """Return the context in which SDPA computes rows under a mask, or whole ones for None."""
    if mask is None and _FIRST:
        return sdpa_kernel(list(_FIRST), set_priority=True)
    return nullcontext()
