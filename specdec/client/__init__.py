"""A typed asyncio client of specdec's gRPC services. Light: imports neither torch nor the server."""

from specdec.client.call_error import CallError
from specdec.client.chat_turn import ChatTurn
from specdec.client.client import Client
from specdec.client.completion_hints import CompletionHints
from specdec.client.context_file import ContextFile
from specdec.client.credentials import Credentials
from specdec.client.fim import Fim
from specdec.client.generated import Generated
from specdec.client.generated_sample import GeneratedSample
from specdec.client.prompt import Prompt
from specdec.client.retry_policy import RetryPolicy

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
