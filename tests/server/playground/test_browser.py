"""The page in headless Chromium, on a real engine with a tiny model."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from server.engine_process import DEFAULT_FACTORY
from specdec.config import EngineConfig, SpeculationConfig
from specdec.models.resolve import load_tokenizer
from tests.editors.node_program import packages
from tests.models.tiny import make_tiny_model
from tests.server.auth.key_files import make_key
from tests.server.http.harness import Server, running
from tests.server.playground.test_bundle import WEB

HERE = Path(__file__).parent
CACHE = EngineConfig().cache_dir.expanduser()
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.node,
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js with npm"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
Browse = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose draft model is its target, so that drafts are good."""
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("tiny") / "target")
    engine = EngineConfig(
        target=str(folder), draft=str(folder), dtype="fp32", draft_dtype="fp32", draft_vocab=0, threads=1,
        cache_dir=CACHE, kv_tokens=64 * 40, max_batch=4, max_step_rows=96, prefill_chunk=64, max_context=512,
        speculation=SpeculationConfig(profile_s=0),
    )  # fmt: skip
    with running(lambda: load_tokenizer(str(folder), CACHE), factory=DEFAULT_FACTORY, engine=engine) as found:
        yield found


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Browse:
    """Return what a visitor of a server sees, by scenario."""
    found, shots = packages(WEB), tmp_path_factory.mktemp("shots")

    def run(server: Server, scenario: str, *more: str) -> dict[str, Any]:
        done = subprocess.run(
            ["node", str(HERE / "browse.mjs"), str(found), str(CHROMIUM), server.url, scenario, str(shots), *more],
            capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        seen: dict[str, Any] = json.loads(done.stdout)
        return seen

    return run


@pytest.fixture(scope="module")
def seen(server: Server, browse: Browse) -> dict[str, Any]:
    """Return what keyboard navigation reaches, for an answer that was not viewed before."""
    return browse(server, "keyboard")


def test_the_first_view_shows_a_tree_with_branches(server: Server, browse: Browse) -> None:
    seen = browse(server, "first")
    assert seen["faults"] == seen["docs"] == []
    for view in seen["views"]:
        assert sum(title.endswith(", rejected") for title in view["nodes"]) >= 2
        assert any(title.endswith(", accepted") for title in view["nodes"])
        assert view["nodes"][0].endswith("context, root")
        assert "qwen2.5-coder-1.5b" in view["said"]
        assert view["width"] <= 1440
        assert view["violations"] == []
    assert seen["links"] == ["API", "Metrics"]
    assert seen["operations"] > 40


def test_a_tree_is_reachable_by_keyboard_alone(seen: dict[str, Any]) -> None:
    assert seen["faults"] == []
    assert "40 tokens" in seen["summary"]
    assert len(seen["tokens"]) == 40
    steps = int(seen["first"]["title"].rpartition(" ")[2])
    assert seen["first"]["title"] == seen["home"]["title"] == f"Step 1 of {steps}"
    assert seen["third"]["title"] == f"Step 3 of {steps}"
    assert seen["last"]["title"] == f"Step {steps} of {steps}"
    assert seen["third"]["token"].endswith("step 3")
    assert seen["next"]["token"] != seen["third"]["token"]
    assert seen["best"]["title"].removeprefix("The most branched step: ").startswith("Step ")
    assert any(title.endswith(", accepted") for title in seen["best"]["nodes"])
    for tree in (seen["best"], seen["first"], seen["third"], seen["next"], seen["last"]):
        assert tree["label"].startswith("Tree: ")
        assert tree["chosen"] == 1
        assert tree["nodes"][0].endswith("context, root")
    assert any(title.endswith(", accepted") for title in seen["third"]["nodes"])
    own = sum(title.endswith("target, own") for title in seen["home"]["nodes"])
    assert seen["rows"] == len(seen["home"]["nodes"]) - own
    assert seen["charts"] == 4


def test_every_token_shows_its_drafter_not_by_colour_alone(seen: dict[str, Any]) -> None:
    tokens = seen["tokens"]
    looks: dict[str, set[tuple[str, str]]] = {}
    for token in tokens:
        name = token["label"].rpartition(", step ")[0].rpartition(", ")[2]
        assert name == "the target's own" or name.startswith("proposed by ")
        assert token["label"].startswith(f"“{token['text']}”, ")
        first = name.removeprefix("proposed by ").split(" and ")[0]
        looks.setdefault(first, set()).add((token["line"], token["tint"]))
    assert "model" in looks
    assert all(len(found) == 1 for found in looks.values())
    drafted = [found.pop() for name, found in looks.items() if name != "the target's own"]
    assert len({line for line, _ in drafted}) == len({tint for _, tint in drafted}) == len(drafted)


def test_off_and_auto_give_the_same_text_and_nothing_is_obscured(server: Server, browse: Browse) -> None:
    seen = browse(server, "compare")
    assert seen["faults"] == []
    assert seen["verdict"].startswith("✓ The same ")
    assert seen["modes"] == ["off", "auto"]
    assert all("first after" in each and "last after" in each and "per token" in each for each in seen["times"])
    assert len(seen["texts"]) == 2
    assert seen["texts"][0] == seen["texts"][1] != ""
    assert (seen["light"], seen["dark"]) == ([], [])
    assert seen["width"] == 390


def test_on_a_phone_settings_collapse_and_the_output_is_visible(server: Server, browse: Browse) -> None:
    seen = browse(server, "phone")
    assert seen["faults"] == seen["violations"] == []
    assert seen["keys"] == 0  # this server wants none
    assert (seen["folded"], seen["open"]) == (True, True)
    assert seen["example"].startswith("| n |")
    assert seen["results"] == ["Figures", "Controller"]
    assert 0 <= seen["top"] < 422
    assert "not trained to fill in" in seen["warned"]
    assert (seen["body"]["suffix"], seen["body"]["stream"]) == (seen["gap"], True)
    assert "def " in seen["gap"]
    assert seen["width"] == 390


def test_a_stop_an_error_and_a_lost_server_are_shown(browse: Browse) -> None:
    with running() as server:  # its engine takes 0.05 s a step for the salt that the visitor sends
        seen = browse(server, "trouble")
        assert server.comes_to(lambda: server.serving.client.in_flight == 0)
    assert "stopped" in seen["stopped"]
    assert seen["scrolled"] == 0  # where the visitor left it, while tokens arrive
    assert seen["copied"].endswith("\n\n")  # without the marks of line breaks
    assert seen["animation"] == "none"
    assert seen["clean"] == []
    assert "temperature" in seen["refused"]
    assert seen["invalid"] == "temperature"
    assert "does not answer" in seen["lost"][0]
    assert seen["corrected"] == seen["mended"] == 0
    assert "No connection" in seen["lost"][1]


def test_a_key_is_requested_and_not_stored(browse: Browse, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key = make_key(path, "visitor")
    with running(keys_file=path) as server:
        seen = browse(server, "locked", key)
    assert "key" in seen["asked"]
    assert seen["field"] == "password"
    assert "refuses this key" in seen["refused"]
    assert seen["mended"] == 0
    assert seen["cut"] == 0  # of the form's width, as a visitor finds it
    assert seen["tokens"] == len("abc") + 1
    assert seen["links"] == ["API"]  # a link cannot carry the key
    assert key not in seen["kept"]
