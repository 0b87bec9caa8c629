"""The header in which a caller asks for arms and is told which it got: ``x-specdec-arm: experiment=arm``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from server.telemetry.call_record import ARM
from specdec.errors import FieldViolation, InvalidRequestError


def read_arms(text: str) -> Mapping[str, str]:
    """Arms by experiment, of a comma-separated list.

    Raises:
        InvalidRequestError: it is none.
    """
    found: dict[str, str] = {}
    for entry in text.split(","):
        name, equals, arm = (part.strip() for part in entry.partition("="))
        if not (name and equals and arm):
            raise InvalidRequestError([FieldViolation(ARM, "must be EXPERIMENT=ARM, or several with commas")])
        found[name] = arm
    return found


def told_arms(before: str, arms: Iterable[tuple[str, str]]) -> str:
    """The list of ``arms`` (experiment, arm) behind what was told ``before``, each once."""
    entries = [entry for entry in before.split(", ") if entry]
    return ", ".join(dict.fromkeys((*entries, *(f"{name}={arm}" for name, arm in arms))))
