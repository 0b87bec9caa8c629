"""Capture of requests to files, and the conversion of captures into traces that can be replayed."""

from __future__ import annotations

import logging
import secrets
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from server.errors import CAPTURE_FILE, FileErrors
from server.frame_files import FrameFiles, FrameWriter
from server.observe.records import RequestRecord, TelemetryListener
from specdec.errors import ConfigError

_LOG = logging.getLogger(__name__)

BLOCK = 64  # tokens
_HASH_BYTES = 8


class BlockHashes:
    """Keyed hashes of prompts and names. The key is random and is never stored, so texts cannot be looked up."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def of_prompt(self, ids: Sequence[int]) -> list[bytes]:
        """A hash per whole block of `BLOCK` tokens, chained: two prompts share as many hashes as whole blocks of their
        common prefix."""
        found: list[bytes] = []
        before = b""
        data = array("q", ids).tobytes()
        step = BLOCK * array("q").itemsize
        for start in range(0, len(data) - step + 1, step):
            before = blake2b(before + data[start : start + step], key=self._key, digest_size=_HASH_BYTES).digest()
            found.append(before)
        return found

    def of_name(self, name: str) -> bytes:
        """The hash of a session, salt or caller; empty for an empty name."""
        text = name.encode("utf-8", "surrogatepass")
        return blake2b(text, key=self._key, person=b"name", digest_size=_HASH_BYTES).digest() if name else b""


_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def capture_entry(record: RequestRecord, at_s: float, hashes: BlockHashes, *, prompts: bool) -> dict[str, Any]:
    """A request as plain values. ``at_s``: its arrival, Unix time; other times are seconds after that.

    Without ``prompts`` the entry contains no tokens and no strings of the request; sessions, salts and callers only as
    hashes.
    """
    request = record.request
    started, call = record.started, record.call
    entry: dict[str, Any] = {
        "at_s": at_s,
        "end_s": record.ended_s - record.began_s,
        "first_s": record.ttft_s,
        "status": "ok" if record.complete and record.error is None else _end_reason(record),
        "prompt_tokens": len(request.prompt_ids),
        "cached_tokens": 0 if started is None else started.cached_tokens,
        "output_tokens": record.output_tokens,
        "blocks": hashes.of_prompt(request.prompt_ids),
        "n": request.sampling.n,
        "max_tokens": request.stopping.max_tokens,
        "ignore_eos": request.stopping.ignore_eos,
        "seed": request.sampling.seed if started is None else started.seed,
        **{name: getattr(request.sampling, name) for name in _SAMPLING},
        "speculation": request.speculation.mode.value,
        "priority": request.priority,
        "session": hashes.of_name(request.session),
        "salt": hashes.of_name(request.cache_salt),
        "prediction_tokens": len(request.prediction_ids),
        "prediction_form": request.prediction_form,
        "grammar": None if request.grammar is None else request.grammar.kind.value,
    }
    if record.model:
        entry["model"] = record.model
    if call is not None:
        entry |= {"face": call.protocol, "endpoint": call.endpoint}
    if prompts:
        entry |= {"ids": request.prompt_ids, "stop": request.stopping.stop, "prediction_ids": request.prediction_ids}
    return entry


def _end_reason(record: RequestRecord) -> str:
    if record.error is None:
        return "LEFT"
    return str(getattr(record.error, "reason", "INTERNAL"))


CAPTURE_FILES = FrameFiles("capture-", ".sdc", digits=8, magic=b"SDCAP\x00\x00\x01")


MAX_BYTES = 256 << 20  # of all capture files in a folder


class CaptureWriter:
    """Appends entries. A file that reaches a sixteenth of ``max_bytes`` is followed by a new one, and the oldest files
    are deleted, so that the total stays below ``max_bytes``.

    Raises:
        OSError: the folder cannot be created or written.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._writer = FrameWriter(folder, CAPTURE_FILES, sync=False)  # do not block the event loop
        self._begin_file()

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append an entry.

        Raises:
            OSError: the disk is full or read-only.
            ValueError: the entry exceeds the maximum size.
        """
        data = self._writer.frame(entry)
        if self._writer.size + len(data) > self._max_bytes // 16:
            self._begin_file()
        self._writer.append(data)

    def close(self) -> None:
        self._writer.close()

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


def read_entries(folder: Path) -> Iterator[dict[str, Any]]:
    """Every valid entry, file by file. The rest of a file behind a torn or altered entry is skipped.

    Raises:
        OSError: a file cannot be read.
    """
    for path in CAPTURE_FILES.paths(folder):
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # deleted by the server in the meantime
            continue
        if not data.startswith(CAPTURE_FILES.magic):
            continue
        for entry, _ in CAPTURE_FILES.values(data):
            if isinstance(entry, dict):
                yield entry


class Capture(TelemetryListener):
    """A listener that writes `capture_entry` of each request as it ends, so entries are not in order of arrival. While
    the disk is full or read-only, requests are not captured, which is logged once and counted.

    Raises:
        ConfigError: the folder cannot be written at start.
    """

    def __init__(
        self, folder: Path, max_bytes: int = MAX_BYTES, *, prompts: bool, file_errors: FileErrors | None = None
    ) -> None:
        self._folder, self._prompts, self._hashes = folder, prompts, BlockHashes()
        self._errors: FileErrors = Counter() if file_errors is None else file_errors
        self._failing = self._closed = False
        try:
            self._writer = CaptureWriter(folder, max_bytes)
        except OSError as error:
            raise ConfigError(f"server.capture_dir: {folder} cannot be written ({error.strerror})") from None

    def request_ended(self, record: RequestRecord) -> None:
        """Write the request, including one that only warms the cache."""
        if self._closed:
            return
        at_s = time.time() - (time.monotonic() - record.began_s)
        entry = capture_entry(record, at_s, self._hashes, prompts=self._prompts)
        try:
            self._writer.write(entry)
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


_PLAIN = {"temperature": None, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def make_trace(entries: Iterable[dict[str, Any]], since_s: float, until_s: float) -> Iterator[dict[str, Any]]:
    """The requests that arrived in [since_s, until_s) (Unix time), in order of arrival, in the format of
    `specdec.load.trace_file`; ``offset_s`` counts from the first of them.

    A request captured with its tokens is replayed as it was. Otherwise it is replayed with a prompt of the same length
    that shares the same blocks with others, and an answer of the same length. Requests that only warmed the cache are
    omitted. Fields ``was_*`` hold the captured outcome: ``was_s`` is the duration, ``was_first_s`` the time to the
    first tokens.
    """
    chosen = sorted(
        (e for e in entries if since_s <= e["at_s"] < until_s and e["max_tokens"] != 0), key=lambda e: float(e["at_s"])
    )
    for number, entry in enumerate(chosen):
        yield _trace_line(entry, number, chosen[0]["at_s"])


def _trace_line(entry: dict[str, Any], number: int, start_s: float) -> dict[str, Any]:
    line: dict[str, Any] = {"offset_s": round(entry["at_s"] - start_s, 6), "name": f"captured/{number}"}
    if entry.get("ids"):
        line |= {"prompt_ids": list(entry["ids"]), "fixed": entry["ignore_eos"]}
        # An answer without a limit ended by itself or at the end of the context.
        line["max_tokens"] = entry["max_tokens"] or max(1, entry["output_tokens"] // entry["n"])
        if entry.get("stop"):
            line["stop"] = list(entry["stop"])
    else:
        blocks = [block.hex() for block in entry["blocks"]]
        line |= {"prompt_blocks": blocks, "prompt_tokens": entry["prompt_tokens"], "fixed": True}
        line["max_tokens"] = max(1, entry["output_tokens"] // entry["n"])
    line |= {name: entry[name] for name, plain in _PLAIN.items() if entry[name] != plain}
    line |= {name: entry[name].hex() for name in ("session", "salt") if entry[name]}
    if entry.get("model"):
        line["model"] = entry["model"]
    if entry["seed"] is not None:
        line["seed"] = entry["seed"]
    was = {"was_status": entry["status"], "was_s": round(entry["end_s"], 6), "was_tokens": entry["output_tokens"]}
    if entry.get("first_s") is not None:  # older captures lack it
        was["was_first_s"] = round(entry["first_s"], 6)
    return line | was
