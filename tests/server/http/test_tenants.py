"""A real engine between two tenants on HTTP: none reads the other's prefix cache or draft texts. By hits, not times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from server.engine_process import DEFAULT_FACTORY
from tests.engine.tiny_engine import tiny_parts
from tests.server.auth.key_files import make_key
from tests.server.http.harness import COMPLETIONS, running
from tests.server.test_tenants import PROMPT, tokenizer


def answer(client: httpx.Client, key: str, **more: Any) -> tuple[list[int], int, int]:
    """Tokens, prompt tokens from the cache, draft tokens accepted."""
    body = {
        "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        "cache_salt": "s", "session": "editor", "speculation": {"mode": "on", "drafters": ["suffix"]},
    } | more  # fmt: skip
    found = client.post(COMPLETIONS, json=body, headers={"authorization": f"Bearer {key}"}).json()
    accepted = found["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    return found["choices"][0]["token_ids"], found["usage"]["prompt_tokens_details"]["cached_tokens"], accepted


def test_no_tenant_hits_the_cache_of_another(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    one, again, other = (make_key(path, name, tenant) for name, tenant in (("a", "x"), ("b", "x"), ("c", "y")))
    with running(tokenizer, factory=DEFAULT_FACTORY, engine=tiny_parts().config, keys_file=path) as server:
        tokens, cached, first = answer(server.client, one)
        assert cached == 0
        same, cached, second = answer(server.client, again)  # pages, session and texts are the tenant's
        assert (same, cached) == (tokens, 139)
        assert second > first + 10
        for salt in ("s", "x/s", "", "../x/s"):
            assert answer(server.client, other, cache_salt=salt) == (tokens, 0, first)  # as on an empty cache
        assert answer(server.client, other)[1] == 139  # its own
