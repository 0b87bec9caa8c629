"""JSON as the wire has it: read strictly, written without a space."""

from __future__ import annotations

from typing import Any

import orjson

from specdec.errors import FieldViolation, InvalidRequestError


def read_object(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``, UTF-8.

    Raises:
        InvalidRequestError: it is not JSON (NaN, infinities and halves of surrogate pairs are not), or not an object.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError([FieldViolation("body", f"is not JSON ({error}); send a JSON object")]) from None
    if not isinstance(value, dict):
        raise InvalidRequestError([FieldViolation("body", "must be a JSON object")])
    return value


def write_json(value: Any) -> bytes:
    """``value`` as compact JSON."""
    return orjson.dumps(value)
