"""Gives pages to sequences, shares full ones by content, and takes them all back."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from specdec.kv_cache.invariants import check_invariants
from specdec.kv_cache.page_key import PAGE_SIZE, page_key, pages_for, root_key
from specdec.kv_cache.page_pool import PagePool
from specdec.kv_cache.prefix_hit import PrefixHit
from specdec.kv_cache.prefix_index import PrefixIndex
from specdec.sequence import Sequence


class KvCacheManager:
    """Books the ``n_pages`` pages of one page table; page p names a page in the target's and the draft's pool.

    A page is free, referenced by one or more sequences, or idle: unreferenced, cached, evicted least recently used
    first. Only full pages whose KV is computed are ever shared, and those are never written again.
    """

    def __init__(self, n_pages: int, *, prefix_cache: bool) -> None:
        if n_pages < 1:
            raise ValueError(f"n_pages: must be positive, got {n_pages}")
        self.n_total = n_pages
        self.prefix_cache = prefix_cache
        self._index = PrefixIndex(n_pages)
        self._pool = PagePool(n_pages, self._index.remove)

    @property
    def n_free(self) -> int:
        """Pages a sequence could get now: free ones and idle cached ones."""
        return self._pool.n_available

    @property
    def n_cached(self) -> int:
        """Pages in the prefix cache, referenced or idle."""
        return len(self._index)

    def match(self, tokens: Seq[int], salt: str) -> PrefixHit:
        """The longest cached chain of full pages over ``tokens[:-1]``; the caller holds a reference to each page."""
        hit = self._find(tokens, salt, [])
        for page in hit.pages:
            self._pool.retain(page)
        return hit

    def cached_tokens(self, tokens: Seq[int], salt: str) -> int:
        """How many of ``tokens[:-1]`` the prefix cache holds now; nothing is held for the caller."""
        return self._find(tokens, salt, []).n_tokens if tokens else 0

    def admit(self, seq: Sequence, reserve: int = 0) -> PrefixHit | None:
        """Give ``seq``, which holds no page, its cached prefix and pages for all its tokens.

        Sets ``pages``, ``n_computed`` and ``draft_computed``. None, and nothing changed, unless ``reserve`` pages
        would stay available.
        """
        hit = self._find(seq.tokens, seq.salt, seq.page_keys)
        references = self._pool.references
        idle_hits = sum(1 for page in hit.pages if references[page] == 0)
        missing = pages_for(len(seq.tokens)) - len(hit.pages)
        if missing + idle_hits + reserve > self.n_free:
            return None
        for page in hit.pages:
            self._pool.retain(page)
        seq.pages = hit.pages + self._pool.take(missing)
        seq.n_computed, seq.draft_computed = hit.n_tokens, hit.draft_tokens
        seq.n_published, seq.n_draft_published = len(hit.pages), hit.draft_tokens // PAGE_SIZE
        return hit

    def ensure(self, seq: Sequence, n_tokens: int) -> bool:
        """Grow ``seq.pages`` to hold ``n_tokens`` slots, evicting idle pages if need be; all or nothing."""
        missing = pages_for(n_tokens) - len(seq.pages)
        if missing <= 0:
            return True
        if missing > self.n_free:
            return False
        seq.pages += self._pool.take(missing)
        return True

    def trim(self, seq: Sequence, n_tokens: int) -> None:
        """Give back the pages beyond ``n_tokens`` slots (at least ``n_computed``): room for drafts now gone."""
        keep = pages_for(max(n_tokens, seq.n_computed))
        while len(seq.pages) > keep:
            self._pool.drop(seq.pages.pop(), keep=False)

    def publish(self, seq: Sequence) -> None:
        """Let others find the pages of ``seq`` that are full and computed. Cheap when there is nothing new."""
        if not self.prefix_cache:
            return
        full = min(seq.n_computed // PAGE_SIZE, len(seq.pages))
        for depth in range(seq.n_published, full):
            self._keys_to(seq.tokens, seq.salt, seq.page_keys, depth)
            if self._index.page(seq.page_keys[depth]) is None:
                self._add(seq, depth)
        seq.n_published = full
        ready = min(seq.draft_computed // PAGE_SIZE, full)
        for page in seq.pages[seq.n_draft_published : ready] if ready > seq.n_draft_published else ():
            if self._index.key(page) is not None:
                self._index.draft_ready[page] = 1
        seq.n_draft_published = ready

    def release(self, seq: Sequence) -> None:
        """Drop every page of ``seq``. Cached ones stay, deepest first to be evicted, so that chains stay reachable."""
        pool, index = self._pool, self._index
        for depth in range(len(seq.pages) - 1, -1, -1):
            page = seq.pages[depth]
            if depth < seq.n_published:
                known = index.page(seq.page_keys[depth])
                if known is None:  # its twin was evicted meanwhile: without this page the deeper ones are lost
                    self._add(seq, depth)
                elif known != page:  # the twin must outlive the deeper pages
                    pool.touch(known)
            pool.drop(page, keep=index.key(page) is not None)
        seq.pages = []
        seq.n_published = seq.n_draft_published = 0

    def flush(self) -> int:
        """Drop every cached page that no sequence holds; returns how many."""
        return self._pool.flush()

    def forget_drafts(self) -> None:
        """The draft model was changed: no cached page holds its KV. Running sequences: set draft_computed to 0."""
        self._index.draft_ready[:] = bytes(self.n_total)

    def check(self, sequences: Iterable[Sequence] | None = None) -> None:
        """AssertionError unless the books are right; with every page holder given, also the reference counts."""
        check_invariants(self._pool, self._index, None if sequences is None else [s.pages for s in sequences])

    def _find(self, tokens: Seq[int], salt: str, keys: list[bytes]) -> PrefixHit:
        """Look without retaining; ``keys`` holds the chain's keys so far and is extended as needed."""
        pages: list[int] = []
        drafted = 0
        if self.prefix_cache:
            for depth in range((len(tokens) - 1) // PAGE_SIZE):
                self._keys_to(tokens, salt, keys, depth)
                page = self._index.page(keys[depth])
                if page is None:
                    break
                if drafted == depth and self._index.draft_ready[page]:
                    drafted += 1
                pages.append(page)
        return PrefixHit(pages, len(pages) * PAGE_SIZE, drafted * PAGE_SIZE)

    @staticmethod
    def _keys_to(tokens: Seq[int], salt: str, keys: list[bytes], depth: int) -> None:
        """Extend ``keys`` to page ``depth``, each page hashed once."""
        while len(keys) <= depth:
            start = len(keys) * PAGE_SIZE
            previous = keys[-1] if keys else root_key(salt)
            keys.append(page_key(previous, tokens[start : start + PAGE_SIZE]))

    def _add(self, seq: Sequence, depth: int) -> None:
        keys, page = seq.page_keys, seq.pages[depth]
        self._index.add(page, keys[depth], keys[depth - 1] if depth else None)
        self._index.draft_ready[page] = depth < seq.n_draft_published
