"""The GGUF reader: every quantisation type, and files that are damaged in every way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import ModelError
from specdec.models.gguf import SUPPORTED_TYPES, GGUFFile, half_split_order
from specdec.models.pack import pack_model
from tests.models.tiny import make_tiny_model
from tests.models.tiny_gguf import interleave, write_tiny_gguf

Tiny = Callable[[str], Path]


@pytest.mark.parametrize("kind", sorted(SUPPORTED_TYPES), ids=lambda kind: kind.name)
def test_every_type_dequantises_like_the_library(kind: Kind, tmp_path: Path) -> None:
    raw = _random_rows(kind, rows=10, columns=512)
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = gguf.GGUFReader(tmp_path / "m.gguf").tensors[0]
    expected = gguf.dequantize(tensor.data, kind).astype(np.float32)
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.tensors["w"].shape == (10, 512) == expected.shape
    assert np.isfinite(expected).all()
    for index in (slice(0, 10), slice(3, 7), np.array([9, 0, 4])):
        found = file.rows("w", index)
        assert found.dtype == np.float32
        assert np.array_equal(found, expected[index])


def test_the_types_of_common_downloads_are_supported() -> None:
    """Q2_K to Q6_K of llama.cpp's mixtures, and those of its files of two to four bits."""
    wanted = "Q2_K Q3_K Q4_K Q5_K Q6_K IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS Q4_0 Q8_0 F16 BF16"
    assert {Kind[name] for name in wanted.split()} <= SUPPORTED_TYPES


def test_half_split_order_undoes_the_interleaving() -> None:
    import torch

    weight = torch.randn(3 * 8, 5)
    assert torch.equal(interleave(weight, 3)[torch.from_numpy(half_split_order(3, 8))], weight)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a small GGUF file."""
    folder = tmp_path_factory.mktemp("small")
    hf = make_tiny_model("llama", folder / "hf", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    write_tiny_gguf(hf, folder / "m.gguf", Kind.Q8_0)
    return (folder / "m.gguf").read_bytes()


@given(data=st.data())
def test_a_file_truncated_anywhere_is_rejected(data: st.DataObject, small_file: bytes, tmp_path: Path) -> None:
    unpadded = len(small_file) - gguf.GGUF_DEFAULT_ALIGNMENT  # the end of the file may be padding
    keep = data.draw(st.integers(0, unpadded))
    path = tmp_path / "cut.gguf"
    path.write_bytes(small_file[:keep])
    with pytest.raises(ModelError) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


@given(data=st.data())
def test_damaged_headers_never_crash_the_reader(data: st.DataObject, small_file: bytes, tmp_path: Path) -> None:
    damaged = bytearray(small_file)
    for _ in range(data.draw(st.integers(1, 4))):
        # most of the header is the vocabulary: aim at the rest as often
        limit = data.draw(st.sampled_from([64, 1200, 12000]))
        damaged[data.draw(st.integers(0, limit - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(bytes(damaged))
    try:
        file = GGUFFile(path)
    except ModelError as error:
        assert str(path) in str(error)  # noqa: PT017 - both outcomes are right, a third is not
    else:
        assert all(tensor.offset + tensor.nbytes <= len(damaged) for tensor in file.tensors.values())


def test_other_files_are_rejected(tmp_path: Path, tiny: Tiny) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        GGUFFile(path)
    path.write_bytes(b"GGUF\x00\x00\x00\x03" + bytes(100))  # big-endian
    with pytest.raises(ModelError, match="big-endian byte order is not supported"):
        GGUFFile(path)
    with pytest.raises(ModelError, match="cannot be read"):
        GGUFFile(tmp_path / "absent.gguf")


def test_progress_reaches_the_end(tiny: Tiny, tmp_path: Path) -> None:
    from specdec.models.gguf import GGUFSource

    write_tiny_gguf(tiny("llama"), tmp_path / "m.gguf")
    reported: list[tuple[str, int, int]] = []
    pack_model(GGUFSource(GGUFFile(tmp_path / "m.gguf")), "int8", lambda *event: reported.append(event))
    assert {label for label, _, _ in reported} == {"packing m (int8)"}
    done = [count for _, count, _ in reported]
    assert done == sorted(done)
    assert done[-1] == reported[-1][2] > 0


def _random_rows(kind: Kind, rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng(int(kind))
    if kind in (Kind.F32, Kind.F16):
        return rng.standard_normal((rows, columns)).astype(np.float32 if kind == Kind.F32 else np.float16)
    if kind == Kind.BF16:
        return gguf.quantize(rng.standard_normal((rows, columns), dtype=np.float32), kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    two = {Kind.Q4_1: [0, 2], Kind.Q5_1: [0, 2], Kind.Q4_K: [0, 2], Kind.Q5_K: [0, 2], Kind.Q2_K: [80, 82]}
    scales = (two | {Kind.Q6_K: [208], Kind.Q3_K: [108]}).get(kind, [0])
    for at in scales:  # random bits could be NaN as a float16: these are the blocks' scales and offsets
        values = rng.uniform(-0.1, 0.1, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = values[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)
