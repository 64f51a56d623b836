# SPDX-License-Identifier: Apache-2.0
"""FP8 attention begins later where no pass would turn q and k for other kernels."""

import pytest
import torch
from _layers import build
from _models import engine
from _towers import SMALL, cpu_only

from vllm_flashinfer_vit.blocks.quack_quantize import MIN_MEAN_ROWS
from vllm_flashinfer_vit.choices.arrival import quantized_by_projection, without_pass
from vllm_flashinfer_vit.choices.lookup import Choice, plan_of
from vllm_flashinfer_vit.engine import advice
from vllm_flashinfer_vit.engine import layer as layers
from vllm_flashinfer_vit.ops.batch import Turning
from vllm_flashinfer_vit.ops.plan import Plan
from vllm_flashinfer_vit.towers.spec import TowerSpec
from vllm_flashinfer_vit.towers.tower import build_tower

pytestmark = pytest.mark.usefixtures("plain_kernel")

# Of an H200, head dim 72.
MEASURED = "512:triton,768:flash_attn_4/triton,1024:triton_fp8,*:hopper_fp8"
LATER = "512:triton,1792:flash_attn_4/triton,*:hopper_fp8"
QUANTIZED = (
    "512:triton,768:flash_attn_4/triton,1024:triton_fp8/triton,1792:hopper_fp8/triton,"
    "*:hopper_fp8"
)


def choices_of(text: str) -> tuple[Choice, ...]:
    classes = Plan.decode(text).classes
    return tuple(Choice(c.kernel, c.max_len, "a test", c.many) for c in classes)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (MEASURED, LATER),
        (
            "8192:flash_attn_4,16384:triton_fp8,*:hopper_fp8",
            "9216:flash_attn_4,16384:triton_fp8,*:hopper_fp8",
        ),
        ("2048:flash_attn_4,*:hopper_fp8", "3072:flash_attn_4,*:hopper_fp8"),
        # What is faster than FP8 of longer ones stays, wherever FP8 would begin.
        (
            "4096:flash_attn_4,5120:triton_fp8,*:triton",
            "5120:flash_attn_4,*:triton",
        ),
        (
            "4096:flash_attn_4,4608:triton_fp8,*:triton",
            "4608:flash_attn_4,*:triton",
        ),
        (
            "4096:flash_attn_4,8192:triton_fp8,*:triton",
            "5120:flash_attn_4,8192:triton_fp8,*:triton",
        ),
        # FP8 begins twice.
        (
            "2048:flash_attn_4,4096:triton_fp8,8192:triton,*:hopper_fp8",
            "3072:flash_attn_4,4096:triton_fp8,9216:triton,*:hopper_fp8",
        ),
        # All of it is FP8, or nothing.
        ("*:hopper_fp8", "*:hopper_fp8"),
        ("128:triton_window,*:flash_attn_4", "128:triton_window,*:flash_attn_4"),
        # The kernel before, or that for many sequences, takes no longer ones.
        ("128:triton_window,*:triton_fp8", "128:triton_window,*:triton_fp8"),
        ("128:triton/triton_window,*:triton_fp8",) * 2,
        # Nobody waits for plain PyTorch.
        ("128:reference,*:reference_fp8", "128:reference,*:reference_fp8"),
    ],
)
def test_fp8_begins_so_many_tokens_later(before: str, after: str) -> None:
    assert plan_of(without_pass(choices_of(before))).text == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (MEASURED, QUANTIZED),
        (
            "2048:flash_attn_4/flash_attn,*:hopper_fp8",
            "2048:flash_attn_4/flash_attn,3072:hopper_fp8/flash_attn,*:hopper_fp8",
        ),
        (
            "2048:flash_attn_4,*:hopper_fp8/triton_fp8",
            "2048:flash_attn_4,3072:hopper_fp8/flash_attn_4,*:hopper_fp8/triton_fp8",
        ),
        ("*:hopper_fp8", "*:hopper_fp8"),
        ("128:triton_window,*:flash_attn_4", "128:triton_window,*:flash_attn_4"),
        ("128:reference,*:reference_fp8", "128:reference,*:reference_fp8"),
    ],
)
def test_where_the_projection_quantises_many_sequences_alone_wait(
    before: str, after: str
) -> None:
    choices = choices_of(before)
    found = plan_of(quantized_by_projection(choices))
    assert found.text == after
    # What runs is the table's where the projection quantises, else what is later.
    measured, later = plan_of(choices), plan_of(without_pass(choices))
    for length in (100, 600, 769, 1024, 1500, 1793, 2049, 3000, 3073, 40000):
        for mean in (MIN_MEAN_ROWS - 1, MIN_MEAN_ROWS):
            one = measured if mean == MIN_MEAN_ROWS else later
            assert found.kernel_for(length, mean) == one.kernel_for(length, mean)


@cpu_only
def test_a_layer_chooses_once_its_blocks_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    layer = build(engine("FLASHINFER"))
    # Building imports modules, which give the logger of all its methods anew.
    monkeypatch.setattr(
        layers.logger, "info_once", lambda text, *given: said.append(text % given)
    )
    layer._choices = choices_of(MEASURED)
    layer.turning = Turning(torch.bfloat16, 16, False)
    layer._settle_plan()
    assert (layer._plan.text, said) == (MEASURED, [])
    assert layer.kernel_for(1024) == "triton_fp8"
    for turns, quantizes, plan, words in (
        (True, False, LATER, "turned by their projection, so"),
        (True, True, QUANTIZED, "in batches of fewer than 512 rows to a sequence, so"),
        (False, False, MEASURED, None),
        (False, True, MEASURED, None),
    ):
        said.clear()
        layer.settle_projection(turns, quantizes)
        assert layer._plan.text == layer.counts.plan.text == plan
        assert [words in line for line in said] == [True] * (words is not None)
        assert layer.gets_turned is turns
    layer.turning = None
    # Weights may be loaded again.
    for _ in range(2):
        layer._settle_plan()
        assert layer._plan.text == layer.counts.plan.text == LATER
    assert layer.kernel_for(1024) == "flash_attn_4"
    assert layer.bounds == (512, 1792)
    assert "as they attend, so FP8 saves no pass that turns them there" in said[0]
    assert "it runs for sequences of 1793 tokens or more" in said[0]


@pytest.mark.parametrize(
    ("before", "lengths"),
    [
        (MEASURED, "sequences of 1793 tokens or more"),
        ("4096:flash_attn_4,8192:triton_fp8,*:triton", "sequences of 5121 to 8192"),
        ("4096:flash_attn_4,5120:triton_fp8,*:triton", "no length"),
    ],
)
def test_what_is_left_to_fp8_is_said(before: str, lengths: str) -> None:
    choices = without_pass(choices_of(before))
    said = advice.fp8_later(choices, 72, "as they attend")
    assert said.endswith(f": it runs for {lengths}")


@cpu_only
def test_choosing_is_part_of_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[tuple[str, bool]] = []

    def settle(self: layers.FlashInferViTAttention) -> None:
        settled.append((self.layer_name, self.turning is not None))

    monkeypatch.setattr(layers.FlashInferViTAttention, "_settle_plan", settle)
    spec = TowerSpec(SMALL["qwen2_vl"] | {"depth": 2}, "a test", 2, family="qwen2_vl")
    build_tower(spec, backend="FLASHINFER", dtype=torch.float32, device="cpu")
    # Each once the blocks are known, and once its projection is.
    assert [is_turned for _, is_turned in settled] == 4 * [True]
    assert len({name for name, _ in settled}) == 2
