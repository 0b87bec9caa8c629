"""The invariants of the block tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import pairwise

from specdec.core.kv_cache import KvCacheManager, PagedTokens, PagePool, PrefixHit, PrefixIndex


def check_pages(
    kv: KvCacheManager, sequences: Iterable[PagedTokens] | None = None, released: Iterable[PagedTokens] = ()
) -> None:
    """Raise AssertionError if the block tables are inconsistent. sequences: all holders; None: not compared. released:
    former holders, whose chains are checked too."""
    running = list(sequences or ())
    chains = [seq.page_keys for seq in (*running, *released)]
    check_invariants(kv._pool, kv._index, None if sequences is None else [seq.pages for seq in running], chains)


def cached_pages(kv: KvCacheManager) -> int:
    """Pages in the prefix cache, referenced or idle."""
    return len(kv._index.page_of) + len(kv._index.partial)


def match(kv: KvCacheManager, tokens: Seq[int], salt: str = "") -> PrefixHit:
    """The longest cached chain of full pages of ``tokens[:-1]``; each page gets a reference."""
    hit = kv._find(tokens, salt, [])
    for page in hit.pages:
        kv._pool.retain(page)
    return hit


def check_invariants(
    pool: PagePool, index: PrefixIndex, holders: Seq[Seq[int]] | None, chains: Iterable[Seq[bytes]] = ()
) -> None:
    """Raise AssertionError that names the first broken rule.

    Every page is free, referenced or idle. Idle pages are the unreferenced indexed ones, partial blocks included. The
    page before an idle page in its chain is indexed, and is referenced or evicted later. Partial blocks are idle.
    holders: the page lists of all sequences; None: reference counts are not compared with them. chains: keys of
    consecutive pages, from the first of a text.
    """
    free, idle = pool._free, list(pool._idle)
    referenced = {page for page, count in enumerate(pool.references) if count > 0}
    _require(min(pool.references) >= 0, "a reference count is negative")
    _require(len(set(free)) == len(free), "a page is free twice")
    _require(referenced.isdisjoint(free), f"free and referenced: {sorted(referenced.intersection(free))}")
    _require(referenced.isdisjoint(idle), f"idle and referenced: {sorted(referenced.intersection(idle))}")
    _require(set(free).isdisjoint(idle), "a page is both free and idle")
    lost = len(pool.references) - len(free) - len(idle) - len(referenced)
    _require(lost == 0, f"{lost} pages are neither free, idle nor referenced")
    _check_index(index, free, idle, referenced)
    _check_chains(index, idle, referenced, chains)
    if holders is not None:
        counts = Counter(page for pages in holders for page in pages)
        for page, count in enumerate(pool.references):
            _require(count == counts[page], f"page {page}: {count} references, held by {counts[page]} sequences")


def _check_index(index: PrefixIndex, free: list[int], idle: list[int], referenced: set[int]) -> None:
    for page in free:
        _require(index.key_of[page] is None and page not in index._partial_parent, f"free page {page} is still indexed")
    for page in referenced:
        _require(page not in index._partial_parent, f"page {page} is referenced and indexed as a partial block")
    for page in idle:
        key = index.key_of[page]
        found = key is not None and index.page_of.get(key) == page
        _require(found or page in index._partial_parent, f"idle page {page} is not indexed")


def _check_chains(index: PrefixIndex, idle: list[int], referenced: set[int], chains: Iterable[Seq[bytes]]) -> None:
    place = {page: i for i, page in enumerate(idle)}
    pairs = set[tuple[bytes, int | None]]()
    for keys in chains:
        pairs |= {(before, index.page_of.get(key)) for before, key in pairwise(keys)}
        pairs |= {(key, block.page) for key in keys if (block := index.partial.get(key)) is not None}
    for parent, page in pairs:
        if page not in place:
            continue
        before = index.page_of.get(parent)
        _require(before is not None, f"idle page {page} cannot be reached: its predecessor is not cached")
        ordered = before in referenced or (before is not None and place[before] > place[page])
        _require(ordered, f"page {before} would be evicted before page {page}, which needs it")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise AssertionError(message)
