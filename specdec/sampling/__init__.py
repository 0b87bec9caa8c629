"""Sampling: what each tree node's row of logits becomes, by noise keyed on (seed, position, token)."""

from specdec.sampling.sampled_rows import SampledRows
from specdec.sampling.sampler import Sampler
from specdec.sampling.seeds import draw_seed, sample_seed
from specdec.sampling.sequence_sampling import SequenceSampling
from specdec.sampling.token_grammar import TokenGrammar
from verify_kernels.row_sampling import RowSampling
from verify_kernels.sampling_kernels import MAX_LOGPROBS, MAX_WIDTH, NO_TOKEN, SamplingKernels
from verify_kernels.sampling_policy import MIN_TEMPERATURE

__all__ = [
    "MAX_LOGPROBS",
    "MAX_WIDTH",
    "MIN_TEMPERATURE",
    "NO_TOKEN",
    "RowSampling",
    "SampledRows",
    "Sampler",
    "SamplingKernels",
    "SequenceSampling",
    "TokenGrammar",
    "draw_seed",
    "sample_seed",
]
