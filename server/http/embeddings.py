"""OpenAI's /v1/embeddings, refused in words: what is served here are models that write."""

from __future__ import annotations

from server.http.call import Call, Endpoint
from server.http.fields import TEXT, TEXTS, json_operation
from server.http.openai_format import OpenAIErrors
from specdec.errors import RequestError


class NoEmbeddingsError(RequestError):
    """The server can not tell vectors. SDKs do not try again after this status."""

    reason = "EMBEDDINGS_NOT_SUPPORTED"
    http_status = 422

    def __init__(self) -> None:
        super().__init__(
            "this server runs a model that generates text, and makes no embeddings; point the client's embedding model "
            "at a server of an embedding model"
        )


async def embed(call: Call) -> None:
    """Refuse ``call``.

    Raises:
        NoEmbeddingsError: always.
    """
    raise NoEmbeddingsError


_FIELDS = {"model": TEXT, "input": TEXTS}
EMBEDDINGS = (
    Endpoint("POST", "/v1/embeddings", embed, OpenAIErrors(),
             json_operation("Refused: the model makes no embeddings", _FIELDS)),
)  # fmt: skip
