"""The prompts of `bench.workloads` as every engine gets them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq

from bench.peers.peer_prompt import PeerPrompt
from bench.workloads.bench_prompt import BenchPrompt
from bench.workloads.make import make_workload
from bench.workloads.workload_unavailable_error import WorkloadUnavailableError
from specdec.models.tokenizer import Tokenizer

WARM_TOKENS = 16
NATURAL = ("fim",)  # what would come behind the end of a middle is no work that anybody wants done


def peer_prompts(
    tokenizer: Tokenizer, workloads: Seq[str], count: int, max_tokens: int, *, natural_ends: bool,
    note: Callable[[str], None],
) -> list[PeerPrompt]:  # fmt: skip
    """``count`` counted prompts of each of ``workloads``, as far as there are so many, and before them what warms up.

    max_tokens: longest answer. natural_ends: answers end where model and workload end them; else all but `NATURAL` are
    as long as they may be. note: is told of what is left out, and why.
    """
    found: list[PeerPrompt] = []
    for name in workloads:
        try:
            (workload,) = make_workload(name, tokenizer, count, max_tokens, note)
        except WorkloadUnavailableError as error:
            note(f"{name}: {error}")
            continue
        prompts = [prompt for group in workload.groups for prompt in group]
        fixed = name not in NATURAL and not natural_ends
        found += [_peer_prompt(tokenizer, name, prompt, fixed) for prompt in _first(prompts, count)]
    return found


def _first(prompts: Seq[BenchPrompt], count: int) -> list[BenchPrompt]:
    """Up to the last that counts: what only warms up for later ones is left away."""
    places = [place for place, prompt in enumerate(prompts) if prompt.counted][:count]
    return list(prompts[: places[-1] + 1]) if places else []


def _peer_prompt(tokenizer: Tokenizer, workload: str, prompt: BenchPrompt, fixed: bool) -> PeerPrompt:
    assert prompt.stopping.max_tokens is not None  # `make_workload` was given one
    made = PeerPrompt(
        workload, prompt.name, prompt.prompt_ids, prompt.stopping.max_tokens, prompt.stopping.stop,
        prompt.stopping.stop_token_ids, tokenizer.decode(prompt.prediction_ids), prompt.session, fixed, prompt.counted,
    )  # fmt: skip
    if made.counted or made.session:
        return made
    return dataclasses.replace(made, max_tokens=min(WARM_TOKENS, made.max_tokens))
