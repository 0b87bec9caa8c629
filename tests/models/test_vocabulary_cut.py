"""Draft models with a truncated output table: which tokens are kept, and that their rows equal those of the whole
table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.load import HostModel, load_model
from specdec.models.vocabulary_cut import CutSource, VocabularyCut, most_frequent, write_frequencies
from tests.models.tiny_gguf import Kind, write_tiny_gguf
from verify_kernels.packed_weights import embedding_rows, unpack_linear

Tiny = Callable[[str], Path]
ONE, OTHER = "ab" * 32, "cd" * 32


def test_the_most_frequent_tokens_are_kept(tmp_path: Path) -> None:
    write_frequencies(tmp_path / "one.bin", ONE, np.array([5, 0, 1000, 70, 70, 0, 9]))
    write_frequencies(tmp_path / "other.bin", OTHER, np.array([1, 2, 3]))

    def kept(count: int, size: int = 100, fingerprint: str = ONE) -> list[int] | None:
        cut = most_frequent(fingerprint, count, size, tmp_path)
        return None if cut is None else cut.ids.tolist()

    assert kept(1) == [2]
    assert kept(2) == [2, 3]  # the lower id of two as frequent
    assert kept(5) == [0, 2, 3, 4, 6]
    assert kept(6) == [0, 1, 2, 3, 4, 6]
    assert kept(2, size=2) is None  # no more of them than that
    assert kept(1, size=2) == [0]
    assert kept(7) is kept(0) is None
    assert kept(2, fingerprint=OTHER) == [1, 2]
    assert kept(2, fingerprint="ef" * 32) is None


def test_qwens_frequencies_are_available() -> None:
    """Its own digest, frequent words in front and the ends of answers always among them."""
    fingerprint = "c8c78da21f194c3006e25f8edb529784e810d3f45aee5c2a54b42f05eecfcfd8"
    cut = most_frequent(fingerprint, 1024, 151936)
    assert cut is not None
    assert len(cut.ids) == 1024
    assert {198, 220, 671, 707, 470, 151643, 151645, 151659} <= set(cut.ids.tolist())  # newline, def, return, ends


def cut_of(model: HostModel, *ids: int) -> VocabularyCut:
    return VocabularyCut(model.tokenizer.fingerprint, np.array(ids, np.int32))


@pytest.mark.parametrize("dtype", ["auto", "int3", "int4", "int8", "fp32"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3", "gguf"])
def test_rows_equal_those_of_the_whole_table(dtype: Any, family: str, tiny: Tiny, tmp_path: Path) -> None:
    ref = str(tiny("qwen2" if family == "gguf" else family))
    if family == "gguf":
        write_tiny_gguf(Path(ref), tmp_path / "tiny.gguf", Kind.Q5_0)
        ref = str(tmp_path / "tiny.gguf")
    whole = load_model(ref, dtype=dtype, cache_dir=tmp_path)
    cut = cut_of(whole, 1, 7, 40, 41, 199, 320)
    for _ in range(2):  # packed, and from the cache
        model = load_model(ref, dtype=dtype, cache_dir=tmp_path, cut=cut)
        assert model.weights.output_ids is not None
        assert model.weights.output_ids.tolist() == cut.ids.tolist()
        assert torch.equal(unpack_linear(model.weights.lm_head), unpack_linear(whole.weights.lm_head)[cut.ids])
        every = torch.arange(whole.config.vocab_size)
        assert torch.equal(embedding_rows(model.weights.embed, every), embedding_rows(whole.weights.embed, every))
        assert model.config.vocab_size == whole.config.vocab_size
    labels: set[str] = set()
    again = load_model(ref, dtype=dtype, cache_dir=tmp_path, progress=lambda label, *_: labels.add(label))
    assert {label.split()[0] for label in labels} == {"loading"}  # neither took the other's place
    assert again.weights.output_ids is None


def test_scattered_rows_are_read_in_small_ranges() -> None:
    """Ids of rare tokens are spread over the whole table, whose float32 copy would not fit in memory together with the
    weights."""
    read_rows: list[int] = []

    class Table:
        config, name = ModelConfig("llama", 150_000, 2, 1, 1, 1, 2, 2, 64, 1e-6, RopeConfig(1e4), 1.0), "m"

        def rows(self, role: str, low: int, high: int) -> torch.Tensor:
            read_rows.append(high - low)
            return torch.arange(low, high, dtype=torch.float32)[:, None].expand(-1, 2)

    ids = np.array([0, 3, *range(4000, 4200), 70_000, 90_000, 90_001, 149_999], np.int32)
    source = CutSource(Table(), ids)  # type: ignore[arg-type]
    assert source.rows("lm_head", 0, len(ids))[:, 1].tolist() == ids.tolist()
    assert source.rows("lm_head", 1, 3)[:, 0].tolist() == [3, 4000]
    assert source.rows("embed", 5, 9)[:, 0].tolist() == [5, 6, 7, 8]
    assert max(read_rows) <= 4096


def test_another_vocabulary_is_not_truncated(tiny: Tiny, tmp_path: Path) -> None:
    cut = VocabularyCut(ONE, np.array([1, 2], np.int32))
    model = load_model(str(tiny("qwen2")), dtype="int8", cache_dir=tmp_path, cut=cut)
    assert model.weights.output_ids is None
    assert model.weights.lm_head.n == model.config.vocab_size
