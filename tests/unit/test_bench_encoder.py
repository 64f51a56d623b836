# SPDX-License-Identifier: Apache-2.0
"""The benchmark of towers: its cases, its contenders, and their turns."""

import csv
import math
import os
import statistics
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from types import SimpleNamespace

import pytest
import torch
from _benchmarks import ENVIRONMENT

import contenders
import op_problems
import remote
import timing
import tower_bench
import tower_cases
import tower_worker
from csv_log import CsvLog
from failures import Failures


def test_only_quantised_layers_and_one_model_in_fp8_may_be_further_off():
    def gates(model):
        providers = ("plugin", "plugin-fp8", "plugin-fp8-q8")
        named = [contenders.Contender.of(name, "bf16") for name in providers]
        return [tower_worker.gate(contender, model) for contender in named]

    assert gates("Qwen/Qwen2-VL-7B-Instruct") == [0.1, 0.1, 0.3]
    assert gates("zai-org/GLM-4.1V-9B-Thinking") == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("case", "patches"),
    [
        ("1x256", 256),
        ("1x1024", 1024),
        ("1x4096", 4096),
        ("1x8160", 8160),
        ("1x15376", 15376),
        ("1x35344", 35344),
        ("8x1024", 8192),
        ("8x4096", 32768),
        ("20x400", 8000),
        ("video16x1024", 16384),
        ("mixed", 18164),
    ],
)
def test_encoder_cases_hold_the_stated_patches(case, patches):
    grids = tower_cases.CASES[case]
    assert sum(math.prod(grid) for grid in grids) == patches
    assert all(h % 2 == w % 2 == 0 for _, h, w in grids)
    frames = [h * w for t, h, w in grids for _ in range(t)]
    assert tuple(frames) == op_problems.CASES[case]


@pytest.mark.parametrize("case", tower_cases.CASES)
def test_batches_like_a_case_have_new_sizes(case):
    grids = tower_cases.CASES[case]
    found = before, new = tower_cases.of_new_sizes(grids)
    assert found == tower_cases.of_new_sizes(grids)
    frames, rows, columns = grids[-1]
    for *others, (t, h, w) in before + new:
        assert tuple(others) == grids[:-1]
        assert t == frames
        assert h % 2 == w % 2 == 0
        assert 0.75 <= h * w / (rows * columns) <= 1.25
    areas = [[h * w for *_, (_, h, w) in batches] for batches in found]
    assert areas[0][0] == max(areas[0] + areas[1])
    # What this package keeps by sizes, and by patches, is for none of those timed.
    assert len(set(areas[1])) == len(new) == tower_cases.NEW_SIZES
    assert set(areas[0]).isdisjoint(areas[1])
    assert 0.95 < statistics.median(areas[1]) / (rows * columns) < 1.05


def test_each_call_of_a_new_size_gets_its_pixels():
    seen = []
    worker = object.__new__(tower_worker.Worker)
    worker._is_stack = False
    worker.tower = SimpleNamespace(visual=lambda x, grids: seen.append((x, grids)))
    worker._pixels = torch.arange(16 * 16.0)[:, None]
    worker._grids = [[1, 16, 16]]
    _, run = worker._of_new_sizes()
    for _ in range(tower_cases.NEW_SIZES):
        run()
    assert len({str(grids) for _, grids in seen}) == tower_cases.NEW_SIZES
    assert [len(x) for x, _ in seen] == [math.prod(grids[0]) for _, grids in seen]


