# SPDX-License-Identifier: Apache-2.0
"""Damaged files of choices: a table that serves every length, or an error."""

import json
from pathlib import Path
from typing import Any

import pytest
from _fuzz import GARBAGE, changed, damaged, fuzz
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.gemm_table import GemmClass, GemmMeasurement
from vllm_flashinfer_vit.choices.gemms import measured_gemms
from vllm_flashinfer_vit.choices.lookup import choices_for, fp8_choices_for, plan_of
from vllm_flashinfer_vit.choices.table import Measurement, Table, TableError
from vllm_flashinfer_vit.gemms.catalog import GEMMS, SCALES
from vllm_flashinfer_vit.kernels.catalog import KERNELS
from vllm_flashinfer_vit.machine.stack import Gpu, Stack
from vllm_flashinfer_vit.ops.plan import Class

GPU = "NVIDIA H200"
HERE = Gpu(GPU, (9, 0), 2**37)
TABLE = Table(
    made_by={"gpu": GPU, "vllm": "0.25.1", "torch": "2.9"},
    classes={
        "bfloat16/80": (
            Class(128, "triton_window"),
            Class(2048, "flash_attn_4", "flash_attn"),
            Class(None, "cudnn"),
        ),
        "float8_e4m3fn/80": (Class(2048, "triton"), Class(None, "hopper_fp8")),
    },
    measurements=(Measurement("bfloat16", 80, 64, 4, {"cudnn": 9.5, "triton": 8}),),
    left_out=("cudnn",),
    gemms={
        "bfloat16/64x48/rows": (GemmClass(512, "cublaslt"), GemmClass(None, "cutlass"))
    },
    gemm_measurements=(GemmMeasurement("bfloat16/64x48/rows", 64, {"cublaslt": 4.5}),),
)
DOCUMENT = json.loads(tuned.dumps(TABLE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("user")


def read(folder: Path, content: bytes) -> Table | None:
    """Return what a file holds, or None after the error that a user should see."""
    path = folder / tuned.file_name(GPU)
    path.write_bytes(content)
    try:
        return tuned.read(folder, GPU)
    except TableError as error:
        text = str(error)
        assert text.startswith(f"the file of choices {path} cannot be used: ")
        assert text.endswith("delete it or run `vllm-flashinfer-vit tune` again")
        return None


def assert_serves(table: Table, folder: Path) -> None:
    """Each entry has a kernel for each length, which takes sequences of that length."""
    for classes in table.classes.values():
        bounds = [c.max_len for c in classes]
        assert bounds[-1] is None
        assert bounds[:-1] == sorted({x for x in bounds if x is not None and x > 0})
        for max_len, *kernels in classes:
            for kernel in filter(None, kernels):
                longest = KERNELS[kernel].max_len
                assert longest is None or (max_len is not None and max_len <= longest)
    for name, gemms in table.gemms.items():
        bounds = [c.max_rows for c in gemms]
        assert bounds[-1] is None
        assert bounds[:-1] == sorted({x for x in bounds if x is not None and x > 0})
        assert {c.gemm for c in gemms} <= set(GEMMS)
        _, sizes, scales = name.split("/")
        assert min(map(int, sizes.split("x"))) > 0 and scales in SCALES
        if torch := table.made_by.get("torch"):
            found = measured_gemms(Stack("3.12", torch=torch, gpus=(HERE,)), folder)
            assert found[name].classes == gemms
    # What it holds can be looked up.
    stack = Stack("3.12", gpus=(HERE,))
    for head_dim in (8, 80, 256):
        for look_up in (choices_for, fp8_choices_for):
            choices = look_up(stack, "bfloat16", head_dim, folder)
            for length in (1, 128, 129, 2**20):
                assert plan_of(choices).kernel_for(length) in KERNELS


@given(content=damaged(tuned.dumps(TABLE).encode()) | st.binary(max_size=40))
@fuzz(200)
def test_one_wrong_byte_leaves_a_table_that_serves_or_an_error(
    folder: Path, content: bytes
) -> None:
    if (table := read(folder, content)) is not None:
        assert_serves(table, folder)


def with_name(name: str) -> dict[str, Any]:
    return {**DOCUMENT, "classes": {name: DOCUMENT["classes"]["bfloat16/80"]}}


def with_layer(name: str) -> dict[str, Any]:
    return {**DOCUMENT, "gemms": {name: DOCUMENT["gemms"]["bfloat16/64x48/rows"]}}


@given(
    document=changed(DOCUMENT)
    | GARBAGE
    | st.builds(with_name, st.text(max_size=12))
    | st.from_regex(r"[a-z0-9_]+/[0-9]+", fullmatch=True).map(with_name)
    | st.builds(with_layer, st.text(max_size=12))
    | st.from_regex(r"[a-z0-9]+/[0-9]+x[0-9]+/rows?", fullmatch=True).map(with_layer)
)
@example(document=with_name("bfloat16/" + "8" * 5000))
@example(document=with_layer("bfloat16/" + "8" * 5000 + "x16/rows"))
@fuzz(100)
def test_one_wrong_entry_leaves_a_table_that_serves_or_an_error(
    folder: Path, document: Any
) -> None:
    if (table := read(folder, json.dumps(document).encode())) is not None:
        assert_serves(table, folder)


def test_a_file_that_was_cut_off_anywhere_is_refused(folder: Path) -> None:
    content = tuned.dumps(TABLE).rstrip().encode()
    for end in range(len(content)):
        assert read(folder, content[:end]) is None
    assert read(folder, content) == TABLE


@given(gpu=st.text(max_size=30))
@fuzz(200)
def test_the_file_of_a_gpu_lies_in_its_folder(folder: Path, gpu: str) -> None:
    """Whatever the driver calls it; without such a file there is no table."""
    path = folder / tuned.file_name(gpu)
    assert path.parent == folder
    assert path.resolve().parent == folder.resolve()
    if path.name != tuned.file_name(GPU):
        assert tuned.read(folder, gpu) is None
