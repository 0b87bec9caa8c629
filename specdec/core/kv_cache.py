"""The paged KV cache's block tables: allocation, sharing by prefix, reference counts, eviction; no tensors."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import blake2b

from specdec.core.cache_events import CacheRecorder
from verify_kernels.forward_batch import PAGE_SIZE

KEY_BYTES = 16
_ROOT = b"specdec.salt"
_PAGE = b"specdec.page"


def pages_for(n_tokens: int) -> int:
    """Pages that hold ``n_tokens`` slots."""
    return -(-n_tokens // PAGE_SIZE)


def root_key(salt: str) -> bytes:
    """What the first page of every chain under ``salt`` is chained to."""
    return blake2b(salt.encode(), digest_size=KEY_BYTES, person=_ROOT).digest()


def page_key(previous: bytes, tokens: Seq[int]) -> bytes:
    """Key of a page: 16 bytes over the key before it and its own token ids (each below 2**31)."""
    return blake2b(previous + array("i", tokens).tobytes(), digest_size=KEY_BYTES, person=_PAGE).digest()


class PagedTokens:
    """Tokens, and the pages that hold their KV: one row of the block tables. Compared by identity.

    The last token is the *pending token*, whose KV is not computed. n_computed: leading tokens whose target KV is in
    the cache, at most len(tokens) - 1; draft_computed: the same for the draft model. pages: page ids, page i holding
    slots 64 i .. 64 i + 63. page_keys, n_published, n_draft_published: what the prefix cache was told of them. Pages
    are shared among equal ``salt`` only.
    """

    __slots__ = (
        "draft_computed",
        "n_computed",
        "n_draft_published",
        "n_published",
        "page_keys",
        "pages",
        "salt",
        "tokens",
    )

    def __init__(self, tokens: Iterable[int], salt: str) -> None:
        self.tokens = list(tokens)
        self.salt = salt
        self.n_computed = self.draft_computed = 0
        self.pages: list[int] = []
        self.page_keys: list[bytes] = []
        self.n_published = self.n_draft_published = 0

    @property
    def prefilling(self) -> bool:
        """Whether tokens before the pending one still lack their KV."""
        return self.n_computed < len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Leading pages whose KV is computed already: full ones, and behind them perhaps one that is computed in part.

    n_tokens: tokens they cover. draft_tokens: leading tokens whose draft-model KV is there too.
    """

    pages: list[int]
    n_tokens: int
    draft_tokens: int


class PagePool:
    """Hands out pages by id; takes idle ones, least recently used first, when no free one is left.

    ``on_evict(page)`` is told that an idle page's content is about to be lost.
    """

    def __init__(self, n_pages: int, on_evict: Callable[[int], None]) -> None:
        self.references = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.on_evict = on_evict

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

    def evict(self, page: int) -> None:
        """Free an idle page out of turn."""
        del self._idle[page]
        self.on_evict(page)
        self._free.append(page)

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self.on_evict(page)
        return page


@dataclass(slots=True)
class PartialBlock:
    """What an idle page holds in part: KV of ``tokens``, of the first ``n_drafted`` the draft model's too."""

    page: int
    tokens: Seq[int]
    n_drafted: int


class PrefixIndex:
    """At most one page per key and one key per page. ``draft_ready[page]``: the draft model's KV is there too.

    Behind each key, the root's too, there may be one `PartialBlock`: the last one that was left there.
    """

    def __init__(self, n_pages: int) -> None:
        self.draft_ready = bytearray(n_pages)
        self._page_of: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = [None] * n_pages
        self._parent_of: list[bytes | None] = [None] * n_pages
        self._tails: dict[bytes, PartialBlock] = {}
        self._behind: dict[int, bytes] = {}  # by a tail's page, the key that it follows

    def __len__(self) -> int:
        return len(self._page_of) + len(self._tails)

    def tail(self, previous: bytes) -> PartialBlock | None:
        """What follows ``previous`` without filling its page."""
        return self._tails.get(previous)

    def add_tail(self, previous: bytes, tail: PartialBlock, *, first: bool) -> None:
        """Note what follows ``previous``, where nothing is noted yet. ``first``: no page is in front of it."""
        self._tails[previous] = tail
        self._behind[tail.page] = previous
        self._parent_of[tail.page] = None if first else previous

    def behind(self, page: int) -> bytes | None:
        """The key that ``page`` follows as a tail; None where it is none."""
        return self._behind.get(page)

    def forget_drafts(self) -> None:
        """No page holds the draft model's KV."""
        self.draft_ready[:] = bytes(len(self.draft_ready))
        for tail in self._tails.values():
            tail.n_drafted = 0

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
        if (previous := self._behind.pop(page, None)) is not None:
            del self._tails[previous]
            self._parent_of[page] = None
            return
        key = self._key_of[page]
        if key is None:
            raise ValueError(f"page {page} is not indexed")
        del self._page_of[key]
        self._key_of[page] = None
        self._parent_of[page] = None
        self.draft_ready[page] = 0


