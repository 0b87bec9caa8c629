"""The sessions of editors that are there, or may come back."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable

from server.completion.editor_session import EditorSession
from server.completion.outcome_log import Owner

SESSIONS, IDLE_S, CHARACTERS = 256, 1800.0, 1 << 25


class SessionTable:
    """Bounded by number, by the size of the documents kept, and by age since the last use; who was used longest ago
    goes first. A session that was let go still serves the stream that holds it. ``clock`` gives monotonic seconds."""

    def __init__(
        self,
        make: Callable[[str], EditorSession],
        *,
        sessions: int = SESSIONS,
        idle_s: float = IDLE_S,
        characters: int = CHARACTERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make, self._clock = make, clock
        self._limits = sessions, idle_s, characters
        self._sessions: OrderedDict[tuple[Owner, str], EditorSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, owner: Owner, session_id: str) -> EditorSession:
        """A session for a stream that begins. One of the same id and owner hands over its documents and ends what it
        runs: its editor has connected anew."""
        session = self._make(session_id or uuid.uuid4().hex)
        former = self._sessions.pop((owner, session.session_id), None)
        if former is not None:
            former.stop()
            session.documents, former.documents = former.documents, OrderedDict()
        self._sessions[owner, session.session_id] = session
        self.used(owner, session)
        return session

    def used(self, owner: Owner, session: EditorSession) -> None:
        """``session`` was used; those beyond the limits are let go."""
        most, idle_s, characters = self._limits
        key, now = (owner, session.session_id), self._clock()
        session.used_s = now
        if self._sessions.get(key) is session:
            self._sessions.move_to_end(key)
        total = sum(kept.characters for kept in self._sessions.values())
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            if len(self._sessions) <= most and total <= characters and now - oldest.used_s <= idle_s:
                break
            if oldest is session:
                break
            total -= oldest.characters
            self._sessions.popitem(last=False)
