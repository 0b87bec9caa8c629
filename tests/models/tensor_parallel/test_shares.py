"""How a model is sharded: no part twice and none missing, errors that name an alternative, placement of ranks and their
commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from specdec.errors import ConfigError
from specdec.models.load import PackedModel
from specdec.models.random_model import RANDOM_SHAPES
from specdec.models.tensor_parallel.shard_decoder import Command, StepSizes, read_command, write_command
from specdec.models.tensor_parallel.shares import rank_processors, share_layout, share_out
from specdec.models.weights import layout_bytes
from verify_kernels.forward_batch import BatchEntry, ForwardBatch

SMOLLM2 = dataclasses.replace(
    RANDOM_SHAPES["tiny"], vocab_size=49152, hidden_size=576, n_heads=9, n_kv_heads=3, intermediate_size=1536
)


def test_three_kv_heads_over_two_and_four_ranks() -> None:
    assert [share.kv_heads for share in share_out(SMOLLM2, 2)] == [(0, 1), (1, 3)]
    shares = share_out(SMOLLM2, 4)
    assert [share.n_kv_heads for share in shares] == [0, 1, 1, 1]
    assert [share.n_heads for share in shares] == [0, 3, 3, 3]
    assert [share.hidden for share in shares] == [(0, 128), (128, 288), (288, 416), (416, 576)]
    assert shares[0].rows("qkv") == []
    assert shares[2].rows("qkv") == [(192, 384), (640, 704), (832, 896)]


def test_more_ranks_than_tiles_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"engine.tp: 19 processes, but .* hidden_size 576 is only 18 tiles .* 18 at"):
        share_out(SMOLLM2, 19)


def test_heads_not_aligned_with_tiles_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"engine.tp: 3 KV heads of 20 channels .* set it to 1"):
        share_out(dataclasses.replace(SMOLLM2, head_dim=20), 2)


def test_every_tile_is_on_one_rank_and_the_embedding_on_the_first() -> None:
    with PackedModel("random:tiny", dtype="int8", cache_dir=Path("~/.cache/specdec")) as model:
        layout = model.file.layout
        shares = [share_layout(layout, share) for share in share_out(model.file.config, 2)]
        embed = next(spec for spec in layout if spec.name == "embed")
        tiles = {spec.name: spec for spec in layout if spec.name.endswith(".data")}
        covered = np.zeros(layout_bytes(layout), np.int32)
        for _, copies in shares:
            for copied in copies:
                covered[copied.source : copied.source + copied.nbytes] += 1
        for spec in (*tiles.values(), embed):
            assert (covered[spec.offset : spec.offset + spec.nbytes] == 1).all(), spec.name
        assert [any(spec.name == "embed" for spec in arrays) for arrays, _ in shares] == [True, False]
        # and each is read at its offset
        whole = model.file.read(lambda done: None).bytes_view()
        for arrays, copies in shares:
            own = model.file.read_parts(arrays, copies, lambda done: None).bytes_view()
            assert all(own[c.target : c.target + c.nbytes] == whole[c.source : c.source + c.nbytes] for c in copies)


def _machine(folder: Path, nodes: Sequence[str]) -> Path:
    for number, cpus in enumerate(nodes):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(cpus + "\n")
    return folder


def test_ranks_stay_on_their_node(tmp_path: Path) -> None:
    nodes = _machine(tmp_path, ["0-3,8-11", "4-7,12-15"])
    every = set(range(16))
    assert rank_processors(2, every, nodes) == [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]
    assert rank_processors(4, every, nodes) == [{0, 1, 2, 3}, {8, 9, 10, 11}, {4, 5, 6, 7}, {12, 13, 14, 15}]
    assert rank_processors(3, every, nodes) == [{0, 1, 2, 3}, {8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]
    assert rank_processors(1, every, nodes) == [every]
    assert rank_processors(2, {0, 1, 2}, nodes) is None  # of one node alone
    assert rank_processors(9, {0, 1, 4, 5}, nodes) is None  # more than processors


def test_without_topology_nothing_is_pinned(tmp_path: Path) -> None:
    assert rank_processors(2, {0, 1}, tmp_path) is None
    assert rank_processors(2, {0, 1}, _machine(tmp_path, ["0-1", "many"])) is None


def test_commands_round_trip() -> None:
    sizes = StepSizes(max_rows=64, max_logit_rows=64, max_positions=256, pages=8)
    words = np.full(sizes.command_words, -1, np.int32)
    entries = [BatchEntry([1, 2, 3], [-1, 0, 0], 60, [4, 7, 1, 2]), BatchEntry([9], [-1], 0, [3])]
    batch = ForwardBatch.build(entries)
    write_command(Command([70, 71], [65, 66], batch, [0, 3]), words)
    found = read_command(words)
    words[:] = -1  # as the next one does
    assert (found.source, found.target, list(found.logit_rows)) == ([70, 71], [65, 66], [0, 3])
    assert found.batch is not None
    for field in dataclasses.fields(ForwardBatch):
        assert np.array_equal(getattr(found.batch, field.name), getattr(batch, field.name)), field.name
    write_command(Command([5], [6]), words)
    assert read_command(words) == Command([5], [6], None, [])


def test_the_largest_command_fits() -> None:
    sizes = StepSizes(max_rows=64, max_logit_rows=64, max_positions=256, pages=8)
    words = np.zeros(sizes.command_words, np.int32)
    batch = ForwardBatch.build([BatchEntry([1], [-1], 200, [1, 2, 3, 4])] * 64)
    write_command(Command([1] * 64, [2] * 64, batch, range(64)), words)
    assert read_command(words).batch is not None
