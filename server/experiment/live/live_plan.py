"""An experiment's plan, checked against what this server can do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

from server.experiment.config.experiment_config import ExperimentConfig
from server.experiment.live.arm_options import UNTOUCHED, ArmOptions, Problem, read_options
from server.experiment.live.engine_settings import EngineSettings, read_settings
from specdec.types import EngineInfo, Request


@dataclass(frozen=True)
class LivePlan:
    """``options`` and ``settings`` by arm, ``names`` of all that any arm changes in requests."""

    config: ExperimentConfig
    options: Mapping[str, ArmOptions]
    settings: Mapping[str, EngineSettings]
    names: frozenset[str]

    @cached_property
    def drafters(self) -> frozenset[str]:
        """Those that an arm asks for by name."""
        return frozenset(name for arm in self.options.values() for name in arm.speculation.get("drafters") or ())

    @cached_property
    def _unset(self) -> list[tuple[attrgetter[Any], Any]]:
        return [(get := attrgetter(name), get(UNTOUCHED)) for name in sorted(self.names)]

    @property
    def salt(self) -> str:
        """What assignment is made from, beside the key."""
        return self.config.assignment.salt or self.config.name

    @property
    def changes(self) -> frozenset[str]:
        """Every setting that the experiment needs for itself."""
        engine = {f"engine.{name}" for arm in self.settings.values() for name in arm.names}
        return self.names | engine

    @property
    def switches_engine(self) -> bool:
        """Whether the engine is another one from block to block."""
        return any(arm.names for arm in self.settings.values())

    @property
    def warnings(self) -> tuple[str, ...]:
        """What whoever starts it should know."""
        assignment, found = self.config.assignment, []
        if assignment.mode == "shadow":
            found.append(
                f"{assignment.share:.0%} of the requests are generated twice, where the engine has room: up to "
                f"{1 + assignment.share:g} times the load; shadows run last and are given up first, so judge the "
                "treatment's tokens and errors by them, and its latency in another mode"
            )
        if assignment.mode == "switchback" and any(arm.names & {"draft"} for arm in self.settings.values()):
            found.append("draft models are loaded while requests are served; both must fit in memory for a moment")
        return tuple(found)

    def leaves_free(self, request: Request) -> bool:
        """Whether ``request`` sets nothing that an arm changes: else its own word counts, and it takes no part."""
        return all(get(request) == unset for get, unset in self._unset)


_ARM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def make_plan(config: ExperimentConfig, info: EngineInfo) -> tuple[LivePlan, list[Problem]]:
    """``config`` as this engine can carry it out, and what is wrong with it."""
    options: dict[str, ArmOptions] = {}
    settings: dict[str, EngineSettings] = {}
    problems: list[Problem] = []
    assignment = config.assignment
    if assignment.mode == "aa" and assignment.unit is None:
        assignment = assignment.model_copy(update={"unit": "request"})
        config = config.model_copy(update={"assignment": assignment})
    for name, arm in config.arms.items():
        if not _ARM.fullmatch(name):
            problems.append((("arms", name), "must be a name of letters, digits, `.`, `_` and `-`, 64 at most"))
        options[name], wrong = read_options(arm.request, info)
        problems += [(("arms", name, "request", *place), text) for place, text in wrong]
        settings[name], wrong = read_settings(arm.engine)
        problems += [(("arms", name, "engine", *place), text) for place, text in wrong]
        if arm.url is not None:
            problems.append((("arms", name, "url"), "means nothing here; use `specdec ab run --a URL --b URL`"))
    plan = LivePlan(config, options, settings, frozenset().union(*(arm.names for arm in options.values())))
    return plan, problems or _misfits(plan)


def _misfits(plan: LivePlan) -> list[Problem]:
    """What is wrong with the whole, where the parts are right."""
    found: list[Problem] = []
    assignment, arms = plan.config.assignment, plan.config.arms
    mode: Problem = (("assignment", "mode"), "")
    first, second = (plan.settings[name] for name in arms)
    if assignment.mode == "paired_replay":
        found.append((mode[0], "paired_replay plays a trace: use `specdec ab run`. Here: hash, switchback, shadow, aa"))
    if plan.switches_engine and assignment.mode != "switchback":
        found.append((("arms",), f"`engine` settings are everybody's, and {assignment.mode} can not switch them; use "
                      "mode switchback"))  # fmt: skip
    if first.names != second.names:
        odd = ", ".join(sorted(first.names ^ second.names))
        found.append((("arms",), f"`engine` must name the same settings in both arms; {odd} is in one only"))
    if assignment.mode == "switchback" and len({arm.weight for arm in arms.values()}) > 1:
        found.append((("arms",), "blocks go to both arms alike in switchback; leave weight out"))
    same = len({arm.put(UNTOUCHED) for arm in plan.options.values()}) == 1 and first == second
    if same and assignment.mode not in ("aa", "paired_replay"):
        found.append((("arms",), "both arms are the same; change something in one, or use mode aa"))
    return found
