"""Matches in an index file, and errors for a damaged one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft.index_build import suffix_array
from draft.token_index import MAGIC, MAX_CONTEXT_TOKENS, SAMPLES, IndexedFile, Span, TokenIndex, write_index
from specdec.errors import ConfigError

SEPARATOR = 10
texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4)


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("indexes")


def occurrences(files: list[list[int]], context: list[int]) -> list[int | None]:
    """Tokens that followed ``context`` at its occurrences; None: the end of a file."""
    n = len(context)
    return [
        file[at + n] if at + n < len(file) else None
        for file in files
        for at in range(len(file) - n + 1)
        if file[at : at + n] == context
    ]


def counts(index: TokenIndex, span: Span) -> dict[int, int]:
    return {token: count for token, count, _ in index.followers(*span[1:])}


@given(texts, st.lists(st.integers(0, 3), max_size=40))
def test_it_finds_what_followed_the_longest_suffix(folder: Path, files: list[list[int]], context: list[int]) -> None:
    index = TokenIndex(write(folder / "index", files))
    lengths = range(1, min(len(context), MAX_CONTEXT_TOKENS) + 1)
    longest = max((n for n in lengths if occurrences(files, context[-n:])), default=0)
    found = index.match(context)
    assert [span[3] for span in found[:1]] == ([longest] if longest else [])
    for span in found:
        length = span[3]
        followed = occurrences(files, context[-length:])
        assert span[2] - span[1] == len(followed)
        if len(followed) <= SAMPLES:
            expected = {token: followed.count(token) for token in followed if token is not None}
            assert counts(index, span) == expected
            for token, count, behind in index.followers(*span[1:]):
                deeper = occurrences(files, [*context[-length:], token])
                assert len(deeper) == count
                if len(deeper) <= SAMPLES:
                    assert sum(counts(index, behind).values()) == sum(token is not None for token in deeper)


def test_counts_of_a_common_context_are_estimated(tmp_path: Path) -> None:
    files = [[1, 2, 3]] * 300 + [[1, 2, 4]] * 90 + [[1, 2, 5]] * 2
    index = TokenIndex(write(tmp_path / "index", files))
    (span,) = index.match([9, 1, 2])
    found = counts(index, span)
    assert 260 < found[3] < 340
    assert 60 < found[4] < 120
    ((_, _, behind),) = [follower for follower in index.followers(*span[1:]) if follower[0] == 4]
    assert index.followers(*behind[1:]) == []  # narrowed to its own places, all of which end there


def test_tokens_beyond_the_vocabulary_are_unknown(tmp_path: Path) -> None:
    index = TokenIndex(write(tmp_path / "index", [[1, 2, 3]]))
    assert index.match([1, SEPARATOR]) == index.match([SEPARATOR + 5, 2]) == index.match([]) == index.match([4]) == []


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
