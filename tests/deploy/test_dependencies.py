"""What `pip install specdec-engine` brings is enough: packages of the development environment alone are hidden here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement

from tests.models.tiny import make_tiny_model
from tests.models.tiny_gguf import write_tiny_gguf
from tools.markdown import REPOSITORY

HIDDEN = """
import sys
from importlib.machinery import PathFinder
hidden = set(sys.argv[1].split())
class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in hidden else super().find_spec(name, path, target)
sys.meta_path[:] = [Installed if finder is PathFinder else finder for finder in sys.meta_path]
"""
READ = """
from pathlib import Path
import torch
from specdec.models.transformers_model import read_with_transformers
read_with_transformers(Path(sys.argv[2]), torch.float32)
"""


def with_what_they_need(requirements: Iterable[str]) -> set[str]:
    """Names of the packages that these requirements bring, of those that are installed here."""
    found, waiting = set(), [(text, "") for text in requirements]
    while waiting:
        text, extra = waiting.pop()
        need = Requirement(text)
        name = re.sub(r"[-_.]+", "-", need.name).lower()
        if need.marker is not None and not need.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *need.extras):
            if (name, wanted) not in found:
                found.add((name, wanted))
                try:
                    waiting += [(text, wanted) for text in requires(name) or []]
                except PackageNotFoundError:
                    break
    return {name for name, _ in found}


def test_a_draft_model_in_a_gguf_file_is_read_for_training(tmp_path: Path) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    brought = with_what_they_need(project["dependencies"])
    hidden = [
        module
        for module, owners in packages_distributions().items()
        if not any(re.sub(r"[-_.]+", "-", owner).lower() in brought | {project["name"]} for owner in owners)
    ]
    assert {"pytest", "openai"} <= set(hidden)
    write_tiny_gguf(make_tiny_model("llama", tmp_path / "m"), tmp_path / "m.gguf")
    command = [sys.executable, "-c", HIDDEN + READ, " ".join(hidden), str(tmp_path / "m.gguf")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
