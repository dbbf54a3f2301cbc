"""Attention without masks: the choice, documents that stand alone, and no sequence x sequence.

No GPU is needed: PyTorch's operators run on the CPU by their definition, or on fake tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.support import varlen
from tests.support.data.packing import loss_alone, packed_samples
from tests.support.messages import shows, shows_each
from tests.support.models.masks import WINDOW, Waits, batch, tiny
from tests.support.training import task_of
from tests.support.varlen import on_cpu
from trainer.layout import Recompute
from trainer.parallel.recompute import activation_checkpointing as recompute
from trainer.tasks import attention, kernel_order, kernel_probes
from trainer.tasks.attention import Attention, CuSeqlens, documents_of
from trainer.tasks.patches import register_attention

windows = pytest.mark.skipif(
    "window_size" not in attention.VARLEN, reason="this PyTorch's varlen_attn has no windows"
)
KERNELS = [pytest.param("cu_seqlens", marks=windows), "blocks"]


@pytest.fixture(autouse=True)
def registered() -> None:
    """Most models here are run without `prepare`, which registers it."""
    register_attention(attention.attend)


# The choice

HALF, FULL, CPU = torch.bfloat16, torch.float32, torch.device("cpu")
PLAIN = Attention(128, 1, 0.0, frozenset({"causal", "window"}))
REFUSED = Attention(refusal="its own code")
TABLE: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "documents": ((PLAIN, "causal", HALF, 9), "cu_seqlens", ""),
    "windows": ((PLAIN, "window", torch.float16, 8), "cu_seqlens", ""),
    "chunks": ((PLAIN, "other", HALF, 9), "blocks", "neither causal nor a window"),
    "float32": ((PLAIN, "causal", FULL, 9), "blocks", "no float32"),
    "an old GPU": ((PLAIN, "causal", HALF, 7), "blocks", "compute capability 8.0"),
    "wide heads": ((PLAIN._replace(head_size=288), "causal", HALF, 9), "blocks", "heads of 288"),
    "odd heads": ((PLAIN._replace(head_size=84), "causal", HALF, 9), "blocks", "heads of 84"),
    "values": ((PLAIN._replace(head_size=0), "causal", HALF, 9), "blocks", "other heads than"),
    "own code": ((REFUSED, "causal", HALF, 9), "mask", "its own code"),
}


@pytest.fixture
def hopper(monkeypatch: Any) -> None:
    """Take the CPU for a GPU with Triton, all of whose kernels are right."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernel_probes, "has_triton", lambda: True)
    monkeypatch.setattr(kernel_probes, "fault_of", lambda *_: "")


@pytest.mark.parametrize("case", TABLE)
@windows
def test_the_kernel_of_a_mask_and_why_it_is_not_flash(
    case: str, hopper: None, monkeypatch: Any
) -> None:
    (model, pattern, dtype, generation), kernel, reason = TABLE[case]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 0))
    chosen, why = kernel_probes.tested(model, pattern, dtype, CPU)
    assert chosen == kernel and reason in why and bool(reason) == bool(why)
    monkeypatch.setattr(kernel_probes, "has_triton", lambda: False)
    chosen, why = kernel_probes.tested(model, pattern, dtype, CPU)
    assert chosen == ("mask" if kernel == "blocks" else kernel)
    assert ("no Triton" in why) == (kernel == "blocks")


@pytest.mark.more
def test_without_windows_in_varlen_there_are_blocks(hopper: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(kernel_probes, "VARLEN", frozenset({"is_causal"}))
    chosen, why = kernel_probes.tested(PLAIN, "causal", HALF, CPU)
    assert chosen == "blocks" and "no windows in varlen_attn" in why


def lines(name: str, monkeypatch: Any, takes: str, packed: bool = True, **more: Any) -> list[str]:
    spec, task, _ = tiny(name, **more)
    monkeypatch.setattr(kernel_probes, "prefer", lambda generation, dropout: ())
    choice = kernel_order.BACKENDS[takes].value
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *heads, **more: choice)
    result = task.attention()
    return list(kernel_probes.notes(result, spec, packed, HALF, torch.device("cpu")))


