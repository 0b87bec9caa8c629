"""ExperimentService: live experiments, for operators."""

from __future__ import annotations

import json
from typing import Any

import grpc

from server.auth.check_admin import check_admin
from server.experiment.live.experiment_status import ExperimentStatus
from server.experiment.live.experiments import Experiments
from server.grpc.errors import guarded
from specdec.api.v1 import experiment_pb2 as pb
from specdec.api.v1 import experiment_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]
_SERVICE = "ExperimentService"
_STATES = {
    "running": pb.EXPERIMENT_STATE_RUNNING,
    "stopped": pb.EXPERIMENT_STATE_STOPPED,
    "finished": pb.EXPERIMENT_STATE_FINISHED,
    "failed": pb.EXPERIMENT_STATE_FAILED,
}


class ExperimentServicer(pb_grpc.ExperimentServiceServicer):
    """Every call asks for an operator's key first."""

    def __init__(self, experiments: Experiments) -> None:
        self._experiments = experiments

    @guarded
    async def StartExperiment(self, request: pb.StartExperimentRequest, context: Context) -> pb.StartExperimentResponse:
        """Begins one, or goes on with it."""
        check_admin(_SERVICE)
        status = await self._experiments.start(request.plan)
        return pb.StartExperimentResponse(experiment=_message(status))

    @guarded
    async def StopExperiment(self, request: pb.StopExperimentRequest, context: Context) -> pb.StopExperimentResponse:
        """Ends one."""
        check_admin(_SERVICE)
        return pb.StopExperimentResponse(experiment=_message(await self._experiments.stop(request.name)))

    @guarded
    async def GetExperiment(self, request: pb.GetExperimentRequest, context: Context) -> pb.GetExperimentResponse:
        """How one stands."""
        check_admin(_SERVICE)
        return pb.GetExperimentResponse(experiment=_message(await self._experiments.get(request.name)))

    @guarded
    async def ListExperiments(self, request: pb.ListExperimentsRequest, context: Context) -> pb.ListExperimentsResponse:
        """All there are."""
        check_admin(_SERVICE)
        return pb.ListExperimentsResponse(experiments=map(_message, await self._experiments.statuses()))

    @guarded
    async def GetExperimentResult(
        self, request: pb.GetExperimentResultRequest, context: Context
    ) -> pb.GetExperimentResultResponse:
        """What the records say."""
        check_admin(_SERVICE)
        found = await self._experiments.conclude(request.name)
        verdict = json.loads(found.result)["verdict"]
        return pb.GetExperimentResultResponse(
            verdict=verdict["kind"], headline=verdict["headline"], reasons=verdict["reasons"],
            result_json=found.result, report_html=found.report if request.report else "",
        )  # fmt: skip


def _message(status: ExperimentStatus) -> pb.Experiment:
    return pb.Experiment(
        name=status.name, state=_STATES[status.state], mode=status.mode, started=status.started,
        arms=[pb.ArmCount(arm=arm, records=count) for arm, count in status.records.items()],
        left_out=status.left_out, given_up=status.given_up, reason=status.reason, warnings=status.warnings,
    )  # fmt: skip
