# SPDX-License-Identifier: Apache-2.0
"""Any measurements and any machine: every length has a kernel that takes it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from _fuzz import fuzz
from hypothesis import given
from hypothesis import strategies as st

from vllm_flashinfer_vit.choices import table as tuned
from vllm_flashinfer_vit.choices import usable
from vllm_flashinfer_vit.choices.derive import TuneError, derive_classes
from vllm_flashinfer_vit.choices.lookup import (
    Choice,
    choices_for,
    forced,
    fp8_choices_for,
    fp8_ranges,
    other_versions,
    plan_of,
)
from vllm_flashinfer_vit.choices.table import Measurement, Table
from vllm_flashinfer_vit.kernels.catalog import HEAD_DIMS, KERNELS, fp8_names
from vllm_flashinfer_vit.machine.stack import Gpu, Stack, Verdict
from vllm_flashinfer_vit.machine.verdicts import FP8_DTYPE
from vllm_flashinfer_vit.ops.plan import Class

GPU = "NVIDIA H200"
NAMES = sorted(KERNELS)
# Names that a file of the package, or of the user, may be for.
GPUS = st.just(GPU) | st.sampled_from(["NVIDIA H100 80GB HBM3", "Some GPU"])
CAPABILITIES = st.sampled_from([(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 1)])
DTYPES = st.sampled_from(["bfloat16", "float16", "float32"])
HEADS = st.sampled_from([64, 72, 80]) | st.integers(1, 300)


def takes(kernel: str, max_len: int | None) -> bool:
    longest = KERNELS[kernel].max_len
    return longest is None or (max_len is not None and max_len <= longest)


def assert_total(choices: Sequence[Choice]) -> None:
    """Classes ascend, the last is unbounded, and kernels take what they are given."""
    bounds = [choice.max_len for choice in choices]
    assert bounds[-1] is None
    assert bounds[:-1] == sorted({x for x in bounds if x is not None and x > 0})
    plan = plan_of(choices)
    for choice in choices:
        assert choice.reason
        assert all(takes(kernel, choice.max_len) for kernel in choice.kernels)
    ends = [bound + more for bound in plan.bounds for more in (0, 1)]
    for length in (1, *ends, 2**20):
        for mean_len in (None, 1.0, 2.0**20):
            longest = KERNELS[plan.kernel_for(length, mean_len)].max_len
            assert longest is None or length <= longest


@st.composite
def classes(draw: st.DrawFn) -> tuple[Class, ...]:
    """Draw classes that a file may have."""
    bounds = sorted(draw(st.sets(st.integers(1, 300) | st.integers(1, 2**20))))[:4]
    rows = []
    for bound in (*bounds, None):
        names = st.sampled_from([name for name in NAMES if takes(name, bound)])
        rows.append(Class(bound, draw(names), draw(st.none() | names)))
    return tuple(rows)


KEYS = st.builds(
    tuned.key,
    st.sampled_from(["bfloat16", "float16", FP8_DTYPE]),
    st.sampled_from([*HEAD_DIMS, 8, 256]),
)
ENTRIES = st.dictionaries(KEYS, classes(), max_size=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """The user's folder, and one in place of the package's."""
    user, bundled = (tmp_path_factory.mktemp(name) for name in ("user", "bundled"))
    with mock.patch.object(tuned, "BUNDLED", bundled):
        yield [user, bundled / "0.25.1"]


def put(folder: Path, entries: dict[str, tuple[Class, ...]] | None) -> None:
    path = folder / tuned.file_name(GPU)
    path.unlink(missing_ok=True)
    if entries is not None:
        table = Table({"gpu": GPU, "vllm": "0.25.1", "torch": "2.9"}, entries)
        tuned.write(table, path)
        assert tuned.read(folder, GPU) == table


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    gpu = Gpu(draw(GPUS), draw(CAPABILITIES), 2**36)
    return Stack(
        python="3.12.1",
        vllm=draw(st.sampled_from([None, "0.25.1", "0.33.0+cu129"])),
        torch=draw(st.sampled_from(["2.9", "2.11.0+cu130"])),
        triton=draw(st.sampled_from([None, "3.6.0"])),
        flashinfer=draw(st.sampled_from([None, "0.6.13", "0.9"])),
        cudnn_frontend=draw(st.sampled_from([None, "1.28.0", "1.0"])),
        cudnn_backend=draw(st.sampled_from([None, 91001, 91900, 92400])),
        flash_attn=draw(st.sampled_from([(), (2,), (2, 3, 4)])),
        gpus=draw(st.sampled_from([(gpu,), ()])),
        inspected=True,
    )


@given(
    user=st.none() | ENTRIES,
    bundled=st.none() | ENTRIES,
    stack=stacks(),
    dtype=DTYPES,
    head_dim=HEADS,
)
@fuzz(120)
def test_every_length_has_a_kernel_that_takes_it(
    folders: list[Path],
    user: dict[str, tuple[Class, ...]] | None,
    bundled: dict[str, tuple[Class, ...]] | None,
    stack: Stack,
    dtype: str,
    head_dim: int,
) -> None:
    """Of files, of the compute capability, with FP8, and with any kernel forced."""
    put(folders[0], user)
    put(folders[1], bundled)
    for look_up in (choices_for, fp8_choices_for):
        choices = look_up(stack, dtype, head_dim, folders[0])
        assert_total(choices)
        for kernel in NAMES:
            after = forced(choices, kernel)
            assert_total(after)
            assert after[0].kernel == kernel
            assert after[0].max_len == KERNELS[kernel].max_len
        ranges = fp8_ranges(choices)
        plan = plan_of(choices)
        for length in (1, *(b + more for b in plan.bounds for more in (0, 1)), 2**20):
            # A mean of as many rows: the kernel for few sequences.
            is_fp8 = KERNELS[plan.kernel_for(length, 2.0**20)].is_fp8
            within = [a <= length and (b is None or length <= b) for a, b in ranges]
            assert sum(within) == is_fp8
    text = other_versions(stack, dtype, head_dim, folders[0])
    assert text is None or "torch 2.9 (here " in text or "vllm 0.25.1 (here " in text


@given(
    rows=classes(),
    stack=stacks(),
    dtype=DTYPES,
    kernel=st.none() | st.sampled_from(NAMES),
    fails=st.sets(st.sampled_from(NAMES)),
    fp8=st.booleans(),
)
@fuzz(250)
def test_what_cannot_run_serves_nothing_and_what_is_left_serves_all(
    folders: list[Path],
    rows: tuple[Class, ...],
    stack: Stack,
    dtype: str,
    kernel: str | None,
    fails: set[str],
    fp8: bool,
) -> None:
    """Or nothing is left; each refusal names its kernel, and each is judged once or
    twice, not for ever."""
    measured = FP8_DTYPE if fp8 else dtype
    put(folders[0], None)
    put(folders[1], {tuned.key(measured, 80): rows})
    judged: list[str] = []

    def judge(name: str, *args: object) -> Verdict:
        judged.append(name)
        assert judged.count(name) <= 3
        return original(name, *args)

    original = usable.kernel_verdict
    with mock.patch.object(usable, "kernel_verdict", judge):
        choices, refusals = usable.usable_choices(
            stack,
            80,
            dtype,
            kernel,
            folders[0],
            fp8=fp8,
            attempt=lambda name: "a test run fails" if name in fails else None,
        )
    assert all(text.startswith(f"{name}: ") for name, text in refusals.items())
    served_by = {name for choice in choices for name in choice.kernels}
    assert not served_by & refusals.keys()
    assert fp8 or not served_by & fp8_names()
    if choices:
        assert_total(choices)
    if kernel in refusals:
        assert not choices
    elif kernel is not None and choices:
        assert kernel in served_by


CELLS = st.tuples(st.sampled_from([16, 64, 128, 129, 1024, 4096, 65536]), HEADS)
US = st.floats(0.5, 1e6) | st.sampled_from([10.0, 10.1, 10.19, 10.21, 10.5])


@st.composite
def measurements(draw: st.DrawFn) -> list[Measurement]:
    """Draw what kernels that run at each length took, in any order."""
    rows = []
    for longest, count in draw(st.sets(CELLS, max_size=6)):
        names = [name for name in NAMES if takes(name, longest)]
        us = draw(st.dictionaries(st.sampled_from(names), US, max_size=6))
        rows.append(Measurement("bfloat16", 80, longest, count, us))
    return rows


@given(rows=measurements(), order=st.randoms())
@fuzz(300)
def test_classes_are_of_kernels_that_are_nowhere_slow(
    rows: list[Measurement], order: object
) -> None:
    """At one number of sequences for each length, where no means are to be taken; the
    order of the measurements does not matter, and the table can be written."""
    rows = list({row.longest: row for row in rows}.values())
    try:
        derived = derive_classes(rows)
    except TuneError:
        assert all(takes(k, None) is False for row in rows for k in row.us)
        return
    order.shuffle(rows)  # type: ignore[attr-defined]
    assert derive_classes(rows) == derived
    assert_total([Choice(c.kernel, c.max_len, "measured", c.many) for c in derived])
    tuned._parse(tuned.json.loads(tuned.dumps(of(derived, rows))))
    plan = plan_of([Choice(c.kernel, c.max_len, "", c.many) for c in derived])
    last = max(row.longest for row in rows if any(takes(k, None) for k in row.us))
    for row in rows:
        if not row.us or row.longest > last:
            continue
        us = row.us
        if row.longest == last:
            us = {k: x for k, x in us.items() if takes(k, None)}
        chosen = plan.kernel_for(row.longest, 2.0**20)
        # 2 % for a tie, 5 % for what builds plans, which must win by that.
        assert us[chosen] <= min(us.values()) * 1.02 * 1.05 * (1 + 1e-9)


def of(derived: tuple[Class, ...], rows: list[Measurement]) -> Table:
    made_by = {"gpu": GPU, "vllm": "0.25.1"}
    return replace(Table(made_by, {"bfloat16/80": derived}), measurements=tuple(rows))
