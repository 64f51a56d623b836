# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures: GPU tests skip without a GPU, unwritten memory shows as NaN."""

import functools
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch.utils._device import _device_constructors

# A busy machine is no defect.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")

# A package of vLLM's kernels compiles two programs in each process that imports it.
os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")

HAS_GPU = torch.cuda.is_available()

# Triton reads it at import; kernels then run in its interpreter on CPU tensors.
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    # Else each collection goes through a million objects of what was imported.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def vllms_methods_read_once() -> Iterator[None]:
    """Keep fingerprints: files of vLLM stay the same, and every tower asks for all."""
    from vllm_flashinfer_vit.patches import fingerprints

    read = fingerprints.fingerprint
    kept = functools.cache(read)

    def fingerprint(target: str) -> str:
        return kept(target) if target.startswith("vllm.") else read(target)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(fingerprints, "fingerprint", fingerprint)
        yield


@pytest.fixture(scope="session", autouse=True)
def language_replaced_once_a_kernel() -> Iterator[None]:
    """Let Triton's interpreter replace its language where a kernel begins.

    It does so again at each call of a function, though until the kernel ends there is
    nothing left to replace: looking for it takes a third of the time of such tests.
    """
    if HAS_GPU:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_lang

    def replace_once(fn: Callable[..., Any]) -> Any:
        seen = [lang for lang in (tl, tl.core) if lang in fn.__globals__.values()]
        # Of a kernel, the first of these, nothing is replaced yet.
        is_within = hasattr(tl.tensor, "__index__")
        if is_within and not any(tl.core.is_builtin(lang.load) for lang in seen):
            return interpreter._LangPatchScope()
        return replace(fn)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(interpreter, "_patch_lang", replace_once)
        yield


@pytest.fixture(scope="module")
def plain_kernel() -> Iterator[None]:
    """Let plain PyTorch attend on a GPU, too: a test of what is around the kernels
    then holds there as it does here, in fp32 and at any head dim."""
    from vllm_flashinfer_vit.settings import ENV_KERNEL

    with pytest.MonkeyPatch.context() as context:
        if HAS_GPU:
            context.setenv(ENV_KERNEL, "reference")
        yield


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the named models narrow: what a test looks at is not their width."""
    from vllm_flashinfer_vit.towers import spec

    sizes = {"hidden_size": 64, "num_heads": 4, "intermediate_size": 96}
    models = {
        name: (family, {**config, **sizes})
        for name, (family, config) in spec.NAMED_MODELS.items()
    }
    monkeypatch.setattr(spec, "NAMED_MODELS", models)


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The process's counters, all at 0."""
    from prometheus_client import CollectorRegistry

    from vllm_flashinfer_vit.engine import counting
    from vllm_flashinfer_vit.engine.metrics import Metrics

    made = Metrics(CollectorRegistry())
    monkeypatch.setattr(counting, "of_process", lambda: made)
    return made


@pytest.fixture
def nan_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` and its relatives return, so that a gap in a kernel's
    output is seen: NaN in floating tensors, the smallest value in integer ones.

    The fill is captured in CUDA graphs, so every replay starts from poison too.
    """

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            if tensor.dtype == torch.bool or tensor.is_complex():
                return tensor
            return tensor.fill_(torch.iinfo(tensor.dtype).min)

        return wrapper

    # PyTorch reads once which functions these are: not those that stand for them here,
    # or modules that are built on a GPU would be on the CPU from then on.
    _device_constructors()
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture
def exact_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter round to e4m3 as a GPU does.

    Its own conversion loses the carry of a mantissa that rounds up, and takes NaN and
    what is out of range for numbers.
    """
    if HAS_GPU:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(value: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.float8e4nv not in (source, target):
            return original(value, source, target, rounding)
        tensor = torch.from_numpy(value)
        if source == tl.float8e4nv:
            wide = {32: torch.float32, 16: torch.float16}[target.primitive_bitwidth]
            bits = {32: torch.int32, 16: torch.int16}[target.primitive_bitwidth]
            tensor = tensor.view(torch.float8_e4m3fn).to(wide).view(bits)
        else:
            tensor = tensor.float().clamp(-448, 448).to(torch.float8_e4m3fn)
            tensor = tensor.view(torch.uint8)
        return tensor.numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture
def exact_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter multiply matrices alike whatever the size of the tiles.

    NumPy's product of fp32 matrices sums in an order that depends on their shapes and
    on the CPU; summed in fp64 and rounded once, the order does not show.
    """
    if HAS_GPU:
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> TensorHandle:
        wide = TensorHandle(d.data.astype("float64"), tl.float64)
        out = original(self, a, b, wide, *options)
        return TensorHandle(out.data.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
