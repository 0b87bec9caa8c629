"""Step traces as proto messages and back; the fields are named alike."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from specdec.api.v1 import trace_pb2 as pb
from specdec.types import DrafterTrace, StepTrace

_STEP = tuple(f.name for f in fields(StepTrace) if f.name not in ("drafters", "replay"))
_DRAFTER = tuple(f.name for f in fields(DrafterTrace))


def trace_message(step: StepTrace) -> pb.StepTrace:
    """``step``, without what replay needs."""
    return pb.StepTrace(**_named(step, _STEP), drafters=[pb.DrafterTrace(**_named(d, _DRAFTER)) for d in step.drafters])


def trace_from_message(message: pb.StepTrace) -> StepTrace:
    """The inverse of `trace_message`."""
    return StepTrace(**_named(message, _STEP), drafters=[DrafterTrace(**_named(d, _DRAFTER)) for d in message.drafters])


def _named(record: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}
