# SPDX-License-Identifier: Apache-2.0
"""GEMMs that QuACK runs: who gets it, and what it leaves as it was.

All but the last tests are of MLPs alone.

A plain stand-in computes here what QuACK's kernel computes on a Hopper GPU.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import _blocks
import pytest
import torch
from _blocks import (
    GRIDS,
    QUACK_QKV,
    QUANTIZED,
    SIZE,
    SPECS,
    allow_lora,
    blocks,
    checkpoint,
    load,
    mlp,
    outputs,
)
from _models import noise
from _towers import DEVICE, HAS_GPU, cpu_only
from torch import nn
from torch.nn.functional import gelu, linear, silu

from cases import relative_error
from vllm_flashinfer_vit import plugin
from vllm_flashinfer_vit.blocks import compiled, methods, quack_linear
from vllm_flashinfer_vit.blocks.quack_linear import QUICK_GELU, SWIGLU, TANH_GELU
from vllm_flashinfer_vit.models import qwen2_5_vl
from vllm_flashinfer_vit.settings import Settings
from vllm_flashinfer_vit.towers import tower
from vllm_flashinfer_vit.towers.tower import Tower

pytestmark = pytest.mark.usefixtures("plain_kernel")

NAMES = {patch.name for patch in plugin.all_patches()}
without = functools.partial(_blocks.without, *QUACK_QKV.values())
LINEAR_ACT = quack_linear.linear_act
GET_PROPERTIES = torch.cuda.get_device_properties
ROWS = sum(t * h * w for t, h, w in GRIDS)
ACTIVATIONS = {"qwen2_vl": QUICK_GELU, "qwen2_5_vl": SWIGLU, "qwen3_vl": TANH_GELU}
FIRST = {"qwen2_vl": "fc1", "qwen2_5_vl": "gate_up_proj", "qwen3_vl": "linear_fc1"}
ACT = {"qwen2_vl": "act", "qwen2_5_vl": "act_fn", "qwen3_vl": "act_fn"}
# QuACK runs 16 bits only.
build = functools.partial(_blocks.build, dtype=torch.bfloat16)
# Two units of bf16 for one rounding less in each block.
TOLERANCE = 2 * torch.finfo(torch.bfloat16).eps


def rows_of(*shape: int) -> torch.Tensor:
    """Return noise in bf16, where towers are."""
    return noise(*shape).to(DEVICE, torch.bfloat16)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


FUNCTIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    SWIGLU: swiglu,
    TANH_GELU: lambda x: gelu(x, approximate="tanh"),
    None: lambda x: x,
}

Call = tuple[int, str | None, int]


def kernel_builds(activation: str | None) -> list[Call]:
    """Return the calls that build a layer's kernels."""
    return [(16, activation, 192), (16, activation, 160)]


@pytest.fixture(autouse=True)
def mlps_alone() -> Iterator[None]:
    """Leave QKV projections as they are."""
    with without():
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Pretend that this is an H200; collect each call's rows, activation and width."""
    seen: list[Call] = []

    def linear_act(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        width: int,
    ) -> torch.Tensor:
        seen.append((len(x), activation, width))
        bias = None if bias is None else bias.float()
        sums = linear(x.float(), weight.float(), bias)
        return FUNCTIONS[activation](sums).to(x.dtype)

    monkeypatch.setattr(methods, "has_quack", lambda: True)
    monkeypatch.setattr(quack_linear, "can_read", lambda x: True)
    monkeypatch.setattr(quack_linear, "linear_act", linear_act)
    set_capturing(monkeypatch, False)
    set_multiprocessors(monkeypatch, 132)
    return seen


def set_capturing(monkeypatch: pytest.MonkeyPatch, value: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: value)


def set_multiprocessors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    real = GET_PROPERTIES(0) if HAS_GPU else None
    names = [name for name in dir(real) if not name.startswith("_")]
    values = {name: getattr(real, name) for name in names}
    properties = SimpleNamespace(**{**values, "multi_processor_count": count})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the batch of `outputs` be a large one."""
    monkeypatch.setattr(quack_linear, "MIN_ROWS", ROWS)


@pytest.fixture
def compiled_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that vLLM's compiled ops are there; no test with it runs one."""
    monkeypatch.setattr(compiled, "has_compiled", lambda *names: True)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged of kernels that cannot be built."""
    lines: list[str] = []
    logger = SimpleNamespace(
        warning_once=lambda message, *values: lines.append(message % values)
    )
    monkeypatch.setattr(quack_linear, "logger", logger)
    return lines


def first_of(family: str, built: Any) -> Any:
    return getattr(built, FIRST[family])


def is_fused(family: str, built: Any) -> bool:
    """Whether an MLP is QuACK's as a whole, or not at all."""
    method = first_of(family, built).quant_method
    taken = type(method) is quack_linear.QuackLinearMethod
    if taken:
        assert type(getattr(built, ACT[family])) is nn.Identity
        assert method.activation == ACTIVATIONS[family]
    return taken


