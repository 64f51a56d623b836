# SPDX-License-Identifier: Apache-2.0
"""What pages say of blocks alone, on an H200 with vLLM 0.33.0, is what the rows say."""

import re
import statistics
from collections import defaultdict

from _pages import rows, text_of

import chosen_rows
import tower_cases
from vllm_flashinfer_vit.choices.lookup import choices_for
from vllm_flashinfer_vit.machine.stack import Gpu, Stack

PAGE = "results_0.33.0.md"
# Of the run in which stock ran both FlashAttentions in ten towers, and of cases of one
# of them that ran again.
COMMIT, AGAIN = "0fe19e4", "884af39"
STOCK, STOCK_4 = chosen_rows.BASELINE, f"{chosen_rows.BASELINE}4"
NO_FP8 = ["1x4096", "8x4096", "mixed"]

Times = dict[tuple[str, str, str], float]


def newer(name: str = "encoder") -> list[chosen_rows.Row]:
    return [row for row in rows(name, "0.33.0") if row["commit"] == COMMIT]


def fastest(found: list[chosen_rows.Row]) -> Times:
    """Return the least time by model, case and provider."""
    times: Times = {}
    for row in found:
        key = row["model"], row["case"], row["provider"]
        times[key] = min(float(row["p50_ms"]), times.get(key, float("inf")))
    return times


def test_the_page_names_the_towers_that_ran_with_both_flashattentions() -> None:
    shown = re.search(rf"\*([^*]+)\* ran with both [^(]+\({COMMIT}\)", text_of(PAGE))
    assert shown is not None
    names = {re.sub(r"-(\d+[BM]?|So400m)$", "", r["model"]) for r in newer()}
    assert set(re.split(", | and ", shown[1])) == names
    # Rows of other runs would be compared with these.
    models = {row["model"] for row in newer()}
    commits: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows("encoder", "0.33.0"):
        if row["model"] in models:
            commits[row["model"], row["case"]].add(row["commit"])
    assert all(len(found) == 1 for found in commits.values())
    again = [case for case, found in commits.items() if found == {AGAIN}]
    assert {model for model, _ in again} == {"Pixtral-12B"} and len(again) == 6
    assert f"Pixtral's that ran again ({AGAIN})" in text_of(PAGE)


def test_the_page_says_what_flashattention_4_brings_stock() -> None:
    times = fastest(newer())
    gains: dict[str, dict[str, float]] = defaultdict(dict)
    for model, case, provider in times:
        if provider == STOCK:
            four = times[model, case, STOCK_4]
            gains[model][case] = 100 * (times[model, case, STOCK] / four - 1)
    means = {
        model: 100 * statistics.geometric_mean(1 + x / 100 for x in by.values()) - 100
        for model, by in gains.items()
    }
    assert abs(means.pop("Step-VL")) < 0.1
    most = max((x, model) for model, by in gains.items() for x in by.values())
    assert most[1] == "InternViT-300M" and gains[most[1]]["1x1024"] == most[0]
    assert (
        f"{min(means.values()):.0f} to {max(means.values()):.0f} % faster (geometric "
        f"means; {most[0]:.0f} % at *1x1024* of InternViT), and Step-VL's no faster"
    ) in text_of(PAGE)


def test_the_page_says_what_compiled_blocks_with_this_attention_take() -> None:
    model = tower_cases.MODELS[2]
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows("encoder", "0.33.0"):
        if row["model"] == model and row["mode"].endswith("graph"):
            is_stock = row["provider"].startswith("stock")
            name = "stock" if is_stock else f"{row['provider']} {row['mode']}"
            found = times[name]
            before = found.get(row["case"], float("inf"))
            found[row["case"]] = min(before, float(row["p50_ms"]))
    less = {
        name: 100
        - 100
        * statistics.geometric_mean(
            by_case[case] / times["stock"][case] for case in by_case
        )
        for name, by_case in times.items()
    }
    compiled, compiled_fp8, own, own_fp8 = (
        f"{less[f'{provider} {mode}']:.0f} %"
        for mode in ("compiled_graph", "graph")
        for provider in (chosen_rows.PLUGIN, chosen_rows.PLUGIN_FP8)
    )
    text = text_of(PAGE)
    assert f"take {compiled} less than stock's best for Qwen3-VL" in text
    assert f"{compiled_fp8} with FP8 attention)" in text
    assert f"the block programs {own} and {own_fp8} less" in text


