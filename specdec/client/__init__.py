"""A typed asyncio client of specdec's gRPC services. Light: imports neither torch nor the server."""

from specdec.client.client import Client
from specdec.client.connection import CallError, Credentials, RetryPolicy
from specdec.client.prompt import ChatTurn, CompletionHints, ContextFile, Fim, Generated, GeneratedSample, Prompt

__all__ = [
    "CallError",
    "ChatTurn",
    "Client",
    "CompletionHints",
    "ContextFile",
    "Credentials",
    "Fim",
    "Generated",
    "GeneratedSample",
    "Prompt",
    "RetryPolicy",
]
