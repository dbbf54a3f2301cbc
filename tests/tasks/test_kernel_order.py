"""Which kernels SDPA may take on a GPU: rows without a mask cuDNN first, where it is sound, and
nothing with a mask cuDNN.

No GPU is needed: what counts is what SDPA is allowed at the moment of its call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

from tests.support.models.masks import tiny
from trainer.tasks import attention, kernel_order

CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
PLAIN = [FLASH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@pytest.fixture
def machine(monkeypatch: Any) -> Iterator[Any]:
    """`machine(generation, torch, cuDNN, installed, dropout)` sets the order of such a machine."""
    with sdpa_kernel([CUDNN, *PLAIN], set_priority=True), ExitStack() as kept:
        monkeypatch.setattr(kernel_order, "_KEPT", kept)
        monkeypatch.setattr(kernel_order, "_FIRST", [])

        def become(
            generation: int = 9,
            version: str = "2.15.0",
            cudnn: int = 92100,
            installed: tuple[str, ...] = (),
            dropout: float = 0.0,
        ) -> tuple[str, ...]:
            used = torch.torch_version.TorchVersion(version)
            monkeypatch.setattr(torch, "__version__", used)
            monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn or None)
            monkeypatch.setattr(kernel_order, "find_spec", lambda name: name in installed or None)
            flash = kernel_order.attention
            monkeypatch.setattr(flash, "list_flash_attention_impls", lambda: ["FA3", "FA4"])
            monkeypatch.setattr(flash, "activate_flash_attention_impl", lambda name: None)
            return kernel_order.prefer.__wrapped__(generation, dropout)

        yield become


@pytest.fixture
def calls(monkeypatch: Any) -> list[tuple[bool, int, list[SDPBackend]]]:
    """The calls of SDPA: with a mask or not, the length, and the kernels that it may take."""
    results: list[tuple[bool, int, list[SDPBackend]]] = []
    own = F.scaled_dot_product_attention

    def noted(query: Any, key: Any, value: Any, attn_mask: Any = None, **more: Any) -> Any:
        allowed = _cur_sdpa_kernel_backends(with_priority=True)
        results.append((attn_mask is not None, query.shape[2], allowed))
        return own(query, key, value, attn_mask=attn_mask, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    return results


def attend(length: int, mask: torch.Tensor | None = None, **more: Any) -> None:
    q, k, v = (torch.randn(1, 2, length, 8) for _ in range(3))
    attention.attend(torch.nn.Module(), q, k, v, mask, **more)


HOPPER = {
    "PyTorch 2.11 on Hopper": (dict(version="2.11.0"), True),
    "on Blackwell": (dict(generation=10), True),
    "before Hopper": (dict(generation=8), False),
    "PyTorch 2.10": (dict(version="2.10.1"), False),
    "a release candidate of 2.11": (dict(version="2.11.0a0+git"), False),
    "PyTorch 2.11 with the cuDNN of CUDA 12.6": (dict(version="2.11.0", cudnn=91002), False),
    "the first sound cuDNN": (dict(cudnn=91501), True),
    "the last unsound cuDNN": (dict(cudnn=91500), False),
    "no cuDNN": (dict(cudnn=0), False),
    "flash attention 3": (dict(installed=("flash_attn_interface",)), False),
    "flash attention 3 and dropout": (
        dict(installed=("flash_attn_interface",), dropout=0.1),
        True,
    ),
    "flash attention 4": (
        dict(generation=10, installed=("flash_attn", "flash_attn.cute")),
        False,
    ),
    "half of flash attention 4": (dict(generation=10, installed=("flash_attn",)), True),
}


@pytest.mark.parametrize("name", HOPPER)
@pytest.mark.parametrize("length", [128, 192, 261])
def test_cudnn_is_first_without_a_mask_where_it_is_sound_and_never_with_one(
    name: str, length: int, machine: Any, calls: list[Any]
) -> None:
    facts, with_cudnn = HOPPER[name]
    order = machine(**facts)
    assert order == (("cuDNN",) if with_cudnn else ()) + ("flash", "efficient", "math")
    causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    attend(length)
    attend(length, causal)
    attend(length, torch.where(causal, 0.0, -torch.inf))
    attend(length, position_bias=torch.zeros(1, 2, length, length))
    whole = [CUDNN, *PLAIN] if with_cudnn else PLAIN
    assert calls == [(False, length, whole), *[(True, length, PLAIN)] * 3]
    assert _cur_sdpa_kernel_backends(with_priority=True) == PLAIN  # for a model's own code


@pytest.mark.parametrize("name", ["llama", "mistral", "falcon"])
def test_no_layer_gives_cudnn_a_mask(name: str, machine: Any, calls: list[Any]) -> None:
    """Falcon's own code calls SDPA; windows are masks on a CPU."""
    machine()
    _, task, model = tiny(name)
    ids = torch.arange(1, 41).remainder(50)[None]
    for padded in (False, True):
        mask = torch.ones_like(ids)
        mask[:, -3:] = not padded
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    assert any(masked for masked, _, _ in calls)
    assert not any(masked and CUDNN in allowed for masked, _, allowed in calls)
    if name == "llama":
        assert any(not masked and allowed[0] is CUDNN for masked, _, allowed in calls)


def test_a_machine_without_an_order_keeps_pytorchs_own(calls: list[Any]) -> None:
    before = _cur_sdpa_kernel_backends(with_priority=True)
    attend(16)
    assert calls[0][2] == before
    assert isinstance(kernel_order.kernels_for(None), nullcontext)


def test_a_compiled_layer_has_cudnn_first_in_one_graph(machine: Any) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    machine()
    counter = CompileCounterWithBackend("eager")
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    layer = torch.nn.Module()
    torch.compile(attention.attend, backend=counter, fullgraph=True)(layer, q, k, v, None)
    assert counter.frame_count == 1 and "sdpa_kernel" in str(counter.graphs[0].code)
