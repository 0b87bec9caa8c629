"""How the request may be drafted for."""

from __future__ import annotations

from server.http.body import Body
from specdec.types import SpeculationMode, SpeculationParams

_LIMIT = (1 << 31) - 1


def read_speculation(body: Body) -> SpeculationParams:
    """The object ``speculation``, with the fields of the proto's SpeculationOptions; absent: the controller decides."""
    given = body.object("speculation")
    if given is None:
        return SpeculationParams()
    return SpeculationParams(
        mode=_mode(given),
        drafters=given.texts("drafters") or None,
        max_nodes=given.integer("max_nodes", 0, _LIMIT),
        max_depth=given.integer("max_depth", 0, _LIMIT),
        width=given.integer("width", 0, _LIMIT),
    )


def _mode(given: Body) -> SpeculationMode:
    """Also as the proto spells it (MODE_OFF)."""
    text = given.text("mode")
    if text is None:
        return SpeculationMode.AUTO
    name = text.lower().removeprefix("mode_")
    try:
        return SpeculationMode.AUTO if name == "unspecified" else SpeculationMode(name)
    except ValueError:
        given.refuse("mode", f"must be one of {', '.join(SpeculationMode)}")
        return SpeculationMode.AUTO
