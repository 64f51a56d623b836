# SPDX-License-Identifier: Apache-2.0
"""Weights of blocks that run as programs: padded, loaded anew, moved; FP8 scales."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _blocks import (
    ALIGNED,
    SIZE,
    SPECS,
    blocks,
    build,
    change_config,
    checkpoint,
    load,
    log_of,
    mlp,
    outputs,
    without,
)
from _models import OpCount, noise
from _towers import cpu_only
from torch import nn

from cases import relative_error
from vllm_flashinfer_vit.blocks import aligned_linear
from vllm_flashinfer_vit.blocks.aligned_linear import AlignedLinearMethod, aligned_size
from vllm_flashinfer_vit.blocks.attach import program_of
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.settings import ENV_FP8_SCALES, ENV_FP8_SKIP_LAYERS, ENV_KERNEL
from vllm_flashinfer_vit.towers import tower
from vllm_flashinfer_vit.towers.spec import TowerSpec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

pytestmark = cpu_only

# Zeros change no product; only the order of sums may differ.
TOLERANCE = 1e-6


@pytest.mark.parametrize(
    ("size", "aligned"),
    [(3420, 3456), (1710, 1728), (855, 896), (3456, 3456), (864, 864), (1, 64)],
)
def test_aligned_size(size: int, aligned: int) -> None:
    assert aligned_size(size) == aligned


@pytest.mark.parametrize("size", [3420, 1710, 855])
@pytest.mark.parametrize(("dim", "parts"), [(0, 2), (1, 1)])
def test_padding_of_a_rank(size: int, dim: int, parts: int) -> None:
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


FIRST = {"qwen2_5_vl": "gate_up_proj", "qwen3_vl": "linear_fc1"}
SECOND = {"qwen2_5_vl": "down_proj", "qwen3_vl": "linear_fc2"}


def mlp_layers(of: Tower) -> list[Any]:
    """Return both linear layers of the first block's MLP."""
    names = FIRST[of.spec.family], SECOND[of.spec.family]
    return [getattr(mlp(of), name) for name in names]


def addresses(of: Tower) -> list[int]:
    return [parameter.data_ptr() for parameter in of.visual.parameters()]


