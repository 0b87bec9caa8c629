"""The whole of a verification: requests, companies, comparison, report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec.engine.engine import EngineParts
from specdec.types import Request
from specdec.verify.company import PLAIN, Company, standard_companies
from specdec.verify.compare import first_mismatches
from specdec.verify.prompts import make_requests
from specdec.verify.report import CompanyResult, VerifyReport
from specdec.verify.runner import CompanyRunner, Outcomes

MIN_REQUESTS = 14  # fewer would leave out some kinds of sampling


def verify(
    parts: EngineParts, *, pairs: int, max_tokens: int, seed: int, say: Callable[[str], Any] = lambda _: None
) -> VerifyReport:
    """Decode requests plainly and then in every standard company, until ``pairs`` pairs were compared.

    Each pair is one sample of one request in one company, against the same sample decoded plainly and alone.
    """
    companies = standard_companies(tuple(d.name for d in parts.drafters), parts.config.max_batch)
    count = max(MIN_REQUESTS, -(-pairs // len(companies)))
    requests = list(make_requests(parts.tokenizer, count, seed, max_tokens))
    requests = [r for r in requests if _fits(r, parts)]
    runner = CompanyRunner(parts)
    say(f"{len(requests)} requests, plainly and alone")
    plain = runner.run(PLAIN, requests)
    report = VerifyReport(PLAIN, _result(PLAIN, plain, plain))
    for company in companies:
        say(f"in company: {company.name}")
        outcomes = runner.run(company, requests)
        report.results.append(_result(company, plain, outcomes))
        report.mismatches += first_mismatches(company.name, plain, outcomes)
    return report


def _fits(request: Request, parts: EngineParts) -> bool:
    return len(request.prompt_ids) + (request.stopping.max_tokens or 0) <= parts.info.max_context


def _result(company: Company, plain: Outcomes, outcomes: Outcomes) -> CompanyResult:
    return CompanyResult(
        company=company,
        pairs=len(plain),
        tokens=sum(len(o.tokens) for o in outcomes.values()),
        accepted=sum(o.accepted for o in outcomes.values()),
        preemptions=sum(o.preemptions for o in outcomes.values()),
        mismatches=len(first_mismatches(company.name, plain, outcomes)),
    )
