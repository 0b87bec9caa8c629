"""Which pages of a head's KV pool hold what, so that a prefix hit need not leave the head without context."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specdec.kv_cache.page_key import PAGE_SIZE


class HeadPages:
    """For each page filled with head KV: the key of the tokens up to its end, and the page its context began at.

    The page table is the scheduler's: a page may pass to another sequence unseen. So nothing here is promised for a
    page, it is only compared: content is what the key says until the head writes to the page again.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[bytes, int]] = {}

    def written(self, pages: Seq[int], low: int, high: int) -> None:
        """Slots [low, high) of a sequence with ``pages`` are about to be written."""
        for depth in range(low // PAGE_SIZE, -(-high // PAGE_SIZE)):
            self._held.pop(pages[depth], None)

    def filled(self, page: int, key: bytes, first_page: int) -> None:
        """``page`` holds KV of all its slots, in a context that began at page ``first_page`` of its sequence."""
        self._held[page] = (key, first_page)

    def first_page(self, pages: Seq[int], keys: Seq[bytes]) -> int | None:
        """Where the context begins that the KV in ``pages``, the leading ones of a sequence, can serve as.

        None when the last of them holds no KV of this sequence's tokens, or one between does not.
        """
        if not pages:
            return None
        key, first = self._held.get(pages[-1], (b"", 0))
        if key != keys[-1]:
            return None
        held = (self._held.get(page) == (key, first) for page, key in zip(pages[first:], keys[first:], strict=True))
        return first if all(held) else None
