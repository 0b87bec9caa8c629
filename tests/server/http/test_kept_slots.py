"""llama.cpp's slots on real servers: what was saved is there after a kill, and nothing is claimed that is not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx

from bench.local_server import LocalServer
from specdec.config import Config, EngineConfig, ServerConfig, SpeculationConfig
from tests.fuzz.fuzzed_server import CACHE

PROMPT = random.Random(5).choices(range(1, 300), k=300)
SLOT_1 = {"prompt": PROMPT, "n_predict": 6, "temperature": 0, "id_slot": 1}


def server(folder: Path, room: int) -> LocalServer:
    engine = EngineConfig(
        target="random:tiny", threads=1, cache_dir=CACHE, kv_tokens=1024, max_batch=4, max_context=448,
        kv_disk_bytes=room, kv_disk_folder=folder, speculation=SpeculationConfig(profile_s=0),
    )  # fmt: skip
    return LocalServer(Config(engine=engine, server=ServerConfig(grpc_port=0, http_port=0, log_calls=False)))


async def post(running: LocalServer, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.http_port}", timeout=60) as http:
        answer = await http.post(path, json=body)
        return answer.status_code, answer.json()


async def refusal(running: LocalServer, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and field."""
    status, found = await post(running, path, body)
    return status, found["error"]["field"]


async def test_a_saved_slot_is_there_after_a_kill_and_until_it_is_erased(tmp_path: Path) -> None:
    async with server(tmp_path, 64 << 20) as running:
        _, first = await post(running, "/completion", SLOT_1)
        _, saved = await post(running, "/slots/1?action=save", {"filename": "mine.bin"})
        assert (first["id_slot"], saved["n_saved"], saved["id_slot"]) == (1, 256, 1)
        assert saved["n_written"] <= sum(path.stat().st_size for path in tmp_path.glob("*/*.pages"))
        assert await refusal(running, "/slots/0?action=save", {"filename": "mine.bin"}) == (400, "id")
        (path,) = tmp_path.glob("*/*.saved")
        path.with_suffix(".new").mkdir()  # in the way of the next save
        status, refused = await post(running, "/slots/1?action=save", {"filename": "mine.bin"})
        assert status == 500
        assert "was not saved: Is a directory;" in refused["error"]["message"]
        running.engine.kill()
        running.frontend.kill()
    async with server(tmp_path, 64 << 20) as running:
        _, restored = await post(running, "/slots/3?action=restore", {"filename": "mine.bin"})
        assert (restored["n_restored"], restored["n_read"], restored["id_slot"]) == (256, saved["n_written"], 3)
        _, again = await post(running, "/completion", SLOT_1)
        assert (again["content"], again["timings"]["cache_n"]) == (first["content"], 256)
        _, erased = await post(running, "/slots/1?action=erase", {"filename": "mine.bin"})
        assert erased == {"id_slot": 1, "filename": "mine.bin", "n_erased": 256}
        for path, body, field in (
            ("/slots/1?action=restore", {"filename": "mine.bin"}, "filename"),
            ("/slots/1?action=save", {"filename": "../mine"}, "filename"),
            ("/slots/1?action=save", {}, "filename"),
            ("/slots/1?action=drop", {"filename": "a"}, "action"),
            ("/slots/x?action=save", {"filename": "a"}, "id"),
        ):
            assert await refusal(running, path, body) == (400, field)


async def test_without_a_cache_on_disk_the_slots_say_what_to_set(tmp_path: Path) -> None:
    async with server(tmp_path, 0) as running:
        await post(running, "/completion", SLOT_1)
        status, refused = await post(running, "/slots/1?action=save", {"filename": "mine.bin"})
        assert (status, refused["error"]["field"]) == (400, "action")
        assert "engine.kv_disk_bytes" in refused["error"]["message"]
