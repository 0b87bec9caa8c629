"""Calls of one server or of several equal ones: credentials, deadlines, retries, errors."""

from __future__ import annotations

import asyncio
import copy
import os
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from specdec.errors import LONGEST_HINT_S, MAX_ENGINES_STOPPED, ConfigError, FieldViolation, SpecdecError

_NO_SERVER = "start one with `specdec serve`, or give the gRPC port of one that runs"
# Ways out, by a phrase of gRPC's message for a connection that failed
_WAYS_OUT = {
    "certificate has expired": "its certificate has expired: renew it",
    "CERTIFICATE_VERIFY_FAILED": "its certificate was not accepted: give its authority's file (--ca)",
    "errors resolving": "its host is unknown: give host:port, without a scheme such as http://",
    "Hostname Verification": "its certificate is for another name: give an address that the certificate names",
    "WRONG_VERSION_NUMBER": "it does not use TLS there: leave --tls out",
    "create security handshaker": "TLS is impossible with the files given (--ca, --cert, --cert-key)",
    "all addresses; last error: UNAVAILABLE": "it closed the connection: if it uses TLS, give --tls, and the "
    "certificate that it may ask for (--cert, --cert-key)",
}
# Codes besides UNAVAILABLE of a lost connection, and what proxies and gRPC say of it then
_LOST_CODES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)
_LOST_WORDS = ("RST_STREAM", "GOAWAY", "Stream removed", "Socket closed", "upstream connect error")


class CallError(SpecdecError):
    """A call failed."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",  # of the server's ErrorInfo, as ``metadata``; empty if it sent none
        metadata: Mapping[str, str] | None = None,
        violations: tuple[FieldViolation, ...] = (),  # every invalid field
        retry_after_s: float | None = None,  # the server's hint
        reached: bool = True,  # whether a specdec server answered
        address: str = "",  # where the call went
    ) -> None:
        self.code, self.message, self.reason = code, message, reason
        self.metadata = dict(metadata or {})
        self.violations, self.retry_after_s, self.reached = violations, retry_after_s, reached
        self.address = address
        self.engines_stopped = int(self.metadata.get("engines_stopped", 0))  # in all tries of the call
        fields = "; ".join(f"{v.field}: {v.description}" for v in violations)
        super().__init__(f"{code.name}: {fields or message}" if reached else message)

    @staticmethod
    def of(error: grpc.aio.AioRpcError, address: str) -> CallError:
        """``error`` of a call to ``address``, with the server's details."""
        trailers = dict(error.trailing_metadata() or ())
        packed = trailers.get("grpc-status-details-bin")
        cause = (error.details() or "").partition("\n")[0][:300]
        lost = error.code() == grpc.StatusCode.UNAVAILABLE or (
            error.code() in _LOST_CODES and any(words in cause for words in _LOST_WORDS)
        )
        if packed is None and lost:
            way_out = next((text for words, text in _WAYS_OUT.items() if words in cause), _NO_SERVER)
            message = f"no specdec server answers at {address}; {way_out} ({cause or 'no cause given'})"
            return CallError(grpc.StatusCode.UNAVAILABLE, message, reached=False, address=address)
        bad, info, retry = BadRequest(), ErrorInfo(), RetryInfo()
        has_retry = False
        for detail in Status.FromString(packed).details if isinstance(packed, bytes) else ():
            for kind in (bad, info, retry):
                if detail.Is(kind.DESCRIPTOR):
                    detail.Unpack(kind)
                    has_retry = has_retry or kind is retry
        return CallError(
            error.code(),
            error.details() or "",
            reason=info.reason,
            metadata=info.metadata,
            violations=tuple(FieldViolation(v.field, v.description) for v in bad.field_violations),
            retry_after_s=retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9 if has_retry else None,
            address=address,
        )


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client authenticates itself and the server with."""

    key: str = ""  # sent with every call
    tls: bool = False
    ca: Path | None = None  # PEM file; None: gRPC's built-in authorities
    cert: Path | None = None  # PEM file, for servers that ask for a client certificate
    cert_key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.cert_key is None):
            raise ConfigError("credentials: set both cert and cert_key, or neither")
        if not self.tls and (self.ca or self.cert):
            raise ConfigError("credentials: ca and cert have no effect without tls")
        if not (self.key.isascii() and self.key.isprintable()):
            raise ConfigError("credentials: key has a line break or a letter that no key has; strip the text of a file")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        return (("authorization", f"Bearer {self.key}"),) if self.key else ()

    def channel(self) -> grpc.ChannelCredentials | None:
        """Credentials of a channel; None: unencrypted.

        Raises:
            ConfigError: a file cannot be read.
        """
        if not self.tls:
            return None
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.cert_key), _read(self.cert))


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else Path(os.path.expanduser(path)).read_bytes()
    except OSError as error:
        raise ConfigError(f"credentials: {path} cannot be read ({error.strerror})") from None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to repeat a call. Of several addresses the next one is tried first, without a pause."""

    attempts: int = 4  # in all
    first_s: float = 0.2  # first pause while a server is unavailable; doubles with each try, and is at least its hint
    longest_s: float = LONGEST_HINT_S  # of a pause; a hint beyond this ends the tries
    jitter: float = 0.25  # pauses are up to this share longer, so that clients do not retry all at once
    unreachable: bool = True  # retry if no server answers
    resumes: int = 8  # tries in a row to resume a broken stream without a new token; 0: it is not resumed

    def pause_s(self, error: CallError, attempt: int, draw: float) -> float | None:
        """Seconds until the next try after try ``attempt`` (from 1); None: there is none. draw: random, in [0, 1)."""
        hint = error.retry_after_s
        if attempt >= self.attempts or error.engines_stopped >= MAX_ENGINES_STOPPED or (hint or 0.0) > self.longest_s:
            return None
        pause = None
        if error.code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            pause = hint  # none if the request is too large: it will not fit later
        elif error.code == grpc.StatusCode.UNAVAILABLE and (error.reached or self.unreachable):
            # A server that loads hints at a short pause again and again: those alone would soon spend all tries.
            doubled = self.first_s * 2.0 ** min(attempt - 1, 60)  # a float holds no such power of many tries
            pause = max(hint or 0.0, min(doubled, self.longest_s))
        return None if pause is None else pause * (1.0 + self.jitter * draw)

    @property
    def resuming(self) -> RetryPolicy:
        """The policy for resuming a stream, whose broken call is the first try: after a server's death none may answer
        for a while."""
        return replace(self, attempts=self.resumes + 1, unreachable=True)