@pytest.mark.parametrize("family", FIRST)
class TestAligned:
    def test_same_result(self, family: str) -> None:
        parts = 2 if family == "qwen2_5_vl" else 1
        padded = build(family)
        with without("aligned"):
            plain = build(family)
        first, second = mlp_layers(padded)
        assert first.weight.shape == (parts * ALIGNED, 64)
        assert first.bias.shape == (parts * ALIGNED,)
        assert second.weight.shape == (64, ALIGNED)
        assert second.bias.shape == (64,)
        assert mlp_layers(plain)[0].weight.shape == (parts * SIZE, 64)
        assert relative_error(outputs(padded), outputs(plain)) < TOLERANCE

    @pytest.mark.parametrize(
        ("backend", "size"), [("TORCH_SDPA", SIZE), ("FLASHINFER", 48)]
    )
    def test_others_stay_stock(self, family: str, backend: str, size: int) -> None:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        other = build(family, backend, intermediate_size=size)
        for layer in mlp_layers(other):
            assert type(layer.quant_method) is UnquantizedLinearMethod
            assert size in {n // parts for n in layer.weight.shape for parts in (1, 2)}

    @pytest.mark.parametrize("backend", ["nccl", "sharded_rdt"])
    def test_weight_transfer_past_loaders(
        self, family: str, backend: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines = log_of(aligned_linear, monkeypatch)
        transfer = SimpleNamespace(backend=backend)
        change_config(monkeypatch, weight_transfer_config=transfer)
        is_padded = mlp_layers(build(family))[1].weight.shape[1] == ALIGNED
        assert is_padded is (backend == "nccl")
        assert ("sharded_rdt" in lines[0]) is not is_padded

    def test_memory_is_reported(
        self, family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines = log_of(aligned_linear, monkeypatch)
        padded = build(family, intermediate_size=1025)
        with without("aligned"):
            plain = build(family, intermediate_size=1025)

        def values(of: Tower) -> int:
            return sum(layer.weight.numel() for layer in mlp_layers(of))

        added = (values(padded) - values(plain)) * 4 / 2**20
        assert "rows of 1088 values instead of 1025" in lines[0]
        assert f"{added:.2f} MiB more in each block" in lines[0]
        # The log drops what was said before.
        assert len(lines) == len(blocks(padded)) and len(set(lines)) == 1

    def test_padding_has_its_room_from_the_start(
        self, family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tower, "finish_weights", lambda *args: None)
        built = build(family)
        weights = [layer.weight for layer in mlp_layers(built)]
        before = [weight.data_ptr() for weight in weights]
        stock = [weight.data.clone() for weight in weights]
        for layer in mlp_layers(built):
            layer.quant_method.process_weights_after_loading(layer)
            method, weight = layer.quant_method, layer.weight.data
            assert torch.equal(method.unpad(weight), stock.pop(0))
            assert torch.equal(method.pad(method.unpad(weight)), weight)
        assert [weight.data_ptr() for weight in weights] == before

    def test_offloaded_ones_are_offloaded_again(
        self, family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As `--cpu-offload-gb` has it: vLLM asks the flag after it has processed."""
        monkeypatch.setattr(tower, "finish_weights", lambda *args: None)
        for layer in mlp_layers(build(family)):
            for parameter in layer.parameters():
                parameter.data = parameter.data.clone()
                parameter._vllm_is_uva_offloaded = True
            host = {p: p.data_ptr() for p in layer.parameters()}
            layer.quant_method.process_weights_after_loading(layer)
            assert ALIGNED in {
                n // parts for n in layer.weight.shape for parts in (1, 2)
            }
            for parameter, before in host.items():
                is_there = parameter.data_ptr() == before
                assert parameter._vllm_is_uva_offloaded is is_there
            assert not layer.weight._vllm_is_uva_offloaded

    def test_parameters_of_another_process(
        self, family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As `--load-format ipc_cache` takes them: padded, and without loaders."""
        from vllm.model_executor.model_loader import utils

        source = build(family)
        with monkeypatch.context() as context:
            context.setattr(tower, "finish_weights", lambda *args: None)
            built = build(family, seed=1)
        modules = dict(built.visual.named_modules())
        for name, parameter in source.visual.named_parameters():
            module, _, leaf = name.rpartition(".")
            mapped = nn.Parameter(parameter.data.clone(), requires_grad=False)
            modules[module].register_parameter(leaf, mapped)
        before = addresses(built)
        with built.running():
            utils.process_weights_after_loading(
                built.visual, built.vllm_config.model_config, torch.device("cpu")
            )
        assert addresses(built) == before
        assert torch.equal(outputs(built), outputs(source))
        assert not any(hasattr(p, "weight_loader") for p in built.visual.parameters())


@pytest.mark.usefixtures("either")
class TestNewWeights:
    """Loaded or moved while the engine runs, after a pass with the old ones."""

    @pytest.fixture
    def changed(self) -> Tower:
        served = build(seed=0)
        outputs(served)
        return served

    def check(self, changed: Tower, seed: int = 1) -> None:
        stock = build("qwen2_5_vl", "TORCH_SDPA", seed=seed)
        assert relative_error(outputs(changed), outputs(stock)) < TOLERANCE
        assert torch.equal(outputs(changed), outputs(build(seed=seed)))

    def test_loaded(self, changed: Tower) -> None:
        before = addresses(changed)
        load(changed, checkpoint(seed=1))
        self.check(changed)
        # CUDA graphs hold the addresses.
        assert addresses(changed) == before

    def test_loaded_after_the_memory_was_lost(self, changed: Tower) -> None:
        """As vLLM's sleep mode does; padding is lost, too."""
        for parameter in changed.visual.parameters():
            parameter.data.fill_(float("nan"))
        load(changed, checkpoint(seed=1))
        self.check(changed)

    def test_written_in_place(self, changed: Tower) -> None:
        fresh = dict(build(seed=1).visual.named_parameters())
        for name, parameter in changed.visual.named_parameters():
            parameter.data.copy_(fresh[name])
        self.check(changed)

    def test_at_new_addresses(self, changed: Tower) -> None:
        before = addresses(changed)
        fresh = dict(build(seed=1).visual.named_parameters())
        for name, parameter in changed.visual.named_parameters():
            old, parameter.data = parameter.data, fresh[name].data.clone()
            # Whoever still reads it shows.
            old.fill_(float("nan"))
        moved = zip(addresses(changed), before, strict=True)
        assert all(new != old for new, old in moved)
        self.check(changed)

    def test_moved_away_and_back(self, changed: Tower) -> None:
        for _ in range(2):
            for parameter in changed.visual.parameters():
                old, parameter.data = parameter.data, parameter.data.clone()
                old.fill_(float("nan"))
            self.check(changed, seed=0)

    @pytest.mark.parametrize("family", SPECS)
    def test_one_parameter_at_a_time(self, family: str) -> None:
        """Each is read where it is, not where the first block's was."""
        changed, stock = build(family), build(family, "TORCH_SDPA")
        found = outputs(changed)
        theirs = dict(stock.visual.named_parameters())
        for name, ours in changed.visual.named_parameters():
            # Padded ones have another size.
            if "blocks." not in name or ours.shape != theirs[name].shape:
                continue
            for parameter in (ours, theirs[name]):
                added = noise(*parameter.shape) / 64
                parameter.data = parameter.data + added
            again = outputs(changed)
            assert not torch.equal(again, found), name
            assert relative_error(again, outputs(stock)) < TOLERANCE, name
            found = again

    def test_a_load_that_fails(self, changed: Tower) -> None:
        weight = mlp(changed).down_proj.weight
        before = outputs(changed)
        with pytest.raises((AssertionError, RuntimeError, ValueError)):
            weight.weight_loader(weight, torch.zeros(64, SIZE - 1))
        assert weight.shape == (64, ALIGNED)
        assert torch.equal(outputs(changed), before)

    def test_by_layers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.model_executor.model_loader import reload

        fill: Callable[..., None] = tower.fill_with_random_weights

        def record_and_fill(visual: nn.Module, seed: int) -> None:
            reload.record_metadata_for_reloading(visual)
            fill(visual, seed)

        with monkeypatch.context() as context:
            context.setattr(tower, "fill_with_random_weights", record_and_fill)
            changed = build()
        outputs(changed)
        if hasattr(reload.utils, "get_tensor_load_numel"):
            stock = build("qwen2_5_vl", "TORCH_SDPA").visual.parameters()
            for ours, theirs in zip(changed.visual.parameters(), stock, strict=True):
                assert reload.utils.get_tensor_load_numel(ours) == theirs.numel()
        weights = checkpoint(seed=1)
        before = mlp(changed).gate_up_proj.weight.data_ptr()
        with changed.running():
            reload.initialize_layerwise_reload(changed.visual)
            changed.visual.load_weights(weights)  # type: ignore[operator]
            if hasattr(reload.utils, "get_tensor_load_numel"):
                # None waits for more, and holds what it was given meanwhile.
                infos = map(
                    reload.layerwise.get_layerwise_info, changed.visual.modules()
                )
                assert not any(info.loaded_weights for info in infos)
            reload.finalize_layerwise_reload(
                changed.visual, changed.vllm_config.model_config
            )
        assert mlp(changed).gate_up_proj.weight.data_ptr() == before
        self.check(changed)
        load(changed, checkpoint(seed=2))
        self.check(changed, seed=2)


@pytest.mark.usefixtures("direct")
class TestFp8:
    """Layers share prepared calls of attention, and each hands over its own scales."""

    GRIDS = [[1, 12, 20], [1, 18, 10]]

    def build(self, path: Path | None = None) -> Tower:
        spec = TowerSpec(SPECS["qwen3_vl"], "a tower", 3, family="qwen3_vl")
        return build_tower(
            spec,
            backend="FLASHINFER",
            dtype=torch.float32,
            device="cpu",
            attn_dtype="fp8",
            fp8_scale_path=path,
        )

    def encode(self, of: Tower, seed: int = 0) -> torch.Tensor:
        rows = sum(t * h * w for t, h, w in self.GRIDS)
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randn(rows, of.spec.patch_dim, generator=generator)
        return of.encode(pixels * (1 + seed), self.GRIDS)

    def compare(self, path: Path | None = None) -> tuple[int, int]:
        """Compare with blocks of vLLM's own; return prepared calls and calls."""
        with without("qwen3_vl-blocks"):
            plain = self.build(path)
        served = self.build(path)
        assert program_of(blocks(plain)[0]) is None
        with OpCount() as count:
            for seed in range(2):
                found, expected = self.encode(served, seed), self.encode(plain, seed)
                # A value at the border of two FP8 numbers may take the other one.
                assert relative_error(found, expected) < 1e-3
        return count.prepared - 6, count.calls - 6

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(ENV_KERNEL, "reference_fp8")

    def test_scales_of_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(ENV_FP8_SCALES, "block")
        prepared, calls = self.compare()
        assert (prepared, calls) == (1, 6)

    def test_static_scales(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "scales.json"
        # The middle block's values are all clipped.
        scales = {
            f"visual.blocks.{at}.attn.attn": dict.fromkeys("qkv", value)
            for at, value in enumerate((0.02, 0.0001, 0.05))
        }
        path.write_text(json.dumps(scales))
        prepared, calls = self.compare(path)
        assert (prepared, calls) == (1, 6)

    def test_dynamic_scales(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(ENV_FP8_SCALES, "dynamic")
        prepared, calls = self.compare()
        assert (prepared, calls) == (1, 6)
        served = self.build()
        for seed in range(2):
            self.encode(served, seed)
        states = [layer._fp8_state for layer in served.attention_layers().values()]
        # Each call counts, also that of a kept pass.
        assert [state.position.item() for state in states] == [2, 2, 2]
        assert len({tuple(state.scales.tolist()) for state in states}) == 3

    def test_a_layer_that_is_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(ENV_FP8_SCALES, "block")
        monkeypatch.setenv(ENV_FP8_SKIP_LAYERS, "1")
        monkeypatch.delenv(ENV_KERNEL)
        prepared, calls = self.compare()
        assert (prepared, calls) == (2, 6)


@pytest.mark.usefixtures("either")
class TestWatched:
    def test_every_call_is_seen(self) -> None:
        served = build("qwen3_vl")
        expected = outputs(served)
        layers = list(served.attention_layers().values())
        seen: list[int] = []

        def watch(
            layer: Any, attend: Callable[[Batch], torch.Tensor], batch: Batch
        ) -> torch.Tensor:
            seen.append(layers.index(layer))
            assert batch.cos is not None
            return attend(batch)

        # Beside layers that share calls.
        with layers[1].watched(watch):
            for _ in range(2):
                assert torch.equal(outputs(served), expected)
        assert seen == [1, 1]
        seen.clear()
        assert torch.equal(outputs(served), expected)
        assert not seen

    def test_what_the_watch_returns_counts(self) -> None:
        served = build("qwen3_vl")
        expected = outputs(served)
        (layer, *_) = served.attention_layers().values()
        silent = SimpleNamespace(
            watch=lambda layer, attend, batch: torch.zeros_like(attend(batch))
        )
        with layer.watched(silent.watch):  # type: ignore[operator]
            assert relative_error(outputs(served), expected) > 1e-3
        assert torch.equal(outputs(served), expected)
