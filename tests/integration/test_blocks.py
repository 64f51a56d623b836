# SPDX-License-Identifier: Apache-2.0
"""Blocks of towers that run as programs: results, settings, what is left to vLLM."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from _blocks import (
    SIZE,
    SPECS,
    blocks,
    build,
    call,
    kinds,
    log_of,
    mlp,
    noted,
    outputs,
    programs,
    stream,
    tables,
    without,
)
from _encoders import DENSE, PACKED
from _models import Encoder, Result, encode, engine, noise
from _towers import cpu_only
from torch import nn
from transformers.activations import ACT2FN
from vllm.model_executor.layers.linear import QKVParallelLinear

from cases import relative_error
from vllm_flashinfer_vit import plugin
from vllm_flashinfer_vit.blocks import attach as attach_module
from vllm_flashinfer_vit.blocks import norms
from vllm_flashinfer_vit.blocks.attach import attach, program_of, spec_of
from vllm_flashinfer_vit.blocks.mlp import activation_of
from vllm_flashinfer_vit.blocks.program import BlockProgram
from vllm_flashinfer_vit.blocks.spec import OPTIMISATIONS
from vllm_flashinfer_vit.settings import Settings
from vllm_flashinfer_vit.towers.spec import FAMILIES
from vllm_flashinfer_vit.towers.tower import Tower

pytestmark = cpu_only

# Sums of a few hundred fp32 terms in another order.
TOLERANCE = 1e-6
BLOCKS = [p.name for p in plugin.all_patches() if p.name.endswith("-blocks")]
# Towers of `_models`, each with its patch.
OTHERS = {
    "exaone4_5": "exaone4_5-blocks",
    "qwen3_omni-vision": "qwen3_omni_moe_thinker-blocks",
    "qwen3_omni-audio": "qwen3_omni_audio-blocks",
    "moonvit": "moonvit-blocks",
    "keye": "keye-blocks",
    "lfm2_siglip2": "lfm2_siglip2-blocks",
    "glm5next": "glm5next-blocks",
    "minimax_m3": "minimax_m3-blocks",
    "muse_spark": "muse_spark-blocks",
    "clip": "clip-blocks",
    "molmo2": "molmo2-blocks",
}
ENCODERS = {**PACKED, **DENSE}


def encoded(
    encoder: Encoder, backend: str, dtype: torch.dtype = torch.float32
) -> Result:
    try:
        return encode(encoder, engine(backend, dtype))
    except (ImportError, NotImplementedError) as error:
        pytest.skip(f"not in this vLLM: {error}")


class TestSameResults:
    @pytest.mark.parametrize("family", SPECS)
    def test_as_stock(self, family: str, ran: list[int]) -> None:
        served, stock = build(family), build(family, "TORCH_SDPA")
        expected = outputs(stock)
        assert not ran
        assert not any(program_of(block) for block in blocks(stock))
        found = outputs(served)
        assert ran == [*range(len(blocks(served)))]
        assert relative_error(found, expected) < TOLERANCE
        # Nothing stays of a pass.
        assert torch.equal(outputs(served), found)

    @pytest.mark.parametrize("name", OTHERS)
    def test_other_towers(self, name: str, ran: list[int]) -> None:
        stock = encoded(ENCODERS[name], "TORCH_SDPA")
        assert not ran
        found = encoded(ENCODERS[name], "FLASHINFER")
        assert ran == [0, 1]
        assert relative_error(found.out, stock.out) < TOLERANCE

    @pytest.mark.parametrize("name", [n for n, e in ENCODERS.items() if e.programs])
    def test_ranks_gather_only_what_is_not_whole_heads(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """vLLM gathers those of dots.ocr in another order than it splits them."""
        built: list[BlockProgram] = []
        build_steps = BlockProgram.build

        def noting(program: BlockProgram) -> None:
            built.append(program)
            build_steps(program)

        monkeypatch.setattr(BlockProgram, "build", noting)
        encoded(ENCODERS[name], "FLASHINFER")
        assert built
        for program in built:
            qkv = program._part(program.spec.qkv)
            assert isinstance(qkv, QKVParallelLinear) is (program.spec.split is None)

    def test_a_pass_is_not_the_next_one(self) -> None:
        """Of other images, rotary tables and lengths."""
        served, stock = build("qwen3_vl"), build("qwen3_vl", "TORCH_SDPA")
        for grids in ([[1, 4, 4]], [[2, 4, 6], [1, 8, 2]], [[1, 2, 2]]):
            rows = sum(t * h * w for t, h, w in grids)
            pixels = noise(rows, served.spec.patch_dim)
            expected = stock.encode(pixels, grids)
            error = relative_error(served.encode(pixels, grids), expected)
            assert error < TOLERANCE


@pytest.fixture(scope="module", params=SPECS)
def pair(request: pytest.FixtureRequest) -> tuple[Tower, Tower]:
    """A tower that runs as programs, and vLLM's own."""
    return build(request.param), build(request.param, "TORCH_SDPA")


