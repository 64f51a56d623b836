# SPDX-License-Identifier: Apache-2.0
"""Which step runs each linear layer of a block, and that all of them agree.

On the CPU layers run here as on a GPU, past their own methods, by PyTorch's call.
"""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import _blocks
import pytest
import torch
from _blocks import (
    ACTIVATIONS,
    ALIGNED,
    FUNCTIONS,
    GRIDS,
    LAYERS,
    SIZE,
    SPECS,
    allow_lora,
    blocks,
    build,
    image,
    kinds,
    mlp,
    outputs,
    programs,
    quantized,
)
from _models import OpCount
from _towers import cpu_only
from torch import nn

from cases import relative_error
from vllm_flashinfer_vit.blocks import layers
from vllm_flashinfer_vit.blocks import linear as steps_module
from vllm_flashinfer_vit.blocks import mlp as mlp_module
from vllm_flashinfer_vit.blocks.attach import program_of
from vllm_flashinfer_vit.blocks.linear import Gemm
from vllm_flashinfer_vit.blocks.spec import BlockSpec
from vllm_flashinfer_vit.gemms.quack import SWIGLU
from vllm_flashinfer_vit.towers.tower import Tower

pytestmark = cpu_only

TOLERANCE = 1e-6
ROWS = sum(t * h * w for t, h, w in GRIDS)


def wrap_layers(block: nn.Module, spec: BlockSpec, adapter: Callable[..., Any]) -> None:
    """Put an adapter in the place of each linear layer of a block."""
    for path in (spec.qkv, spec.proj, spec.first, spec.second):
        block.set_submodule(path, adapter(block.get_submodule(path)))


