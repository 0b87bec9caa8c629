"""What an experiment's records say."""

from __future__ import annotations

from pydantic import BaseModel


class Conclusion(BaseModel):
    """``result``: `Result` as JSON; ``report``: the same as a page."""

    result: str
    report: str