@pytest.mark.parametrize("seen_s", [0.0, 0.001, 0.02])
def test_the_same_new_sizes_are_timed_however_many_came_before(monkeypatch, seen_s):
    monkeypatch.setattr(tower_worker, "SEEN_S", seen_s)
    seen = []

    def visual(x, grids):
        seen.append(tuple(map(tuple, grids)))
        return x

    worker = object.__new__(tower_worker.Worker)
    worker._is_stack = False
    worker.tower = SimpleNamespace(visual=visual)
    worker._clock = timing.Clock(torch.device("cpu"))
    worker._pixels = worker._reference = torch.ones(16 * 16, 1)
    worker._grids, worker._gate = [[1, 16, 16]], 0.1
    worker._runs, worker._before = {}, {}
    worker.check("new")
    assert seen[0] == ((1, 16, 16),)
    before, new = tower_cases.of_new_sizes(((1, 16, 16),))
    assert all(batch in before for batch in seen[1:])
    seen.clear()
    for count in (1, 2, 2):
        worker.sample("new", count, True)
    # Each turn's first call warms up.
    warm_ups = [seen.pop(place) for place in (5, 2, 0)]
    assert all(batch in before for batch in warm_ups)
    assert seen == new[:5]


def test_new_sizes_are_as_many_in_a_fast_mode_as_in_a_slow_one():
    class Remote:
        def __init__(self, taken_ms):
            self.taken_ms = taken_ms

        def call(self, method, mode, count, warm_up):
            return [self.taken_ms] * count

    bench = tower_bench.Bench(None, None, None, ["new"], [], "bf16", 1.0)
    for taken_ms in (1.0, 500.0):
        remotes = [Remote(taken_ms), Remote(2 * taken_ms)]
        taken = bench._take_turns(remotes, "new").values()
        assert [len(ms) for ms in taken] == [tower_cases.NEW_SIZES - 1] * 2


def test_encoder_cases_are_complete():
    assert len(tower_cases.CASES) == 11
    assert len(tower_cases.CASES["mixed"]) == 6
    assert set(op_problems.CASES) == {
        *tower_cases.CASES,
        "win64x256",
        "win64x1024",
    }
    assert op_problems.CASES["win64x256"] == (64,) * 256


def test_processes_take_turns():
    asked = []

    class Remote:
        def __init__(self, name):
            self.name = name

        def call(self, method, mode, count, warm_up):
            asked.append(self.name)
            return [1.0] * count

    bench = tower_bench.Bench(None, None, None, ["graph"], [], "bf16", 0.0)
    remotes = [Remote(name) for name in "abc"]
    samples = bench._take_turns(remotes, "graph")
    assert [len(samples[remote]) for remote in remotes] == [6, 6, 6]
    assert "".join(asked) == "abc" + "abc" + "cba" + "bca" + "acb" + "cab" + "bac"


def test_stock_runs_without_plugins_and_forced_kernels_by_setting():
    of = contenders.Contender.of
    stock = of("stock-flashinfer", "bf16")
    assert (stock.backend, stock.is_stock) == ("FLASHINFER", True)
    assert stock.environment == {"VLLM_PLUGINS": ""}
    forced = of("plugin-cudnn", "bf16", "compiled")
    assert (forced.backend, forced.is_stock) == ("FLASHINFER", False)
    assert forced.environment == {"VLLM_FLASHINFER_VIT_KERNEL": "cudnn"}
    # A kernel that the user's environment forces is none of a row's that names none.
    own_choice = {"VLLM_FLASHINFER_VIT_KERNEL": "auto"}
    assert of("plugin", "bf16").environment == own_choice
    assert of("plugin", "bf16").attn_dtype is None
    fp8 = of("plugin-fp8", "bf16")
    assert (fp8.attn_dtype, fp8.environment) == ("fp8", own_choice)
    forced = of("plugin-triton_fp8", "bf16")
    assert forced.attn_dtype == "fp8"
    assert forced.environment == {"VLLM_FLASHINFER_VIT_KERNEL": "triton_fp8"}
    for name in ("stock-flash_attn4", "plugin", "plugin-fp8", "plugin-cudnn"):
        plain = of(name, "bf16")
        assert plain.quantization is None
        for end, method in (("-q8", "fp8"), ("-b8", "fp8_per_block")):
            same = replace(plain, provider=name + end, quantization=method)
            assert of(name + end, "bf16") == same
    odds = (
        "stock",
        "stock-",
        "stock-q8",
        "stock-4",
        "stock-flashinfer4",
        "stock-my_flash_attn4",
    )
    for odd in (*odds, "odd"):
        with pytest.raises(ValueError, match="stock"):
            of(odd, "bf16")


