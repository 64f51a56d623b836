# SPDX-License-Identifier: Apache-2.0
"""An MLP's first layer with its activation: which it can be, how it is built, and what
bounds its values."""

import re
from pathlib import Path

import pytest
import torch
from _activating_gemm import BF16, TOWERS, act_of
from _turning_gemm import HAS_RUNTIME, make_layer

from cases import relative_error
from vllm_flashinfer_vit.blocks.act_bound import factors_of
from vllm_flashinfer_vit.gemms import activating_gemm, epilogue_gemm
from vllm_flashinfer_vit.gemms.activating_gemm import TILE, Act, build, compiled, fits
from vllm_flashinfer_vit.gemms.epilogue_gemm import FP8, Kernel, Layer, project
from vllm_flashinfer_vit.kernels.act_quantize_ref import act_ref
from vllm_flashinfer_vit.kernels.formats import E4M3_MAX, ROUNDED
from vllm_flashinfer_vit.kernels.row_scales_ref import quantize_rows_ref

SIGLIP, GATED = TOWERS[1], TOWERS[4]
GELUS = ["quick_gelu", "tanh_gelu", "gelu"]
# Small ones, with padding where vLLM would pad.
SMALL = [
    ("quick_gelu", 64, 128, 128, 128),
    ("tanh_gelu", 64, 44, 48, 128),
    ("gelu", 64, 96, 96, 96),
    ("swiglu", 64, 88, 96, 48),
]


def layer_of(tower, kind="tokens", has_bias=True):
    """Return a random layer of a tower, with padding of zeros."""
    _, inputs, outputs, padded, _ = tower
    weight = torch.zeros(padded, inputs)
    weight[:outputs] = torch.randn(outputs, inputs)
    bias = torch.randn(outputs).to(BF16) if has_bias else None
    return make_layer(kind, weight.to(BF16), bias, 16)


@pytest.mark.parametrize(
    ("tower", "width", "written"),
    [
        (TOWERS[0], 5120, 5120),
        # The layer's padding is written, the second layer's is not.
        (TOWERS[1], 4304, 4304),
        (TOWERS[3], 2152, 2160),
        # Of SwiGLU, whole groups of eight.
        (TOWERS[4], 3420, 3424),
        (TOWERS[5], 4096, 4096),
    ],
    ids=str,
)
def test_what_is_written(tower, width, written):
    act = act_of(tower)
    assert act.quantizes and act.width == width
    assert act.is_gated is (tower[0] == "swiglu")
    out = torch.empty(3, act.columns, dtype=FP8)
    found = act.written(out, tower[3])
    assert found.shape == (3, written) and found.data_ptr() == out.data_ptr()
    if act.is_gated:
        narrow = act_of(tower, BF16)
        assert not narrow.quantizes and narrow.width == width
        assert narrow.written(out[:, : narrow.columns], tower[3]).shape == found.shape


@pytest.mark.parametrize("tower", TOWERS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_towers_that_fit(tower, dtype, has_bias):
    _, inputs, outputs, padded, _ = tower
    bias = torch.empty(outputs, dtype=dtype) if has_bias else None
    weight = torch.empty(padded, inputs, dtype=FP8)
    layer = Layer(weight, bias, torch.ones(1), torch.ones(padded))
    assert fits(layer, act_of(tower), dtype)
    # SwiGLU alone has 16 bits to write.
    is_gated = tower[0] == "swiglu"
    assert fits(layer, act_of(tower, dtype), dtype) is is_gated


@pytest.mark.parametrize("dtype", [FP8, BF16], ids=str)
@pytest.mark.parametrize("tower", [SIGLIP, GATED], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer._replace(weight=layer.weight.to(BF16)),
        lambda layer: layer._replace(weight=layer.weight.to(torch.float8_e5m2)),
        # Half a vector at each row's end.
        lambda layer: layer._replace(weight=layer.weight[:, :1144]),
        lambda layer: layer._replace(bias=layer.bias.half()),
        lambda layer: layer._replace(bias=layer.bias[1:]),
        lambda layer: layer._replace(bias=layer.bias[0].repeat(len(layer.bias) + 8)),
        lambda layer: layer._replace(row_scales=None),
        lambda layer: layer._replace(col_scales=None),
    ],
    ids=["16 bits", "e5m2", "inputs", "fp16", "short", "long", "no rows", "no columns"],
)
def test_layers_that_do_not_fit(tower, dtype, change):
    act = act_of(tower, dtype)
    layer = layer_of(tower)
    assert fits(layer, act, BF16) is (act.is_gated or dtype == FP8)
    assert not fits(change(layer), act, BF16)
    assert not fits(layer, act, torch.float16)
    wide = layer._replace(bias=layer.bias.float())
    assert not fits(wide, act, torch.float32)


