# SPDX-License-Identifier: Apache-2.0
"""The look-up of kernel choices, and what becomes of them where a kernel cannot run."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from _stacks import HOPPER, STACK

from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.lookup import (
    Choice,
    choices_for,
    fp8_choices_for,
    fp8_ranges,
    other_versions,
    plan_of,
)
from vllm_flashinfer_vit.choices.table import Measurement, Table
from vllm_flashinfer_vit.machine.stack import Gpu, Stack
from vllm_flashinfer_vit.ops import attention as ops
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.ops.plan import Class, Plan

GPU = "NVIDIA H200"
H200 = Stack("3.12.1", gpus=(HOPPER,))
NO_GPU = Stack("3.12.1")
TABLE = Table(
    made_by={"gpu": GPU, "vllm": "0.25.1"},
    classes={
        "bfloat16/80": (Class(128, "triton_window"), Class(None, "flash_attn")),
        "bfloat16/96": (Class(None, "cudnn"),),
        "float16/80": (Class(1024, "cudnn"), Class(None, "flash_attn")),
    },
    measurements=(Measurement("bfloat16", 80, 64, 4, {"cudnn": 9.5, "flash_attn": 8}),),
    left_out=('cudnn at "4 x 64"',),
)


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the package's own files for vLLM 0.25.1."""
    folder = tmp_path / "bundled" / "0.25.1"
    folder.mkdir(parents=True)
    monkeypatch.setattr(tuned, "BUNDLED", folder.parent)
    return folder


@pytest.fixture
def user(tmp_path: Path) -> Path:
    return tmp_path / "user"


def put(folder: Path, table: Table) -> Path:
    path = folder / tuned.file_name(table.made_by["gpu"])
    tuned.write(table, path)
    return path


def text_of(choices: Iterable[Choice]) -> str:
    return plan_of(choices).text


def on(gpu: str, capability: tuple[int, int], vllm: str | None = None) -> Stack:
    return Stack("3.12.1", vllm, gpus=(Gpu(gpu, capability, None),))


def plan(*args: Any, **kwargs: Any) -> str:
    return text_of(choices_for(*args, **kwargs))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_every_gpu_has_classes_that_ascend_to_no_bound(
    capability: tuple[int, int],
) -> None:
    choices = choices_for(on("Some GPU", capability), "bfloat16", 80)
    bounds = [choice.max_len for choice in choices]
    assert bounds[-1] is None
    assert None not in bounds[:-1]
    assert bounds[:-1] == sorted(set(bounds[:-1]))
    assert all(choice.reason for choice in choices)


def test_no_gpu_means_the_reference_kernel() -> None:
    assert plan(NO_GPU, "bfloat16", 80) == "*:reference"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 1)])
def test_gpus_that_nobody_measured_are_said_to_be_unmeasured(
    capability: tuple[int, int],
) -> None:
    choices = choices_for(on("Some GPU", capability), "bfloat16", 80)
    assert all("unmeasured" in choice.reason for choice in choices)


@pytest.mark.parametrize("capability", [(10, 0), (12, 0)])
def test_blackwell_takes_cudnn_for_long_sequences(capability: tuple[int, int]) -> None:
    assert choices_for(on("B", capability), "bfloat16", 80)[-1].kernel == "cudnn"


@pytest.mark.parametrize(("head_dim", "window"), [(96, 128), (104, 64), (128, 64)])
def test_wide_heads_go_to_stocks_kernel_earlier_where_nobody_measured(
    head_dim: int, window: int, bundled: Path
) -> None:
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0)):
        text = plan(on("Some GPU", capability), "bfloat16", head_dim)
        assert text == f"{window}:triton_window,*:flash_attn"
    # cuDNN is not clearly faster there, on an H200.
    assert plan(on("B", (10, 0)), "bfloat16", head_dim) == "128:triton_window,*:cudnn"


def test_the_bundled_file_of_this_gpu_counts(bundled: Path) -> None:
    put(bundled, TABLE)
    choices = choices_for(H200, "bfloat16", 80)
    assert text_of(choices) == "128:triton_window,*:flash_attn"
    assert {choice.reason for choice in choices} == {
        "fastest on NVIDIA H200, measured by tune with vLLM 0.25.1"
    }


