"""The circumstances a request is decoded in: everything that must not show in its tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Company:
    """One way to run the same requests.

    drafters: who proposes, () for plain decode. max_nodes, max_depth, width: the shape of the trees. controlled: the
    controller decides within these bounds (mode AUTO), else every step drafts up to them (mode ON). free: it believes
    that drafting costs next to nothing, so that it drafts where it would not.
    concurrency: requests in flight together. prefill_chunk: prompt rows per step. kv_pages: size of the cache, None
    leaves it ample. preempt_every: steps between forced preemptions, 0 for none. warm: every prompt was decoded once
    before, so prefixes hit; prefix_cache False computes every prompt afresh.
    """

    name: str
    drafters: tuple[str, ...] = ()
    max_nodes: int = 0
    max_depth: int = 0
    width: int = 1
    concurrency: int = 1
    prefill_chunk: int = 192
    kv_pages: int | None = None
    preempt_every: int = 0
    prefix_cache: bool = True
    warm: bool = False
    controlled: bool = False
    free: bool = False


PLAIN = Company("plain decode, one at a time", prefix_cache=False)


def standard_companies(drafters: tuple[str, ...], max_batch: int) -> list[Company]:
    """The companies `specdec verify` tries, from the ``drafters`` that are loaded."""
    many = min(8, max_batch)
    companies = [
        Company("plain, many at once", concurrency=many),
        Company("plain, chunks of 7", concurrency=many, prefill_chunk=7),
        Company("plain, prefix hits", concurrency=2, warm=True),
        Company("plain, preempted", concurrency=many, preempt_every=5, prefill_chunk=33),
    ]
    if drafters:
        companies += [
            Company("controlled", drafters, 31, 31, 3, controlled=True, warm=True),
            Company("controlled, many at once", drafters, 31, 31, 3, controlled=True, concurrency=many),
            Company("controlled, drafts free", drafters, 20, 12, 4, controlled=True, free=True, concurrency=3),
            Company(
                "controlled, free, preempted", drafters, 15, 15, 2, controlled=True, free=True, concurrency=many,
                preempt_every=6, prefill_chunk=40,
            ),
        ]  # fmt: skip
    sets = [(name,) for name in drafters] + ([drafters] if len(drafters) > 1 else [])
    for chosen in sets:
        name = "+".join(chosen)
        companies += [
            Company(f"{name}, chain of 4", chosen, 4, 4, 1),
            Company(f"{name}, wide tree", chosen, 15, 4, 4, concurrency=3, prefill_chunk=50),
            Company(f"{name}, tree among many", chosen, 7, 7, 2, concurrency=many, warm=True),
            Company(f"{name}, tree, preempted", chosen, 10, 5, 3, concurrency=many, preempt_every=4, prefill_chunk=20),
        ]
    return companies
