# SPDX-License-Identifier: Apache-2.0
"""The QKV projection that turns q and k: which it can be, and how it is built."""

import importlib.util
import itertools

import pytest
import torch
from _turning_gemm import BF16, FP8, HAS_RUNTIME, make_layer

from vllm_flashinfer_vit.gemms import epilogue_gemm, turning_gemm
from vllm_flashinfer_vit.gemms.epilogue_gemm import Layer, Tile, project, tile_for
from vllm_flashinfer_vit.gemms.turning_gemm import (
    Heads,
    Kernels,
    build,
    compiled,
    fits,
    reads,
    turned,
)
from vllm_flashinfer_vit.kernels.rope_ref import rope_ref


@pytest.mark.parametrize(
    ("head_dim", "heads", "tile"),
    [
        (80, 32, 160),
        (80, 3, 80),
        (72, 32, 144),
        # 72 columns are no multiple of 16.
        (72, 3, 0),
        (64, 32, 128),
        (64, 24, 192),
        (96, 32, 192),
        (112, 32, 112),
        (120, 32, 0),
        (128, 32, 128),
        (256, 32, 0),
    ],
)
def test_a_tile_is_whole_heads(head_dim, heads, tile):
    """All of a tile's columns are turned, or none."""
    tiles = Heads(head_dim, heads - 1, 1, False).tiles(BF16)
    assert {found.columns for found in tiles} == ({tile} if tile else set())
    assert tile == 0 or heads * head_dim % tile == 0


@pytest.mark.parametrize(
    ("rows", "outputs", "expected"),
    [
        # Two waves of the smaller one, and of the larger one.
        (1024, 3072, 128),
        (2048, 4608, 192),
        (4096, 3072, 192),
        (16384, 3072, 192),
    ],
)
def test_the_tile_of_which_waves_take_less(rows, outputs, expected):
    """As measured on an H100."""
    tiles = Heads(128, 12, 12, False).tiles(BF16)
    assert [tile.rows for tile in tiles] == [192, 128]
    assert tile_for(tiles, rows, outputs, 132).rows == expected
    for one, dtype in ((80, BF16), (128, FP8)):
        (only,) = Heads(one, 16, 16, False).tiles(dtype)
        assert tile_for((only,), rows, outputs, 132) is only


H80 = Heads(80, 16, 16, False)


@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype", "heads", "table", "expected"),
    [
        (3840, 1280, torch.bfloat16, H80, torch.float32, True),
        (3840, 1280, torch.float16, H80._replace(is_interleaved=True), BF16, True),
        (3840, 1280, torch.float32, H80, torch.float32, False),
        (3840, 1276, torch.bfloat16, H80, torch.float32, False),
        (3840, 1288, torch.bfloat16, H80, torch.float32, True),
        (3840, 1280, torch.bfloat16, Heads(120, 8, 8, False), torch.float32, False),
        (3840, 1280, torch.bfloat16, H80, torch.float64, False),
        (228, 64, torch.bfloat16, Heads(76, 1, 1, False), torch.float32, False),
    ],
)
def test_which_projections_fit(outputs, inputs, dtype, heads, table, expected):
    weight = torch.empty(outputs, inputs, dtype=dtype)
    bias = torch.empty(outputs, dtype=dtype)
    assert fits(Layer(weight, None), heads, table, dtype) is expected
    assert fits(Layer(weight, bias), heads, table, dtype) is expected
    assert not fits(Layer(weight, bias.double()), heads, table, dtype)
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    assert not fits(Layer(weight, None), heads, table, other)
    # Of single bytes, twice as many are a whole load.
    quantized = Layer(weight.to(FP8), bias, torch.ones(1), torch.ones(outputs))
    whole = expected and inputs % 16 == 0
    assert fits(quantized, heads, table, dtype) is whole


def test_which_tables_are_read():
    doubled = torch.zeros(8, 80)
    assert reads(doubled) and reads(doubled[:, :40])
    assert not reads(doubled[:, 1:41])
    assert not reads(torch.zeros(8, 41)[:, :40])
    assert not reads(torch.zeros(40, 8).t())
    assert reads(torch.zeros(8, 40, dtype=torch.bfloat16)[:, 2:])


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_what_it_computes(is_interleaved):
    """Pairs are complex numbers that are turned, and stay where they are."""
    heads = Heads(8, 2, 1, is_interleaved)
    qkv, angles = torch.randn(5, 32), torch.rand(5, 4)
    found = turned(qkv, angles.cos(), angles.sin(), heads).view(5, 4, 8)
    pairs = qkv.view(5, 4, 8)
    pairs = pairs.unflatten(2, (4, 2) if is_interleaved else (2, 4))
    if not is_interleaved:
        pairs = pairs.transpose(2, 3)
    numbers = torch.view_as_complex(pairs.contiguous())
    numbers[:, :3] *= torch.polar(torch.ones(5, 4), angles)[:, None]
    expected = torch.view_as_real(numbers)
    if not is_interleaved:
        expected = expected.transpose(2, 3)
    assert torch.allclose(found, expected.flatten(2), atol=1e-6)
    assert torch.equal(found[:, 3], qkv.view(5, 4, 8)[:, 3])