@pytest.mark.parametrize(
    ("vllm", "measured"),
    [
        (None, "0.33.0"),
        ("0.25.1", "0.25.1"),
        ("0.28.1", "0.27.0"),
        ("0.33.0rc1", "0.33.0"),
        ("0.40.0.dev3+g1a2b", "0.33.0"),
        ("0.20.0", "0.25.1"),
        ("from source", "0.33.0"),
    ],
)
def test_the_newest_bundled_file_up_to_the_installed_vllm_counts(
    bundled: Path, vllm: str | None, measured: str
) -> None:
    for release in ("0.25.1", "0.27.0", "0.33.0"):
        made_by = {**TABLE.made_by, "vllm": release}
        put(bundled.parent / release, replace(TABLE, made_by=made_by))
    choices = choices_for(on(GPU, (9, 0), vllm), "bfloat16", 80)
    reason = f"fastest on NVIDIA H200, measured by tune with vLLM {measured}"
    assert {choice.reason for choice in choices} == {reason}


def test_an_older_bundled_file_has_what_a_newer_one_lacks(bundled: Path) -> None:
    put(bundled, TABLE)
    rows = {"bfloat16/128": (Class(None, "flash_attn"),)}
    made_by = {**TABLE.made_by, "vllm": "0.33.0"}
    put(bundled.parent / "0.33.0", replace(TABLE, made_by=made_by, classes=rows))
    assert plan(H200, "bfloat16", 128) == "*:flash_attn"
    # Of the head dims that either has, the next one counts.
    assert plan(H200, "bfloat16", 88) == "*:cudnn"
    assert plan(H200, "float16", 80) == "1024:cudnn,*:flash_attn"


def test_a_torch_dtype_finds_its_entry(bundled: Path) -> None:
    torch = pytest.importorskip("torch")
    put(bundled, TABLE)
    assert plan(H200, torch.float16, 80) == "1024:cudnn,*:flash_attn"


def test_the_users_file_comes_before_the_bundled_one(bundled: Path, user: Path) -> None:
    put(bundled, TABLE)
    put(user, replace(TABLE, classes={"bfloat16/80": (Class(None, "cudnn"),)}))
    (choice,) = choices_for(H200, "bfloat16", 80, user)
    assert choice.kernel == "cudnn"
    assert choice.reason == (
        "fastest on this machine, measured by tune with vLLM 0.25.1"
    )
    made_by = {**TABLE.made_by, "command": "vllm-flashinfer-vit tune --quick"}
    classes = {"bfloat16/80": (Class(None, "cudnn"),)}
    put(user, replace(TABLE, made_by=made_by, classes=classes))
    (choice,) = choices_for(H200, "bfloat16", 80, user)
    assert "measured by tune --quick with vLLM" in choice.reason
    # What the user did not measure is still the package's.
    assert plan(H200, "float16", 80, user) == "1024:cudnn,*:flash_attn"


def test_the_nearest_measured_head_dim_above_is_taken_and_said(bundled: Path) -> None:
    put(bundled, TABLE)
    choices = choices_for(H200, "bfloat16", 72)
    assert text_of(choices) == "128:triton_window,*:flash_attn"
    assert all("at head dim 80, the next" in choice.reason for choice in choices)
    assert plan(H200, "bfloat16", 88) == "*:cudnn"


def test_an_exact_bundled_head_dim_beats_a_users_larger_one(
    bundled: Path, user: Path
) -> None:
    put(bundled, TABLE)
    put(user, replace(TABLE, classes={"bfloat16/128": (Class(None, "cudnn"),)}))
    assert plan(H200, "bfloat16", 80, user) == "128:triton_window,*:flash_attn"
    assert plan(H200, "bfloat16", 112, user) == "*:cudnn"


@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 80), ("bfloat16", 104)])
def test_what_was_not_measured_follows_the_capability(
    bundled: Path, dtype: str, head_dim: int
) -> None:
    put(bundled, TABLE)
    choices = choices_for(H200, dtype, head_dim)
    assert all("unmeasured" in choice.reason for choice in choices)


