"""Counts how often a vocabulary's tokens occur in real code and text: `python -m tools.token_frequencies MODEL FILE`.

The texts are Python's standard library and the installed packages with their headers, scripts and documents, without
HumanEval.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specdec.config import EngineConfig
from specdec.models.resolve import load_tokenizer
from specdec.models.tokenizer import Tokenizer
from specdec.models.vocabulary_cut import write_frequencies

MEGABYTES = {".py": 16, ".h": 2, ".hpp": 2, ".js": 2, ".ts": 2, ".json": 1, ".md": 3, ".rst": 3, ".txt": 3}
FIRST_BYTES = 300  # ids that stand for single bytes or little more
LARGEST = 200_000  # bytes of a file: longer ones are data or generated


def texts() -> Iterator[str]:
    """Contents of files up to `MEGABYTES` of each kind, in an order that depends only on their names."""
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")}
    files = {file for folder in folders for file in folder.rglob("*") if file.suffix in MEGABYTES and file.is_file()}
    left = {suffix: size << 20 for suffix, size in MEGABYTES.items()}
    for file in sorted(files, key=lambda f: hashlib.sha256("/".join(f.parts[-4:]).encode()).digest()):
        if left[file.suffix] <= 0 or not 200 < file.stat().st_size < LARGEST or "human" in str(file).lower():
            continue
        text = file.read_text(encoding="utf-8", errors="ignore")
        left[file.suffix] -= len(text)
        yield text


def count(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Occurrences by token id."""
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for text in texts():
        counts += np.bincount(tokenizer.encode(text, add_special=False), minlength=len(counts))
    # These texts lack much of what people write. Ids of byte-pair merges are ordered by frequency in far more text, so
    # the same amount is added with frequencies by Zipf's law over the ids.
    zipf = 1.0 / (FIRST_BYTES + np.arange(len(counts)))
    counts += np.round(zipf * counts.sum() / zipf.sum()).astype(np.int64)
    counts[list(tokenizer.special_ids)] = counts.max()  # ends of answers, which do not occur in texts
    return counts


def main(model: str, file: str) -> None:
    """Write the frequencies of the tokens of ``model`` to ``file``."""
    tokenizer = load_tokenizer(model, EngineConfig().cache_dir)
    write_frequencies(Path(file), tokenizer.fingerprint, count(tokenizer))


if __name__ == "__main__":
    main(*sys.argv[1:])
