"""One sample of one request on its way through the engine."""

from __future__ import annotations

from enum import Enum

from specdec.types import Request


class SequencePhase(Enum):
    """Where a sequence is; a preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens and pages of one sample. Compared by identity.

    tokens: prompt and committed output; the last is the *pending token*, whose KV is not computed.
    n_computed: leading tokens whose target KV is in the cache, at most len(tokens) - 1; draft_computed: the same
    for the draft model. pages: page ids, page i holding slots 64 i .. 64 i + 63. page_keys, n_published,
    n_draft_published: what the prefix cache was told of them. rank: place in line, lower first. cached_tokens:
    prefix hit when first scheduled. Times are monotonic seconds.
    """

    __slots__ = (
        "arrival_s",
        "cached_tokens",
        "deadline",
        "draft_computed",
        "first_scheduled_s",
        "first_token_s",
        "index",
        "n_computed",
        "n_draft_published",
        "n_prompt",
        "n_published",
        "page_keys",
        "pages",
        "preemptions",
        "rank",
        "request",
        "salt",
        "seed",
        "state",
        "tokens",
    )

    def __init__(self, request: Request, index: int, seed: int, arrival_s: float) -> None:
        self.request, self.index, self.seed, self.arrival_s = request, index, seed, arrival_s
        self.tokens = list(request.prompt_ids)
        self.n_prompt = len(self.tokens)
        self.salt = request.cache_salt
        self.n_computed = self.draft_computed = 0
        self.pages: list[int] = []
        self.page_keys: list[bytes] = []
        self.n_published = self.n_draft_published = 0
        self.rank = (0, 0)
        self.state = SequencePhase.WAITING
        self.cached_tokens = self.preemptions = 0
        self.deadline = None if request.deadline_s is None else arrival_s + request.deadline_s
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None

    @property
    def n_output(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - self.n_prompt

    @property
    def prefilling(self) -> bool:
        """Whether tokens before the pending one still lack their KV."""
        return self.n_computed < len(self.tokens) - 1

    @property
    def prefill_only(self) -> bool:
        """Whether the request wants its prompt in the cache and no token out."""
        return self.request.stopping.max_tokens == 0
