"""What must hold of the page books at all times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from specdec.kv_cache.page_pool import PagePool
from specdec.kv_cache.prefix_index import PrefixIndex


def check_invariants(pool: PagePool, index: PrefixIndex, holders: Seq[Seq[int]] | None) -> None:
    """Raise AssertionError naming the first rule broken.

    Every page is in exactly one of free, referenced, idle; idle pages are exactly the unreferenced indexed ones; an
    idle page's predecessor in its chain is indexed and is referenced or evicted later. ``holders``: the page lists
    of all sequences; reference counts must equal the number of lists a page is in.
    """
    free, idle = list(pool.free), list(pool.idle)
    referenced = {page for page, count in enumerate(pool.references) if count > 0}
    _require(min(pool.references) >= 0, "a reference count is negative")
    _require(len(set(free)) == len(free), "a page is free twice")
    _require(referenced.isdisjoint(free), f"free and referenced: {sorted(referenced.intersection(free))}")
    _require(referenced.isdisjoint(idle), f"idle and referenced: {sorted(referenced.intersection(idle))}")
    _require(set(free).isdisjoint(idle), "a page is both free and idle")
    lost = len(pool.references) - len(free) - len(idle) - len(referenced)
    _require(lost == 0, f"{lost} pages are neither free, idle nor referenced")
    _check_chains(index, free, idle, referenced)
    if holders is not None:
        counts = Counter(page for pages in holders for page in pages)
        for page, count in enumerate(pool.references):
            _require(count == counts[page], f"page {page}: {count} references, held by {counts[page]} sequences")


def _check_chains(index: PrefixIndex, free: list[int], idle: list[int], referenced: set[int]) -> None:
    place = {page: i for i, page in enumerate(idle)}
    for page in free:
        _require(index.key(page) is None, f"free page {page} is still indexed")
    for page in idle:
        key, parent = index.key(page), index.parent(page)
        _require(key is not None and index.page(key) == page, f"idle page {page} is not indexed")
        if parent is None:
            continue
        before = index.page(parent)
        _require(before is not None, f"idle page {page} can not be reached: its predecessor is not cached")
        ordered = before in referenced or (before is not None and place[before] > place[page])
        _require(ordered, f"page {before} would be evicted before page {page}, which needs it")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise AssertionError(message)
