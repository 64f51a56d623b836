# SPDX-License-Identifier: Apache-2.0
"""Patches of models: applied, left out and reverted; on a GPU, what they run."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from _blocks import GRIDS, SPECS, blocks, build, mlp, outputs, without
from _models import noise
from _towers import HAS_GPU, cpu_only

from cases import relative_error
from vllm_flashinfer_vit import plugin
from vllm_flashinfer_vit.blocks import compiled
from vllm_flashinfer_vit.blocks.spec import OPTIMISATIONS
from vllm_flashinfer_vit.models import glm, qwen2_5_vl, qwen2_vl, qwen3_vl
from vllm_flashinfer_vit.patches.patch import revert_group
from vllm_flashinfer_vit.settings import Settings
from vllm_flashinfer_vit.towers.spec import FAMILIES, resolve_spec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

HAS_HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
DOCS = Path(__file__).parents[2] / "docs" / "patches.md"

# Sums of a few hundred fp32 terms in another order.
TOLERANCE = 1e-6
PATCHES = tuple(
    patch
    for module in (qwen2_vl, qwen2_5_vl, qwen3_vl, glm)
    for patch in module.PATCHES
)
NAMES = tuple(patch.name for patch in PATCHES)


@cpu_only
def test_what_vllm_compiles_is_patched_by_none_that_its_cache_key_leaves_out() -> None:
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    owners = {}
    for patch in plugin.all_patches():
        if not patch.compiled:
            # A release may lack a model.
            with suppress(ImportError, AttributeError):
                importlib.import_module(patch.target.partition(":")[0])
                owners[patch.name], _ = patch._owner()
    assert len(owners) >= 5
    compiled_too = [
        name
        for name, owner in owners.items()
        if issubclass(owner, TorchCompileWithNoGuardsWrapper)
    ]
    assert compiled_too == []


@cpu_only
@pytest.mark.parametrize("family", SPECS)
def test_disabled_and_reverted(family: str) -> None:
    build(family)
    module = FAMILIES[family].module
    targets = [patch for patch in PATCHES if f".{module}:" in patch.target]
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


@cpu_only
class TestCompiledNorms:
    @pytest.fixture(autouse=True)
    def entered(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Pretend that vLLM's compiled norm is there; collect when it is chosen."""
        seen: list[str] = []

        @contextmanager
        def compiled_norms() -> Iterator[None]:
            seen.append("begin")
            try:
                yield
            finally:
                seen.append("end")

        monkeypatch.setattr(compiled, "can_run_compiled", lambda: True)
        monkeypatch.setattr(compiled, "compiled_norms", compiled_norms)
        return seen

    def fail(self, of: Tower) -> None:
        """Fail after the tower's call has begun."""

        def failing(*_: Any) -> None:
            raise KeyError

        inner = of.visual.get_submodule("patch_embed")
        with mock.patch.object(inner, "forward", failing), pytest.raises(KeyError):
            outputs(of)

    def test_while_the_tower_runs(self, entered: list[str]) -> None:
        served = build()
        outputs(served)
        assert entered == ["begin", "end"]
        self.fail(served)
        assert entered == 2 * ["begin", "end"]

    def test_not_where_a_compiler_fuses(self, entered: list[str]) -> None:
        served = build()
        blocks(served)[0].do_not_compile = False
        self.fail(served)
        assert not entered

    def test_not_for_another_backend(self, entered: list[str]) -> None:
        build()
        outputs(build(backend="TORCH_SDPA"))
        assert not entered


@cpu_only
def test_compiled_code_is_kept_apart() -> None:
    # The first tower of a process makes ops that later ones share, and counts them.
    build()
    configs = [build().vllm_config]
    with without("qwen2_5_vl-blocks"):
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
    cells = [row.split("|")[1].strip() for row in rows]
    shown = [name.partition(":")[0] for cell in cells for name in cell.split("<br>")]
    patches = plugin.all_patches()
    # A line has those of one reason, in the order of each reason's first patch.
    reasons = [(patch.why, patch.remove_when) for patch in patches]
    patches = sorted(patches, key=lambda p: reasons.index((p.why, p.remove_when)))
    documented = [patch.name for patch in patches] + [*OPTIMISATIONS]
    assert [name for name in shown if name not in ("patches", "name")] == documented


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
        "qwen3_vl": {"_sum_norm_kernel"},
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
        for disabled in ((), ("aligned",)):
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
        assert kernels[("aligned",)]

    @pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
    @pytest.mark.parametrize("family", MODELS)
    def test_quack_runs_large_batches(self, family: str) -> None:
        def run(of: Tower, grids: list[list[int]]) -> tuple[torch.Tensor, bool]:
            rows = sum(t * h * w for t, h, w in grids)
            pixels = noise(rows, of.spec.patch_dim)
            with torch.profiler.profile() as profile:
                out = of.encode(pixels, grids)
            # One of them is this package's own, of QuACK's.
            names = [event.name for event in profile.events()]
            return out, any("quack" in n or "TurningGemm" in n for n in names)

        exact, _ = run(self.build(family, "TORCH_SDPA", torch.float32), self.LARGE)
        fused = self.build(family, "FLASHINFER", torch.bfloat16)
        patched, has_quack = run(fused, self.LARGE)
        assert has_quack
        assert not run(fused, GRIDS)[1]
        names = ("quack_mlp", "quack_qkv", "quack_turn")
        for one in names:
            with without(*(name for name in names if name != one)):
                alone = self.build(family, "FLASHINFER", torch.bfloat16)
                assert run(alone, self.LARGE)[1]
        with without(*names):
            plain, has_quack = run(
                self.build(family, "FLASHINFER", torch.bfloat16), self.LARGE
            )
        assert not has_quack
        assert relative_error(patched, exact) <= 1.1 * relative_error(plain, exact)
