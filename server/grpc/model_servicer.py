"""ModelService: what is served, and how busy it is."""

from __future__ import annotations

from typing import Any

import grpc

from server.frontend import Frontend
from server.grpc.convert import info_message, load_message
from server.grpc.errors import guarded
from specdec.api.v1 import model_pb2 as pb
from specdec.api.v1 import model_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class ModelServicer(pb_grpc.ModelServiceServicer):
    """Answers from what the engine process has told; never waits for it."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    @guarded
    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """Facts about the engine."""
        return info_message(self._frontend.info, self._frontend.client.restarts)

    @guarded
    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """The target, and the draft where there is one."""
        info = self._frontend.info
        models = [pb.Model(name=info.target, role=pb.MODEL_ROLE_TARGET)]
        if info.draft is not None:
            models.append(pb.Model(name=info.draft, role=pb.MODEL_ROLE_DRAFT))
        return pb.ListModelsResponse(models=models)

    @guarded
    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        """The engine's last heartbeat."""
        return load_message(self._frontend.client.load)
