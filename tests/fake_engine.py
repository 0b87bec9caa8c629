"""The fake engine of every test that needs one: no model, configured answers, faults on command.

`FakeEngine` keeps the books of an engine: requests, prefix cache, deadlines, load, trace. `Answer` says what a sample
consists of. What stands behind the last ``/`` of a request's ``cache_salt`` is its script, so that tenants have theirs:

- the pace: ``slow`` 0.05 s a step, ``prefill`` nothing for `PREFILL_STEPS` steps of 0.02 s, ``mute`` Started and then
  nothing, ``held`` one token and then nothing;
- faults of a step: ``die`` raises, ``exit`` leaves the process, ``hang`` sleeps, ``broken`` fails the request;
- faults of `submit`: ``full``, ``long``, ``malformed`` and ``bug`` raise; ``untold``: every later `trace` raises.

A configuration's ``target`` scripts the start. This module imports little: every engine process begins with it.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specdec.config import EngineConfig
from specdec.core.cache_events import CacheFollower
from specdec.core.kv_cache import KvCacheManager, PagedTokens
from specdec.core.text_stops import TextCutter
from specdec.core.types import (
    Delta,
    DrafterStats,
    DrafterTrace,
    EngineInfo,
    EngineLoad,
    Failed,
    Finished,
    FinishReason,
    Request,
    RequestEvent,
    SpeculationStats,
    Started,
    StepTrace,
    Timings,
    TokenLogprobs,
    Usage,
)
from specdec.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidRequestError,
    ModelError,
    PromptTooLongError,
    QueueFullError,
)
from specdec.models.progress import Progress

DEFAULT_SEED = 4242
MAX_CONTEXT = 128
VOCAB_SIZE = 256
WEIGHT_BYTES = 4_321
FINGERPRINT = "0123456789abcdef"
EMBEDDING_SIZE = 4
TRACE_STEPS = 40
PREFILL_STEPS = 200
FLUSHED = 7
_LONGEST_SLEEP_S = 0.005

INFO = EngineInfo(
    target="fake", draft="fake-draft", dtype="int8", kernels="native", numeric_mode="bitwise",
    max_context=MAX_CONTEXT, vocab_size=VOCAB_SIZE, kv_tokens=4096, max_batch=8, drafters=("suffix",), eos_ids=(0,),
    threads=1, version="0", kv_dtype="fp32", weight_bytes=WEIGHT_BYTES, numeric_fingerprint=FINGERPRINT,
    embedding_size=EMBEDDING_SIZE,
)  # fmt: skip


def _is_next_edit(request: Request) -> bool:
    from specdec.models.next_edit import expected_answer  # few tests need it

    parts = {FILE_SEP: b"<|file_sep|>"}
    text = b"".join(parts.get(i) or bytes([i]) for i in request.prompt_ids if i < 256 or i in parts)
    return bool(expected_answer(text.decode()))


class Answer(Protocol):
    """One sample of one request, as it is made."""

    tokens: int  # made so far

    def advance(self) -> tuple[list[int], str, FinishReason | None]:
        """The next step's tokens and text, and the reason if the sample ends with them."""


class Echo:
    """The prompt shifted by the sample's index; ``speculation.width`` tokens come per step."""

    def __init__(self, request: Request, index: int) -> None:
        self._prompt, self._index, self.tokens = request.prompt_ids, index, 0
        asked = request.stopping.max_tokens
        self._limit = len(self._prompt) if asked is None else min(asked, len(self._prompt))
        self._width = request.speculation.width or 1

    def advance(self) -> tuple[list[int], str, FinishReason | None]:
        take = min(self._width, self._limit - self.tokens)
        ids = [self._prompt[(self.tokens + self._index + k) % len(self._prompt)] for k in range(take)]
        self.tokens += take
        return ids, bytes(ids).decode("latin-1"), FinishReason.LENGTH if self.tokens >= self._limit else None


class Judge:
    """Generates the first allowed token. The log-probability of "n" is -1, that of "y" is minus the number of "x"."""

    def __init__(self, request: Request, index: int) -> None:
        self.tokens, self._token = 0, request.sampling.allowed_token_ids[0]
        self.logprob = -1.0 if self._token == ord("n") else -float(request.prompt_ids.count(ord("x")))

    def advance(self) -> tuple[list[int], str, FinishReason | None]:
        self.tokens += 1
        return [self._token], "", FinishReason.LENGTH


MAX_LETTERS = 16


