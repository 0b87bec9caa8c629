"""Compiles the grammars of requests in a thread, and caches the results."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import signal
import subprocess
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from llguidance import LLMatcher, LLTokenizer

from specdec.child_python import module_command, module_environment
from specdec.core.sampling import token_mask
from specdec.core.types import GrammarKind, GrammarParams
from specdec.errors import InvalidRequestError, QueueFullError
from specdec.grammar.check_process import NICENESS, STACK_BYTES, compile_matcher
from specdec.grammar.state import GrammarState, TokenHealing, healing_matcher, shortened
from specdec.models.tokenizer import Tokenizer

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

MAX_FORCED_CHARACTERS = 1024
"""Of a text that a grammar forces, looked at to draft and to mask: 0.5 ms; 32,000 characters take 10 ms a step."""


class GrammarVocabulary:
    """The tokenizer that ``llguidance.LLTokenizer`` expects; the attribute names are the library's.

    eos_ids: end tokens, not empty. Tokens are the bytes of the output's text (`Tokenizer.token_bytes`), so a grammar
    constrains what the caller reads. Padding ids have no bytes, so they are never allowed.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = _special_ids(tokenizer, vocab_size, eos_ids)
        self.eos_token_id, self.bos_token_id = eos_ids[0], None

    def __call__(self, text: str) -> list[int]:
        """Token ids of the beginning of ``text`` inside an output; their bytes are exactly those of it.

        The library forces these tokens without trying them, so they must not show what a tokenizer puts before a text
        or normalises.
        """
        text = text[:MAX_FORCED_CHARACTERS]
        return self._tokenizer.encode_inside(text) or self._longest_matches(text.encode())

    def _longest_matches(self, rest: bytes) -> list[int]:
        ids = []
        # Where no token holds the next byte, nothing is forced
        while size := next((size for size in range(len(rest), 0, -1) if rest[:size] in self._by_bytes), 0):
            ids.append(self._by_bytes[rest[:size]])
            rest = rest[size:]
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        """Text tokens by their bytes; of equal ones the lowest id."""
        special = set(self.special_token_ids)
        return {self.tokens[t]: t for t in reversed(range(len(self.tokens))) if t not in special and self.tokens[t]}


