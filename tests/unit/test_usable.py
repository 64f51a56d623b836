# SPDX-License-Identifier: Apache-2.0
"""The choices that are left of a table on a machine that lacks something."""

from dataclasses import replace
from pathlib import Path

import pytest
from _stacks import STACK

from vllm_flashinfer_vit.choices import lookup, usable
from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices.derive import derive_classes
from vllm_flashinfer_vit.choices.lookup import (
    Choice,
    choices_for,
    fp8_ranges,
    plan_of,
)
from vllm_flashinfer_vit.choices.table import Measurement, Table
from vllm_flashinfer_vit.choices.usable import usable_choices
from vllm_flashinfer_vit.ops.plan import Class
from vllm_flashinfer_vit.settings import ENV_KERNEL


def put_in_place(monkeypatch: pytest.MonkeyPatch, table: tuple[Choice, ...]) -> None:
    """Have these choices in place of the H200's, without measurements."""
    monkeypatch.setattr(lookup, "choices_for", lambda *_: table)
    monkeypatch.setattr(lookup, "measured_without", lambda *_, **__: ())


class TestAttempts:
    """FlashAttention 4, which is compiled on this machine, and what serves without."""

    @pytest.fixture(autouse=True)
    def table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        table = (
            Choice("triton", 1024, "short"),
            Choice("flash_attn_4", None, "long", "flash_attn"),
        )
        put_in_place(monkeypatch, table)

    def kernels(self, error: str | None, forced: str | None = None) -> list[str]:
        stack = replace(STACK, flash_attn=(2, 3, 4))
        choices, refusals = usable_choices(
            stack, 80, "bfloat16", forced, attempt=lambda kernel: error
        )
        text = f"flash_attn_4: {error}"
        assert refusals == ({"flash_attn_4": text} if error else {})
        return ["/".join(choice.kernels) for choice in choices]

    def test_it_runs(self) -> None:
        assert self.kernels(None) == ["triton", "flash_attn_4/flash_attn"]

    def test_it_fails(self) -> None:
        assert self.kernels("a test run fails") == ["triton", "flash_attn"]

    def test_it_is_forced(self) -> None:
        assert self.kernels(None, "flash_attn_4") == ["flash_attn_4"]

    def test_it_fails_and_was_forced(self) -> None:
        assert self.kernels("a test run fails", "flash_attn_4") == []

    def test_many_sequences_cannot_have_fp8_that_was_not_asked_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = (Choice("triton", None, "", "hopper_fp8"),)
        put_in_place(monkeypatch, table)
        choices, refusals = usable_choices(STACK, 80, "bfloat16")
        assert plan_of(choices).text == "*:triton"
        assert list(refusals) == ["hopper_fp8", "triton_fp8"]

    def test_nothing_of_it_is_there(self) -> None:
        stack = replace(STACK, flash_attn=())
        choices, refusals = usable_choices(stack, 80, "bfloat16")
        assert [choice.kernel for choice in choices] == ["triton"]
        assert choices[0].max_len is None
        assert list(refusals) == ["flash_attn_4", "flash_attn"]


