# SPDX-License-Identifier: Apache-2.0
"""Where tensors are, what is logged, and how blocks run as programs."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch


@pytest.fixture
def on_device() -> Iterator[None]:
    """Make tensors where the layer is."""
    from _towers import DEVICE, HAS_GPU

    with torch.device(DEVICE) if HAS_GPU else nullcontext():
        yield


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What the package logs; vLLM's loggers do not propagate to pytest's handler."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore
    logger = logging.getLogger("vllm.plugins.flashinfer_vit")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The places of the blocks that run as programs, in order."""
    from vllm_flashinfer_vit.blocks.program import BlockProgram

    seen: list[int] = []
    run = BlockProgram.run

    def noting(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(self._index)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(BlockProgram, "run", noting)
    return seen


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What attention is settled for, see `tower_pass.Settled.read`, in order."""
    from vllm_flashinfer_vit.blocks.attention import Attention

    seen: list[Any] = []
    settle = Attention._settle

    def noting(self: Any, now: Any, x: Any, qkv: Any, read: Any, *rest: Any) -> Any:
        seen.append(read)
        return settle(self, now, x, qkv, read, *rest)

    monkeypatch.setattr(Attention, "_settle", noting)
    return seen


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have linear layers run past their own methods, as on a GPU."""
    from vllm_flashinfer_vit.blocks import layers, linear

    monkeypatch.setattr(layers, "can_run", linear.is_plain)
    # A CPU's op of this name computes another GELU.
    monkeypatch.setattr(torch, "_addmm_activation", _addmm_gelu)


@pytest.fixture
def fp8(monkeypatch: pytest.MonkeyPatch, direct: None) -> None:
    """Have FP8 layers run as on a GPU, by the references."""
    from vllm_flashinfer_vit.blocks import fp8_methods

    monkeypatch.setattr(fp8_methods, "can_launch", lambda layer, kernel: True)


@pytest.fixture(params=[False, True], ids=["own", "direct"])
def either(request: pytest.FixtureRequest) -> None:
    """Run linear layers by their own methods, or past them."""
    if request.param:
        request.getfixturevalue("direct")


def _addmm_gelu(
    bias: torch.Tensor,
    x: torch.Tensor,
    transposed: torch.Tensor,
    *,
    use_gelu: bool,
    out: torch.Tensor,
) -> None:
    assert use_gelu
    sums = torch.addmm(bias, x, transposed)
    out.copy_(torch.nn.functional.gelu(sums, approximate="tanh"))
