"""A workload: a named list of prompts; and source code of Python's standard library, from which prompts are made."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json.decoder
import textwrap
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import reduce

from specdec.core.types import StoppingParams
from specdec.errors import SpecdecError


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A request as token ids."""

    name: str
    prompt_ids: tuple[int, ...]
    stopping: StoppingParams = field(default_factory=StoppingParams)
    prediction_ids: tuple[int, ...] = ()
    session: str = ""  # the editor session; empty: none
    counted: bool = True  # False: a warm-up of the engine or the session


@dataclass(frozen=True, slots=True)
class Workload:
    """Groups of prompts that run one group after the other. No prompt occurs twice: an engine that keeps its texts
    would have the second answer as a draft."""

    name: str
    groups: tuple[tuple[BenchPrompt, ...], ...]
    at_once: int | None = None  # concurrent prompts of a group; None: all of it

    @property
    def concurrent(self) -> bool:
        return any(len(group) > 1 for group in self.groups)

    @property
    def n_counted(self) -> int:
        return sum(group[0].counted for group in self.groups)


def uncounted(prompts: Seq[BenchPrompt], max_tokens: int | None = None) -> list[BenchPrompt]:
    """The prompts as warm-ups, with at most ``max_tokens`` tokens of output each."""
    shorter = []
    for prompt in prompts:
        stopping = prompt.stopping
        if max_tokens is not None:
            stopping = dataclasses.replace(stopping, max_tokens=min(max_tokens, stopping.max_tokens or max_tokens))
        shorter.append(dataclasses.replace(prompt, stopping=stopping, counted=False))
    return shorter


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
