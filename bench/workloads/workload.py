"""A workload: a named list of prompts, and the source code of Python's standard library that prompts are made of."""

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
    """What is asked, whichever way it is decoded. ``session`` names the editor that asks ("" for none).

    One that is not ``counted`` warms the engine or its session up; its figures are thrown away.
    """

    name: str
    prompt_ids: tuple[int, ...]
    stopping: StoppingParams = field(default_factory=StoppingParams)
    prediction_ids: tuple[int, ...] = ()
    session: str = ""
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Workload:
    """Groups run one after the other; of a group, ``at_once`` prompts at a time (None: all), the next one entering as
    one leaves. No prompt occurs twice: an engine that remembers its texts would know the second answer by heart."""

    name: str
    groups: tuple[tuple[BenchPrompt, ...], ...]
    at_once: int | None = None

    @property
    def concurrent(self) -> bool:
        """Whether prompts run at the same time."""
        return any(len(group) > 1 for group in self.groups)

    @property
    def n_counted(self) -> int:
        """Groups whose figures count."""
        return sum(group[0].counted for group in self.groups)

    @staticmethod
    def one_by_one(name: str, prompts: Seq[BenchPrompt]) -> Workload:
        """Every prompt on its own."""
        return Workload(name, tuple((prompt,) for prompt in prompts))


def uncounted(prompts: Seq[BenchPrompt], max_tokens: int | None = None) -> list[BenchPrompt]:
    """The same prompts for warming up, at most ``max_tokens`` long each."""
    shorter = []
    for prompt in prompts:
        stopping = prompt.stopping
        if max_tokens is not None:
            stopping = dataclasses.replace(stopping, max_tokens=min(max_tokens, stopping.max_tokens or max_tokens))
        shorter.append(dataclasses.replace(prompt, stopping=stopping, counted=False))
    return shorter


class WorkloadUnavailableError(SpecdecError):
    """The model or this installation lacks what a workload needs; the message names it, and how to get it."""


def source_of(place: str) -> str:
    """Source text of ``module:qualified.name``, or of a whole ``module:``, without the indentation it has in common.

    Raises:
        ValueError: there is no such thing in this Python, or no source of it.
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
    """Some 100,000 characters of real code."""
    return "\n".join(inspect.getsource(module) for module in (textwrap, json.decoder, argparse))
