"""The requests of a load: prompts of a workload, or requests of a recorded trace."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count, zip_longest
from pathlib import Path

from bench.workloads.prompts import KINDS, QUESTIONS
from bench.workloads.workload import WorkloadUnavailableError, long_text
from specdec.client.prompt import ChatTurn, Fim
from specdec.core.types import SamplingParams
from specdec.load.arrivals import BLOCK_TOKENS
from specdec.load.request import LoadRequest, TimedRequest
from specdec.load.trace_file import TraceLine, read_trace_lines

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
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def read_trace(path: Path, speed: float = 1.0) -> list[TimedRequest]:
    """The requests of a trace (`TraceLine`) or a folder of captures, by arrival; speed: 2 replays it in half the time.

    Blocks become texts with as many tokens (`stand_in`). Without ``max_tokens`` an answer has `MAX_TOKENS` at most.

    Raises:
        ConfigError: the file cannot be read, or a line is invalid; names the line and the field.
    """
    lines = read_trace_lines(path)
    return [TimedRequest(line.offset_s / speed, recorded(line, line.name or place)) for place, line in lines]


def recorded(line: TraceLine, name: str) -> LoadRequest:
    """The request of a line; `stand_in` text for one that has only blocks."""
    text = line.prompt or ""
    if line.prompt_blocks is not None:
        text = stand_in(line.prompt_blocks, line.prompt_tokens, name)
    return LoadRequest(
        name, line.max_tokens or MAX_TOKENS, text=text, ids=tuple(line.prompt_ids or ()),
        chat=tuple(ChatTurn(turn.role, turn.content) for turn in line.messages or ()),
        gap=None if line.prefix is None else Fim(line.prefix, line.suffix), stop=tuple(line.stop), fixed=line.fixed,
        prediction=line.prediction or tuple(line.prediction_ids), session=line.session, salt=line.salt,
        sampling=_sampling(line), seed=line.seed, model=line.model,
    )  # fmt: skip


def _sampling(line: TraceLine) -> SamplingParams | None:
    """The recorded sampling; None if there is none, so that the replay chooses."""
    given = {name: value for name in _SAMPLING if (value := getattr(line, name)) is not None}
    return SamplingParams(**({"temperature": 0.0} | given)) if given else None
