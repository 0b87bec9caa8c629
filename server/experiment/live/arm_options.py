"""The options of single requests that an arm may change, and how they get into a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from server.experiment.config.read_config import Place
from server.http.body import Body
from server.http.fields.speculation import read_speculation
from specdec.engine.validation import validate_request
from specdec.errors import InvalidRequestError, ViolationCollector
from specdec.types import EngineInfo, Request, SpeculationParams

Problem = tuple[Place, str]
UNTOUCHED = Request(request_id="any", prompt_ids=(0,))
"""A request that sets nothing."""

_SPECULATION = tuple(f.name for f in dataclasses.fields(SpeculationParams))
_PLAIN = ("priority", "target_tpot_ms", "cache_salt")
_KNOWN = f"speculation.({', '.join(_SPECULATION)}), {', '.join(_PLAIN)}"
_INT32 = (1 << 31) - 1


@dataclass(frozen=True)
class ArmOptions:
    """What an arm changes: fields of `SpeculationParams`, and of `Request` itself. Nothing that a caller would see in
    the answer's tokens: who asks gets what they asked for, in any arm."""

    speculation: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    plain: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def names(self) -> frozenset[str]:
        """The options, as `operator.attrgetter` finds them in a request."""
        return frozenset((*(f"speculation.{name}" for name in self.speculation), *self.plain))

    def put(self, request: Request) -> Request:
        """``request`` with these options."""
        changed = dict(self.plain)
        if self.speculation:
            changed["speculation"] = dataclasses.replace(request.speculation, **self.speculation)
        return dataclasses.replace(request, **changed) if changed else request


def read_options(given: Mapping[str, Any], info: EngineInfo) -> tuple[ArmOptions, list[Problem]]:
    """An arm's ``request`` mapping as options, and what is wrong with it. `speculation: off` is short for its mode;
    an option that is null is left alone."""
    spelled = given.get("speculation", {})
    speculation = spelled if isinstance(spelled, Mapping) else {"mode": spelled}
    speculation = {str(k): _mode(v) if k == "mode" else v for k, v in speculation.items() if v is not None}
    plain = {name: given[name] for name in _PLAIN if given.get(name) is not None}

    unknown: list[Place] = [(name,) for name in given if name not in ("speculation", *_PLAIN)]
    unknown += [("speculation", name) for name in speculation if name not in _SPECULATION]
    problems: list[Problem] = [(place, f"no option that an arm may change; there are {_KNOWN}") for place in unknown]
    seen = ViolationCollector()
    body = Body({"speculation": speculation, **plain}, seen)
    asked = read_speculation(body)
    values = {
        "priority": body.integer("priority", -_INT32, _INT32),
        "target_tpot_ms": body.number("target_tpot_ms"),
        "cache_salt": body.text("cache_salt"),
    }
    options = ArmOptions(
        {name: getattr(asked, name) for name in _SPECULATION if name in speculation},
        {name: value for name, value in values.items() if value is not None},
    )
    if not seen.violations:
        try:
            validate_request(options.put(UNTOUCHED), info.vocab_size, info.max_context, info.drafters)
        except InvalidRequestError as error:
            seen.violations += error.violations
    return options, [*problems, *((tuple(v.field.split(".")), v.description) for v in seen.violations)]


def _mode(value: Any) -> Any:
    """YAML reads an unquoted `off` as false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value
