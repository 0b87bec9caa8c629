"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Any

from server.http.body import Body
from server.http.call import Call
from server.tokenizer_protocol import TokenizerLike


async def tokenize(call: Call) -> None:
    """Text to ids.

    Raises:
        InvalidRequestError: the body makes no sense.
        EngineDeadError: the tokenizer is not loaded yet.
    """
    body, frontend = call.body(), call.face.frontend
    content, pieces = _content(body), body.flag("with_pieces")
    special, parse = body.flag("add_special"), body.flag("parse_special", True)
    body.seen.raise_if_any()
    ids = await frontend.encode(content, add_special=special, parse_special=parse)
    shown = [_piece(frontend.loaded_tokenizer, token) for token in ids] if pieces else ids
    await call.reply(200, {"tokens": shown})


async def detokenize(call: Call) -> None:
    """Ids to text, special tokens by name; raises as `tokenize`."""
    body = call.body()
    ids = body.integers("tokens", 0, call.face.info.vocab_size - 1)
    body.seen.raise_if_any()
    await call.reply(200, {"content": await call.face.frontend.decode(ids, skip_special=False)})


def _content(body: Body) -> str:
    content = body.text("content")
    if content is None and not body.seen.violations:
        body.refuse("content", "must be a string")
    return content or ""


def _piece(tokenizer: TokenizerLike, token: int) -> dict[str, Any]:
    """A piece that is no whole text is told as its bytes."""
    data = tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}