def _special_ids(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> list[int]:
    return sorted(token for token in tokenizer.special_ids | set(eos_ids) if token < vocab_size)


CHECK_SECONDS = 1.0
"""Processor time of a grammar's check. Ordinary grammars take milliseconds, schemas of 64 KiB about 0.1 s."""
CHECK_WALL_SECONDS = 15.0
"""Time after which the check of a grammar is given up on a machine that is too busy to run it."""


class CheckProcess:
    """Runs `specdec.grammar.check_process`, and replaces it when a grammar has ended it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        special = {t: tokenizer.token_bytes(t).hex() for t in _special_ids(tokenizer, vocab_size, eos_ids)}
        self._first_line = json.dumps([vocab_size, special, eos_ids])
        self._process: subprocess.Popen[str] | None = None
        self._interrupted = False  # since then, until `close`, no process is started in place of the killed one
        self._finalizer: Callable[[], Any] = lambda: None

    def check(self, params: GrammarParams, cpu_seconds: float) -> str:
        """The source for `compile_matcher` of a grammar that compiles within ``cpu_seconds``.

        Raises:
            ValueError: the grammar is wrong or too complex.
            OSError: the process does not start, or ended for a reason of its own; the grammar may be a good one.
        """
        if self._process is not None and self._process.poll() is not None and not self._interrupted:
            self.close()  # something else ended it while it had nothing to do
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        line = ""
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps([params.kind.value, params.text, cpu_seconds]) + "\n")
            process.stdin.flush()
            answered = select.poll()
            answered.register(process.stdout, select.POLLIN)
            if answered.poll(CHECK_WALL_SECONDS * 1e3):
                line = process.stdout.readline()
        if not line.endswith("\n"):
            self.close()
            status = process.returncode
            if status == -signal.SIGPROF:
                raise ValueError(f"too complex: it does not compile within {cpu_seconds:g} s")
            if status in (-signal.SIGABRT, -signal.SIGSEGV):  # no memory, no stack
                raise ValueError("too complex: it takes too much memory to compile")
            raise OSError(f"the process that checks grammars ended with status {status}; send the request again")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return str(answer["source"])

    def interrupt(self) -> None:
        """Kill the process, so that a check in another thread raises OSError."""
        self._interrupted = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process; the next check starts another."""
        self._finalizer()
        self._process, self._interrupted = None, False

    def _start(self) -> subprocess.Popen[str]:
        self._process = process = subprocess.Popen(
            module_command("specdec.grammar.check_process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=module_environment(),
            text=True,
        )
        self._finalizer = weakref.finalize(self, _end, process)
        assert process.stdin is not None
        process.stdin.write(self._first_line + "\n")
        return process


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe.close()  # type: ignore[union-attr]


MAX_CACHED = 64
"""Compiled grammars that are kept, refused ones included."""
MAX_PENDING_PER_KEY = 128
"""Grammars of one key that wait. Keys take turns, so one key's grammars delay another's by one check each. The engine
bounds those of all keys, since a request waits for each (`RequestPreparation`)."""
RETRY_S = 5.0
"""The wait that a client is asked for when too many grammars wait."""
_HINTS = {  # the way out that a refusal names
    GrammarKind.JSON_SCHEMA: "correct or simplify the schema",
    GrammarKind.JSON_OBJECT: "send a schema instead",
    GrammarKind.REGEX: "correct or simplify the expression (Rust regex syntax)",
    GrammarKind.EBNF: "correct or simplify the grammar (Lark with a start rule, or GBNF with a root rule)",
    GrammarKind.CHOICE: 'send a JSON array of strings, such as ["yes", "no"]',
}


class GrammarCompiler:
    """Compiles grammars, and builds the vocabulary's tables, in a thread of its own. All methods return at once, except
    `wait_until_prepared` and `close`.

    A grammar is checked by a `CheckProcess`, then compiled in the thread, which releases the interpreter's lock
    meanwhile. Equal grammars are compiled once. The thread ends when nothing waits.

    vocab_size: columns of the logits; ids beyond the tokenizer's are never allowed. check_seconds: processor time that
    a grammar may take.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, check_seconds: float = CHECK_SECONDS) -> None:
        self._tokenizer, self._vocab_size, self._check_seconds = tokenizer, vocab_size, check_seconds
        self._eos_ids = tuple(token for token in tokenizer.eos_ids if 0 <= token < vocab_size)
        self._check_process = CheckProcess(tokenizer, vocab_size, self._eos_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[GrammarParams, Future[Any]] = OrderedDict()
        self._prepared: Future[LLTokenizer] | None = None
        self._healed: tuple[str, LLMatcher] | None = None
        self._jobs: OrderedDict[str | None, deque[_Job]] = OrderedDict()  # by key, next turn first
        self._thread: threading.Thread | None = None

    def prepare(self) -> Future[LLTokenizer]:
        """Start to build the tables of the vocabulary, which the first grammar would build and `healing` needs."""
        with self._lock:
            if self._prepared is None:
                self._prepared = self._enqueue(None, lambda: self._vocabulary)
            return self._prepared

    def wait_until_prepared(self) -> None:
        """Wait for the tables that `prepare` builds. If they cannot be built, requests that need them fail later."""
        if self._prepared is not None and (error := self._prepared.exception()) is not None:
            logger.warning("grammars and token healing do not work with this vocabulary: %s", error)

    def healing(self, start: str) -> TokenHealing:
        """A state at the start of an output that begins with ``start``, once the tables are built; one per sample."""
        if self._healed is None or self._healed[0] != start:
            self._healed = start, healing_matcher(start, self._vocabulary)
        return TokenHealing(start, self._healed[1], self._tokenizer, self._vocab_size)

    def start(self, params: GrammarParams, key: str) -> Future[Any]:
        """Start to compile a grammar. The result is for `state`; it raises InvalidRequestError for a bad grammar.

        Who cancels the future gives its place in the queue back.

        key: whose grammar it is.

        Raises:
            InvalidRequestError: the model names no end token.
            QueueFullError: too many grammars of this key wait.
        """
        if not self._eos_ids:
            raise InvalidRequestError.of(
                "grammar", "the model names no end token, so the output could not end; leave it out"
            )
        with self._lock:
            found = self._compiled.get(params)
            if found is None or found.cancelled():
                self._check_room(key)
                found = self._compiled[params] = self._enqueue(key, lambda: self._compile(params))
                done = [old for old, future in self._compiled.items() if future.done()]
                for old in done[: max(0, len(self._compiled) - MAX_CACHED)]:
                    del self._compiled[old]
            self._compiled.move_to_end(params)
        return found

    def state(self, compiled: Future[Any], allowed_token_ids: Sequence[int] = ()) -> GrammarState:
        """A state at the start of the output of a grammar that is compiled; one per sample.

        allowed_token_ids: the request's own, which must be able to begin and to end such an output.

        Raises:
            InvalidRequestError: ``grammar`` is malformed, too complex, or matches nothing that the model can say;
                ``sampling.allowed_token_ids`` holds no end token or none that can begin.
        """
        matcher, by_copies = compiled.result()
        state = GrammarState(matcher, by_copies, self._eos_ids, self._vocab_size)
        _check_beginning(state, allowed_token_ids, self._eos_ids)
        return state

    def close(self) -> None:
        """Cancel what waits, and end the thread and the check process; they start again when they are needed."""
        with self._lock:
            for jobs in self._jobs.values():
                for job in jobs:
                    job.future.cancel()
            thread = self._thread
        self._check_process.interrupt()
        if thread is not None:
            thread.join()
        self._check_process.close()

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        # The library needs an end token, also for a model that has none and only heals: the first id beyond its own
        eos_ids, size = self._eos_ids or (self._vocab_size,), self._vocab_size + (not self._eos_ids)
        tokens = GrammarVocabulary(self._tokenizer, size, eos_ids)
        return LLTokenizer(tokens, n_vocab=size, eos_token=list(eos_ids))

    def _compile(self, params: GrammarParams) -> Any:
        try:
            source = self._check_process.check(params, self._check_seconds)
            by_copies = params.kind is GrammarKind.EBNF and ("<" in params.text or "no_forcing" in params.text)
            return compile_matcher(source, self._vocabulary), by_copies
        except ValueError as error:
            raise InvalidRequestError.of("grammar", _explained(params, str(error))) from None
        except Exception:
            with self._lock:
                self._compiled.pop(params, None)  # the next request tries again
            raise
        except BaseException as error:  # a panic of the library, which must not end the engine
            raise InvalidRequestError.of("grammar", _explained(params, str(error))) from None

    def _check_room(self, key: str) -> None:
        """Drop cancelled grammars, and refuse a further one of ``key`` if too many are left."""
        left = [(name, deque(job for job in jobs if not job.future.cancelled())) for name, jobs in self._jobs.items()]
        self._jobs = OrderedDict((name, jobs) for name, jobs in left if jobs)
        if len(self._jobs.get(key, ())) >= MAX_PENDING_PER_KEY:
            raise QueueFullError(MAX_PENDING_PER_KEY, RETRY_S, "grammars of one key")

    def _enqueue(self, key: str | None, work: Callable[[], Result]) -> Future[Result]:
        """Let the thread do ``work``. The lock is held, so the thread takes it only after the caller is done.

        Raises:
            RuntimeError: the thread cannot be started now; nothing has changed.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="specdec-grammar", daemon=True)
            before = threading.stack_size(STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
            self._thread = thread
        job = _Job(Future(), work)
        self._jobs.setdefault(key, deque()).append(job)
        return job.future

    def _work(self) -> None:
        """Run jobs, one of each key in turn, until there are none."""
        os.nice(NICENESS)  # of this thread; it never raises the priority, which a process may not do
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                key, jobs = next(iter(self._jobs.items()))
                job = jobs.popleft()
                if jobs:
                    self._jobs.move_to_end(key)
                else:
                    del self._jobs[key]
            job.run()


class _Job(NamedTuple):
    """What the thread does, and the future of its result."""

    future: Future[Any]
    work: Callable[[], Any]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.work())
        except BaseException as error:  # a panic of Rust code is no Exception, and would end the engine
            self.future.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))


def _check_beginning(state: GrammarState, allowed: Sequence[int], eos_ids: Sequence[int]) -> None:
    if not allowed:
        return
    field, ends = "sampling.allowed_token_ids", ", ".join(map(str, eos_ids))
    if not set(allowed) & set(eos_ids):
        raise InvalidRequestError.of(field, f"with a grammar it must hold an end token ({ends}); add it")
    mask = state.mask(())
    if not (mask & token_mask(allowed, 32 * mask.size)).any():
        raise InvalidRequestError.of(field, "none of them can begin an output of the grammar; allow more")


_AT = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: (.*?)(?:\n +\d+ \| .*)?", re.DOTALL)


def _explained(params: GrammarParams, message: str) -> str:
    """The refusal's text. Of a schema inside of a grammar it has the comment above instead of the grammar's lines."""
    lines, found = params.text.split("\n"), _AT.fullmatch(message)
    above = lines[int(found[1]) - 2] if found is not None and 1 < int(found[1]) <= len(lines) else ""
    if found is not None and above.startswith("// "):
        return f"{above[3:]}: {shortened(found[2])}; {_HINTS[GrammarKind.JSON_SCHEMA]}"
    return f"{shortened(message)}; {_HINTS[params.kind]}"
