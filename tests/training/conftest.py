"""What the tests of both kinds of training share."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.engine.build import build_parts
from specdec.training.session import TrainingPlan, engine_config
from specdec.training.texts import TextStore
from tests.training.permuting_target import CACHE, permuting_target, permuting_texts


@pytest.fixture(scope="package")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of texts of the permuting target."""
    folder = tmp_path_factory.mktemp("data")
    plan = TrainingPlan(str(permuting_target()), folder, folder, threads=1, cache_dir=CACHE)
    store = TextStore(folder, build_parts(engine_config(plan)).info.numeric_fingerprint[:8])
    for text in permuting_texts(120, length=64, prompt=40):
        store.append(text)
    store.close()
    return folder
