"""The base of what an experiment's file holds."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class StrictModel(BaseModel):
    """Immutable; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _as_share(value: Any) -> Any:
    if isinstance(value, str) and value.rstrip().endswith("%"):
        try:
            return float(value.rstrip()[:-1]) / 100
        except ValueError:
            raise ValueError(f"{value!r} is no percentage; write 2% or 0.02") from None
    return value


def _as_seconds(value: Any) -> Any:
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    if isinstance(value, str):
        number = value.rstrip("smh")
        try:
            return float(number) * units[value[len(number) :] or "s"]
        except (ValueError, KeyError):
            raise ValueError(f"{value!r} is no duration; write 500ms, 20s, 5m, 2h or a number of seconds") from None
    return value


Share = Annotated[float, BeforeValidator(_as_share)]
"""A part of 1; `2%` is read as 0.02."""

Seconds = Annotated[float, BeforeValidator(_as_seconds)]
"""A duration; `2h`, `5m`, `20s` and `500ms` are read too."""