def test_the_page_says_how_far_dots_ocr_is_off() -> None:
    dots: dict[str, dict[str, float]] = defaultdict(dict)
    for row in newer():
        if row["model"] == "dots.ocr":
            error = 100 * float(row["rel_err"])
            dots[row["provider"]][row["case"]] = error
    bf16, fp8 = dots[chosen_rows.PLUGIN], dots[chosen_rows.PLUGIN_FP8]
    assert [case for case in tower_cases.CASES if case in set(bf16) - set(fp8)] == [
        case for case in tower_cases.CASES if case in NO_FP8
    ]
    assert "no rows of *1x4096*, *8x4096* and *mixed***" in text_of(PAGE)
    larger = [case for case in fp8 if fp8[case] != bf16[case]]
    assert sorted(larger) == ["1x15376", "1x35344", "1x8160"]
    least, most = (f([fp8[case] for case in larger]) for f in (min, max))
    low, high = (f([bf16[case] for case in larger]) for f in (min, max))
    assert (
        f"off by {least:.1f} to {most:.1f} %, by {low:.1f} to {high:.1f} % in bf16"
    ) in text_of(PAGE)
    in_bf16 = max(bf16[case] for case in NO_FP8)
    said = f"dots.ocr's by more than 10 %, in bf16 by {in_bf16:.0f} %"
    assert said in text_of("fp8.md")


def test_the_page_says_by_how_much_equal_kernels_differ() -> None:
    found = rows("encoder", "0.33.0")
    times = fastest([r for r in found if r["commit"] in (COMMIT, AGAIN)])
    text = text_of(PAGE).partition("*Noise*: ")[2]
    pairs = [
        [times[model, case, f"{chosen_rows.PLUGIN}{end}"] for end in ("", "-fp8")]
        for model, case in (
            ("Step-VL", "1x1296"),
            ("Pixtral-12B", "20x400"),
            (tower_cases.MODELS[1], "video16x1024"),
            ("Pixtral-12B", "8x1024"),
        )
    ]
    assert "{:.2f} and {:.2f} ms, *20x400*".format(*pairs[0]) in text
    assert "`triton`, {:.1f} and {:.1f}, *video16x1024*".format(*pairs[1]) in text
    assert "`hopper_bf16`, {:.1f} and {:.1f}, *8x1024*".format(*pairs[2]) in text
    assert "the same, {:.1f} and {:.1f}.".format(*pairs[3]) in text
    most = 100 * max(slow / fast - 1 for fast, slow in pairs)
    assert f"differ by up to {most:.0f} %." in text
    assert f"equal kernels differ by up to {most:.0f} %, so" in text_of("fp8.md")


def test_the_page_says_what_flashattention_4_brings_stocks_qwen_towers() -> None:
    times = fastest([r for r in rows("encoder", "0.33.0") if r["commit"] == AGAIN])
    two, two_and_a_half, three = (
        100
        * statistics.geometric_mean(
            times[model, case, STOCK] / times[model, case, STOCK_4]
            for case in tower_cases.CASES
            if (model, case, STOCK) in times
        )
        - 100
        for model in tower_cases.MODELS
    )
    assert (
        f"Qwen2-VL and Qwen3-VL {two:.0f} and {three:.0f} % faster, and those of "
        f"Qwen2.5-VL {-two_and_a_half:.0f} % slower"
    ) in text_of(PAGE)