@pytest.mark.more
@windows
def test_the_lines_at_the_start(hopper: None, monkeypatch: Any) -> None:
    cu_seqlens = "flash attention by cu_seqlens"
    shows_each(
        lines("llama", monkeypatch, "cuDNN"),
        ("attention", "cuDNN"),
        ("packed documents", f"{cu_seqlens}"),
    )
    shows_each(lines("llama", monkeypatch, "flash", packed=False), "flash")
    shows_each(
        lines("mistral", monkeypatch, "flash", packed=False)[1:], f"window mask: {cu_seqlens}"
    )
    shows_each(
        lines("llama", monkeypatch, "efficient", packed=False, head_dim=12), ("efficient", "of 12")
    )
    shows_each(
        lines("llama", monkeypatch, "efficient", attention_dropout=0.5)[1:], ("nor flex", "of 0.5")
    )
    assert "heads than keys" in lines("deepseek_v3", monkeypatch, "cuDNN")[0]
    for name, reason in (("gemma2", "(eager) is not"), ("falcon", "layers need it (TypeError")):
        (line,) = lines(name, monkeypatch, "math")
        shows(line, "mask of sequence")
        assert reason in line


# The test of a kernel where it will run


FAULT_OF = kernel_probes.fault_of.__wrapped__


@pytest.fixture
def untested(hopper: None, monkeypatch: Any) -> None:
    """Forget earlier tests."""
    monkeypatch.setattr(kernel_probes, "fault_of", FAULT_OF)


DEEP = PLAIN._replace(head_size=0)
TESTED = [
    pytest.param(PLAIN, "causal", HALF, "cu_seqlens", marks=windows),
    pytest.param(PLAIN._replace(groups=3), "window", torch.float16, "cu_seqlens", marks=windows),
    (PLAIN._replace(groups=4, head_size=64), "window", FULL, "blocks"),
    pytest.param(PLAIN, "other", HALF, "blocks", marks=windows),
    (DEEP, "causal", HALF, "blocks"),
    (PLAIN._replace(sinks=True), "window", HALF, "blocks"),
]


@pytest.mark.first(
    "model0-causal-dtype0-cu_seqlens-rows", "model0-causal-dtype0-cu_seqlens-sections"
)
@pytest.mark.parametrize("divided", [False, True], ids=["rows", "sections"])
@pytest.mark.parametrize(("model", "pattern", "dtype", "kernel"), TESTED)
def test_a_right_kernel_passes_its_test(
    model: Attention, pattern: str, dtype: torch.dtype, kernel: str, divided: bool, untested: None
) -> None:
    with on_cpu(), torch.inference_mode(), torch.autocast("cpu", HALF):
        chosen, reason = kernel_probes.tested(model, pattern, dtype, CPU, divided)
        assert chosen == kernel and "failed" not in reason
        assert bool(reason) == (kernel == "blocks")


