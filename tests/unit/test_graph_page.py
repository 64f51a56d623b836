# SPDX-License-Identifier: Apache-2.0
"""What the page of vLLM 0.33.0 says of new mixtures in graphs, and of the host."""

from pathlib import Path

from _pages import H100_RESULTS, RESULTS, ROOT, rows, text_of

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


ENGINES = (
    ("stock-flash_attn", "automatic"),
    ("plugin", "automatic"),
    ("plugin", "fp8"),
)
QWEN3 = "Qwen/Qwen3-VL-8B-Instruct"


def latest(
    commit: str, model: str = QWEN3, folder: Path = RESULTS
) -> dict[tuple[str, str, str], dict[str, str]]:
    """Return a run's rows of a model, by engine and case."""
    return {
        (row["provider"], row["config"], row["case"]): row
        for row in rows("graphs", "0.33.0", folder)
        if (row["commit"], row["model"]) == (commit, model)
    }


def test_graphs_beside_stocks() -> None:
    for model in MODELS:
        found = latest("ea904ad", f"Qwen/{model}-Instruct")
        padded = [
            float(found[*engine, "random mixtures"]["padded_over_real"])
            for engine in ENGINES
        ]
        said = "stock computes {:.2f} times the real patches, this package {:.2f}."
        assert said.format(*padded) in PAGE
        assert padded[2] == padded[1]
        for engine in ENGINES[1:]:
            row = found[*engine, "random mixtures"]
            assert (row["requests"], row["same_kernel_bitwise"]) == ("60", "1")
            row = found[*engine, "random requests after start"]
            assert (row["triton_kernels"], row["cudnn_plans"]) == ("0", "0")
            assert row["requests"] == "60"
        stock, *ours = (
            float(found[*engine, "first 60 random mixtures"]["total_ms"])
            for engine in ENGINES
        )
        speed_ups = ", ".join(f"{stock / own:.2f}" for own in ours)
        lines = (ROOT / "README.md").read_text().splitlines()
        assert any(
            line.startswith(f"| {model} |") and line.endswith(f"| {speed_ups} |")
            for line in lines
        )


def test_one_image_beside_stocks() -> None:
    h200, h100 = latest("ea904ad"), latest("0faf412", folder=H100_RESULTS)
    ours, stocks, h100s, h100_stocks = (
        f"{float(found[*engine, 'image 26x38']['p50_ms']):.2f}"
        for found in (h200, h100)
        for engine in (ENGINES[1], ENGINES[0])
    )
    assert f"takes {ours} ms in Qwen3-VL's engine, stock's {stocks}." in PAGE
    assert f"it takes {h100s} and {h100_stocks} ms." in PAGE
    page = text_of("results_h100.md")
    assert f"of 26 x 38 patches takes {h100s} ms, stock's {h100_stocks}." in page
    stock, *own = (
        float(h100[*engine, "first 60 random mixtures"]["total_ms"])
        for engine in ENGINES
    )
    assert (
        f"60 of Qwen3-VL take {stock:.0f} ms in stock's engine, {own[0]:.0f} in this "
        f"package's and {own[1]:.0f} with FP8 attention: {stock / own[0]:.2f} and "
        f"{stock / own[1]:.2f} times"
    ) in page
    for model, count in (
        ("Qwen3-VL-8B", 60),
        ("Qwen2-VL-7B", 40),
        ("Qwen2.5-VL-7B", 40),
    ):
        found = latest("0faf412", f"Qwen/{model}-Instruct", H100_RESULTS)
        for engine in ENGINES[1:]:
            row = found[*engine, "random mixtures"]
            assert (int(row["requests"]), row["same_kernel_bitwise"]) == (count, "1")


def test_nothing_is_built_after_start() -> None:
    for config in ("automatic", "fp8"):
        for row in of("random requests after start", config):
            assert (row["triton_kernels"], row["cudnn_plans"]) == ("0", "0")
            assert row["requests"] == "60"
    assert "nor in 60 of each of the three models" in PAGE


def test_host_times_of_stocks_fused_blocks() -> None:
    said = []
    for model in ("Qwen2.5-VL", "Qwen3-VL"):
        fused = [
            1000 * float(row["p50_ms"])
            for row in rows("host", "0.33.0")
            if row["mode"] == "fused_host" and model in row["model"]
        ]
        assert len(fused) == 3
        said.append(f"{min(fused):.0f} to {max(fused):.0f}")
    assert "Qwen2.5-VL take {}, of Qwen3-VL {}.".format(*said) in PAGE
