"""Other texts of the project, as many tokens of them as there is room for."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from server.completion.context_file import ContextFile
from server.completion.user_text import UserText

SMALLEST_PART = 32  # tokens of a text that are worth showing without the rest
CHARACTERS_PER_TOKEN = 8  # more than any text has on average


class ContextPacker:
    """Chooses by relevance and shows in an order that does not depend on it: a client that ranks its texts anew at each
    key, or sends them in another order, asks for the same prompt."""

    def __init__(self, text: UserText) -> None:
        self._text = text

    def pack(self, files: Sequence[tuple[ContextFile, tuple[int, ...]]], room: int, owner: str) -> list[int]:
        """Ids of the texts, each behind the ids given with it, at most ``room`` in all.

        The highest scores are taken first, then the newest, then the last in line. Of the first text that does not fit
        whole its first lines are taken, and none of the others.
        """
        order = sorted(range(len(files)), key=lambda i: (files[i][0].score, files[i][0].time_ms, i), reverse=True)
        chosen: list[tuple[tuple[str, int], tuple[int, ...]]] = []
        for i in order:
            file, opening = files[i]
            ids = opening + self._ids(file, room, owner)
            fits = len(ids) <= room
            if not fits:
                ids = ids[: self._text.line_end(ids, len(opening), room)] if room >= SMALLEST_PART else ()
            if len(ids) > len(opening):
                chosen.append(((file.name, zlib.crc32(file.text.encode("utf-8", "surrogatepass"))), ids))
                room -= len(ids)
            if not fits:
                break
        chosen.sort()
        return [token for _, ids in chosen for token in ids]

    def _ids(self, file: ContextFile, room: int, owner: str) -> tuple[int, ...]:
        shown = file.text[: max(1, room) * CHARACTERS_PER_TOKEN]
        return self._text.encode(shown if shown.endswith("\n") else shown + "\n", owner)
