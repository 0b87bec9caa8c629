"""The requests of a load: prompts of a workload, or requests of a recorded trace."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count, zip_longest
from pathlib import Path
from typing import Any

from bench.serve import SERVE_WORKLOADS
from bench.workloads.prompts import KINDS, QUESTIONS
from bench.workloads.workload import WorkloadUnavailableError, long_text
from specdec.client.prompt import ChatTurn, Fim
from specdec.core.types import SamplingParams
from specdec.errors import ConfigError
from specdec.load.arrivals import BLOCK_TOKENS
from specdec.load.request import LoadRequest, TimedRequest

SHARED_CHARACTERS, SHARED_TOKENS = 8000, 64


def endless_requests(
    name: str, max_tokens: int | None = None, note: Callable[[str], None] | None = None
) -> Iterator[LoadRequest]:
    """The prompts of a workload (one of `SERVE_WORKLOADS`), round after round.

    From the second round on, each prompt has a different beginning and its own salt, so that it cannot use the cache or
    the answers of earlier rounds. Only the shared prefix stays shared.

    max_tokens: replaces each workload's own limit. note: receives each kind omitted from "mixed", with the reason.

    Raises:
        WorkloadUnavailableError: the prompts are not installed.
        ValueError: there is no such workload.
    """
    asks = _one_round(name, max_tokens, note or (lambda line: None))
    return chain(asks, (_varied(ask, number) for number in count(2) for ask in asks))


def _one_round(name: str, max_tokens: int | None, note: Callable[[str], None]) -> list[LoadRequest]:
    if name == "mixed":
        kinds: list[list[LoadRequest]] = []
        for kind in ("humaneval", "edit", "fim", "chat"):
            try:
                kinds.append(_one_round(kind, max_tokens, note))
            except WorkloadUnavailableError as error:
                note(f"mixed: {error}")
        return [ask for ask in chain(*zip_longest(*kinds)) if ask is not None]
    makers = {**KINDS, "shared-prefix": _shared_prefix}
    if name not in makers:
        raise ValueError(f"{name}: no such workload; choose from {', '.join(SERVE_WORKLOADS)}")
    # Two states of typing a short line may be equal.
    return list({(ask.text, ask.chat, ask.gap): ask for ask in makers[name](max_tokens)}.values())


def _shared_prefix(max_tokens: int | None) -> Iterator[LoadRequest]:
    """Different questions about one long text."""
    shared = long_text()[:SHARED_CHARACTERS]
    for number, question in enumerate(QUESTIONS):
        text = f"{shared}\n\n# Note {number}: {question}\n# Answer:"
        yield LoadRequest(f"shared-prefix/{number}", max_tokens or SHARED_TOKENS, text=text)


def _varied(ask: LoadRequest, number: int) -> LoadRequest:
    name = f"{ask.name}#{number}"
    if ask.name.startswith("shared-prefix/"):
        text = ask.text.replace("\n# Answer:", f" ({number})\n# Answer:")
        return dataclasses.replace(ask, name=name, text=text)
    mark, fresh = f"# Round {number}\n", dataclasses.replace(ask, name=name, salt=f"round-{number}")
    if ask.gap is not None:
        return dataclasses.replace(fresh, gap=dataclasses.replace(ask.gap, prefix=mark + ask.gap.prefix))
    if ask.chat:
        first = ask.chat[0]
        return dataclasses.replace(fresh, chat=(ChatTurn(first.role, mark + first.content), *ask.chat[1:]))
    return dataclasses.replace(fresh, text=mark + ask.text)


CHARACTERS_PER_TOKEN = 3.5  # of code, by common tokenizers


def stand_in(blocks: Sequence[str], tokens: int, name: str) -> str:
    """About ``tokens`` tokens of real code as a substitute for a recorded prompt.

    blocks: names of the prompt's first blocks of `BLOCK_TOKENS` tokens; blocks of the same name get the same text. The
    rest of the text is specific to ``name``.
    """
    source = long_text()
    parts = [_slice(source, block, BLOCK_TOKENS) for block in blocks]
    return "".join(parts) + _slice(source, f"rest of {name}", tokens - BLOCK_TOKENS * len(blocks))


def _slice(source: str, name: str, tokens: int) -> str:
    length = max(0, round(tokens * CHARACTERS_PER_TOKEN))
    start = random.Random(name).randrange(max(1, len(source) - length))
    return (source * (1 + length // len(source)))[start : start + length]


MAX_TOKENS = 128
_PROMPTS = ("prompt", "prompt_ids", "messages", "prefix", "prompt_blocks")
_SAMPLING = {"temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0)}


def read_trace(path: Path, speed: float = 1.0) -> list[TimedRequest]:
    """The requests of a file of JSON lines, by arrival time.

    Each line is an object with ``offset_s`` (seconds after the start) and one of ``prompt`` (text), ``prompt_ids`` (the
    target's tokens), ``messages`` (objects with role and content), ``prefix`` with ``suffix``, or ``prompt_blocks``
    with ``prompt_tokens`` (lengths and shared beginnings only, see `stand_in`). Optional fields: ``max_tokens``,
    ``stop``, ``fixed`` (true: the answer has ``max_tokens`` tokens), ``prediction``, ``session``, ``salt``, ``seed``,
    ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``model``, ``name``. Other fields are ignored. speed: 2 replays
    the trace in half the time.

    Raises:
        ConfigError: the file cannot be read, or an object is invalid; names its number and the field.
    """
    try:
        objects = list(_json_lines(path))
    except OSError as error:
        raise ConfigError(f"trace: {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"trace: {path} is not UTF-8 text") from None
    if not objects:
        raise ConfigError(f"trace: {path} contains no request")
    found = [_timed(item, f"trace: {path.name}, request {number}", speed) for number, item in enumerate(objects, 1)]
    return sorted(found, key=lambda timed: timed.offset_s)


def _json_lines(path: Path) -> Iterator[Any]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ConfigError(f"trace: {path.name}, line {number} is not JSON ({error})") from None


def _timed(item: Any, where: str, speed: float) -> TimedRequest:
    if not isinstance(item, dict):
        raise ConfigError(f"{where} is not an object")
    offset = item.get("offset_s")
    if not isinstance(offset, int | float) or isinstance(offset, bool) or not 0 <= offset < math.inf:
        raise ConfigError(f"{where}: offset_s must be a number of seconds, at least 0")
    given = [name for name in _PROMPTS if name in item]
    if len(given) != 1:
        raise ConfigError(f"{where}: exactly one of {', '.join(_PROMPTS)} is needed")
    name = _text(item, "name", where) or where.rpartition(" ")[2]
    fixed = item.get("fixed", False)
    if not isinstance(fixed, bool):
        raise ConfigError(f"{where}: fixed must be true or false")
    text = _text(item, "prompt", where)
    if "prompt_blocks" in item:
        text = stand_in(_texts(item, "prompt_blocks", where), _whole(item, "prompt_tokens", where, 0), name)
    ask = LoadRequest(
        name, _whole(item, "max_tokens", where, 1, MAX_TOKENS), text=text, chat=_turns(item.get("messages", []), where),
        ids=_ids(item, where), gap=_recorded_gap(item, where), stop=tuple(_texts(item, "stop", where)), fixed=fixed,
        prediction=_text(item, "prediction", where), session=_text(item, "session", where),
        salt=_text(item, "salt", where), sampling=_sampling(item, where),
        seed=_whole(item, "seed", where, 0) if "seed" in item else None, model=_text(item, "model", where),
    )  # fmt: skip
    return TimedRequest(offset / speed, ask)


def _text(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name, "")
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name} must be a string")
    return value


def _texts(item: dict[str, Any], name: str, where: str) -> list[str]:
    value = item.get(name, [])
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise ConfigError(f"{where}: {name} must be a list of strings")
    return value


def _whole(item: dict[str, Any], name: str, where: str, least: int, default: int | None = None) -> int:
    value = item.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{where}: {name} must be a whole number, at least {least}")
    return value


def _ids(item: dict[str, Any], where: str) -> tuple[int, ...]:
    value = item.get("prompt_ids", [])
    good = isinstance(value, list) and all(isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in value)
    if not good or ("prompt_ids" in item and not value):
        raise ConfigError(f"{where}: prompt_ids must be a list of token ids")
    return tuple(value)


def _recorded_gap(item: dict[str, Any], where: str) -> Fim | None:
    return Fim(_text(item, "prefix", where), _text(item, "suffix", where)) if "prefix" in item else None


def _sampling(item: dict[str, Any], where: str) -> SamplingParams | None:
    """The recorded sampling; None if there is none, so that the replay chooses."""
    found: dict[str, Any] = {}
    for name, (low, high) in _SAMPLING.items():
        value = item.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"{where}: {name} must be a number from {low:g} to {high:g}")
        found[name] = float(value)
    if "top_k" in item:
        found["top_k"] = _whole(item, "top_k", where, 0)
    return SamplingParams(**({"temperature": 0.0} | found)) if found else None


def _turns(messages: Any, where: str) -> tuple[ChatTurn, ...]:
    try:
        turns = tuple(ChatTurn(message["role"], message["content"]) for message in messages)
    except (TypeError, LookupError):
        turns = (ChatTurn("", ""),)
    if not all(isinstance(turn.role, str) and turn.role and isinstance(turn.content, str) for turn in turns):
        raise ConfigError(f"{where}: messages must be objects with role and content, both strings")
    return turns
