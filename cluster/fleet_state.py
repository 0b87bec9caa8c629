"""What a keeper that begins anew goes on from. As JSON: reading it runs no code, whoever wrote it."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ValidationError

from cluster.config import ClusterConfig
from cluster.deployment import Deployment
from cluster.fleet import Fleet
from cluster.state_folder import read_private, write_private
from specdec.config import problems
from specdec.errors import ConfigError


class FleetState(BaseModel):
    """``deployments``: what runs, by the names of Serve's applications; with the keys by which replicas are asked."""

    config: ClusterConfig
    deployments: dict[str, Deployment]
    fleet: Fleet

    def save(self, path: Path) -> None:
        """Put it at ``path``, for its owner alone."""
        write_private(path, self.model_dump_json(indent=1))

    @classmethod
    def load(cls, path: Path) -> FleetState:
        """What was saved at ``path``.

        Raises:
            ConfigError: others may have written it, or it can not be read.
        """
        try:
            return cls.model_validate_json(read_private(path))
        except OSError as error:
            raise ConfigError(f"{path} can not be read ({error.strerror})") from None
        except ValidationError as error:
            raise ConfigError(f"{path}: {problems(error)}") from None
