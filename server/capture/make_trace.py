"""From captured requests to a trace that can be asked again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

_PLAIN = {"temperature": None, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def make_trace(entries: Iterable[dict[str, Any]], since_s: float, until_s: float) -> Iterator[dict[str, Any]]:
    """The requests that arrived in [since_s, until_s) (Unix time), in order of arrival, as `bench.serve.trace_file`
    reads them; ``offset_s`` counts from the first of them.

    With its tokens a request is asked again as it was. Without, it has lengths, and what it shares with others; its
    answer is to be as long as the one that was given. Requests that only warmed the cache are left out: whoever replays
    decides about caches. The fields ``was_`` say what became of it: ``was_s`` took it to its end.
    """
    chosen = sorted(
        (e for e in entries if since_s <= e["at_s"] < until_s and e["max_tokens"] != 0), key=lambda e: float(e["at_s"])
    )
    for number, entry in enumerate(chosen):
        yield _line(entry, number, chosen[0]["at_s"])


def _line(entry: dict[str, Any], number: int, start_s: float) -> dict[str, Any]:
    line: dict[str, Any] = {"offset_s": round(entry["at_s"] - start_s, 6), "name": f"captured/{number}"}
    if entry.get("ids"):
        line |= {"prompt_ids": list(entry["ids"]), "fixed": entry["ignore_eos"]}
        # Without a limit the answer ended by itself, or at the end of the context.
        line["max_tokens"] = entry["max_tokens"] or max(1, entry["output_tokens"] // entry["n"])
        if entry.get("stop"):
            line["stop"] = list(entry["stop"])
    else:
        blocks = [block.hex() for block in entry["blocks"]]
        line |= {"prompt_blocks": blocks, "prompt_tokens": entry["prompt_tokens"], "fixed": True}
        line["max_tokens"] = max(1, entry["output_tokens"] // entry["n"])
    line |= {name: entry[name] for name, plain in _PLAIN.items() if entry[name] != plain}
    line |= {name: entry[name].hex() for name in ("session", "salt") if entry[name]}
    if entry["seed"] is not None:
        line["seed"] = entry["seed"]
    was = {"was_status": entry["status"], "was_s": round(entry["end_s"], 6), "was_tokens": entry["output_tokens"]}
    return line | was
