# SPDX-License-Identifier: Apache-2.0
"""Tables, figures and the files that they come from."""

import dataclasses

import pytest
from _benchmarks import ENVIRONMENT, make_row

import common
import table
import waterfall


def test_best_of_all_modes():
    rows = [
        make_row(provider="stock-flash_attn", mode="eager", samples_ms=[6.0]),
        make_row(provider="stock-flash_attn", mode="compiled_graph", samples_ms=[4.0]),
        make_row(provider="stock-flashinfer", mode="graph", samples_ms=[5.0]),
        make_row(provider="plugin", mode="eager", samples_ms=[9.0]),
        # Measured again: the newer row counts, though it is slower.
        make_row(provider="plugin", mode="graph", samples_ms=[1.0]),
        make_row(provider="plugin", mode="graph", samples_ms=[2.0]),
        make_row(case="mixed", provider="stock-flash_attn", samples_ms=[1.0]),
        make_row(case="mixed", provider="plugin", samples_ms=[2.0]),
        make_row(case="1x256", provider="plugin"),
    ]
    lines = table.best_table(rows).splitlines()
    model = rows[0]["model"]
    assert lines[2:] == [
        f"| {model} | 1x4096 | 4 | flash_attn compiled_graph | 2 | 2.00 |",
        f"| {model} | mixed | 1 | flash_attn graph | 2 | 0.50 |",
        f"| {model} | geometric mean |  |  |  | 1.00 |",
    ]
    rows.append(make_row(provider="plugin-fp8", samples_ms=[1.0]))
    lines = table.best_table(rows).splitlines()
    assert lines[2].endswith("| 2 | 2.00 | 1 | 4.00 |")
    assert lines[3].endswith("| 2 | 0.50 | - |  |")
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("_quantize_blocks_kernel", "quantizer"),
        ("_rope_kernel", "rotary"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16>", "rotary"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("_window_kernel", "attention"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT", "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "GEMM"),
        ("_sum_norm_kernel", "norm"),
        ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", "norm"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", "norm"),
        ("void at::native::reduce_kernel<512, 1, MeanOps<float>>", "norm"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16>", "activation"),
        ("at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)", "activation"),
        ("void at::native::CatArrayBatchedCopy_vectorized<...>", "copy"),
        ("vectorized_elementwise_kernel<4, CUDAFunctor_add<BFloat16>>", "addition"),
        ("BinaryFunctor<float, float, float, MulFunctor<float>>", waterfall.OTHER),
    ],
)
def test_kernels_are_told_apart(kernel, name):
    assert waterfall.class_of(kernel) == name


def test_class_times_are_sums():
    kernels = {"nvjet_a": 2.0, "_rope_kernel": 0.5, "nvjet_b": 1.0, "odd": 4.0}
    assert waterfall.class_times(kernels) == {
        "rotary": (0.5, 1),
        "GEMM": (3.0, 2),
        waterfall.OTHER: (4.0, 1),
    }


@pytest.fixture
def plot():
    pytest.importorskip("matplotlib")
    import plot

    return plot


@pytest.mark.parametrize("kind", ["encoder", "attention"])
def test_figure_from_a_csv(plot, tmp_path, kind):
    source, target = tmp_path / "rows.csv", tmp_path / "figures" / "a.svg"
    log = common.CsvLog(source)
    # 1x256 of the plugin is missing: a provider that cannot run leaves a gap.
    for provider, case in [
        ("stock-flash_attn", "1x256"),
        ("stock-flash_attn", "mixed"),
        ("plugin", "mixed"),
    ]:
        log.add(make_row(provider=provider, case=case))
    plot.draw(kind, source, target, None)
    svg = target.read_text()
    for text in ("stock-flash_attn", "plugin", "1x256", "mixed", "NVIDIA H200"):
        assert text in svg
    first = target.read_bytes()
    plot.draw(kind, source, target, ["graph"])
    assert target.read_bytes() == first
    with pytest.raises(ValueError, match="eager"):
        plot.draw(kind, source, target, ["eager"])


def test_equal_times_are_equal_speeds(plot):
    # 119.4 * 1.2507 / 1.2507 is above 119.4, and matplotlib refuses such an error bar.
    row = {"case": "a", "provider": "b", "tflops": "119.4"}
    row |= dict.fromkeys(("p20_ms", "p50_ms", "p80_ms"), "1.2507")
    (span,) = plot._speeds([row])
    assert span.low == span.middle == span.high == 119.4


def test_waterfall_from_a_csv(plot, tmp_path):
    source, target = tmp_path / "rows.csv", tmp_path / "figures" / "a.svg"
    columns = (*waterfall.COLUMNS, *waterfall.ENVIRONMENT_COLUMNS)
    log = common.CsvLog(source, columns)
    with pytest.raises(ValueError, match="no rows"):
        waterfall.draw(source, target)
    for provider, name, time_ms in [
        ("stock-flash_attn", "GEMM", 20.0),
        ("stock-flash_attn", "norm", 10.0),
        ("plugin", "GEMM", 16.0),
    ]:
        values = ("a model", "8x4096", provider, "eager", "bf16", name, time_ms, 1)
        row = dict(zip(waterfall.COLUMNS, values, strict=True))
        log.add({**row, **dataclasses.asdict(ENVIRONMENT)})
    waterfall.draw(source, target)
    svg = target.read_text()
    for text in ("stock-flash_attn", "plugin", "GEMM", "norm", "a model, 8x4096", "30"):
        assert text in svg
    assert "rotary" not in svg
    first = target.read_bytes()
    waterfall.draw(source, target)
    assert target.read_bytes() == first


def test_the_last_of_repeated_rows_is_drawn(plot, tmp_path):
    path = tmp_path / "rows.csv"
    log = common.CsvLog(path)
    log.add(make_row(samples_ms=[1.0]))
    log.add(make_row(samples_ms=[3.0]))
    (row,) = plot.read_rows(path)
    assert row["p50_ms"] == "3.0000"


def test_other_files_are_not_drawn(plot, tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns"):
        plot.read_rows(path)
    common.CsvLog(tmp_path / "empty.csv")
    with pytest.raises(ValueError, match="no rows"):
        plot.read_rows(tmp_path / "empty.csv")
