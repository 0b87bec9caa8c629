"""Line breaks of an editor's document."""

from __future__ import annotations

import re

_CRLF, _ALONE = "\r\n", re.compile(r"(?<!\r)\n")


class LineEnds:
    """Models are shown, and write, single line feeds; a document that has CR LF somewhere gets those back."""

    def __init__(self, *texts: str) -> None:
        self._crlf = any(_CRLF in text for text in texts)

    def plain(self, text: str) -> str:
        """``text`` for the model."""
        return text.replace(_CRLF, "\n") if self._crlf else text

    def own(self, text: str) -> str:
        """What the model wrote, for the document."""
        return _ALONE.sub(_CRLF, text) if self._crlf else text
