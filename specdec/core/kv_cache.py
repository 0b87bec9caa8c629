"""The paged KV cache's block tables: allocation, sharing by prefix, reference counts, eviction; no tensors."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import blake2b

from specdec.core.cache_events import CacheFollower
from verify_kernels.forward_batch import PAGE_SIZE

KEY_BYTES = 16  # of a page key: collisions stay improbable for any number of pages
_ROOT = b"specdec.salt"  # hash personalisation: a salt and a page never have equal digests
_PAGE = b"specdec.page"


def pages_for(n_tokens: int) -> int:
    """Pages that hold ``n_tokens`` slots."""
    return -(-n_tokens // PAGE_SIZE)


def root_key(salt: str) -> bytes:
    """The key before the first page of every chain under ``salt``."""
    return blake2b(salt.encode(), digest_size=KEY_BYTES, person=_ROOT).digest()


def page_key(previous: bytes, tokens: Seq[int]) -> bytes:
    """Key of a page: 16 bytes over the key before it and its own token ids (each below 2**31)."""
    return blake2b(previous + array("i", tokens).tobytes(), digest_size=KEY_BYTES, person=_PAGE).digest()


def extend_keys(keys: list[bytes], tokens: Seq[int], salt: str, n_pages: int) -> None:
    """Extend ``keys``, of the leading pages of ``tokens``, to the first ``n_pages``."""
    while len(keys) < n_pages:
        start = len(keys) * PAGE_SIZE
        previous = keys[-1] if keys else root_key(salt)
        keys.append(page_key(previous, tokens[start : start + PAGE_SIZE]))


class PagedTokens:
    """Tokens and the pages that hold their KV: one row of the block tables. Compared by identity.

    The last token is the *pending token*, whose KV is not computed. Pages are shared among sequences of equal ``salt``.
    """

    def __init__(self, tokens: Iterable[int], salt: str) -> None:
        self.tokens = list(tokens)
        self.salt = salt
        self.n_computed = 0  # leading tokens with target KV in the cache, at most len(tokens) - n_pending
        self.n_pending = 1  # 0 if the last token is computed too, for its hidden state
        self.most_cached: int | None = None  # leading tokens that the prefix cache may provide; None: all
        self.draft_computed = 0  # the same for the draft model's KV
        self.pages: list[int] = []  # page i holds slots 64 i .. 64 i + 63
        self.page_keys: list[bytes] = []  # keys of the leading full pages, as far as they were needed
        self.n_published = self.n_draft_published = 0  # leading pages that the prefix cache holds

    @property
    def prefilling(self) -> bool:
        """Whether a token other than the pending one lacks its KV."""
        return self.n_computed < len(self.tokens) - self.n_pending


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached prefix of a sequence."""

    pages: list[int]
    """Full pages, then at most one partial block."""
    n_tokens: int
    """Tokens in these pages."""
    draft_tokens: int
    """Leading tokens whose draft-model KV is cached too."""


