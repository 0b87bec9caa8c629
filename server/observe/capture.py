"""Capture of requests to files of JSON lines, which can be replayed."""

from __future__ import annotations

import logging
import secrets
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from server.errors import CAPTURE_FILE, FileErrors
from server.frame_files import NumberedFiles, NumberedWriter
from server.observe.records import RequestRecord, TelemetryListener
from specdec.core.types import FinishReason
from specdec.errors import ConfigError, InvalidRequestError, PromptTooLongError
from specdec.load.arrivals import BLOCK_TOKENS
from specdec.load.trace_file import CAPTURE_PREFIX, CAPTURE_SUFFIX

_LOG = logging.getLogger(__name__)

_HASH_BYTES = 8


class BlockHashes:
    """Keyed hashes of prompts and names. The key is random and is never stored, so texts cannot be looked up."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def of_prompt(self, ids: Sequence[int]) -> list[str]:
        """A hash per whole block of `BLOCK_TOKENS` tokens, chained: two prompts share as many hashes as whole blocks of
        their common prefix."""
        found: list[str] = []
        before = b""
        data = array("q", ids).tobytes()
        step = BLOCK_TOKENS * array("q").itemsize
        for start in range(0, len(data) - step + 1, step):
            before = blake2b(before + data[start : start + step], key=self._key, digest_size=_HASH_BYTES).digest()
            found.append(before.hex())
        return found

    def of_name(self, name: str) -> str:
        """The hash of a session or salt; empty for an empty name."""
        text = name.encode("utf-8", "surrogatepass")
        return blake2b(text, key=self._key, person=b"name", digest_size=_HASH_BYTES).hexdigest() if name else ""


_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_REPLAYED_ENDS = (FinishReason.EOS, FinishReason.STOP_STRING, FinishReason.LENGTH)


def trace_line(record: RequestRecord, arrived_s: float, hashes: BlockHashes, *, prompts: bool) -> dict[str, Any]:
    """A request as a line of a trace (`specdec.load.trace_file`); its offset is ``arrived_s``, Unix time.

    With ``prompts`` it is replayed with its prompt, prediction and stop strings. Otherwise the line has no tokens and
    no strings of the request, sessions and salts only as hashes: it is replayed with a prompt of the same length that
    shares the same blocks with others, and an answer of the same length. Grammars, thinking budgets, penalties, biases,
    stop tokens, rules of a text's layout, ``min_tokens``, time limits, priorities, speculation options and samples
    after the first are not replayed. If one of these, or the caller, ended an answer, its replay has no more tokens.
    """
    request, started = record.request, record.started
    sampling, stopping = request.sampling, request.stopping
    answered = max(1, record.output_tokens // sampling.n)
    line: dict[str, Any] = {"offset_s": arrived_s}
    if prompts:
        ends = [finished.reason in _REPLAYED_ENDS for finished in record.finished]
        ends_again = started is None or (bool(ends) and all(ends) and request.grammar is None)
        # An answer without a limit ended by itself or at the end of the context.
        line |= {
            "prompt_ids": request.prompt_ids, "prediction_ids": request.prediction_ids, "stop": stopping.stop,
            "max_tokens": (ends_again and stopping.max_tokens) or answered, "fixed": stopping.ignore_eos,
        }  # fmt: skip
    else:
        line |= {
            "prompt_blocks": hashes.of_prompt(request.prompt_ids), "prompt_tokens": len(request.prompt_ids),
            "max_tokens": answered, "fixed": True,
        }  # fmt: skip
    return line | {
        "session": hashes.of_name(request.session), "salt": hashes.of_name(request.cache_salt), "model": record.model,
        "seed": sampling.seed if started is None else started.seed,
        **{name: getattr(sampling, name) for name in _SAMPLING},
        "was_tokens": record.output_tokens, "was_first_s": record.ttft_s,
    }  # fmt: skip


CAPTURE_FILES = NumberedFiles(CAPTURE_PREFIX, CAPTURE_SUFFIX, digits=8)


MAX_BYTES = 256 << 20  # of all capture files in a folder


class Capture(TelemetryListener):
    """A listener that writes `trace_line` of each request as it ends, so lines are not in order of arrival. While the
    disk is full or read-only, requests are not captured, which is logged once and counted.

    A file that reaches a sixteenth of ``max_bytes`` is followed by a new one, and the oldest files are deleted, so that
    the total stays below ``max_bytes``.

    Raises:
        ConfigError: the folder cannot be written at start.
    """

    def __init__(
        self, folder: Path, max_bytes: int = MAX_BYTES, *, prompts: bool, file_errors: FileErrors | None = None
    ) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._prompts, self._hashes = prompts, BlockHashes()
        self._epoch_s = time.time() - time.monotonic()  # fixed, so that a step of the clock makes no gap in a replay
        self._errors: FileErrors = Counter() if file_errors is None else file_errors
        self._failing = self._closed = False
        try:
            self._writer = NumberedWriter(folder, CAPTURE_FILES, sync=False)  # do not block the event loop
            self._begin_file()
        except OSError as error:
            raise ConfigError(f"server.capture_dir: {folder} cannot be written ({error.strerror})") from None

    def request_ended(self, record: RequestRecord) -> None:
        """Write the request, unless it was invalid or only warmed the cache."""
        refused = isinstance(record.error, InvalidRequestError | PromptTooLongError)
        if self._closed or refused or record.request.stopping.max_tokens == 0:
            return
        try:
            self.write(trace_line(record, self._epoch_s + record.began_s, self._hashes, prompts=self._prompts))
        except ValueError as error:
            _LOG.warning("a request was not captured: %s", error)
        except OSError as error:
            self._errors[CAPTURE_FILE] += 1
            if not self._failing:
                _LOG.error("%s: %s; requests are not captured until it can be written", self._folder, error.strerror)
            self._failing = True
        else:
            if self._failing:
                _LOG.info("%s: requests are captured again", self._folder)
            self._failing = False

    def close(self) -> None:
        self._closed = True
        self._writer.close()

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line.

        Raises:
            OSError: the disk is full or read-only.
            ValueError: the line is larger than a file.
        """
        data, most = orjson.dumps(line) + b"\n", self._max_bytes // 16
        if len(data) > most:
            raise ValueError(f"it takes {len(data)} bytes, and a file has at most {most}: leave the prompts out")
        if self._writer.size + len(data) > most:
            self._begin_file()
        self._writer.append(data)

    def _begin_file(self) -> None:
        room = self._max_bytes * 15 // 16
        sizes = {path: path.stat().st_size for path in CAPTURE_FILES.paths(self._folder)}
        left = sum(sizes.values())
        for path, size in sizes.items():
            if left <= room:
                break
            path.unlink()
            left -= size
        self._writer.begin_file()