def test_stock_runs_the_flash_attention_that_is_asked_for():
    of = contenders.Contender.of
    for name, version in (("stock-flash_attn", None), ("stock-flash_attn4", 4)):
        contender = of(name, "bf16", "compiled")
        assert (contender.backend, contender.flash_attn_version) == (
            "FLASH_ATTN",
            version,
        )
        assert (contender.provider, contender.is_stock) == (name, True)
    assert of("plugin-flash_attn_4", "bf16").flash_attn_version is None


@pytest.mark.parametrize("is_supported", [True, False])
def test_flash_attention_4_is_measured_where_vllm_can_run_it(monkeypatch, is_supported):
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(
        fa_utils, "is_fa_version_supported", lambda version: is_supported
    )
    found = contenders.default_providers(on_gpu=True)
    assert ("stock-flash_attn4" in found) is is_supported
    assert {"stock-flash_attn", "stock-flashinfer", "plugin"} <= set(found)
    assert contenders.default_providers(on_gpu=False) == (
        "stock-torch_sdpa",
        "plugin",
    )


def test_a_contender_is_what_its_name_says():
    of, check = contenders.Contender.of, contenders.check_promises
    compiled, eager = (SimpleNamespace(do_not_compile=flag) for flag in (False, True))
    layer = SimpleNamespace(_fa_version=4)
    check(of("stock-flash_attn4", "bf16"), layer, [eager])
    check(of("stock-flash_attn", "bf16", "compiled"), layer, [compiled] * 2)
    with pytest.raises(RuntimeError, match="got attention layers"):
        check(of("plugin", "bf16"), layer, [eager])
    quantized = torch.nn.Module()
    quantized.output_size = 8
    quantized.weight = torch.zeros(8, 8, dtype=torch.float8_e4m3fn)
    plain = torch.nn.Module()
    plain.output_size = 8
    plain.weight = torch.zeros(8, 8)
    check(of("stock-flash_attn-q8", "bf16"), layer, [quantized])
    with pytest.raises(RuntimeError, match="not quantised"):
        check(of("stock-flash_attn-q8", "bf16"), layer, [quantized, plain])
    # Where vLLM cannot run a version, it takes another one.
    with pytest.raises(RuntimeError, match="FlashAttention None here, not 4"):
        check(of("stock-flash_attn4", "bf16"), SimpleNamespace(_fa_version=None), [])
    for blocks in ([compiled, eager], [SimpleNamespace()]):
        with pytest.raises(RuntimeError, match="does not compile the blocks"):
            check(of("stock-flash_attn", "bf16", "compiled"), layer, blocks)


def test_modes_name_how_the_blocks_run():
    blocks = [contenders.blocks_of(mode) for mode in contenders.MODES]
    assert list(dict.fromkeys(blocks)) == list(contenders.BLOCKS)
    assert blocks == [name for name in contenders.BLOCKS for _ in range(3)]


def test_host_modes_run_the_same_blocks_as_others():
    blocks = [
        contenders.blocks_of(mode) for mode in ("host", "fused_host", "compiled_host")
    ]
    assert blocks == list(contenders.BLOCKS)


def test_only_stock_runs_in_modes_of_its_own():
    bench = tower_bench.Bench(
        None, None, None, ["graph"], ["fused_graph", "compiled"], "bf16", 1.0
    )

    def modes(provider):
        return [
            mode
            for blocks in contenders.BLOCKS
            for mode in contenders.MODES
            if bench.runs(contenders.Contender.of(provider, "bf16", blocks), mode)
        ]

    assert modes("stock-flash_attn") == ["graph", "fused_graph", "compiled"]
    assert modes("plugin") == modes("plugin-fp8") == ["graph"]
    # Compiled blocks with this package's attention, if they are asked for.
    bench.modes = ["graph", "compiled_graph"]
    assert modes("plugin") == ["graph", "compiled_graph"]


