"""A trace to replay: when requests arrived and what they asked, as JSON lines or as msgpack objects in a row."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

from bench.serve.ask import Ask
from bench.serve.stand_in import stand_in
from bench.serve.timed_ask import TimedAsk
from specdec.client import ChatTurn, Fim
from specdec.errors import ConfigError
from specdec.types import SamplingParams

MAX_TOKENS = 128
_PROMPTS = ("prompt", "prompt_ids", "messages", "prefix", "prompt_blocks")
_SAMPLING = {"temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0)}


def read_trace(path: Path, speed: float = 1.0) -> list[TimedAsk]:
    """The requests of ``path``, by arrival; a name that ends in ``.msgpack`` or ``.mp`` is msgpack.

    Each is an object: ``offset_s`` (seconds after the beginning), one of ``prompt`` (text), ``prompt_ids`` (a target's
    tokens), ``messages`` (objects with role and content), ``prefix`` with ``suffix``, and ``prompt_blocks`` with
    ``prompt_tokens`` (nothing but lengths and what is shared, see `stand_in`); and may have ``max_tokens``, ``stop``,
    ``fixed`` (true: an answer as long as it may be), ``prediction``, ``session``, ``salt``, ``seed``, ``temperature``,
    ``top_p``, ``top_k``, ``min_p``, ``name``. Other fields are passed over. speed: 2 replays it in half the time.

    Raises:
        ConfigError: the file can not be read, or an object is not of that form; names its number and the field.
    """
    try:
        objects = list(_msgpack(path) if path.suffix in (".msgpack", ".mp") else _json_lines(path))
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
    name = _text(item, "name", where) or where.rpartition(" ")[2]
    fixed = item.get("fixed", False)
    if not isinstance(fixed, bool):
        raise ConfigError(f"{where}: fixed must be true or false")
    text = _text(item, "prompt", where)
    if "prompt_blocks" in item:
        text = stand_in(_texts(item, "prompt_blocks", where), _whole(item, "prompt_tokens", where, 0), name)
    ask = Ask(
        name, _whole(item, "max_tokens", where, 1, MAX_TOKENS), text=text, chat=_turns(item.get("messages", []), where),
        ids=_ids(item, where), gap=_gap(item, where), stop=tuple(_texts(item, "stop", where)), fixed=fixed,
        prediction=_text(item, "prediction", where), session=_text(item, "session", where),
        salt=_text(item, "salt", where), sampling=_sampling(item, where),
        seed=_whole(item, "seed", where, 0) if "seed" in item else None,
    )  # fmt: skip
    return TimedAsk(offset / speed, ask)


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


def _gap(item: dict[str, Any], where: str) -> Fim | None:
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
