"""The cache of packed weights: the same bits back, or a rebuild."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import ModelError, UnsupportedModelError
from specdec.models import pack
from specdec.models.load import LoadedModel, load_model
from specdec.models.pack import PackedCache
from specdec.models.progress import silent
from specdec.models.resolve import HFCheckpoint
from specdec.models.weights import WeightsBuffer
from tests.models.tiny import make_tiny_model

Tiny = Callable[[str], Path]


def _tensors(value: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    if is_dataclass(value):
        items: Any = [(field.name, getattr(value, field.name)) for field in fields(value)]
    else:
        items = enumerate(value) if isinstance(value, list) else []
    return {name: tensor for key, inner in items for name, tensor in _tensors(inner, f"{prefix}.{key}").items()}


def _same(a: LoadedModel, b: LoadedModel) -> bool:
    ours, theirs = _tensors(a.weights), _tensors(b.weights)
    equal = all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs)
    return a.config == b.config and ours.keys() == theirs.keys() and equal


def _only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("dtype", ["int8", "bf16", "fp32"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_round_trip_is_bit_exact(dtype: Any, family: str, tiny: Tiny, tmp_path: Path) -> None:
    first_labels, second_labels = set(), set()
    folder = str(tiny(family))
    first = load_model(folder, dtype=dtype, cache_dir=tmp_path, progress=lambda label, *_: first_labels.add(label))
    second = load_model(folder, dtype=dtype, cache_dir=tmp_path, progress=lambda label, *_: second_labels.add(label))
    assert first_labels == {f"packing tiny-{family} ({dtype})"}
    assert second_labels == {f"loading tiny-{family}"}
    assert _same(first, second)


@pytest.mark.parametrize("width", [512, 15])
def test_heads_that_are_not_supported_are_refused_before_packing(width: int, tmp_path: Path) -> None:
    folder = str(make_tiny_model("qwen3", tmp_path / "m"))
    config = tmp_path / "m" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"head_dim": width}))
    with pytest.raises(UnsupportedModelError, match=f"heads of {width} .* heads must be even, at most 256 wide"):
        load_model(folder, dtype="fp32", cache_dir=tmp_path, progress=lambda *_: pytest.fail("packs it"))


@settings(max_examples=40)
@given(data=st.data())
def test_damage_anywhere_is_detected_and_repaired(data: st.DataObject, tiny: Tiny, tmp_path: Path) -> None:
    first = load_model(str(tiny("qwen2")), dtype="int8", cache_dir=tmp_path)
    path = _only(tmp_path / "packed")
    whole = path.read_bytes()
    header = int.from_bytes(whole[8:16], "little") + 48
    gap = range(header, -(-header // 4096) * 4096)  # padding between the header and the data holds nothing
    where = data.draw(st.one_of(st.integers(0, header), st.integers(0, len(whole) - 1)).filter(lambda i: i not in gap))
    if data.draw(st.booleans()):
        path.write_bytes(whole[:where])
    else:
        flipped = whole[where] ^ data.draw(st.integers(1, 255))
        path.write_bytes(whole[:where] + bytes([flipped]) + whole[where + 1 :])
    labels = set()
    again = load_model(str(tiny("qwen2")), dtype="int8", cache_dir=tmp_path, progress=lambda x, *_: labels.add(x))
    assert "packing tiny-qwen2 (int8)" in labels
    assert _same(first, again)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("chunk", [pack._CHUNK, 8192])
def test_swapped_pages_are_detected(chunk: int, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a chunk, and between two."""
    monkeypatch.setattr(pack, "_CHUNK", chunk)
    first = load_model(str(tiny("qwen2")), dtype="int8", cache_dir=tmp_path)
    path = _only(tmp_path / "packed")
    whole = path.read_bytes()
    pages = [whole[i : i + 4096] for i in range(0, len(whole), 4096)]
    pages[-2], pages[-4] = pages[-4], pages[-2]
    assert b"".join(pages) != whole
    path.write_bytes(b"".join(pages))
    again = load_model(str(tiny("qwen2")), dtype="int8", cache_dir=tmp_path)
    assert _same(first, again)
    assert path.read_bytes() == whole


def test_a_changed_model_is_packed_again_and_the_old_file_is_deleted(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "m", seed=1)
    first = load_model(str(folder), dtype="int8", cache_dir=tmp_path / "c")
    old = _only(tmp_path / "c" / "packed")
    make_tiny_model("llama", folder, seed=2)
    second = load_model(str(folder), dtype="int8", cache_dir=tmp_path / "c")
    assert not torch.equal(first.weights.lm_head.data, second.weights.lm_head.data)
    assert _only(tmp_path / "c" / "packed") != old
    load_model(str(folder), dtype="bf16", cache_dir=tmp_path / "c")
    assert len(list((tmp_path / "c" / "packed").iterdir())) == 2  # one per dtype


