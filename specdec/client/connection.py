"""Calls of a server, or of several alike: credentials, deadlines, retries, and how calls fail."""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from specdec.errors import ConfigError, FieldViolation, SpecdecError


class CallError(SpecdecError):
    """``code``: of gRPC. ``reason`` and ``metadata``: of the server's ErrorInfo, empty where it gave none.
    ``violations``: every bad field. ``retry_after_s``: when it is worth another try, where the server said so.
    ``reached``: whether a specdec server answered at all. ``address``: where the call went."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
        reached: bool = True,
        address: str = "",
    ) -> None:
        self.code, self.message, self.reason = code, message, reason
        self.metadata = dict(metadata or {})
        self.violations, self.retry_after_s, self.reached = violations, retry_after_s, reached
        self.address = address
        fields = "; ".join(f"{v.field}: {v.description}" for v in violations)
        super().__init__(f"{code.name}: {fields or message}" if reached else message)

    @staticmethod
    def of(error: grpc.aio.AioRpcError, address: str) -> CallError:
        """What ``error`` of a call to ``address`` says."""
        trailers = dict(error.trailing_metadata() or ())
        packed = trailers.get("grpc-status-details-bin")
        if packed is None and error.code() == grpc.StatusCode.UNAVAILABLE:
            told = (error.details() or "").splitlines()
            message = f"no specdec server answers at {address}; start one with `specdec serve`"
            return CallError(
                error.code(), f"{message} ({told[0][:200]})" if told else message, reached=False, address=address
            )
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
    """``key``: sent with every call. ``tls``: encrypt; the server's certificate must be of ``ca`` (PEM file; None: the
    authorities gRPC comes with). ``cert`` and ``cert_key``: PEM files, shown to servers that ask for a certificate."""

    key: str = ""
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    cert_key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.cert_key is None):
            raise ConfigError("credentials: cert and cert_key belong together: give both, or neither")
        if not self.tls and (self.ca or self.cert):
            raise ConfigError("credentials: ca and cert mean nothing without tls")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return (("authorization", f"Bearer {self.key}"),) if self.key else ()

    def channel(self) -> grpc.ChannelCredentials | None:
        """What a channel is opened with; None: in the clear.

        Raises:
            ConfigError: a file can not be read.
        """
        if not self.tls:
            return None
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.cert_key), _read(self.cert))


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"credentials: {path} can not be read ({error.strerror})") from None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``attempts`` in all. A server that says when to come back is taken at its word, unless that is later than
    ``longest_s``; else the pause is ``first_s`` seconds and doubles. ``unreachable``: also try again where no server
    answers. Pauses are drawn up to ``jitter`` longer, so that many clients do not come back at once. Of several
    addresses the next one is tried first, without a pause. ``resumes``: as many tries in a row to go on with a stream
    that broke off, before another token came; 0: it is not gone on with."""

    attempts: int = 4
    first_s: float = 0.2
    longest_s: float = 30.0
    jitter: float = 0.25
    unreachable: bool = True
    resumes: int = 8

    def pause_s(self, error: CallError, attempt: int, draw: float) -> float | None:
        """Seconds until the next try after ``attempt`` of them (from 1), None: there is none. draw: in [0, 1)."""
        if attempt >= self.attempts:
            return None
        hint = error.retry_after_s
        if error.code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            if hint is None:
                return None  # what does not fit will not fit later
        elif error.code != grpc.StatusCode.UNAVAILABLE or not (error.reached or self.unreachable):
            return None
        pause = self.first_s * 2.0 ** (attempt - 1) if hint is None else hint
        return None if pause > self.longest_s else pause * (1.0 + self.jitter * draw)

    @property
    def resuming(self) -> RetryPolicy:
        """How a broken stream's call is tried again: nobody answers for a while where a server died."""
        return replace(self, attempts=self.resumes, unreachable=True)


Method = Callable[[grpc.aio.Channel], Any]
"""What makes a call's method of the channel that it is to go through."""


_OPTIONS = [
    # Statistics and log-probabilities of a long answer exceed gRPC's default of 4 MiB.
    ("grpc.max_receive_message_length", -1),
    # A server that comes back is found soon: by default gRPC waits up to two minutes before it looks again.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 3000),
]

_WORKSPACE, _SESSION = "x-workspace-id", "x-session-id"
_PLAIN = "".join(chr(i) for i in range(0x21, 0x7F) if chr(i) != "%")


# What a proxy or gRPC itself says of a stream that lost its connection, where that is no UNAVAILABLE.
_CUT_WORDS = ("RST_STREAM", "GOAWAY", "Stream removed", "Socket closed", "upstream connect error")


def cut_of(error: CallError) -> CallError | None:
    """``error`` as an UNAVAILABLE, where it was the server or the way to it that failed, and not the request."""
    if error.code == grpc.StatusCode.UNAVAILABLE:
        return error
    lost = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)
    if error.code in lost and not error.reason and any(word in error.message for word in _CUT_WORDS):
        return CallError(grpc.StatusCode.UNAVAILABLE, error.message, reached=False, address=error.address)
    return None