def build_mlp(
    family: str,
    context: Tower,
    *,
    act: Any = None,
    size: int = 128,
    bias: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    quant_config: Any = None,
) -> Any:
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VisionMLP
    from vllm.model_executor.models.qwen2_vl import Qwen2VisionMLP
    from vllm.model_executor.models.qwen3_vl import Qwen3_VisionMLP
    from vllm.utils.torch_utils import set_default_torch_dtype

    options = {} if act is None else {"act_layer": lambda: act}
    with context.running(), set_default_torch_dtype(dtype), torch.device(DEVICE):
        if family == "qwen2_vl":
            return Qwen2VisionMLP(64, size, quant_config=quant_config, **options)
        cls, default = {
            "qwen2_5_vl": (Qwen2_5_VisionMLP, SiluAndMul),
            "qwen3_vl": (Qwen3_VisionMLP, lambda: nn.GELU(approximate="tanh")),
        }[family]
        act = default() if act is None else act
        return cls(64, size, bias=bias, act_fn=act, quant_config=quant_config)


def fill_and_finish(built: Any, context: Tower) -> None:
    for parameter in built.parameters():
        parameter.data.copy_(noise(*parameter.shape) / 8)
    for layer in built.children():
        if hasattr(layer, "quant_method"):
            with context.running():
                layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("others", [(), ("fused-gelu", "fused-ops", "aligned-mlp")])
@pytest.mark.parametrize("family", SPECS)
def test_large_batches(
    family: str, others: tuple[str, ...], calls: list[Call], large: None
) -> None:
    # Without padding, rows must be of whole vectors.
    size = {"intermediate_size": SIZE + 4 if others else SIZE}
    vision = {} if family == "qwen2_vl" else size
    names = [f"{family}-{other}" for other in others]
    names = [name for name in names if name in NAMES]
    with without(*names):
        fused = build(family, **vision)
        assert all(is_fused(family, block.mlp) for block in blocks(fused))
        depth = len(blocks(fused))
        # The kernels are built while weights are loaded, before any batch.
        assert calls == depth * kernel_builds(ACTIVATIONS[family])
        calls.clear()
        found = outputs(fused)
        assert calls == depth * [(ROWS, ACTIVATIONS[family], 160)]
    calls.clear()
    with without(*names, f"{family}-fused-mlp"):
        plain = build(family, **vision)
        assert not any(is_fused(family, block.mlp) for block in blocks(plain))
        expected = outputs(plain)
    assert not calls
    assert relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("family", SPECS)
def test_small_batches_keep_their_bits(family: str, calls: list[Call]) -> None:
    fused = build(family)
    assert all(is_fused(family, block.mlp) for block in blocks(fused))
    calls.clear()
    found = outputs(fused)
    assert not calls
    with without(f"{family}-fused-mlp"):
        assert torch.equal(found, outputs(build(family)))


