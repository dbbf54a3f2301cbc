"""The chunked loss against PyTorch's own, in value and in every gradient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.tasks.losses import chunks, cross_entropy
from trainer.tasks.losses.cross_entropy import (
    LossHead,
    LossOptions,
    linear_cross_entropy,
    logits_cross_entropy,
)


def plain(hidden, weight, bias, targets):
    return F.cross_entropy(
        F.linear(hidden, weight, bias).float(), targets, reduction="sum", ignore_index=-100
    )


def inputs(tokens=13, width=8, vocabulary=17, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    bias = torch.randn(vocabulary, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    targets[::3] = -100
    return hidden, weight, bias, targets


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(1, 40),
    vocabulary=st.integers(2, 30),
    rows=st.integers(1, 9),
    with_bias=st.booleans(),
)
def test_equals_pytorch_whatever_the_chunks(tokens, vocabulary, rows, with_bias):
    hidden, weight, bias, targets = inputs(tokens, 8, vocabulary)
    bias = bias if with_bias else None
    wanted = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", rows * vocabulary * 8)
        loss = linear_cross_entropy(hidden, weight, bias, targets)
    reference = F.cross_entropy(
        F.linear(hidden, weight, bias), targets, reduction="sum", ignore_index=-100
    )
    torch.testing.assert_close(loss, reference)
    for mine, theirs in zip(
        torch.autograd.grad(loss * 3, wanted),
        torch.autograd.grad(reference * 3, wanted),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_the_gradient_is_the_derivative(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3 * 17 * 8)
    hidden, weight, bias, targets = inputs()
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy(h, w, b, targets), (hidden, weight, bias)
    )
    logits = torch.randn(7, 11, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: logits_cross_entropy(x, torch.arange(7)), logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_once(dtype):
    hidden, weight, _, targets = inputs(64, 32, 50, dtype=torch.float32)
    low = [tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, weight)]
    loss = linear_cross_entropy(low[0], low[1], None, targets)
    exact = [tensor.detach().double().requires_grad_() for tensor in low]
    reference = F.cross_entropy(F.linear(*exact), targets, reduction="sum", ignore_index=-100)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(reference), rel=3e-3)
    for mine, theirs in zip(
        torch.autograd.grad(loss, low), torch.autograd.grad(reference, exact), strict=True
    ):
        assert mine.dtype == dtype
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 0.01


def test_nothing_is_counted_where_there_is_no_target():
    hidden, weight, bias, targets = inputs()
    loss = linear_cross_entropy(hidden, weight, bias, torch.full_like(targets, -100))
    assert float(loss) == 0
    assert all(float(g.abs().max()) == 0 for g in torch.autograd.grad(loss, (hidden, weight, bias)))


def test_all_logits_are_never_whole(monkeypatch):
    """No tensor of [tokens, vocabulary] is made, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    monkeypatch.setattr(chunks, "CHUNK_BYTES", 10 * 300 * 4)
    hidden, weight, _, targets = inputs(200, 16, 300, dtype=torch.float32)
    with Watch():
        linear_cross_entropy(hidden, weight, None, targets).backward()
    assert largest == weight.numel()  # 4,800; the logits would be 60,000
    with Watch():
        plain(hidden, weight, None, targets)
    assert largest == 200 * 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_gradient_is_the_same_in_any_chunks(dtype, monkeypatch):
    """Of a low dtype, too: it is rounded once, at the end."""
    gradients = []
    for count in (1, 5):
        hidden, weight, _, targets = inputs(200, 16, 300, dtype=dtype)
        monkeypatch.setattr(chunks, "CHUNK_BYTES", 200 // count * 300 * 4)
        loss = linear_cross_entropy(hidden, weight, None, targets)
        gradients.append(torch.autograd.grad(loss, weight)[0])
    torch.testing.assert_close(
        *gradients, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-5
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_makes_nothing_of_the_weights_size_and_few_of_its_own(device, dtype, monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    made: list[tuple[int, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            is_new = not any(given.alias_info for given in function._schema.returns)
            if is_new and torch.is_tensor(result):
                made.append(tuple(result.shape))
            return result

    is_low = dtype != torch.float32
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 40 * 300 * 4)
    with FakeTensorMode(), torch.device(device):
        hidden, weight = torch.empty(200, 16, dtype=dtype), torch.empty(300, 16, dtype=dtype)
        targets = torch.zeros(200, dtype=torch.int64)
        # autograd would look for the GPU of fake tensors
        context = SimpleNamespace(
            needs_input_grad=(True, True, False), save_for_backward=lambda *_: None
        )
        options = cross_entropy._NoTensors(LossOptions(), with_gradients=True, shard=None)
        with Watch():
            inputs = hidden, weight, None, targets, options
            cross_entropy._CrossEntropy.forward(context, *inputs)
    assert made.count((300, 16)) == 1 + is_low  # the sum in float32, and what is rounded of it
    # the logits, in float32, too, and their gradient; a processor multiplies in float32
    each = 3 + (device == "cpu") if is_low else 1
    assert made.count((40, 300)) + made.count((300, 40)) == 5 * each


def test_no_gradient_is_made_without_need():
    hidden, weight, bias, targets = inputs()
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, bias, targets).requires_grad
    weight.requires_grad_(False)
    loss = linear_cross_entropy(hidden, weight, None, targets)
    assert loss.grad_fn.saved_tensors[1] is None
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert gradient.shape == hidden.shape


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_with_the_loss_has_the_names_and_parameters_of_the_models_own(tied):
    from tests.support.training import LLAMA, spec_of, task_of

    spec = spec_of(LLAMA | {"tie_word_embeddings": tied})
    plain, model = spec.build(), spec.build()
    own = dict(model.named_parameters(remove_duplicate=False))
    model = task_of(spec).prepare(model)
    head = model.get_output_embeddings()
    assert type(head) is LossHead and isinstance(head, torch.nn.Linear)
    assert [name for name, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    results = dict(model.named_parameters(remove_duplicate=False))
    assert list(results) == list(own) and all(results[name] is own[name] for name in own)
    assert (head.weight is model.get_input_embeddings().weight) is tied


def test_a_model_may_have_its_head_under_any_name_and_no_way_to_set_it():
    from tests.support.training import LLAMA, spec_of, task_of

    spec = spec_of(LLAMA)
    model = spec.build()
    model.also = model.output = model.lm_head  # as families of the hub do, whose code comes along
    del model.lm_head
    model.get_output_embeddings = lambda: model.output
    model.output.register_forward_hook(lambda *_: None)
    own = vars(model.output).copy()
    head = task_of(spec).prepare(model).get_output_embeddings()
    assert type(head) is LossHead and head is model.also
    assert all(vars(head)[name] is value for name, value in own.items())


def test_targets_are_given_for_one_forward_pass():
    hidden, weight, _, targets = inputs(dtype=torch.float32)
    own = torch.nn.Linear(8, 17, bias=False)
    own.weight = torch.nn.Parameter(weight.detach())
    head = LossHead(own, LossOptions())
    with pytest.raises(RuntimeError), head.given(targets):
        torch.testing.assert_close(head(hidden), plain(hidden, weight, None, targets))
        raise RuntimeError
    assert head(hidden).shape == (13, 17)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_a_frozen_head_has_smaller_chunks(frozen):
    """The weight's gradient, which each chunk passes over, is what large chunks are for."""
    hidden = torch.empty(4096, 4096, device="meta")
    weight = torch.empty(128_256, 4096, device="meta", requires_grad=not frozen)
    rows = chunks.product_chunks(hidden, weight, None, torch.float32)
    assert [one.stop - one.start for one in rows] == ([512] * 8 if frozen else [2048] * 2)


@pytest.mark.parametrize(("held", "expected"), [(None, 1024), (8, 1024), (4, 2048)])
def test_a_chunk_has_the_tokens_that_its_memory_has_room_for(held, expected):
    hidden = torch.empty(8192, 2048, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(128_256, 2048, dtype=torch.bfloat16, device="meta", requires_grad=True)
    first = chunks.product_chunks(hidden, weight, None, torch.float32, held)[0]
    assert first.stop - first.start == expected


@pytest.mark.parametrize("with_bias", [True, False])
def test_compiled_chunks_have_more_tokens(with_bias, monkeypatch):
    """A trained bias needs the gradient in float32."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 10 * 50 * 4)
    made = []

    def compiled(logits, targets, dtype, *more):
        made.append((len(logits), logits.dtype, dtype))
        return cross_entropy.chunk_loss(logits, targets, dtype, *more)

    hidden, weight, bias, targets = inputs(160, 16, 50, dtype=torch.bfloat16)
    options = LossOptions(chunk_loss=compiled)
    linear_cross_entropy(hidden, weight, bias if with_bias else None, targets, options)
    low = torch.bfloat16
    expected = (10, low, torch.float32) if with_bias else (20, low, low)
    assert made == [expected] * (160 // expected[0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_compiled_gives_the_same_and_leaves_the_logits(dtype, smoothing, monkeypatch):
    torch.manual_seed(0)
    logits = torch.randn(7, 11, dtype=dtype)
    logits[1, 3:] = logits[2] = -torch.inf
    targets = torch.tensor([4, 2, 3, -100, 0, 10, 7])
    inputs = logits.clone(), targets, dtype, smoothing
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        compiled = cross_entropy.chunk_loss(*inputs)
    torch.testing.assert_close(inputs[0], logits, rtol=0, atol=0)
    plain = cross_entropy.chunk_loss(*inputs)
    torch.testing.assert_close(compiled, plain, rtol=0, atol=0, equal_nan=True)
    gradient = compiled[1]
    assert gradient.dtype == dtype
    assert gradient.isfinite().all(1).tolist() == [True, True, False, True, True, True, True]
