"""A bit of everything, one after the other: what one person's day may look like to the engine."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, zip_longest

from bench.workloads.bench_prompt import BenchPrompt
from bench.workloads.chat import chat_prompts
from bench.workloads.edit import edit_prompts
from bench.workloads.fim import fim_prompts
from bench.workloads.humaneval import humaneval_prompts
from bench.workloads.workload import uncounted
from bench.workloads.workload_unavailable_error import WorkloadUnavailableError
from specdec.models.tokenizer import Tokenizer

_KINDS: tuple[Callable[[Tokenizer, int, int | None], list[BenchPrompt]], ...] = (
    humaneval_prompts,
    edit_prompts,
    fim_prompts,
    chat_prompts,
)


def mixed_prompts(
    tokenizer: Tokenizer, count: int, max_tokens: int | None, note: Callable[[str], None]
) -> list[BenchPrompt]:
    """About ``count`` prompts, of every kind in turn, after one more that warms up; tells ``note`` what is left out.

    Raises:
        WorkloadUnavailableError: no kind is to be had.
    """
    each = -(-count // len(_KINDS))
    kinds: list[list[BenchPrompt]] = []
    for make in _KINDS:
        try:
            # A file's first hole only warms its session; of the others one more is needed for the engine itself.
            kinds.append(make(tokenizer, each + (not kinds), max_tokens))
        except WorkloadUnavailableError as error:
            note(f"mixed: {error}")
    if not kinds:
        raise WorkloadUnavailableError("none of its kinds of prompt can be had")
    warm = uncounted(kinds[0][:1])
    kinds[0] = kinds[0][1:]
    return warm + [prompt for prompt in chain(*zip_longest(*map(_trimmed(each), kinds))) if prompt is not None]


def _trimmed(count: int) -> Callable[[list[BenchPrompt]], list[BenchPrompt]]:
    """Cuts a list after its ``count``-th counted prompt: holes come by whole files."""

    def cut(prompts: list[BenchPrompt]) -> list[BenchPrompt]:
        counted = [i for i, prompt in enumerate(prompts) if prompt.counted]
        return prompts[: counted[count - 1] + 1] if len(counted) >= count else prompts

    return cut