def test_the_page_says_what_other_runs_of_stock_took() -> None:
    found = rows("encoder", "0.33.0")
    stocks = [r for r in found if r["provider"].startswith("stock-flash_attn")]
    best: dict[tuple[str, str], float] = {}
    newest = fastest([r for r in stocks if r["commit"] == AGAIN])
    for (model, case, _), ms in newest.items():
        best[model, case] = min(ms, best.get((model, case), ms))
    older = fastest([r for r in found if r["provider"] == "stock-flashinfer"])
    assert {model for model, *_ in older} == set(tower_cases.MODELS[1:])
    less = {
        (model, case): 100 - 100 * ms / best[model, case]
        for (model, case, _), ms in older.items()
        if ms < best[model, case]
    }
    ((where, saved),) = less.items()
    assert where == (tower_cases.MODELS[1], "8x1024")
    text = text_of(PAGE)
    assert f"took {saved:.0f} % less time than stock's best takes here" in text
    fused = fastest([r for r in stocks if r["commit"] == "479c147"])
    longer = [
        min(fused[tower_cases.MODELS[1], case, name] for name in (STOCK, STOCK_4))
        / best[tower_cases.MODELS[1], case]
        for case in {case for _, case, _ in fused}
    ]
    assert f"took {min(longer):.2f} to {max(longer):.2f} times as long" in text


def test_the_page_says_what_flash_attn_4_gains_a_layer() -> None:
    us = {
        (row["head_dim"], row["case"], row["provider"]): float(row["p50_ms"])
        for row in rows("attention", "0.33.0")
        if (row["bench"], row["mode"]) == ("qkv_attention", "graph")
    }
    gains = [
        us[dim, case, "plugin"] / us[dim, case, "plugin-flash_attn_4"]
        for dim, case, provider in us
        if provider == "plugin" and case in ("1x1024", "8x1024", "video16x1024")
    ]
    most = 100 * max(gains) - 100
    assert f"and `flash_attn_4` is up to {most:.0f} % faster" in text_of(PAGE)


def test_the_page_says_what_batches_of_blip_2_gain() -> None:
    best = chosen_rows.Best(rows("encoder", "0.33.0"))
    gains = {
        (provider, case): 100 * ratio - 100
        for provider in (chosen_rows.PLUGIN, chosen_rows.PLUGIN_FP8)
        for case in ("1x257", "8x257", "32x257")
        if (
            ratio := chosen_rows.speed_up(
                best.stock("BLIP-2", case), best.of(provider, "BLIP-2", case)
            )
        )
    }
    bf16, fp8 = (
        [f"{gains[provider, case]:.0f}" for case in ("32x257", "8x257", "1x257")]
        for provider in (chosen_rows.PLUGIN, chosen_rows.PLUGIN_FP8)
    )
    text = text_of(PAGE)
    assert "257 tokens gain {} to {} %".format(*bf16) in text
    assert "gain {} to {} %, but a single image {}".format(*fp8) in text
    assert f"single image {fp8[2]} in place of {bf16[2]} %" in text