def test_scores_are_those_of_the_rotary_pass():
    """It leaves interleaved pairs in their places, which q and k share."""
    heads = Heads(8, 1, 1, True)
    qkv, angles = torch.randn(5, 24), torch.rand(5, 4)
    q, k, _ = turned(qkv, angles.cos(), angles.sin(), heads).view(5, 3, 8).unbind(1)
    plain = qkv.view(5, 3, 8).split(1, dim=1)
    expected = rope_ref(*plain[:2], angles.cos(), angles.sin(), True)
    scores = expected[0][:, 0] @ expected[1][:, 0].t()
    assert torch.allclose(q @ k.t(), scores, atol=1e-5)


@pytest.mark.parametrize(
    ("has_quack", "found", "expected"),
    [
        (True, lambda name: name, True),
        (True, lambda name: None, False),
        (True, lambda name: 1 / 0, False),
        (False, lambda name: name, False),
    ],
    ids=["0.6", "0.5", "broken", "none"],
)
def test_which_quack_has_it(monkeypatch, has_quack, found, expected):
    """One that cannot be imported must not stop an engine."""
    monkeypatch.setattr(epilogue_gemm.quack, "has_quack", lambda: has_quack)
    monkeypatch.setattr(importlib.util, "find_spec", found)
    assert epilogue_gemm.is_available() is expected


@pytest.mark.parametrize("kind", ["plain", "tensor", "tokens", "rows"])
def test_wrong_results_are_refused(monkeypatch, kind):
    heads = Heads(16, 2, 2, False)
    weight = torch.randn(96, 64, dtype=BF16)
    layer = make_layer(kind, weight, weight[:, 0].contiguous(), 16)

    def stand_in(kernel, x, cos, sin, out):
        return lambda given: out.copy_(
            kernel(turned(project(x, given), cos, sin, heads))
        )

    monkeypatch.setattr(turning_gemm, "prepare", stand_in)
    wrong = "its results with tiles of 128 rows are wrong"
    for kernel, reason in ((torch.clone, None), (torch.neg, wrong)):
        monkeypatch.setattr(turning_gemm, "compiled", lambda *args, k=kernel: k)
        assert build(layer, heads, torch.float32, BF16) == reason


def test_a_projection_holds_no_layer(monkeypatch):
    """A weight that is loaded at another address must not stay in memory."""
    made = []
    monkeypatch.setattr(turning_gemm, "compiled", lambda *args: made.append(args[4]))
    layer = Layer(torch.zeros(768, 64, dtype=BF16), torch.zeros(768, dtype=BF16))
    heads = Heads(128, 2, 2, False)
    found = Kernels(layer, heads, torch.float32, BF16, 8, 132)
    assert made == [Tile(192, 128, (1, 2)), Tile(128, 128, (2, 1))]
    assert not any(isinstance(x, torch.Tensor) for x in vars(found).values())
    tables = torch.zeros(8, 64), torch.zeros(8, 64)
    assert found.turns(8, *tables)
    assert not found.turns(7, *(table[:7] for table in tables))
    assert not found.turns(9, *tables)
    assert not found.turns(8, tables[0], tables[1].half())


@pytest.mark.skipif(not HAS_RUNTIME, reason="needs QuACK 0.6")
def test_what_quack_finds_kernels_by(kernel_keys, monkeypatch):
    """Its folder must not hand out what another source or other heads compiled to."""
    weight, bias = torch.zeros(768, 64).bfloat16(), torch.zeros(768).bfloat16()
    layers = [
        make_layer(kind, weight, added, 9)
        for kind in ("plain", "tokens")
        for added in (bias, None)
    ]
    for revision, interleaved, turns, table, layer in itertools.product(
        ("a", "b"), (False, True), (2, 4), (torch.float32, BF16), layers
    ):
        monkeypatch.setattr(epilogue_gemm, "revision", lambda name, now=revision: now)
        heads = Heads(128, turns - 1, 1, interleaved)
        for tile in heads.tiles(layer.weight.dtype):
            with pytest.raises(RuntimeError, match="compiled"):
                compiled(layer, heads, table, BF16, tile)
    assert len(kernel_keys) == len(set(kernel_keys)) == 96
