"""The options of requests that an arm of an experiment may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.experiment.config import Place, Problem
from server.json_body import Body
from server.request_fields import SPECULATION, param_fields, read_request
from specdec.core.types import Request, SpeculationParams
from specdec.engine.validation import out_of_bounds
from specdec.errors import ViolationCollector

UNTOUCHED = Request(request_id="any", prompt_ids=(0,))
"""A request with default options."""

_SPECULATION = tuple(f.name for f in dataclasses.fields(SpeculationParams))


@dataclass(frozen=True)
class ArmOptions:
    """The options that an arm changes. None of them can change the tokens of an answer."""

    speculation: Mapping[str, Any]
    plain: Mapping[str, Any]

    @property
    def names(self) -> frozenset[str]:
        """The options, as attribute paths of a request for `operator.attrgetter`."""
        return frozenset((*(f"speculation.{name}" for name in self.speculation), *self.plain))

    def put(self, request: Request) -> Request:
        changed = dict(self.plain)
        if self.speculation:
            changed["speculation"] = dataclasses.replace(request.speculation, **self.speculation)
        return dataclasses.replace(request, **changed) if changed else request


def read_options(given: Mapping[str, Any], allowed: Sequence[str]) -> tuple[ArmOptions, list[Problem]]:
    """An arm's ``request`` mapping as options, and its problems. ``allowed``: options besides those of speculation.

    `speculation: off` abbreviates its mode; an option that is null is not changed.
    """
    spelled = given.get("speculation", {})
    speculation = spelled if isinstance(spelled, Mapping) else {"mode": spelled}
    speculation = {str(k): v for k, v in speculation.items() if v is not None}
    plain = {name: given[name] for name in allowed if given.get(name) is not None}
    unknown: list[Place] = [(name,) for name in given if name not in ("speculation", *allowed)]
    unknown += [("speculation", name) for name in speculation if name not in _SPECULATION]
    known = f"speculation.({', '.join(_SPECULATION)}), {', '.join(allowed)}"
    problems: list[Problem] = [(place, f"an arm cannot change it; options are {known}") for place in unknown]
    violations = ViolationCollector()
    body = Body({"speculation": {n: v for n, v in speculation.items() if n in _SPECULATION}, **plain}, violations)
    asked = read_request(body, (SPECULATION, *param_fields(Request))).engine
    chosen = asked.pop("speculation", SpeculationParams())
    options = ArmOptions({name: getattr(chosen, name) for name in _SPECULATION if name in speculation}, asked)
    if not violations.found:
        changed = options.put(UNTOUCHED)
        violations.found += [*out_of_bounds("speculation.", changed.speculation, 0), *out_of_bounds("", changed, 0)]
    return options, [*problems, *((tuple(v.field.split(".")), v.description) for v in violations.found)]
