"""AdminService and ExperimentService. `AuthInterceptor` refuses callers that are not operators."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from typing import Any, cast, get_args

import grpc

from server.experiment.live.experiments import ExperimentStatus
from server.grpc.errors import guarded
from server.served_model import Models
from specdec.api.v1 import admin_pb2, admin_pb2_grpc, experiment_pb2, experiment_pb2_grpc
from specdec.config import WeightDtype
from specdec.errors import InvalidRequestError, ViolationCollector

Context = grpc.aio.ServicerContext[Any, Any]
_DTYPES = get_args(WeightDtype)


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, models: Models, report_health: Callable[[], Awaitable[None]], drain_s: float) -> None:
        """``report_health`` is `GrpcServer.report_health`; ``drain_s`` is the default time of a drain."""
        self._models, self._report_health, self._drain_s = models, report_health, drain_s

    @guarded
    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        timeout_s = request.timeout_s if request.HasField("timeout_s") else self._drain_s
        if not 0 <= timeout_s < math.inf:
            raise InvalidRequestError.of("timeout_s", "must be a number of seconds, not negative")
        drained = Models([self._models.named(request.model)]) if request.model else self._models
        for model in drained:
            model.gate.close()
        await self._report_health()
        return admin_pb2.DrainResponse(running=await drained.drain(timeout_s))

    @guarded
    async def FlushCache(self, request: admin_pb2.FlushCacheRequest, context: Context) -> admin_pb2.FlushCacheResponse:
        return admin_pb2.FlushCacheResponse(pages=await self._models.named(request.model).client.flush_cache())

    @guarded
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

    @guarded
    async def StartExperiment(
        self, request: experiment_pb2.StartExperimentRequest, context: Context
    ) -> experiment_pb2.StartExperimentResponse:
        status = await self._models.named(request.model).experiments.start(request.plan)
        return experiment_pb2.StartExperimentResponse(experiment=_experiment_message(status))

    @guarded
    async def StopExperiment(
        self, request: experiment_pb2.StopExperimentRequest, context: Context
    ) -> experiment_pb2.StopExperimentResponse:
        return experiment_pb2.StopExperimentResponse(
            experiment=_experiment_message(await self._models.named(request.model).experiments.stop(request.name))
        )

    @guarded
    async def GetExperiment(
        self, request: experiment_pb2.GetExperimentRequest, context: Context
    ) -> experiment_pb2.GetExperimentResponse:
        return experiment_pb2.GetExperimentResponse(
            experiment=_experiment_message(await self._models.named(request.model).experiments.get(request.name))
        )

    @guarded
    async def ListExperiments(
        self, request: experiment_pb2.ListExperimentsRequest, context: Context
    ) -> experiment_pb2.ListExperimentsResponse:
        return experiment_pb2.ListExperimentsResponse(
            experiments=map(_experiment_message, await self._models.named(request.model).experiments.statuses())
        )

    @guarded
    async def GetExperimentResult(
        self, request: experiment_pb2.GetExperimentResultRequest, context: Context
    ) -> experiment_pb2.GetExperimentResultResponse:
        found = await self._models.named(request.model).experiments.conclude(request.name)
        verdict = json.loads(found.result)["verdict"]
        return experiment_pb2.GetExperimentResultResponse(
            verdict=verdict["kind"], headline=verdict["headline"], reasons=verdict["reasons"],
            result_json=found.result, report_html=found.report if request.report else "",
        )  # fmt: skip


def _experiment_message(status: ExperimentStatus) -> experiment_pb2.Experiment:
    state = experiment_pb2.ExperimentState.Value(f"EXPERIMENT_STATE_{status.state.upper()}")
    return experiment_pb2.Experiment(
        name=status.name, state=state, mode=status.mode, started=status.started,
        arms=[experiment_pb2.ArmCount(arm=arm, records=count) for arm, count in status.records.items()],
        left_out=status.left_out, reason=status.reason, warnings=status.warnings,
    )  # fmt: skip
