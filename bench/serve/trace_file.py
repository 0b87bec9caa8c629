"""A trace to replay: when requests arrived and what they asked, as JSON lines or as msgpack objects in a row."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

from bench.serve.ask import Ask
from bench.serve.timed_ask import TimedAsk
from specdec.client import ChatTurn, Fim
from specdec.errors import ConfigError

MAX_TOKENS = 128
_PROMPTS = ("prompt", "messages", "prefix")


def read_trace(path: Path, speed: float = 1.0) -> list[TimedAsk]:
    """The requests of ``path``, by arrival; a name that ends in ``.msgpack`` or ``.mp`` is msgpack.

    Each is an object: ``offset_s`` (seconds after the beginning), one of ``prompt`` (text), ``messages`` (objects with
    role and content) and ``prefix`` with ``suffix``; and may have ``max_tokens``, ``stop``, ``prediction``,
    ``session``, ``name``. speed: 2 replays it in half the time.

    Raises:
        ConfigError: the file can not be read, or an object is not of that form; names its number and the field.
    """
    try:
        objects = list(_msgpack(path) if path.suffix in (".msgpack", ".mp") else _json_lines(path))
    except OSError as error:
        raise ConfigError(f"trace: {path} can not be read ({error.strerror})") from None
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


def _msgpack(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        try:
            yield from msgpack.Unpacker(file, raw=False)
        except (ValueError, msgpack.UnpackException) as error:
            raise ConfigError(f"trace: {path.name} is no msgpack ({error})") from None


def _timed(item: Any, where: str, speed: float) -> TimedAsk:
    if not isinstance(item, dict):
        raise ConfigError(f"{where} is not an object")
    offset = item.get("offset_s")
    if not isinstance(offset, int | float) or isinstance(offset, bool) or not 0 <= offset < math.inf:
        raise ConfigError(f"{where}: offset_s must be a number of seconds, at least 0")
    given = [name for name in _PROMPTS if name in item]
    if len(given) != 1:
        raise ConfigError(f"{where}: exactly one of {', '.join(_PROMPTS)} is needed")
    limit = item.get("max_tokens", MAX_TOKENS)
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ConfigError(f"{where}: max_tokens must be a whole number, at least 1")
    stop = item.get("stop", [])
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise ConfigError(f"{where}: stop must be a list of texts")
    ask = Ask(
        _text(item, "name", where) or where.rpartition(" ")[2], limit,
        text=_text(item, "prompt", where), chat=_turns(item.get("messages", []), where),
        gap=Fim(_text(item, "prefix", where), _text(item, "suffix", where)) if "prefix" in item else None,
        stop=tuple(stop), prediction=_text(item, "prediction", where), session=_text(item, "session", where),
    )  # fmt: skip
    return TimedAsk(offset / speed, ask)


def _text(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name, "")
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name} must be a text")
    return value


def _turns(messages: Any, where: str) -> tuple[ChatTurn, ...]:
    try:
        turns = tuple(ChatTurn(message["role"], message["content"]) for message in messages)
    except (TypeError, LookupError):
        turns = (ChatTurn("", ""),)
    if not all(isinstance(turn.role, str) and turn.role and isinstance(turn.content, str) for turn in turns):
        raise ConfigError(f"{where}: messages must be objects with role and content, both texts")
    return turns
