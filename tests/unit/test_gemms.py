# SPDX-License-Identifier: Apache-2.0
"""GEMMs of layers in FP8: the look-up, how classes follow from times, the measuring."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _stacks import ADA, AMPERE, HOPPER, STACK

pytest.importorskip("vllm")

import torch
from _tuning import CPU, ToldClock

from vllm_flashinfer_vit.choices import gemms, measure_gemms
from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.derive import TuneError, derive_gemm_classes
from vllm_flashinfer_vit.choices.gemm_table import (
    GemmClass,
    GemmLayer,
    GemmMeasurement,
)
from vllm_flashinfer_vit.choices.lookup import is_measured
from vllm_flashinfer_vit.gemms import scaled_mm
from vllm_flashinfer_vit.gemms.catalog import CUBLASLT, CUTLASS, GEMMS, SCALES
from vllm_flashinfer_vit.gemms.scaled_mm import OpGemm
from vllm_flashinfer_vit.kernels.row_scales_ref import scaled_mm_ref

LAYER = GemmLayer("bfloat16", 32, 48, "rows")
GPU = HOPPER.name
FEW = (GemmClass(512, CUBLASLT), GemmClass(None, CUTLASS))
ALWAYS = (GemmClass(None, CUBLASLT),)


def put(folder: Path, torch: str = "2.11.0+cu130", **entries: Any) -> None:
    made_by = {"gpu": GPU, "vllm": "0.33.0", "torch": torch}
    table = tuned.Table(made_by, {}, gemms=entries)
    tuned.write(table, folder / tuned.file_name(GPU))


class TestLookUp:
    @pytest.fixture
    def bundled(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "data" / "0.33.0"
        folder.mkdir(parents=True)
        monkeypatch.setattr(tuned, "BUNDLED", folder.parent)
        return folder

    def test_a_file_without_gemms_has_none(self, bundled: Path, tmp_path: Path) -> None:
        put(bundled)
        assert gemms.measured_gemms(STACK, tmp_path) == {}

    def test_the_users_file_comes_first_entry_by_entry(
        self, bundled: Path, tmp_path: Path
    ) -> None:
        other = LAYER._replace(scales="tensor").key
        put(bundled, **{LAYER.key: ALWAYS, other: ALWAYS})
        put(tmp_path, **{LAYER.key: FEW})
        found = gemms.measured_gemms(STACK, tmp_path)
        assert {name: choice.classes for name, choice in found.items()} == {
            LAYER.key: FEW,
            other: ALWAYS,
        }
        assert found[LAYER.key].reason.startswith("fastest on this machine")
        assert found[other].reason.startswith(f"fastest on {GPU}, measured by tune")
        assert gemms.measured_gemms(STACK)[LAYER.key].classes == ALWAYS

    def test_another_gpu_or_pytorch_has_none(
        self, bundled: Path, tmp_path: Path
    ) -> None:
        put(bundled, **{LAYER.key: ALWAYS})
        # A newer build of the same PyTorch.
        assert gemms.measured_gemms(replace(STACK, torch="2.11.0+cu131"))
        h100 = replace(STACK, gpus=(HOPPER._replace(name="NVIDIA H100"),))
        for stack in (h100, replace(STACK, torch="2.14.0"), replace(STACK, torch=None)):
            assert gemms.measured_gemms(stack) == {}
        assert gemms.measured_gemms(replace(STACK, gpus=())) == {}
        # The user's file of another PyTorch hides none that fits.
        put(tmp_path, torch="2.14.0", **{LAYER.key: FEW})
        assert gemms.measured_gemms(STACK, tmp_path)[LAYER.key].classes == ALWAYS

    def test_gemms_alone_do_not_measure_a_gpus_attention(self, tmp_path: Path) -> None:
        put(tmp_path, **{LAYER.key: FEW})
        # The package's are of another GPU.
        path = tmp_path / tuned.file_name(GPU)
        text = path.read_text().replace(GPU, ADA.name)
        (tmp_path / tuned.file_name(ADA.name)).write_text(text)
        assert not is_measured(ADA.name, tmp_path)

    def test_in_words(self) -> None:
        assert gemms.in_words(FEW) == "cuBLASLt up to 512 rows, CUTLASS"
        assert gemms.in_words(gemms.STOCK) == "CUTLASS"

    def test_a_layers_name(self) -> None:
        assert LAYER.key == "bfloat16/32x48/rows"


def derive(times: Mapping[int, tuple[float, float]]) -> list[tuple[int | None, str]]:
    rows = [
        GemmMeasurement(LAYER.key, n, {CUTLASS: cutlass, CUBLASLT: cublaslt_us})
        for n, (cutlass, cublaslt_us) in times.items()
    ]
    return [(c.max_rows, c.gemm) for c in derive_gemm_classes(rows)]


class TestDerive:
    def test_each_number_of_rows_gets_its_fastest(self) -> None:
        times = {16384: (10.0, 9.0), 8192: (9.0, 5.0), 32768: (30.0, 40.0)}
        assert derive(times) == [(16384, CUBLASLT), (None, CUTLASS)]

    def test_for_few_rows_the_host_counts_too(self) -> None:
        # CUTLASS takes it 20 us, and cuBLASLt 14.
        times = {256: (8.0, 9.0), 512: (8.0, 14.0), 1024: (16.0, 15.0)}
        expected = [(256, CUBLASLT), (512, CUTLASS), (None, CUBLASLT)]
        assert derive(times) == expected

    def test_near_ties_make_no_classes(self) -> None:
        times = {8192: (100.0, 99.0), 16384: (100.0, 110.0), 32768: (200.0, 197.0)}
        assert derive(times) == [(None, CUTLASS)]

    def test_beyond_a_tie_there_are_classes(self) -> None:
        times = {8192: (103.0, 100.0), 16384: (100.0, 103.0), 32768: (206.0, 200.0)}
        assert derive(times) == [(8192, CUBLASLT), (16384, CUTLASS), (None, CUBLASLT)]

    def test_what_did_not_run_has_none(self) -> None:
        alone = [GemmMeasurement(LAYER.key, 64, {CUTLASS: 9.0})]
        assert derive_gemm_classes(alone) == gemms.STOCK
        (found,) = derive_gemm_classes([alone[0]._replace(us={CUBLASLT: 9.0})])
        assert found.gemm == CUBLASLT
        with pytest.raises(TuneError, match="no GEMM"):
            derive_gemm_classes([])


TIMES = {CUTLASS: lambda rows: 10.0, CUBLASLT: lambda rows: rows / 4.0}


@pytest.fixture
def cublaslt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the reference, or what this is called with, be cuBLASLt's GEMM."""

    def be(function: Callable[..., None]) -> None:
        monkeypatch.setattr(scaled_mm, "CublasLt", lambda *_: OpGemm(function))

    be(scaled_mm_ref)
    return be


