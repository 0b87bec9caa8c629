"""The whole of a verification: requests, companies, comparison, report."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from specdec.engine.engine import EngineParts
from specdec.errors import ConfigError
from specdec.types import Request
from specdec.verify.company import PLAIN, Company, standard_companies
from specdec.verify.compare import first_mismatches
from specdec.verify.prompts import make_requests, predicted
from specdec.verify.report import CompanyResult, VerifyReport
from specdec.verify.runner import CompanyRunner, Outcomes

MIN_REQUESTS = 14  # fewer would leave out some kinds of sampling


def verify(
    parts: EngineParts, *, pairs: int, max_tokens: int, seed: int, say: Callable[[str], Any] = lambda _: None
) -> VerifyReport:
    """Decode requests plainly and then in every standard company, until ``pairs`` pairs were compared.

    Raises:
        ConfigError: the context is too small for the prompts.

    Each pair is one sample of one request in one company, against the same sample decoded plainly and alone.
    """
    companies = standard_companies(tuple(d.name for d in parts.drafters), parts.config.max_batch)
    count = max(MIN_REQUESTS, -(-pairs // len(companies)))
    fitting = (r for r in make_requests(parts.tokenizer, 10 * count, seed, max_tokens) if _fits(r, parts))
    requests = list(itertools.islice(fitting, count))
    if len(requests) < count:
        raise ConfigError(
            f"engine.max_context: {parts.info.max_context} tokens hold too few of the prompts to verify with; "
            "raise max_context or kv_tokens, or lower --max-tokens"
        )
    runner = CompanyRunner(parts)
    say(f"{len(requests)} requests, plainly and alone")
    plain = runner.run(PLAIN, requests)
    report = VerifyReport(PLAIN, _result(PLAIN, plain, 0))
    rng = random.Random(seed)
    # The answers are known now: every other request comes with a prediction of its own, nearly right.
    requests = [
        predicted(request, plain[request.request_id, 0].tokens, rng) if number % 2 else request
        for number, request in enumerate(requests)
    ]
    for company in companies:
        say(f"in company: {company.name}")
        outcomes = runner.run(company, requests)
        found = first_mismatches(company.name, plain, outcomes)
        report.mismatches += found
        report.results.append(_result(company, outcomes, len(found)))
    return report


def _fits(request: Request, parts: EngineParts) -> bool:
    return len(request.prompt_ids) + (request.stopping.max_tokens or 0) <= parts.info.max_context


def _result(company: Company, outcomes: Outcomes, mismatches: int) -> CompanyResult:
    return CompanyResult(
        company=company,
        pairs=len(outcomes),
        tokens=sum(len(o.tokens) for o in outcomes.values()),
        accepted=sum(o.accepted for o in outcomes.values()),
        preemptions=sum(o.preemptions for o in outcomes.values()),
        mismatches=mismatches,
    )
