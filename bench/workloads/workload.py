"""A workload: a named list of prompts; and source code of Python's standard library, from which prompts are made."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json.decoder
import textwrap
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import reduce

from specdec.errors import SpecdecError
from specdec.load.request import LoadRequest


@dataclass(frozen=True, slots=True)
class Workload:
    """Groups of requests with token ids, one group after the other. No prompt occurs twice: an engine that keeps its
    texts would have the second answer as a draft."""

    name: str
    groups: tuple[tuple[LoadRequest, ...], ...]
    at_once: int | None = None  # concurrent prompts of a group; None: all of it

    @property
    def concurrent(self) -> bool:
        return any(len(group) > 1 for group in self.groups)

    @property
    def n_counted(self) -> int:
        return sum(group[0].counted for group in self.groups)


def uncounted(prompts: Seq[LoadRequest], max_tokens: int | None = None) -> list[LoadRequest]:
    """The prompts as warm-ups, with at most ``max_tokens`` tokens of output each."""
    return [
        dataclasses.replace(prompt, max_tokens=min(prompt.max_tokens, max_tokens or prompt.max_tokens), counted=False)
        for prompt in prompts
    ]


class WorkloadUnavailableError(SpecdecError):
    """The model or this installation lacks what a workload needs; the message says what, and how to get it."""


def source_of(place: str) -> str:
    """Source text of ``module:qualified.name``, or of a whole ``module:``, without common indentation.

    Raises:
        ValueError: this Python has no such object, or no source of it.
    """
    module_name, _, path = place.partition(":")
    try:
        module = importlib.import_module(module_name)
        found = reduce(getattr, path.split("."), module) if path else module
        text = inspect.getsource(found)
    except (ImportError, AttributeError, TypeError, OSError) as error:
        raise ValueError(f"{place}: no source in this Python ({error})") from None
    return inspect.cleandoc("\n" + text) + "\n"


def long_text() -> str:
    """About 100,000 characters of real code."""
    return "\n".join(inspect.getsource(module) for module in (textwrap, json.decoder, argparse))
