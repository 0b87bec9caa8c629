"""Responses of the server reach the client's caller unchanged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.grpc.messages import event_message
from specdec.api.v1 import generation_pb2 as pb
from specdec.client.messages import event_of
from specdec.core.types import Delta, StepTree, TokenLogprobs

ID = st.integers(0, 2**32 - 1)
NAMES = st.lists(st.sampled_from(["suffix", "model", "head"]), max_size=2)
MS = st.floats(0, 1e6)


@st.composite
def trees(draw: st.DrawFn) -> StepTree:
    size = draw(st.integers(1, 6))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
    each = {"min_size": size, "max_size": size}
    return StepTree(
        draw(st.lists(ID, **each)), parents, draw(st.lists(st.floats(0, 1), **each)), draw(st.lists(NAMES, **each)),
        draw(st.lists(st.integers(0, size - 1), max_size=3)), draw(MS), draw(MS),
    )  # fmt: skip


@given(
    ids=st.lists(ID, max_size=4), text=st.text(st.characters(exclude_categories=["Cs"])), tree=st.none() | trees(),
    top=st.lists(st.tuples(ID, st.floats(-100, 0)), max_size=2),
)  # fmt: skip
def test_deltas_arrive_unchanged(
    ids: list[int], text: str, tree: StepTree | None, top: list[tuple[int, float]]
) -> None:
    sent = Delta("r", 2, ids, text, [TokenLogprobs(token, -0.5, top) for token in ids], tree)
    message = event_message(pb.GenerateStreamResponse, sent, "m")
    assert event_of(pb.GenerateStreamResponse.FromString(message.SerializeToString()), "r") == sent
