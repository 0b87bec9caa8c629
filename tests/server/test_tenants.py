"""A real engine between two tenants: none reads the other's prefix cache or draft texts; and a draft model changed
under running calls. By hits, not by times."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

from server.engine_process import DEFAULT_FACTORY
from specdec.api.v1 import admin_pb2 as admin
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import options_pb2 as options
from specdec.config import Config, ServerConfig
from specdec.models.load import load_model
from tests.engine.test_swap_draft import drafts
from tests.engine.tiny_engine import tiny_parts
from tests.server.auth.key_files import make_key
from tests.server.secure_harness import secure_server

PROMPT = list(range(10, 150))


@functools.cache
def tokenizer() -> Any:
    config = tiny_parts().config
    return load_model(config.target, dtype="int8", cache_dir=config.cache_dir).tokenizer


def real_config(path: Path) -> Config:
    return Config(engine=tiny_parts().config, server=ServerConfig(grpc_port=0, http_port=None, keys_file=path))


def request(*drafters: str, salt: str = "s", tokens: int = 40, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=options.TokenIds(ids=PROMPT),
        sampling=options.SamplingOptions(temperature=sampling.pop("temperature", 0.0), **sampling),
        stopping=options.StoppingOptions(max_tokens=tokens, ignore_eos=True),
        speculation=options.SpeculationOptions(mode=options.SpeculationOptions.MODE_ON, drafters=drafters),
        cache=options.CacheOptions(salt=salt),
        session=options.SessionOptions(id="editor"),
    )


async def answer(stubs: Any, message: pb.GenerateRequest) -> tuple[list[int], int, tuple[int, int]]:
    """Tokens, prompt tokens from the cache, draft tokens verified and accepted."""
    (sample,) = (await stubs.generation.Generate(message)).samples
    stats = sample.metrics.speculative_decoding
    return (
        list(sample.token_ids), sample.usage.cached_tokens, (stats.num_draft_tokens, stats.num_accepted_draft_tokens)
    )  # fmt: skip


async def test_no_tenant_hits_the_cache_of_another_also_after_a_swap(tmp_path: Path) -> None:
    """One test, since a real engine takes seconds to start."""
    path = tmp_path / "keys.yaml"
    one, again, other = (make_key(path, name, tenant) for name, tenant in (("a", "x"), ("b", "x"), ("c", "y")))
    boss = make_key(path, "boss", "ops", admin=True)
    async with secure_server(real_config(path), factory=DEFAULT_FACTORY, tokenizer=tokenizer) as server:
        async with server.stubs(one) as mine, server.stubs(again) as colleague, server.stubs(other) as stranger:
            await check_isolation(mine, colleague, stranger)
        async with server.stubs(boss) as stubs:
            await a_draft_is_swapped_under_running_calls(stubs)
        assert server.client.engine.restarts == 0


async def check_isolation(mine: Any, colleague: Any, stranger: Any) -> None:
    tokens, cached, first = await answer(mine, request("suffix"))
    assert cached == 0
    same, cached, second = await answer(colleague, request("suffix"))  # pages, session and texts are the tenant's
    assert (same, cached) == (tokens, 139)
    assert second[1] > first[1] + 10
    _, cached, salted = await answer(colleague, request("suffix", salt="t"))
    assert (cached, salted) == (0, first)
    for salt in ("s", "x/s", "", "/s", "../x/s"):
        same, cached, seen = await answer(stranger, request("suffix", salt=salt))
        assert (same, cached) == (tokens, 0)
        assert seen == first  # as on an empty cache
    assert (await answer(stranger, request("suffix")))[1] == 139  # its own


async def a_draft_is_swapped_under_running_calls(stubs: Any) -> None:
    asks = [request(tokens=200, temperature=1.0, seed=i) for i in range(3)]
    undisturbed = [(await answer(stubs, message))[0] for message in asks]
    for draft in (drafts()["same"], drafts()["other"], ""):
        await stubs.admin.FlushCache(admin.FlushCacheRequest())
        running = [asyncio.ensure_future(answer(stubs, message)) for message in asks]
        await asyncio.sleep(0.05)
        swapped = await stubs.admin.SwapDraft(admin.SwapDraftRequest(draft=draft))
        assert swapped.draft == (Path(draft).name if draft else "")
        assert [(await call)[0] for call in running] == undisturbed