def test_a_towers_host_time_is_over_its_blocks(monkeypatch):
    monkeypatch.setattr(tower_worker, "host_ms", lambda run: run())
    calls = []

    def run():
        calls.append(1)
        return 81.0

    worker = SimpleNamespace(
        _runs={"host": run, "fused_host": run},
        _before={},
        tower=SimpleNamespace(spec=SimpleNamespace(depth=27)),
    )
    for mode in worker._runs:
        assert tower_worker.Worker.sample(worker, mode, 2, True) == [3.0, 3.0]
    assert len(calls) == 6


class Remote:
    """A contender's tower whose calls take 0.05 ms."""

    def __init__(self, provider, blocks="eager"):
        self.contender = contenders.Contender.of(provider, "bf16", blocks)

    def call(self, method, *arguments):
        if method == "sample":
            return [0.05] * arguments[1]
        return {"load": "", "check": 0.01}[method]


def rows_of(folder, remotes, modes, stock_modes, name="encoder"):
    """Return the rows of a case."""
    log = CsvLog(folder / "rows.csv")
    bench = tower_bench.Bench(
        log, ENVIRONMENT, Failures(), modes, stock_modes, "bf16", 0.0, name
    )
    grids = tower_cases.CASES["1x256"]
    bench._run_case("a model", "1x256", grids, remotes, "", 1e12, 80)
    with log.path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_tower_of_host_rows_counts_no_operations(tmp_path):
    (row,) = rows_of(tmp_path, [Remote("plugin")], ["host"], [], "tower_host")
    assert (row["bench"], row["mode"], row["tflops"]) == ("tower_host", "host", "0")
    assert (row["p50_ms"], row["rel_err"]) == ("0.0500", "1.00e-02")


def test_a_run_that_is_cut_short_leaves_no_part_of_a_case(tmp_path, monkeypatch):
    remotes = [
        Remote("stock-flash_attn"),
        Remote("plugin"),
        Remote("stock-flash_attn", "fused"),
    ]
    modes = ["graph"], ["fused_graph", "graph"]
    rows = rows_of(tmp_path, remotes, *modes)
    assert [(row["provider"], row["mode"]) for row in rows] == [
        ("stock-flash_attn", "fused_graph"),
        ("stock-flash_attn", "graph"),
        ("plugin", "graph"),
    ]

    def call(method, *arguments):
        if method == "sample":
            raise KeyboardInterrupt
        return Remote.call(remotes[1], method, *arguments)

    monkeypatch.setattr(remotes[1], "call", call)
    with pytest.raises(KeyboardInterrupt):
        rows_of(tmp_path, remotes, *modes)
    assert rows_of(tmp_path, [], *modes) == rows


def test_metadata_of_a_known_batch_comes_first_and_is_not_timed(monkeypatch):
    prepared = []
    visual = SimpleNamespace(prepare_encoder_metadata=prepared.append)
    worker = SimpleNamespace(tower=SimpleNamespace(visual=visual))

    def host_ms(call):
        call()
        return float(len(prepared))

    monkeypatch.setattr(tower_worker, "host_ms", host_ms)
    batches = [((1, 4, 6),), ((2, 4, 4),) * 2]
    times = tower_worker.Worker.metadata_ms(worker, ((1, 8, 8),), batches)
    assert times == [2.0, 3.0]
    assert prepared == [[[1, 8, 8]], [[1, 4, 6]], [[2, 4, 4], [2, 4, 4]]]


def test_environment_of_a_process_does_not_stay(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    monkeypatch.delenv("VLLM_FLASHINFER_VIT_KERNEL", raising=False)
    wanted = {"VLLM_PLUGINS": "", "VLLM_FLASHINFER_VIT_KERNEL": "cudnn"}
    started = {}
    monkeypatch.setattr(
        SpawnProcess, "start", lambda process: started.update(os.environ)
    )
    remote.Remote(SimpleNamespace, (), wanted, 1.0)
    assert {name: started[name] for name in wanted} == wanted
    assert os.environ["VLLM_PLUGINS"] == "mine"
    assert "VLLM_FLASHINFER_VIT_KERNEL" not in os.environ
