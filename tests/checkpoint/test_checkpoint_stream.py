"""Our streaming writer against the safetensors library's own reader."""

from __future__ import annotations

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from trainer.checkpoint.safetensors_stream import TensorType, TensorWriter, read_types
from trainer.errors import ConfigError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
NAMES = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=12).filter(
    "__metadata__".__ne__
)


@given(st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=5))
@settings(max_examples=80, deadline=None)
def test_the_library_reads_what_we_stream(
    announced: dict[str, tuple[tuple[int, ...], torch.dtype]],
) -> None:
    types = {name: TensorType(shape, dtype) for name, (shape, dtype) in announced.items()}
    tensors = {name: (torch.randn(kind.shape) * 3).to(kind.dtype) for name, kind in types.items()}
    with TemporaryDirectory() as folder:
        path = Path(folder, "t.safetensors")
        writer = TensorWriter(path, types)
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        record = writer.finish()
        content = path.read_bytes()
        assert (record.size, record.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert int.from_bytes(content[:8], "little") % 8 == 0
        assert read_types(path) == types
        with safe_open(path, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert set(opened.keys()) == set(types)
            for name, tensor in tensors.items():
                found = opened.get_tensor(name)
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(found, tensor)


def test_a_strided_gradient_carrying_tensor_is_converted(tmp_path: Path) -> None:
    source = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    writer = TensorWriter(tmp_path / "t", {"x": TensorType((3, 2), torch.bfloat16)})
    writer.write("x", source.T)
    writer.finish()
    with safe_open(tmp_path / "t", framework="pt") as opened:
        assert torch.equal(opened.get_tensor("x"), source.detach().T.bfloat16())


def test_what_was_not_announced_is_not_written(tmp_path: Path) -> None:
    writer = TensorWriter(tmp_path / "t", {"x": TensorType((2,), torch.float32)})
    with pytest.raises(ValueError, match=r"1 tensors were announced and not written"):
        writer.finish()
    with pytest.raises(ValueError, match=r"y \(2,\) came where x \(2,\) was announced"):
        writer.write("y", torch.zeros(2))


def test_a_dtype_without_a_name_in_the_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^x: a tensor of torch.complex64; expected one of torch.float64, "
    ):
        TensorWriter(tmp_path / "t", {"x": TensorType((1,), torch.complex64)})
    assert not (tmp_path / "t").exists()
