# SPDX-License-Identifier: Apache-2.0
"""Which layers of an engine count passes, and for which kernel."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm_flashinfer_vit.engine.counting import Counting  # noqa: E402
from vllm_flashinfer_vit.engine.metrics import Metrics  # noqa: E402
from vllm_flashinfer_vit.ops.batch import Batch  # noqa: E402
from vllm_flashinfer_vit.ops.plan import LEAST_MEAN_LEN, Plan  # noqa: E402


@pytest.fixture
def engine(metrics: Metrics) -> Counting:
    config = SimpleNamespace(compilation_config=SimpleNamespace(), model_config=None)
    return Counting(config)


def batch_of(rows: int, cu_seqlens: torch.Tensor | None) -> Batch:
    q = torch.empty(rows, 1, 8)
    seq_len = rows if cu_seqlens is None else 0
    return Batch(q, q, q, cu_seqlens=cu_seqlens, seq_len=seq_len)


def test_the_first_and_the_last_one_of_each_tower(engine: Counting) -> None:
    plan = Plan.decode("*:reference")
    layers = [
        engine.enroll(f"{tower}.blocks.{n}.attn", plan, None)
        for tower in ("visual", "audio")
        for n in range(3)
    ]
    ends = [(True, False), (False, False), (False, True)]
    assert [(one.is_first, one.is_last) for one in layers] == 2 * ends


@pytest.mark.parametrize(
    ("lengths", "kernel"),
    [
        ((LEAST_MEAN_LEN,), "triton"),
        ((LEAST_MEAN_LEN, LEAST_MEAN_LEN), "triton"),
        ((LEAST_MEAN_LEN, LEAST_MEAN_LEN - 1), "reference"),
        ((), "reference"),
    ],
)
def test_the_mean_length_says_whether_sequences_are_many(
    lengths: tuple[int, ...], kernel: str, engine: Counting, metrics: Metrics
) -> None:
    layer = engine.enroll("blocks.0.attn", Plan.decode("*:triton/reference"), None)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    # Without a sequence all rows are padding.
    rows = sum(lengths) or LEAST_MEAN_LEN - 1
    with engine.step():
        layer.passed("blocks", batch_of(rows, cu_seqlens))
    assert metrics.totals["encoder_patches", kernel, "any", "blocks"] == rows


def test_a_pass_without_rows_is_none(engine: Counting, metrics: Metrics) -> None:
    """As of a rank that has no image."""
    layer = engine.enroll("blocks.0.attn", Plan.decode("*:triton"), None)
    with engine.step():
        layer.passed("blocks", batch_of(0, torch.zeros(1, dtype=torch.int32)))
    assert not any(key[0] == "encoder_passes" for key in metrics.totals)


def test_what_falls_back_outside_of_steps_is_no_request(
    engine: Counting, metrics: Metrics
) -> None:
    layer = engine.enroll("blocks.0.attn", Plan.decode("*:triton"), None)
    for _ in range(2):
        layer.fell_back("key_lengths")
        with engine.step():
            pass
    assert not metrics.totals["fallbacks", "key_lengths"]


def test_what_follows_a_capture_is_no_step(engine: Counting, metrics: Metrics) -> None:
    layer = engine.enroll("blocks.0.attn", Plan.decode("*:triton"), None)
    with engine.noting() as noted:
        pass
    for _ in range(2):
        layer.passed("blocks", batch_of(8, None))
        with engine.step():
            pass
    assert not noted and not any(key[0] == "encoder_passes" for key in metrics.totals)
