# SPDX-License-Identifier: Apache-2.0
"""What pages say of the H200's table of choices is what it and the rows say."""

import itertools
import json
from functools import cache

import numpy as np
import pytest
from _pages import ROOT, rows, text_of

import chosen_rows
import tower_cases
from vllm_flashinfer_vit.choices.arrival import quantized_by_projection
from vllm_flashinfer_vit.choices.lookup import choices_for, fp8_choices_for, plan_of
from vllm_flashinfer_vit.graphs.sizes import (
    fine_budgets,
    max_sequences,
    usual_frames,
)
from vllm_flashinfer_vit.machine.stack import Gpu, Stack

TABLE = ROOT / "src/vllm_flashinfer_vit/choices/data/0.33.0/h200.json"
NEWEST = "884af39"
BF16, FP8 = "bfloat16", "float8_e4m3fn"
H200 = Stack(python="", vllm="0.33.0", gpus=(Gpu("NVIDIA H200", (9, 0), None),))

# dtype, head dim, sequences, tokens of each.
Batch = tuple[str, int, int, int]


@cache
def measured() -> dict[Batch, dict[str, float]]:
    """Return the microseconds of each kernel, by batch."""
    found = json.loads(TABLE.read_text())["measurements"]
    return {
        (m["dtype"], m["head_dim"], m["num_seqs"], m["longest"]): m["us"] for m in found
    }


@cache
def passes(head_dim: int) -> dict[int, float]:
    """Return the microseconds of a pass that turns q and k, by all tokens."""
    us = {
        (row["bench"], row["case"]): 1000 * float(row["p50_ms"])
        for row in rows("attention", "0.33.0")
        if (row["mode"], row["provider"]) == ("graph", "plugin-flash_attn_4")
        and row["head_dim"] == str(head_dim)
    }
    sizes = {"1x1024": 1024, "1x4096": 4096, "8x1024": 8192}
    sizes |= {"video16x1024": 16384, "8x4096": 32768}
    return {n: us["qkv_attention", c] - us["attention", c] for c, n in sizes.items()}


def pass_us(head_dim: int, tokens: int) -> float:
    known = passes(head_dim)
    return float(np.interp(tokens, list(known), list(known.values())))


@pytest.mark.parametrize("head_dim", [72, 80])
def test_the_page_says_where_the_1024_come_from(head_dim: int) -> None:
    cells = []
    for length, count in itertools.product((1024, 2048), (1, 4, 16)):
        bf16 = measured()[BF16, head_dim, count, length]["hopper_bf16"]
        fp8 = measured()[FP8, head_dim, count, length]["hopper_fp8"]
        cells.append((bf16 - pass_us(head_dim, count * length)) / fp8)
    line = f"| {head_dim} | {' | '.join(f'{cell:.2f}' for cell in cells)} |"
    assert line in text_of("choices.md")


def graph_times() -> dict[tuple[str, str, str], float]:
    """Return the newest run's times in graphs, by model, case and provider."""
    return {
        (row["model"], row["case"], row["provider"]): float(row["p50_ms"])
        for row in rows("encoder", "0.33.0")
        if (row["commit"], row["mode"]) == (NEWEST, "graph")
    }


NAMES = {
    "Qwen/Qwen3-VL-8B-Instruct": ("Qwen3-VL", "Qwen3-VL-8B"),
    "Qwen/Qwen2-VL-7B-Instruct": ("Qwen2-VL", "Qwen2-VL"),
    "Qwen/Qwen2.5-VL-7B-Instruct": ("Qwen2.5-VL", "Qwen2.5-VL"),
    "zai-org/GLM-4.1V-9B-Thinking": ("GLM-4.1V", "GLM-4.1V"),
    "Pixtral-12B": ("Pixtral", "Pixtral"),
}


