"""Folders of the cache that another user made and keeps to itself, as with a umask of 077."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specdec.errors import ModelError
from specdec.models.catalogue import find_entry
from specdec.models.fetch import Fetcher
from specdec.models.gguf_tokenizer import TokenizerCache
from specdec.models.load import load_model
from specdec.models.pack import PackedCache
from specdec.models.resolve import HFCheckpoint
from specdec.models.tokenizer import TokenizerInfo


@contextmanager
def _unreadable(folder: Path) -> Iterator[None]:
    folder.chmod(0)
    user = os.geteuid()
    if user == 0:  # may read any folder
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o700)


def test_a_tokenizer_is_converted_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = TokenizerCache(tmp_path / "cache")
    cache.write("key", "{}", TokenizerInfo())
    with _unreadable(tmp_path / "cache"):
        assert cache.read("key") is None
    assert "cannot be used ([Errno 13] Permission denied" in caplog.text
    assert cache.read("key") == ("{}", TokenizerInfo())


def test_packed_weights_are_packed_again(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    cache = PackedCache(tmp_path / "packed", HFCheckpoint(tiny("llama")), "int8")
    load_model(str(tiny("llama")), dtype="int8", cache_dir=tmp_path)
    with _unreadable(tmp_path / "packed"):
        assert cache.open() is None
    assert cache.open() is not None


def test_a_model_is_not_fetched_into_it(tmp_path: Path) -> None:
    fetcher, entry = Fetcher(tmp_path / "models"), find_entry("smollm2-135m")
    (tmp_path / "models").mkdir()
    with _unreadable(tmp_path / "models"):
        assert not fetcher.is_complete(entry)
        with pytest.raises(ModelError, match="cannot be stored: Permission denied; choose another cache folder"):
            fetcher.fetch(entry)
