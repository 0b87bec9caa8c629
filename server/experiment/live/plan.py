"""A plan checked against this server: options of requests and settings of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, get_args

from server.experiment.arm_options import UNTOUCHED, ArmOptions, read_options
from server.experiment.config import NAME, ExperimentConfig, Problem
from specdec.config import WeightDtype
from specdec.core.types import EngineInfo, Request
from specdec.engine.validation import check_requests
from specdec.errors import InvalidRequestError

OPTIONS = ("priority", "target_tpot_ms", "cache_salt")
"""The options that an arm may change, besides those of speculation."""

_NAMES = ("draft", "draft_dtype", "flush_cache")
_DTYPES = get_args(WeightDtype)


@dataclass(frozen=True)
class EngineSettings:
    names: frozenset[str] = frozenset()  # the settings that the arm names; `draft` stands for its dtype too
    draft: str | None = None  # None: no draft model
    draft_dtype: WeightDtype | None = None  # None: the engine's default
    flush_cache: bool = False  # clear the prefix cache when a block begins


def read_settings(given: Mapping[str, Any]) -> tuple[EngineSettings, list[Problem]]:
    """An arm's ``engine`` mapping as settings, and its problems."""
    draft, dtype, flush = given.get("draft"), given.get("draft_dtype"), given.get("flush_cache", False)
    problems: list[Problem] = [
        (
            (name,),
            f"cannot switch in a running engine; {', '.join(_NAMES)} can. To compare others, use two servers: "
            "specdec ab run PLAN --a URL --b URL",
        )
        for name in given
        if name not in _NAMES
    ]
    if not (draft is None or (isinstance(draft, str) and draft)):
        problems.append((("draft",), "must name a model, or be null for none"))
    if dtype is not None and dtype not in _DTYPES:
        problems.append((("draft_dtype",), f"must be one of {', '.join(_DTYPES)}"))
    if dtype is not None and draft is None:
        problems.append((("draft_dtype",), "has no meaning without `draft`"))
    if not isinstance(flush, bool):
        problems.append((("flush_cache",), "must be true or false"))
    if problems:
        return EngineSettings(), problems
    return EngineSettings(frozenset(given) - {"draft_dtype"}, draft, dtype, flush), []


@dataclass(frozen=True)
class LivePlan:
    """A plan that this server can run."""

    config: ExperimentConfig
    options: Mapping[str, ArmOptions]  # by arm
    settings: Mapping[str, EngineSettings]  # by arm
    names: frozenset[str]  # all options that an arm changes, as in `ArmOptions.names`

    def named(self, option: str) -> frozenset[str]:
        """The drafters or indexes that the arms name."""
        return frozenset(name for arm in self.options.values() for name in arm.speculation.get(option) or ())

    @cached_property
    def highest_priority(self) -> int | None:
        """Of the arms; None: they leave it as it is."""
        if "priority" not in self.names:
            return None
        return max(arm.put(UNTOUCHED).priority for arm in self.options.values())

    @cached_property
    def _unset(self) -> list[tuple[attrgetter[Any], Any]]:
        return [(get := attrgetter(name), get(UNTOUCHED)) for name in sorted(self.names)]

    @property
    def changes(self) -> frozenset[str]:
        """Every setting that the experiment controls exclusively."""
        engine = {f"engine.{name}" for arm in self.settings.values() for name in arm.names}
        return self.names | engine

    @property
    def switches_engine(self) -> bool:
        return any(arm.names for arm in self.settings.values())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings shown when the experiment starts."""
        if any("draft" in arm.names for arm in self.settings.values()):
            return ("draft models are loaded while requests run; both must fit in memory at once",)
        return ()

    def leaves_free(self, request: Request) -> bool:
        """Whether ``request`` sets no option that an arm changes; otherwise its own options apply, and it does not
        participate."""
        return all(get(request) == unset for get, unset in self._unset)


def make_plan(config: ExperimentConfig, info: EngineInfo) -> tuple[LivePlan, list[Problem]]:
    """``config`` as a plan for this engine, and its problems."""
    options: dict[str, ArmOptions] = {}
    settings: dict[str, EngineSettings] = {}
    problems: list[Problem] = []
    assignment = config.assignment
    if assignment.mode == "aa" and assignment.unit is None:
        assignment = assignment.model_copy(update={"unit": "request"})
        config = config.model_copy(update={"assignment": assignment})
    for name, arm in config.arms.items():
        if not NAME.fullmatch(name):
            problems.append((("arms", name), "must be a name of letters, digits, `.`, `_` and `-`, 64 at most"))
        options[name], wrong = read_options(arm.request, OPTIONS)
        if not wrong:
            try:
                check_requests([options[name].put(UNTOUCHED)], info)
            except InvalidRequestError as error:
                wrong = [(tuple(v.field.split(".")), v.description) for v in error.violations]
        problems += [(("arms", name, "request", *place), text) for place, text in wrong]
        settings[name], wrong = read_settings(arm.engine)
        problems += [(("arms", name, "engine", *place), text) for place, text in wrong]
        if arm.url is not None:
            problems.append((("arms", name, "url"), "only for `specdec ab run PLAN --a URL --b URL`"))
    plan = LivePlan(config, options, settings, frozenset().union(*(arm.names for arm in options.values())))
    return plan, problems or _misfits(plan)


def _misfits(plan: LivePlan) -> list[Problem]:
    """Problems of the whole plan, if its parts are valid."""
    found: list[Problem] = []
    assignment, arms = plan.config.assignment, plan.config.arms
    first, second = (plan.settings[name] for name in arms)
    if assignment.mode == "paired_replay":
        found.append(
            (("assignment", "mode"), "paired_replay is for `specdec ab run`; live modes are hash, switchback, aa")
        )
    if plan.switches_engine and assignment.mode != "switchback":
        found.append((("arms",), f"{assignment.mode} cannot switch `engine` settings; use switchback"))
    if first.names != second.names:
        odd = ", ".join(sorted(first.names ^ second.names))
        found.append((("arms",), f"`engine` must name the same settings in both arms; {odd} is in one arm only"))
    same = len({arm.put(UNTOUCHED) for arm in plan.options.values()}) == 1 and first == second
    if same and assignment.mode == "hash":  # a switchback of equal arms shows how many blocks it needs
        found.append((("arms",), "both arms are the same; change one, or use mode aa"))
    return found