def test_the_page_says_what_blocks_gain_without_graphs() -> None:
    best = chosen_rows.Best(rows("eager", "0.33.0"), "eager")
    models = "Keye-VL", "Ovis2.5", "openPangu-VL"
    small, large = (
        [
            "{:.2f}".format(
                chosen_rows.speed_up(
                    best.stock(model, case), best.of(chosen_rows.PLUGIN, model, case)
                )
            )
            for model in models
        ]
        for case in ("1x1024", "8x4096")
    )
    text = text_of(PAGE)
    assert "({}, {} and {} at *1x1024*)".format(*small) in text
    assert "At *8x4096*, {}, {} and {}, the GPU".format(*large) in text
    found = {(r["model"], r["case"], r["provider"]): r for r in newer("eager")}
    bf16, fp8 = chosen_rows.PLUGIN, chosen_rows.PLUGIN_FP8
    ovis = found["Ovis2.5", "1x1024", bf16]
    low, middle, high = (float(ovis[f"p{n}_ms"]) for n in (20, 50, 80))
    eight = float(found["Ovis2.5", "1x1024", fp8]["p50_ms"])
    assert (
        f"took {middle:.1f} ms there in bf16, from {low:.1f} to {high:.1f} in three "
        f"fifths of the calls, and {eight:.1f} with FP8 attention"
    ) in text
    pangu = [found["openPangu-VL", "8x4096", name] for name in (fp8, bf16, STOCK)]
    times = [float(row["p50_ms"]) for row in pangu]
    errors = [100 * float(row["rel_err"]) for row in pangu]
    assert (
        f"{times[0]:.1f} ms in place of {times[1]:.1f} at *8x4096*, and an error of "
        f"{errors[0]:.0f} % with these weights, in place of {errors[1]:.1f} %, stock's "
        f"{errors[2]:.1f} %."
    ) in text
    # FP8 attention runs there, though no sequence is long enough.
    errors = [
        float(found["openPangu-VL", "8x1024", name]["rel_err"]) for name in (fp8, bf16)
    ]
    assert errors[0] > 4 * errors[1]


def test_the_page_says_what_told_lengths_do_to_fp8() -> None:
    rels = {
        (row["case"], row["provider"]): f"{100 * float(row['rel_err']):.1f}"
        for row in rows("eager_told_lengths", "0.33.0")
    }
    fp8, bf16 = (
        [rels[case, provider] for case in ("1x1024", "8x1024", "1x4096")]
        for provider in (chosen_rows.PLUGIN_FP8, chosen_rows.PLUGIN)
    )
    # Windows and short images attend in bf16.
    assert fp8[:2] == bf16[:2] == [fp8[0]] * 2
    said = (
        f"FP8 is off by {fp8[0]} % at *1x1024* and *8x1024*, as bf16, and by {fp8[2]} "
        f"% at *1x4096*, bf16 by {bf16[2]} %."
    )
    assert said in text_of(PAGE)


def test_pages_say_what_fp8_saves_in_blocks_without_rotary() -> None:
    best = chosen_rows.Best(rows("encoder", "0.33.0"))
    saved = [
        100 - 100 * float(fp8["p50_ms"]) / float(bf16["p50_ms"])
        for model in ("Isaac", "SigLIP-So400m", "Idefics2")
        for case in ("1x4096", "8x4096")
        if (bf16 := best.of(chosen_rows.PLUGIN, model, case))
        and (fp8 := best.of(chosen_rows.PLUGIN_FP8, model, case))
    ]
    assert len(saved) == 5
    said = f"take {min(saved):.0f} to {max(saved):.0f} % less time"
    assert said in text_of("choices.md")


def test_the_page_of_kernels_says_where_hopper_bf16_begins() -> None:
    def plan(vllm: str, head_dim: int) -> list[tuple[int, str]]:
        stack = Stack(python="", vllm=vllm, gpus=(Gpu("NVIDIA H200", (9, 0), None),))
        choices = choices_for(stack, "bfloat16", head_dim)
        firsts = [1, *(c.max_len + 1 for c in choices if c.max_len is not None)]
        return [(n, c.kernel) for n, c in zip(firsts, choices, strict=True)]

    begins = {
        head_dim: next(n for n, k in plan("0.33.0", head_dim) if k == "hopper_bf16")
        for head_dim in (64, 72, 80, 96, 128)
    }
    assert begins[72] == begins[80]
    text = text_of("kernels.md")
    assert (
        f"from {begins[72]} tokens on at head dims 72 and 80, from {begins[64]} on at "
        f"64, from {begins[96]} on at 96, and from {begins[128]} on at 128"
    ) in text
    # Measured with the newer release alone.
    assert plan("0.25.1", 88) == plan("0.33.0", 88) != plan("0.25.1", 96)
    assert "head dim 88, measured with 0.33.0 alone, is chosen by that" in text
