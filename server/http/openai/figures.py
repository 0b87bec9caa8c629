"""Usage and metrics of an answer."""

from __future__ import annotations

from typing import Any

from server.http.totals import Totals
from specdec.types.as_json import metrics_dict


def usage_so_far(totals: Totals) -> dict[str, Any]:
    """OpenAI's ``usage`` without its details."""
    return {
        "prompt_tokens": totals.prompt_tokens,
        "completion_tokens": totals.output_tokens,
        "total_tokens": totals.prompt_tokens + totals.output_tokens,
    }


def usage(totals: Totals) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    return usage_so_far(totals) | {
        "prompt_tokens_details": {"cached_tokens": totals.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": totals.accepted_prediction_tokens,
            "rejected_prediction_tokens": totals.rejected_prediction_tokens,
        },
    }


def extras(totals: Totals) -> dict[str, Any]:
    """What we tell beside it: the seed in force (of the first prompt), and what speculation did, as vLLM tells it."""
    return {"seed": totals.seed, "metrics": metrics_dict(totals.stats)}
