"""Checks that a draft model speaks the target's vocabulary."""

from __future__ import annotations

from specdec.errors import TokenizerMismatchError
from specdec.models.tokenizer import Tokenizer


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """TokenizerMismatchError unless both map the same tokens to the same ids; the message tells what differs."""
    if target.fingerprint == draft.fingerprint:
        return
    ours, theirs = target.vocabulary, draft.vocabulary
    missing = [token for token in ours if token not in theirs]
    extra = [token for token in theirs if token not in ours]
    moved = [token for token, token_id in ours.items() if theirs.get(token, token_id) != token_id]
    parts = []
    if len(ours) != len(theirs):
        parts.append(f"the target has {len(ours)} tokens, the draft {len(theirs)}")
    for tokens, what in ((missing, "missing from the draft"), (extra, "missing from the target")):
        if tokens:
            parts.append(f"{len(tokens)} {what} (such as {min(tokens)!r})")
    if moved:
        token = min(moved, key=ours.__getitem__)
        parts.append(f"{len(moved)} have other ids (such as {token!r}: {ours[token]} and {theirs[token]})")
    raise TokenizerMismatchError(
        f"target and draft have different vocabularies: {'; '.join(parts)}; use a draft from the target's family"
    )