@pytest.mark.usefixtures("direct")
class TestGemms:
    @pytest.mark.parametrize("size", [SIZE, 128])
    @pytest.mark.parametrize("family", SPECS)
    def test_as_stock(self, family: str, size: int, ran: list[int]) -> None:
        sizes = {} if family == "qwen2_vl" else {"intermediate_size": size}
        served, stock = build(family, **sizes), build(family, "TORCH_SDPA", **sizes)
        assert kinds(served) == {("Gemm",) * 4}
        found = outputs(served)
        assert ran == [*range(len(blocks(served)))]
        assert relative_error(found, outputs(stock)) < TOLERANCE
        assert torch.equal(outputs(served), found)

    def test_a_replicated_second_layer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It has no size of a rank."""
        from vllm.model_executor.layers.linear import ReplicatedLinear
        from vllm.model_executor.models import qwen2_5_vl

        monkeypatch.setattr(qwen2_5_vl, "RowParallelLinear", ReplicatedLinear)
        served, stock = build(), build(backend="TORCH_SDPA")
        assert isinstance(mlp(served).down_proj, ReplicatedLinear)
        assert mlp(served).down_proj.weight.shape[1] == ALIGNED
        assert kinds(served) == {("Gemm",) * 4}
        assert relative_error(outputs(served), outputs(stock)) < TOLERANCE

    @pytest.mark.parametrize("family", SPECS)
    def test_every_value_is_written(self, family: str, nan_empty: None) -> None:
        assert not outputs(build(family)).isnan().any()

    @pytest.mark.parametrize("family", SPECS)
    def test_a_pass_prepares_once(
        self, family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prepared: list[tuple[Any, ...]] = []
        prepare = Gemm.prepare

        def noting(self: Gemm, x: torch.Tensor, out: torch.Tensor) -> Any:
            prepared.append((*x.shape, out.shape[1]))
            return prepare(self, x, out)

        monkeypatch.setattr(Gemm, "prepare", noting)
        depth = {"depth": 3, "fullatt_block_indexes": [2]}
        served = build(family, **(depth if family == "qwen2_5_vl" else {"depth": 3}))
        qkv = (ROWS, 64, 192)
        with OpCount() as count:
            first = outputs(served)
            assert prepared.count(qkv) == 1
            # Windows have other offsets than whole images.
            assert count.prepared == (2 if family == "qwen2_5_vl" else 1)
            assert count.calls == 3
            # The next pass of this size takes what the first one has settled.
            prepared.clear()
            count.prepared = 0
            assert torch.equal(outputs(served), first)
            assert qkv not in prepared
            assert (count.prepared, count.calls) == (0, 6)
            # Another one does not.
            image(served, ROWS + 4)
            assert (ROWS + 4, 64, 192) in prepared
            assert count.prepared

    def test_windows_and_images_in_turns(self) -> None:
        vision = {"depth": 5, "fullatt_block_indexes": [1, 3]}
        served = build("qwen2_5_vl", **vision)
        stock = build("qwen2_5_vl", "TORCH_SDPA", **vision)
        with OpCount() as count:
            found = outputs(served)
        assert (count.prepared, count.calls) == (2, 5)
        assert relative_error(found, outputs(stock)) < TOLERANCE

    def test_what_is_kept_is_not_written(self) -> None:
        """Deepstack reads the sums of earlier blocks; callers may keep all of them."""
        served = build("qwen3_vl", depth=4, deepstack_visual_indexes=[0, 2])
        stock = build(
            "qwen3_vl", "TORCH_SDPA", depth=4, deepstack_visual_indexes=[0, 2]
        )
        kept: list[list[torch.Tensor]] = []
        for of in (served, stock):
            sums: list[torch.Tensor] = []
            for block in blocks(of):
                block.register_forward_hook(lambda *io, sums=sums: sums.append(io[2]))
            assert relative_error(outputs(of), outputs(stock)) < TOLERANCE
            kept.append(sums[:4])
        for one, other in zip(*kept, strict=True):
            assert relative_error(one, other) < TOLERANCE

    @pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
    def test_blocks_of_other_sizes(
        self, family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One layer is quantised in one block, whose MLP is not padded then."""
        prepare = Gemm.prepare

        def checking(self: Gemm, x: torch.Tensor, out: torch.Tensor) -> Any:
            launch = prepare(self, x, out)

            def call(layer: Any) -> None:
                # Other GEMMs than PyTorch's take the settled sizes.
                assert layer.weight.shape == (out.shape[1], x.shape[1])
                launch(layer)

            return call

        monkeypatch.setattr(Gemm, "prepare", checking)
        second = "down_proj" if family == "qwen2_5_vl" else "linear_fc2"
        quantized(f"blocks.1.mlp.{second}", monkeypatch)
        served = build(family, depth=3)
        hidden = [program._mlp.widths(1, False).hidden for program in programs(served)]
        assert hidden == [ALIGNED, SIZE, ALIGNED]
        stock = build(family, "TORCH_SDPA", depth=3)
        # The second pass takes what the first one has settled.
        for _ in range(2):
            assert relative_error(outputs(served), outputs(stock)) < TOLERANCE

    @pytest.mark.parametrize("is_left_out", [False, True])
    def test_gelu_in_the_gemm(
        self, is_left_out: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = Counter[str]()
        fused = torch._addmm_activation

        def noting(*args: Any, **kwargs: Any) -> None:
            calls["fused"] += 1
            fused(*args, **kwargs)

        monkeypatch.setattr(torch, "_addmm_activation", noting)
        # Left out, it is what blocks have; no op in its place.
        monkeypatch.setattr(mlp_module, "_act_into", lambda *_: None)
        with _blocks.without(*["fused_gelu"] * is_left_out):
            served = build("qwen3_vl")
        # Blocks may share a module without weights.
        for act in {block.mlp.act_fn for block in blocks(served)}:
            act.register_forward_hook(lambda *_: calls.update(["own"]))
        found = outputs(served)
        assert calls == {"own" if is_left_out else "fused": len(blocks(served))}
        step = programs(served)[0].steps["mlp.linear_fc1"]
        assert ("with the activation" in step) is not is_left_out
        assert relative_error(found, outputs(build("qwen3_vl", "TORCH_SDPA"))) < 1e-6

    @pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
    def test_vllms_compiled_activation(
        self, family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[tuple[int, ...]] = []

        def act_into(out: torch.Tensor, values: torch.Tensor) -> None:
            calls.append((*out.shape, values.shape[1]))
            out.copy_(FUNCTIONS[ACTIVATIONS[family]](values))

        monkeypatch.setattr(mlp_module, "_act_into", lambda *_: act_into)
        served = build(family)
        found = outputs(served)
        width = programs(served)[0].widths(1, False).hidden
        is_gated = family == "qwen2_5_vl"
        assert calls == 2 * [(ROWS, width, width * (1 + is_gated))]
        assert relative_error(found, outputs(build(family, "TORCH_SDPA"))) < TOLERANCE

    @pytest.mark.parametrize("family", SPECS)
    def test_another_activation(self, family: str) -> None:
        """It is called where vLLM has it, and nothing is padded for it."""
        from vllm.model_executor.layers.activation import SiluAndMul

        def forward_native(self, x: torch.Tensor) -> torch.Tensor:
            return SiluAndMul.forward_native(x) + 1

        served, stock = build(family), build(family, "TORCH_SDPA")
        name = program_of(blocks(served)[0]).spec.act  # type: ignore[union-attr]
        with served.running():
            is_gated = ACTIVATIONS[family] == SWIGLU
            # The class that is built on a CPU, which asks for no compiled operator.
            kind = type(SiluAndMul())
            gated = type("Other", (kind,), {"forward_native": forward_native})
            other = gated() if is_gated else nn.SiLU()
        for of in (served, stock):
            for block in blocks(of):
                block.set_submodule(name, other)
        for one in programs(served):
            one.build()
        assert programs(served)[0]._mlp.act_into is None
        assert not programs(served)[0]._mlp.acts
        widths = programs(served)[0].widths(1, False)
        assert widths.first == (2 * widths.hidden if is_gated else 0)
        assert relative_error(outputs(served), outputs(stock)) < TOLERANCE


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("family", SPECS)
class TestOwnLinears:
    @pytest.fixture(autouse=True)
    def on_the_cpu(self, is_direct: bool, request: pytest.FixtureRequest) -> None:
        if is_direct:
            request.getfixturevalue("direct")

    def check(self, family: str, expected: tuple[str, ...], ran: list[int]) -> Tower:
        served = build(family)
        assert kinds(served) == {expected}
        found = outputs(served)
        assert ran == [*range(len(blocks(served)))]
        stock = outputs(build(family, "TORCH_SDPA"))
        assert relative_error(found, stock) < TOLERANCE
        return served

    @pytest.mark.parametrize("part", ["attn.qkv", "attn.proj", ".mlp.", "visual"])
    def test_quantized(
        self,
        family: str,
        is_direct: bool,
        part: str,
        ran: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        own = {
            "attn.qkv": ("qkv",),
            "attn.proj": ("proj",),
            ".mlp.": ("first", "second"),
        }.get(part, LAYERS)
        expected = tuple(
            "Gemm" if is_direct and name not in own else "OwnLinear" for name in LAYERS
        )
        quantized(part, monkeypatch)
        served = self.check(family, expected, ran)
        if "first" in own and family != "qwen2_vl":
            # Quantised rows keep their size.
            assert programs(served)[0].widths(1, False).hidden == SIZE
            assert any(SIZE in p.shape for p in mlp(served).parameters())

    @pytest.mark.parametrize("is_wanted", [False, True])
    def test_lora(
        self,
        family: str,
        is_direct: bool,
        is_wanted: bool,
        ran: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        kind = "Gemm" if is_direct and not is_wanted else "OwnLinear"
        allow_lora(is_wanted, monkeypatch)
        served = self.check(family, (kind,) * 4, ran)
        if family != "qwen2_vl":
            is_stock = any(SIZE in p.shape for p in mlp(served).parameters())
            assert is_stock is is_wanted

    def test_an_adapter_takes_a_layers_place(
        self,
        family: str,
        is_direct: bool,
        ran: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """vLLM puts adapters in after the weights are loaded."""

        class Adapter(nn.Module):
            def __init__(self, base: Any) -> None:
                super().__init__()
                self.base = base

            def forward(self, x: torch.Tensor) -> Any:
                found = self.base(x)
                added = x.mean(-1, keepdim=True)
                if isinstance(found, tuple):
                    return found[0] + added, *found[1:]
                return found + added

        allow_lora(True, monkeypatch)
        towers = build(family), build(family, "TORCH_SDPA")
        spec = programs(towers[0])[0].spec
        for of in towers:
            for block in blocks(of):
                wrap_layers(block, spec, Adapter)
        found, expected = (outputs(of) for of in towers)
        assert ran
        assert relative_error(found, expected) < TOLERANCE

    @pytest.mark.parametrize("is_wanted", [False, True])
    def test_weights_that_come_after_an_adapter(
        self,
        family: str,
        is_direct: bool,
        is_wanted: bool,
        ran: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """`--enable-lora` wraps all layers of ERNIE-4.5-VL and BAGEL, towers too."""
        from vllm.config.lora import LoRAConfig
        from vllm.lora.utils import from_layer

        allow_lora(is_wanted, monkeypatch)
        served = build(family)
        before, steps = outputs(served), kinds(served)
        spec = programs(served)[0].spec
        lora = LoRAConfig(max_lora_rank=8, max_loras=1, lora_dtype=torch.float32)
        wrapper = SimpleNamespace(add_lora_linear=lambda output, *rest: output)

        def adapter(layer: Any) -> Any:
            wrapped: Any = from_layer(layer, 1, lora, ["one"], None)
            assert wrapped.base_layer is layer
            wrapped.set_mapping(wrapper)
            return wrapped

        with served.running():
            for block in blocks(served):
                wrap_layers(block, spec, adapter)
                # As vLLM's reload has it.
                program_of(block).build()  # type: ignore[union-attr]
        assert torch.equal(outputs(served), before)
        assert kinds(served) == steps
        assert ran


class TestIsPlain:
    """What more than a GEMM and its bias is vLLM's."""

    @pytest.fixture
    def layer(self) -> Any:
        from vllm.model_executor.layers.linear import ColumnParallelLinear

        with (of := build("qwen2_vl")).running():
            yield ColumnParallelLinear(8, 8, disable_tp=True)
        del of

    def test_plain(self, layer: Any) -> None:
        assert steps_module.is_plain(layer)

    def test_gathered(self, layer: Any) -> None:
        layer.tp_size = 2
        assert steps_module.is_plain(layer)
        layer.gather_output = True
        assert not steps_module.is_plain(layer)

    def test_a_bias_that_the_model_adds(self, layer: Any) -> None:
        layer.skip_bias_add = True
        assert steps_module.is_plain(layer)

    def test_summed(self, layer: Any) -> None:
        from vllm.model_executor.layers.linear import RowParallelLinear

        row = RowParallelLinear(8, 8, disable_tp=True)
        assert steps_module.is_plain(row)
        row.tp_size = 2
        assert not steps_module.is_plain(row)

    def test_on_a_cpu(self, layer: Any) -> None:
        assert not layers.can_run(layer)