def answer_to(prompt: list[int] | tuple[int, ...], count: int) -> list[int]:
    """``count`` lower-case letters that follow from ``prompt`` alone, so that all replicas answer alike."""
    seed = blake2b(repr(list(prompt)).encode(), digest_size=32).digest()
    return [ord("a") + blake2b(b"%d" % i, key=seed, digest_size=1).digest()[0] % 26 for i in range(count)]


class Letters:
    """Generates `answer_to` the prompt, a token a step; a resumed request continues where it was."""

    def __init__(self, request: Request, index: int) -> None:
        limit = request.stopping.max_tokens
        self._ids = answer_to(request.prompt_ids, MAX_LETTERS if limit is None else limit)
        self.tokens = 0 if request.resume is None else len(request.resume.token_ids)

    def advance(self) -> tuple[list[int], str, FinishReason | None]:
        ids = self._ids[self.tokens : self.tokens + 1]
        self.tokens += len(ids)
        return ids, bytes(ids).decode(), FinishReason.LENGTH if self.tokens == len(self._ids) else None


BOOK = '''\
def add(first, second):
    """The sum of two numbers."""
    total = first + second
    return total


def mean(values):
    """The mean of some numbers, 0 of none."""
    if not values:
        return 0
    total = 0
    for value in values:
        total = add(total, value)
    return total / len(values)


print(mean([1, 2, 3]))
'''
BOOK_VOCAB, BOOK_END = 300, 299
FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE, FILE_SEP = 256, 257, 258, 260  # ids of `CodeTokenizer`


class BookText:
    """The book from the position where the prompt ends in it, a character a step, by the request's text rules. For a
    session request at a temperature above 0.5 it is the request's id. The answer to a next-edit prompt is the window,
    with ``numbers`` in place of ``values``, and a value for ``sum``."""

    def __init__(self, request: Request, index: int) -> None:
        ids = request.prompt_ids
        if FIM_MIDDLE in ids:
            above = ids[ids.index(FIM_PREFIX) + 1 : ids.index(FIM_SUFFIX)]
            ids = (*above, *ids[ids.index(FIM_MIDDLE) + 1 :])
        tail = bytes(i for i in ids if i < 256).decode()[-40:] + request.healing_prefix
        found = BOOK.find(tail)
        self._text = BOOK[found + len(tail) :] if found >= 0 else "?"
        if request.sampling.temperature > 0.5 and request.session:
            self._text = request.request_id
        if request.prediction_ids and _is_next_edit(request):
            window = bytes(request.prediction_ids).decode()
            self._text = window.replace("values", "numbers").replace("sum = \n", "sum = 0 + 0\n")
        self._limit, self._healed = request.stopping.max_tokens, len(request.healing_prefix)
        self._cutter = TextCutter(request.stopping.rules)
        self._shown = self.tokens = 0

    def advance(self) -> tuple[list[int], str, FinishReason | None]:
        if self._limit == 0:
            return [], "", FinishReason.LENGTH
        char = self._text[self.tokens : self.tokens + 1]
        self.tokens += 1
        cut, ended = self._cutter.feed(char), None
        if cut is not None:
            text, ended = self._text[self._shown : cut.place], cut.reason
        elif not char or self.tokens + self._healed == self._limit:
            text = self._text[self._shown : self.tokens]
            ended = FinishReason.LENGTH if char else FinishReason.EOS
        else:
            text = self._text[self._shown : self._cutter.safe]
        self._shown += len(text)
        return list(char.encode()) or [BOOK_END], text, ended


@dataclass
class _Running:
    request: Request
    script: str
    arrival_s: float
    samples: dict[int, Answer]
    paged: PagedTokens | None = None
    cached: int = 0
    resumed: int = 0
    due_s: float = math.inf
    waited: int = 0  # steps of its prefill
    started: bool = False


@dataclass(frozen=True)
class Pace:
    """Seconds until a request's first token, and from one token to the next."""

    first_s: float = 0.0
    step_s: float = 0.0


