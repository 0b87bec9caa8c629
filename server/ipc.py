"""The socket between the front end and the engine's process: frames, messages as msgpack, and both ends."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import StrEnum
from operator import attrgetter
from typing import Any

import msgpack

from specdec.types import (
    Delta,
    DrafterStats,
    DrafterTrace,
    EngineInfo,
    EngineLoad,
    Failed,
    Finished,
    FinishReason,
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    RequestEvent,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    SpeculationStats,
    Started,
    StepTrace,
    StepTree,
    StoppingParams,
    TextRules,
    Timings,
    TokenLogprobs,
    Usage,
)

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30


class Frame(StrEnum):
    """The kinds of frame and what follows each.

    To the engine process: ``SUBMIT`` request, ``ABORT`` request id, ``TRACE`` number of the call, steps at most,
    ``ADMIN`` number of the call, command, its arguments; ``CLOSE``.
    From it: ``PROGRESS`` label, done, total; ``READY`` info; ``EVENTS`` list, one frame per step;
    ``REFUSED`` request id, error; ``TRACE`` number of the call, error or None, list of steps;
    ``ADMIN`` number of the call, error or None, result; ``ALIVE`` load;
    ``DIED`` whether it was a refusal to start, message.
    """

    SUBMIT = "submit"
    ABORT = "abort"
    TRACE = "trace"
    ADMIN = "admin"
    CLOSE = "close"
    PROGRESS = "progress"
    READY = "ready"
    EVENTS = "events"
    REFUSED = "refused"
    ALIVE = "alive"
    DIED = "died"


class FrameError(ValueError):
    """The peer sent bytes that are no frame; the connection can not go on."""


def pack_frame(*parts: Any) -> bytes:
    """One frame holding ``parts``, ready to send.

    Raises:
        FrameError: it exceeds ``MAX_FRAME_BYTES``.
    """
    body = msgpack.packb(parts, use_bin_type=True)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into frames; feed it whatever arrived."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[list[Any]]:
        """Take ``data`` and return every frame that is complete now.

        Raises:
            FrameError: a length is absurd, or a body is not a msgpack array.
        """
        self._buffer += data
        frames: list[list[Any]] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"frame length {length} exceeds {MAX_FRAME_BYTES}")
            body = start + _LENGTH.size
            if len(self._buffer) < body + length:
                break
            start = body + length
            frames.append(_unpack_frame(bytes(self._buffer[body:start])))
        del self._buffer[:start]
        return frames


def _unpack_frame(body: bytes) -> list[Any]:
    try:
        parts = msgpack.unpackb(body, raw=False, strict_map_key=False)
    except Exception as error:  # the library raises several unrelated types for malformed input
        raise FrameError(f"frame is not msgpack: {error}") from None
    if not isinstance(parts, list) or not parts:
        raise FrameError("frame is not a non-empty array")
    return parts


_STARTED, _DELTA, _FINISHED, _FAILED = range(4)
_PLAIN: dict[Any, type] = {"int": int, "float": float, "str": str}
# Each record of a request or an event is read here, and asking a class for its fields takes longer than reading them.
_READERS: dict[type, attrgetter[tuple[Any, ...]]] = {
    kind: attrgetter(*(field.name for field in fields(kind)))
    for kind in (
        SamplingParams, StoppingParams, TextRules, OutputParams, SpeculationParams, GrammarParams, Started, Failed,
        Usage, SpeculationStats, DrafterStats, Timings, StepTree, EngineInfo, EngineLoad,
    )
}  # fmt: skip


def pack_request(request: Request) -> tuple[Any, ...]:
    """``request`` as nested tuples of plain values."""
    return (
        request.request_id,
        request.prompt_ids,
        _values(request.sampling),
        _stopping_values(request.stopping),
        _values(request.output),
        _values(request.speculation),
        request.priority,
        request.deadline_s,
        request.cache_salt,
        request.prediction_ids,
        request.session,
        request.target_tpot_ms,
        None if request.grammar is None else _values(request.grammar),
        request.healing_prefix,
    )


def unpack_request(parts: Sequence[Any]) -> Request:
    """The inverse of `pack_request`, after msgpack made lists of the tuples."""
    request_id, prompt_ids, sampling, stopping, output, speculation, priority, deadline_s, salt, *more = parts
    prediction, session, target_tpot_ms, grammar, healing_prefix = more
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        sampling=_sampling(sampling),
        stopping=_stopping(stopping),
        output=OutputParams(*output),
        speculation=_speculation(speculation),
        priority=priority,
        deadline_s=deadline_s,
        cache_salt=salt,
        prediction_ids=tuple(prediction),
        session=session,
        target_tpot_ms=target_tpot_ms,
        grammar=None if grammar is None else GrammarParams(GrammarKind(grammar[0]), grammar[1]),
        healing_prefix=healing_prefix,
    )


def pack_event(event: RequestEvent) -> tuple[Any, ...]:
    """``event`` as a tuple that begins with its kind and request id."""
    match event:
        case Delta(request_id, index, token_ids, text, logprobs, tree):
            rows = [(p.token_id, p.logprob, p.top) for p in logprobs]
            return (_DELTA, request_id, index, token_ids, text, rows, None if tree is None else _values(tree))
        case Started():
            return (_STARTED, *_values(event))
        case Finished(request_id, index, reason, matched_stop, usage, stats, timings):
            by_drafter = {name: _values(part) for name, part in stats.by_drafter.items()}
            figures = (_values(usage), (*_values(stats)[:-1], by_drafter), _values(timings))
            return (_FINISHED, request_id, index, reason.value, matched_stop, *figures)
        case Failed():
            return (_FAILED, *_values(event))


def unpack_event(parts: Sequence[Any]) -> RequestEvent:
    """The inverse of `pack_event`.

    Raises:
        ValueError: the kind is none of ours.
    """
    kind, *rest = parts
    if kind == _DELTA:
        request_id, index, token_ids, text, rows, tree = rest
        logprobs = [TokenLogprobs(t, p, [(i, q) for i, q in top]) for t, p, top in rows]
        return Delta(request_id, index, token_ids, text, logprobs, None if tree is None else StepTree(*tree))
    if kind == _STARTED:
        return Started(*rest)
    if kind == _FINISHED:
        request_id, index, reason, matched, usage, stats, timings = rest
        return Finished(
            request_id, index, FinishReason(reason), matched, Usage(*usage), _stats(stats), Timings(*timings)
        )
    if kind == _FAILED:
        return Failed(*rest)
    raise ValueError(f"unknown kind of event {kind!r}")


def pack_info(info: EngineInfo) -> tuple[Any, ...]:
    """``info`` as plain values."""
    return _values(info)


def unpack_info(parts: Sequence[Any]) -> EngineInfo:
    """The inverse of `pack_info`."""
    return EngineInfo(*_frozen(parts))


def pack_load(load: EngineLoad) -> tuple[Any, ...]:
    """``load`` as plain values."""
    return _values(load)


def unpack_load(parts: Sequence[Any]) -> EngineLoad:
    """The inverse of `pack_load`."""
    return EngineLoad(*parts)


def pack_trace(step: StepTrace) -> tuple[Any, ...]:
    """``step`` as nested tuples of plain values, without what replay needs."""
    return (*_plain_values(step), [_plain_values(part) for part in step.drafters])


def unpack_trace(parts: Sequence[Any]) -> StepTrace:
    """The inverse of `pack_trace`."""
    *scalars, drafters = parts
    return StepTrace(*[*scalars, [DrafterTrace(*part) for part in drafters]])


def _plain_values(record: StepTrace | DrafterTrace) -> tuple[Any, ...]:
    """The scalar fields. What the controller computes in numpy is no number to msgpack, so each is converted."""
    return tuple(_PLAIN[f.type](getattr(record, f.name)) for f in fields(record) if f.type in _PLAIN)


def _values(record: Any) -> tuple[Any, ...]:
    return _READERS[type(record)](record)


def _frozen(values: Sequence[Any]) -> tuple[Any, ...]:
    """Lists back to the tuples they were, one level deep."""
    return tuple(tuple(v) if isinstance(v, list) else v for v in values)


def _sampling(values: Sequence[Any]) -> SamplingParams:
    *scalars, bias, allowed, seed, n = values
    return SamplingParams(*[*scalars, tuple((t, b) for t, b in bias), tuple(allowed), seed, n])


def _stopping_values(stopping: StoppingParams) -> tuple[Any, ...]:
    return tuple(_values(v) if isinstance(v, TextRules) else v for v in _values(stopping))


def _stopping(values: Sequence[Any]) -> StoppingParams:
    *own, rules, time_limit_s, decode_limit_s, finish_line = _frozen(values)
    made = None if rules is None else TextRules(*rules)
    return StoppingParams(*[*own, made, time_limit_s, decode_limit_s, finish_line])


def _speculation(values: Sequence[Any]) -> SpeculationParams:
    mode, *rest = _frozen(values)
    return SpeculationParams(SpeculationMode(mode), *rest)


def _stats(values: Sequence[Any]) -> SpeculationStats:
    *scalars, by_drafter = values
    return SpeculationStats(*[*scalars, {name: DrafterStats(*pair) for name, pair in by_drafter.items()}])


class FrameLink(asyncio.Protocol):
    """Hands on every frame in the very callback that its bytes come in: a task that reads would have to be woken first.

    ``last_frame_s``: when something last came, in monotonic seconds. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._cut = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._take: Callable[[list[Any]], None] | None = None
        self._early = bytearray()
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.last_frame_s = time.monotonic()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The socket is open."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """The process's next bytes."""
        self.last_frame_s = time.monotonic()
        if self._take is None:
            self._early += data
        elif not self._gone.done():
            try:
                for frame in self._cut.feed(data):
                    self._take(frame)
            except Exception as error:  # whoever listens is to hear of it, not the event loop
                self._gone.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The process closed the socket, or died."""
        if not self._gone.done():
            self._gone.set_result(None)

    async def listen(self, take: Callable[[list[Any]], None]) -> None:
        """Hand every frame to ``take``, from the first one on, until the process closes the socket.

        Raises:
            FrameError: it sent something else.
            Exception: whatever ``take`` raises; it gets no frame after that.
        """
        self._take = take
        if self._early:
            early, self._early = bytes(self._early), bytearray()
            self.data_received(early)
        await self._gone

    def send(self, *parts: Any) -> None:
        """Queue one frame for the process; a dead one is noticed by `listen`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack_frame(*parts))

    def close(self) -> None:
        """Close our end."""
        if self._transport is not None:
            self._transport.close()


