"""Start-up self-test: do the kernels on this very GPU give a row the same bits in any company?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.models.device.device_decoder import DeviceDecoder
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.self_test import NumericMode

PROMPT = 1300  # tokens: beyond a coarse plan's block of 1,024, and then some
FIRST = 1030  # of them at once at first, so that the rest reads a whole block as pages
PIECE = 24  # tokens: another tile of every matrix product than a prompt's, and segments of pages that end anywhere
PARENTS = (-1, 0, 1, 1, 0, 4, 5)
EVERY = 32  # of a prompt's rows the logits of one in so many are compared


def device_self_test(decoder: DeviceDecoder, prompt: int = PROMPT) -> NumericMode:
    """A prompt in the largest steps and a tree above it, planned coarsely, against the prompt in pieces and each
    node's path one row at a time, planned finely; "bitwise" when no bit differs of the logits nor of any layer's keys
    and values. ``prompt``: its tokens, cut to what the pool and the decoder hold twice.

    Writes to the pool's pages, which nobody may use yet. Takes some 80 forwards, each of which reads all weights.
    """
    half = max(decoder.pool.pages // 2, 1)
    prompt = max(1, min(prompt, min(decoder.max_positions, half * PAGE_SIZE) - len(PARENTS)))
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, decoder.config.vocab_size, (prompt + len(PARENTS),), generator=generator).tolist()
    pages = -(-len(tokens) // PAGE_SIZE)
    # The second places lie backwards: a row's bits depend on no page id either.
    here, there = list(range(pages)), list(reversed(range(decoder.pool.pages - pages, decoder.pool.pages)))
    try:
        decoder.plan_coarsely(True)
        at_once = _prompt(decoder, tokens[:prompt], min(FIRST, decoder.max_rows), decoder.max_rows, here)
        nodes = _rows(decoder, BatchEntry(tokens[prompt:], PARENTS, prompt, here), range(len(PARENTS)))
        decoder.plan_coarsely(False)
        in_pieces = _prompt(decoder, tokens[:prompt], 1, PIECE, there)
        alike = here == there or _same_cache(decoder, here, there, prompt)
        paths = _paths(decoder, tokens[prompt:], prompt, there)
    finally:
        decoder.plan_coarsely(None)
    alike = alike and all(map(torch.equal, at_once + nodes, in_pieces + paths))
    return "bitwise" if alike else "numerical"


def _prompt(decoder: DeviceDecoder, tokens: list[int], first: int, size: int, pages: list[int]) -> list[Tensor]:
    """Logits of some of a prompt's rows, the same ones however it is cut."""
    every = max(EVERY, -(-min(FIRST, decoder.max_rows) // decoder.max_logit_rows))
    done, found = 0, []
    while done < len(tokens):
        chunk = tokens[done : done + min(size if done else first, decoder.max_rows)]
        wanted = [row for row in range(len(chunk)) if (done + row) % every == 0]
        found += _rows(decoder, BatchEntry(chunk, range(-1, len(chunk) - 1), done, _held(pages, done, chunk)), wanted)
        done += len(chunk)
    return found


def _paths(decoder: DeviceDecoder, tokens: list[int], prompt: int, pages: list[int]) -> list[Tensor]:
    found = []
    for node in range(len(tokens)):
        path = [node]
        while PARENTS[path[0]] >= 0:
            path.insert(0, PARENTS[path[0]])
        for depth, at in enumerate(path):
            (row,) = _rows(decoder, BatchEntry([tokens[at]], [-1], prompt + depth, pages), [0])
        found.append(row)
    return found


def _held(pages: list[int], done: int, chunk: list[int]) -> list[int]:
    return pages[: -(-(done + len(chunk)) // PAGE_SIZE)]


def _rows(decoder: DeviceDecoder, entry: BatchEntry, wanted: Sequence[int]) -> list[Tensor]:
    """Logits of the rows wanted."""
    return list(decoder.forward(ForwardBatch.build([entry]), wanted).clone())


def _same_cache(decoder: DeviceDecoder, here: list[int], there: list[int], tokens: int) -> bool:
    """Whether the first tokens' keys and values are the same bits in both places, layer by layer: there may be no
    memory for all at once."""
    pages = -(-tokens // PAGE_SIZE)

    def stretch(layer: Tensor, places: list[int]) -> Tensor:
        return layer.view(torch.uint8)[places[:pages]].transpose(1, 2).flatten(0, 1)[:tokens]

    pools = (pool[layer] for layer in range(decoder.config.n_layers) for pool in (decoder.pool.k, decoder.pool.v))
    return all(torch.equal(stretch(layer, here), stretch(layer, there)) for layer in pools)