Method = Callable[[grpc.aio.Channel], Any]
"""Makes a call's method from a channel."""


_OPTIONS = [
    # Statistics and log-probabilities of a long answer exceed gRPC's default of 4 MiB.
    ("grpc.max_receive_message_length", -1),
    # Reconnect to a restarted server soon: by default gRPC waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 3000),
    # Leave an address where nothing answers while there is time for the next: by default a connection may take 20 s.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # Notice a server that vanished without closing its connections, so that a stream can go on elsewhere.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
]

_WORKSPACE, _SESSION = "x-workspace-id", "x-session-id"
_PLAIN = "".join(chr(i) for i in range(0x21, 0x7F) if chr(i) != "%")


@contextmanager
def errors_of(address: str) -> Iterator[None]:
    """Raise the errors of a call to ``address`` as `CallError`.

    gRPC raises CancelledError where a call is ended by this client, as `Client.close` does, though its task goes on.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise CallError.of(error, address) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CallError(grpc.StatusCode.CANCELLED, "the call was ended by this client", address=address) from None


class Connection:
    """One channel per address, opened at the first call. Belongs to one event loop; `close` it."""

    def __init__(
        self, addresses: Sequence[str], credentials: Credentials, retry: RetryPolicy, workspace: str = ""
    ) -> None:
        """addresses: ``host:port`` of equal servers; calls go to the first until it fails, then to the next. workspace:
        as of `Client`.

        Raises:
            ConfigError: a file of the credentials cannot be read.
        """
        self._addresses, self._at = tuple(addresses), 0
        if not all(self._addresses) or not self._addresses:
            raise ConfigError("address: must be host:port, or several separated by commas")
        self._metadata, self._secret = credentials.metadata, credentials.channel()
        if workspace:
            self._metadata += ((_WORKSPACE, _as_metadata(workspace)),)
        self.retry = retry
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closed = asyncio.Event()

    @property
    def address(self) -> str:
        """The address of the next call."""
        return self._addresses[self._at]

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel of the next call. Raises CallError after `close`."""
        if self._closed.is_set():
            raise CallError(grpc.StatusCode.CANCELLED, "this client is closed", address=self.address)
        channel = self._channels.get(self.address)
        if channel is None:
            if self._secret is None:
                channel = grpc.aio.insecure_channel(self.address, _OPTIONS)
            else:
                channel = grpc.aio.secure_channel(self.address, self._secret, _OPTIONS)
            self._channels[self.address] = channel
        return channel

    async def close(self) -> None:
        """End every call."""
        self._closed.set()
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def unary(self, method: Method, request: Any, timeout_s: float | None = None) -> Any:
        """The answer to one message.

        Raises:
            CallError: as `stream`.
        """
        (answer,) = [answer async for answer in self.stream(method, request, timeout_s)]
        return answer

    async def stream(
        self,
        method: Method,
        request: Any,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
    ) -> AsyncGenerator[Any, None]:
        """The stream of answers to one message; close it to cancel the call.

        The call is repeated only before the first answer; with ``~`` appended to the request's id if the server still
        runs a former try. retry: default: the connection's.

        Raises:
            CallError: the last try failed, or the error is final.
        """
        until = end_of(timeout_s)
        attempt, stopped, began, lost = 0, 0, False, False  # stopped: engines, while the request ran
        while True:
            attempt += 1
            address = self.address
            call = method(self.channel)(request, metadata=self._metadata_of(request), timeout=time_left(until))
            try:
                with errors_of(address):
                    async for message in _only(call) if isinstance(call, grpc.aio.UnaryUnaryCall) else call:
                        began = True
                        yield message
                return
            except CallError as failure:
                failure.engines_stopped = stopped = failure.engines_stopped + stopped
                if began:
                    raise
                if lost and failure.code == grpc.StatusCode.ALREADY_EXISTS:
                    request = copy.deepcopy(request)
                    request.request_id += "~"
                    lost = False
                    continue
                # If a proxy resets a stream, gRPC drops unread messages, as if none had arrived.
                lost = lost or failure.code == grpc.StatusCode.UNAVAILABLE
                await self.pause(failure, attempt, until, retry)
            finally:
                call.cancel()

    def _metadata_of(self, request: Any) -> tuple[tuple[str, str], ...]:
        """Metadata of a call; includes the session, because proxies do not read messages."""
        session: str = getattr(getattr(request, "session", None), "id", "")
        return (*self._metadata, (_SESSION, _as_metadata(session))) if session else self._metadata

    def both_ways(self, method: Method) -> Any:
        """A bidirectional stream; it is never repeated."""
        return method(self.channel)(metadata=self._metadata)

    def leave(self, address: str) -> None:
        """Send the next call to the address after ``address``, unless it goes elsewhere already."""
        if address == self.address:
            self._at = (self._at + 1) % len(self._addresses)

    async def pause(
        self, error: CallError, attempt: int, until: float | None, retry: RetryPolicy | None = None
    ) -> None:
        """Wait until the next try, after try ``attempt`` failed, and switch to the next address if the server failed.
        Raises ``error`` if there is no next try, or no time for it."""
        if error.code == grpc.StatusCode.UNAVAILABLE:
            self.leave(error.address)
        pause = (retry or self.retry).pause_s(error, attempt, random.random())
        unreached = error.code == grpc.StatusCode.UNAVAILABLE and not error.reached
        untried = unreached and attempt < len(self._addresses)  # each address is tried once in any case
        if (pause is not None or untried) and self.address != error.address and attempt % len(self._addresses):
            pause = 0.0
        if pause is None or (until is not None and time.monotonic() + pause >= until):
            raise error from None
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), pause)


async def _only(call: grpc.aio.UnaryUnaryCall[Any, Any]) -> AsyncGenerator[Any, None]:
    """The one answer of ``call``, as a stream."""
    yield await call


def _as_metadata(name: str) -> str:
    """``name`` percent-encoded for metadata, of which a server takes 8 KiB in all: a long name is cut."""
    return quote(name, safe=_PLAIN)[:2048]


_NO_END_S = 1e9  # gRPC's clock has 64 bits of nanoseconds: a much later end is a past one


def end_of(timeout_s: float | None) -> float | None:
    """The end of a call's timeout, in monotonic seconds; None: it has none, or one of more than 30 years."""
    return None if timeout_s is None or timeout_s > _NO_END_S else time.monotonic() + timeout_s


def time_left(until: float | None) -> float | None:
    """Seconds until ``until``, at least 0."""
    return None if until is None else max(0.0, until - time.monotonic())