_CHUNK_BYTES = 1 << 18
_PROGRESS_EVERY_S = 0.1


class ParentGoneError(Exception):
    """The front end closed the socket or died: there is nobody left to serve."""


class ParentLink:
    """Sends frames to the front end and takes its commands. Sending blocks, which is the back-pressure."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = FrameReader()
        self._label = ""
        self._shown_at = 0.0

    def send(self, *parts: Any) -> None:
        """Send one frame.

        Raises:
            ParentGoneError: nobody reads.
        """
        try:
            self._sock.sendall(pack_frame(*parts))
        except OSError as error:
            raise ParentGoneError from error

    def receive(self, timeout_s: float) -> list[list[Any]]:
        """Every frame that has arrived, after waiting up to ``timeout_s`` seconds for the first.

        Raises:
            ParentGoneError: the socket is closed.
        """
        frames: list[list[Any]] = []
        while select.select([self._sock], [], [], 0.0 if frames else timeout_s)[0]:
            try:
                data = self._sock.recv(_CHUNK_BYTES)
            except OSError as error:
                raise ParentGoneError from error
            if not data:
                raise ParentGoneError
            frames += self._reader.feed(data)
            if frames and len(data) < _CHUNK_BYTES:
                break  # there was no more
        return frames

    def progress(self, label: str, done: int, total: int) -> None:
        """A `Progress` listener that tells the front end, at most ten times a second per label."""
        now = time.monotonic()
        if label == self._label and done < total and now - self._shown_at < _PROGRESS_EVERY_S:
            return
        self._label, self._shown_at = label, now
        self.send(Frame.PROGRESS, label, done, total)
