"""The model card of a trained drafter: its data, what it cost, and its acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import specdec
from specdec.training.texts import OWN, TextSplit

_ORIGINS = 20  # named, at most
CARD_MARK = "Trained with `specdec train-head "  # in every card


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What a card reports."""

    split: TextSplit
    passes: float  # over the training texts
    tokens: int  # read in all passes
    seconds: float
    device: str
    first: Seq[float]  # acceptance by position before the training
    acceptance: Seq[float]  # and after it


def model_card(title: str, command: str, about: str, serve: str, result: TrainingResult) -> str:
    """README.md. command: of the training. about: a paragraph on the form. serve: the options that load the drafter."""
    split = result.split
    counts: Counter[str] = Counter()
    for text in split.training:
        counts[text.origin] += len(text.tokens)
    origins = counts.most_common(_ORIGINS)
    rows = [f"| {'prompts that the target wrote itself' if name == OWN else name} | {n:,} |" for name, n in origins]
    rest = sum(counts.values()) - sum(n for _, n in origins)
    rows += [f"| {len(counts) - len(origins)} further files | {rest:,} |"] if rest else []
    hours = result.seconds / 3600
    per_million = hours * 1e6 / max(result.tokens, 1)
    return f"""# {title}

Trained with `{command}` (specdec {specdec.__version__}).
{about}

    specdec serve {serve}

## Data

The target's own answers, {sum(counts.values()):,} tokens with their prompts, read {result.passes:.3g} times:

| prompts | tokens |
|---|---|
{chr(10).join(rows)}

Held out were the prompts of `specdec bench` (HumanEval, conversations, edits) and {len(split.held_out)} prompts of the
target's own, with every text that shares ten tokens in a row with one of them: {split.n_dropped} texts after the
collection's own check.

## Cost

{hours:.2f} hours of training on {result.device}, {per_million:.2f} hours a million tokens, without the collection.

## Acceptance

{_acceptance(result)}

The drafter is a derivative of the target's outputs: the target's licence applies.
"""


def _acceptance(result: TrainingResult) -> str:
    if not result.acceptance:
        return "Not measured: no text was held out."
    positions = [str(at) for at in range(1, len(result.acceptance) + 1)]
    before, trained = (" | ".join(f"{share:.3f}" for share in part) for part in (result.first, result.acceptance))
    return f"""\
Share of proposed tokens that are the target's likeliest, those before them having been right, by position in a drafted
chain, on {len(result.split.held_out)} held-out greedy answers:

| position | {" | ".join(positions)} |
|---|{"---|" * len(positions)}
| before | {before} |
| trained | {trained} |"""