class TestManySequences:
    """A kernel that another one leaves many sequences to must run on the machine."""

    STACK = replace(STACK, flash_attn=(4,))

    @pytest.fixture
    def tuned_dir(self, tmp_path: Path) -> Path:
        """A table that names FlashAttention 4 alone of FlashAttention."""
        gpu = STACK.gpus[0].name
        few = Class(None, "flash_attn_4", "flash_attn")
        rows = (Class(1024, "triton"), few._replace(max_len=4096))
        classes = {
            "bfloat16/80": (rows[0], few),
            "float8_e4m3fn/80": (*rows, Class(None, "hopper_fp8")),
        }
        table = Table({"gpu": gpu, "vllm": "0.25.1"}, classes)
        tuned.write(table, tmp_path / tuned.file_name(gpu))
        return tmp_path

    @pytest.mark.parametrize("fp8", [False, True])
    def test_it_runs(self, fp8: bool, tuned_dir: Path) -> None:
        choices, refusals = usable_choices(
            STACK, 80, "bfloat16", tuned_dir=tuned_dir, fp8=fp8
        )
        assert plan_of(choices).kernel_for(4096, 16) == "flash_attn"
        assert refusals == {}

    @pytest.mark.parametrize("fp8", [False, True])
    def test_it_cannot(self, fp8: bool, tuned_dir: Path) -> None:
        choices, refusals = usable_choices(
            self.STACK, 80, "bfloat16", tuned_dir=tuned_dir, fp8=fp8
        )
        plan = plan_of(choices)
        assert plan.kernel_for(4096) == plan.kernel_for(4096, 16) == "flash_attn_4"
        (refusal,) = refusals.values()
        assert "flash_attn: vLLM 0.25.1 was built without FlashAttention" in refusal

    def test_nor_can_the_other(self, tuned_dir: Path) -> None:
        choices, refusals = usable_choices(
            self.STACK,
            80,
            "bfloat16",
            tuned_dir=tuned_dir,
            attempt=lambda kernel: "a test run fails",
        )
        assert plan_of(choices).text == "*:triton"
        assert list(refusals) == ["flash_attn_4", "flash_attn"]


class TestUsableFp8Choices:
    @pytest.fixture
    def tuned_dir(self, tmp_path: Path) -> Path:
        """A table by which long sequences run on the Hopper kernel."""
        gpu = STACK.gpus[0].name
        classes = (Class(4096, "triton"), Class(None, "hopper_fp8"))
        table = Table({"gpu": gpu, "vllm": "0.25.1"}, {"float8_e4m3fn/80": classes})
        tuned.write(table, tmp_path / tuned.file_name(gpu))
        return tmp_path

    def test_another_kernel_stands_in_for_one_that_fails(self, tuned_dir: Path) -> None:
        tried = []

        def attempt(kernel: str) -> str | None:
            tried.append(kernel)
            return "a test run fails" if kernel == "hopper_fp8" else None

        choices, refusals = usable_choices(
            STACK, 80, "bfloat16", tuned_dir=tuned_dir, fp8=True, attempt=attempt
        )
        assert tried == ["hopper_fp8", "triton_fp8"]
        assert choices[-1].kernel == "triton_fp8"
        assert "in place of hopper_fp8" in choices[-1].reason
        assert refusals == {"hopper_fp8": "hopper_fp8: a test run fails"}

    def test_no_kernel_is_left(self, tuned_dir: Path) -> None:
        choices, refusals = usable_choices(
            STACK,
            80,
            "bfloat16",
            tuned_dir=tuned_dir,
            fp8=True,
            attempt=lambda kernel: "no",
        )
        assert not fp8_ranges(choices)
        assert len(refusals) == 2

    def test_a_kernel_that_is_refused_does_not_run(self, tuned_dir: Path) -> None:
        ampere = replace(STACK, gpus=(STACK.gpus[0]._replace(capability=(8, 0)),))

        def attempt(kernel: str) -> str | None:
            raise AssertionError(kernel)

        choices, refusals = usable_choices(
            ampere, 80, "bfloat16", tuned_dir=tuned_dir, fp8=True, attempt=attempt
        )
        assert not fp8_ranges(choices)
        assert "compute capability 8.9" in list(refusals.values())[-1]

    def test_a_kernel_that_would_end_the_context_does_not_run_if_forced(self) -> None:
        tried: list[str] = []
        choices, refusals = usable_choices(
            STACK, 80, "bfloat16", "cudnn_fp8", fp8=True, attempt=tried.append
        )
        assert choices == () and tried == []
        assert "ends the CUDA context" in list(refusals.values())[0]

    def test_a_forced_kernel_takes_every_length(self) -> None:
        choices, _ = usable_choices(STACK, 80, "bfloat16", "triton_fp8", fp8=True)
        assert [choice.kernel for choice in choices] == ["triton_fp8"]

    def test_a_forced_kernel_has_no_stand_in(self) -> None:
        choices, _ = usable_choices(
            STACK, 80, "bfloat16", "hopper_fp8", fp8=True, attempt=lambda kernel: "no"
        )
        assert choices == ()


