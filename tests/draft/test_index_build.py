"""Which files an index includes, and which are read again in an update."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft.index_build import MAX_FILE_BYTES, BuildReport, IndexSources, build_index, find_files, suffix_array
from draft.token_index import TokenIndex
from specdec.errors import ConfigError
from specdec.models.tokenizer import Tokenizer, TokenizerInfo
from tests.models.tiny import make_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")).to_str(), TokenizerInfo())


def put(root: Path, *empty: str, **texts: str) -> None:
    """Write files below ``root``. ``texts`` maps further names, with `_` for a dot, to their content."""
    for name, text in {
        **dict.fromkeys(empty, "x"),
        **{name.replace("_", "."): text for name, text in texts.items()},
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(root: Path, *more: str, only: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> list[str]:
    roots = (str(root), *(str(root / name) for name in more))[bool(more) :]
    return [os.path.relpath(path, root) for path in find_files(IndexSources(roots, only, exclude))]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_suffixes_are_sorted(text: list[int]) -> None:
    assert suffix_array(np.array(text, np.uint32)).tolist() == sorted(range(len(text)), key=lambda i: text[i:])


def test_gitignore_is_honoured(tmp_path: Path) -> None:
    put(
        tmp_path, "a.py", "a.log", "keep.log", "build/x.py", "src/build/x.py", "src/a.txt", "src/secret.py", "secret.py"
    )
    put(tmp_path, _gitignore="*.log\n/build/\nsecret*\n!keep.log\n")
    put(tmp_path / "src", _gitignore="*.txt\n!secret.py\n")
    own = [".gitignore", "a.py", "keep.log", "src/.gitignore", "src/build/x.py", "src/secret.py"]
    assert names(tmp_path) == own


def test_gitignore_is_read_as_git_reads_it(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_bytes(b"\xef\xbb\xbfsecret.txt\n[z-a]\n!\nend\\\n*.log\n")
    put(tmp_path, "secret.txt", "a.log", "a.py")
    assert names(tmp_path) == [".gitignore", "a.py"]


@pytest.mark.parametrize(
    ("gitignore", "kept"),
    [
        ("*\n!*/\n!*.py\n", ["a.py", "build/keep.py", "build/x.py", "src/b.py", "src/deep/c.py"]),
        ("**\n!**/\n!b.py\n", ["src/b.py"]),
        ("build/**\n!build/keep.py\n*.txt\n.*\n", ["a.py", "build/keep.py", "src/b.py", "src/deep/c.py"]),
        ("/*\n!/src/\n*.txt\n", ["src/b.py", "src/deep/c.py"]),
    ],
)
def test_what_gitignore_takes_back_is_indexed(gitignore: str, kept: list[str], tmp_path: Path) -> None:
    files = ("a.py", "a.txt", "build/keep.py", "build/x.py", "src/b.py", "src/b.txt", "src/deep/c.py")
    put(tmp_path, *files, _gitignore=gitignore)
    assert names(tmp_path) == kept


def test_a_folder_that_gitignore_takes_back_brings_no_ignored_file(tmp_path: Path) -> None:
    put(tmp_path, "src/deep/a.py", "src/deep/secret", _gitignore="secret\n.*\n")
    put(tmp_path / "src", _gitignore="!*/\n!deep/\n")
    assert names(tmp_path) == ["src/deep/a.py"]


@pytest.mark.parametrize("pattern", ["!", "[z-a]"])
def test_a_malformed_pattern_is_reported(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--only {pattern!r}")):
        names(tmp_path, only=("*.py", pattern))
    with pytest.raises(ConfigError, match=re.escape(f"--exclude {pattern!r}")):
        names(tmp_path, exclude=(pattern,))


def test_a_folder_of_a_repository_follows_its_gitignore(tmp_path: Path) -> None:
    put(tmp_path, ".git/HEAD", "src/a.py", "src/a.log", "venv/lib/b.py", _gitignore="*.log\n/venv/\n")
    assert names(tmp_path, "src") == ["src/a.py"]
    assert names(tmp_path, "venv/lib") == ["venv/lib/b.py"]  # hidden as a whole, but requested by name
    assert names(tmp_path, "src/a.log") == ["src/a.log"]


def test_patterns_choose_files(tmp_path: Path) -> None:
    put(tmp_path, "a.py", "b.c", "test/a.py", "src/a.py", "src/b.c")
    assert names(tmp_path, only=("*.py",), exclude=("test/",)) == ["a.py", "src/a.py"]


def test_links_secrets_and_generated_files_are_skipped(tmp_path: Path) -> None:
    put(tmp_path, "a.py", ".env", "server.key", "node_modules/a.js", "__pycache__/b", ".git/HEAD")
    (tmp_path / "link.py").symlink_to(tmp_path / "a.py")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert names(tmp_path) == ["a.py"]


def test_patterns_apply_to_a_file_that_is_named(tmp_path: Path) -> None:
    put(tmp_path, "a.py", "b.py", "c.md", "id_rsa", "src/d.py", "src/server.pem", _gitignore="a.py\n")
    named = ("a.py", "b.py", "c.md", "id_rsa", "src/d.py", "src/server.pem")
    assert names(tmp_path, *named) == ["a.py", "b.py", "c.md", "src/d.py"]
    assert names(tmp_path, *named, only=("*.py",), exclude=("/b.py",)) == ["a.py", "src/d.py"]


def test_roots_that_are_gone_are_skipped(tmp_path: Path) -> None:
    put(tmp_path, "a.py", "src/b.py")
    assert names(tmp_path, "gone.py", "a.py", "src", "gone") == ["a.py", "src/b.py"]


def test_a_folder_that_is_deleted_meanwhile_is_skipped(tmp_path: Path) -> None:
    put(tmp_path, "a.py", "src/b.py", "z.py")
    found = find_files(IndexSources((str(tmp_path),)))
    assert next(found) == str(tmp_path / "a.py")
    shutil.rmtree(tmp_path / "src")
    assert list(found) == [str(tmp_path / "z.py")]


def build(folder: Path, tokenizer: Tokenizer, **how: tuple[str, ...]) -> BuildReport:
    path = folder / "out.index"
    former = TokenIndex(path) if path.exists() else None
    sources = IndexSources((str(folder / "src"),), **how)
    return build_index(path, sources, tokenizer, former, lambda label, done, total: None)


def texts(folder: Path, tokenizer: Tokenizer) -> dict[str, str]:
    index = TokenIndex(folder / "out.index")
    return {
        os.path.basename(file.path): tokenizer.decode(index.tokens[file.start : file.start + file.count].tolist())
        for file in index.files
    }


def test_only_changed_files_are_read_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    put(tmp_path / "src", a_py="x = 1\n", b_py="y = 2\n")
    first = build(tmp_path, tokenizer)
    assert (first.files, first.read, first.written) == (2, 2, True)
    again = build(tmp_path, tokenizer)
    assert (again.files, again.read, again.written, again.tokens) == (2, 0, False, first.tokens)
    put(tmp_path / "src", b_py="y = 3 + 4\n", c_py="z\n")
    (tmp_path / "src" / "a.py").rename(tmp_path / "src" / "d.py")
    third = build(tmp_path, tokenizer)
    assert (third.files, third.read, third.written) == (3, 3, True)
    assert texts(tmp_path, tokenizer) == {"b.py": "y = 3 + 4\n", "c.py": "z\n", "d.py": "x = 1\n"}
    put(tmp_path / "src", c_py="zz\n")
    assert build(tmp_path, tokenizer).read == 1
    assert texts(tmp_path, tokenizer) == {"b.py": "y = 3 + 4\n", "c.py": "zz\n", "d.py": "x = 1\n"}
    fewer = build(tmp_path, tokenizer, exclude=("c.*",))
    assert (fewer.files, fewer.read, fewer.written) == (2, 0, True)


def test_binary_files_are_skipped(tmp_path: Path, tokenizer: Tokenizer) -> None:
    put(tmp_path / "src", a_py="x\n", empty_py="", big_py="x" * (MAX_FILE_BYTES + 1))
    (tmp_path / "src" / "nul").write_bytes(b"a\0b")
    (tmp_path / "src" / "latin").write_bytes("é".encode("latin-1"))
    build(tmp_path, tokenizer)
    assert texts(tmp_path, tokenizer) == {"a.py": "x\n"}


def test_an_empty_index_is_reported(tmp_path: Path, tokenizer: Tokenizer) -> None:
    put(tmp_path / "src", _gitignore="*\n", a_py="x\n")
    with pytest.raises(ConfigError, match="no text to index: files must be UTF-8 of at most 1 MiB"):
        build(tmp_path, tokenizer)
    with pytest.raises(ConfigError, match="cannot be read"):
        list(find_files(IndexSources((str(tmp_path / "none"),))))
