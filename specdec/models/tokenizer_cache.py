"""Keeps converted tokenizers on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from specdec.models.tokenizer_info import TokenizerInfo

logger = logging.getLogger(__name__)

_FORMAT = 1  # raise when conversion changes, so that what older versions made is not used


class TokenizerCache:
    """One folder per tokenizer: ``tokenizer.json``, and ``info.json`` with its digest and `TokenizerInfo`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, key: str) -> tuple[str, TokenizerInfo] | None:
        """The tokenizer cached under ``key``, or None when there is none or it is damaged."""
        place = self._place(key)
        if not place.exists():
            return None
        try:
            data = json.loads((place / "info.json").read_text(encoding="utf-8"))
            raw = (place / "tokenizer.json").read_bytes()
            if hashlib.sha256(raw).hexdigest() != data["sha256"]:
                raise ValueError("digest differs")
            info = TokenizerInfo(**data["info"] | {"eos_ids": tuple(data["info"]["eos_ids"])})
            return raw.decode("utf-8"), info
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s: cached tokenizer is damaged (%s), converting again", place, error)
            shutil.rmtree(place, ignore_errors=True)
            return None

    def write(self, key: str, serialised: str, info: TokenizerInfo) -> None:
        """Keep a tokenizer; a failure to do so is logged, since the model runs without it."""
        raw = serialised.encode("utf-8")
        data = {"sha256": hashlib.sha256(raw).hexdigest(), "info": asdict(info)}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as temporary:
                made = Path(temporary) / "made"
                made.mkdir()
                (made / "tokenizer.json").write_bytes(raw)
                (made / "info.json").write_text(json.dumps(data), encoding="utf-8")
                if not self._place(key).exists():  # another process may have been first; its result is the same
                    os.rename(made, self._place(key))
        except OSError as error:
            logger.warning("%s: tokenizer can not be cached (%s)", self._folder, error)

    def _place(self, key: str) -> Path:
        return self._folder / f"{key[:32]}-{_FORMAT}"
