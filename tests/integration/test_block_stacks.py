# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' block stacks: the same blocks for stock and for the package."""

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _encoders import PACKED
from _grid_models import _both_normed
from _length_models import _mrope, audio_encoder
from _models import Call, encode, engine, noise, plain
from _towers import cpu_only

from cases import relative_error, values

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from block_stacks import StackTower, build_stack  # noqa: E402
from known_stacks import STACKS  # noqa: E402
from tower_cases import AUDIO_CASES  # noqa: E402
from vllm_flashinfer_vit.blocks.attach import _PROGRAM, program_of  # noqa: E402
from vllm_flashinfer_vit.models import gemma4  # noqa: E402

GRIDS = [[1, 4, 6], [1, 4, 6], [1, 4, 6]]
RAGGED = [[1, 4, 6], [2, 2, 4]]
# Of other sizes, those whose tables have no other ones.
OWN_GRIDS = {"Llama-4": [[1, 1, 577]] * 2}
# At their true width they take seconds each.
FAST = {"Kimi-K2.5", "SigLIP-So400m"}
# What stands on a CPU for the Triton kernels that stock's blocks call.
STAND_INS = {
    "GLM-5.3": ("fused_q_kv_rmsnorm", _both_normed),
    "MiniMax-M3": ("triton_mrope", _mrope),
}


def build(
    name: str, backend: str, depth: int = 2, dtype: torch.dtype = torch.float32
) -> StackTower:
    device = torch.device("cpu")
    kinds = {"depth": depth, "dtype": dtype, "device": device}
    try:
        tower = build_stack(name, backend=backend, **kinds)  # type: ignore[arg-type]
    except ImportError as error:
        pytest.skip(f"not in this vLLM, or its transformers: {error}")
    except AttributeError as error:
        # See `Encoder.load`.
        if "_OpNamespace" not in str(error):
            raise
        pytest.skip(f"this vLLM loads no such model without a GPU: {error}")
    if not tower.attention_layers():
        pytest.skip("this vLLM has no MMEncoderAttention in these blocks")
    return tower


def run(tower: StackTower, grids: list[list[int]]) -> torch.Tensor:
    rows = sum(t * h * w for t, h, w in grids)
    with tower.running():
        metadata = tower.visual.prepare_encoder_metadata(grids)
        x = noise(rows, tower.spec.patch_dim)
        return tower.visual(x, grids, encoder_metadata=metadata)


def with_stand_in(name: str) -> AbstractContextManager[None]:
    if name not in STAND_INS:
        return nullcontext()
    return plain(import_module(f"vllm.{STACKS[name].module}"), *STAND_INS[name])


@cpu_only
@pytest.mark.parametrize("name", values(sorted(FAST), sorted(set(STACKS) - FAST)))
def test_blocks_run_as_programs_and_equal_stocks(name: str, ran: list[int]) -> None:
    served = build(name, "FLASHINFER")
    assert all(program_of(block) for block in served.visual.blocks)
    own = OWN_GRIDS.get(name, GRIDS)
    assert set(served.kernels(own).values()) == {"reference"}
    stock = build(name, "TORCH_SDPA")
    batches = [own] if STACKS[name].shape == "BSC" else [own, RAGGED]
    for grids in batches:
        with with_stand_in(name):
            found, expected = run(served, grids), run(stock, grids)
        assert relative_error(found, expected) < 1e-5
        assert relative_error(found, noise(*found.shape)) > 0.1
    assert ran == [0, 1] * len(batches)


@cpu_only
@pytest.mark.extended
def test_rounding_does_not_decide_what_wide_blocks_return() -> None:
    grids, width = [[1, 16, 16]], STACKS["EXAONE-4.5"].width
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        tower = build("EXAONE-4.5", "TORCH_SDPA", depth=4, dtype=dtype)
        with tower.running():
            x = noise(256, width).bfloat16().to(dtype)
            found.append(tower.visual(x, grids).float())
    # 3 % with the weights that narrower blocks get, and 29 % of all 28 blocks.
    assert relative_error(*found) < 0.015


class Doubles(torch.nn.Module):
    """A block that writes over what it gets, as vLLM's fused norm does."""

    def forward(self, x: torch.Tensor, **given: object) -> torch.Tensor:
        return x.mul_(2)


@cpu_only
def test_blocks_may_write_over_what_they_get() -> None:
    tower = build("Kimi-K2.5", "TORCH_SDPA", depth=1)
    metadata = tower.visual.prepare_encoder_metadata(GRIDS)
    tower.visual.blocks = torch.nn.ModuleList([Doubles()])
    x = noise(72, tower.spec.patch_dim)
    for _ in range(2):
        out = tower.visual(x, GRIDS, encoder_metadata=metadata)
        torch.testing.assert_close(out, 2 * noise(72, tower.spec.patch_dim))


@cpu_only
@pytest.mark.parametrize("name", values(["Gemma-4-768"], ["Gemma-4-1152"]))
def test_gemma_4_runs_by_this_package_and_equals_transformers(name: str) -> None:
    served = build(name, "FLASHINFER")
    assert isinstance(served.visual.encoder.forward, gemma4.Encoder)
    assert served.kernels(GRIDS) == {"all": "reference"}
    stock = build(name, "TORCH_SDPA")
    assert not isinstance(stock.visual.encoder.forward, gemma4.Encoder)
    sizes = [
        (layer.num_heads, layer.head_size)
        for tower in (served, stock)
        for layer in tower.attention_layers().values()
    ]
    assert len(set(sizes)) == 1
    found, expected = run(served, GRIDS), run(stock, GRIDS)
    assert relative_error(found, expected) < 1e-5
    assert relative_error(found, noise(*found.shape)) > 0.1


