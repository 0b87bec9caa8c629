"""Pages as things to own: free, referenced by sequences, or idle (unreferenced, but their content is worth keeping)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class PagePool:
    """Hands out pages by id; takes idle ones, least recently used first, when no free one is left.

    ``on_evict(page)`` is told that an idle page's content is about to be lost.
    """

    def __init__(self, n_pages: int, on_evict: Callable[[int], None]) -> None:
        self.references = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict

    @property
    def n_available(self) -> int:
        """Pages `take` can hand out."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> Iterable[int]:
        """Idle pages, next to be evicted first."""
        return self._idle.keys()

    @property
    def free(self) -> Iterable[int]:
        """Pages that hold nothing."""
        return self._free

    def take(self, count: int) -> list[int]:
        """``count`` pages with one reference each; at most ``n_available``."""
        free, pages = self._free, []
        for _ in range(count):
            page = free.pop() if free else self._evict()
            self.references[page] = 1
            pages.append(page)
        return pages

    def retain(self, page: int) -> None:
        """One more reference to a referenced or idle page."""
        if self.references[page] == 0:
            del self._idle[page]
        self.references[page] += 1

    def drop(self, page: int, keep: bool) -> None:
        """One reference less; the last one leaves the page idle (``keep``: as most recently used) or free."""
        self.references[page] -= 1
        if self.references[page] > 0:
            return
        if keep:
            self._idle[page] = None
        else:
            self._free.append(page)

    def touch(self, page: int) -> None:
        """Count an idle page as just used; no-op for a referenced one."""
        if page in self._idle:
            self._idle.move_to_end(page)

    def flush(self) -> int:
        """Evict every idle page; returns how many."""
        count = len(self._idle)
        for _ in range(count):
            self._free.append(self._evict())
        return count

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._on_evict(page)
        return page