class TestMeasuredWithout:
    """What the other kernels' measurements say where the fastest one cannot run."""

    # Times by kernel, by the longest sequence.
    HALF = {
        512: {"triton": 10.0, "flash_attn": 15.0, "flash_attn_4": 12.0},
        1024: {"triton": 11.0, "flash_attn": 14.0, "flash_attn_4": 10.0},
        4096: {"triton": 20.0, "flash_attn": 12.0, "flash_attn_4": 10.0},
    }
    FP8 = {
        1024: {"triton": 10.0, "hopper_fp8": 8.0, "triton_fp8": 12.0},
        8192: {"triton": 10.0, "hopper_fp8": 5.0, "triton_fp8": 8.0},
    }

    def write(
        self, folder: Path, gpu: str, dtype: str, times: dict[int, dict[str, float]]
    ) -> None:
        """Write a GPU's table of such times."""
        rows = tuple(Measurement(dtype, 80, at, 1, us) for at, us in times.items())
        classes = {f"{dtype}/80": derive_classes(rows)}
        table = Table({"gpu": gpu, "vllm": "0.25.1"}, classes, rows)
        tuned.write(table, folder / tuned.file_name(gpu))

    def plan(
        self, folder: Path, times: dict[int, dict[str, float]], *refused: str
    ) -> tuple[str, set[str]]:
        """Return the plan and the reasons by a table of such times."""
        fp8 = times is not self.HALF
        dtype = "float8_e4m3fn" if fp8 else "bfloat16"
        self.write(folder, STACK.gpus[0].name, dtype, times)
        choices, refusals = usable_choices(
            STACK,
            80,
            "bfloat16",
            tuned_dir=folder,
            fp8=fp8,
            attempt=lambda kernel: "no" if kernel in refused else None,
        )
        assert list(refusals) == list(refused)
        return plan_of(choices).text, {choice.reason for choice in choices}

    def test_the_next_best_serves_each_length(self, tmp_path: Path) -> None:
        text, _ = self.plan(tmp_path, self.HALF)
        assert text == "512:triton,*:flash_attn_4/flash_attn"
        text, (reason,) = self.plan(tmp_path, self.HALF, "flash_attn_4")
        assert text == "1024:triton,*:flash_attn"
        assert reason == (
            "fastest on this machine, measured by tune with vLLM 0.25.1, without "
            "flash_attn_4"
        )

    def test_a_smaller_head_dim_has_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tuned, "read_bundled", lambda *_: [])
        text, _ = self.plan(tmp_path, self.HALF, "flash_attn_4")
        choices, _ = usable_choices(
            STACK, 72, "bfloat16", tuned_dir=tmp_path, attempt=lambda kernel: "no"
        )
        assert plan_of(choices).text == text

    def test_a_kernel_of_another_version_is_none(self, tmp_path: Path) -> None:
        write = tuned.write

        def write_as_newer(table: Table, path: Path) -> None:
            rows = (
                row._replace(us={**row.us, "new": 1.0}) for row in table.measurements
            )
            write(replace(table, measurements=tuple(rows)), path)

        with pytest.MonkeyPatch.context() as context:
            context.setattr(tuned, "write", write_as_newer)
            text, _ = self.plan(tmp_path, self.HALF, "flash_attn_4")
        assert text == "1024:triton,*:flash_attn"

    def test_fp8_begins_where_the_other_kernel_pays(self, tmp_path: Path) -> None:
        assert self.plan(tmp_path, self.FP8)[0] == "*:hopper_fp8"
        text, _ = self.plan(tmp_path, self.FP8, "hopper_fp8")
        assert text == "1024:triton,*:triton_fp8"

    def test_fp8_that_was_asked_for_stays(self, tmp_path: Path) -> None:
        slow = {at: us | {"triton_fp8": 11.0} for at, us in self.FP8.items()}
        text, _ = self.plan(tmp_path, slow, "hopper_fp8")
        assert text == "*:triton_fp8"

    @pytest.mark.parametrize(
        ("refused", "plan"),
        [
            ((), "1024:triton,4095:flash_attn,*:cudnn_fp8"),
            (("cudnn_fp8",), "1024:triton,4095:flash_attn,*:triton_fp8"),
        ],
    )
    def test_fp8_that_was_not_measured_begins_where_it_did(
        self, refused: tuple[str, ...], plan: str, tmp_path: Path
    ) -> None:
        blackwell = STACK.gpus[0]._replace(name="NVIDIA B200", capability=(10, 0))
        stack = replace(STACK, gpus=(blackwell,))
        self.write(tmp_path, blackwell.name, "bfloat16", self.HALF)
        choices, refusals = usable_choices(
            stack,
            80,
            "bfloat16",
            tuned_dir=tmp_path,
            fp8=True,
            attempt=lambda kernel: "no" if kernel in refused else None,
        )
        # The fastest of bf16 does not run there.
        assert list(refusals) == ["flash_attn_4", *refused]
        assert plan_of(choices).text == plan

    def test_a_forced_kernel_keeps_its_class(self, tmp_path: Path) -> None:
        self.plan(tmp_path, self.HALF)
        choices, _ = usable_choices(
            STACK,
            80,
            "bfloat16",
            "triton_window",
            tmp_path,
            attempt=lambda kernel: "no",
        )
        assert plan_of(choices).text == "128:triton_window,1024:triton,*:flash_attn"


