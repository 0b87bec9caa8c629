"""Contents of an index file, and errors for a damaged one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draft.index_build import suffix_array
from draft.token_index import MAGIC, IndexedFile, TokenIndex, write_index
from specdec.errors import ConfigError

SEPARATOR = 10


def write(path: Path, files: list[list[int]], separator: int = SEPARATOR, **header: Any) -> Path:
    """An index of ``files``, each a text of tokens below ``separator``."""
    tokens = np.array([token for file in files for token in (*file, separator)], np.uint32)
    start, rows = 0, []
    for number, file in enumerate(files):
        rows.append(IndexedFile(f"f{number}", len(file), 1, start, len(file)))
        start += len(file) + 1
    made_of: dict[str, Any] = {"fingerprint": "f", "separator": separator, "roots": ["/r"], "only": [], "exclude": []}
    write_index(path, made_of | header, tokens, suffix_array(tokens), rows)
    return path


def test_the_index_records_its_sources(tmp_path: Path) -> None:
    index = TokenIndex(write(tmp_path / "index", [[1, 2], [3]], only=["*.py"]))
    assert index.header.only == ("*.py",)
    assert index.header.roots == ("/r",)
    assert [file.count for file in index.files] == [2, 1]
    assert index.tokens.tolist() == [1, 2, SEPARATOR, 3, SEPARATOR]
    assert (tmp_path / "index").stat().st_mode & 0o77 == 0  # it contains the text of private files


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "cut short":
        del data[-3:]
    elif kind == "header cut":
        del data[len(MAGIC) + 3 :]
    elif kind == "text":
        data[len(data) // 2] ^= 1
    elif kind == "header":
        data[len(MAGIC) + 12] ^= 1
    elif kind == "foreign":
        data = bytearray(json.dumps([1, 2, 3]).encode())
    elif kind == "empty":
        data.clear()
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["cut short", "header cut", "text", "header", "foreign", "empty"])
def test_a_damaged_file_is_reported(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "index", [[1, 2, 3, 1, 2]])
    damage(path, kind)
    with pytest.raises(ConfigError, match=r"specdec index PATH") as error:
        TokenIndex(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; build it"):
        TokenIndex(tmp_path / "none")


def test_a_path_that_is_not_a_regular_file_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "index")
    with pytest.raises(ConfigError, match="is no regular file; delete it and build it again"):
        TokenIndex(tmp_path / "index")


def test_a_failed_write_keeps_the_former_index(tmp_path: Path) -> None:
    path = write(tmp_path / "index", [[1, 2, 3]])
    with pytest.raises(TypeError):
        write(path, [[4]], roots=object())
    assert TokenIndex(path).tokens.tolist() == [1, 2, 3, SEPARATOR]
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="cannot be written"):
        write(tmp_path / "no" / "index", [[1]])