class PagePool:
    """Allocates pages by id. If none is free, it evicts idle ones, least recently used first.

    on_evict: called with an idle page before its content is lost.
    """

    def __init__(self, n_pages: int, on_evict: Callable[[int], None]) -> None:
        self.references = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # next to be evicted first
        self.on_evict = on_evict

    @property
    def n_available(self) -> int:
        """Pages that `take` can return."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """``count`` pages with one reference each; at most ``n_available``."""
        free, pages = self._free, []
        for _ in range(count):
            if not free:
                self.evict(next(iter(self._idle)))
            page = free.pop()
            self.references[page] = 1
            pages.append(page)
        return pages

    def retain(self, page: int) -> None:
        """Add a reference to a referenced or idle page."""
        if self.references[page] == 0:
            del self._idle[page]
        self.references[page] += 1

    def drop(self, page: int, keep: bool) -> None:
        """Drop a reference. The last one leaves the page idle, as most recently used, if ``keep``; else free."""
        self.references[page] -= 1
        if self.references[page] > 0:
            return
        if keep:
            self._idle[page] = None
        else:
            self._free.append(page)

    def touch(self, page: int) -> None:
        """Make an idle page the most recently used; no-op for a referenced one."""
        if page in self._idle:
            self._idle.move_to_end(page)

    def flush(self) -> int:
        """Evict every idle page; returns how many."""
        idle = list(self._idle)
        for page in idle:
            self.evict(page)
        return len(idle)

    def evict(self, page: int) -> None:
        """Evict one idle page."""
        del self._idle[page]
        self.on_evict(page)
        self._free.append(page)


@dataclass(slots=True)
class PartialBlock:
    """An idle page that is computed in part."""

    page: int
    tokens: Seq[int]
    """Tokens whose KV it holds."""
    n_drafted: int
    """Leading tokens among them whose draft-model KV it holds too."""


class PrefixIndex:
    """Cached pages by key: at most one page per key, one key per page, and one `PartialBlock` after each key."""

    def __init__(self, n_pages: int) -> None:
        self.draft_ready = bytearray(n_pages)  # by page, 1: it holds the draft model's KV too
        self.page_of: dict[bytes, int] = {}  # by the key of its content
        self.key_of: list[bytes | None] = [None] * n_pages  # by page; None: no full page of the cache
        self.partial: dict[bytes, PartialBlock] = {}  # by the key before
        self._partial_parent: dict[int, bytes] = {}  # by the page of a partial block, the key before

    def add_partial(self, previous: bytes, block: PartialBlock) -> None:
        """Index a block after key ``previous``, which has none."""
        self.partial[previous] = block
        self._partial_parent[block.page] = previous

    def forget_drafts(self) -> None:
        """Mark the draft model's KV of all pages as lost."""
        self.draft_ready[:] = bytes(len(self.draft_ready))
        for block in self.partial.values():
            block.n_drafted = 0

    def add(self, page: int, key: bytes) -> None:
        """Index ``page`` under ``key``, which no page holds yet."""
        self.page_of[key] = page
        self.key_of[page] = key
        self.draft_ready[page] = 0

    def remove(self, page: int) -> None:
        """Remove an indexed page."""
        if (previous := self._partial_parent.pop(page, None)) is not None:
            del self.partial[previous]
            return
        key = self.key_of[page]
        assert key is not None  # the page is indexed
        del self.page_of[key]
        self.key_of[page] = None


@dataclass(slots=True)
class PageLoad:
    """Pages that something other than a forward fills, for a prompt that begins with cached ones."""

    tokens: Seq[int]
    salt: str
    keys: list[bytes]
    """Of all its pages, the cached ones first."""
    cached: list[int]
    """Cached pages, which keep a reference until the load ends."""
    pages: list[int]
    """Pages to fill, which hold nothing yet."""


