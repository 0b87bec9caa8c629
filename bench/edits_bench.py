"""Predicts real next edits through PredictEdit and through plain completions, speculation off beside auto."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import aclosing
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from bench.engine_bench import BenchError, Say
from bench.local_server import LocalServer
from bench.machine import host_facts
from bench.peers.engines import MAKERS, find_model
from bench.peers.peer import OURS, OURS_AUTO, OURS_OFF, Arm, PeerError, PeersPlan
from bench.peers.peer_process import HttpPeer
from bench.peers.peers_report import PeersRun
from bench.peers.peers_session import PeersBench
from bench.workloads import EDIT_ROADS
from bench.workloads.next_edit import EditPrompts, NextEdit, apply_edits, next_edits, workload_folder
from bench.workloads.workload import uncounted
from server.completion.documents import TextEdit
from specdec.api.params import fill_params
from specdec.api.v1 import completion_pb2 as pb
from specdec.client.client import Client
from specdec.client.connection import CallError
from specdec.client.messages import stats_of
from specdec.config import Config, EngineConfig, ServerConfig
from specdec.core.types import SpeculationMode, SpeculationParams
from specdec.load.figures import rounded, spread
from specdec.load.request import LoadRequest, Record
from specdec.models.progress import Progress
from specdec.models.resolve import load_tokenizer
from specdec.models.tokenizer import Tokenizer

PREDICT_EDIT, COMPLETIONS, LLAMA = EDIT_ROADS
LLAMA_ARM = "llama.cpp ngram-mod"  # the fastest on edits of its kinds of drafts that need no model
FORMS = ("sweep", "zeta")  # of the prompts through plain completions, in turn
_MODES = {OURS_OFF: SpeculationMode.OFF, OURS_AUTO: SpeculationMode.AUTO}


class CompletionsPeer(HttpPeer):
    """Plain completions of a server that runs already. The off arm leaves no texts to draft from, so both share their
    prefix cache."""

    def __init__(self, server: LocalServer, mode: str) -> None:
        arm = Arm(mode, OURS, "as served", OURS_OFF)
        extra = {"cache_salt": COMPLETIONS, "speculation": {"mode": _MODES[mode]}}
        super().__init__(arm, (), Path(), version="", extra=extra)
        self.base = f"http://127.0.0.1:{server.http_port}"

    async def start(self) -> None:
        """Does nothing: the server runs, and takes no time when it is idle."""


class PredictEditPeer(CompletionsPeer):
    """PredictEdit of the same server. An answer's text is the file after the edits, its first text the first edit."""

    def __init__(self, server: LocalServer, mode: str, client: Client, edits: Seq[NextEdit]) -> None:
        super().__init__(server, mode)
        self._client, self._edits = client, {edit.name: edit for edit in edits}

    async def ask(self, ask: LoadRequest) -> Record:
        place, record = self._edits[ask.name].place, Record(ask.name, time.perf_counter())
        edits: list[TextEdit] = []
        try:
            async with aclosing(self._client.completion.predict_edit(self._message(ask))) as messages:
                async for message in messages:
                    if message.HasField("edit"):
                        record.chunk(time.perf_counter())
                        edits.append(TextEdit(message.edit.start, message.edit.end, message.edit.text))
        except CallError as error:
            raise PeerError(str(error)) from None
        record.end_s, ended = time.perf_counter(), message.finished
        record.output_tokens, stats = ended.usage.output_tokens, stats_of(ended.metrics)
        record.steps(stats.num_steps, stats.num_spec_steps, stats.acceptance_histogram)
        record.text = apply_edits(place.text, edits)
        return record

    def _message(self, ask: LoadRequest) -> pb.PredictEditRequest:
        place = self._edits[ask.name].place
        message = pb.PredictEditRequest(path=place.path, text=place.text, cursor=place.cursor)
        message.recent.extend(pb.RecentEdit(path=e.path, before=e.before, after=e.after) for e in place.recent)
        message.stopping.max_tokens, message.cache.salt = ask.max_tokens, PREDICT_EDIT
        fill_params(message.speculation, SpeculationParams(_MODES[self.arm.name]))
        return message


