"""The files of the page, as they were built."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

MAIN = "index.html"
_TYPES = {
    MAIN: b"text/html; charset=utf-8",
    "page.js": b"text/javascript; charset=utf-8",
    "page.css": b"text/css; charset=utf-8",
    "icon.svg": b"image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """``version``: the beginning of the content's SHA-256, by which the page's own links name it."""

    data: bytes
    media_type: bytes
    version: str


def load_page() -> Mapping[str, PageFile]:
    """Every file of the page by its name."""
    return {name: _load(name, media_type) for name, media_type in _TYPES.items()}


def _load(name: str, media_type: bytes) -> PageFile:
    data = (files(__package__) / "static" / name).read_bytes()
    return PageFile(data, media_type, hashlib.sha256(data).hexdigest()[:16])
