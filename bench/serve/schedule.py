"""What a load asks and when: prompts of a workload, arrival times, requests of a recorded trace."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count, islice, zip_longest
from pathlib import Path
from typing import Any

from bench.serve import SERVE_WORKLOADS
from bench.workloads import prompts
from bench.workloads.prompts import TYPED
from bench.workloads.workload import WorkloadUnavailableError, long_text, source_of
from specdec.client.prompt import ChatTurn, Fim
from specdec.core.types import SamplingParams
from specdec.errors import ConfigError
from specdec.load.arrivals import BLOCK_TOKENS
from specdec.load.request import LoadRequest, TimedRequest

PREFIX_CHARACTERS, SUFFIX_CHARACTERS = 4000, 1200
SHARED_CHARACTERS, SHARED_TOKENS = 8000, 64
EDIT_CHARACTERS_PER_TOKEN = 3  # of code; only bounds how long an edited text may get


def endless_asks(
    name: str, max_tokens: int | None = None, note: Callable[[str], None] | None = None
) -> Iterator[LoadRequest]:
    """The prompts of workload ``name`` (one of `SERVE_WORKLOADS`), round after round. From the second round on each
    begins differently and has a salt of its own, so that none is answered from the cache or drafted from the answers of
    the one before. Only a shared prefix stays shared.

    max_tokens: instead of each workload's own limit. note: receives each kind left out of "mixed", with the reason.

    Raises:
        WorkloadUnavailableError: the prompts are not installed.
        ValueError: there is no such workload.
    """
    asks = _one_round(name, max_tokens, note or (lambda line: None))
    return chain(asks, (_varied(ask, number) for number in count(2) for ask in asks))


def make_asks(name: str, number: int, max_tokens: int | None = None) -> list[LoadRequest]:
    """The first ``number`` of `endless_asks`; raises as it does."""
    return list(islice(endless_asks(name, max_tokens), number))


def _one_round(name: str, max_tokens: int | None, note: Callable[[str], None]) -> list[LoadRequest]:
    if name == "mixed":
        kinds: list[list[LoadRequest]] = []
        for kind in ("humaneval", "edit", "fim", "chat"):
            try:
                kinds.append(_one_round(kind, max_tokens, note))
            except WorkloadUnavailableError as error:
                note(f"mixed: {error}")
        return [ask for ask in chain(*zip_longest(*kinds)) if ask is not None]
    makers: dict[str, Callable[[int | None], Iterator[LoadRequest]]] = {
        "humaneval": _humaneval, "edit": _edit, "fim": _fim, "typing": _typing, "chat": _chat,
        "shared-prefix": _shared_prefix,
    }  # fmt: skip
    if name not in makers:
        raise ValueError(f"{name}: no such workload; there are {', '.join(SERVE_WORKLOADS)}")
    # Of a short line two states of typing may be the same.
    return list({(ask.text, ask.chat, ask.gap): ask for ask in makers[name](max_tokens)}.values())


def _humaneval(max_tokens: int | None) -> Iterator[LoadRequest]:
    limit = max_tokens or prompts.HUMANEVAL_MAX_TOKENS
    for problem in prompts.read_problems():
        yield LoadRequest(problem["task_id"], limit, text=problem["prompt"], stop=prompts.STOPS)


def _chat(max_tokens: int | None) -> Iterator[LoadRequest]:
    for number, question in enumerate(prompts.QUESTIONS):
        yield LoadRequest(f"chat/{number}", max_tokens or prompts.CHAT_MAX_TOKENS, chat=(ChatTurn("user", question),))


def _edit(max_tokens: int | None) -> Iterator[LoadRequest]:
    for place, wish in prompts.EDITS:
        old, question = prompts.edit_question(place, wish)
        room = len(old) // EDIT_CHARACTERS_PER_TOKEN * 5 // 4 + prompts.MARGIN
        limit = min(max_tokens or prompts.EDIT_MAX_TOKENS, room)
        yield LoadRequest(f"edit/{place}", limit, chat=(ChatTurn("user", question),), prediction=old)


def _fim(max_tokens: int | None) -> Iterator[LoadRequest]:
    for place in prompts.FILES:
        source = source_of(place)
        for hole in prompts.find_holes(source, prompts.HOLES + 1):
            yield _gap(prompts.hole_name("fim", place, hole), source, hole, 0.0, max_tokens, place)


def _typing(max_tokens: int | None) -> Iterator[LoadRequest]:
    for place in prompts.FILES:
        source = source_of(place)
        for hole in prompts.find_holes(source, prompts.HOLES):
            for typed in TYPED:
                name = f"{prompts.hole_name('typing', place, hole)}+{typed:.0%}"
                yield _gap(name, source, hole, typed, max_tokens, place)


def _gap(name: str, source: str, hole: prompts.Hole, typed: float, max_tokens: int | None, session: str) -> LoadRequest:
    prefix, suffix = prompts.around_hole(source, hole, typed)
    gap = Fim(prefix[-PREFIX_CHARACTERS:], suffix[:SUFFIX_CHARACTERS])
    return LoadRequest(name, max_tokens or prompts.FIM_MAX_TOKENS, gap=gap, stop=("\n\n",), session=session)


def _shared_prefix(max_tokens: int | None) -> Iterator[LoadRequest]:
    """One long text, and a different question about it each time."""
    shared = long_text()[:SHARED_CHARACTERS]
    for number, question in enumerate(prompts.QUESTIONS):
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
    """A text of about ``tokens`` tokens of real code. ``blocks`` stand for the prompt's first tokens, 64 each, in
    chains: prompts with the same names at their beginning get the same text there. What follows is ``name``'s own."""
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

    Each is an object: ``offset_s`` (seconds after the beginning), one of ``prompt`` (text), ``prompt_ids`` (a target's
    tokens), ``messages`` (objects with role and content), ``prefix`` with ``suffix``, and ``prompt_blocks`` with
    ``prompt_tokens`` (nothing but lengths and what is shared, see `stand_in`); and may have ``max_tokens``, ``stop``,
    ``fixed`` (true: an answer as long as it may be), ``prediction``, ``session``, ``salt``, ``seed``, ``temperature``,
    ``top_p``, ``top_k``, ``min_p``, ``model``, ``name``. Other fields are passed over. speed: 2 replays it in half
    the time.

    Raises:
        ConfigError: the file can not be read, or an object is not of that form; names its number and the field.
    """
    try:
        objects = list(_json_lines(path))
    except OSError as error:
        raise ConfigError(f"trace: {path} can not be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"trace: {path} is not UTF-8 text") from None
    if not objects:
        raise ConfigError(f"trace: {path} holds no request")
    found = [_timed(item, f"trace: {path.name}, request {number}", speed) for number, item in enumerate(objects, 1)]
    return sorted(found, key=lambda timed: timed.offset_s)


def _json_lines(path: Path) -> Iterator[Any]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ConfigError(f"trace: {path.name}, line {number} is no JSON ({error})") from None


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
        raise ConfigError(f"{where}: {name} must be a text")
    return value


def _texts(item: dict[str, Any], name: str, where: str) -> list[str]:
    value = item.get(name, [])
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise ConfigError(f"{where}: {name} must be a list of texts")
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
    """None where nothing is said, so that the one who replays may choose."""
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
        raise ConfigError(f"{where}: messages must be objects with role and content, both texts")
    return turns
