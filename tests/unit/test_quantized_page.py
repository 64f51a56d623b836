# SPDX-License-Identifier: Apache-2.0
"""The page of quantised towers agrees with the rows without graphs and with -b8."""

import statistics
from collections import defaultdict

from _pages import ROOT, rows

import chosen_rows
import tower_cases

PAGE = " ".join((ROOT / "docs" / "quantized_towers.md").read_text().split())
FP8, BOTH = "plugin-q8", "plugin-fp8-q8"
# Of 8000 patches and more.
LARGE = ("8x1024", "8x4096", "mixed")


def times(file: str, commit: str) -> dict[tuple[str, str, str, str], float]:
    """Return the times of a run by model, case, provider and mode."""
    return {
        (row["model"], row["case"], row["provider"], row["mode"]): float(row["p50_ms"])
        for row in rows(file, "0.33.0")
        if row["commit"] == commit
    }


def means(provider: str, stock_modes: tuple[str, ...]) -> dict[str, str]:
    """Return a contender's speed-up over stock in large cases, by model."""
    found = times("encoder_quantized", "0fe19e4")
    stock = chosen_rows.BASELINE + chosen_rows.QUANTIZED
    gains = defaultdict(list)
    for model in tower_cases.MODELS:
        for case in LARGE:
            best = min(
                found[model, case, stock, mode]
                for mode in stock_modes
                if (model, case, stock, mode) in found
            )
            gains[model].append(best / found[model, case, provider, "eager"])
    return {k: f"{statistics.geometric_mean(v):.2f}" for k, v in gains.items()}


def test_large_cases_without_graphs() -> None:
    names = [f"Qwen/{x}-Instruct" for x in ("Qwen2-VL-7B", "Qwen2.5-VL-7B")]
    names.append("Qwen/Qwen3-VL-8B-Instruct")
    said = []
    for provider in (FP8, BOTH):
        gains = means(provider, ("eager", "fused", "compiled"))
        said.append("{}, {} and {}".format(*(gains[name] for name in names)))
    assert f"are {said[0]} times as fast as stock's" in PAGE
    assert f"and {said[1]} with FP8 attention" in PAGE
    eager = [means(p, ("eager",))[names[1]] for p in (FP8, BOTH)]
    assert "Qwen2.5-VL's are {} and {} times as fast".format(*eager) in PAGE


def test_small_images_without_graphs_take_longer_than_in_16_bits() -> None:
    found = times("encoder_quantized", "0fe19e4")
    small = [
        (found[model, case, "plugin", "eager"], found[model, case, provider, "eager"])
        for model in tower_cases.MODELS
        for case in ("1x256", "1x1024")
        for provider in (FP8, BOTH)
    ]
    assert all(sixteen < fp8 for sixteen, fp8 in small)
    least, most = (pick(x for x, _ in small) for pick in (min, max))
    assert f"where it takes {least:.1f} to {most:.1f} ms" in PAGE
    equal = max(
        max(pair) / min(pair)
        for key, time in found.items()
        if key[2] == FP8
        for pair in [(time, found[(*key[:2], BOTH, key[3])])]
    )
    assert f"equal kernels differ by up to {100 * equal - 100:.0f} %" in PAGE


def test_scales_of_blocks_beside_deepgemm() -> None:
    found = times("encoder_block_scales", "0fe19e4")
    cases = {case for _, case, _, _ in found}
    assert cases == {"1x1024", "1x4096", "8x1024"}
    for case in cases:
        stock = min(
            time
            for (_, name, provider, _), time in found.items()
            if name == case and provider.startswith("stock")
        )
        own = [
            found["Qwen/Qwen2-VL-7B-Instruct", case, provider, "graph"]
            for provider in ("plugin-b8", "plugin")
        ]
        cells = " | ".join(f"{time:.3g}" for time in (stock, *own))
        assert f"| {case} | {cells} |" in PAGE.replace("32.0", "32")
    errors = [
        float(row["rel_err"])
        for row in rows("encoder_block_scales", "0.33.0")
        if row["provider"] == "plugin-b8"
    ]
    assert f"off by {100 * max(errors):.0f} %" in PAGE
    quantised = next(
        float(row["p50_ms"])
        for row in rows("encoder_quantized", "0.33.0")
        if (row["model"], row["case"]) == ("Qwen/Qwen2-VL-7B-Instruct", "8x1024")
        and (row["provider"], row["mode"]) == (FP8, "graph")
    )
    blocks = found["Qwen/Qwen2-VL-7B-Instruct", "8x1024", "plugin-b8", "graph"]
    assert 0.45 < quantised / blocks < 0.55
