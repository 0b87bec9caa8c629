"""JSON that pygls made objects of, as plain values again."""

from __future__ import annotations

from typing import Any


def plain(value: Any) -> Any:
    """Named tuples, which pygls makes of objects it knows no type for, as dicts, all the way down."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(field) for name, field in value._asdict().items()}
    if isinstance(value, dict):
        return {name: plain(field) for name, field in value.items()}
    if isinstance(value, list | tuple):
        return [plain(field) for field in value]
    return value
