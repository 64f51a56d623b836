# SPDX-License-Identifier: Apache-2.0
"""Files of measured choices: names, what is written, and what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.gemm_table import GemmClass, GemmMeasurement
from vllm_flashinfer_vit.choices.table import Measurement, Table, TableError
from vllm_flashinfer_vit.ops.plan import Class

GPU = "NVIDIA H200"
TABLE = Table(
    made_by={"gpu": GPU, "vllm": "0.25.1", "torch": "2.9"},
    classes={
        "bfloat16/80": (Class(128, "triton_window"), Class(None, "flash_attn")),
        "bfloat16/96": (Class(None, "cudnn"),),
        "float16/80": (Class(1024, "cudnn"), Class(None, "flash_attn")),
    },
    measurements=(Measurement("bfloat16", 80, 64, 4, {"cudnn": 9.5, "flash_attn": 8}),),
    left_out=('cudnn at "4 x 64"',),
    gemms={
        "bfloat16/1152x3456/tensor": (
            GemmClass(512, "cublaslt"),
            GemmClass(None, "cutlass"),
        ),
        "bfloat16/1152x3456/rows": (GemmClass(None, "cutlass"),),
    },
    gemm_measurements=(
        GemmMeasurement("bfloat16/1152x3456/rows", 64, {"cutlass": 5, "cublaslt": 4.5}),
    ),
)


@pytest.fixture
def user(tmp_path: Path) -> Path:
    return tmp_path / "user"


def put(folder: Path, table: Table) -> Path:
    path = folder / tuned.file_name(table.made_by["gpu"])
    tuned.write(table, path)
    return path


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "h200.json"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3.json"),
        ("NVIDIA RTX PRO 6000 Blackwell", "rtx-pro-6000-blackwell.json"),
        ("Tesla T4/../x", "tesla-t4-x.json"),
    ],
)
def test_a_gpus_file_is_named_after_it(gpu: str, name: str) -> None:
    assert tuned.file_name(gpu) == name


def test_a_written_table_is_read_back(user: Path) -> None:
    path = put(user, TABLE)
    assert tuned.read(user, GPU) == TABLE
    assert [entry.name for entry in user.iterdir()] == [path.name]
    # One line for each entry, so that a change of the file can be read.
    lines = path.read_text().splitlines()
    assert sum('"bfloat16/' in line for line in lines) == 5
    assert sum('"longest": 64' in line for line in lines) == 1
    assert sum('"rows": 64' in line for line in lines) == 1


@pytest.mark.parametrize("schema", [2, 3])
def test_an_old_file_lacks_versions_and_gemms_and_is_read(
    schema: int, user: Path
) -> None:
    path = put(user, TABLE)
    document = json.loads(path.read_text())
    assert document["schema"] == tuned.SCHEMA == "vllm-flashinfer-vit/choices/4"
    document["schema"] = f"vllm-flashinfer-vit/choices/{schema}"
    del document["gemms"], document["gemm_measurements"]
    path.write_text(json.dumps(document))
    assert tuned.read(user, GPU) == replace(TABLE, gemms={}, gemm_measurements=())


def test_a_table_without_measurements_is_json_too(user: Path) -> None:
    table = replace(TABLE, measurements=(), left_out=())
    put(user, table)
    assert tuned.read(user, GPU) == table


def test_a_failed_write_leaves_the_old_file(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(user, TABLE)

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        put(user, replace(TABLE, left_out=()))
    monkeypatch.undo()
    assert tuned.read(user, GPU) == TABLE
    assert len(list(user.iterdir())) == 1


def test_a_table_that_would_be_refused_is_not_written(user: Path) -> None:
    bad = replace(TABLE, classes={"bfloat16/80": (Class(128, "cudnn"),)})
    with pytest.raises(ValueError, match="lacks the last class"):
        put(user, bad)
    assert not user.exists()


def test_no_file_is_no_error(user: Path) -> None:
    assert tuned.read(user, GPU) is None


def _with_classes(*rows: Any) -> dict[str, Any]:
    return {"classes": {"bfloat16/80": list(rows)}}


def _measured(us: float) -> dict[str, Any]:
    return Measurement("bfloat16", 80, 64, 4, {"cudnn": us})._asdict()


def _with_gemms(*rows: Any, name: str = "bfloat16/64x48/rows") -> dict[str, Any]:
    found = [row if isinstance(row, dict) else _gemm(row) for row in rows]
    return {"gemms": {name: found}}


def _gemm(max_rows: Any, gemm: str = "cublaslt") -> dict[str, Any]:
    return {"max_rows": max_rows, "gemm": gemm}


def _row(
    max_len: Any, kernel: str = "cudnn", many: str | None = None
) -> dict[str, Any]:
    return {"max_len": max_len, "kernel": kernel, "many": many}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        pytest.param({"schema": "vllm-flashinfer-vit/choices/9"}, "schema", id="newer"),
        pytest.param({"schema": None}, "schema", id="no-schema"),
        pytest.param({"made_by": {"vllm": "1"}}, "made_by.gpu is missing", id="no-gpu"),
        pytest.param(
            {"made_by": {"gpu": GPU, "vllm": 1}},
            "made_by.vllm is 1, not a string",
            id="vllm",
        ),
        pytest.param(
            {"made_by": {"gpu": GPU, "vllm": "1", "quack": 5}},
            "made_by.quack is 5, not a string",
            id="quack",
        ),
        pytest.param(
            {"made_by": {"gpu": "NVIDIA A100", "vllm": "1"}}, "not of", id="other-gpu"
        ),
        pytest.param(
            {"classes": []}, "classes is [], not an object", id="classes-list"
        ),
        pytest.param(
            {"classes": {"bf16": [_row(None)]}}, "no dtype/head dim", id="name"
        ),
        pytest.param(
            {"classes": {f"bf16/{'8' * 5000}": [_row(None)]}},
            "no dtype/head dim",
            id="long-number",
        ),
        pytest.param(
            {"measurements": [{"us": {}}]},
            "measurements[0].dtype is missing",
            id="measurement",
        ),
        *(
            pytest.param(
                {"measurements": [_measured(us)]},
                f"measurements[0].us.cudnn is {us}",
                id=f"{us}-us",
            )
            for us in (0.0, -1.0, math.nan, math.inf)
        ),
        pytest.param({"left_out": None}, "left_out is None, not a list", id="left-out"),
        pytest.param(_with_classes(), "lacks the last class", id="no-class"),
        pytest.param(_with_classes(_row(64)), "lacks the last class", id="no-last"),
        pytest.param(
            _with_classes(_row(None), _row(64)), "after the one for any", id="after"
        ),
        pytest.param(
            _with_classes(_row(64), _row(64), _row(None)), "must ascend", id="equal"
        ),
        pytest.param(_with_classes(_row(0), _row(None)), "must ascend", id="zero"),
        pytest.param(
            _with_classes(_row("64"), _row(None)), "[0].max_len is '64'", id="text"
        ),
        pytest.param(
            _with_classes(_row(True), _row(None)), "[0].max_len is True", id="bool"
        ),
        pytest.param(
            _with_classes({"max_len": None}),
            "['bfloat16/80'][0].kernel is missing",
            id="row",
        ),
        pytest.param(
            _with_classes(_row(None, "fa9")), "kernel is 'fa9': known are", id="kernel"
        ),
        pytest.param(
            _with_classes(_row(None, many="fa9")), "many is 'fa9': known are", id="many"
        ),
        pytest.param(
            _with_classes({"max_len": None, "kernel": "cudnn"}),
            "['bfloat16/80'][0].many is missing",
            id="no-many",
        ),
        pytest.param(
            _with_classes(_row(None, many="triton_window")),
            "more than 128 tokens",
            id="unbounded-for-many",
        ),
        pytest.param(
            _with_classes(_row(129, "triton_window"), _row(None)),
            "more than 128 tokens",
            id="too-long-for-its-kernel",
        ),
        pytest.param(
            _with_classes(_row(None, "triton_window")),
            "more than 128 tokens",
            id="unbounded-for-its-kernel",
        ),
        pytest.param({"gemms": []}, "gemms is [], not an object", id="gemms-list"),
        pytest.param(_with_gemms(), "lacks the last class", id="no-gemm"),
        pytest.param(_with_gemms(64), "lacks the last class", id="no-last-gemm"),
        pytest.param(_with_gemms(None, None), "after the one for any", id="after-any"),
        pytest.param(_with_gemms(64, 64, None), "must ascend", id="equal-rows"),
        pytest.param(_with_gemms(0, None), "must ascend", id="zero-rows"),
        pytest.param(_with_gemms(True, None), "max_rows is True", id="bool-rows"),
        pytest.param(
            _with_gemms(_gemm(None, "deep_gemm")),
            "gemm is 'deep_gemm': known are cutlass, cublaslt",
            id="gemm",
        ),
        pytest.param(
            _with_gemms({"max_rows": None}), "[0].gemm is missing", id="gemm-row"
        ),
        *(
            pytest.param(_with_gemms(None, name=name), "is no layer such as", id=name)
            for name in (
                "bfloat16/64/rows",
                "bfloat16/64x48",
                "bfloat16/64x48/blocks",
                "bfloat16/0x48/rows",
                "bfloat16/64x48/rows/",
            )
        ),
        pytest.param(
            {"gemm_measurements": [{"layer": "bfloat16/64x48/rows", "rows": 64}]},
            "gemm_measurements[0].us is missing",
            id="gemm-measurement",
        ),
        pytest.param(
            {
                "gemm_measurements": [
                    {"layer": "bfloat16/64x48/rows", "rows": 64, "us": {"cutlass": 0}}
                ]
            },
            "gemm_measurements[0].us.cutlass is 0",
            id="gemm-in-no-time",
        ),
        pytest.param(
            {"gemm_measurements": [{"layer": "qkv", "rows": 64, "us": {}}]},
            "is no layer such as",
            id="measured-layer",
        ),
    ],
)
def test_a_file_that_breaks_the_schema_is_refused(
    user: Path, changes: dict[str, Any], what: str
) -> None:
    path = put(user, TABLE)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(TableError) as caught:
        tuned.read(user, GPU)
    message = str(caught.value)
    assert what in message
    assert str(path) in message
    assert "delete it or run `vllm-flashinfer-vit tune` again" in message


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"[" * 200_000, None])
def test_a_damaged_file_is_refused(user: Path, content: bytes | None) -> None:
    path = put(user, TABLE)
    text = path.read_bytes()
    # None: as an interrupted copy leaves it.
    path.write_bytes(text[: len(text) // 2] if content is None else content)
    with pytest.raises(TableError, match="tune` again") as caught:
        tuned.read(user, GPU)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("path", sorted(tuned.BUNDLED.glob("*/*.json")), ids=str)
def test_a_bundled_file_follows_from_its_measurements(path: Path) -> None:
    pytest.importorskip("torch")
    from vllm_flashinfer_vit.choices.derive import derive_classes, derive_gemm_classes

    table = tuned.read(path.parent, json.loads(path.read_text())["made_by"]["gpu"])
    assert table is not None
    assert table.made_by["vllm"] == path.parent.name
    assert table.classes
    for name, classes in table.classes.items():
        rows = [m for m in table.measurements if name == tuned.key(m.dtype, m.head_dim)]
        assert derive_classes(rows) == classes
    for name, gemms in table.gemms.items():
        times = [m for m in table.gemm_measurements if m.layer == name]
        assert derive_gemm_classes(times) == gemms