class KvCacheManager:
    """Block tables over ``n_pages`` pages; a page id names a page in the target's pool and in the draft model's.

    A page is free, referenced by sequences, or idle: unreferenced but cached, evicted least recently used first. Full
    computed pages are shared and never written again. A *partial block*, the last page of a finished sequence, passes
    to the next sequence that begins with the same tokens, which continues to write to it: code completion repeats a
    prompt with one more token many times a second.

    partial_blocks: False: partial blocks are not cached.
    """

    def __init__(self, n_pages: int, *, prefix_cache: bool, partial_blocks: bool = True) -> None:
        if n_pages < 1:
            raise ValueError(f"n_pages: must be positive, got {n_pages}")
        self.n_total = n_pages
        self.prefix_cache = prefix_cache
        self._partial_blocks = prefix_cache and partial_blocks
        self._index = PrefixIndex(n_pages)
        self._pool = PagePool(n_pages, self._evicted)
        self._followers: list[CacheFollower] = []

    def follow(self, follower: CacheFollower) -> None:
        """Report to ``follower`` every full page that enters or leaves the cache from now on."""
        self._followers.append(follower)

    def __contains__(self, key: object) -> bool:
        """Whether a full page is cached under ``key``."""
        return key in self._index.page_of

    @property
    def n_free(self) -> int:
        """Pages that a sequence could get: free and idle ones."""
        return self._pool.n_available

    def cached_tokens(self, tokens: Seq[int], salt: str) -> int:
        """How many of ``tokens[:-1]`` are cached; takes no reference."""
        return self._find_all(tokens, salt, []).n_tokens if tokens else 0

    @staticmethod
    def key_of(seq: PagedTokens, n_tokens: int) -> bytes:
        """Digest, 16 bytes, of the salt and the first ``n_tokens`` of ``seq``; reuses its page keys."""
        full = n_tokens // PAGE_SIZE
        extend_keys(seq.page_keys, seq.tokens, seq.salt, full)
        previous = seq.page_keys[full - 1] if full else root_key(seq.salt)
        return page_key(previous, seq.tokens[full * PAGE_SIZE : n_tokens])

    def uncached(self, seq: PagedTokens) -> int:
        """Tokens before the pending one that are not cached."""
        return len(seq.tokens) - 1 - self._find_for(seq).n_tokens

    def fits(self, seq: PagedTokens, reserve: int = 0) -> bool:
        """Whether `admit` would succeed."""
        return self._fitting(seq, reserve) is not None

    def admit(self, seq: PagedTokens, reserve: int = 0) -> PrefixHit | None:
        """Give ``seq``, which holds no page, its cached prefix and pages for all other tokens.

        Sets ``pages``, ``n_computed`` and ``draft_computed``. None: fewer than ``reserve`` pages would stay available;
        nothing has changed.
        """
        hit = self._fitting(seq, reserve)
        if hit is None:
            return None
        for page in hit.pages:
            self._pool.retain(page)
        seq.n_published, seq.n_draft_published = hit.n_tokens // PAGE_SIZE, hit.draft_tokens // PAGE_SIZE
        if len(hit.pages) > seq.n_published:
            self._index.remove(hit.pages[-1])  # it will be written to
        seq.pages = hit.pages + self._pool.take(pages_for(len(seq.tokens)) - len(hit.pages))
        seq.n_computed, seq.draft_computed = hit.n_tokens, hit.draft_tokens
        return hit

    def will_share(self, running: PagedTokens, seq: PagedTokens, pages: int) -> bool:
        """Whether ``running`` has still to compute the next ``pages`` full pages that ``seq`` lacks, and ``seq`` may
        take them from the cache then."""
        begun = running.n_computed // PAGE_SIZE
        if not (self.prefix_cache and _share_page(running, seq, begun)):  # most prompts differ here
            return False
        depth = self._find_for(seq).n_tokens // PAGE_SIZE
        return depth >= begun and _share_page(running, seq, depth + pages - 1)

    def ensure(self, seq: PagedTokens, n_tokens: int) -> bool:
        """Grow ``seq.pages`` to ``n_tokens`` slots, all or nothing; evicts idle pages if necessary."""
        missing = pages_for(n_tokens) - len(seq.pages)
        if missing <= 0:
            return True
        if missing > self.n_free:
            return False
        seq.pages += self._pool.take(missing)
        return True

    def trim(self, seq: PagedTokens, n_tokens: int) -> None:
        """Return the pages beyond ``n_tokens`` slots, which held drafts; computed tokens keep theirs."""
        keep = pages_for(max(n_tokens, seq.n_computed))
        while len(seq.pages) > keep:
            self._pool.drop(seq.pages.pop(), keep=False)

    def publish(self, seq: PagedTokens) -> None:
        """Add the full computed pages of ``seq`` to the prefix cache. Cheap if there are no new ones."""
        if not self.prefix_cache:
            return
        full = min(seq.n_computed // PAGE_SIZE, len(seq.pages))
        for depth in range(seq.n_published, full):
            extend_keys(seq.page_keys, seq.tokens, seq.salt, depth + 1)
            if seq.page_keys[depth] not in self._index.page_of:
                self._add(seq, depth)
        seq.n_published = full
        ready = min(seq.draft_computed // PAGE_SIZE, full)
        for page in seq.pages[seq.n_draft_published : ready]:
            self._index.draft_ready[page] = 1
        seq.n_draft_published = ready

    def release(self, seq: PagedTokens) -> None:
        """Drop the references of ``seq``. Cached pages become idle; the deepest are evicted first."""
        pool, index = self._pool, self._index
        partial = self._cache_partial_block(seq)
        for depth in range(len(seq.pages) - 1, -1, -1):
            page = seq.pages[depth]
            if depth < seq.n_published:
                known = index.page_of.get(seq.page_keys[depth])
                if known is None:  # a page of the same key was evicted; without one the deeper pages are lost
                    self._add(seq, depth)
                elif known != page:  # the other page of this key must outlive the deeper pages
                    pool.touch(known)
            pool.drop(page, keep=index.key_of[page] is not None or page == partial)
        seq.pages = []
        seq.n_published = seq.n_draft_published = 0

    def flush(self) -> int:
        """Evict every idle page; returns how many."""
        count = self._pool.flush()
        for follower in self._followers:
            follower.flushed()
        return count

    def begin_load(self, tokens: Seq[int], salt: str, source: Container[bytes], reserve: int) -> PageLoad:
        """Take pages for the first full pages of ``tokens[:-1]`` that are not cached and whose keys are in ``source``,
        so far as ``reserve`` pages stay available. `end_load` must follow."""
        keys: list[bytes] = []
        cached = self._find(tokens, salt, keys).pages
        depth, full = len(cached), (len(tokens) - 1) // PAGE_SIZE
        while depth < full:
            extend_keys(keys, tokens, salt, depth + 1)
            if keys[depth] not in source:
                break
            depth += 1
        for page in cached:
            self._pool.retain(page)
        count = max(0, min(depth - len(cached), self.n_free - reserve))
        return PageLoad(tokens, salt, keys[: len(cached) + count], cached, self._pool.take(count))

    def end_load(self, load: PageLoad, n_filled: int) -> None:
        """Cache the first ``n_filled`` pages of a load and free the others."""
        index, first = self._index, len(load.cached)
        for depth in range(first, first + n_filled):
            if load.keys[depth] not in index.page_of:
                self._add_page(load.pages[depth - first], load.keys, depth, load.tokens, load.salt)
        pages = load.cached + load.pages
        for key, page in zip(reversed(load.keys), reversed(pages), strict=True):  # the deepest are evicted first
            if (known := index.page_of.get(key)) is not None:  # computed meanwhile; it must outlive the deeper pages
                self._pool.touch(known)
            self._pool.drop(page, keep=index.key_of[page] is not None)

    def forget_drafts(self) -> None:
        """Mark the draft model's KV as lost after a swap. The caller sets ``draft_computed`` of sequences to 0."""
        self._index.forget_drafts()

    def _fitting(self, seq: PagedTokens, reserve: int) -> PrefixHit | None:
        """The cached prefix, or None if pages for the other tokens and ``reserve`` more are not available."""
        hit = self._find_for(seq)
        references = self._pool.references
        idle_hits = sum(1 for page in hit.pages if references[page] == 0)
        missing = pages_for(len(seq.tokens)) - len(hit.pages)
        return None if missing + idle_hits + reserve > self.n_free else hit

    def _find_for(self, seq: PagedTokens) -> PrefixHit:
        """The cached prefix that ``seq`` may use; takes no reference."""
        tokens = seq.tokens if seq.most_cached is None else seq.tokens[: seq.most_cached + 1]
        return self._find_all(tokens, seq.salt, seq.page_keys)

    def _find(self, tokens: Seq[int], salt: str, keys: list[bytes]) -> PrefixHit:
        """Cached full pages; takes no reference. keys: of the leading pages, extended as needed."""
        pages: list[int] = []
        drafted = 0
        if self.prefix_cache:
            for depth in range((len(tokens) - 1) // PAGE_SIZE):
                extend_keys(keys, tokens, salt, depth + 1)
                page = self._index.page_of.get(keys[depth])
                if page is None:
                    break
                if drafted == depth and self._index.draft_ready[page]:
                    drafted += 1
                pages.append(page)
        return PrefixHit(pages, len(pages) * PAGE_SIZE, drafted * PAGE_SIZE)

    def _find_all(self, tokens: Seq[int], salt: str, keys: list[bytes]) -> PrefixHit:
        """As `_find`, with the partial block after them as far as its tokens agree."""
        hit = self._find(tokens, salt, keys)
        if not self._partial_blocks:
            return hit
        n_full = len(hit.pages)
        block = self._index.partial.get(keys[n_full - 1] if n_full else root_key(salt))
        if block is None:
            return hit
        shared = common_length(block.tokens, tokens[hit.n_tokens : len(tokens) - 1])
        if not shared:
            return hit
        drafted = min(shared, block.n_drafted) if hit.draft_tokens == hit.n_tokens else 0
        return PrefixHit([*hit.pages, block.page], hit.n_tokens + shared, hit.draft_tokens + drafted)

    def _cache_partial_block(self, seq: PagedTokens) -> int | None:
        """Cache the partly computed page of ``seq``, which is released; returns that page."""
        depth, rest = divmod(seq.n_computed, PAGE_SIZE)
        if not self._partial_blocks or not rest or depth >= len(seq.pages) or depth != seq.n_published:
            return None
        page, start = seq.pages[depth], depth * PAGE_SIZE
        previous = seq.page_keys[depth - 1] if depth else root_key(seq.salt)
        if (former := self._index.partial.get(previous)) is not None:
            self._pool.evict(former.page)
        drafted = min(max(0, seq.draft_computed - start), rest)
        block = PartialBlock(page, array("i", seq.tokens[start : start + rest]), drafted)
        self._index.add_partial(previous, block)
        return page

    def _add(self, seq: PagedTokens, depth: int) -> None:
        """Index page ``depth`` of ``seq`` after those before it that have left the index: a page can only be found, and
        a reader of the events can only place it, if the one before is indexed."""
        first, keys = depth, seq.page_keys
        while first and keys[first - 1] not in self._index.page_of:
            first -= 1
        for each in range(first, depth + 1):
            self._add_page(seq.pages[each], keys, each, seq.tokens, seq.salt)
            self._index.draft_ready[seq.pages[each]] = each < seq.n_draft_published

    def _add_page(self, page: int, keys: Seq[bytes], depth: int, tokens: Seq[int], salt: str) -> None:
        """Index ``page``, page ``depth`` of ``tokens``, whose pages have ``keys``."""
        self._index.add(page, keys[depth])
        parent, own = keys[depth - 1] if depth else None, tokens[depth * PAGE_SIZE : (depth + 1) * PAGE_SIZE]
        for follower in self._followers:
            follower.stored(page, keys[depth], parent, own, salt)

    def _evicted(self, page: int) -> None:
        """An idle page loses its content."""
        if (key := self._index.key_of[page]) is not None:
            for follower in self._followers:
                follower.removed(page, key)
        self._index.remove(page)


def _share_page(running: PagedTokens, seq: PagedTokens, depth: int) -> bool:
    """Whether page ``depth`` of both and those before it are full, the same, and may be taken from the cache."""
    most = len(seq.tokens) - 1 if seq.most_cached is None else seq.most_cached
    if (depth + 1) * PAGE_SIZE > min(most, len(running.tokens) - running.n_pending):
        return False
    for each in (running, seq):
        extend_keys(each.page_keys, each.tokens, each.salt, depth + 1)
    return running.page_keys[depth] == seq.page_keys[depth]


def common_length(a: Seq[int], b: Seq[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