def test_other_hopper_gpus_take_the_h200s_choices_and_say_so(bundled: Path) -> None:
    put(bundled, TABLE)
    choices = choices_for(on("NVIDIA H100 80GB HBM3", (9, 0)), "bfloat16", 80)
    assert text_of(choices) == "128:triton_window,*:flash_attn"
    for choice in choices:
        assert "unmeasured by this project on this GPU" in choice.reason
        assert "fastest on NVIDIA H200" in choice.reason
    ada = choices_for(on("NVIDIA L4", (8, 9)), "bfloat16", 80)
    assert not any("H200" in choice.reason for choice in ada)


def test_a_measured_hopper_gpu_takes_what_it_lacks_from_the_h200(bundled: Path) -> None:
    put(bundled, TABLE)
    h100 = "NVIDIA H100 80GB HBM3"
    own = {"bfloat16/80": (Class(None, "flash_attn_4"),)}
    put(bundled, replace(TABLE, made_by=TABLE.made_by | {"gpu": h100}, classes=own))
    (measured,) = choices_for(on(h100, (9, 0)), "bfloat16", 80)
    assert measured.kernel == "flash_attn_4"
    assert measured.reason.startswith(f"fastest on {h100}, measured")
    for dtype, head_dim in (("bfloat16", 96), ("float16", 80)):
        for choice in choices_for(on(h100, (9, 0)), dtype, head_dim):
            assert choice.reason.startswith("unmeasured by this project on this GPU")
            assert "fastest on NVIDIA H200" in choice.reason


def measured_with(**versions: str) -> Table:
    return replace(TABLE, made_by={"gpu": GPU, "vllm": "0.25.1", **versions})


class TestOtherVersions:
    def test_those_that_differ_are_named(self, bundled: Path) -> None:
        put(bundled, measured_with(torch="2.10.0", triton="3.6.0", quack="0.4.1"))
        stack = replace(STACK, vllm="0.33.0")
        assert other_versions(stack, "bfloat16", 80) == (
            "Kernels are chosen by measurements with other versions: vllm 0.25.1 (here "
            "0.33.0), torch 2.10.0 (here 2.11.0), quack 0.4.1 (here 0.5.0). "
            "`vllm-flashinfer-vit tune` measures them on this machine."
        )

    def test_the_same_are_not_worth_a_line(self, bundled: Path) -> None:
        same = {**STACK.versions, "torch": "2.11.0+cu130", "cudnn": "9.19.0"}
        put(bundled, measured_with(**same))
        assert other_versions(STACK, "bfloat16", 80) is None

    def test_what_either_does_not_tell_is_not_compared(self, bundled: Path) -> None:
        put(bundled, measured_with(cudnn="9.18.0"))
        stack = replace(STACK, quack=None, cudnn_backend=None)
        assert other_versions(stack, "bfloat16", 80) is None
        assert "cudnn 9.18.0 (here 9.19.0)" in str(
            other_versions(STACK, "bfloat16", 80)
        )

    def test_the_table_that_serves_counts(self, bundled: Path, user: Path) -> None:
        put(bundled, measured_with(triton="3.5.0"))
        classes = {"bfloat16/80": (Class(None, "cudnn"),)}
        put(user, replace(measured_with(triton="3.6.0"), classes=classes))
        assert other_versions(STACK, "bfloat16", 80, user) is None
        assert "triton 3.5.0" in str(other_versions(STACK, "float16", 80, user))

    def test_a_users_file_of_another_version_of_the_package(
        self, bundled: Path, user: Path
    ) -> None:
        older = measured_with(version="0.0.1")
        put(bundled, older)
        # What the package brings is the best that it has.
        assert other_versions(STACK, "bfloat16", 80, user) is None
        put(user, older)
        assert "vllm-flashinfer-vit 0.0.1 (here" in str(
            other_versions(STACK, "bfloat16", 80, user)
        )

    def test_an_h100_is_served_by_the_h200s_table(self, bundled: Path) -> None:
        put(bundled, measured_with(triton="3.5.0"))
        h100 = HOPPER._replace(name="NVIDIA H100 80GB HBM3")
        stack = replace(STACK, gpus=(h100,))
        assert "triton 3.5.0" in str(other_versions(stack, torch.bfloat16, 80))

    def test_without_measurements(self, bundled: Path) -> None:
        assert other_versions(STACK, "bfloat16", 80) is None
        assert other_versions(replace(STACK, gpus=()), "bfloat16", 80) is None


