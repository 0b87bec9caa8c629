"""Builds index files: chooses the files of a folder, tokenises them and sorts their suffixes."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pathspec import GitIgnoreSpec

from draft.token_index import IndexedFile, TokenIndex, write_index
from specdec.errors import ConfigError
from specdec.models.progress import Progress
from specdec.models.tokenizer import Tokenizer

MAX_FILE_BYTES = 1 << 20  # bytes; larger files are data or generated
MAX_TOKENS = 500_000_000  # tokens; the suffix sort addresses their four bytes each with 32 bits
SECRETS = (".env", ".env.*", "*.pem", "*.key", "id_rsa", "id_ed25519")
_NOISE = (".git/", ".hg/", ".svn/", "__pycache__/", "node_modules/", ".venv/", *SECRETS)


@dataclass(frozen=True, slots=True)
class IndexSources:
    """The files of an index. Patterns are those of .gitignore."""

    roots: tuple[str, ...]  # folders or files
    only: tuple[str, ...] = ()  # patterns, one of which a file must match; empty: all files do
    exclude: tuple[str, ...] = ()  # patterns of files to leave out


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The result of a build."""

    files: int
    read: int  # files that were tokenised; the others were copied from the previous index
    tokens: int
    size: int  # bytes of the index
    written: bool  # False: the index was up to date


class _Ignored:
    """The .gitignore files from the top of a repository down to one folder; deeper files take precedence."""

    def __init__(self, specs: Seq[tuple[str, GitIgnoreSpec]] = ()) -> None:
        self._specs = specs

    def below(self, folder: str) -> _Ignored:
        """The same with the .gitignore file of ``folder``, if it has one.

        Raises:
            ConfigError: the file cannot be read.
        """
        file = Path(folder, ".gitignore")
        if not file.is_file():
            return self
        try:
            lines = file.read_text(encoding="utf-8-sig", errors="replace").splitlines()
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error})") from None
        # Git, too, ignores a malformed line and heeds the others.
        return _Ignored([(folder, GitIgnoreSpec.from_lines(filter(_is_pattern, lines))), *self._specs])

    def hides(self, path: str, *, folder: bool) -> bool:
        """Whether the file or folder at ``path`` is ignored; its parents are not."""
        for base, spec in self._specs:
            relative = os.path.relpath(path, base)
            for pattern in reversed(spec.patterns):
                if pattern.regex is not None and _names(pattern.regex, relative, folder=folder):
                    return bool(pattern.include)
        return False


def _names(pattern: re.Pattern[str], path: str, *, folder: bool) -> bool:
    """Whether ``pattern`` names ``path`` itself, as git asks at each folder on the way; pathspec asks the other
    question, whether it names that or any folder above.

    The group ``ps_d`` holds the slash behind a folder that the pattern names.
    """
    if not pattern.search(path + "/" * folder):  # most patterns, and one search takes a fraction of what follows
        return False
    if any(found.groupdict().get("ps_d") is None for found in pattern.finditer(path)):
        return True
    ends = (found.end("ps_d") for found in pattern.finditer(path + "/") if "ps_d" in found.groupdict())
    return folder and len(path) + 1 in ends


def _is_pattern(line: str) -> bool:
    try:
        GitIgnoreSpec.from_lines([line])
    except (ValueError, re.error):  # `!`, `[z-a]`
        return False
    return True


def find_files(sources: IndexSources) -> Iterator[str]:
    """Paths of the files of an index, in reproducible order. Links are not followed.

    Patterns apply to a root that is a file, too; .gitignore does not, since the user named the file. Missing roots are
    skipped, so that one deleted file does not end the updates, unless all are missing.

    Raises:
        ConfigError: all roots are missing, one cannot be listed, or a pattern is malformed.
    """
    for option, patterns in (("--only", sources.only), ("--exclude", sources.exclude)):
        for pattern in patterns:
            if not _is_pattern(pattern):
                raise ConfigError(f"{option} {pattern!r} is malformed; write it as a pattern in .gitignore")
    only = GitIgnoreSpec.from_lines(sources.only) if sources.only else None
    for root in list(filter(os.path.exists, sources.roots)) or sources.roots:
        is_file = os.path.isfile(root)
        base = os.path.dirname(root) if is_file else root
        noise = _Ignored([(base, GitIgnoreSpec.from_lines([*_NOISE, *sources.exclude]))])
        if is_file and noise.hides(root, folder=False):
            continue
        try:
            for path in [root] if is_file else _walk(root, _of_parents(root), noise):
                if only is None or only.match_file(os.path.relpath(path, base)):
                    yield path
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be read ({error.strerror})") from None


def _of_parents(root: str) -> _Ignored:
    """The .gitignore files above ``root`` in its repository.

    None of them if they ignore ``root`` itself, as a project's file does with its site-packages: the user named it.
    """
    up = [Path(root), *Path(root).parents]
    top = next((i for i, folder in enumerate(up) if (folder / ".git").exists()), 0)
    ignored = _Ignored()
    for parent, child in zip(up[top:0:-1], up[top - 1 :: -1], strict=False):
        ignored = ignored.below(str(parent))
        if ignored.hides(str(child), folder=True):
            return _Ignored()
    return ignored


