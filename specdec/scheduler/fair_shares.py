"""Divides a budget of draft nodes."""

from __future__ import annotations


def fair_shares(wishes: list[int], budget: int) -> list[int]:
    """What each gets when one node at a time is dealt round, first come first, until wishes or budget end."""
    if sum(wishes) <= budget:
        return wishes
    shares = [0] * len(wishes)
    hungry = [i for i, wish in enumerate(wishes) if wish > 0]
    while budget > 0 and hungry:
        if budget < len(hungry):
            for i in hungry[:budget]:
                shares[i] += 1
            break
        each = budget // len(hungry)
        for i in hungry:
            more = min(each, wishes[i] - shares[i])
            shares[i] += more
            budget -= more
        hungry = [i for i in hungry if shares[i] < wishes[i]]
    return shares