class EditsBench:
    """Asks for each edit on every road. One road after the other; its engines in turn, edit by edit.

    edits: the first one warms the engines up and does not count.
    """

    def __init__(self, roads: Seq[str], edits: Seq[NextEdit], tokenizer: Tokenizer, say: Say) -> None:
        self._roads, self._edits, self._prompts, self._say = roads, edits, EditPrompts(tokenizer), say

    async def run(self, engine: EngineConfig, progress: Progress) -> dict[str, Any]:
        """The figures of every road, as JSON types.

        Raises:
            BenchError: an engine failed, or llama.cpp is to be measured and cannot be.
            ChildServerError: the server did not start.
        """
        config = Config(engine=engine, server=ServerConfig(grpc_port=0, http_port=0))
        async with LocalServer(config) as server, Client(server.grpc_address) as client:
            info = await client.info()
            # Before the first road: the figures of minutes would be lost if it is not installed.
            llama = _llama(engine, info.threads, progress) if LLAMA in self._roads else []
            peers: dict[str, Seq[HttpPeer]] = {
                PREDICT_EDIT: [PredictEditPeer(server, mode, client, self._edits) for mode in _MODES],
                COMPLETIONS: [CompletionsPeer(server, mode) for mode in _MODES],
                LLAMA: llama,
            }
            found = {
                road: await self.road(peers[road], FORMS if road == COMPLETIONS else ("",)) for road in self._roads
            }
        return {
            **host_facts(), "target": info.target, "dtype": info.dtype, "threads": info.threads,
            "edits": len(self._edits) - 1, "unchanged_lines_right": self._lines_right({}), "roads": found,
            "over_off": {road: time_over(found, (road, OURS_AUTO), (road, OURS_OFF)) for road in found},
            "over_llama": time_over(found, (PREDICT_EDIT, OURS_AUTO), (LLAMA, LLAMA_ARM)),
        }  # fmt: skip

    async def road(self, peers: Seq[HttpPeer], forms: Seq[str]) -> dict[str, Any]:
        """Figures of each of ``peers``, which get the prompts in ``forms`` in turn; raises as `run`."""
        asks = [self._ask(edit, form) for edit, form in zip(self._edits, cycle(forms), strict=False)]
        run = PeersRun(arms=[peer.arm for peer in peers], prompts={"edits": [*uncounted(asks[:1]), *asks[1:]]})
        await PeersBench(peers, self._say, reads_ahead=True).run(run)
        problems = [*(f"{arm}: {reason}" for arm, reason in run.missing.items()), *run.faults()]
        if problems:
            raise BenchError("; ".join(problems))
        return {peer.arm.name: self._figures(peer, run) for peer in peers}

    def _ask(self, edit: NextEdit, form: str) -> LoadRequest:
        ask = self._prompts.ask(edit, form)
        return replace(ask, ids=ask.ids + self._prompts.head(edit, form))

    def _figures(self, peer: HttpPeer, run: PeersRun) -> dict[str, Any]:
        """Of one arm. First edits and right lines only of PredictEdit, which returns edits."""
        arm, places = peer.arm.name, {edit.name: edit.place for edit in self._edits[1:]}
        answers = {name: run.answers[arm, name] for name in places}
        off = {name: run.answers.get((OURS_OFF, name)) for name in places}
        predicts = isinstance(peer, PredictEditPeer)
        texts = {name: answer.text for name, answer in answers.items() if predicts}
        edited = [answers[name] for name, text in texts.items() if text != places[name].text]
        tokens = sum(answer.output_tokens for answer in answers.values())
        steps = sum(a.output_tokens / a.tokens_per_step for a in answers.values() if a.tokens_per_step)
        return {
            "first_edit_ms": spread([answer.ttft_ms for answer in edited]),
            "whole_ms": spread([answer.e2e_ms for answer in answers.values()]),
            "read_ms": spread([run.readings[arm, name].e2e_ms for name in places]),
            "tokens": tokens,
            "tokens_per_step": rounded(tokens / steps) if steps else None,
            "lines_right": self._lines_right(texts) if predicts else None,
            "edits_right": sum(texts[e.name] == e.after for e in self._edits[1:]) if predicts else None,
            "same_as_off": sum(plain is not None and plain.text == answers[name].text for name, plain in off.items()),
            "by_edit": {name: {"ms": rounded(a.e2e_ms), "tokens": a.output_tokens} for name, a in answers.items()},
        }

    def _lines_right(self, texts: Mapping[str, str]) -> float:
        """Mean over the edits of `NextEdit.lines_right`. texts: by edit the file as predicted; default: unchanged."""
        return round(statistics.mean(e.lines_right(texts.get(e.name, e.place.text)) for e in self._edits[1:]), 4)


def _llama(engine: EngineConfig, threads: int, progress: Progress) -> list[HttpPeer]:
    folder, target = engine.cache_dir, engine.target
    model = find_model(target, folder, progress)
    try:
        made = MAKERS[LLAMA](PeersPlan(target, None, folder, threads, (), (LLAMA,)), model, None)
    except PeerError as error:
        raise BenchError(f"{LLAMA}: {error}; to measure without it, name the others with --road") from None
    return [peer for peer in made if peer.arm.name == LLAMA_ARM]


def time_over(
    roads: Mapping[str, dict[str, Any]], ours: tuple[str, str], base: tuple[str, str]
) -> dict[str, float | int] | None:
    """Time of ``ours`` (road and arm) over that of ``base``, edit by edit; None: one of them was not measured."""
    if not all(arm in roads.get(road, ()) for road, arm in (ours, base)):
        return None
    mine, theirs = (roads[road][arm]["by_edit"] for road, arm in (ours, base))
    return spread([mine[name]["ms"] / theirs[name]["ms"] for name in mine])


async def measure_edits(
    engine: EngineConfig, prompts: int, roads: Seq[str], say: Say, progress: Progress
) -> dict[str, Any]:
    """JSON-able figures of predicted edits, ``prompts`` of them or all.

    Raises:
        As `EditsBench.run`, and WorkloadUnavailableError.
    """
    edits = next_edits(workload_folder())
    counted = edits[: min(prompts, len(edits) - 1)]
    tokenizer = load_tokenizer(engine.target, engine.cache_dir)
    return await EditsBench(roads, [edits[-1], *counted], tokenizer, say).run(engine, progress)
