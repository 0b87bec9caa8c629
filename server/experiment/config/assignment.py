"""How requests get into arms."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from server.experiment.config.strict_model import Seconds, Share, StrictModel

Mode = Literal["paired_replay", "switchback", "hash", "shadow", "aa"]
Unit = Literal["request", "session", "user", "prompt"]


class Assignment(StrictModel):
    """``paired_replay`` and ``shadow`` serve the same request in both arms; ``switchback`` changes the arm of all
    requests from time block to time block; ``hash`` gives every key its arm; ``aa`` replays pairs in two equal arms,
    or, with a ``unit``, gives every key one of two equal arms.

    ``expect_same_tokens``: both arms must give the same tokens (path identity, or greedy decoding); any pair that does
    not makes the result invalid.
    """

    mode: Mode = "paired_replay"
    block_s: Seconds = Field(20.0, gt=0)
    washout_s: Seconds = Field(2.0, ge=0)
    salt: str = Field("", description="empty: the name of the experiment")
    unit: Unit | None = Field(None, description="whom an arm sticks to in a running server; none: request")
    share: Share = Field(1.0, gt=0, le=1, description="part of the keys, or of the requests, that take part")
    shadow: Literal["after", "beside"] = Field("after", description="when a shadow is sent")
    allow_override: bool = False
    expect_same_tokens: bool = True

    @model_validator(mode="after")
    def _washout_fits(self) -> Assignment:
        if self.mode == "switchback" and self.washout_s >= self.block_s:
            raise ValueError("washout_s leaves nothing of a block; make it shorter than block_s")
        return self

    @property
    def pairs(self) -> bool:
        """Whether each request is served in both arms."""
        return self.mode in ("paired_replay", "shadow") or (self.mode == "aa" and self.unit is None)
