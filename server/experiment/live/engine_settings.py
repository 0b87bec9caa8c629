"""The settings of a running engine that can switch between blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from server.experiment.live.arm_options import Problem
from specdec.config import WeightDtype

_NAMES = ("draft", "draft_dtype", "flush_cache")
_DTYPES = get_args(WeightDtype)


@dataclass(frozen=True)
class EngineSettings:
    """``names``: those that the arm sets; a type goes with its draft. ``draft`` None: no draft model; ``draft_dtype``
    None: the engine's choice.
    ``flush_cache``: forget cached prefixes when a block begins, so that it finds none of the one before."""

    names: frozenset[str] = frozenset()
    draft: str | None = None
    draft_dtype: WeightDtype | None = None
    flush_cache: bool = False


def read_settings(given: Mapping[str, Any]) -> tuple[EngineSettings, list[Problem]]:
    """An arm's ``engine`` mapping as settings, and what is wrong with it."""
    draft, dtype, flush = given.get("draft"), given.get("draft_dtype"), given.get("flush_cache", False)
    problems: list[Problem] = [
        (
            (name,),
            f"can not switch in a running engine; {', '.join(_NAMES)} can. For the rest compare two servers: "
            "specdec ab run --a URL --b URL",
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