def check_invariants(pool: PagePool, index: PrefixIndex, holders: Seq[Seq[int]] | None) -> None:
    """Raise AssertionError naming the first rule broken.

    Every page is in exactly one of free, referenced, idle; idle pages are exactly the unreferenced indexed ones, tails
    among them; an idle page's predecessor in its chain is indexed and is referenced or evicted later; no tail is
    referenced. ``holders``: the page lists
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
        _require(index.key(page) is None and index.behind(page) is None, f"free page {page} is still indexed")
    for page in referenced:
        _require(index.behind(page) is None, f"page {page} is written to, and still found as a tail")
    for page in idle:
        key, parent = index.key(page), index.parent(page)
        found = key is not None and index.page(key) == page
        _require(found or index.behind(page) is not None, f"idle page {page} is not indexed")
        if parent is None:
            continue
        before = index.page(parent)
        _require(before is not None, f"idle page {page} can not be reached: its predecessor is not cached")
        ordered = before in referenced or (before is not None and place[before] > place[page])
        _require(ordered, f"page {before} would be evicted before page {page}, which needs it")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise AssertionError(message)


class KvCacheManager:
    """Allocates the ``n_pages`` pages of the KV pools; page p names a page in the target's and the draft's pool.

    A page is free, referenced by one or more sequences, or idle: unreferenced, cached, evicted least recently used
    first. Only full pages whose KV is computed are ever shared, and those are never written again. A page that is left
    with a part computed goes to the next sequence that begins with the same tokens, which writes on from where these
    end: somebody who types asks for the same prompt and a token more, many times a second. ``tails`` False: such pages
    are not kept.
    """

    def __init__(self, n_pages: int, *, prefix_cache: bool, tails: bool = True) -> None:
        if n_pages < 1:
            raise ValueError(f"n_pages: must be positive, got {n_pages}")
        self.n_total = n_pages
        self.prefix_cache = prefix_cache
        self._tails = prefix_cache and tails
        self._index = PrefixIndex(n_pages)
        self._pool = PagePool(n_pages, self._index.remove)
        self._recorder: CacheRecorder | None = None

    def record(self, recorder: CacheRecorder) -> None:
        """Record every full page that enters or leaves the cache from now on."""
        index = self._index

        def evict(page: int) -> None:
            if (key := index.key(page)) is not None:
                recorder.removed(key)
            index.remove(page)

        self._recorder, self._pool.on_evict = recorder, evict

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
        return self._find_all(tokens, salt, []).n_tokens if tokens else 0

    @classmethod
    def key_of(cls, seq: PagedTokens, n_tokens: int) -> bytes:
        """16 bytes over the first ``n_tokens`` of ``seq`` and its salt; pages that have keys are not hashed again."""
        full = n_tokens // PAGE_SIZE
        cls._keys_to(seq.tokens, seq.salt, seq.page_keys, full - 1)
        previous = seq.page_keys[full - 1] if full else root_key(seq.salt)
        return page_key(previous, seq.tokens[full * PAGE_SIZE : n_tokens])

    def uncached(self, seq: PagedTokens) -> int:
        """Tokens before the pending one that would have to be computed, were ``seq`` admitted now."""
        return len(seq.tokens) - 1 - self._find_all(seq.tokens, seq.salt, seq.page_keys).n_tokens

    def fits(self, seq: PagedTokens, reserve: int = 0) -> bool:
        """Whether `admit` would do it now."""
        return self._fitting(seq, reserve) is not None

    def admit(self, seq: PagedTokens, reserve: int = 0) -> PrefixHit | None:
        """Give ``seq``, which holds no page, its cached prefix and pages for all its tokens.

        Sets ``pages``, ``n_computed`` and ``draft_computed``. None, and nothing changed, unless ``reserve`` pages
        would stay available.
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

    def ensure(self, seq: PagedTokens, n_tokens: int) -> bool:
        """Grow ``seq.pages`` to hold ``n_tokens`` slots, evicting idle pages if need be; all or nothing."""
        missing = pages_for(n_tokens) - len(seq.pages)
        if missing <= 0:
            return True
        if missing > self.n_free:
            return False
        seq.pages += self._pool.take(missing)
        return True

    def trim(self, seq: PagedTokens, n_tokens: int) -> None:
        """Give back the pages beyond ``n_tokens`` slots (at least ``n_computed``): room for drafts now gone."""
        keep = pages_for(max(n_tokens, seq.n_computed))
        while len(seq.pages) > keep:
            self._pool.drop(seq.pages.pop(), keep=False)

    def publish(self, seq: PagedTokens) -> None:
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

    def release(self, seq: PagedTokens) -> None:
        """Drop every page of ``seq``. Cached ones stay, deepest first to be evicted, so that chains stay reachable."""
        pool, index = self._pool, self._index
        tail = self._leave_tail(seq)
        for depth in range(len(seq.pages) - 1, -1, -1):
            page = seq.pages[depth]
            if depth < seq.n_published:
                known = index.page(seq.page_keys[depth])
                if known is None:  # its twin was evicted meanwhile: without this page the deeper ones are lost
                    self._add(seq, depth)
                elif known != page:  # the twin must outlive the deeper pages
                    pool.touch(known)
            pool.drop(page, keep=index.key(page) is not None or page == tail)
        seq.pages = []
        seq.n_published = seq.n_draft_published = 0

    def flush(self) -> int:
        """Drop every cached page that no sequence holds; returns how many."""
        count = self._pool.flush()
        if self._recorder is not None:
            self._recorder.flushed()
        return count

    def forget_drafts(self) -> None:
        """The draft model was changed: no cached page holds its KV. Running sequences: set draft_computed to 0."""
        self._index.forget_drafts()

    def check(self, sequences: Iterable[PagedTokens] | None = None) -> None:
        """AssertionError unless the block tables are consistent; given every page holder, also the reference counts."""
        check_invariants(self._pool, self._index, None if sequences is None else [s.pages for s in sequences])

    def _fitting(self, seq: PagedTokens, reserve: int) -> PrefixHit | None:
        """The cached prefix, if there are pages for all other tokens too and ``reserve`` are left."""
        hit = self._find_all(seq.tokens, seq.salt, seq.page_keys)
        references = self._pool.references
        idle_hits = sum(1 for page in hit.pages if references[page] == 0)
        missing = pages_for(len(seq.tokens)) - len(hit.pages)
        return None if missing + idle_hits + reserve > self.n_free else hit

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

    def _find_all(self, tokens: Seq[int], salt: str, keys: list[bytes]) -> PrefixHit:
        """As `_find`, and the tail behind it as far as its tokens go."""
        hit = self._find(tokens, salt, keys)
        if not self._tails:
            return hit
        n_full = len(hit.pages)
        tail = self._index.tail(keys[n_full - 1] if n_full else root_key(salt))
        if tail is None:
            return hit
        shared = _agreeing(tail.tokens, tokens[hit.n_tokens : len(tokens) - 1])
        if not shared:
            return hit
        drafted = min(shared, tail.n_drafted) if hit.draft_tokens == hit.n_tokens else 0
        return PrefixHit([*hit.pages, tail.page], hit.n_tokens + shared, hit.draft_tokens + drafted)

    def _leave_tail(self, seq: PagedTokens) -> int | None:
        """Let others find the page that ``seq``, which gives it back, has in part; that page."""
        depth, rest = divmod(seq.n_computed, PAGE_SIZE)
        if not self._tails or not rest or depth >= len(seq.pages) or depth != seq.n_published:
            return None
        page, start = seq.pages[depth], depth * PAGE_SIZE
        previous = seq.page_keys[depth - 1] if depth else root_key(seq.salt)
        if (former := self._index.tail(previous)) is not None:
            self._pool.evict(former.page)
        drafted = min(max(0, seq.draft_computed - start), rest) if seq.n_draft_published == depth else 0
        tail = PartialBlock(page, array("i", seq.tokens[start : start + rest]), drafted)
        self._index.add_tail(previous, tail, first=not depth)
        return page

    @staticmethod
    def _keys_to(tokens: Seq[int], salt: str, keys: list[bytes], depth: int) -> None:
        """Extend ``keys`` to page ``depth``, each page hashed once."""
        while len(keys) <= depth:
            start = len(keys) * PAGE_SIZE
            previous = keys[-1] if keys else root_key(salt)
            keys.append(page_key(previous, tokens[start : start + PAGE_SIZE]))

    def _add(self, seq: PagedTokens, depth: int) -> None:
        """Index a page of ``seq``, behind those before it whose twins were evicted meanwhile: none can be reached, nor
        placed by whoever follows the events, without the one before."""
        first, keys = depth, seq.page_keys
        while first and self._index.page(keys[first - 1]) is None:
            first -= 1
        for each in range(first, depth + 1):
            self._add_one(seq, each)

    def _add_one(self, seq: PagedTokens, depth: int) -> None:
        keys, page = seq.page_keys, seq.pages[depth]
        parent = keys[depth - 1] if depth else None
        self._index.add(page, keys[depth], parent)
        self._index.draft_ready[page] = depth < seq.n_draft_published
        if self._recorder is not None:
            tokens = seq.tokens[depth * PAGE_SIZE : (depth + 1) * PAGE_SIZE]
            self._recorder.stored(keys[depth], parent, tokens, seq.salt)


def _agreeing(a: Seq[int], b: Seq[int]) -> int:
    """How many tokens two texts begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
