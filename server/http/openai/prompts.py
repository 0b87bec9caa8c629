"""The prompts of /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.frontend import Frontend
from server.http.body import Body

MAX_PROMPTS = 128
_RULE = "must be text, a list of token ids, or a list of such"


@dataclass(frozen=True, slots=True)
class Prompt:
    """``text`` is the caller's own where there is one; ``ends``: ids that end what fills a gap."""

    ids: tuple[int, ...]
    text: str | None = None
    ends: tuple[int, ...] = ()


async def read_prompts(body: Body, frontend: Frontend, max_tokens: int) -> list[Prompt]:
    """Every prompt, encoded. Special tokens spelled out in a text are read as such unless ``parse_special`` is false:
    clients write templates of their own. With ``suffix``, each is what stands before a gap, shown as far
    as there is room for ``max_tokens`` more.

    Raises:
        FimNotSupportedError: there is a suffix, and the model can not fill in.
    """
    given, suffix = _listed(body.raw("prompt")), body.text("suffix")
    special, parse = body.flag("add_special_tokens", True), body.flag("parse_special", True)
    if given is None:
        body.refuse("prompt", _RULE)
        given = []
    if len(given) > MAX_PROMPTS:
        body.refuse("prompt", f"at most {MAX_PROMPTS} prompts, got {len(given)}; send the others separately")
        given = []
    if suffix and not all(isinstance(prompt, str) for prompt in given):
        body.refuse("suffix", "needs prompts of text")
        given = []
    prompts = []
    for prompt in given:
        if not isinstance(prompt, str):
            prompts.append(Prompt(tuple(prompt)))
        elif suffix:
            packed = await frontend.pack_fim(prompt, suffix, max_tokens)
            prompts.append(Prompt(packed.ids, prompt, packed.ends))
        else:
            ids = await frontend.encode(prompt, add_special=special, parse_special=parse)
            prompts.append(Prompt(tuple(ids), prompt))
    return prompts


def _listed(value: Any) -> list[str | list[int]] | None:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        return None
    if _is_ids(value):
        return [value]
    return value if all(isinstance(prompt, str) or _is_ids(prompt) for prompt in value) else None


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)
