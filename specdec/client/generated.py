"""A whole answer."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.client.generated_sample import GeneratedSample


@dataclass(frozen=True, slots=True)
class Generated:
    """``seed``: the one in force, drawn by the engine where none was given."""

    request_id: str
    model: str
    seed: int
    samples: list[GeneratedSample]

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.samples[0].text
