"""An editor's settings as the set-up of its completion session."""

from __future__ import annotations

from server.lsp.settings import Settings
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import options_pb2

_FILL = {
    "middle": pb.CompletionOptions.MODE_MIDDLE,
    "middle_or_prefix": pb.CompletionOptions.MODE_MIDDLE_OR_PREFIX,
    "prefix": pb.CompletionOptions.MODE_PREFIX,
}
_SPECULATION = {
    "auto": options_pb2.SpeculationOptions.MODE_AUTO,
    "on": options_pb2.SpeculationOptions.MODE_ON,
    "off": options_pb2.SpeculationOptions.MODE_OFF,
}


def setup_message(settings: Settings, session_id: str) -> pb.CompleteSessionRequest:
    """The message that sets up a session, or changes it. ``session_id`` empty: the server chooses one."""
    setup = pb.SessionSetup(
        model=settings.model,
        completion=pb.CompletionOptions(mode=_FILL[settings.fill], max_prompt_tokens=settings.max_prompt_tokens),
        stopping=options_pb2.StoppingOptions(
            max_tokens=settings.max_tokens, max_lines=settings.max_lines, time_limit_ms=settings.time_limit_ms,
            finish_line=True,
        ),
        speculation=options_pb2.SpeculationOptions(mode=_SPECULATION[settings.speculation]),
        unit=pb.OFFSET_UNIT_CODE_POINT,
    )  # fmt: skip
    setup.session.id, setup.cache.salt = session_id, settings.cache_salt
    return pb.CompleteSessionRequest(setup=setup)
