"""SGLang's /v1/loads, from which its gateway reads the load of a server."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import specdec
from server.http.call import Call, Endpoint
from server.http.fields import MODEL_QUERY
from server.http.openai_format import OPENAI_ERRORS
from server.served_model import ServedModel

PATH = "/v1/loads"


async def loads(call: Call) -> None:
    """The load of a model's engine, as the only rank of SGLang's data parallelism."""
    now = datetime.now(UTC)
    rank = {"timestamp": now.timestamp(), "dp_rank": 0, **_core(call.model)}
    rank["queues"] = {"waiting": rank["num_waiting_reqs"], "grammar": 0, "paused": 0, "retracted": 0}
    answer = {
        "timestamp": now.isoformat(),
        "version": specdec.__version__,
        "numeric_fingerprint": call.model.info.numeric_fingerprint,
        "dp_rank_count": 1,
        "loads": [rank],
    }
    await call.reply(200, answer)


def _core(model: ServedModel) -> dict[str, Any]:
    """Requests as the front end knows them at this moment; pages and rates as the engine last said, up to a second ago.
    How much of a waiting prompt is cached is known when it is begun, so all of it counts. ``forecast_wait_s`` is
    specdec's own: until a request that came now would begin."""
    info, load, admission = model.info, model.client.engine.load, model.admission
    waiting, waiting_tokens = admission.waiting, admission.waiting_tokens
    running = admission.in_flight - waiting
    used = round(load.kv_usage * info.kv_tokens)
    return {
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_waiting_uncached_tokens": waiting_tokens,
        "forecast_wait_s": admission.forecast_s(),
        "num_used_tokens": used,
        "num_total_tokens": used + waiting_tokens,
        "max_total_num_tokens": info.kv_tokens,
        "max_running_requests": info.max_batch,
        "token_usage": load.kv_usage,
        "gen_throughput": load.tokens_per_second,
        "cache_hit_rate": load.hit_rate,
        "utilization": running / info.max_batch,
    }


SGLANG = (Endpoint("GET", PATH, loads, OPENAI_ERRORS, "SGLang: how busy the server is", parameters=(MODEL_QUERY,)),)
