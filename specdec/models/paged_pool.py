"""What is to be known of a KV pool, wherever it lies."""

from __future__ import annotations

from typing import Protocol


class PagedPool(Protocol):
    """A KV pool; ``pages`` is how many pages it has."""

    pages: int
