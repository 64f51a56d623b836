# SPDX-License-Identifier: Apache-2.0
"""README and docs agree with the rows, with the code, and with each other."""

import itertools
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from _pages import H100_RESULTS, RESULTS, ROOT, rows, text_of

import chosen_rows
import tower_cases
from vllm_flashinfer_vit.choices.arrival import without_pass
from vllm_flashinfer_vit.choices.lookup import fp8_choices_for, fp8_ranges
from vllm_flashinfer_vit.kernels.catalog import HEAD_DIMS, KERNELS, fp8_names
from vllm_flashinfer_vit.machine.stack import Gpu, Stack

sys.path.insert(0, str(ROOT / "docs"))

import generate  # noqa: E402

# Of fewer than 8000 patches.
SMALL_CASES = ("1x256", "1x1024", "1x4096")
PAGES = [
    *generate.pages(),
    *(ROOT / name for name in ("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *(ROOT / name / "README.md" for name in ("benchmarks", "examples")),
    *sorted((ROOT / ".github").glob("*.md")),
]
by_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)


def test_the_accuracy_page_is_written_from_its_rows() -> None:
    import fp8_page

    page = ROOT / "docs" / "fp8_accuracy.md"
    found = fp8_page.read_rows(RESULTS / "fp8_accuracy.csv")
    assert fp8_page.markdown(found) == page.read_text()


@by_page
def test_generated_tables_are_of_now(page: Path) -> None:
    text = page.read_text()
    assert generate.filled(text) == text, "run python docs/generate.py"


def test_the_head_dims_of_fp8_kernels_are_those_of_their_records() -> None:
    text = (ROOT / "docs" / "fp8.md").read_text()
    section = text.partition("\n## Kernels\n")[2].partition("\n## ")[0]
    lines = [line.split(" | ") for line in section.splitlines() if "| `" in line]
    shown = {name.strip("| `"): dims for name, _, dims, *_ in lines}
    needed = {name: KERNELS[name].needs.head_dims for name in fp8_names()}
    assert shown == {
        name: f"{dims[0]} to {dims[1]}" if dims else "any"
        for name, dims in needed.items()
    }


def test_the_head_dims_that_tune_measures_are_those_of_the_catalog() -> None:
    text = (ROOT / "docs" / "choices.md").read_text()
    assert f"| `{','.join(map(str, HEAD_DIMS))}` |" in text


def test_a_stale_or_unknown_table_is_noticed() -> None:
    page = (ROOT / "README.md").read_text()
    # A speed-up in bf16 and one with FP8 attention.
    stale, count = re.subn(r"\| \d\.\d\d, \d\.\d\d \|", "| 9.99, 9.99 |", page, count=1)
    assert count and generate.filled(stale) == page
    with pytest.raises(ValueError, match="no generated table"):
        generate.filled("<!-- python docs/generate.py odd -->\n<!-- end -->")


def test_a_table_without_rows_says_so() -> None:
    table_of = (
        "<!-- python benchmarks/table.py best benchmarks/results/h200/encoder.csv"
    )
    page = f"{table_of} --vllm 0.1 -->\n<!-- end -->"
    assert "Not measured yet." in generate.filled(page)
    with pytest.raises(SystemExit):
        generate.filled(page.replace("0.1", "0.1 --odd"))


def test_readme_is_one_page_and_says_what_runs() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 140
    top = " ".join(lines[:14])
    assert "*not* FlashInfer's cuDNN" in top and "unmeasured" in top


def test_readme_says_that_no_case_is_slower() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    graphs = chosen_rows.Best(rows("encoder", "0.33.0"))
    eager = chosen_rows.Best(rows("eager", "0.33.0"), "eager")
    on_h100 = rows("encoder", "0.33.0", H100_RESULTS)
    others = (chosen_rows.Best(on_h100, mode) for mode in ("graph", "eager"))
    page = (ROOT / "docs" / "results_h100.md").read_text()
    for best in (graphs, eager, *others):
        cases = [(model, case) for model in best.models for case in best.cases(model)]
        for (model, case), provider in itertools.product(cases, best.challengers):
            ours = best.of(provider, model, case)
            # FP8 is not timed where its error was over the benchmark's bound.
            if ours is None and provider == chosen_rows.PLUGIN_FP8:
                continue
            ratio = chosen_rows.speed_up(best.stock(model, case), ours)
            assert ratio is not None
            # Of blocks alone, the page of an H100 names what is slower.
            if model not in tower_cases.MODELS and f"{ratio:.2f} times as fast" in page:
                continue
            assert ratio > 1, (model, case, provider)
    for best in (graphs, eager):
        whole = sum(
            len(best.cases(model))
            for model in best.models
            if model in tower_cases.MODELS
        )
        said = f"In none of the {whole} cases is a tower slower than stock's best."
        assert said in text


def test_readme_says_what_an_h100_gains() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    best = chosen_rows.Best(rows("encoder", "0.33.0", H100_RESULTS))
    bf16, fp8 = (
        "{}, {} and {}".format(*(best.mean(p, model) for model in tower_cases.MODELS))
        for p in (chosen_rows.PLUGIN, chosen_rows.PLUGIN_FP8)
    )
    assert f"{bf16} times as fast in graphs, with FP8 {fp8}]" in text


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_pages_say_from_which_length_on_fp8_runs(gpu: str) -> None:
    stack = Stack(python="", vllm="0.33.0", gpus=(Gpu(gpu, (9, 0), None),))
    # Head dims of Qwen3-VL-8B, of Qwen2-VL and Qwen2.5-VL, of Qwen3-VL-2B and 4B.
    choices = [fp8_choices_for(stack, "bfloat16", dim) for dim in (72, 80, 64)]
    (first,) = {fp8_ranges(one)[0][0] for one in choices}
    assert f"Hopper: from {first} on with the Qwen models" in text_of("README.md")
    assert f"from {first} patches on (all Qwen models)" in text_of("serving.md")
    page = text_of("choices.md")
    assert f"begins at {first} tokens at head dims 64 to 80" in page
    (wide,) = {
        fp8_ranges(fp8_choices_for(stack, "bfloat16", dim))[0][0] for dim in (96, 128)
    }
    assert f"head dims 64 to 80, and at {wide} at 96 and 128." in page
    narrow_later, wide_later = (
        fp8_ranges(without_pass(fp8_choices_for(stack, "bfloat16", dim)))[0][0]
        for dim in (80, 128)
    )
    assert (
        f"at head dims 64 to 80 from {narrow_later} tokens on, not {first}, and at 96 "
        f"and 128 from {wide_later} on, not {wide}."
    ) in page


@pytest.mark.parametrize("vllm", ["0.25.1", "0.33.0"])
def test_error_in_bf16_is_below_stock_in_every_case(vllm: str) -> None:
    found = {
        (r["model"], r["case"], r["provider"]): float(r["rel_err"])
        for r in rows("encoder", vllm)
        if r["mode"] == "graph"
    }
    pairs = [
        (error, found[model, case, chosen_rows.BASELINE])
        for (model, case, provider), error in found.items()
        if provider == chosen_rows.PLUGIN
    ]
    assert len(pairs) >= 33
    assert all(ours < stock for ours, stock in pairs)


def test_engines_differ_from_stock_by_what_the_pages_say() -> None:
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows("engine"):
        kind = re.match("fp8_linear|fp8|", row["config"])
        if row["rel_err"] and kind:
            errors[kind[0]].append(float(row["rel_err"]))
    bf16 = errors[""]
    assert max(bf16) <= 0.024 and max(errors["fp8"]) <= 0.025
    assert max(errors["fp8_linear"]) <= 0.15
    span = f"{min(bf16):.3f} to {max(bf16):.3f} off stock's"
    assert span in (ROOT / "docs" / "troubleshooting.md").read_text()
    results = (ROOT / "docs" / "results.md").read_text()
    said = " ".join(results.split())
    assert "bf16 within 0.024, FP8 attention within 0.025" in said
    assert "other scales of rows, within 0.15" in said


def test_the_page_of_a_stack_says_what_stock_ran() -> None:
    text = text_of("results_0.33.0.md")
    modes: dict[str, set[str]] = defaultdict(set)
    for row in rows("encoder", "0.33.0"):
        if row["provider"].startswith("stock-") and row["mode"].endswith("graph"):
            modes[row["model"]] |= {row["provider"], row["mode"]}
    old = {m for m, ran in modes.items() if f"{chosen_rows.BASELINE}4" not in ran}
    shown = re.search(r"\*\*Of ([^*]+), stock ran FlashAttention 3 alone", text)
    assert shown is not None
    names = {re.sub(r"-(\d+[BM]?|So400m)$", "", model) for model in old}
    assert set(re.split(", | and ", shown[1].replace(" 4", "-4"))) == names
    compiled = {model for model, ran in modes.items() if "compiled_graph" in ran}
    assert compiled == {m for m in tower_cases.MODELS if "Qwen2-VL" not in m}


def test_pages_have_the_engines_of_a_stack() -> None:
    import engine_check

    found = {
        (r["config"], r["provider"], r["model"].split("/")[-1]): r
        for r in rows("engine", "0.33.0")
    }
    results, quantised = map(text_of, ("results_0.33.0.md", "quantized_towers.md"))
    engines = {
        ("fp8_linear", "Qwen3-VL-8B-Instruct"): "Qwen3-VL, FP8 linear layers",
        ("fp8_linear", "Qwen2.5-VL-7B-Instruct"): "Qwen2.5-VL, FP8 linear layers",
        ("tp2", "Qwen2-VL-7B-Instruct"): "Qwen2-VL, tensor parallelism over two GPUs",
    }
    for (config, model), name in engines.items():
        ours = found[config, chosen_rows.PLUGIN, model]
        error = f"{100 * float(ours['rel_err']):.1f} %"
        assert f"| {name} | {error} |" in results
        if config == "fp8_linear":
            stock = found[config, chosen_rows.BASELINE, model]
            ours_mib, stock_mib = (r["peak_memory_mib"] for r in (ours, stock))
            held = re.search(rf"{ours_mib}(?: MiB)?, stock's {stock_mib}", quantised)
            assert held is not None
            if "Qwen2.5-VL" in model:
                assert f"its embeddings are {error} from those of stock's" in quantised
    assert f"allows {100 * engine_check.FP8_LINEAR_GATE:.0f} %" in results
    errors = re.search(r"of (\d+ to \d+ %) for Qwen2.5-VL", quantised)
    assert errors is not None and f"Qwen2.5-VL's [by {errors[1]}]" in results


def quantised_and_not() -> dict[tuple[str, str], tuple[chosen_rows.Row, ...]]:
    """Return, by model and case, the row with FP8 of both kinds, and with neither."""
    found = {
        (row["model"], row["case"], row["provider"]): row
        for row in rows("encoder_quantized", "0.33.0")
        if row["mode"] == "graph"
    }
    both = chosen_rows.PLUGIN_FP8 + chosen_rows.QUANTIZED
    return {
        (model, case): (row, found[model, case, chosen_rows.PLUGIN])
        for (model, case, provider), row in found.items()
        if provider == both
    }


def test_the_page_of_quantised_towers_has_their_times() -> None:
    page = (ROOT / "docs" / "quantized_towers.md").read_text()
    text = " ".join(page.partition("\n## Measured\n")[2].split())
    changes: dict[str, dict[str, float]] = defaultdict(dict)
    for (model, case), (row, sixteen) in quantised_and_not().items():
        ratio = float(row["p50_ms"]) / float(sixteen["p50_ms"])
        changes[model][case] = 100 * ratio - 100
    assert set(changes) == set(tower_cases.MODELS)
    for model, by_case in changes.items():
        name = model.removeprefix("Qwen/").rpartition("-VL-")[0] + "-VL"
        small = [f"{by_case.pop(case):+.0f} %" for case in ("1x256", "1x1024")]
        others = f"{min(by_case.values()):+.0f} to {max(by_case.values()):+.0f} %"
        assert f"| {name} | {' | '.join(small)} | {others} |" in text


def test_the_page_of_quantised_towers_has_their_means_of_large_cases() -> None:
    page = (ROOT / "docs" / "quantized_towers.md").read_text()
    text = " ".join(page.split())
    best = chosen_rows.Best(rows("encoder_quantized", "0.33.0"), quantized=True)
    against_stock, against_ours = [], []
    for model in ("Qwen2-VL-7B", "Qwen2.5-VL-7B", "Qwen3-VL-8B"):
        stock, ours = [], []
        for (name, case), (row, sixteen) in quantised_and_not().items():
            if name == f"Qwen/{model}-Instruct" and case not in SMALL_CASES:
                fastest = best.stock(name, case)
                assert fastest is not None
                times = [float(r["p50_ms"]) for r in (fastest, sixteen, row)]
                stock.append(times[0] / times[2])
                ours.append(times[1] / times[2])
        against_stock.append(f"{statistics.geometric_mean(stock):.2f}")
        against_ours.append(f"{statistics.geometric_mean(ours):.2f}")
    two, two_and_a_half, three = against_stock
    assert (
        f"{two} (Qwen2-VL), {two_and_a_half} (Qwen2.5-VL) and {three} (Qwen3-VL) times "
        "as fast as stock, and {}, {} and {} times".format(*against_ours)
    ) in text


def test_pages_say_what_quantised_towers_gain() -> None:
    best = chosen_rows.Best(rows("encoder_quantized", "0.33.0"), quantized=True)
    assert set(best.models) == set(tower_cases.MODELS)
    gains = [
        float(stock["p50_ms"]) / float(ours["p50_ms"])
        for model in best.models
        for case in best.cases(model)
        for provider in best.challengers
        if (stock := best.stock(model, case))
        and (ours := best.of(provider, model, case))
    ]
    said = f"{min(gains):.1f} to {max(gains):.1f} times as fast as stock's"
    for page in ("README.md", "docs/quantized_towers.md"):
        assert said in " ".join((ROOT / page).read_text().split())


def test_pages_have_the_errors_of_quantised_towers() -> None:
    errors: dict[str, list[float]] = defaultdict(list)
    for (model, _), (row, sixteen) in quantised_and_not().items():
        kind = "Qwen2.5-VL" if "Qwen2.5-VL" in model else "others"
        errors[kind].append(100 * float(row["rel_err"]))
        errors["16 bits"].append(100 * float(sixteen["rel_err"]))
    errors["all"] = errors["Qwen2.5-VL"] + errors["others"]
    span = {kind: f"{min(x):.0f} to {max(x):.0f} %" for kind, x in errors.items()}
    said = {
        "docs/quantized_towers.md": f"an error of {span['others']}, and of "
        f"{span['Qwen2.5-VL']} for Qwen2.5-VL, as in stock's quantised tower. It is "
        f"{span['16 bits']} in 16 bits",
        "README.md": f"off by {span['all']}",
    }
    for page, text in said.items():
        assert text in " ".join((ROOT / page).read_text().split())


def test_result_files_keep_the_newest_rows_of_each_stack() -> None:
    import prune

    folders = RESULTS, H100_RESULTS
    for path in sorted(path for folder in folders for path in folder.glob("*.csv")):
        if path.stem != "bits":
            found = [dict(row) for row in chosen_rows.read(path)]
            assert prune.newest_rows(found) == found, f"prune {path.name}"


def test_rows_of_eager_mode_stand_in_one_file() -> None:
    keys = ("vllm", "mode", "model", "case", "provider", "dtype")
    found, others = (
        {tuple(row[key] for key in keys) for row in chosen_rows.read(RESULTS / name)}
        for name in ("eager.csv", "encoder.csv")
    )
    both = {key[1] for key in found & others}
    assert both == {"graph"}, "eager.csv has what it needs of its own run"


def _anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", head.lower()) for head in heads)
    return {head.replace(" ", "-") for head in plain}


@by_page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target), link


