"""A mode in which reading a device tensor on the host is an error: nothing in a step may wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Methods of a tensor that Python itself calls, and those that return values to Python or numpy.
READS = (
    "item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__complex__", "__index__",
    "__contains__", "__repr__", "__format__",
)  # fmt: skip
_WAITS = ((torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"))
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
_MASKED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)
_NEEDS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class HostReadError(AssertionError):
    """The host requested values that are on the device."""


class NoHostRead:
    """Context manager: raises `HostReadError` if a device tensor's values are read on the host.

    ``device`` "cuda" or "meta": tensors there are the device's, and copies from there are reads, except a non-blocking
    copy into pinned memory, which returns a step's results. ``device`` "cpu" is for Triton's interpreter: every tensor
    counts as the device's, and reads by the interpreter itself do not count. `paused` lets the host read what has
    arrived.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._paused = False
        self._stack = ExitStack()

    def __enter__(self) -> NoHostRead:
        for owner, name in _WAITS:
            self._stack.enter_context(mock.patch.object(owner, name, self._waits(name, getattr(owner, name))))
        self._stack.enter_context(_Dispatch(self))
        self._stack.enter_context(_Calls(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The host may read and wait in here."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def check_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Of a call as Python makes it."""
        name = getattr(func, "__name__", "")
        if not self._paused and name in READS and self._device_tensors(args):
            raise HostReadError(f"Tensor.{name}() on {args[0].device}: a step must not wait for the device")

    def check_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check an operator as torch runs it, however it was called."""
        if self._paused or not self._device_tensors((args, kwargs)):
            return
        if func in _MASKED:
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            if masks:
                raise HostReadError(f"{func}: a mask as index is counted on the host; use torch.where")
        elif func in _COPIES:
            self._check_copy(func, args, kwargs)
        elif any(tag in _NEEDS_VALUES for tag in func.tags) and kwargs.get("output_size") is None:
            raise HostReadError(f"{func}: its result depends on values that the host would have to wait for")

    def _check_copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._device == "cpu":
            return
        if func is torch.ops.aten._to_copy.default:
            wanted = kwargs.get("device")
            if wanted is not None and torch.device(wanted).type == "cpu":
                raise HostReadError(f"{func}: copies from {args[0].device} to the host")
            return
        target, source = args[0], args[1]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        leaves = target.device.type == "cpu" and source.device.type == self._device
        if leaves and not (non_blocking and target.is_pinned()):
            raise HostReadError(f"{func}: copies from {source.device} to the host and waits for it")

    def _device_tensors(self, values: Any) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.device.type == self._device]

    def _waits(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            if not self._paused:
                raise HostReadError(f"torch.cuda {name}(): a step must not wait for the device")
            return original(*args, **kwargs)

        return wait


class _Calls(TorchFunctionMode):
    def __init__(self, rule: NoHostRead) -> None:
        super().__init__()
        self._rule = rule

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._rule.check_call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    def __init__(self, rule: NoHostRead) -> None:
        super().__init__()
        self._rule = rule

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._rule.check_operator(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