class TestOneBlock:
    def test_arguments_by_place(
        self, pair: tuple[Tower, Tower], ran: list[int]
    ) -> None:
        served, stock = pair
        x, with_ = stream(served), tables(served)
        expected = call(stock, 0, x, with_)
        for arguments in (([], with_), ([*with_.values()], {})):
            with served.running():
                found = blocks(served)[0](x, *arguments[0], **arguments[1])
            assert (found.shape, found.dtype) == (x.shape, x.dtype)
            assert relative_error(found, expected) < TOLERANCE
        assert ran == [0, 0]

    @pytest.mark.parametrize("longest", [16, None], ids=["int", "none"])
    def test_other_forms_of_the_longest(
        self, longest: int | None, pair: tuple[Tower, Tower], ran: list[int]
    ) -> None:
        served, stock = pair
        x, with_ = stream(served), tables(served)
        expected = call(stock, 0, x, with_)
        found = call(served, 0, x, {**with_, "max_seqlen": longest})
        assert ran == [0]
        assert relative_error(found, expected) < TOLERANCE

    def test_a_batch_of_two_is_vllms(
        self, pair: tuple[Tower, Tower], ran: list[int]
    ) -> None:
        served, stock = pair
        x = stream(served, batch=2)
        found = call(served, 0, x, tables(served, batch=2))
        assert not ran
        for at in range(2):
            expected = call(stock, 0, x[:, at : at + 1], tables(served))
            assert relative_error(found[:, at : at + 1], expected) < TOLERANCE

    def test_no_token_is_vllms(self, pair: tuple[Tower, Tower], ran: list[int]) -> None:
        served, _ = pair
        x, with_ = stream(served)[:0], tables(served, rows=0)
        assert call(served, 0, x, with_).shape == x.shape
        assert not ran

    def test_a_stream_with_gaps(
        self, pair: tuple[Tower, Tower], ran: list[int]
    ) -> None:
        served, stock = pair
        x, with_ = stream(served), tables(served)
        wide = torch.cat([x, x], dim=-1)[..., : x.shape[-1]]
        found = call(served, 0, wide, with_)
        assert ran == [0]
        assert relative_error(found, call(stock, 0, x, with_)) < TOLERANCE