@cpu_only
def test_gemma_4_takes_images_of_one_size() -> None:
    tower = build("Gemma-4-768", "FLASHINFER")
    with pytest.raises(ValueError, match="one size"):
        tower.visual.prepare_encoder_metadata(RAGGED)


@cpu_only
def test_dense_batches_have_one_size() -> None:
    tower = build("SigLIP-So400m", "FLASHINFER")
    with pytest.raises(ValueError, match="one size"):
        tower.visual.prepare_encoder_metadata(RAGGED)


@cpu_only
@pytest.mark.parametrize(
    ("name", "rows", "columns"), [("Llama-4", 4, 6), ("Step-VL", 53, 2)]
)
def test_tables_of_their_own_have_not_all_sizes(
    name: str, rows: int, columns: int
) -> None:
    tower = build(name, "FLASHINFER", depth=1)
    with pytest.raises(ValueError, match=f"{rows} x {columns} patches"):
        tower.visual.prepare_encoder_metadata([[1, rows, columns]])


class Seen(torch.nn.Module):
    """A block that notes what it is given; a compiled one calls no hooks."""

    def __init__(self, block: torch.nn.Module, seen: list[dict[str, Any]]) -> None:
        super().__init__()
        self.block, self.seen = block, seen

    def forward(self, x: torch.Tensor, **given: Any) -> Any:
        self.seen.append(given)
        return self.block(x, **given)


@cpu_only
@pytest.mark.parametrize("name", values(["Muse-Spark"], ["EXAONE-4.5", "openPangu-VL"]))
def test_some_blocks_attend_in_windows(
    name: str, ran: list[int], settled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = replace(STACKS[name], full=frozenset({1}))
    monkeypatch.setitem(STACKS, name, stack)  # type: ignore[arg-type]
    side = stack.window
    grids = [[1, side + 2, 2], [2, 4, 6]]
    served = build(name, "FLASHINFER")
    assert served.kernels(grids) == {"full": "reference", "windows": "reference"}
    seen: list[dict[str, Any]] = []
    with served.running():
        metadata = served.visual.prepare_encoder_metadata(grids)
        blocks = served.visual.blocks
        served.visual.blocks = torch.nn.ModuleList(Seen(one, seen) for one in blocks)
        # Which tells them what the list's own are told.
        vars(served.visual.blocks)[_PROGRAM] = vars(blocks)[_PROGRAM]
        x = noise(2 * side + 52, served.spec.patch_dim)
        found = served.visual(x, grids, encoder_metadata=metadata)
    lengths = [given["cu_seqlens"].diff().tolist() for given in seen]
    assert lengths == [[2 * side, 4, 24, 24], [2 * side + 4, 24, 24]]
    longest = [int(given["max_seqlen"]) for given in seen if "max_seqlen" in given]
    assert longest in ([], [max(part) for part in lengths])
    told = sorted(int(read[3]) for read in settled)
    assert told == sorted(max(part) for part in lengths)
    assert ran == [0, 1]
    expected = run(build(name, "TORCH_SDPA"), grids)
    assert relative_error(found, expected) < 1e-5


@cpu_only
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("EXAONE-4.5", {"full": 96, "windows": 64}),
        ("openPangu-VL", {"full": 96, "windows": 64}),
        ("Keye-VL", {"all": 96}),
        ("Ovis2.5", {"all": 192}),
        ("InternViT-300M", {"all": 96}),
    ],
)
def test_kernels_are_named_by_what_blocks_are_told(
    name: str, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = build(name, "FLASHINFER", depth=1)
    layer = SimpleNamespace(kernel_for=lambda longest, mean: longest)
    monkeypatch.setattr(StackTower, "attention_layers", lambda self: {"one": layer})
    # A whole window, and half of one.
    assert tower.kernels([[1, 12, 8], [1, 12, 8]]) == expected


@cpu_only
def test_clips_have_the_windows_of_vllms_audio_encoder() -> None:
    seen = []
    # Of 10 ms each.
    frames = torch.tensor([3000] * 8)

    def small(m: Any) -> tuple[torch.nn.Module, Call]:
        config = m.Qwen3OmniMoeAudioEncoderConfig()
        tower = audio_encoder(m, config.n_window, config.n_window_infer)
        tower.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[1]))
        tokens = m._get_feat_extract_output_lengths(frames)
        return tower, lambda: tower(noise(16, int(frames.sum())), frames, tokens)

    try:
        encode(replace(PACKED["qwen3_omni-audio"], build=small), engine("TORCH_SDPA"))
    except NotImplementedError as error:
        pytest.skip(f"in this vLLM it {error}")
    stack = build("Qwen3-Omni-Audio", "TORCH_SDPA", depth=1)
    metadata = stack.visual.prepare_encoder_metadata(AUDIO_CASES["8x30s"])
    assert torch.equal(seen[0], metadata["cu_seqlens"])
