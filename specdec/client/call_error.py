"""How a call failed, with all that the server said about it."""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from specdec.errors import FieldViolation, SpecdecError


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