@dataclass
class FakeEngine:
    """Stands in for an `Engine`.

    ``load`` reports internals to tests: without ``pages`` the prompt tokens count the submitted requests and the prefix
    hits the aborted ones; the rate is the deadline of the last request.
    """

    config: EngineConfig
    engine_info: EngineInfo = INFO
    answer: Callable[[Request, int], Answer] = Echo
    pages: int = 0  # of a real prefix cache; 0: none
    keeps_pages: bool = True  # a request holds its pages until it ends
    cached_tokens: int = 3  # counts every prompt as if there were no cache
    pace: Pace | None = None  # None: a step takes no time
    slow_s: float = 0.05  # a step while a request with the script "slow" runs
    fails: bool = False  # every request
    notes: Path | None = None  # every request is noted in this file
    flushes: int = 0
    draft: str | None = "fake-draft"
    _running: dict[str, _Running] = field(default_factory=dict)
    _events: list[RequestEvent] = field(default_factory=list)
    _trace: deque[StepTrace] = field(default_factory=partial(deque, maxlen=TRACE_STEPS))

    def __post_init__(self) -> None:
        self._kv = KvCacheManager(self.pages, prefix_cache=True) if self.pages else None
        self._aborts = self._submits = self._steps = self._prompt_tokens = self._hits = 0
        self._deadline_s, self._untold = 0.0, False

    def submit(self, request: Request, waited_s: float = 0.0) -> None:
        script = request.cache_salt.rpartition("/")[2]
        self._note(request)
        if request.request_id in self._running:
            raise DuplicateRequestError("twice")
        if script == "full":
            raise QueueFullError(7, 2.5)
        if script == "long":
            raise PromptTooLongError(11, 12)
        if script == "malformed":
            raise InvalidRequestError.of("grammar", "it is malformed")
        if script == "bug":
            raise RuntimeError("a secret of the inside")
        if bytes(i for i in request.prompt_ids if i < 256).endswith(b"whoami"):
            fields = f"{request.cache_salt} {request.request_id.partition(':')[2]} {request.priority}"
            request = dataclasses.replace(request, prompt_ids=tuple(fields.encode()))
        if script == "odd" and request.speculation.width == 2:  # no true engine may let tokens depend on the width
            request = dataclasses.replace(request, prompt_ids=tuple(reversed(request.prompt_ids)))
        self._submits += 1
        self._deadline_s = request.deadline_s or 0.0
        self._untold = self._untold or script == "untold"
        samples = {index: self.answer(request, index) for index in range(request.sampling.n)}
        resumed = 0 if request.resume is None else len(request.resume.token_ids)
        running = _Running(request, script, time.monotonic(), samples, resumed=resumed, cached=self.cached_tokens)
        self._admit(running)
        self._running[request.request_id] = running

    def abort(self, request_id: str) -> bool:
        running = self._running.get(request_id)
        if running is None:
            return False
        self._aborts += 1
        self._events += [_finished(running, i, FinishReason.ABORTED) for i in running.samples]
        self._end(running)
        return True

    def step(self) -> list[RequestEvent]:
        self._misbehave({running.script for running in self._running.values()})
        events, self._events = self._events, []
        n = len(self._running)
        active = list(self._running.values())[: self.engine_info.max_batch if self.pace else None]
        for running in active:
            events += self._start(running)
        if self.pace is not None:
            if events or not active:
                return events
            wait_s = min(running.due_s for running in active) - time.monotonic()
            if wait_s > 0:
                time.sleep(min(wait_s, _LONGEST_SLEEP_S))
            now = time.monotonic()
            active = [running for running in active if running.due_s <= now]
        for running in active:
            events += self._advance(running)
        self._steps += 1
        self._trace.append(fake_step(self._steps, n))
        return events

    def has_work(self) -> bool:
        return bool(self._running or self._events)

    def idle(self) -> bool:
        return False

    def info(self) -> EngineInfo:
        return dataclasses.replace(self.engine_info, draft=self.draft)

    def load(self) -> EngineLoad:
        if self._kv is not None and self.keeps_pages:
            return EngineLoad(
                running_requests=len(self._running), total_pages=self._kv.n_total, free_pages=self._kv.n_free,
                prompt_tokens=self._prompt_tokens, prefix_hit_tokens=self._hits,
            )  # fmt: skip
        return EngineLoad(
            running_requests=len(self._running), total_pages=64, free_pages=64, tokens_per_second=self._deadline_s,
            prompt_tokens=self._submits, prefix_hit_tokens=self._aborts,
        )  # fmt: skip

    def trace(self, limit: int) -> list[StepTrace]:
        if self._untold:
            raise RuntimeError("a secret of the inside")
        return list(self._trace)[-limit:]

    def follow_cache(self, follower: CacheFollower) -> None:
        if self._kv is not None:
            self._kv.follow(follower)

    def flush_cache(self) -> int:
        self.flushes += 1
        return FLUSHED

    def load_draft(self, draft: str, dtype: str | None) -> str:
        """A draft's name is its script: ``slow`` takes half a second, ``missing`` and ``broken`` fail."""
        if draft == "missing":
            raise ModelError("model 'missing' cannot be found; fetch it")
        if draft == "broken":
            raise RuntimeError("a secret of the inside")
        if draft == "slow":
            time.sleep(0.5)
        return draft if dtype is None else f"{draft}-{dtype}"

    def swap_draft(self, draft: str | None) -> EngineInfo:
        """``unfit`` fails; ``a-head`` is a feature head."""
        if draft == "unfit":
            raise ConfigError("engine.draft: it does not fit")
        if draft is not None and draft.startswith("a-head"):
            self.engine_info = dataclasses.replace(self.engine_info, head=draft)
            return self.info()
        self.draft = draft
        drafters = ("suffix", *(["model"] if draft else []))
        self.engine_info = dataclasses.replace(self.engine_info, drafters=drafters)
        return self.info()

    def close(self) -> None:
        self._running.clear()

    def _admit(self, running: _Running) -> None:
        if self._kv is None:
            return
        request = running.request
        paged = PagedTokens(request.prompt_ids, request.cache_salt)
        hit = self._kv.admit(paged)
        assert hit is not None, "the cache is too small for the requests that run at once"
        self._prompt_tokens += len(request.prompt_ids)
        self._hits += hit.n_tokens
        running.cached = hit.n_tokens
        if self.keeps_pages:
            running.paged = paged
        else:
            self._publish(paged)
            self._kv.release(paged)

    def _publish(self, paged: PagedTokens) -> None:
        assert self._kv is not None
        paged.n_computed = len(paged.tokens) - 1
        self._kv.publish(paged)

    def _misbehave(self, scripts: set[str]) -> None:
        if any("slow" in script for script in scripts):
            time.sleep(3 * self.slow_s if any("slower" in script for script in scripts) else self.slow_s)
        if scripts & {"prefill", "mute"}:
            time.sleep(0.02)
        if "die" in scripts:
            raise RuntimeError("the fake engine was told to die")
        if "exit" in scripts:
            os._exit(7)
        if "hang" in scripts:
            time.sleep(3600)

    def _start(self, running: _Running) -> list[RequestEvent]:
        """Started, if it is due."""
        if running.started:
            return []
        if running.script == "prefill" and running.waited < PREFILL_STEPS:
            running.waited += 1
            return []
        running.started = True
        if self.pace is not None:
            running.due_s = time.monotonic() + self.pace.first_s
        request = running.request
        seed = DEFAULT_SEED if request.sampling.seed is None else request.sampling.seed
        fingerprint = self.engine_info.numeric_fingerprint
        size = len(request.prompt_ids)
        return [Started(request.request_id, seed, size, running.cached, 0.5, fingerprint, running.resumed)]

    def _advance(self, running: _Running) -> list[RequestEvent]:
        request = running.request
        if not running.started or running.script == "mute":
            return []
        if running.script == "held" and any(sample.tokens for sample in running.samples.values()):
            time.sleep(0.005)
            return []
        if self.fails or running.script == "broken":
            self._end(running)
            return [Failed(request.request_id, "MODEL_BROKEN", "no finite logit")]
        if running.paged is not None:
            self._publish(running.paged)
        if self.pace is not None:
            running.due_s += self.pace.step_s
        late = request.deadline_s is not None and time.monotonic() - running.arrival_s > request.deadline_s
        events: list[RequestEvent] = []
        for index in list(running.samples):
            events += [_finished(running, index, FinishReason.DEADLINE)] if late else self._emit(running, index)
            if isinstance(events[-1], Finished):
                del running.samples[index]
        if not running.samples:
            self._end(running)
        return events

    def _emit(self, running: _Running, index: int) -> list[RequestEvent]:
        """The sample's next Delta, its Finished if it ends, or both."""
        request = running.request
        ids, text, ended = running.samples[index].advance()
        events: list[RequestEvent] = []
        if ids:
            wanted, p = request.output.logprobs is not None, getattr(running.samples[index], "logprob", -0.5)
            logprobs = [TokenLogprobs(t, p, [(t, p), (1, -1.25)]) for t in ids] if wanted else []
            events.append(Delta(request.request_id, index, ids, text if request.output.text else "", logprobs))
        if ended is not None:
            events.append(_finished(running, index, ended))
        return events

    def _end(self, running: _Running) -> None:
        del self._running[running.request.request_id]
        if running.paged is not None and self._kv is not None:
            self._kv.release(running.paged)

    def _note(self, request: Request) -> None:
        if self.notes is None:
            return
        note = {
            "text": bytes(request.prompt_ids).decode("latin-1").removeprefix("\x02"),
            "id": request.request_id.partition(":")[2],
            "mode": request.speculation.mode.value,
            "width": request.speculation.width,
            "depth": request.speculation.max_depth,
            "priority": request.priority,
            "tpot": request.target_tpot_ms,
            "salt": request.cache_salt,
            "seed": request.sampling.seed,
            "draft": self.draft,
            "flushed": self.flushes,
        }
        with self.notes.open("a") as out:
            out.write(json.dumps(note) + "\n")