def _walk(folder: str, above: _Ignored, noise: _Ignored) -> Iterator[str]:
    ignored = above.below(folder)
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        is_folder = entry.is_dir(follow_symlinks=False)
        if not is_folder and not entry.is_file(follow_symlinks=False):
            continue
        if noise.hides(entry.path, folder=is_folder) or ignored.hides(entry.path, folder=is_folder):
            continue
        if is_folder:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # deleted or replaced since it was listed
                yield from _walk(entry.path, ignored, noise)
        else:
            yield entry.path


def build_index(
    path: Path, sources: IndexSources, tokenizer: Tokenizer, former: TokenIndex | None, progress: Progress
) -> BuildReport:
    """Write the index of ``sources`` to ``path``.

    former: the previous index. If it has the same vocabulary, files of unchanged size and time are copied from it; if
    no file changed, nothing is written.

    Raises:
        ConfigError: there is no text or too much, or a file cannot be read or written.
    """
    if former is not None and former.header.fingerprint != tokenizer.fingerprint:
        former = None
    text = _Text(tokenizer, former)
    paths = list(dict.fromkeys(find_files(sources)))  # roots may overlap
    for done, each in enumerate(paths):
        progress("reading files", done, len(paths))
        text.add(each)
    progress("reading files", len(paths), len(paths))
    if not text.files:
        raise ConfigError(
            f"{', '.join(sources.roots)}: no text to index: files must be UTF-8 of at most {MAX_FILE_BYTES >> 20} MiB, "
            "and patterns may leave them out"
        )
    if former is not None and former.path == path and former.files == text.files:
        header = former.header
        if sources == IndexSources(header.roots, header.only, header.exclude):
            return BuildReport(len(text.files), 0, text.size, path.stat().st_size, written=False)
    progress("sorting", 0, 1)
    size = _write(path, sources, tokenizer, text.parts, text.files)
    progress("sorting", 1, 1)
    return BuildReport(len(text.files), text.n_read, text.size, size, written=True)


def index_texts(path: Path, texts: Iterable[np.ndarray], tokenizer: Tokenizer) -> int:
    """Write the index of ``texts`` ([tokens] each), which are no files, to ``path``; returns its size in bytes.

    Raises:
        ConfigError: the file cannot be written.
    """
    end = np.array([tokenizer.vocab_size], np.uint32)
    return _write(path, IndexSources(()), tokenizer, [part for text in texts for part in (text, end)], [])


def _write(
    path: Path, sources: IndexSources, tokenizer: Tokenizer, parts: Seq[np.ndarray], files: Seq[IndexedFile]
) -> int:
    tokens = np.concatenate(parts).astype(np.uint32)
    made_of = {
        "fingerprint": tokenizer.fingerprint, "separator": tokenizer.vocab_size,
        "roots": sources.roots, "only": sources.only, "exclude": sources.exclude,
    }  # fmt: skip
    return write_index(path, made_of, tokens, suffix_array(tokens), files)


class _Text:
    """The text of an index under construction."""

    def __init__(self, tokenizer: Tokenizer, former: TokenIndex | None) -> None:
        self._tokenizer, self._former = tokenizer, former
        self._known = {file.path: file for file in former.files} if former else {}
        self._separator = np.array([tokenizer.vocab_size], np.uint32)
        self.parts: list[np.ndarray] = []  # uint32: the tokens of a file, a separator, and so on
        self.files: list[IndexedFile] = []
        self.size = 0  # tokens
        self.n_read = 0  # files that were tokenised

    def add(self, path: str) -> None:
        """Append a file unless it is no text.

        Raises:
            ConfigError: the file cannot be read, or the text exceeds `MAX_TOKENS`.
        """
        try:
            found = os.stat(path)
            if not 0 < found.st_size <= MAX_FILE_BYTES:
                return
            tokens = self._kept(path, found)
            if tokens is None:
                data = Path(path).read_bytes()
                if b"\0" in data:
                    return
                tokens = np.array(self._tokenizer.encode(data.decode(), add_special=False), np.uint32)
                self.n_read += 1
        except (UnicodeDecodeError, FileNotFoundError):
            return  # another encoding or no text, or deleted since it was listed
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror})") from None
        self.files.append(IndexedFile(path, found.st_size, found.st_mtime_ns, self.size, len(tokens)))
        self.parts += [tokens, self._separator]
        self.size += len(tokens) + 1
        if self.size > MAX_TOKENS:
            raise ConfigError(f"more than {MAX_TOKENS} tokens; index fewer files, or build several indexes")

    def _kept(self, path: str, found: os.stat_result) -> np.ndarray | None:
        """The file's tokens in the previous index; None if it changed since."""
        known = self._known.get(path)
        if self._former is None or known is None or (known.size, known.mtime_ns) != (found.st_size, found.st_mtime_ns):
            return None
        return self._former.tokens[known.start : known.start + known.count].astype(np.uint32)


def suffix_array(tokens: np.ndarray) -> np.ndarray:
    """Start positions of the sorted suffixes of ``tokens`` (uint32 [n]), uint32 [n]."""
    from pydivsufsort import divsufsort

    return divsufsort(tokens).astype(np.uint32)
