"""ExperimentService, for operators."""

from __future__ import annotations

from specdec.api.v1 import experiment_pb2 as pb
from specdec.api.v1 import experiment_pb2_grpc as pb_grpc
from specdec.client.connection import Connection


class ExperimentClient:
    """Needs a key marked `admin`. Every method raises `CallError`. Made by `Client`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def start(self, plan: str) -> pb.Experiment:
        """Begin the experiment that ``plan``, YAML or JSON, describes, or go on with it."""
        request = pb.StartExperimentRequest(plan=plan)
        found: pb.Experiment = (await self._connection.unary(self._stub.StartExperiment, request)).experiment
        return found

    async def stop(self, name: str) -> pb.Experiment:
        """End a running experiment; its records stay."""
        request = pb.StopExperimentRequest(name=name)
        found: pb.Experiment = (await self._connection.unary(self._stub.StopExperiment, request)).experiment
        return found

    async def get(self, name: str) -> pb.Experiment:
        """How an experiment stands."""
        request = pb.GetExperimentRequest(name=name)
        found: pb.Experiment = (await self._connection.unary(self._stub.GetExperiment, request)).experiment
        return found

    async def every(self) -> list[pb.Experiment]:
        """All that the server has records of, by name."""
        response = await self._connection.unary(self._stub.ListExperiments, pb.ListExperimentsRequest())
        return [*response.experiments]

    async def result(self, name: str, *, report: bool = False) -> pb.GetExperimentResultResponse:
        """What an experiment's records say so far; ``report``: its page too."""
        request = pb.GetExperimentResultRequest(name=name, report=report)
        found: pb.GetExperimentResultResponse = await self._connection.unary(self._stub.GetExperimentResult, request)
        return found

    @property
    def _stub(self) -> pb_grpc.ExperimentServiceAsyncStub:
        return pb_grpc.ExperimentServiceStub(self._connection.channel)
