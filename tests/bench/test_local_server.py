"""A measured server: it ends with the process that started it, and has no part in production."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from bench.frontend.frontend_bench import FACTORY, TOKENIZER
from bench.local_server import ChildServerError, LocalServer, private_config
from specdec.cli.main import cli
from specdec.config import Config, EngineConfig, ExperimentsConfig, KvEventsConfig, ServerConfig
from tests.soak.watch import processes_of

ROOT = Path(__file__).parents[2]
STARTS_ONE = """
import asyncio
from bench.local_server import LocalServer
from specdec.config import Config, ServerConfig
from tests.soak.watch import processes_of

async def main():
    config = Config(server=ServerConfig(grpc_port=0, http_port=None))
    factory, tokenizer = "tests.fake_engine:echo", "tests.server.fake_tokenizer:FakeTokenizer"
    async with LocalServer(config, factory=factory, tokenizer=tokenizer) as server:
        print(*(process.pid for process in processes_of(server).values()), flush=True)
        await asyncio.sleep(100)

asyncio.run(main())
"""


def test_it_ends_when_its_starter_is_killed() -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTS_ONE], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    try:
        found = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
        assert len(found) == 2
    finally:
        starter.kill()
        starter.wait(30)
        starter.stdout.close()
    _, alive = psutil.wait_procs(found, 60)
    assert not alive


async def test_it_is_a_process_of_its_own() -> None:
    config = Config(engine=EngineConfig(target="paced:1"), server=ServerConfig(grpc_port=0, http_port=None))
    server = LocalServer(config, factory=FACTORY, tokenizer=TOKENIZER)
    async with server:
        assert server.grpc_port > 0
        processes = processes_of(server).values()
    assert not any(process.is_running() for process in processes)


async def test_one_that_can_not_start_says_why() -> None:
    config = Config(engine=EngineConfig(target="no/such-model"), server=ServerConfig(grpc_port=0, http_port=None))
    with pytest.raises(ChildServerError, match="such-model"):
        async with LocalServer(config, factory="tests.fake_engine:unavailable"):
            pass


PRODUCTION = ServerConfig(
    host="0.0.0.0", grpc_port=8400, http_port=8401, max_queued_tokens=77,
    keys_file=Path("keys.yaml"), tls_cert=Path("c.pem"), tls_key=Path("k.pem"), tls_client_ca=Path("ca.pem"),
    capture_dir=Path("captured"), experiments=ExperimentsConfig(folder=Path("ab"), start=(Path("plan.yaml"),)),
    kv_events=KvEventsConfig(endpoint="tcp://127.0.0.1:5557", salted=True),
    otlp_endpoint="http://h:4317", log_texts=True,
)  # fmt: skip


def test_a_private_server_leaves_out_what_is_for_others() -> None:
    found = private_config(Config(server=PRODUCTION)).server
    assert found == ServerConfig(grpc_port=0, http_port=None, max_queued_tokens=77)


PLAN = "{name: x, arms: {a: {}, b: {}}, assignment: {mode: aa}, load: {workload: chat}, stopping: {max_requests: 4}}"


def test_a_server_of_several_models_is_not_measured(tmp_path: Path) -> None:
    config, plan = tmp_path / "server.yaml", tmp_path / "plan.yaml"
    config.write_text("engines: {small: {target: 'random:tiny'}, large: {target: 'random:tiny'}}")
    plan.write_text(PLAN)
    words = ["ab", "run", str(plan), "--quiet", "--out", str(tmp_path / "out"), "--config", str(config)]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 1, done.output
    assert "engines: a benchmark measures one model, not small, large" in done.output