@pytest.mark.parametrize("family", SPECS)
def test_rows_decide(
    family: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = build(family)
    block = build_mlp(family, context)
    fill_and_finish(block, context)
    calls.clear()
    x = rows_of(4096, 1, 64)

    def check(least: int) -> None:
        some = x[:least]
        with context.running():
            small, many = block(some[:-1]), block(some)
        assert calls == [(least, ACTIVATIONS[family], 160)]
        assert (many.shape, many.dtype) == (some.shape, torch.bfloat16)
        assert relative_error(many[:-1], small) < TOLERANCE
        calls.clear()

    check(4096)
    set_capturing(monkeypatch, True)
    check(1024)


def test_a_capture_is_looked_for_where_it_decides(
    calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = build("qwen2_vl")
    block = build_mlp("qwen2_vl", context)
    fill_and_finish(block, context)
    asked: list[int] = []

    def is_capturing() -> bool:
        asked.append(rows)
        return False

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)
    with context.running():
        for rows in (1023, 1024, 4095, 4096):
            block(rows_of(rows, 64))
        assert asked == [1024, 4095]
        # Without CUDA there is nothing to ask.
        monkeypatch.setattr(quack_linear, "can_read", lambda x: False)
        block(rows_of(1024, 64))
    assert len(asked) == 2


@pytest.mark.parametrize("family", SPECS)
def test_rows_choose_the_tile(
    family: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_multiprocessors(monkeypatch, 32)
    context = build(family)
    # One tile of 192 columns, [gate; up] together, or two of 160.
    block = build_mlp(family, context, size=96 if family == "qwen2_5_vl" else 192)
    fill_and_finish(block, context)
    # It is read once.
    set_multiprocessors(monkeypatch, 1)
    set_capturing(monkeypatch, True)
    calls.clear()
    with context.running():
        for rows in (2048, 4096):
            block(rows_of(rows, 64))
    activation = ACTIVATIONS[family]
    assert calls == [(2048, activation, 160), (4096, activation, 192)]


@pytest.mark.parametrize("family", SPECS)
def test_what_the_kernel_cannot_read(
    family: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = build(family)
    built = build_mlp(family, context)
    fill_and_finish(built, context)
    calls.clear()
    monkeypatch.setattr(quack_linear, "can_read", lambda x: x.stride(0) % 8 == 0)
    wide = rows_of(4096, 68)
    with context.running():
        found = built(wide[:, :64])
        assert not calls
        expected = built(wide[:, :64].contiguous())
    assert len(calls) == 1
    assert relative_error(found, expected) < TOLERANCE


# Qwen2-VL's layers have one always.
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_without_bias(family: str, calls: list[Call]) -> None:
    context = build(family)
    built = build_mlp(family, context, bias=False)
    assert is_fused(family, built)
    fill_and_finish(built, context)
    x = rows_of(4096, 64)
    with context.running():
        assert relative_error(built(x)[:-1], built(x[:-1])) < TOLERANCE
    assert calls[-1] == (4096, ACTIVATIONS[family], 160)


@pytest.mark.parametrize("family", SPECS)
class TestConditions:
    def test_backend(self, family: str, calls: list[Call]) -> None:
        assert is_fused(family, mlp(build(family)))
        assert not is_fused(family, mlp(build(family, "TORCH_SDPA")))

    def test_lora(self, family: str, calls: list[Call]) -> None:
        context = build(family)
        for is_wanted in (False, True):
            allow_lora(context, is_wanted)
            assert is_fused(family, build_mlp(family, context)) is not is_wanted

    def test_quantization(self, family: str, calls: list[Call]) -> None:
        context = build(family)
        assert is_fused(family, build_mlp(family, context))
        other = build_mlp(family, context, quant_config=QUANTIZED)
        assert not is_fused(family, other)

    def test_batch_invariance(
        self, family: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        context = build(family)
        assert is_fused(family, build_mlp(family, context))
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        assert not is_fused(family, build_mlp(family, context))

    def test_dtype(self, family: str, calls: list[Call]) -> None:
        context = build(family)
        for dtype, fits in (
            (torch.bfloat16, True),
            (torch.float16, True),
            (torch.float32, False),
        ):
            built = build_mlp(family, context, dtype=dtype)
            assert is_fused(family, built) is fits

    def test_whole_vectors(self, family: str, calls: list[Call]) -> None:
        with without("qwen2_5_vl-aligned-mlp", "qwen3_vl-aligned-mlp"):
            context = build(family, **({} if family == "qwen2_vl" else FITTING))
            # 4 * 12 is a multiple of 8 for [gate; up] alone, and not for each.
            for size, fits in ((120, True), (124, False)):
                built = build_mlp(family, context, size=size)
                assert is_fused(family, built) is fits

    def test_activation(self, family: str, calls: list[Call]) -> None:
        context = build(family)
        gelu = f"{family}-fused-gelu"
        with without(f"{family}-fused-mlp", *[gelu] * (gelu in NAMES)):
            stock = type(getattr(mlp(build(family)), ACT[family]))

        class Other(stock):  # type: ignore[misc,valid-type]
            forward_native = nn.Identity.forward

        with context.running():
            others = [Other(), nn.GELU(), nn.SiLU()]
        build(family)
        assert is_fused(family, build_mlp(family, context))
        for act in others:
            built = build_mlp(family, context, act=act)
            assert not is_fused(family, built)
            assert getattr(built, ACT[family]) is act

    def test_machine(
        self, family: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        context = build(family)
        assert is_fused(family, build_mlp(family, context))
        monkeypatch.setattr(methods, "has_quack", lambda: False)
        assert not is_fused(family, build_mlp(family, context))


FITTING = {"intermediate_size": 48}


@pytest.mark.parametrize(
    ("is_cuda", "capability", "package", "has_quack"),
    [
        (True, 90, "quack", True),
        (False, 90, "quack", False),
        (True, 80, "quack", False),
        (True, 100, "quack", False),
        (True, 90, "", False),
    ],
)
def test_has_quack(
    is_cuda: bool,
    capability: int,
    package: str,
    has_quack: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import platforms

    platform = SimpleNamespace(
        is_cuda=lambda: is_cuda,
        is_device_capability=lambda wanted: wanted == capability,
    )
    monkeypatch.setattr(platforms, "current_platform", platform)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == package or None
    )
    assert methods.has_quack() is has_quack


@cpu_only
def test_not_on_this_machine() -> None:
    assert not is_fused("qwen3_vl", mlp(build("qwen3_vl")))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect what is said once in a process, every time."""
    lines: list[str] = []
    logger = SimpleNamespace(
        info_once=lambda message, *values: lines.append(message % values)
    )
    monkeypatch.setattr(methods, "logger", logger)
    return lines


def test_it_is_said_once(calls: list[Call], said: list[str]) -> None:
    build("qwen2_vl")
    lines = [line for line in said if "QuACK" in line]
    assert lines[0].endswith("from 4096 rows on, in CUDA graphs from 1024.")
    # The log drops what was said before.
    assert len(lines) == 2 and len(set(lines)) == 1


@pytest.mark.parametrize("reason", ["compiler", "import", "results"])
@pytest.mark.parametrize("family", SPECS)
def test_a_kernel_that_cannot_be_built(
    family: str,
    reason: str,
    calls: list[Call],
    large: None,
    warned: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if reason == "compiler":

        def linear_act(*args: Any) -> torch.Tensor:
            raise RuntimeError("no ptxas here")

        monkeypatch.setattr(quack_linear, "linear_act", linear_act)
        message = "RuntimeError: no ptxas here"
    elif reason == "results":
        right = quack_linear.linear_act

        # Each kernel is checked.
        def wrong(*args: Any) -> torch.Tensor:
            return right(*args) if args[-1] == 192 else -right(*args)

        monkeypatch.setattr(quack_linear, "linear_act", wrong)
        message = "its results differ"
    else:
        monkeypatch.setattr(quack_linear, "linear_act", LINEAR_ACT)
        monkeypatch.setitem(sys.modules, "quack.gemm_interface", None)
        quack_linear._gemm_interface.cache_clear()
        message = "quack.gemm_interface"
    served = build(family)
    assert all(is_fused(family, block.mlp) for block in blocks(served))
    # The log drops what was said before.
    assert len(warned) == len(blocks(served)) and len(set(warned)) == 1
    assert message in warned[0]
    assert ACTIVATIONS[family] in warned[0]
    found = outputs(served)
    with without(f"{family}-fused-mlp"):
        assert torch.equal(found, outputs(build(family)))


class TestReload:
    def test_padded_weights(self, calls: list[Call], large: None) -> None:
        changed, fresh = build("qwen2_5_vl", seed=0), build("qwen2_5_vl", seed=1)
        layer = mlp(changed).gate_up_proj
        padded = layer.weight.data
        assert padded.shape == (128, 64)
        before = [p.data_ptr() for p in changed.visual.parameters()]
        load(changed, checkpoint(seed=1))
        calls.clear()
        assert torch.equal(outputs(changed), outputs(fresh))
        assert len(calls) == 4
        assert [p.data_ptr() for p in changed.visual.parameters()] == before

    def test_by_layers(
        self, calls: list[Call], large: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.model_executor.model_loader import reload

        fill: Callable[..., None] = tower.fill_with_random_weights

        def record_and_fill(visual: nn.Module, seed: int) -> None:
            reload.record_metadata_for_reloading(visual)
            fill(visual, seed)

        with monkeypatch.context() as context:
            context.setattr(tower, "fill_with_random_weights", record_and_fill)
            changed = build("qwen2_5_vl")
        built = len(calls)
        weights = [(n, w.bfloat16()) for n, w in checkpoint(seed=1)]
        with changed.running():
            reload.initialize_layerwise_reload(changed.visual)
            changed.visual.load_weights(weights)  # type: ignore[operator]
            reload.finalize_layerwise_reload(
                changed.visual, changed.vllm_config.model_config
            )
        # The kernel is kept.
        assert len(calls) == built
        assert torch.equal(outputs(changed), outputs(build("qwen2_5_vl", seed=1)))
        assert calls[-1] == (ROWS, SWIGLU, 160)

    def test_padding_is_found(self, calls: list[Call]) -> None:
        layer = mlp(build("qwen2_5_vl")).gate_up_proj
        method = quack_linear.aligned_method(layer)
        assert method is layer.quant_method.inner
        with method.in_stock_size(layer.weight):
            assert layer.weight.shape == (2 * SIZE, 64)
        assert layer.weight.shape == (128, 64)
        down = mlp(build("qwen2_5_vl")).down_proj
        assert quack_linear.aligned_method(down) is down.quant_method
        assert quack_linear.aligned_method(nn.Linear(1, 1)) is None


class TestSmallBatchesActivation:
    """It is inside the layer now, where other patches must find it."""

    def test_quick_gelu(self, calls: list[Call], compiled_ops: None) -> None:
        built = build_mlp("qwen2_vl", build("qwen2_vl"))
        act = built.fc1.quant_method.act
        assert act._forward_method == act.forward_cuda

    def test_silu(self, calls: list[Call], compiled_ops: None) -> None:
        served = build("qwen2_5_vl")
        act = mlp(served).gate_up_proj.quant_method.act
        before = act._forward_method
        assert before != act.forward_cuda
        with qwen2_5_vl.fused_ops(served.visual):
            assert act._forward_method == act.forward_cuda
        assert act._forward_method == before


@pytest.mark.parametrize("family", SPECS)
def test_compiled_blocks_stay_as_they_are(family: str, calls: list[Call]) -> None:
    context = build(family)
    built = build_mlp(family, context)
    fill_and_finish(built, context)
    assert is_fused(family, built)
    calls.clear()
    torch.compiler.reset()
    compiled = torch.compile(built, backend="eager", fullgraph=True)
    x = rows_of(4096, 64)
    with context.running():
        found = compiled(x)
        assert not calls
        # On a GPU, cuBLAS has other kernels for other numbers of rows.
        limit = 1e-2 if x.is_cuda else 0.0
        assert relative_error(found[:-1], built(x[:-1])) <= limit
        built(x)
    assert len(calls) == 1


@pytest.fixture
def qkv_patches(mlps_alone: None) -> Iterator[None]:
    """Have QuACK run QKV projections, and not MLPs."""
    from vllm.model_executor.models import qwen3_vl  # noqa: F401

    with _blocks.without(*(name for name in NAMES if "fused-mlp" in name)):
        # Before a tower is built: its first attention layer's `__init__` runs then.
        plugin.apply_model_patches(Settings.from_env())
        yield


def quack_qkvs(of: Tower) -> list[bool]:
    """Whether each block's QKV projection is QuACK's."""
    methods = [block.attn.qkv.quant_method for block in blocks(of)]
    taken = [type(method) is quack_linear.QuackLinearMethod for method in methods]
    for method in (m for m, is_taken in zip(methods, taken, strict=True) if is_taken):
        assert type(method.act) is nn.Identity
        assert method.activation is None
    return taken


def build_attention(
    family: str,
    context: Tower,
    *,
    width: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    quant_config: Any = None,
) -> Any:
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VisionAttention
    from vllm.model_executor.models.qwen2_vl import Qwen2VisionAttention
    from vllm.utils.torch_utils import set_default_torch_dtype

    is_qwen2 = family == "qwen2_vl"
    cls = Qwen2VisionAttention if is_qwen2 else Qwen2_5_VisionAttention
    with context.running(), set_default_torch_dtype(dtype), torch.device(DEVICE):
        return cls(64, 2, width, quant_config=quant_config)


@pytest.mark.usefixtures("qkv_patches")
@pytest.mark.parametrize("family", SPECS)
class TestQkv:
    @staticmethod
    def is_taken(attention: Any) -> bool:
        return type(attention.qkv.quant_method) is quack_linear.QuackLinearMethod

    def test_large_batches(self, family: str, calls: list[Call], large: None) -> None:
        fused = build(family)
        assert all(quack_qkvs(fused))
        depth = len(blocks(fused))
        assert calls == depth * kernel_builds(None)
        calls.clear()
        found = outputs(fused)
        assert calls == depth * [(ROWS, None, 160)]
        calls.clear()
        with without():
            plain = build(family)
            assert not any(quack_qkvs(plain))
        assert relative_error(found, outputs(plain)) < TOLERANCE
        assert all(activation for _, activation, _ in calls)

    def test_rows_decide(
        self, family: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        context = build(family)
        qkv = build_attention(family, context).qkv
        fill_and_finish(nn.ModuleList([qkv]), context)
        calls.clear()
        x = rows_of(4096, 64)
        with context.running():
            for is_capturing, least in ((False, 4096), (True, 2048)):
                set_capturing(monkeypatch, is_capturing)
                qkv(x[: least - 1])
                qkv(x[:least])
        assert calls == [(4096, None, 160), (2048, None, 160)]

    def test_beside_the_mlps(self, family: str, calls: list[Call], large: None) -> None:
        with _blocks.without():
            plugin.apply_model_patches(Settings.from_env())
            fused = build(family)
            calls.clear()
            outputs(fused)
        each = [(ROWS, None, 160), (ROWS, ACTIVATIONS[family], 160)]
        assert calls == len(blocks(fused)) * each

    def test_small_batches_keep_their_bits(
        self, family: str, calls: list[Call]
    ) -> None:
        fused = build(family)
        assert all(quack_qkvs(fused))
        calls.clear()
        found = outputs(fused)
        assert not calls
        with without():
            assert torch.equal(found, outputs(build(family)))

    def test_the_first_tower_of_a_process(self, family: str, calls: list[Call]) -> None:
        with _blocks.without():
            # Patches are applied while its first attention layer is being built.
            first, *others = quack_qkvs(build(family))
        assert not first
        assert others and all(others)

    def test_conditions(
        self, family: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        context = build(family)
        assert not any(quack_qkvs(build(family, "TORCH_SDPA")))
        assert self.is_taken(build_attention(family, context))
        assert not self.is_taken(
            build_attention(family, context, quant_config=QUANTIZED)
        )
        for dtype, fits in ((torch.float16, True), (torch.float32, False)):
            built = build_attention(family, context, dtype=dtype)
            assert self.is_taken(built) is fits
        # 3 * 24 is a multiple of 8, 3 * 20 is not.
        for width, fits in ((24, True), (20, False)):
            built = build_attention(family, context, width=width)
            assert self.is_taken(built) is fits
        for is_wanted in (True, False):
            allow_lora(context, is_wanted)
            assert self.is_taken(build_attention(family, context)) is not is_wanted
        with monkeypatch.context() as patched:
            patched.setenv("VLLM_BATCH_INVARIANT", "1")
            assert not self.is_taken(build_attention(family, context))
        monkeypatch.setattr(methods, "has_quack", lambda: False)
        assert not self.is_taken(build_attention(family, context))

    def test_what_is_said(
        self, family: str, calls: list[Call], said: list[str]
    ) -> None:
        build(family)
        lines = {line for line in said if "QuACK" in line}
        assert len(lines) == 1
        line = lines.pop()
        assert "the QKV projection" in line
        assert line.endswith("from 4096 rows on, in CUDA graphs from 2048.")

    def test_a_kernel_that_cannot_be_built(
        self,
        family: str,
        calls: list[Call],
        large: None,
        warned: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        right = quack_linear.linear_act
        monkeypatch.setattr(quack_linear, "linear_act", lambda *args: -right(*args))
        served = build(family)
        assert all(quack_qkvs(served))
        assert len(warned) == len(blocks(served)) and len(set(warned)) == 1
        assert "building a plain GEMM failed" in warned[0]
        found = outputs(served)
        with without(f"{family}-fused-mlp"):
            assert torch.equal(found, outputs(build(family)))

    def test_reload(self, family: str, calls: list[Call], large: None) -> None:
        changed, fresh = build(family, seed=0), build(family, seed=1)
        assert relative_error(outputs(changed), outputs(fresh)) > 0.1
        weights = {name: p.data for name, p in fresh.visual.named_parameters()}
        for name, parameter in changed.visual.named_parameters():
            parameter.data.copy_(weights[name])
        calls.clear()
        assert torch.equal(outputs(changed), outputs(fresh))
        assert len(calls) == 2 * len(blocks(changed))
