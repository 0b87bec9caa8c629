"""Which page holds the content of which key."""

from __future__ import annotations


class PrefixIndex:
    """At most one page per key and one key per page. ``draft_ready[page]``: the draft model's KV is there too."""

    def __init__(self, n_pages: int) -> None:
        self.draft_ready = bytearray(n_pages)
        self._page_of: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = [None] * n_pages
        self._parent_of: list[bytes | None] = [None] * n_pages

    def __len__(self) -> int:
        return len(self._page_of)

    def page(self, key: bytes) -> int | None:
        """The page that holds ``key``'s content."""
        return self._page_of.get(key)

    def key(self, page: int) -> bytes | None:
        """The key whose content ``page`` holds; None when it is not indexed."""
        return self._key_of[page]

    def parent(self, page: int) -> bytes | None:
        """The key before this page's in its chain; None for the first page of a chain."""
        return self._parent_of[page]

    def add(self, page: int, key: bytes, parent: bytes | None) -> None:
        """Index ``page`` under ``key``, which no page holds yet."""
        self._page_of[key] = page
        self._key_of[page] = key
        self._parent_of[page] = parent
        self.draft_ready[page] = 0

    def remove(self, page: int) -> None:
        """Forget an indexed page."""
        key = self._key_of[page]
        if key is None:
            raise ValueError(f"page {page} is not indexed")
        del self._page_of[key]
        self._key_of[page] = None
        self._parent_of[page] = None
        self.draft_ready[page] = 0
