"""Code completion as every face of the server offers it."""

from __future__ import annotations

from server.auth.principal import Principal
from server.completion.editor_session import EditorSession
from server.completion.event_source import Submit
from server.completion.outcome_log import OutcomeLog, Owner
from server.completion.request_maker import RequestMaker
from server.completion.run_table import RunTable
from server.completion.session_table import SessionTable
from server.frontend import Frontend


class CompletionService:
    """What completions share: how requests are made, the runs in flight, sessions, outcomes.

    ``submit`` is the way to the engine. Belongs to one event loop.
    """

    def __init__(self, frontend: Frontend, submit: Submit) -> None:
        self.maker = RequestMaker(frontend)
        self.runs = RunTable(submit)
        self.outcomes = OutcomeLog()
        self.sessions = SessionTable(self._new_session)

    @staticmethod
    def owner(principal: Principal, cache_salt: str) -> Owner:
        """Who may see a session, a suggestion, a run."""
        return (principal.tenant, cache_salt)

    def _new_session(self, session_id: str) -> EditorSession:
        return EditorSession(session_id, self.maker, self.runs)