class Connection:
    """A channel per address, opened at the first call. Belongs to one event loop; `close` it.

    addresses: ``host:port``, of one server or of several that are alike: calls go to the first, and to the next one
    from when it could not be reached or could not serve. workspace: what keeps the calls on one of a proxy's servers;
    where it is empty, those of one session are kept together.

    Raises:
        ConfigError: a file of the credentials can not be read.
    """

    def __init__(
        self, addresses: Sequence[str], credentials: Credentials, retry: RetryPolicy, workspace: str = ""
    ) -> None:
        self._addresses, self._at = tuple(addresses), 0
        if not all(self._addresses) or not self._addresses:
            raise ConfigError("address: must be host:port, or several with commas between")
        self._metadata, self._secret = credentials.metadata, credentials.channel()
        if workspace:
            self._metadata += ((_WORKSPACE, _as_metadata(workspace)),)
        self.retry = retry
        self._channels: dict[str, grpc.aio.Channel] = {}

    @property
    def address(self) -> str:
        """Where calls go now."""
        return self._addresses[self._at]

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel that calls go through now."""
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
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def unary(self, method: Method, request: Any, timeout_s: float | None = None) -> Any:
        """The answer to one message.

        Raises:
            CallError: the last try failed, or none is worth it.
        """
        until = end_of(timeout_s)
        attempt = 0
        while True:
            attempt += 1
            address = self.address
            try:
                metadata = self._metadata_of(request)
                return await method(self.channel)(request, metadata=metadata, timeout=time_left(until))
            except grpc.aio.AioRpcError as error:
                await self.pause(CallError.of(error, address), attempt, until)

    async def stream(
        self, method: Method, request: Any, timeout_s: float | None = None, retry: RetryPolicy | None = None
    ) -> AsyncGenerator[Any, None]:
        """The messages that answer one; close it to cancel the call. Tried again only until the first one came; where
        the server has not noticed yet that a former try broke off, with ``~`` behind the request's id. retry: in place
        of the connection's.

        Raises:
            CallError: the last try failed, or none is worth it.
        """
        until = end_of(timeout_s)
        attempt, began, lost = 0, False, False
        while True:
            attempt += 1
            address = self.address
            call = method(self.channel)(request, metadata=self._metadata_of(request), timeout=time_left(until))
            try:
                async for message in call:
                    began = True
                    yield message
                return
            except grpc.aio.AioRpcError as error:
                failure = CallError.of(error, address)
                if began:
                    raise failure from None
                if lost and failure.code == grpc.StatusCode.ALREADY_EXISTS:
                    request, lost = _renamed(request), False
                    continue
                # Where a proxy resets a stream, gRPC drops what was not read yet: it is as if nothing had come.
                cut = cut_of(failure)
                lost = lost or cut is not None
                await self.pause(cut or failure, attempt, until, retry)
            finally:
                call.cancel()

    def _metadata_of(self, request: Any) -> tuple[tuple[str, str], ...]:
        """What a call carries. A proxy reads no messages, so a request's session is told beside it."""
        session: str = getattr(getattr(request, "session", None), "id", "")
        return (*self._metadata, (_SESSION, _as_metadata(session))) if session else self._metadata

    def both_ways(self, method: Method) -> Any:
        """A call that streams in both directions; it is not tried again."""
        return method(self.channel)(metadata=self._metadata)

    async def pause(
        self, error: CallError, attempt: int, until: float | None, retry: RetryPolicy | None = None
    ) -> None:
        """Wait until the next try, after try number ``attempt`` failed; where another server may do better, the next
        one goes there. Raises ``error`` where there is none, or no time for it."""
        if error.code == grpc.StatusCode.UNAVAILABLE and error.address == self.address:
            self._at = (self._at + 1) % len(self._addresses)
        pause = (retry or self.retry).pause_s(error, attempt, random.random())
        if pause is not None and self.address != error.address and attempt % len(self._addresses):
            pause = 0.0
        if pause is None or (until is not None and time.monotonic() + pause >= until):
            raise error from None
        await asyncio.sleep(pause)


def _renamed(request: Any) -> Any:
    """``request`` under another id."""
    renamed = copy.deepcopy(request)
    renamed.request_id += "~"
    return renamed


def _as_metadata(name: str) -> str:
    """``name`` in characters that metadata may have."""
    return quote(name, safe=_PLAIN)


def end_of(timeout_s: float | None) -> float | None:
    """When a call's time is over, in monotonic seconds."""
    return None if timeout_s is None else time.monotonic() + timeout_s


def time_left(until: float | None) -> float | None:
    """Seconds until then; none that is negative."""
    return None if until is None else max(0.0, until - time.monotonic())
