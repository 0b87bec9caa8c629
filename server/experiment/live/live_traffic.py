"""Where experiments meet requests: between the faces of the server and admission."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

from server.admission.admission_errors import RateLimitedError
from server.admission.ticket import Ticket
from server.auth.principal import Principal
from server.experiment.live.arm_header import read_arms, told_arms
from server.experiment.live.part import Part
from server.experiment.live.running_experiment import RunningExperiment
from server.telemetry.call_record import ARM, CallRecord
from server.telemetry.current_call import current_call
from specdec.errors import DuplicateRequestError, FieldViolation, InvalidRequestError, RequestError
from specdec.types import Request

# Lets a request in, in somebody's name, with the key by which it supersedes another
Submit = Callable[[Principal, Request, str], Ticket]
# What says more about the caller than about the arm
_CALLERS_OWN = (RateLimitedError, DuplicateRequestError)


class LiveTraffic:
    """The experiments that run. ``allow_override``: whether callers may ask for arms, where an experiment lets them.

    There is one only while at least one experiment runs.
    """

    def __init__(self, running: Sequence[RunningExperiment], *, allow_override: bool) -> None:
        self._running, self._allow_override = tuple(running), allow_override

    def admit(self, principal: Principal, request: Request, supersedes_key: str, submit: Submit) -> Ticket:
        """Let ``request`` in with the options of its arms; raises as ``submit``.

        Raises:
            InvalidRequestError: the caller asks for an arm that is not there, or may not.
        """
        if request.stopping.max_tokens == 0:  # it only warms the cache
            return submit(principal, request, supersedes_key)
        call = current_call()
        asked = self._asked(call)
        parts: list[tuple[RunningExperiment, Part]] = []
        for experiment in self._running:
            experiment.make_room()
            part = experiment.take(principal, request, asked.get(experiment.plan.config.name))
            if part is not None:
                parts.append((experiment, part))
        if not parts:
            return submit(principal, request, supersedes_key)
        return self._submit(principal, request, supersedes_key, submit, parts, call)

    def _submit(
        self,
        principal: Principal,
        request: Request,
        supersedes_key: str,
        submit: Submit,
        parts: Sequence[tuple[RunningExperiment, Part]],
        call: CallRecord | None,
    ) -> Ticket:
        shadowed = any(part.choice.shadowed for _, part in parts)
        changed = bare = _seeded(request) if shadowed else request
        for experiment, part in parts:
            changed = experiment.put(part, changed)
            if shadowed and not part.choice.shadowed:
                bare = experiment.put(part, bare)
        try:
            ticket = submit(principal, changed, supersedes_key)
        except RequestError as error:
            if not isinstance(error, _CALLERS_OWN):
                for experiment, part in parts:
                    experiment.refused(part, changed, error)
            raise
        if ticket.record is not None:
            ticket.record.watchers += tuple(part for _, part in parts)
            ticket.record.arms = tuple(
                (experiment.plan.config.name, part.choice.arm) for experiment, part in parts if part.counts
            )
            if shadowed:
                for experiment, part in parts:
                    experiment.begin_shadow(part, principal, bare)
        if call is not None and not call.many:
            told = ((experiment.plan.config.name, part.choice.arm) for experiment, part in parts)
            call.arm = told_arms(call.arm, told)
        return ticket

    def _asked(self, call: CallRecord | None) -> Mapping[str, str]:
        """The arms that the caller asks for, by experiment; what does not run here is nobody's concern."""
        if call is None or not call.arm_asked:
            return {}
        running = {experiment.plan.config.name: experiment.plan.config for experiment in self._running}
        asked = {name: arm for name, arm in read_arms(call.arm_asked).items() if name in running}
        for name, arm in asked.items():
            config = running[name]
            if not (self._allow_override and config.assignment.allow_override):
                raise _refusal(f"{name} does not let callers choose; leave the header out, or set `allow_override` in "
                               "server.experiments and in the experiment's assignment")  # fmt: skip
            if arm not in config.arms:
                raise _refusal(f"{name} has no arm {arm[:64]!r}; there are {', '.join(config.arms)}")
        return asked


def _seeded(request: Request) -> Request:
    """With a seed, where chance decides: its shadow is to draw the same."""
    if request.sampling.temperature == 0 or request.sampling.seed is not None:
        return request
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=random.getrandbits(63)))


def _refusal(problem: str) -> InvalidRequestError:
    return InvalidRequestError([FieldViolation(ARM, problem)])
