"""The checks a sampler must pass, as functions of the implementation: the tests run them on ours and on broken ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from scipy import stats

from specdec.core.types import SamplingParams, StoppingParams
from tests.core.sampling.decoding import (
    Implementation,
    Output,
    Problem,
    Propose,
    coupled_children,
    decode_by_trees,
    decode_plainly,
    random_children,
)
from tests.core.sampling.exact_law import sequence_law
from tests.core.sampling.table_model import TableModel

SMALL = TableModel(vocab=4, seed=11)
MEDIUM = TableModel(vocab=6, seed=12)
DRAFT_OF = {4: TableModel(vocab=4, seed=11, spread=1.0), 6: TableModel(vocab=6, seed=12, spread=1.0)}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.5}

PROBLEMS = {
    "plain": Problem(SMALL, SamplingParams(), 4),
    "hot": Problem(MEDIUM, SamplingParams(temperature=1.7), 3),
    "top-k": Problem(MEDIUM, SamplingParams(temperature=1.3, top_k=4), 3),
    "top-p": Problem(MEDIUM, SamplingParams(top_p=0.8), 3),
    "top-k then top-p": Problem(MEDIUM, SamplingParams(temperature=1.5, top_k=4, top_p=0.75), 3),
    "min-p": Problem(MEDIUM, SamplingParams(temperature=1.2, min_p=0.15), 3),
    "penalties": Problem(SMALL, SamplingParams(**PENALTIES), 4),  # type: ignore[arg-type]
    "everything": Problem(
        MEDIUM,
        SamplingParams(
            temperature=1.4, top_k=4, top_p=0.9, min_p=0.05, logit_bias=((2, 0.7), (3, -0.5)),
            allowed_token_ids=(0, 1, 2, 3, 5), **PENALTIES,  # type: ignore[arg-type]
        ),
        3,
        stopping=StoppingParams(min_tokens=2, stop_token_ids=(5,)),
        eos_ids=(0,),
    ),
}  # fmt: skip


def law_p_value(problem: Problem, outputs: Sequence[Output]) -> float:
    """How likely outputs this far from the exact law are (chi-square); 0 if one of them is impossible."""
    banned = frozenset((*problem.eos_ids, *problem.stopping.stop_token_ids))
    ban = (problem.stopping.min_tokens, banned)
    law = sequence_law(problem.model, problem.params, problem.prompt, problem.length, ban)
    counts = Counter(outputs)
    if set(counts) - set(law):
        return 0.0
    observed, expected, rest_observed, rest_expected = [], [], 0.0, 0.0
    for output, probability in law.items():
        if probability * len(outputs) >= 5:
            observed.append(float(counts[output]))
            expected.append(probability * len(outputs))
        else:  # too rare for the chi-square law to hold: together they are one cell
            rest_observed += counts[output]
            rest_expected += probability * len(outputs)
    if rest_expected >= 5:
        observed.append(rest_observed)
        expected.append(rest_expected)
    else:  # the cells must sum to the same total
        observed[0] += rest_observed
        expected[0] += rest_expected
    return float(stats.chisquare(observed, expected).pvalue)


def follows_the_law(implementation: Implementation, problem: Problem, seeds: Sequence[int]) -> bool:
    """Whether plainly decoded sequences follow the exact law of whole sequences."""
    return law_p_value(problem, decode_plainly(problem, seeds, implementation)) > 1e-4


def proposers(problem: Problem) -> dict[str, Propose]:
    """Drafters of very different worth."""
    draft = DRAFT_OF[problem.model.vocab]
    return {"random": random_children(1), "coupled": coupled_children(draft, 2), "chain": coupled_children(draft, 1)}


def trees_change_nothing(
    implementation: Implementation, problem: Problem, seeds: Sequence[int], depth: int = 2
) -> bool:
    """Whether decoding through any drafter's trees gives, seed by seed, the plainly decoded sequence."""
    plain = decode_plainly(problem, seeds, implementation)
    return all(
        decode_by_trees(problem, seeds, implementation, propose, depth) == plain
        for propose in proposers(problem).values()
    )