def whole(q: Any, k: Any, v: Any, cuts: Any, cuts_k: Any, *more: Any, **options: Any) -> Any:
    """Ignore the cu_seqlens within both rows."""
    ends = torch.tensor([0, len(q) // 2, len(q)], dtype=torch.int32)
    return varlen.varlen.varlen_attn(q, k, v, ends, ends, len(q), len(q), **options)


def wider(*given: Any, window_size: Any, **options: Any) -> Any:
    """See one token more than the window."""
    return varlen.varlen.varlen_attn(*given, window_size=(window_size[0] + 1, 0), **options)


def raises(*given: Any, **options: Any) -> Any:
    raise RuntimeError("no kernel image is available\nfor this device")


def unscaled(q: Any, k: Any, v: Any, *given: Any, **options: Any) -> Any:
    """Return the right values and half of the gradient of the keys."""
    half = k / 2 + k.detach() / 2
    return varlen.varlen.varlen_attn(q, half, v, *given, **options)


FAULTS = [
    (whole, "causal", "output differs by"),
    (wider, "window", "output differs by"),
    (raises, "causal", "RuntimeError: no kernel image is available"),
    (unscaled, "causal", "gradient of k differs by 0.5"),
]


@pytest.mark.first("whole-causal-output differs by")
@pytest.mark.parametrize(("kernel", "pattern", "reason"), FAULTS)
@windows
def test_a_wrong_kernel_is_replaced_and_the_line_says_why(
    kernel: Any, pattern: str, reason: str, untested: None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    with on_cpu():
        chosen, why = kernel_probes.tested(PLAIN, pattern, HALF, CPU)
        assert chosen == "blocks" and reason in why
        shows(why, "by cu_seqlens")
        assert "\n" not in why
        monkeypatch.setattr(attention, "flex_attention_forward", raises)
        chosen, both = kernel_probes.tested(PLAIN, pattern, HALF, CPU)
    assert chosen == "mask"
    shows(both, f"{why}", "flex attention")
    monkeypatch.setattr(kernel_probes, "has_triton", lambda: False)
    assert kernel_probes.tested(PLAIN, pattern, HALF, CPU)[0] == "mask"


def without_sinks(query: Any, key: Any, value: Any, mask: Any, options: Any) -> torch.Tensor:
    more = {**options, "s_aux": options["s_aux"] * 0 - 9}
    return SINKS(query, key, value, mask, more)


def half_of_sinks(query: Any, key: Any, value: Any, mask: Any, options: Any) -> torch.Tensor:
    """Return the right values and half of the gradient of the sinks."""
    sinks = options["s_aux"]
    more = {**options, "s_aux": sinks / 2 + sinks.detach() / 2}
    return SINKS(query, key, value, mask, more)


SINKS = attention._in_blocks_with_sinks


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [(without_sinks, "output"), (half_of_sinks, "sinks differs by 0.5")],
)
def test_a_kernel_that_is_wrong_with_sinks_is_replaced(
    kernel: Any, reason: str, untested: None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(attention, "_in_blocks_with_sinks", kernel)
    with on_cpu():
        chosen, why = kernel_probes.tested(PLAIN._replace(sinks=True), "causal", HALF, CPU)
    assert chosen == "mask" and reason in why and "no sinks" in why


def other_scale(*given: Any, scaling: float, **more: Any) -> Any:
    return attention.attend(*given, scaling=2 * scaling, **more)


def test_eager_attention_that_attend_computes_is_replaced_and_no_other(monkeypatch: Any) -> None:
    spec, task, _ = tiny("gpt_oss")
    assert task.attention().by_attend and task.attention().sinks
    own = replace(spec.language.attention, requested="eager")
    kept = replace(spec, language=replace(spec.language, attention=own))
    assert not task_of(kept).attention().by_attend
    monkeypatch.setattr(kernel_probes, "attend", other_scale)
    assert not task_of(spec).attention().by_attend
    assert not tiny("gemma2")[1].attention().by_attend  # its scores are capped


# Exactness


def by(kernel: str) -> Any:
    """Let each task compute its masks by this kernel."""
    chooser = "trainer.recipes.causal_lm.task.kernel_chooser"
    return patch(chooser, lambda *_: lambda *_: kernel)


def assert_alone(name: str, kernel: str, mode: str = "none") -> None:
    """Compare packed documents, of ragged sequences, with each document alone."""
    spec, task, model = tiny(name)
    own = tiny(name)[2]
    recompute.apply(model, spec, Recompute(mode))
    samples = packed_samples(0, 3)
    with on_cpu(), by(kernel):
        loss = task.loss_sum(model, task.collate(samples))
        loss.backward()
    alone = loss_alone(own, samples)
    alone.backward()
    torch.testing.assert_close(loss, alone, rtol=1e-5, atol=1e-5)
    for (key, mine), theirs in zip(model.named_parameters(), own.parameters(), strict=True):
        if theirs.grad is not None:
            assert (mine.grad - theirs.grad).abs().max() <= 1e-5 * theirs.grad.abs().max(), key


PACKED = ["llama", "qwen2", "mistral", "gemma3_text", "gpt2", "olmo3", "mixtral"]


@pytest.mark.first("llama-blocks", "qwen2-cu_seqlens")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", [*PACKED, "deepseek_v3", "llama4_text", "gpt_oss"])
def test_packed_documents_are_as_if_alone(name: str, kernel: str) -> None:
    if kernel == "cu_seqlens" and name not in PACKED:
        pytest.skip("its masks, or its values, are not for flash attention")
    assert_alone(name, kernel)


@pytest.mark.more
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_recomputed_block_uses_the_same_kernel(kernel: str, mode: str) -> None:
    assert_alone("mistral", kernel, mode)


@pytest.mark.more
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_windows_of_whole_rows_are_those_of_masks(name: str, kernel: str) -> None:
    losses = []
    inputs = batch(2 * WINDOW + 3, rows=3)
    for chosen in ("mask", kernel):
        _, task, model = tiny(name)
        with on_cpu(), by(chosen):
            loss = task.loss_sum(model, inputs)
            loss.backward()
        losses.append((loss, *(p.grad for p in model.parameters())))
    for mine, theirs in zip(*losses, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


# What is never made


class Squares(TorchDispatchMode):
    """The storages of tensors of sequence x sequence that operators write, by dtype."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.found = length, list[torch.dtype]()
        self.operators = list[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.operators.append(function._schema.name)
        for out in result if isinstance(result, tuple | list) else (result,):
            is_square = isinstance(out, torch.Tensor) and out.shape[-2:] == (self.length,) * 2
            if is_square and not any(given.alias_info for given in function._schema.returns):
                self.found.append(out.dtype)
        return result


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_on_the_cpu_all_layers_add_one_mask_which_is_kept_once(cast: Any) -> None:
    length, dtype = 37, cast or torch.float32
    _, task, model = tiny("llama", num_hidden_layers=5)
    inputs = {**batch(length), "documents": torch.tensor([[11, 20], [30, 0]])}
    kept: dict[int, torch.dtype] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (length, length):
            kept[tensor.untyped_storage().data_ptr()] = tensor.dtype
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", cast, enabled=cast is not None),
        Squares(length) as squares,
    ):
        task.loss_sum(model, inputs)
    assert squares.found.count(dtype) == 1 and list(kept.values()) == [dtype]
    assert set(squares.found) == {dtype, torch.bool}


@pytest.mark.first("qwen2")
@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral"])
@windows
def test_on_a_gpu_no_tensor_is_as_large_as_a_mask(name: str, monkeypatch: Any) -> None:
    length = 37
    spec, task, _ = tiny(name)
    assert task.attention().refusal == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernel_probes, "fault_of", lambda *_: "")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = task.prepare(spec.build())
        for module in model.modules():
            for store in (module._parameters, module._buffers):
                for key, value in [item for item in store.items() if item[1] is not None]:
                    dtype = HALF if value.is_floating_point() else value.dtype
                    made = torch.empty(value.shape, dtype=dtype, device="cuda")
                    store[key] = torch.nn.Parameter(made) if store is module._parameters else made
        inputs = {key: value.cuda() for key, value in batch(length).items()}
        inputs["documents"] = torch.tensor([[11, 20], [30, 0]]).cuda()
        with Squares(length) as squares, Waits() as waits:
            task.loss_sum(model, inputs)
    assert squares.found == []
    assert name == "mixtral" or waits.found == []
    assert squares.operators.count("torch_attn::_varlen_attn") == 2


# Graphs


@pytest.mark.more
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_compiled_block_is_one_graph(kernel: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    _, task, model = tiny("mistral")
    _, again, own = tiny("mistral")
    counter = CompileCounterWithBackend("aot_eager" if kernel == "cu_seqlens" else "eager")
    for block in model.model.layers:
        block.forward = torch.compile(block.forward, fullgraph=True, backend=counter)
    with on_cpu(), by(kernel):
        for step in range(2):
            inputs = task.collate(packed_samples(step, 3))
            loss = task.loss_sum(model, inputs)
            torch.testing.assert_close(loss, again.loss_sum(own, inputs))
    assert counter.frame_count <= 2  # of any length


def test_borders_are_those_of_rows_where_there_are_no_documents() -> None:
    _, task, model = tiny("mistral")
    actual: list[Any] = []

    def see(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
        actual.append(mask)
        return query.transpose(1, 2), None

    inputs, lengths = batch(12, rows=3), torch.tensor([[5, 4], [9, 0], [1, 2]])
    with patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, sdpa=see), by("cu_seqlens"):
        task.loss_sum(model, inputs)
        task.loss_sum(model, {**inputs, "documents": lengths})
    assert all(isinstance(mask, CuSeqlens) for mask in actual)
    assert [mask.cuts.tolist() for mask in actual[::2]] == [
        [0, 12, 24, 36],
        documents_of(lengths, 12).cu_seqlens.tolist(),
    ]
    assert {(mask.row, mask.window) for mask in actual} == {(12, WINDOW)}