class TestSettings:
    @pytest.mark.parametrize("left_out", [*OPTIMISATIONS, ",".join(OPTIMISATIONS)])
    @pytest.mark.parametrize("family", SPECS)
    def test_optimisations(self, family: str, left_out: str, ran: list[int]) -> None:
        with without(left_out):
            served = build(family)
        found = outputs(served)
        assert ran == [*range(len(blocks(served)))]
        steps = program_of(blocks(served)[0]).steps  # type: ignore[union-attr]
        is_fused = "add_norm" not in left_out
        assert (steps["add_norm"] == "one kernel") is is_fused
        if family != "qwen2_vl":
            weights = [p for p in mlp(served).parameters() if p.dim() == 2]
            is_stock = any(SIZE in weight.shape for weight in weights)
            assert is_stock is ("aligned" in left_out)
        expected = outputs(build(family, "TORCH_SDPA"))
        assert relative_error(found, expected) < TOLERANCE

    @pytest.mark.parametrize("family", SPECS)
    def test_separate_sums(self, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each norm and each sum is then vLLM's own."""

        def prepare(*args: Any) -> None:
            raise AssertionError

        monkeypatch.setattr(norms, "prepare", prepare)
        with without("add_norm"):
            served = build(family)
        all_norms = [n for b in blocks(served) for n in (b.norm1, b.norm2)]
        with noted(all_norms) as seen:
            outputs(served)
        assert seen == [*range(len(all_norms))]

    @pytest.mark.parametrize("names", ["fused-gelu", "add_norm,other"])
    def test_an_unknown_name(self, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
        unknown = names.split(",")[-1]
        with (
            pytest.raises(ValueError, match=rf"named {unknown}; .*add_norm, .*aligned"),
            without(*names.split(",")),
        ):
            build("qwen2_vl")

    @pytest.mark.parametrize("family", SPECS)
    def test_a_patch_left_out(self, family: str, ran: list[int]) -> None:
        with without(f"{FAMILIES[family].module}-blocks"):
            plain = build(family)
        assert not any(program_of(block) for block in blocks(plain))
        layers = plain.attention_layers().values()
        assert not any(layer.turning for layer in layers)
        if family != "qwen2_vl":
            shapes = [p.shape for p in mlp(plain).parameters()]
            assert any(SIZE in shape for shape in shapes)
        found = outputs(plain)
        assert not ran
        served = build(family)
        layers = served.attention_layers().values()
        assert all(layer.turning for layer in layers)
        assert relative_error(found, outputs(served)) < TOLERANCE

    @pytest.mark.parametrize("name", OTHERS)
    def test_another_towers_patch_left_out(self, name: str, ran: list[int]) -> None:
        with without(OTHERS[name]):
            found = encoded(ENCODERS[name], "FLASHINFER")
        assert not ran
        stock = encoded(ENCODERS[name], "TORCH_SDPA")
        assert relative_error(found.out, stock.out) < TOLERANCE

    def test_a_reverted_patch_leaves_vllms_blocks(self, ran: list[int]) -> None:
        served = build("qwen2_vl")
        found = outputs(served)
        ran.clear()
        with without(*BLOCKS):
            again = outputs(served)
        assert not ran
        assert relative_error(again, found) < TOLERANCE


class TestOwnForward:
    """Blocks that stay as vLLM's, and what is said of them."""

    def attached(self, block: nn.Module, monkeypatch: pytest.MonkeyPatch) -> str | None:
        """Return what is said when a block takes its place, None if it gets one."""
        lines = log_of(attach_module, monkeypatch)
        spec = spec_of(type(block))
        assert spec is not None
        served = attach(spec, blocks := nn.ModuleList(), 0, block, Settings())
        assert (served is None) is bool(lines)
        assert bool(lines) is (attach_module._PROGRAM not in vars(blocks))
        return lines[0] if lines else None

    @pytest.fixture
    def block(self, pair: tuple[Tower, Tower], monkeypatch: pytest.MonkeyPatch) -> Any:
        family = pair[0].spec.family
        with (fresh := build(family)).running():
            yield blocks(fresh)[0]

    def test_known(self, block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.attached(block, monkeypatch) is None

    def test_compiled(self, block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        block.do_not_compile = False
        line = self.attached(block, monkeypatch)
        assert line is not None and "compile_mm_encoder" in line

    @pytest.mark.parametrize("compiles", [False, True])
    def test_a_tower_that_is_compiled_whole(
        self, compiles: bool, block: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "vllm.compilation.decorators.should_torch_compile_mm_encoder",
            lambda config: compiles,
        )
        assert self.attached(block, monkeypatch) is None
        spec = spec_of(type(block))
        assert spec is not None
        whole = replace(spec, is_compiled_whole=True)
        monkeypatch.setattr("test_blocks.spec_of", lambda block_class: whole)
        line = self.attached(block, monkeypatch)
        assert (line is not None and "tower is compiled" in line) is compiles

    def test_batch_invariant(self, block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        line = self.attached(block, monkeypatch)
        assert line is not None and "VLLM_BATCH_INVARIANT" in line

    def test_a_moved_name(self, block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr("vllm.model_executor.layers.activation.QuickGELU")
        line = self.attached(block, monkeypatch)
        assert line is not None and "cannot import name 'QuickGELU'" in line

    @pytest.mark.parametrize("place", ["norm1", "norm2"])
    def test_unknown_norm(
        self, place: str, block: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stock = type(getattr(block, place))

        class Other(stock):  # type: ignore[misc,valid-type]
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x

            forward_native = forward

        width = getattr(block, place).weight.shape[0]
        no_weight = nn.RMSNorm(width, elementwise_affine=False)
        for other in (Other(width), no_weight, nn.LayerNorm(width, bias=False)):
            setattr(block, place, other)
            line = self.attached(block, monkeypatch)
            assert line is not None and f"{place} is a {type(other).__name__}" in line

    def test_linear_layers_of_pytorchs(
        self, block: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec = spec_of(type(block))
        assert spec is not None
        for path in (spec.second, spec.first, spec.proj, spec.qkv):
            block.set_submodule(path, nn.Linear(8, 8))
            line = self.attached(block, monkeypatch)
            assert line is not None and f"{path} is a Linear" in line

    def test_parts_by_other_names(
        self, block: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in a subclass by someone else: its model is built all the same."""
        part = block.attn
        del block.attn
        block.self_attention = part
        line = self.attached(block, monkeypatch)
        assert line is not None and "attn" in line

    def test_it_is_said_once(
        self, ran: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines = log_of(attach_module, monkeypatch)
        stock = build("qwen3_vl", "TORCH_SDPA")
        with monkeypatch.context() as context:
            context.setenv("VLLM_BATCH_INVARIANT", "1")
            served = build("qwen3_vl")
        # The log drops what was said before.
        assert len(lines) == 3 and len(set(lines)) == 1
        assert not any(layer.turning for layer in served.attention_layers().values())
        found = outputs(served)
        assert not ran
        assert relative_error(found, outputs(stock)) < TOLERANCE

    @pytest.mark.parametrize(
        "dtype, places", [(torch.float16, []), (torch.bfloat16, [0, 1])], ids=str
    )
    def test_values_that_are_clamped_in_fp16(
        self, dtype: torch.dtype, places: list[int], ran: list[int]
    ) -> None:
        encoder = ENCODERS["qwen3_omni-audio"]

        def build(module: Any) -> tuple[nn.Module, Any]:
            tower: Any
            tower, call = encoder.build(module)

            def large() -> Any:
                for layer in tower.layers:
                    # Two of them are more than fp16 holds.
                    layer.fc2.bias.fill_(6e4)
                return call()

            return tower, large

        found = encoded(replace(encoder, build=build), "FLASHINFER", dtype)
        assert ran == places
        assert found.out.isfinite().all()

    @pytest.mark.parametrize("has_program", [True, False])
    def test_a_compiler_sees_vllms_block(
        self,
        has_program: bool,
        pair: tuple[Tower, Tower],
        ran: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        if not has_program:
            monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        served = build(pair[0].spec.family)
        monkeypatch.undo()
        block, (_, stock) = blocks(served)[0], pair
        assert (program_of(block) is not None) is has_program
        torch.compiler.reset()
        compiled = torch.compile(block, backend="eager", fullgraph=True)
        x, with_ = stream(served), tables(served)
        with served.running():
            found = compiled(x, **with_)
        torch.compiler.reset()
        assert relative_error(found, call(stock, 0, x, with_)) < TOLERANCE
        assert not ran

    def test_a_forward_of_its_own(self, pair: tuple[Tower, Tower]) -> None:
        stock = type(blocks(pair[0])[0])
        spec = spec_of(stock)
        assert spec is not None

        class Inherits(stock):  # type: ignore[misc,valid-type]
            pass

        class Replaces(stock):  # type: ignore[misc,valid-type]
            def forward(self, x: torch.Tensor, mask: torch.Tensor) -> None: ...

        assert spec_of(Inherits) is spec
        assert spec_of(Replaces) is None
        assert spec_of(nn.Linear) is None


def test_sums_are_settled_once_for_tensors_of_layers_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settled = mock.Mock(wraps=norms.prepare)
    monkeypatch.setattr(norms, "prepare", settled)
    tower = build("qwen3_vl")
    assert set(kinds(tower)) == {("OwnLinear",) * 4} and len(programs(tower)) == 3
    # vLLM's own layers return new tensors, as does a sum over ranks.
    outputs(tower)
    # One for a branch, one for two.
    assert settled.call_count == 2


@pytest.mark.parametrize(
    "name, expected", [("gelu_pytorch_tanh", "tanh_gelu"), ("gelu_python_tanh", None)]
)
def test_activations_of_transformers(name: str, expected: str | None) -> None:
    assert activation_of(ACT2FN[name]) == expected