def _finished(running: _Running, index: int, reason: FinishReason) -> Finished:
    request = running.request
    expected = sum(a == b for a, b in zip(request.prompt_ids, request.prediction_ids, strict=False))
    tokens = running.samples[index].tokens
    return Finished(
        request.request_id, index, reason, None,
        Usage(
            len(request.prompt_ids), running.cached, tokens, 0, expected, len(request.prediction_ids) - expected,
            resumed_tokens=running.resumed,
        ),
        SpeculationStats(5, 3, 6, 3, [1, 1, 1], {"suffix": DrafterStats(4, 3), "idle": DrafterStats()}),
        Timings(0.5, 1.5, 2.5, 0.25, 0.75),
        embedding_of(request) if request.pooling is not None and reason is FinishReason.LENGTH else b"",
    )  # fmt: skip


def embedding_of(request: Request) -> bytes:
    """`EMBEDDING_SIZE` values that follow from the prompt and the pooling."""
    values = [*answer_to(request.prompt_ids, EMBEDDING_SIZE - 1), len(str(request.pooling))]
    return (np.array(values) / np.linalg.norm(values)).astype("<f4").tobytes()


def fake_step(step: int, sequences: int = 1) -> StepTrace:
    """A step whose figures have distinct values."""
    parts = [
        DrafterTrace("suffix", "free", sequences, 5, 4, 3, 2.5, 0.125, 7),
        DrafterTrace("model", "off"),
    ]
    return StepTrace(
        step=step, at_s=step / 8, sequences=sequences, rows=sequences + 4, prefill_rows=2, context=17.5,
        candidates=5, budget=4, predicted_tokens=3.5, realised_tokens=4,
        predicted_draft_ms=0.25, realised_draft_ms=0.5, predicted_verify_ms=8.0, realised_verify_ms=9.0, plan_ms=0.375,
        commit_ms=0.125, control_ms=0.0625, drafters=parts,
    )  # fmt: skip


