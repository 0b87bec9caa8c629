"""How one row of logits is to be sampled: one tree node of one sequence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verify_kernels.sampling_policy import SamplingPolicy
from verify_kernels.sequence_edits import SequenceEdits


class RowSampling(NamedTuple):
    """A named tuple, because one is made per tree node and step.

    position: absolute position the new token will occupy; together with the policy's seed it keys the noise.
    edits: None when nothing changes the logits. path: (token, output count, ...) of the tokens between the sequence's
    base state and this node, counts including the base; overrides the base's counts. ban: mask ``edits.banned``.
    mask: the node's own in place of ``edits.mask``, of the same form; needs ``edits``.
    """

    policy: SamplingPolicy
    position: int
    edits: SequenceEdits | None = None
    path: tuple[int, ...] = ()
    ban: bool = False
    mask: NDArray[np.uint32] | None = None
