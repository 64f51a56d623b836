# SPDX-License-Identifier: Apache-2.0
"""Patches outside attention: same results, and nothing of them in other towers."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _blocks import (
    ALIGNED,
    GRIDS,
    QUACK_QKV,
    QUANTIZED,
    SIZE,
    SPECS,
    allow_lora,
    blocks,
    build,
    checkpoint,
    load,
    mlp,
    outputs,
    without,
)
from _models import noise
from _towers import HAS_GPU, cpu_only
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cases import relative_error
from vllm_flashinfer_vit import plugin
from vllm_flashinfer_vit.blocks import chain, compiled, methods
from vllm_flashinfer_vit.models import qwen2_5_vl, qwen2_vl, qwen3_vl
from vllm_flashinfer_vit.models._shared import ROTARY_CACHE
from vllm_flashinfer_vit.patches.patch import revert_group
from vllm_flashinfer_vit.settings import Settings
from vllm_flashinfer_vit.towers import tower
from vllm_flashinfer_vit.towers.spec import resolve_spec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

HAS_HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
DOCS = Path(__file__).parents[2] / "docs" / "patches.md"

# Zeros change no product; only the order of sums may differ.
TOLERANCE = 1e-6
PATCHES = tuple(
    patch
    for module in (qwen2_vl, qwen2_5_vl, qwen3_vl)
    for patch in module.PATCHES
    if not patch.name.endswith("-fused-rotary")
)
NAMES = tuple(patch.name for patch in PATCHES)


@pytest.mark.parametrize(
    ("size", "aligned"),
    [(3420, 3456), (1710, 1728), (855, 896), (3456, 3456), (864, 864), (1, 64)],
)
def test_aligned_size(size: int, aligned: int) -> None:
    from vllm_flashinfer_vit.blocks.aligned_linear import aligned_size

    assert aligned_size(size) == aligned


@cpu_only
@pytest.mark.parametrize("size", [3420, 1710, 855])
@pytest.mark.parametrize(("dim", "parts"), [(0, 2), (1, 1)])
def test_padding_of_a_rank(size: int, dim: int, parts: int) -> None:
    from vllm_flashinfer_vit.blocks.aligned_linear import (
        AlignedLinearMethod,
        aligned_size,
    )

    with build().running():
        method = AlignedLinearMethod(dim, size, parts)
    shapes = [(parts * size, 8), (parts * size,)] if dim == 0 else [(8, size)]
    for shape in shapes:
        stock = noise(*shape)
        padded = method.pad(stock)
        assert padded.shape[dim] == parts * aligned_size(size)
        assert padded.is_contiguous()
        assert torch.equal(method.unpad(padded), stock)
        halves = padded.chunk(parts, dim)
        assert all(not half.narrow(dim, size, 1).any() for half in halves)
        assert padded.count_nonzero() == stock.count_nonzero()


@cpu_only
class TestAlignedMlp:
    def test_same_result(self) -> None:
        padded = build()
        with without("qwen2_5_vl-aligned-mlp"):
            plain = build()
        assert mlp(padded).gate_up_proj.weight.shape == (2 * ALIGNED, 64)
        assert mlp(padded).gate_up_proj.bias.shape == (2 * ALIGNED,)
        assert mlp(padded).down_proj.weight.shape == (64, ALIGNED)
        assert mlp(padded).down_proj.bias.shape == (64,)
        assert mlp(plain).gate_up_proj.weight.shape == (2 * SIZE, 64)
        assert relative_error(outputs(padded), outputs(plain)) < TOLERANCE

    @pytest.mark.parametrize(
        ("backend", "size"), [("TORCH_SDPA", SIZE), ("FLASHINFER", 48)]
    )
    def test_others_stay_stock(self, backend: str, size: int) -> None:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        build()
        other = mlp(build(backend=backend, intermediate_size=size))
        for linear, shape in (
            (other.gate_up_proj, (2 * size, 64)),
            (other.down_proj, (64, size)),
        ):
            assert type(linear.quant_method) is UnquantizedLinearMethod
            assert linear.weight.shape == shape

    @pytest.mark.parametrize("is_wanted", [True, False])
    def test_lora_on_the_tower(self, is_wanted: bool, log: list[str]) -> None:
        context = build()
        allow_lora(context, is_wanted)
        method = build_mlp(context).down_proj.quant_method
        assert (type(method).__name__ == "AlignedLinearMethod") is not is_wanted
        assert ("LoRA" in log[-1]) is is_wanted

    def test_quantized_linears(self, log: list[str]) -> None:
        built = build_mlp(build(), quant_config=QUANTIZED)
        assert type(built.gate_up_proj.quant_method).__name__ == "OtherMethod"
        assert type(built.down_proj.quant_method).__name__ == "OtherMethod"
        assert "keep rows of 44 values" in log[-1]
        assert "OtherMethod" in log[-1]

    def test_memory_is_reported(self, log: list[str]) -> None:
        built = build_mlp(build(), width=2**10)
        before = sum(p.numel() for p in built.parameters() if p.dim() == 2)
        for linear in (built.gate_up_proj, built.down_proj):
            linear.quant_method.process_weights_after_loading(linear)
        added = sum(p.numel() for p in built.parameters() if p.dim() == 2) - before
        assert f"{added * 4 / 2**20:.2f} MiB more in each block" in log[-1]

    def test_padding_has_its_room_from_the_start(self) -> None:
        built = build_mlp(build())
        weights = [built.gate_up_proj.weight, built.down_proj.weight]
        before = [weight.data_ptr() for weight in weights]
        stock = [weight.data.normal_().clone() for weight in weights]
        for linear in (built.gate_up_proj, built.down_proj):
            linear.quant_method.process_weights_after_loading(linear)
            method, weight = linear.quant_method, linear.weight.data
            assert torch.equal(method.unpad(weight), stock.pop(0))
            assert torch.equal(method.pad(method.unpad(weight)), weight)
        assert [weight.data_ptr() for weight in weights] == before

    def test_later_load(self) -> None:
        changed, fresh = build(seed=0), build(seed=1)
        before = {
            name: parameter.data_ptr()
            for name, parameter in changed.visual.named_parameters()
        }
        assert relative_error(outputs(changed), outputs(fresh)) > 0.1
        load(changed, checkpoint(seed=1))
        assert torch.equal(outputs(changed), outputs(fresh))
        # CUDA graphs hold the addresses.
        for name, parameter in changed.visual.named_parameters():
            assert parameter.data_ptr() == before[name]

    def test_load_after_the_memory_was_lost(self) -> None:
        changed = build()
        for parameter in changed.visual.parameters():
            parameter.data.fill_(float("nan"))
        load(changed, checkpoint(seed=1))
        assert torch.equal(outputs(changed), outputs(build(seed=1)))

    def test_load_that_fails(self) -> None:
        changed = build()
        weight = mlp(changed).down_proj.weight
        before = outputs(changed)
        with pytest.raises((AssertionError, RuntimeError, ValueError)):
            weight.weight_loader(weight, torch.zeros(64, SIZE - 1))
        assert weight.shape == (64, ALIGNED)
        assert torch.equal(outputs(changed), before)

    def test_reload_by_layers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.model_executor.model_loader import reload

        fill: Callable[..., None] = tower.fill_with_random_weights

        def record_and_fill(visual: nn.Module, seed: int) -> None:
            reload.record_metadata_for_reloading(visual)
            fill(visual, seed)

        monkeypatch.setattr(tower, "fill_with_random_weights", record_and_fill)
        changed = build()
        monkeypatch.undo()
        weights = checkpoint(seed=1)
        before = mlp(changed).gate_up_proj.weight.data_ptr()
        with changed.running():
            reload.initialize_layerwise_reload(changed.visual)
            changed.visual.load_weights(weights)  # type: ignore[operator]
            reload.finalize_layerwise_reload(
                changed.visual, changed.vllm_config.model_config
            )
        assert mlp(changed).gate_up_proj.weight.data_ptr() == before
        assert torch.equal(outputs(changed), outputs(build(seed=1)))
        load(changed, checkpoint(seed=2))
        assert torch.equal(outputs(changed), outputs(build(seed=2)))


def build_mlp(context: Tower, quant_config: Any = None, width: int = 64) -> Any:
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VisionMLP

    with context.running():
        return Qwen2_5_VisionMLP(
            width, SIZE, bias=True, act_fn=SiluAndMul(), quant_config=quant_config
        )


def build_gelu_mlp(context: Tower, act_fn: Any, quant_config: Any = None) -> Any:
    from vllm.model_executor.models.qwen3_vl import Qwen3_VisionMLP

    with context.running():
        return Qwen3_VisionMLP(
            64, 128, bias=True, act_fn=act_fn, quant_config=quant_config
        )


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect what is said once in a process, every time."""
    lines: list[str] = []
    logger = SimpleNamespace(
        info_once=lambda message, *values: lines.append(message % values)
    )
    monkeypatch.setattr(methods, "logger", logger)
    return lines