# Factories, as the engine process is given them.
MODULE = __name__
ECHO, ADMIN, CACHING, BOOKS, SCRIPTED, SEVERAL, NOTING, SOAKED = (
    f"{MODULE}:{name}" for name in ("echo", "admin", "caching", "book", "scripted", "several", "noting", "soaked")
)


def echo(config: EngineConfig, progress: Progress) -> FakeEngine:
    """The targets ``missing`` and ``crash`` cannot be loaded; ``slow-start`` takes 0.2 s."""
    progress("load fake", 1, 2)
    if config.target == "missing":
        raise ModelError("model 'missing' cannot be found; fetch it")
    if config.target == "crash":
        raise RuntimeError("crashed while loading")
    if config.target == "slow-start":
        time.sleep(0.2)
    progress("load fake", 2, 2)
    return FakeEngine(config)


def echo_behind_the_tokenizer(config: EngineConfig, progress: Progress) -> FakeEngine:
    """Waits, up to a limit, for a file next to the model's."""
    until = time.monotonic() + 20.0
    while not (Path(config.target) / "tokenizer-read").exists():
        if time.monotonic() > until:
            raise RuntimeError("nobody read the tokenizer meanwhile")
        time.sleep(0.01)
    return FakeEngine(config)


def admin(config: EngineConfig, progress: Progress) -> FakeEngine:
    """Starts with the configuration's draft; refuses ``gone``, which can be swapped in."""
    if config.draft == "gone":
        raise ModelError("engine.draft: gone cannot be found")
    engine = echo(config, progress)
    engine.swap_draft(config.draft)
    return engine


CACHE_PAGES = 8


