"""Reads a LoRA adapter in PEFT's layout, and adds it to the matrices of its base model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.checkpoint import StoredBlocks, TensorSource, read_json, well_formed
from specdec.models.hf import open_shards, readable
from specdec.models.weights import linear_plans

_WAY_OUT = "merge it (peft: merge_and_unload), and save the whole model"
_TENSOR = re.compile(
    r"base_model\.model\.(?:(?:model|language_model)\.)*(layers\.\d+)\.(?:self_attn|mlp)"
    r"\.((?:experts\.\d+\.)?\w+)_proj\.lora_([AB])\.weight"
)
_OF_IMAGES = re.compile(r"\bvis(?:ion|ual)")  # in names of a multimodal model's tensors, of which only text is served
# Fields of adapter_config.json that change what the matrices mean, where they are set
_UNSUPPORTED = ("use_dora", "alpha_pattern", "alora_invocation_tokens", "use_qalora", "use_bdlora", "layer_replication")
# Beginnings of a training that leave the base as it is; others, such as PiSSA's, take a part out of it
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")


class AdapterSource(TensorSource):
    """A source whose adapted matrices are W + s B A, with W from ``base``, and A and B from ``folder``.

    A: [rank, in]. B: [out, rank]. s: lora_alpha / rank (Hu et al., arXiv 2106.09685), or with use_rslora
    lora_alpha / sqrt(rank) (Kalajdzievski, arXiv 2312.03732).

    Raises:
        ModelError: a file is missing or damaged, or the factors do not fit the matrices of ``base``.
        UnsupportedModelError: the adapter is of another kind, or changes other tensors.
    """

    def __init__(self, base: TensorSource, folder: Path, name: str) -> None:
        self._base, self._folder = base, folder
        self.name, self.config = name, base.config
        with well_formed(f"{folder}/adapter_config.json"):
            config = read_json(folder / "adapter_config.json")
            self._check(config)
            self._alpha, self._power = float(config["lora_alpha"]), 0.5 if config.get("use_rslora") else 1.0
        (self._file,) = open_shards(folder).values()
        if not self._file.keys():  # saved where a trainer holds the factors elsewhere; it would be its base
            raise ModelError(f"{folder}: its safetensors file holds no tensors; save the adapter again")
        names = (name for name in self._file.keys() if not _OF_IMAGES.search(name))  # noqa: SIM118
        self._names = {self._factor_of(name): name for name in names}
        with well_formed(str(folder)):
            self._check_shapes()

    def has(self, role: str) -> bool:
        return self._base.has(role)

    def shape(self, role: str) -> tuple[int, ...]:
        return self._base.shape(role)

    def rows(self, role: str, low: int, high: int) -> Tensor:
        rows = self._base.rows(role, low, high)
        if not self._adapts(role):
            return rows
        a, b = self._read(role, "A", slice(None)), self._read(role, "B", slice(low, high))
        return rows + self._alpha / a.shape[0] ** self._power * (b @ a)

    def vector(self, role: str) -> Tensor:
        return self._base.vector(role)

    def stored_blocks(self, role: str) -> StoredBlocks | None:
        return None if self._adapts(role) else self._base.stored_blocks(role)

    def blocks(self, role: str, low: int, high: int) -> Tensor:
        return self._base.blocks(role, low, high)

    def _check(self, config: dict[str, Any]) -> None:
        wrong = [field for field in _UNSUPPORTED if config.get(field)]
        wrong += ["revision"] if config.get("revision") not in (None, "main") else []
        wrong += ["peft_type"] if config.get("peft_type") != "LORA" else []
        wrong += ["init_lora_weights"] if config.get("init_lora_weights") not in _INITIAL else []
        if wrong:
            value = f"{wrong[0]} {config.get(wrong[0])!r}"
            raise UnsupportedModelError(f"{self._folder}: adapter_config.json: {value} is not supported; {_WAY_OUT}")

    def _factor_of(self, name: str) -> tuple[str, str]:
        """The role of the matrix that the tensor ``name`` adapts, and which factor it is: "A" or "B"."""
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise UnsupportedModelError(
                f"{self._folder}: tensor {name} is no LoRA factor of a linear layer; {_WAY_OUT}"
            )
        layer, module, factor = found.groups()
        return f"{layer}.{module}", factor

    def _adapts(self, role: str) -> bool:
        return (role, "B") in self._names

    def _check_shapes(self) -> None:
        plans = linear_plans(self.config)
        shapes = {role: [rows, plan.columns] for plan in plans for role, rows in (*plan.parts, (plan.name, plan.rows))}
        for role in sorted({role for role, _ in self._names}):
            (rank, columns), (rows, inner) = (self._view(role, factor).get_shape() for factor in "AB")
            shape = shapes.get(role) if self._base.has(role) else None
            if [rows, columns] != shape or rank != inner or rank == 0:
                raise ModelError(
                    f"{self._folder}: the factors of {role} are [{rank}, {columns}] and [{rows}, {inner}], which does "
                    f"not fit {self._base.name}, where it is {shape or 'missing'}; name the model that the "
                    "adapter was trained on as base_model_name_or_path in adapter_config.json"
                )

    def _read(self, role: str, factor: str, rows: slice) -> Tensor:
        """``rows`` of a factor, float32."""
        with readable(self._folder, self._names[role, factor]):
            values: Tensor = self._view(role, factor)[rows].float()
        return values

    def _view(self, role: str, factor: str) -> Any:
        if (role, factor) not in self._names:
            raise ModelError(f"{self._folder}: lora_{factor} of {role} is missing; fetch the adapter again")
        return self._file.get_slice(self._names[role, factor])
