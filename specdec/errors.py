"""The errors specdec raises, each with a message that names the thing at fault and the way out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class SpecdecError(Exception):
    """Base of every error specdec raises on purpose."""


class ConfigError(SpecdecError):
    """A configuration value is wrong; the message names the field."""


class ModelError(SpecdecError):
    """A model cannot be found, read, verified or fitted in memory."""


class UnsupportedModelError(ModelError):
    """The file is sound, but its architecture or tensor type is not one specdec runs."""


class KernelError(SpecdecError):
    """Kernels could not be built, loaded or failed their self-test."""


class StageError(SpecdecError):
    """A stage of the engine raised for one sequence; the exception is the cause. The message names the stage."""

    def __init__(self, stage: str, error: Exception) -> None:
        self.stage = stage
        super().__init__(f"{stage} failed ({type(error).__name__}: {error})")

    @staticmethod
    def of(error: Exception, stage: str) -> StageError:
        """``error`` as a fault of ``stage``, or as it is if a stage is known."""
        if isinstance(error, StageError):
            return error
        fault = StageError(stage, error)
        fault.__cause__ = error
        return fault


@dataclass(frozen=True)
class FieldViolation:
    """One bad field of a request: where it is and what is wrong with it."""

    field: str
    description: str


UNAVAILABLE_RETRY_S = 1.0
LONGEST_HINT_S = 30.0  # a client ends its tries at a longer one


class RequestError(SpecdecError):
    """A request was refused. ``reason`` is the upper-case machine-readable cause; ``http_status`` and ``grpc_code`` (a
    name of `grpc.StatusCode`) are what it is answered with. ``field``: the field at fault, where there is one.
    ``retry_after_s``: when to try again, where that may help. ``engines_stopped``: how many stopped while it ran.
    ``message``: of an error that is raised without one."""

    reason = "REQUEST_FAILED"
    http_status = 500
    grpc_code = "INTERNAL"
    field: str | None = None
    retry_after_s: float | None = None
    engines_stopped = 0
    message = ""
    details: Sequence[Any] = ()
    """Plain values besides reason and message that a copy of the error needs in another process."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or self.message)


class InvalidRequestError(RequestError):
    """One or more fields of a request are invalid; every bad one is listed in ``violations``."""

    reason = "INVALID_ARGUMENT"
    http_status, grpc_code = 400, "INVALID_ARGUMENT"

    def __init__(self, violations: list[FieldViolation]) -> None:
        self.violations = violations
        self.details = [(v.field, v.description) for v in violations]
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))

    @staticmethod
    def of(name: str, description: str) -> InvalidRequestError:
        """The refusal of one bad field."""
        return InvalidRequestError([FieldViolation(name, description)])


class PromptTooLongError(RequestError):
    """The prompt and the room for one token do not fit the model's context or the KV cache."""

    reason = "CONTEXT_LENGTH_EXCEEDED"
    http_status, grpc_code, field = 400, "INVALID_ARGUMENT", "prompt"

    def __init__(self, limit: int, got: int) -> None:
        self.limit, self.got = limit, got
        self.details = [limit, got]
        super().__init__(f"prompt has {got} tokens, the limit is {limit}; shorten the prompt")


FINGERPRINT_PARTS = ("weights", "numeric types", "kernels or processor", "release")
"""What the parts of a numeric fingerprint are over, in their order."""
PART_DIGITS = 8


class FingerprintMismatchError(RequestError):
    """A stream was begun on a server whose numbers are not this one's: going on would be another answer."""

    reason = "NUMERIC_FINGERPRINT_MISMATCH"
    http_status, grpc_code, field = 409, "FAILED_PRECONDITION", "resume.numeric_fingerprint"

    @staticmethod
    def between(theirs: str, ours: str) -> FingerprintMismatchError:
        """What to say of two fingerprints that differ."""
        if len(theirs) != len(ours) or len(ours) != PART_DIGITS * len(FINGERPRINT_PARTS):
            reason = "no such server made it" if theirs else "it is missing: send that of the stream's Started"
        else:
            places = range(0, len(ours), PART_DIGITS)
            differing = [
                name
                for name, at in zip(FINGERPRINT_PARTS, places, strict=True)
                if theirs[at : at + PART_DIGITS] != ours[at : at + PART_DIGITS]
            ]
            reason = f"what differs: {', '.join(differing)}"
        return FingerprintMismatchError(
            f"resume.numeric_fingerprint: the stream began on {theirs!r}, this server computes as {ours!r}; "
            f"{reason}; resume it on a server of its own fingerprint, or send the request without resume"
        )


class QueueFullError(RequestError):
    """The bounded queue is full; try again after ``retry_after_s``."""

    reason = "QUEUE_FULL"
    http_status, grpc_code = 429, "RESOURCE_EXHAUSTED"

    def __init__(self, limit: int, retry_after_s: float, items: str = "requests") -> None:
        self.limit, self.retry_after_s, self.items = limit, retry_after_s, items
        self.details = [limit, retry_after_s, items]
        super().__init__(f"queue is full ({limit} {items}); retry in {retry_after_s:.1f} s")


class GenerationNotSupportedError(RequestError):
    """The model was made for embeddings."""

    reason = "GENERATION_NOT_SUPPORTED"
    http_status, grpc_code, field = 422, "FAILED_PRECONDITION", "model"

    def __init__(self, target: str) -> None:
        super().__init__(
            f"{target[:200]} makes embeddings and generates no text; send the call to another model, such as one of "
            "the server's `engines`"
        )


class DuplicateRequestError(RequestError):
    """A request with this id is already in flight."""

    reason = "DUPLICATE_REQUEST_ID"
    http_status, grpc_code, field = 409, "ALREADY_EXISTS", "x-request-id"


MAX_ENGINES_STOPPED = 2
"""Engines that one request may stop; then neither a router nor a client repeats it."""


class EngineDeadError(RequestError):
    """The engine process died or went silent; it is being restarted."""

    reason = "ENGINE_UNAVAILABLE"
    http_status, grpc_code = 503, "UNAVAILABLE"
    retry_after_s: float | None = UNAVAILABLE_RETRY_S

    def __init__(self, message: str = "", retry_after_s: float | None = UNAVAILABLE_RETRY_S) -> None:
        """message: why it is not ready; default: it stopped while the request ran. retry_after_s: None: it will not be
        ready again."""
        self.engines_stopped, self.retry_after_s = 0 if message else 1, retry_after_s
        next_step = "it is being restarted, retry shortly" if retry_after_s is not None else "restart the server"
        super().__init__(message or f"the engine process stopped; {next_step}")


@dataclass
class ViolationCollector:
    """Collects field violations so that a refusal names every bad field at once."""

    found: list[FieldViolation] = field(default_factory=list)
    warnings: list[FieldViolation] = field(default_factory=list)
    """What of a request is not served as its sender may expect, though it is not refused."""

    def check(self, ok: bool, name: str, description: str) -> None:
        """Record a violation of ``name`` unless ``ok``."""
        if not ok:
            self.found.append(FieldViolation(name, description))

    def raise_if_any(self) -> None:
        """Raise :class:`InvalidRequestError` when anything was recorded."""
        if self.found:
            raise InvalidRequestError(self.found)