@by_page
def test_files_that_pages_name_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return
    package = ROOT / "src" / "vllm_flashinfer_vit"
    for name in re.findall(
        r"`([\w./]+/[\w.]+\.(?:py|json|csv|txt))`", page.read_text()
    ):
        if any(word in name for word in ("NAME", "FAMILY", "X.txt")):
            continue
        places = (ROOT, package, page.parent, ROOT / "out")
        assert any((place / name).exists() for place in places), name


def test_pages_that_the_code_names_exist() -> None:
    for folder in ("benchmarks", "src", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"\bdocs/[\w/.]+\.md", path.read_text()):
                assert (ROOT / name).is_file(), f"{path}: {name}"


@by_page
def test_plain_english(page: Path) -> None:
    text = page.read_text()
    for phrase in ("times less time", "does not hang on", "rightly", "behind"):
        assert phrase not in text


def commands_of_tables(page: str) -> list[str]:
    found = re.findall(r"^`python (benchmarks/table.py [^`]+)`$", page, re.MULTILINE)
    commands = [" ".join(command.split()) for command in found]
    assert commands == re.findall(r"<!-- python (.+) -->", page)
    return commands


def test_results_of_a_stack_or_a_gpu_are_of_that_one() -> None:
    for path in (ROOT / "docs").glob("results_*.md"):
        name = path.stem.removeprefix("results_")
        meant = f"--vllm {name}" if name[0].isdigit() else f"results/{name}-"
        commands = commands_of_tables(path.read_text())
        assert commands and all(meant in command for command in commands)


def test_a_command_of_a_table_prints_it() -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    commands = commands_of_tables(page)
    script = commands[0].split()
    done = subprocess.run(
        [sys.executable, *script], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() in page