def test_a_measured_kernel_for_few_sequences_has_another_for_many(
    bundled: Path,
) -> None:
    rows = (Class(2048, "flash_attn_4", "flash_attn"), Class(None, "hopper_fp8"))
    names = ("bfloat16/80", "float8_e4m3fn/80")
    put(bundled, replace(TABLE, classes=dict.fromkeys(names, rows)))
    text = "2048:flash_attn_4/flash_attn,*:hopper_fp8"
    assert plan(H200, "bfloat16", 80) == text
    choices = fp8_choices_for(H200, "bfloat16", 80)
    assert text_of(choices) == text
    assert [choice.served_by for choice in choices] == [
        "flash_attn_4, flash_attn below 512 rows to a sequence",
        "hopper_fp8",
    ]


@pytest.mark.parametrize(
    ("last", "few", "many"),
    [
        ("flash_attn_4/flash_attn", "flash_attn_4", "flash_attn"),
        ("flash_attn_4", "flash_attn_4", "flash_attn_4"),
        ("hopper_fp8", "hopper_fp8", "hopper_fp8"),
    ],
)
def test_empty_sequences_count(
    last: str, few: str, many: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def find(name: str) -> Any:
        ran.append(name)
        return lambda *args, **rest: lambda: args[0]

    monkeypatch.setattr(ops, "_prepare_kernel", find)
    qkv = [torch.zeros(4096, 1, 32)] * 3
    longest = torch.tensor(4096)
    plan = Plan.decode(f"1024:triton,*:{last}")

    def run(empty: int) -> None:
        cu_seqlens = torch.tensor([0, 4096] + [4096] * empty, dtype=torch.int32)
        batch = Batch(*qkv, cu_seqlens=cu_seqlens, max_seqlen=longest)
        ops.attention(batch, 1.0, plan, ops.Fp8("block"))
        if last != "hopper_fp8":
            ops.attention(batch, 1.0, plan)

    run(empty=7)
    assert set(ran) == {few}
    ran.clear()
    run(empty=8)
    assert set(ran) == {many}


class TestFp8:
    @pytest.mark.parametrize(
        ("capability", "kernel"),
        [
            ((8, 9), "triton_fp8"),
            ((9, 0), "triton_fp8"),
            ((10, 0), "cudnn_fp8"),
            ((12, 0), "cudnn_fp8"),
        ],
    )
    def test_unmeasured_gpus_quantise_long_sequences_only(
        self, capability: tuple[int, int], kernel: str, bundled: Path
    ) -> None:
        choices = fp8_choices_for(on("Some GPU", capability), "bfloat16", 80)
        assert choices[-1].kernel == kernel
        assert "unmeasured" in choices[-1].reason
        assert fp8_ranges(choices) == [(4096, None)]
        shorter = text_of(choices).split(",")[:-1]
        plain = text_of(choices_for(on("Some GPU", capability), "bfloat16", 80))
        assert ",".join(shorter) == plain.replace("*", "4095")

    def test_classes_above_the_bound_give_way(self, bundled: Path) -> None:
        rows = (Class(2048, "triton"), Class(8192, "cudnn"), Class(None, "flash_attn"))
        put(bundled, replace(TABLE, classes={"bfloat16/80": rows}))
        choices = fp8_choices_for(H200, "bfloat16", 80)
        assert text_of(choices) == "2048:triton,4095:cudnn,*:triton_fp8"

    def test_a_measured_entry_counts(self, bundled: Path) -> None:
        rows = (Class(1024, "triton"), Class(None, "triton_fp8"))
        classes = {**TABLE.classes, "float8_e4m3fn/80": rows}
        put(bundled, replace(TABLE, classes=classes))
        choices = fp8_choices_for(H200, "bfloat16", 72)
        assert text_of(choices) == "1024:triton,*:triton_fp8"
        assert "measured by tune" in choices[0].reason
        # Layers without FP8 know nothing of it.
        assert plan(H200, "bfloat16", 72) == "128:triton_window,*:flash_attn"

    def test_no_gpu(self) -> None:
        choices = fp8_choices_for(NO_GPU, "float32", 80)
        assert text_of(choices) == "128:reference,*:reference_fp8"

    def test_from_which_length(self) -> None:
        assert not fp8_ranges((Choice("triton", None, ""),))
        assert fp8_ranges((Choice("triton_fp8", None, ""),)) == [(1, None)]