def caching(config: EngineConfig, progress: Progress) -> FakeEngine:
    """Prompts fill pages, are kept, and push others out."""
    info = dataclasses.replace(INFO, max_context=CACHE_PAGES * 64)
    return FakeEngine(config, info, pages=CACHE_PAGES, keeps_pages=False)


def book(config: EngineConfig, progress: Progress) -> FakeEngine:
    """Continues the book; fills gaps in it."""
    info = dataclasses.replace(
        INFO, target="book", max_context=4096, vocab_size=BOOK_VOCAB, kv_tokens=1 << 16, numeric_fingerprint=""
    )
    return FakeEngine(config, info, BookText, cached_tokens=64, slow_s=0.02, draft=None)


def scripted(config: EngineConfig, progress: Progress) -> FakeEngine:
    """The target is ``scripted:first_ms:step_ms:pages``, with further words ``broken`` (every request fails) or
    ``slots=N`` (so many run at a time). The numeric fingerprint follows from ``engine.dtype``."""
    first_ms, step_ms, pages, *words = config.target.split(":")[1:]
    slots = next((int(word.removeprefix("slots=")) for word in words if word.startswith("slots=")), 256)
    info = dataclasses.replace(
        INFO, target="scripted", max_context=1 << 14, vocab_size=259, kv_tokens=64 * int(pages), max_batch=slots,
        drafters=(), eos_ids=(), numeric_fingerprint=f"numbers-{config.dtype}",
    )  # fmt: skip
    return FakeEngine(
        config, info, Letters, pages=int(pages), pace=Pace(float(first_ms) / 1e3, float(step_ms) / 1e3),
        fails="broken" in words, draft=None,
    )  # fmt: skip


CHAT, CODER, EMBEDDER, RERANKER = "echo-1", "book-2", "embedder-3", "reranker-4"
MACHINE_BYTES, NEEDED_BYTES = 4 << 50, 2 << 50


def several(config: EngineConfig, progress: Progress) -> FakeEngine:
    """Engines of one server: `CHAT` echoes, `CODER` is the book, `EMBEDDER` embeds, `RERANKER` judges. Two of them have
    memory on a machine of a few petabytes; a ``kv_tokens`` that leaves too little for the other one does not fit."""
    engine = (book if config.target == CODER else echo)(config, progress)
    if config.target in (EMBEDDER, RERANKER):
        pooling = {EMBEDDER: "last", RERANKER: "rank"}[config.target]
        info = dataclasses.replace(INFO, pooling=pooling, max_batch=2, max_context=1024)
        engine = FakeEngine(config, info, Judge if config.target == RERANKER else Echo)
        engine.engine_info = dataclasses.replace(info, target=config.target, threads=config.threads)
        return engine
    needed = NEEDED_BYTES + config.kv_tokens
    if needed + config.spare_bytes > MACHINE_BYTES:
        raise ModelError(f"memory: too little; lower engine.kv_tokens from {config.kv_tokens}")
    engine.engine_info = dataclasses.replace(
        engine.engine_info, target=config.target, threads=config.threads, memory_bytes=needed
    )
    return engine


_NOTES = "requests.jsonl"


def noting(config: EngineConfig, progress: Progress) -> FakeEngine:
    """Has two places and notes every request in ``engine.cache_dir``, for `noted`."""
    engine = admin(config, progress)
    engine.engine_info = dataclasses.replace(engine.engine_info, max_batch=2, indexes=("docs", "code"))
    engine.notes = config.cache_dir / _NOTES
    return engine


def noted(folder: Path) -> list[dict[str, Any]]:
    """The requests of an engine that `noting` made, in order."""
    path = folder / _NOTES
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def of_given_settings(config: EngineConfig, progress: Progress) -> FakeEngine:
    """Lists the settings that were given in place of drafters."""
    return FakeEngine(config, dataclasses.replace(INFO, drafters=tuple(sorted(config.model_fields_set))))


def soaked(config: EngineConfig, progress: Progress) -> FakeEngine:
    """Echoes, and holds pages of a large cache."""
    return FakeEngine(config, dataclasses.replace(INFO, max_context=1024), pages=512)


def slow_to_exit(config: EngineConfig, progress: Progress) -> FakeEngine:
    """Its interpreter takes a minute to end."""
    atexit.register(time.sleep, 60)
    return FakeEngine(config)


def unavailable(config: EngineConfig, progress: Progress) -> FakeEngine:
    """Never starts."""
    raise ModelError(f"{config.target} is not there")
