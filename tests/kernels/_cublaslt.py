# SPDX-License-Identifier: Apache-2.0
"""A stub in cuBLASLt's place."""

import ctypes
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_flashinfer_vit.gemms import cublaslt
from vllm_flashinfer_vit.gemms.cublaslt import Layer, Problems

HANDLE, STREAM = 11, 77


class Library:
    """Notes calls, gives each thing that is created a number, and finds algorithms."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.statuses: dict[str, int] = {}
        self.workspace, self.count = 640, 1
        self._last = 100

    def __getitem__(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            args = tuple(map(_plain, args))
            if name.endswith("Create"):
                self._last += 1
                args[0].value = self._last
                args = (self._last, *args[1:])
            elif name.endswith("GetHeuristic"):
                args[-2].workspace = self.workspace
                args[-1].value = self.count
            self.calls.append((name.removeprefix("cublasLt"), args))
            return self.statuses.get(name, 0)

        return call

    __getattr__ = __getitem__

    def of(self, name: str) -> list[tuple[Any, ...]]:
        """Return the arguments of all calls of a function."""
        return [args for called, args in self.calls if called == name]

    def attributes(self, name: str, handle: int) -> dict[int, tuple[Any, int]]:
        """Return the attributes of a thing, each with its value and its bytes."""
        return {
            args[1]: (args[2].value, args[3])
            for args in self.of(f"{name}SetAttribute")
            if args[0] == handle
        }


def _plain(argument: Any) -> Any:
    """Return what `byref` refers to, and a handle's or a size's value."""
    if hasattr(argument, "_obj"):
        return argument._obj
    if isinstance(argument, ctypes.c_void_p | ctypes._SimpleCData):
        return argument.value
    return argument


@pytest.fixture
def library(
    monkeypatch: pytest.MonkeyPatch, little_to_collect: None
) -> Iterator[Library]:
    library = Library()
    monkeypatch.setattr(cublaslt, "_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: HANDLE)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield library
    # What tests have made is destroyed while the stub is in place.
    gc.collect()


def tensors(
    rows: int = 3, outputs: int = 8, inputs: int = 16, dtype: torch.dtype = torch.half
) -> SimpleNamespace:
    return SimpleNamespace(
        x=torch.zeros(rows, inputs, dtype=dtype),
        weight=torch.zeros(outputs, inputs, dtype=dtype),
        bias=torch.zeros(outputs, dtype=dtype),
        out=torch.zeros(rows, outputs, dtype=dtype),
    )


def prepare(
    problems: Problems, t: SimpleNamespace, layer: Layer
) -> Callable[[Layer], None]:
    return problems.prepare(t.x, layer, t.out)
