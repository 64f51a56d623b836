# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the kernels' tests."""

import contextlib
import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from _cudnn_graph import Graph

from vllm_flashinfer_vit.kernels import cudnn, cudnn_fp8
from vllm_flashinfer_vit.kernels._cudnn import PlanCache


@pytest.fixture(scope="module")
def little_to_collect() -> None:
    """Leave all there is out of the collections that a module's tests ask for.

    With the towers of other modules each would take seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def kernel_keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What QuACK would find kernels by; each compilation raises "compiled"."""
    from quack.gemm_runtime import host

    keys: list[str] = []

    def note(*args: object, **kwargs: object) -> None:
        keys.append(repr((args, kwargs)))
        raise RuntimeError("compiled")

    monkeypatch.setenv("QUACK_ARCH", "sm_90")
    monkeypatch.setattr(host, "_compile_gemm_epi", note)
    return keys


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> PlanCache:
    """Replace the process's plans by those of a test alone."""
    found = PlanCache()
    for kernel in (cudnn, cudnn_fp8):
        monkeypatch.setattr(kernel, "PLANS", found)
    return found


@pytest.fixture
def flashinfer(
    monkeypatch: pytest.MonkeyPatch, plans: PlanCache
) -> Iterator[SimpleNamespace]:
    """Replace the cuDNN of FlashInfer's prefill module; skips where that is missing."""
    try:
        from flashinfer.cudnn import prefill
    except Exception as error:
        pytest.skip(f"this FlashInfer does not load: {type(error).__name__}: {error}")
    if not prefill.CUDNN_AVAILABLE:
        pytest.skip("cudnn-frontend does not load")
    graphs = []

    @contextlib.contextmanager
    def graph(handle):
        graphs.append(Graph())
        yield graphs[-1], []

    monkeypatch.setattr(prefill.cudnn, "graph", graph)
    monkeypatch.setattr(prefill, "_create_cudnn_handle", lambda stream: "handle")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    load = cudnn._backend
    load.cache_clear()
    yield SimpleNamespace(prefill=prefill, graphs=graphs, monkeypatch=monkeypatch)
    load.cache_clear()
