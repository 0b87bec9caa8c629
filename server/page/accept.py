"""What a client's Accept header asks for."""

from __future__ import annotations

_HTML = frozenset({"text/html", "application/xhtml+xml"})


def wants_html(accept: str) -> bool:
    """Whether ``accept`` names HTML with a weight above 0; ``*/*``, as plain clients send it, does not."""
    return any(_names_html(part) for part in accept.split(","))


def _names_html(part: str) -> bool:
    media_type, *parameters = (piece.strip().lower() for piece in part.split(";"))
    weight = next(
        (value.strip() for piece in parameters for value in [piece.removeprefix("q=")] if value != piece), "1"
    )
    return media_type in _HTML and weight.rstrip("0.") != ""
