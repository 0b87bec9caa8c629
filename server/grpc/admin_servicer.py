"""AdminService and ExperimentService. `CallInterceptor` refuses callers that are not operators."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from typing import Any, cast, get_args

from server.experiment.live.experiments import Experiments, ExperimentStatus
from server.grpc.errors import Context
from server.served_model import Models
from specdec.api.v1 import admin_pb2, admin_pb2_grpc, experiment_pb2_grpc
from specdec.api.v1 import experiment_pb2 as pb
from specdec.config import WeightDtype
from specdec.errors import InvalidRequestError, ViolationCollector

_DTYPES = get_args(WeightDtype)


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, models: Models, report_health: Callable[[], Awaitable[None]], drain_s: float) -> None:
        """``report_health`` is `GrpcServer.report_health`; ``drain_s`` is the default time of a drain."""
        self._models, self._report_health, self._drain_s = models, report_health, drain_s

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        timeout_s = request.timeout_s if request.HasField("timeout_s") else self._drain_s
        if not 0 <= timeout_s < math.inf:
            raise InvalidRequestError.of("timeout_s", "must be a number of seconds, not negative")
        drained = Models([self._models.named(request.model)]) if request.model else self._models
        for model in drained:
            model.gate.close()
        await self._report_health()
        return admin_pb2.DrainResponse(running=await drained.drain(timeout_s))

    async def FlushCache(self, request: admin_pb2.FlushCacheRequest, context: Context) -> admin_pb2.FlushCacheResponse:
        return admin_pb2.FlushCacheResponse(pages=await self._models.named(request.model).client.flush_cache())

    async def SwapDraft(self, request: admin_pb2.SwapDraftRequest, context: Context) -> admin_pb2.SwapDraftResponse:
        violations = ViolationCollector()
        violations.check(
            request.dtype in ("", *_DTYPES), "dtype", f"one of {', '.join(_DTYPES)}, got {request.dtype[:40]!r}"
        )
        violations.check(bool(request.draft) or not request.dtype, "dtype", "has no meaning without a draft")
        violations.raise_if_any()
        dtype = cast(WeightDtype, request.dtype) if request.dtype else None
        info = await self._models.named(request.model).client.swap_draft(request.draft or None, dtype)
        return admin_pb2.SwapDraftResponse(draft=info.draft, drafters=info.drafters)


class ExperimentServicer(experiment_pb2_grpc.ExperimentServiceServicer):
    def __init__(self, models: Models) -> None:
        self._models = models

    async def StartExperiment(self, request: pb.StartExperimentRequest, context: Context) -> pb.StartExperimentResponse:
        return pb.StartExperimentResponse(experiment=_message(await self._of(request).start(request.plan)))

    async def StopExperiment(self, request: pb.StopExperimentRequest, context: Context) -> pb.StopExperimentResponse:
        return pb.StopExperimentResponse(experiment=_message(await self._of(request).stop(request.name)))

    async def GetExperiment(self, request: pb.GetExperimentRequest, context: Context) -> pb.GetExperimentResponse:
        return pb.GetExperimentResponse(experiment=_message(await self._of(request).get(request.name)))

    async def ListExperiments(self, request: pb.ListExperimentsRequest, context: Context) -> pb.ListExperimentsResponse:
        return pb.ListExperimentsResponse(experiments=map(_message, await self._of(request).statuses()))

    async def GetExperimentResult(
        self, request: pb.GetExperimentResultRequest, context: Context
    ) -> pb.GetExperimentResultResponse:
        found = await self._of(request).conclude(request.name)
        verdict = json.loads(found.result)["verdict"]
        return pb.GetExperimentResultResponse(
            verdict=verdict["kind"], headline=verdict["headline"], reasons=verdict["reasons"],
            result_json=found.result, report_html=found.report if request.report else "",
        )  # fmt: skip

    def _of(self, request: Any) -> Experiments:
        """The experiments of the model that ``request`` names."""
        return self._models.named(request.model).experiments


def _message(status: ExperimentStatus) -> pb.Experiment:
    state = pb.ExperimentState.Value(f"EXPERIMENT_STATE_{status.state.upper()}")
    return pb.Experiment(
        name=status.name, state=state, mode=status.mode, started=status.started,
        arms=[pb.ArmCount(arm=arm, records=count) for arm, count in status.records.items()],
        left_out=status.left_out, reason=status.reason, warnings=status.warnings,
    )  # fmt: skip
