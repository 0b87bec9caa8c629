"""A GGUF file as a checkpoint."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from specdec.models.fingerprint import fingerprint_files
from specdec.models.gguf_file import GGUFFile
from specdec.models.gguf_source import GGUFSource
from specdec.models.gguf_tokenizer import convert_gguf_tokenizer
from specdec.models.model_config import ModelConfig
from specdec.models.tokenizer import Tokenizer
from specdec.models.tokenizer_cache import TokenizerCache


class GGUFCheckpoint:
    """The file at ``path``. ``sha256`` is its digest where that is known already (catalogue models)."""

    keeps_packed = True

    def __init__(self, path: Path, name: str | None = None, sha256: str | None = None) -> None:
        self.path = path
        self.name = name or path.stem
        self._sha256 = sha256

    @cached_property
    def _file(self) -> GGUFFile:
        return GGUFFile(self.path)  # opened only when a cache misses: parsing a large header takes a while

    def fingerprint(self) -> str:
        """The digest where known, else over the file's header, size and time."""
        return self._sha256 or fingerprint_files([self.path])

    def open(self) -> GGUFSource:
        """The tensors."""
        return GGUFSource(self._file)

    def tokenizer(self, cache_dir: Path, config: ModelConfig) -> Tokenizer:
        """The file's vocabulary, converted once and then read from the cache."""
        cache = TokenizerCache(cache_dir / "tokenizers")
        found = cache.read(self.fingerprint())
        if found is None:
            found = convert_gguf_tokenizer(self._file)
            cache.write(self.fingerprint(), *found)
        return Tokenizer(*found)
