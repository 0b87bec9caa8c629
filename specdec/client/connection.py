"""Calls of one server: credentials, deadlines, retries, and how calls fail."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from specdec.errors import ConfigError, FieldViolation, SpecdecError


class CallError(SpecdecError):
    """``code``: of gRPC. ``reason`` and ``metadata``: of the server's ErrorInfo, empty where it gave none.
    ``violations``: every bad field. ``retry_after_s``: when it is worth another try, where the server said so.
    ``reached``: whether a specdec server answered at all."""

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
    ) -> None:
        self.code, self.message, self.reason = code, message, reason
        self.metadata = dict(metadata or {})
        self.violations, self.retry_after_s, self.reached = violations, retry_after_s, reached
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
            return CallError(error.code(), f"{message} ({told[0][:200]})" if told else message, reached=False)
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
    answers. Pauses are drawn up to ``jitter`` longer, so that many clients do not come back at once."""

    attempts: int = 4
    first_s: float = 0.2
    longest_s: float = 30.0
    jitter: float = 0.25
    unreachable: bool = True

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


# Statistics and log-probabilities of a long answer exceed gRPC's default of 4 MiB.
_OPTIONS = [("grpc.max_receive_message_length", -1)]


class Connection:
    """One channel, opened at the first call. Belongs to one event loop; `close` it.

    address: ``host:port``.

    Raises:
        ConfigError: a file of the credentials can not be read.
    """

    def __init__(self, address: str, credentials: Credentials, retry: RetryPolicy) -> None:
        self.address = address
        self._metadata, self._secret = credentials.metadata, credentials.channel()
        self._retry = retry
        self._channel: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel that calls go through."""
        if self._channel is None:
            if self._secret is None:
                self._channel = grpc.aio.insecure_channel(self.address, _OPTIONS)
            else:
                self._channel = grpc.aio.secure_channel(self.address, self._secret, _OPTIONS)
        return self._channel

    async def close(self) -> None:
        """End every call."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def unary(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        """The answer to one message.

        Raises:
            CallError: the last try failed, or none is worth it.
        """
        until = _end(timeout_s)
        attempt = 0
        while True:
            attempt += 1
            try:
                return await method(request, metadata=self._metadata, timeout=_left(until))
            except grpc.aio.AioRpcError as error:
                await self._pause(CallError.of(error, self.address), attempt, until)

    async def stream(self, method: Any, request: Any, timeout_s: float | None = None) -> AsyncGenerator[Any, None]:
        """The messages that answer one; close it to cancel the call. Tried again only until the first one came.

        Raises:
            CallError: the last try failed, or none is worth it.
        """
        until = _end(timeout_s)
        attempt, began = 0, False
        while True:
            attempt += 1
            call = method(request, metadata=self._metadata, timeout=_left(until))
            try:
                async for message in call:
                    began = True
                    yield message
                return
            except grpc.aio.AioRpcError as error:
                failure = CallError.of(error, self.address)
                if began:
                    raise failure from None
                await self._pause(failure, attempt, until)
            finally:
                call.cancel()

    def both_ways(self, method: Any) -> Any:
        """A call that streams in both directions; it is not tried again."""
        return method(metadata=self._metadata)

    async def _pause(self, error: CallError, attempt: int, until: float | None) -> None:
        """Wait until the next try; raises ``error`` where there is none, or no time for it."""
        pause = self._retry.pause_s(error, attempt, random.random())
        if pause is None or (until is not None and time.monotonic() + pause >= until):
            raise error from None
        await asyncio.sleep(pause)


def _end(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
