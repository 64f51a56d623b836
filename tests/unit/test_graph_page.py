# SPDX-License-Identifier: Apache-2.0
"""What the page of vLLM 0.33.0 says of new mixtures in graphs, and of the host."""

from _pages import ROOT, rows

PAGE = " ".join((ROOT / "docs" / "results_0.33.0.md").read_text().split())
MODELS = ("Qwen2-VL-7B", "Qwen2.5-VL-7B", "Qwen3-VL-8B")


def of(case: str, config: str) -> list[dict[str, str]]:
    """Return the three models' rows of a case, in the order of pages."""
    found = {
        row["model"]: row
        for row in rows("graphs_first_time", "0.33.0")
        if (row["case"], row["config"]) == (case, config)
    }
    return [found[f"Qwen/{model}-Instruct"] for model in MODELS]


def test_mixtures_that_first_come() -> None:
    for config, what in (("automatic", "in bf16"), ("fp8", "with FP8 attention")):
        times = [
            f"{float(row['total_ms']):.0f}"
            for row in of("first 60 random mixtures", config)
        ]
        assert f"{times[0]}, {times[1]} and {times[2]} ms {what}" in PAGE


def test_graphs_have_the_bits_of_eager_mode() -> None:
    counts = []
    for config in ("automatic", "fp8"):
        for row in of("random mixtures", config):
            assert row["same_kernel_bitwise"] == "1"
            assert row["graph_misses"] == "0"
            counts.append(int(row["requests"]))
    assert f"all of {min(counts)} to {max(counts)} |" in PAGE


def test_mixtures_that_first_come_beside_stocks() -> None:
    found = {
        (row["provider"], row["config"], row["case"]): row
        for row in rows("graphs", "0.33.0")
        if row["commit"] == "9d9f69d"
    }
    engines = (
        ("stock-flash_attn", "automatic"),
        ("plugin", "automatic"),
        ("plugin", "fp8"),
    )
    stock, bf16, fp8 = (
        float(found[*engine, "first 60 random mixtures"]["total_ms"])
        for engine in engines
    )
    assert (
        f"take {stock:.0f} ms in stock's engine, {bf16:.0f} in this package's and "
        f"{fp8:.0f} with FP8: {stock / bf16:.2f} and {stock / fp8:.2f} times"
    ) in PAGE
    readme = " ".join((ROOT / "README.md").read_text().split())
    said = f"Qwen3-VL's are {stock / bf16:.2f} and {stock / fp8:.2f} times as fast"
    assert said in readme
    padded = [
        float(found[*engine, "random mixtures"]["padded_over_real"])
        for engine in engines[:2]
    ]
    said = "computes {:.2f} times the real patches there, this package {:.2f};"
    assert said.format(*padded) in PAGE
    for engine in engines[1:]:
        row = found[*engine, "random mixtures"]
        assert (row["requests"], row["same_kernel_bitwise"]) == ("60", "1")
    ours, stocks = (
        float(found[*engine, "image 26x38"]["p50_ms"])
        for engine in (engines[1], engines[0])
    )
    assert f"takes {ours:.2f} ms in this package's engine, {stocks:.2f} in" in PAGE


def test_nothing_is_built_after_start() -> None:
    for config in ("automatic", "fp8"):
        for row in of("random requests after start", config):
            assert (row["triton_kernels"], row["cudnn_plans"]) == ("0", "0")
            assert row["requests"] == "60"
    assert "nor in 60 of each of the three models" in PAGE


def test_host_times_of_stocks_fused_blocks() -> None:
    fused = [
        1000 * float(row["p50_ms"])
        for row in rows("host", "0.33.0")
        if row["mode"] == "fused_host" and "Qwen2.5-VL" in row["model"]
    ]
    assert len(fused) == 3
    assert f"Qwen2.5-VL take {min(fused):.0f} to {max(fused):.0f}." in PAGE