def measure(
    times: Any = TIMES, layer: GemmLayer = LAYER, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[GemmMeasurement], list[str]]:
    return measure_gemms.measure_gemms(
        layer, dtype, tuple(GEMMS), (8, 16, 64), ToldClock(times), CPU
    )


@pytest.mark.usefixtures("cublaslt")
class TestMeasure:
    @pytest.mark.parametrize("scales", SCALES)
    def test_every_number_of_rows_is_timed(self, scales: str) -> None:
        layer, clock, seen = LAYER._replace(scales=scales), ToldClock(TIMES), []
        found, left_out = measure_gemms.measure_gemms(
            layer,
            torch.bfloat16,
            tuple(GEMMS),
            (8, 64),
            clock,
            CPU,
            seen.append,  # type: ignore[attr-defined]
        )
        assert seen == ["8 rows", "64 rows"]
        assert clock.cells == [(8, 48), (64, 48)]
        assert found == [
            GemmMeasurement(layer.key, 8, {CUTLASS: 10.0, CUBLASLT: 2.0}),
            GemmMeasurement(layer.key, 64, {CUTLASS: 10.0, CUBLASLT: 16.0}),
        ]
        assert left_out == []

    def test_a_gemm_gets_what_the_layer_has(
        self, cublaslt: Callable[..., None]
    ) -> None:
        given: dict[str, tuple[torch.Tensor, ...]] = {}

        def note(*operands: torch.Tensor) -> None:
            given[scales] = operands
            scaled_mm_ref(*operands)  # type: ignore[arg-type]

        cublaslt(note)
        for scales in SCALES:
            measure(layer=LAYER._replace(scales=scales), dtype=torch.float16)
        shapes = {name: [tuple(t.shape) for t in all_] for name, all_ in given.items()}
        first = [(64, 48), (64, 32), (32, 48)]
        assert shapes["rows"] == [*first, (64, 1), (1, 48), (48,)]
        assert shapes["tensor"] == [*first, (1,), (1,), (48,)]
        assert shapes["tokens"] == [*first, (64, 1), (1,), (48,)]
        out, rows, weight, scale, weight_scale, bias = given["rows"]
        assert {out.dtype, bias.dtype} == {torch.float16}
        assert {rows.dtype, weight.dtype} == {torch.float8_e4m3fn}
        assert {scale.dtype, weight_scale.dtype} == {torch.float32}
        assert weight.stride(0) == 1 and rows.is_contiguous()
        assert scale.min() >= 0.5
        # Products as large as a bias, so that either shows in the error.
        for x in (out.float() - bias.float(), bias.float()):
            assert 0.5 < float(x.std()) < 4

    @pytest.mark.parametrize(
        ("vllms", "cublaslts", "exact_enough"),
        [
            (0.0, 0.01, {CUTLASS}),
            (0.01, 0.0105, {CUTLASS, CUBLASLT}),
            (0.01, 0.012, {CUTLASS}),
            (0.03, 0.0, {CUBLASLT}),
        ],
    )
    def test_cublaslts_must_be_as_exact_as_vllms(
        self,
        vllms: float,
        cublaslts: float,
        exact_enough: set[str],
        cublaslt: Callable[..., None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def off_by(error: float) -> Callable[..., None]:
            def multiply(out: torch.Tensor, *operands: Any) -> None:
                exact = torch.empty_like(out, dtype=torch.float32)
                scaled_mm_ref(exact, *operands)
                out.copy_(exact * (1 + error))

            return multiply

        cublaslt(off_by(cublaslts))
        monkeypatch.setattr(scaled_mm, "scaled_mm_ref", off_by(vllms))
        found, left_out = measure()
        assert [set(m.us) for m in found] == [exact_enough] * 3
        assert [line.partition(":")[0] for line in left_out] == [
            f"{gemm} from 8 rows on" for gemm in GEMMS if gemm not in exact_enough
        ]
        assert all("WrongResultError: wrong" in line for line in left_out)

    @pytest.mark.parametrize(
        ("most_checked", "timed"), [(63, {CUTLASS, CUBLASLT}), (64, {CUTLASS})]
    )
    def test_more_rows_are_timed_without_a_check(
        self,
        most_checked: int,
        timed: set[str],
        cublaslt: Callable[..., None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def wrong_of_64(out: torch.Tensor, *operands: Any) -> None:
            if len(out) < 64:
                scaled_mm_ref(out, *operands)

        cublaslt(wrong_of_64)
        monkeypatch.setattr(measure_gemms, "_GATE_MAX_ROWS", most_checked)
        found, left_out = measure()
        assert [set(m.us) for m in found] == [timed] * 3
        assert bool(left_out) is (CUBLASLT not in timed)

    def test_a_wrong_one_loses_all_of_its_times(
        self, cublaslt: Callable[..., None]
    ) -> None:
        def few_only(out: torch.Tensor, *operands: Any) -> None:
            if len(out) < 64:
                scaled_mm_ref(out, *operands)

        cublaslt(few_only)
        found, left_out = measure()
        assert [set(m.us) for m in found] == [{CUTLASS}] * 3
        # What it did not write is NaN.
        assert "cublaslt from 64 rows on" in left_out[0] and "error nan" in left_out[0]

    def test_one_that_fails_is_left_out(self, cublaslt: Callable[..., None]) -> None:
        def fail(*operands: Any) -> None:
            raise RuntimeError("no algorithm\nand a long story")

        cublaslt(fail)
        found, left_out = measure()
        assert [set(m.us) for m in found] == [{CUTLASS}] * 3
        assert left_out == ["cublaslt from 8 rows on: RuntimeError: no algorithm"]

    def test_rows_that_memory_does_not_hold_are_skipped(
        self, cublaslt: Callable[..., None]
    ) -> None:
        def small_only(out: torch.Tensor, *operands: Any) -> None:
            if len(out) == 16:
                raise torch.OutOfMemoryError("CUDA out of memory")
            scaled_mm_ref(out, *operands)

        cublaslt(small_only)
        found, left_out = measure()
        assert [m.rows for m in found] == [8, 64]
        assert all(len(m.us) == 2 for m in found)
        assert left_out == ["16 rows: out of memory"]


def test_candidates_need_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure_gemms.gemm_candidates(STACK) == ()
    monkeypatch.setattr(measure_gemms, "cutlass_op", lambda: print)
    for gpu, expected in ((HOPPER, tuple(GEMMS)), (ADA, tuple(GEMMS)), (AMPERE, ())):
        stack = replace(STACK, gpus=(gpu,))
        assert measure_gemms.gemm_candidates(stack) == expected
    assert measure_gemms.gemm_candidates(replace(STACK, gpus=())) == ()
