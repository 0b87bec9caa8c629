"""Drafts a request's remembered output with a chosen acceptance rate, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq

from draft.protocol import Drafter, DraftTask
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.errors import ConfigError

MAX_OUTPUTS = 1024  # remembered outputs, the most recently used ones
TRIES = 8  # draws of a wrong token
PREFIX = "oracle:"
_MIN_RATE = 1e-6  # lower bound of a proposal's probability, so that its log is finite


class OracleDrafter(Drafter):
    """Proposes a request's remembered output as a chain in which each token is right with probability ``rate``.

    Errors depend on (request, position) alone, so runs are reproducible. A wrong token is one of the prompt; the chain
    ends one node after it. A request that is new, or whose output differs from the remembered one, gets the empty tree.

    rate: within 0..1.
    """

    def __init__(self, rate: float) -> None:
        self.name = f"{PREFIX}{rate:g}"
        self._rate = rate
        self._outputs: OrderedDict[bytes, list[int]] = OrderedDict()
        self._keys: dict[Sequence, bytes] = {}  # of the running sequences' requests

    @classmethod
    def parse(cls, name: str) -> OracleDrafter | None:
        """The drafter of a name such as ``oracle:0.8``; None for any other name.

        Raises:
            ConfigError: the rate is no number within 0..1.
        """
        if not name.startswith(PREFIX):
            return None
        try:
            rate = float(name.removeprefix(PREFIX))
        except ValueError:
            rate = -1.0
        if not 0.0 <= rate <= 1.0:
            raise ConfigError(f"engine.speculation.drafters: {name}: an oracle's rate is a number within 0 and 1")
        return cls(rate)

    def begin(self, sequence: Sequence) -> None:
        key = self._keys[sequence] = _key(sequence)
        if key in self._outputs:
            self._outputs.move_to_end(key)

    def fill(self, task: DraftTask, tree: TokenTree) -> None:
        sequence, done = task.sequence, task.sequence.n_output
        output = self._outputs.get(self._keys[sequence])
        if output is None or task.max_nodes == 0 or sequence.tokens[sequence.n_prompt :] != output[:done]:
            return
        node, behind_error = 0, False
        for position in range(done, len(output)):
            token = output[position] if behind_error else self._guess(sequence, output, position)
            if token < 0:
                break
            node = task.add(tree, node, token, max(self._rate, _MIN_RATE))
            if node < 0 or behind_error:
                break
            behind_error = token != output[position]

    def _guess(self, sequence: Sequence, output: Seq[int], position: int) -> int:
        """The token at ``position``, or with probability 1 - rate another one; -1 if `TRIES` draws find none."""
        draws = random.Random(self._keys[sequence] + position.to_bytes(8, "little"))
        if draws.random() < self._rate:
            return output[position]
        wrong = draws.choices(sequence.request.prompt_ids, k=TRIES)
        return next((token for token in wrong if token != output[position]), -1)

    def end(self, sequence: Sequence) -> None:
        """Remember the output unless a longer one that begins with it is remembered."""
        key = self._keys.pop(sequence, None)
        if key is None:
            return
        output = sequence.tokens[sequence.n_prompt :]
        known = self._outputs.pop(key, [])
        self._outputs[key] = known if known[: len(output)] == output else output
        while len(self._outputs) > MAX_OUTPUTS:
            self._outputs.popitem(last=False)


def _key(sequence: Sequence) -> bytes:
    """Digest of what the output depends on: prompt, parameters and, if sampling is random, seed and sample."""
    request = sequence.request
    sampling = dataclasses.replace(request.sampling, seed=None, n=1)
    noise = (sequence.seed, sequence.index) if sampling.temperature > 0 else ()
    stopping = (request.stopping.min_tokens, request.stopping.ignore_eos, request.stopping.stop_token_ids)
    rest = repr((sampling, request.grammar, stopping, noise)).encode()
    return hashlib.blake2b(array("q", request.prompt_ids).tobytes() + rest, digest_size=16).digest()