def test_choices_are_those_of_the_table_where_all_run() -> None:
    choices, refusals = usable_choices(STACK, 80, "bfloat16")
    assert choices == choices_for(STACK, "bfloat16", 80)
    assert refusals == {}


def test_choices_drop_what_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (Choice("cudnn", 1024, "short"), Choice("flash_attn", None, "long"))
    put_in_place(monkeypatch, table)
    stack = replace(STACK, flashinfer=None)
    choices, refusals = usable_choices(stack, 80, "bfloat16")
    assert choices == table[1:]
    (refusal,) = refusals.values()
    assert refusal.startswith("cudnn: flashinfer-python is not installed")
    assert refusal.endswith('(pip install "flashinfer-python==0.6.13")')


def test_a_forced_kernel_replaces_the_table() -> None:
    choices, refusals = usable_choices(STACK, 80, "bfloat16", "reference")
    assert choices == (Choice("reference", None, f"forced by {ENV_KERNEL}"),)
    assert refusals == {}


def test_a_forced_kernel_that_cannot_run_leaves_nothing() -> None:
    stack = replace(STACK, gpus=())
    choices, refusals = usable_choices(stack, 80, "bfloat16", "cudnn")
    assert choices == ()
    assert len(refusals) == 1


@pytest.mark.parametrize("invariant", [False, True])
def test_no_gpu_is_served_by_the_reference(invariant: bool) -> None:
    stack = replace(STACK, gpus=())
    choices, _ = usable_choices(stack, 80, "bfloat16", invariant=invariant)
    assert [choice.kernel for choice in choices] == ["reference"]


@pytest.mark.parametrize(
    ("kernel", "is_inspected"),
    [("triton", False), ("flash_attn", False), ("cudnn", True)],
)
def test_libraries_wait_for_a_kernel_that_needs_them(
    monkeypatch: pytest.MonkeyPatch, kernel: str, is_inspected: bool
) -> None:
    read: list[bool] = []
    monkeypatch.setattr(usable, "probe", lambda: read.append(True) or STACK)
    bare = replace(STACK, cudnn_backend=None, inspected=None)
    choices, refusals = usable_choices(bare, 80, "bfloat16", kernel)
    assert [choice.kernel for choice in choices] == [kernel]
    assert refusals == {}
    assert bool(read) is is_inspected