@pytest.fixture
def compiled_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that vLLM's compiled ops are there; no test with it runs one."""
    monkeypatch.setattr(compiled, "has_compiled", lambda *names: True)


@cpu_only
class TestFusedGelu:
    def test_no_compiled_op(self) -> None:
        act = mlp(build("qwen2_vl")).act
        assert act._forward_method != act.forward_cuda

    @pytest.mark.parametrize("backend", ["FLASHINFER", "TORCH_SDPA"])
    def test_only_for_flashinfer(self, backend: str, compiled_ops: None) -> None:
        build("qwen2_vl")
        act = mlp(build("qwen2_vl", backend)).act
        assert (act._forward_method == act.forward_cuda) is (backend == "FLASHINFER")

    def test_another_activation(self, compiled_ops: None) -> None:
        from vllm.model_executor.models.qwen2_vl import Qwen2VisionMLP

        with build("qwen2_vl").running():
            built = Qwen2VisionMLP(64, 128, act_layer=nn.GELU)
        assert not hasattr(built.act, "_forward_method")


@cpu_only
class TestFusedOps:
    def test_only_while_the_tower_runs(self, compiled_ops: None) -> None:
        from vllm import ir

        served = build()
        act = mlp(served).act_fn
        before = act._forward_method
        priority = ir.ops.rms_norm.get_priority()
        seen = []
        with pytest.raises(KeyError), qwen2_5_vl.fused_ops(served.visual):
            seen.append(act._forward_method)
            raise KeyError
        assert seen == [act.forward_cuda]
        assert act._forward_method == before
        assert ir.ops.rms_norm.get_priority() == priority

    @pytest.mark.parametrize("is_compiled", [True, False])
    def test_not_where_a_compiler_fuses(
        self, is_compiled: bool, compiled_ops: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served = build()
        block = served.visual.get_submodule("blocks.0")
        monkeypatch.setattr(block, "do_not_compile", not is_compiled, raising=False)
        act = mlp(served).act_fn
        with qwen2_5_vl.fused_ops(served.visual):
            assert (act._forward_method == act.forward_cuda) is not is_compiled

    def test_not_for_another_backend(self, compiled_ops: None) -> None:
        stock = build(backend="TORCH_SDPA")
        act = mlp(stock).act_fn
        with qwen2_5_vl.fused_ops(stock.visual):
            assert act._forward_method != act.forward_cuda


@cpu_only
class TestGeluLinear:
    TANH = nn.GELU(approximate="tanh")

    @pytest.mark.parametrize("size", [SIZE, 128])
    def test_same_result(self, size: int) -> None:
        fused = build("qwen3_vl", intermediate_size=size)
        with without(*NAMES):
            plain = build("qwen3_vl", intermediate_size=size)
        assert type(mlp(fused).act_fn) is nn.Identity
        assert type(mlp(plain).act_fn) is nn.GELU
        rows = ALIGNED if size == SIZE else size
        assert mlp(fused).linear_fc1.weight.shape == (rows, 64)
        assert mlp(fused).linear_fc2.weight.shape == (64, rows)
        assert relative_error(outputs(fused), outputs(plain)) < TOLERANCE

    def test_one_gemm_on_a_gpu(self) -> None:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        from vllm_flashinfer_vit.blocks.gelu_linear import GeluLinearMethod

        with build("qwen3_vl").running():
            method = GeluLinearMethod(UnquantizedLinearMethod())
        weight, bias = noise(128, 64), noise(128)
        layer = SimpleNamespace(weight=weight)
        # On fake tensors, since a CPU's op of this name computes another GELU.
        with FakeTensorMode(), torch.device("cuda"):
            fakes = SimpleNamespace(weight=torch.empty(128, 64))
            with OpNames() as ops:
                out = method.apply(fakes, torch.empty(5, 1, 64), torch.empty(128))
            assert (out.shape, out.device.type) == ((5, 1, 128), "cuda")
        assert "_addmm_activation" in ops.names
        assert not {"gelu", "mm", "addmm", "clone"} & ops.names
        x = noise(5, 1, 64)
        expected = self.TANH(nn.functional.linear(x, weight, bias))
        layer.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, weight, bias)
        assert relative_error(method.apply(layer, x, bias), expected) < TOLERANCE

    @pytest.mark.parametrize(
        "act_fn", [nn.GELU(), nn.SiLU(), nn.functional.silu], ids=["erf", "silu", "fn"]
    )
    def test_another_activation(self, act_fn: Any) -> None:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        built = build_gelu_mlp(build("qwen3_vl"), act_fn)
        assert built.act_fn is act_fn
        assert type(built.linear_fc1.quant_method) is UnquantizedLinearMethod

    def test_another_backend(self) -> None:
        build("qwen3_vl")
        assert type(mlp(build("qwen3_vl", "TORCH_SDPA")).act_fn) is nn.GELU

    def test_lora_and_quantized_linears(self) -> None:
        context = build("qwen3_vl")
        built = build_gelu_mlp(context, self.TANH, QUANTIZED)
        assert built.act_fn is self.TANH
        assert type(build_gelu_mlp(context, self.TANH).act_fn) is nn.Identity
        allow_lora(context, True)
        assert build_gelu_mlp(context, self.TANH).act_fn is self.TANH


