"""The argument records of the native kernels, field by field as the C++ headers declare them."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p


class LinearArgs(ctypes.Structure):
    """``sd_linear_args`` in csrc/linear.h."""

    _fields_ = (
        ("kind", c_int32), ("pre", c_int32), ("post", c_int32), ("threads", c_int32),
        ("n", c_int32), ("k", c_int32), ("k_pad", c_int32), ("tiles", c_int32),
        ("ld_src", c_int64), ("ld_dst", c_int64),
        ("weight", c_void_p), ("weight_scale", c_void_p), ("bias", c_void_p),
        ("src", c_void_p), ("dst", c_void_p), ("pre_norm", c_void_p), ("post_norm", c_void_p),
        ("eps", c_float), ("unused", c_float),
        ("x", c_void_p), ("q", c_void_p), ("q_scale", c_void_p), ("q_sum", c_void_p), ("result", c_void_p),
    )  # fmt: skip


class AttentionArgs(ctypes.Structure):
    """``sd_attention_args`` in csrc/attention.h."""

    _fields_ = (
        ("n_heads", c_int32), ("n_kv_heads", c_int32), ("head_dim", c_int32), ("window", c_int32),
        ("threads", c_int32), ("unused", c_int32), ("scale", c_float), ("eps", c_float),
        ("q_norm", c_void_p), ("k_norm", c_void_p), ("cos", c_void_p), ("sin", c_void_p),
        ("qkv", c_void_p), ("q", c_void_p), ("out", c_void_p), ("k_pool", c_void_p), ("v_pool", c_void_p),
    )  # fmt: skip


class BatchArgs(ctypes.Structure):
    """``sd_batch`` in csrc/attention.h."""

    _fields_ = (
        ("rows", c_int32), ("entries", c_int32), ("max_pages", c_int32), ("unused", c_int32),
        ("entry_start", c_void_p), ("entry_ctx", c_void_p), ("page_table", c_void_p), ("entry_of", c_void_p),
        ("parent", c_void_p), ("depth", c_void_p), ("diverge", c_void_p),
    )  # fmt: skip
