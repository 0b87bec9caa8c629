"""A step's tree as JSON, its tokens with their text."""

from __future__ import annotations

from typing import Any

from server.http.body import Body
from server.http.openai.stream_options import StreamOptions
from server.tokenizer_protocol import TokenizerLike
from specdec.types import StepTree


def read_step_trees(body: Body, streaming: StreamOptions) -> bool:
    """``return_step_trees``: whether each chunk comes with the tree its step verified."""
    wanted = body.flag("return_step_trees")
    if wanted and not streaming.stream:
        body.refuse("return_step_trees", "goes with the steps of a streamed answer: set stream to true")
    return wanted


def step_tree_value(tree: StepTree, tokenizer: TokenizerLike) -> dict[str, Any]:
    """``tree`` with ``text`` for each node; half a character is shown as a replacement character."""
    rows = zip(tree.tokens, tree.parents, tree.chances, tree.sources, strict=True)
    return {
        "nodes": [
            {
                "token_id": token,
                "text": tokenizer.token_bytes(token).decode("utf-8", "replace"),
                "parent": parent,
                "chance": chance,
                "sources": sources,
            }
            for token, parent, chance, sources in rows
        ],
        "accepted": tree.accepted,
        "draft_ms": round(tree.draft_ms, 3),
        "verify_ms": round(tree.verify_ms, 3),
    }
