"""Who is asked what and when: an order in which no engine gains by the machine's drift."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from bench.peers.arm import Arm
from bench.peers.peer_prompt import PeerPrompt


def one_by_one(prompts: Seq[PeerPrompt]) -> list[list[PeerPrompt]]:
    """Every prompt is a round of its own: the finest interleaving, for engines that stay where they are."""
    return [[prompt] for prompt in prompts]


def in_parts(prompts: Seq[PeerPrompt], number: int) -> list[list[PeerPrompt]]:
    """At most ``number`` rounds with about the same share of every workload, for engines that are started for each.
    What belongs together stays together: a session, and what warms up with what follows it."""
    parts: list[list[PeerPrompt]] = [[] for _ in range(number)]
    for workload in dict.fromkeys(prompt.workload for prompt in prompts):
        groups = _groups([prompt for prompt in prompts if prompt.workload == workload])
        for place, group in enumerate(groups):
            parts[place * number // len(groups)] += group
    return [part for part in parts if part]


def _groups(prompts: Seq[PeerPrompt]) -> list[list[PeerPrompt]]:
    groups: list[list[PeerPrompt]] = []
    for prompt in prompts:
        before = groups[-1][-1] if groups else None
        if before is not None and (not before.counted or (prompt.session and prompt.session == before.session)):
            groups[-1].append(prompt)
        else:
            groups.append([prompt])
    return groups


def turns(arms: Seq[Arm], rounds: Seq[list[PeerPrompt]]) -> Iterator[tuple[Arm, list[PeerPrompt]]]:
    """A B C, C B A, A B C and so on: over two rounds a steady drift costs every arm the same."""
    for number, prompts in enumerate(rounds):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            yield arm, prompts