@pytest.mark.parametrize(
    ("tower", "columns", "expected"),
    [
        (SIGLIP, 4304, True),
        (SIGLIP, 4320, True),
        # No whole vectors, and fewer than the layer's outputs.
        (SIGLIP, 4312, False),
        (SIGLIP, 4288, False),
        (GATED, 3424, True),
        (GATED, 3432, False),
        (GATED, 3408, False),
    ],
)
def test_which_buffers_fit(tower, columns, expected):
    layer = Layer(torch.empty(tower[3], 64, dtype=FP8), None, *torch.ones(2, 1))
    act = act_of(tower)._replace(columns=columns)
    assert fits(layer, act, BF16) is expected


@pytest.mark.parametrize(
    ("outputs", "padded", "expected"),
    [
        (6840, 6848, True),
        (6848, 6848, True),
        # The last tile would take rows after the weight's last.
        (6840, 6840, False),
        # A thread loads pairs of the bias.
        (6838, 6848, False),
        (6844, 6848, True),
        (6844, 6852, False),
    ],
)
def test_all_that_a_gated_tile_takes_exists(outputs, padded, expected):
    layer = Layer(torch.empty(padded, 64, dtype=FP8), None, *torch.ones(2, 1))
    for act in (Act("swiglu", outputs, 3456, FP8), Act("swiglu", outputs, 3424, BF16)):
        assert fits(layer, act, BF16) is expected


def shift(values):
    return values.roll(1, 0)


def clip(values):
    """Cut off what is beyond half of the range that scales leave."""
    return values.clamp(max=values.amax(1, keepdim=True) / 2)