class OpNames(TorchDispatchMode):
    """Collects the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.add(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let towers on the CPU run Triton kernels, by its interpreter."""
    monkeypatch.setattr(chain, "runs_triton", lambda: True)


@cpu_only
class TestChainedBlocks:
    @pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
    def test_same_result(
        self, family: str, interpreted: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm_flashinfer_vit.kernels import add_norm

        calls = []

        def counted(*args: Any) -> Any:
            calls.append(args)
            return kernel(*args)

        kernel = add_norm.sum_norm
        monkeypatch.setattr(add_norm, "sum_norm", counted)
        fused = build(family)
        with without(*NAMES):
            plain = build(family)
            expected = outputs(plain)
        assert not calls
        plugin.apply_model_patches(Settings())
        assert relative_error(outputs(fused), expected) < TOLERANCE
        # The last block's second sum has no norm of its own after it.
        assert len(calls) == 2 * len(blocks(fused)) - 1

    def test_rms_norm(self) -> None:
        served = build()
        expected = outputs(served)
        with chain.chained(blocks(served), chain.sum_norm):
            chained = outputs(served)
        assert relative_error(chained, expected) < TOLERANCE

    def test_nothing_stays(self) -> None:
        served = build("qwen3_vl")
        seen = []

        def raising(*args: Any) -> Any:
            seen.append(args)
            raise KeyError

        with (
            pytest.raises(KeyError),
            chain.chained(blocks(served), raising),
        ):
            outputs(served)
        assert seen
        assert all("forward" not in vars(block) for block in blocks(served))

    @pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
    def test_others_stay_stock(
        self, family: str, interpreted: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        block = blocks(build(family))[0]
        assert chain.can_chain(block)
        # What a compiler fuses, norms of another kind, blocks that take more.
        with monkeypatch.context() as context:
            context.setattr(block, "do_not_compile", False, raising=False)
            assert not chain.can_chain(block)
        with monkeypatch.context() as context:
            context.setitem(block._modules, "norm2", nn.RMSNorm(64))
            assert not chain.can_chain(block)

        class Other(type(block)):  # type: ignore[misc]
            def forward(self, x: torch.Tensor, mask: torch.Tensor) -> None: ...

        with monkeypatch.context() as context:
            context.setattr(block, "__class__", Other)
            assert not chain.can_chain(block)
        assert chain.can_chain(block)

    @pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
    def test_another_backend(
        self, family: str, interpreted: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def raising(*args: Any) -> Any:
            raise KeyError

        build(family)
        monkeypatch.setattr(chain, "sum_norm", raising)
        outputs(build(family, "TORCH_SDPA"))
        with pytest.raises(KeyError):
            outputs(build(family))

    def test_without_a_gpu(self) -> None:
        assert not chain.can_chain(blocks(build("qwen3_vl"))[0])


@cpu_only
class TestMetadata:
    # Images of one size, of another, turned, and videos of either.
    GRIDS = [[1, 4, 6], [1, 6, 4], [1, 4, 6], [3, 4, 6], [2, 8, 8], [3, 4, 6]]

    @pytest.mark.parametrize("padding", [{}, {"max_batch_size": 20}])
    @pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
    def test_same_bits(self, family: str, padding: dict[str, int]) -> None:
        def metadata(of: Tower) -> dict[str, Any]:
            with of.running():
                return of.visual.prepare_encoder_metadata(self.GRIDS, **padding)

        with without(*NAMES):
            expected = metadata(build(family))
        patched = build(family)
        for _ in range(2):
            found = metadata(patched)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                if value is None:
                    assert found[name] is None
                else:
                    assert found[name].dtype == value.dtype
                    assert torch.equal(found[name], value)

    @pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
    def test_kept_tables_cannot_be_written(self, family: str) -> None:
        visual: Any = build(family).visual
        with torch.inference_mode():
            expected = [table.clone() for table in visual.rot_pos_emb([[1, 4, 6]])]
            # As a CUDA graph does that captured them.
            for table in visual.rot_pos_emb([[1, 4, 6]]):
                table.zero_()
            for table, value in zip(
                visual.rot_pos_emb([[1, 4, 6]]), expected, strict=True
            ):
                assert torch.equal(table, value)
        assert vars(visual)[ROTARY_CACHE].held_bytes > 0

    def test_positions_follow_their_weights(self) -> None:
        visual: Any = build("qwen3_vl").visual
        with torch.inference_mode():
            before = visual.fast_pos_embed_interpolate(self.GRIDS)
            visual.pos_embed.weight.data.mul_(2)
            after = visual.fast_pos_embed_interpolate(self.GRIDS)
        assert torch.equal(after, 2 * before)

    @pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
    def test_only_for_flashinfer(self, family: str) -> None:
        build(family)
        stock: Any = build(family, "TORCH_SDPA").visual
        stock.rot_pos_emb(self.GRIDS)
        assert ROTARY_CACHE not in vars(stock)


@cpu_only
@pytest.mark.parametrize("family", SPECS)
def test_disabled_and_reverted(family: str) -> None:
    build(family)
    targets = [patch for patch in PATCHES if f":{_prefix(family)}" in patch.target]
    assert targets
    with without(*NAMES):
        owners = [patch._owner() for patch in targets]
        stock = [owner.__dict__[attribute] for owner, attribute in owners]
        disabled = build(family)
        after = [owner.__dict__[attribute] for owner, attribute in owners]
        assert all(new is old for new, old in zip(after, stock, strict=True))
        assert {patch.state(frozenset(NAMES)) for patch in targets} == {"disabled"}
    patched = build(family)
    assert all(patch.applied for patch in targets)
    assert relative_error(outputs(patched), outputs(disabled)) < TOLERANCE
    revert_group(targets)
    after = [owner.__dict__[attribute] for owner, attribute in owners]
    assert all(new is old for new, old in zip(after, stock, strict=True))
    plugin.apply_model_patches(Settings())


def _prefix(family: str) -> str:
    return {
        "qwen2_vl": "Qwen2Vision",
        "qwen2_5_vl": "Qwen2_5_Vision",
        "qwen3_vl": "Qwen3_Vision",
    }[family]


@cpu_only
def test_compiled_code_is_kept_apart() -> None:
    # The first tower of a process makes ops that later ones share, and counts them.
    build()
    configs = [build().vllm_config]
    with without("qwen2_5_vl-aligned-mlp"):
        configs.append(build().vllm_config)
    with without(*NAMES):
        configs.append(build().vllm_config)
    configs.append(build(backend="TORCH_SDPA").vllm_config)
    configs.append(build().vllm_config)
    *different, again = (config.compute_hash() for config in configs)
    first = different[0]
    assert len(set(different)) == 4
    assert again == first


def test_documented() -> None:
    rows = [line for line in DOCS.read_text("utf-8").splitlines() if line[:2] == "| "]
    names = [row.split("|")[1].strip() for row in rows]
    assert names[1:] == [patch.name for patch in plugin.all_patches()]


@pytest.mark.gpu
class TestOnAGpu:
    """Whole blocks of the true size."""

    MODELS = {
        "qwen2_vl": "Qwen/Qwen2-VL-7B-Instruct",
        "qwen2_5_vl": "Qwen/Qwen2.5-VL-7B-Instruct",
        "qwen3_vl": "Qwen/Qwen3-VL-8B-Instruct",
    }
    OPS = {
        "qwen2_vl": {"_C::gelu_quick", "_sum_norm_kernel"},
        "qwen2_5_vl": {"_C::rms_norm", "_sum_norm_kernel", "_C::silu_and_mul"},
        "qwen3_vl": {"aten::_addmm_activation", "_sum_norm_kernel"},
    }

    # The fewest patches that QuACK runs.
    LARGE = [[1, 64, 64]]

    @classmethod
    def build(cls, family: str, backend: str, dtype: torch.dtype) -> Tower:
        spec = resolve_spec(cls.MODELS[family], random_weights=True, depth=8)
        return build_tower(spec, backend=backend, dtype=dtype, device="cuda")

    @pytest.mark.parametrize("family", MODELS)
    def test_error(self, family: str) -> None:
        exact = outputs(self.build(family, "TORCH_SDPA", torch.float32))
        patched = outputs(self.build(family, "FLASHINFER", torch.bfloat16))
        with without(*NAMES):
            plain = outputs(self.build(family, "FLASHINFER", torch.bfloat16))
        assert relative_error(patched, exact) <= 1.1 * relative_error(plain, exact)

    @pytest.mark.parametrize("family", MODELS)
    def test_ops_run(self, family: str) -> None:
        def ops(of: Tower) -> set[str]:
            with torch.profiler.profile() as profile:
                outputs(of)
            return {event.key for event in profile.key_averages()} & self.OPS[family]

        assert ops(self.build(family, "FLASHINFER", torch.bfloat16)) == self.OPS[family]
        with without(*NAMES):
            plain = self.build(family, "FLASHINFER", torch.bfloat16)
            assert not ops(plain)

    def test_gemms_are_aligned(self) -> None:
        kernels = {}
        for disabled in ((), ("qwen2_5_vl-aligned-mlp",)):
            with without(*disabled):
                built = self.build("qwen2_5_vl", "FLASHINFER", torch.bfloat16)
                down = mlp(built).down_proj
                inputs = noise(8192, down.weight.shape[1]).cuda().bfloat16()
                down(inputs)
                with torch.profiler.profile() as profile, built.running():
                    down(inputs)
                names = [event.name for event in profile.events()]
                kernels[disabled] = [name for name in names if "align2" in name]
        assert not kernels[()]
        assert kernels[("qwen2_5_vl-aligned-mlp",)]

    @pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
    @pytest.mark.parametrize("family", MODELS)
    def test_quack_runs_large_batches(self, family: str) -> None:
        def run(of: Tower, grids: list[list[int]]) -> tuple[torch.Tensor, bool]:
            rows = sum(t * h * w for t, h, w in grids)
            pixels = noise(rows, of.spec.patch_dim)
            with torch.profiler.profile() as profile:
                out = of.encode(pixels, grids)
            return out, any("quack" in event.name for event in profile.events())

        exact, _ = run(self.build(family, "TORCH_SDPA", torch.float32), self.LARGE)
        fused = self.build(family, "FLASHINFER", torch.bfloat16)
        patched, has_quack = run(fused, self.LARGE)
        assert has_quack
        assert not run(fused, GRIDS)[1]
        qkv = QUACK_QKV[family]
        for one, other in ((f"{family}-fused-mlp", qkv), (qkv, f"{family}-fused-mlp")):
            with without(one):
                alone = self.build(family, "FLASHINFER", torch.bfloat16)
                assert run(alone, self.LARGE)[1], other
        with without(f"{family}-fused-mlp", qkv):
            plain, has_quack = run(
                self.build(family, "FLASHINFER", torch.bfloat16), self.LARGE
            )
        assert not has_quack
        assert relative_error(patched, exact) <= 1.1 * relative_error(plain, exact)
