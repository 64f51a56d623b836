# SPDX-License-Identifier: Apache-2.0
"""Layers with FP8 scales of their own, which share a prepared call in a pass.

The measure is the bits of the same blocks, each of which prepares a call of its own.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _blocks import SPECS, programs, stream, tables
from _models import OpCount, through
from _towers import DEVICE, HAS_GPU, cpu_only
from torch import nn

from vllm_flashinfer_vit.choices.trial import attempt
from vllm_flashinfer_vit.fp8.state import ScaleState
from vllm_flashinfer_vit.ops.attention import rotate
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.settings import ENV_FP8_SCALES, ENV_KERNEL
from vllm_flashinfer_vit.towers.spec import TowerSpec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

FAMILY, DEPTH, HEAD_DIM = "qwen3_vl", 3, 32
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
# Several blocks of 128 tokens, of two sequences.
ROWS = 600
# What passes differ by.
FACTORS = (1.0, 3.0, 0.5)
# The second layer's cut most values off.
STATIC = 0.02, 0.0001, 0.05
ON_A_GPU = "triton_fp8", "hopper_fp8", "cudnn_fp8"

Passes = list[tuple[torch.Tensor, ...]]


@pytest.fixture(
    params=[
        pytest.param("reference_fp8", marks=cpu_only),
        *(pytest.param(name, marks=pytest.mark.gpu) for name in ON_A_GPU),
    ]
)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel that serves every length."""
    if error := HAS_GPU and attempt(request.param, HEAD_DIM, DTYPE):
        pytest.skip(error)
    if not HAS_GPU:
        # What a linear layer itself returns is a new tensor, which no layers share.
        request.getfixturevalue("direct")
    monkeypatch.setenv(ENV_KERNEL, request.param)
    return request.param


@pytest.fixture(params=["static", "dynamic"])
def tower(
    request: pytest.FixtureRequest,
    kernel: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Tower:
    path = None
    if request.param == "static":
        path = tmp_path / "scales.json"
        scales = {
            f"visual.blocks.{at}.attn.attn": dict.fromkeys("qkv", scale)
            for at, scale in enumerate(STATIC)
        }
        path.write_text(json.dumps(scales))
    else:
        monkeypatch.setenv(ENV_FP8_SCALES, "dynamic")
    return build_tower(
        TowerSpec(SPECS[FAMILY], "a tower", DEPTH, family=FAMILY),
        backend="FLASHINFER",
        dtype=DTYPE,
        device=DEVICE,
        attn_dtype="fp8",
        fp8_scale_path=path,
    )


def states(of: Tower) -> list[ScaleState]:
    return [layer._fp8_state for layer in of.attention_layers().values()]


def on_device(x: Any) -> Any:
    # The longest length stays on the CPU, as in an engine.
    return x.to(DEVICE) if isinstance(x, torch.Tensor) and x.dim() else x


class Blocks:
    """A tower's blocks, and what they are called with."""

    def __init__(self, tower: Tower) -> None:
        self.tower = tower
        self.list: nn.ModuleList = tower.visual.get_submodule("blocks")  # type: ignore
        self.x = on_device(stream(tower, ROWS)).to(DTYPE)
        self.given = {k: on_device(v) for k, v in tables(tower, ROWS).items()}
        self._first = self.x.clone()

    def __call__(self) -> torch.Tensor:
        return through(self.list, self.x, **self.given)

    def passes(self, run: Callable[[], torch.Tensor] | None = None) -> Passes:
        """Return what blocks that have seen nothing return, and their states after it.

        Args:
            run: What stands for a pass: it reads `x`.
        """
        found = []
        with self.tower.running():
            for state in states(self.tower):
                state.reset()
            for factor in FACTORS:
                self.x.copy_(self._first * factor)
                out = (run or self)()
                own = [getattr(s, x) for s in states(self.tower) for x in s._buffers]
                found.append(tuple(x.clone() for x in (out, *own)))
        return found

    def unshared(self) -> Passes:
        """Return `passes` of blocks that prepare each call anew."""
        ours = programs(self.tower)
        groups = [program._attention.group for program in ours]
        for program in ours:
            program._attention.group = None
        found = self.passes()
        for program, group in zip(ours, groups, strict=True):
            program._attention.group = group
        ours[0]._tower.forget()
        return found


def assert_same(found: Passes, expected: Passes) -> None:
    for one, other in zip(found, expected, strict=True):
        assert not one[0].isnan().any()
        for x, y in zip(one, other, strict=True):
            assert torch.equal(x, y)


def test_each_layer_gets_its_own_result(tower: Tower) -> None:
    ours = Blocks(tower)
    with OpCount() as count:
        expected = ours.unshared()
    assert (count.prepared, count.calls) == (DEPTH * len(FACTORS),) * 2
    with OpCount() as count:
        found = ours.passes()
    # A pass that was kept settles nothing.
    assert (count.prepared, count.calls) == (1, DEPTH * len(FACTORS))
    assert_same(found, expected)
    assert not torch.equal(found[0][0], found[1][0])
    assert len({tuple(state.scales.tolist()) for state in states(tower)}) == DEPTH


def test_each_layer_keeps_its_own_maxima_and_counts(tower: Tower) -> None:
    seen: dict[Any, list[Batch]] = {}

    def watch(layer: Any, attend: Callable[[Batch], Any], batch: Batch) -> Any:
        kept = batch._replace(q=batch.q.clone(), k=batch.k.clone(), v=batch.v.clone())
        seen.setdefault(layer, []).append(kept)
        return attend(batch)

    ours = Blocks(tower)
    layers = list(tower.attention_layers().values())
    # A layer that is watched attends beside layers that share.
    watched = []
    for layer in layers:
        with layer.watched(watch):
            watched.append(ours.passes())
    found = ours.passes()
    for passes in watched:
        assert_same(passes, found)
    for layer in layers:
        state, passes = layer._fp8_state, seen[layer]
        assert len(passes) == len(FACTORS)
        if state.is_static:
            blocks, cut_off = state.clip_counts
            assert torch.equal(blocks, cut_off) == (layer is layers[1])
            continue
        for batch, amax in zip(passes, state.history, strict=False):
            turned = rotate(batch.q, batch.k, batch.cos, batch.sin)
            largest = torch.stack([x.abs().max() for x in (*turned, batch.v)])
            assert torch.equal(amax, largest.float())
        assert state.position.item() == len(FACTORS)


@pytest.mark.gpu
def test_a_graph_captures_the_scales_of_each_layer(tower: Tower) -> None:
    ours = Blocks(tower)
    expected = ours.unshared()
    # In eager mode first, as engines warm up.
    assert_same(ours.passes(), expected)
    graph = torch.cuda.CUDAGraph()
    with tower.running(), OpCount() as count, torch.cuda.graph(graph):
        out = ours()
    # What is captured is the graph's.
    assert (count.prepared, count.calls) == (1, DEPTH)

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    assert_same(ours.passes(replay), expected)
    assert_same(ours.passes(), expected)
