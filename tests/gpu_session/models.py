"""Whole forwards of a model of random weights: `python -m tests.gpu_session.models CHECK TARGET --dtype bf16`.

self-test: rows do not depend on their batch, bit by bit. poison: scratch memory filled with NaN changes no bit.
verify: `specdec verify` with the GPU's engine, also where its kernels are interpreted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

from specdec.models.device_decoder import DeviceDecoder, device_self_test
from specdec.models.device_weights import load_device_model
from specdec.models.progress import silent
from tests.gpu_session.twins import poison
from tests.kernels.gpu.quick_interpreter import quick_interpreter
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch

PROMPT_TOKENS = 300
MAX_ROWS = 512


def make_decoder(target: str, dtype: Any, device: torch.device, prompt: int) -> DeviceDecoder:
    """A decoder with room for ``prompt`` tokens twice and a tree after them."""
    rows, positions = min(MAX_ROWS, prompt + 64), prompt + 64
    model = load_device_model(
        target, dtype=dtype, cache_dir=Path("~/.cache/specdec").expanduser(), device=device, max_rows=rows,
        progress=silent,
    )  # fmt: skip
    return DeviceDecoder(
        model, 2 * (positions // PAGE_SIZE + 1), device, max_entries=4, max_rows=rows, max_logit_rows=64,
        max_positions=positions,
    )  # fmt: skip


def poison_changes(decoder: DeviceDecoder) -> list[str]:
    """Run a prompt and a tree, fill every float buffer outside weights and KV with NaN, run them again; returns what
    differs."""
    entries = [
        BatchEntry([3] * 70, range(-1, 69), 0, [0, 1]),
        BatchEntry([5, 6, 7, 8], [-1, 0, 1, 0], 0, [2]),
    ]
    batch, wanted = ForwardBatch.build(entries), [0, 69, 70, 73]

    def once() -> tuple[Tensor, Tensor, Tensor]:
        logits = decoder.forward(batch, wanted).clone()
        return logits, decoder.pool.k[:, :3].clone(), decoder.pool.v[:, :3].clone()

    before = once()
    network = decoder.network
    for value in vars(network).values():
        if isinstance(value, Tensor) and value.is_floating_point():
            value.fill_(torch.nan)
    poison(network.workspace)
    for layer in decoder.model.weights.layers:
        for linear in layer.linears:
            linear._scratch.scales.fill_(torch.nan)
            poison(linear._scratch.workspace)
    after = once()
    names = ("logits", "keys", "values")
    finite = [name for name, tensor in zip(names, after, strict=True) if not tensor.float().isfinite().all()]
    pairs = zip(names, before, after, strict=True)
    changed = [name for name, a, b in pairs if not torch.equal(a.float(), b.float())]
    return [f"{name} have other bits" for name in changed] + [f"{name} are not finite" for name in finite]


def verify_mismatches(
    target: str, dtype: Any, device: torch.device, pairs: int, max_tokens: int, context: int
) -> dict[str, Any]:
    """The counts of `specdec verify`, with trees from the prompt's own text and from an oracle."""
    from bench.path_identity import verify
    from specdec.config import EngineConfig, SpeculationConfig
    from specdec.engine.build import assemble
    from specdec.engine.build_device import DevicePlatform
    from verify_kernels.backend_selection import load_kernels

    config = EngineConfig(
        target=target, device_dtype=dtype, kernels="reference", max_context=context, kv_tokens=16 * context,
        speculation=SpeculationConfig(drafters=("suffix", "oracle:0.7"), profile_s=0),
    )  # fmt: skip
    parts = assemble(config, DevicePlatform(config, device), load_kernels("reference", config.cache_dir, 1), 1)
    report = verify(
        parts, pairs=pairs, max_tokens=max_tokens, seed=0, say=lambda line: print(line, file=sys.stderr, flush=True)
    )
    wrong = [str(mismatch) for mismatch in report.mismatches[:3]]
    return report.as_dict() | {"numeric_mode": parts.info.numeric_mode, "wrong": wrong}


def main() -> int:
    """Returns 0 if the check passes."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_session.models", description=__doc__)
    parser.add_argument("check", choices=("self-test", "poison", "verify"))
    parser.add_argument("target")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt", type=int, default=PROMPT_TOKENS, help="tokens of the self-test's prompt")
    parser.add_argument("--pairs", type=int, default=100, help="of verify")
    parser.add_argument("--max-tokens", type=int, default=24, help="of verify")
    parser.add_argument("--context", type=int, default=2048, help="tokens of verify's longest request")
    options = parser.parse_args()
    on_gpu, began = torch.cuda.is_available(), time.monotonic()
    device = torch.device("cuda" if on_gpu else "cpu")
    found: dict[str, Any] = {"target": options.target, "dtype": options.dtype}
    with nullcontext() if on_gpu else quick_interpreter():
        if options.check == "verify":
            found |= verify_mismatches(
                options.target, options.dtype, device, options.pairs, options.max_tokens, options.context
            )
        else:
            decoder = make_decoder(options.target, options.dtype, device, options.prompt)
            found["build_s"] = round(time.monotonic() - began, 2)
            if options.check == "self-test":
                mode = device_self_test(decoder, options.prompt)
                found["wrong"] = [] if mode == "bitwise" else [f"the numeric mode is {mode}"]
            else:
                found["wrong"] = poison_changes(decoder)
    found["seconds"] = round(time.monotonic() - began, 2)
    print(json.dumps(found))
    print(*found["wrong"], sep="\n", file=sys.stderr)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
