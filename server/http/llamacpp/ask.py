"""What a body of /infill or /completion asks for."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.types import Request


@dataclass(frozen=True, slots=True)
class Ask:
    """``response_fields`` None: the whole answer; else the paths (``timings/prompt_n``) that are wanted of it, which
    are its keys then. ``n_predict`` as it was asked for; -1: no limit."""

    request: Request
    stream: bool
    return_tokens: bool
    response_fields: tuple[str, ...] | None
    n_predict: int
