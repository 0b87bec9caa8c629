"""How the weights of an AWQ or GPTQ model folder are quantised, read off its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specdec.errors import UnsupportedModelError

WAY_OUT = "use the unquantised model, an AWQ or GPTQ model of 4 bits, or a GGUF file"
BITS: dict[str, tuple[int, ...]] = {"awq": (4,), "gptq": (4, 8)}
GPTQ_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # the first format stores zero points less one


@dataclass(frozen=True, slots=True)
class QuantizedConfig:
    """``bits`` per weight; ``group_size`` input channels share a scale, -1: all of them; ``zero_offset`` is to be
    added to stored zero points."""

    method: Literal["awq", "gptq"]
    bits: int
    group_size: int
    zero_offset: int

    @property
    def per_word(self) -> int:
        """Values in 32 bits."""
        return 32 // self.bits


def parse_quantized_config(data: Any, name: str) -> QuantizedConfig:
    """From ``quantization_config`` of config.json; ``name`` is used in messages.

    Raises:
        UnsupportedModelError: it is not one of the layouts that can be read; the message names the field.
    """
    data = data if isinstance(data, dict) else {}
    method = data.get("quant_method")
    where = f"{name}: quantization_config"
    if method not in BITS:
        raise UnsupportedModelError(f"{where}: quant_method '{method}' is not supported; {WAY_OUT}")
    bits, group = data.get("bits"), data.get("group_size")
    if bits not in BITS[method]:
        allowed = " or ".join(map(str, BITS[method]))
        raise UnsupportedModelError(f"{where} ({method}): bits is {bits}; only {allowed} is supported, {WAY_OUT}")
    if not isinstance(group, int) or isinstance(group, bool) or (group < 1 and group != -1):
        raise UnsupportedModelError(f"{where} ({method}): group_size is {group!r}; must be positive or -1, {WAY_OUT}")
    if method == "awq":
        _check_awq(data, where)
        return QuantizedConfig("awq", bits, group, 0)
    return QuantizedConfig("gptq", bits, group, _gptq_offset(data, where))


def _check_awq(data: dict[str, Any], where: str) -> None:
    layout = data.get("version", data.get("format")) or "gemm"
    if str(layout).lower() != "gemm":
        raise UnsupportedModelError(f"{where} (awq): version '{layout}' is not supported; only gemm is, {WAY_OUT}")
    if data.get("zero_point") is False:
        raise UnsupportedModelError(f"{where} (awq): zero_point false is not supported; {WAY_OUT}")


def _gptq_offset(data: dict[str, Any], where: str) -> int:
    layout = data.get("checkpoint_format", data.get("format")) or "gptq"
    if layout not in GPTQ_ZERO_OFFSETS or data.get("is_marlin_format"):
        shown = "marlin" if data.get("is_marlin_format") else layout
        known = " and ".join(GPTQ_ZERO_OFFSETS)
        raise UnsupportedModelError(
            f"{where} (gptq): checkpoint_format '{shown}' is not supported; only {known} are, {WAY_OUT}"
        )
    if data.get("dynamic"):
        raise UnsupportedModelError(f"{where} (gptq): dynamic (bits by module) is not supported; {WAY_OUT}")
    if data.get("pack_dtype", "int32") != "int32":
        raise UnsupportedModelError(f"{where} (gptq): pack_dtype '{data['pack_dtype']}' is not supported; {WAY_OUT}")
    return GPTQ_ZERO_OFFSETS[layout]