def test_pages_say_what_fp8_attention_saves_in_graphs() -> None:
    times = graph_times()
    bf16, fp8 = chosen_rows.PLUGIN, chosen_rows.PLUGIN_FP8
    choices, page = text_of("choices.md"), text_of("fp8.md")
    models = {model for model, *_ in times}
    assert len(models) == 7
    for model in models:
        gains = {
            case: times[model, case, bf16] / times[model, case, fp8]
            for m, case, provider in times
            if (m, provider) == (model, fp8)
        }
        short, long = NAMES.get(model, (model, model))
        # Windows of Qwen2.5-VL stay in bf16.
        if short != "Qwen2.5-VL":
            cells = [
                f"{gains[case]:.2f}" if case in gains else "-"
                for case in ("1x4096", "8x4096", "1x8160", "1x15376")
            ]
            (dim,) = {
                row["head_dim"]
                for row in rows("encoder", "0.33.0")
                if row["model"] == model
            }
            assert f"| {short} | {dim} | {' | '.join(cells)} |" in choices
        less = [
            100 - 100 / gains[case]
            for case in ("1x4096", "8x4096", "1x8160", "1x15376", "mixed")
            if case in gains
        ]
        least = f"{min(less):.0f}" if min(less) > 0 else f"{-min(less):.0f} % more"
        largest = gains.get("1x35344")
        last = f"{100 - 100 / largest:.0f} % less" if largest else "not measured"
        said = f"| {long} | in bf16 | {least} to {max(less):.0f} % less | {last} |"
        assert said in page


def test_the_page_of_kernels_says_what_hopper_bf16_gains_alone() -> None:
    gains: dict[str, list[float]] = {"narrow": [], "wide": []}
    for (dtype, head_dim, count, length), us in measured().items():
        if dtype == BF16 and length >= 2048 and "hopper_bf16" in us:
            assert count <= 64
            ratio = us["flash_attn_4"] / us["hopper_bf16"]
            gains["wide" if head_dim == 128 else "narrow"].append(ratio)
    narrow, wide = (f"{min(x):.2f} to {max(x):.2f} times" for x in gains.values())
    assert (
        f"it is {narrow} as fast as FlashAttention 4 from 2048 tokens on at head dims "
        f"64 to 96, and {wide} at 128"
    ) in text_of("kernels.md")


def kernel_of(head_dim: int, case: str) -> str:
    """Return what attends in bf16 over a case's images and frames."""
    plan = plan_of(choices_for(H200, BF16, head_dim))
    lengths = [
        rows * columns
        for frames, rows, columns in tower_cases.CASES[case]
        for _ in range(frames)
    ]
    return plan.kernel_for(max(lengths), sum(lengths) / len(lengths))


def test_the_page_of_kernels_says_which_cases_ran_hopper_bf16() -> None:
    ran = {
        (int(row["head_dim"]), row["case"])
        for row in rows("encoder", "0.33.0")
        if row["commit"] == NEWEST
    }
    assert {dim for dim, _ in ran} == {64, 72, 80, 128}
    with_it = {where for where in ran if kernel_of(*where) == "hopper_bf16"}
    narrow = {where for where in ran if where[0] != 128}
    without = {(dim, "1x256") for dim in (64, 72, 80)} | {(80, "1x35344")}
    assert narrow - with_it == without
    assert with_it - narrow == {(128, "1x15376")}
    page = text_of("kernels.md")
    assert "head dims 64 to 80 run it but *1x256*, and *1x35344* at 80;" in page
    assert "At head dim 128 (GLM-4.1V, Kimi-K3) *1x15376* alone does." in page


def graphs_of(head_dim: int, with_fp8: bool) -> int:
    """Return how many graphs automatic budgets of a Qwen model come to."""
    if with_fp8:
        plan = quantized_by_projection(fp8_choices_for(H200, BF16, head_dim))
    else:
        plan = choices_for(H200, BF16, head_dim)
    bound = max(c.max_len for c in plan if c.max_len is not None)
    budgets = fine_budgets(64, 3072)
    count = len(budgets)
    for smaller, budget in itertools.pairwise([0, *budgets]):
        sequences = max_sequences(budget, 10**6, usual_frames(budget))
        # As `_more_budgets` of graphs/exact.py has them; a token is four patches.
        count += sequences > 1
        count += smaller * 4 < sequences * bound and bound < budget * 4
    return count


def test_the_page_of_graphs_says_how_many_there_are() -> None:
    dims = {"Qwen2-VL": 80, "Qwen3-VL": 72}
    two, three = (graphs_of(dim, False) for dim in dims.values())
    (fp8,) = {graphs_of(dim, True) for dim in dims.values()}
    page = text_of("encoder_graphs.md")
    assert f"up to {len(fine_budgets(64, 3072))} automatic budgets" in page
    assert (
        f"{three} graphs of Qwen3-VL-8B in bf16, {two} of Qwen2-VL and Qwen2.5-VL, "
        f"which have no `short` ones then, and {fp8} of each with FP8 attention"
    ) in page
