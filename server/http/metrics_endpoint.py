"""GET /metrics, for Prometheus."""

from __future__ import annotations

from server.http.call import Call
from server.http.endpoint import Endpoint
from server.http.fields.schema import RESPONSES
from server.http.http_errors import PathNotFoundError
from server.http.probes import ProbeErrors

PATH = "/metrics"


async def metrics(call: Call) -> None:
    """The server's metrics, as text or OpenMetrics, whichever is asked for.

    Raises:
        PathNotFoundError: none are kept.
    """
    exporter = call.face.frontend.exporter
    if exporter is None:
        raise PathNotFoundError(PATH)
    data, media_type = exporter.render(call.header("accept"))
    await call.reply_data(200, data, media_type)


METRICS = (Endpoint("GET", PATH, metrics, ProbeErrors(), {"summary": "Prometheus metrics", "responses": RESPONSES}),)
