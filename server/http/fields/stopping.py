"""When to stop."""

from __future__ import annotations

from server.http.body import Body
from server.tokenizer_protocol import TokenizerLike
from specdec.engine.validation import MAX_STOPS
from specdec.types import StoppingParams

MAX_TOKENS = (1 << 31) - 1


def read_stopping(body: Body, tokenizer: TokenizerLike, max_tokens: int | None) -> StoppingParams:
    """``stop`` and vLLM's fields around it; ``max_tokens`` has been read already.

    A stop string that is the name of a special token also stops at that token, which text may leave out.
    """
    stops = tuple(dict.fromkeys(body.texts("stop")))
    if len(stops) > MAX_STOPS:
        body.refuse(
            "stop",
            f"at most {MAX_STOPS} different strings, got {len(stops)}; leave some out, or give ids in stop_token_ids",
        )
        stops = ()
    named = [found for stop in stops if (found := tokenizer.special_id(stop)) is not None]
    return StoppingParams(
        max_tokens=max_tokens,
        min_tokens=body.integer("min_tokens", 0, MAX_TOKENS) or 0,
        stop=stops,
        stop_token_ids=tuple(dict.fromkeys((*body.integers("stop_token_ids", 0, MAX_TOKENS), *named))),
        include_stop=body.flag("include_stop_str_in_output"),
        ignore_eos=body.flag("ignore_eos"),
    )