@pytest.mark.parametrize("kind", ["tensor", "tokens", "rows"])
@pytest.mark.parametrize(
    ("tower", "dtype"), [*((tower, FP8) for tower in SMALL), (SMALL[3], BF16)], ids=str
)
@pytest.mark.parametrize(
    "change", [torch.clone, torch.neg, shift, clip, lambda x: 1.3 * x, torch.zeros_like]
)
def test_wrong_results_are_refused(monkeypatch, kind, tower, dtype, change):
    def stand_in(kernel, x, out, like, act):
        def launch(layer, out_scales):
            values = act_ref(project(x, layer), act.width, None, act.activation)
            values = kernel(values)
            if out_scales is not None:
                values = (values / out_scales[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
            assert (out_scales is None) is not act.quantizes
            out[:, : act.width] = values.to(out.dtype)

        return launch

    monkeypatch.setattr(activating_gemm, "prepare", stand_in)
    monkeypatch.setattr(activating_gemm, "compiled", lambda *args: change)
    for has_bias in (True, False):
        torch.manual_seed(0)
        layer = layer_of(tower, kind, has_bias)
        assert fits(layer, act_of(tower, dtype), BF16)
        wrong = None if change is torch.clone else "its results are wrong"
        assert build(layer, act_of(tower, dtype)) == wrong


@pytest.mark.parametrize("tower", [SMALL[1], SMALL[3]], ids=str)
def test_what_a_kernel_is_handed(tower):
    """A call is of any layer that is alike, and holds no other."""
    handed = []
    kernel = Kernel(
        lambda *args: handed.append(args), lambda *args: args, ("a schedule",)
    )
    act = act_of(tower)
    first, second = layer_of(tower), layer_of(tower)
    x, out = torch.zeros(16, 64).to(FP8), torch.empty(16, act.columns, dtype=FP8)
    call, scales = activating_gemm.prepare(kernel, x, out, first, act), torch.ones(16)
    call(second, scales)
    ((rows, weight, written, c, given, schedule),) = handed
    assert rows is x and weight is second.weight
    assert c is None and schedule == "a schedule"
    if act.is_gated:
        assert written is None
        written, *given = given
    assert written.shape == (16, 48) and written.data_ptr() == out.data_ptr()
    expected = scales, second.bias, second.row_scales, second.col_scales
    assert all(one is right for one, right in zip(given, expected, strict=True))


@pytest.mark.skipif(not HAS_RUNTIME, reason="needs QuACK 0.6")
def test_what_quack_finds_kernels_by(kernel_keys, monkeypatch):
    """Its folder must not hand out what another source or activation compiled to."""
    acts = [Act(name, 96, 96, FP8) for name in GELUS]
    # Their halves differ, or what is written.
    acts += [
        Act("swiglu", outputs, 48, dtype)
        for outputs in (96, 92)
        for dtype in (FP8, BF16)
    ]
    tiles = TILE, TILE._replace(columns=128), TILE._replace(cluster=(1, 2))
    for now in ("a", "b"):
        monkeypatch.setattr(epilogue_gemm, "revision", lambda name, now=now: now)
        for act in acts:
            for tile in tiles:
                monkeypatch.setattr(activating_gemm, "TILE", tile)
                for has_bias in (True, False):
                    layer = layer_of(
                        (None, 64, act.outputs, 96, None), "rows", has_bias
                    )
                    with pytest.raises(RuntimeError, match="compiled"):
                        compiled(layer, act)
    assert len(kernel_keys) == len(set(kernel_keys)) == 2 * 7 * 3 * 2


KERNELS = ("activating_kernel", "turning_kernel", "quantizing_kernel")


def test_a_kernels_name_is_of_its_sources():
    assert len({epilogue_gemm.revision(kernel) for kernel in KERNELS}) == len(KERNELS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernels_name_is_of_all_that_it_imports_of_this_package(kernel, monkeypatch):
    """A constant that has changed must not find what the old one compiled to."""
    read = []

    def read_bytes(path):
        read.append(path)
        return path.read_text().encode()

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    epilogue_gemm.revision(kernel)
    package = Path(epilogue_gemm.__file__).parent.parent
    waiting, own = [package / "gemms" / f"{kernel}.py"], set()
    while waiting:
        source = waiting.pop()
        own.add(source)
        imported = re.findall(
            r"^from vllm_flashinfer_vit\.(\S+)", source.read_text(), re.M
        )
        waiting += {package / f"{name.replace('.', '/')}.py" for name in imported} - own
    assert own <= set(read)


def quantised(x):
    rows, scales = torch.empty_like(x, dtype=FP8), torch.empty(len(x), 1)
    quantize_rows_ref(x, rows, scales)
    return rows, scales.flatten()


def bounds_of(x, layer):
    """Return the largest value of each row that a scale of `factors_of` can hold."""
    factors = factors_of(layer)
    assert (factors.shape, factors.dtype) == ((2,), torch.float32)
    return E4M3_MAX * (factors[0] * x.norm(dim=1) + factors[1])


def random_rows(weight):
    return 3 * torch.randn(64, weight.shape[1])


def with_a_large_channel(weight):
    x = torch.randn(64, weight.shape[1])
    x[:, 7] *= 1000
    return x


def tiny(weight):
    """Return rows that are near the least scale, and that e4m3 rounds to nothing."""
    return torch.logspace(-9, -3, 64)[:, None] * torch.randn(64, weight.shape[1])


def along_the_weight(weight):
    """Return rows for which the inequality is nearly an equation."""
    return weight[:64].float() / 100


def zeros(weight):
    return torch.zeros(2, weight.shape[1])


@pytest.mark.parametrize(
    "draw", [random_rows, with_a_large_channel, tiny, along_the_weight, zeros]
)
@pytest.mark.parametrize("activation", GELUS)
@pytest.mark.parametrize("kind", ["tokens", "rows"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_no_value_is_beyond_its_bound(draw, activation, kind, has_bias):
    torch.manual_seed(0)
    for inputs, outputs in ((64, 192), (256, 160)):
        layer = layer_of((activation, inputs, outputs, outputs, None), kind, has_bias)
        x = draw(layer.weight)
        rows, row_scales = quantised(x)
        sums = project(rows, layer._replace(row_scales=row_scales)).double()
        values = act_ref(sums, outputs, None, activation)
        assert (values <= bounds_of(x, layer)[:, None]).all()
        # e4m3 holds what is below 0, too.
        assert (values >= -bounds_of(x, layer)[:, None]).all()


def test_values_that_are_all_rounded_up():
    """The norm is that of a row before it is rounded."""
    inputs = 512
    # 272.1 of 448 ends at 288.
    x = torch.full((1, inputs), 272.1)
    x[0, 0] = E4M3_MAX
    weight = torch.full((8, inputs), 1.125).to(FP8)
    layer = Layer(weight, None, None, torch.ones(1))
    rows, row_scales = quantised(x)
    assert rows[0, 1].item() == 288 and row_scales.item() == 1
    largest = project(rows, layer._replace(row_scales=row_scales)).max().item()
    assert weight[0].float().norm() * x.norm() < largest <= bounds_of(x, layer).item()


@pytest.mark.parametrize("kind", ["tokens", "rows"])
def test_bounds_of_random_rows_are_near(kind):
    """A scale that is 20 times too large costs e4m3 some of the smallest values."""
    torch.manual_seed(0)
    layer = layer_of(("gelu", 1152, 4304, 4304, None), kind)
    layer = layer._replace(col_scales=torch.ones_like(layer.col_scales))
    x = torch.randn(32, 1152)
    rows, row_scales = quantised(x)
    sums = project(rows, layer._replace(row_scales=row_scales))
    ratio = bounds_of(x, layer) / act_ref(sums, 4304, None, "gelu").amax(1)
    assert ratio.min() > 1 and ratio.max() < 20


def test_each_output_has_its_scale_in_the_bound():
    """The largest norm alone is not that of the largest outputs."""
    weight = torch.ones(2, 16)
    weight[1] = 2
    scales = torch.tensor([10.0, 1.0])
    layer = Layer(weight.to(FP8), torch.tensor([-3.0, 2.0]), None, scales)
    found = factors_of(layer) * E4M3_MAX
    torch.testing.assert_close(found, torch.tensor([40 * ROUNDED, 3.0]))


def test_a_layer_of_zeros_is_no_wrong_result(monkeypatch):
    """Its weights may be loaded later, and what was tried is not tried again."""

    def stand_in(kernel, x, out, like, act):
        def launch(layer, out_scales):
            values = act_ref(project(x, layer), act.width, None, act.activation)
            values = values * out_scales.reciprocal()[:, None]
            out[:, : act.width] = values.clamp(-E4M3_MAX, E4M3_MAX).to(FP8)

        return launch

    monkeypatch.setattr(activating_gemm, "prepare", stand_in)
    monkeypatch.setattr(activating_gemm, "compiled", lambda *args: None)
    layer = layer_of(SMALL[0], has_bias=False)
    layer = layer._replace(weight=torch.zeros_like(layer.weight))
    assert build(layer, act_of(SMALL[0])) is None


@pytest.mark.parametrize("outlier", [1, 20], ids=["weights", "weights_20x"])
@pytest.mark.parametrize("channels", [1, 30, 300], ids=lambda x: f"channels_{x}x")
@pytest.mark.parametrize("activation", GELUS)
def test_the_bound_costs_little_precision(activation, channels, outlier):
    """As exact as each row's own scale, also with few large channels and weights."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(64, 288, generator=random)
    x[:, :4] *= channels
    weight = torch.randn(1076, 288, generator=random)
    weight.flatten()[::9973] *= outlier
    scale = weight.abs().max()[None] / E4M3_MAX
    bias = 0.1 * torch.randn(1076, generator=random)
    layer = Layer((weight / scale).to(FP8), bias, torch.ones(1), scale / 288**0.5)
    values = act_ref(project(x, layer), 1076, None, activation)
    slope, offset = factors_of(layer)
    bound = x.norm(dim=1, keepdim=True) * slope + offset
    own = values.abs().amax(1, keepdim=True) / E4M3_MAX
    assert (bound >= own).all()
    errors = [
        relative_error((values / by).to(FP8).float() * by, values)
        for by in (bound, own)
    ]
    assert errors[1] < 0.03
    assert errors[0] <= 1.15 * errors[1]
