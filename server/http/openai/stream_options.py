"""Whether and how an answer is streamed."""

from __future__ import annotations

from dataclasses import dataclass

from server.http.body import Body


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """``include_usage``: a last chunk without choices has the usage; ``continuous``: every chunk has that so far."""

    stream: bool
    include_usage: bool = False
    continuous: bool = False


def read_stream_options(body: Body) -> StreamOptions:
    """``stream`` and ``stream_options``, which says nothing where nothing is streamed."""
    stream, given = body.flag("stream"), body.object("stream_options")
    if given is None:
        return StreamOptions(stream)
    include, continuous = given.flag("include_usage"), given.flag("continuous_usage_stats")
    return StreamOptions(stream, stream and include, stream and include and continuous)