def test_the_file_of_another_model_is_not_used(tiny: Tiny, tmp_path: Path) -> None:
    caches = [PackedCache(tmp_path / "packed", HFCheckpoint(tiny(family)), "int8") for family in ("llama", "qwen2")]
    load_model(str(tiny("llama")), dtype="int8", cache_dir=tmp_path)
    os.rename(caches[0].path, caches[1].path)
    assert caches[1].open() is None
    assert not caches[1].path.exists()


def test_an_unwritable_cache_is_only_logged(tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    loaded = load_model(str(tiny("llama")), dtype="int8", cache_dir=tmp_path / "file")
    assert loaded.config.n_layers == 2
    assert "cannot be cached" in caplog.text


def test_a_damaged_file_that_cannot_be_deleted_is_only_logged(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder in its place, since root may delete any file."""
    PackedCache(tmp_path / "packed", HFCheckpoint(tiny("llama")), "int8").path.mkdir(parents=True)
    assert load_model(str(tiny("llama")), dtype="int8", cache_dir=tmp_path).config.n_layers == 2
    assert "packing again" in caplog.text


def test_only_what_a_killed_process_left_unfinished_is_deleted(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "packed" / "m-int8-0-0.packed.1.tmp"
    left.parent.mkdir()
    left.write_bytes(b"SPECDEC")
    begun = left.with_name("n-int8-0-0.packed.1.tmp")
    begun.touch()  # another process is about to lock it
    write = pack.write_packed

    def beside_another(file: BinaryIO, *args: Any) -> None:
        monkeypatch.setattr(pack, "write_packed", write)
        load_model(str(tiny("qwen2")), dtype="int8", cache_dir=tmp_path)
        assert not left.exists()
        write(file, *args)

    monkeypatch.setattr(pack, "write_packed", beside_another)
    load_model(str(tiny("llama")), dtype="int8", cache_dir=tmp_path)
    assert sorted(path.suffix for path in left.parent.iterdir()) == [".packed", ".packed", ".tmp"]
    assert begun.exists()


def test_two_containers_may_write_one_file_at_a_time(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their processes may have the same id."""
    write = pack.write_packed

    def beside_another(file: BinaryIO, *args: Any) -> None:
        monkeypatch.setattr(pack, "write_packed", write)
        file.write(b"begun")
        load_model(str(tiny("llama")), dtype="int8", cache_dir=tmp_path)
        file.seek(0)
        write(file, *args)

    monkeypatch.setattr(pack, "write_packed", beside_another)
    load_model(str(tiny("llama")), dtype="int8", cache_dir=tmp_path)
    cache = PackedCache(tmp_path / "packed", HFCheckpoint(tiny("llama")), "int8")
    file = cache.open()
    assert file is not None
    assert cache.read(file, silent) is not None
    assert not caplog.text
    assert _only(tmp_path / "packed") == cache.path


def test_views_share_one_aligned_buffer(tiny: Tiny, tmp_path: Path) -> None:
    weights = load_model(str(tiny("gemma3")), dtype="int8", cache_dir=tmp_path).weights
    tensors = _tensors(weights).values()
    assert len(tensors) > 20
    assert all(tensor.is_contiguous() and tensor.data_ptr() % 4096 == 0 for tensor in tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    file = PackedCache(tmp_path / "packed", HFCheckpoint(tiny("gemma3")), "int8").open()
    assert file is not None
    buffer = file.read(lambda count: None)
    assert isinstance(buffer, WeightsBuffer)
    assert len(buffer.layout) == len(tensors)


def test_insufficient_memory_is_reported_before_loading(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model(str(tiny("llama")), dtype="int8", cache_dir=tmp_path / "warm")
    monkeypatch.setattr("specdec.models.memory.available_bytes", lambda: 100 << 20)
    for cache in ("warm", "cold"):
        with pytest.raises(ModelError, match=r"tiny-llama: too little memory.*need 0\.3 GiB, 0\.1 GiB.*smaller model"):
            load_model(str(tiny("llama")), dtype="int8", cache_dir=tmp_path / cache)
    with pytest.raises(ModelError, match="use dtype int8 or a smaller model"):
        load_model(str(tiny("llama")), dtype="bf16", cache_dir=tmp_path)
