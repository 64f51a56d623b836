# SPDX-License-Identifier: Apache-2.0
"""Encoder CUDA graphs through vLLM's manager: real towers, simulated capture."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from _graphs import BATCHES, LIMITS, as_two_ranks, metas, patched, request, run  # noqa: F401
from _towers import DEVICE, FAMILIES, pixels, small_tower

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from simulated_graphs import build_manager, capture, simulated_graphs  # noqa: E402
from vllm_flashinfer_vit.graphs import exact, padded  # noqa: E402
from vllm_flashinfer_vit.graphs import manager as adopting  # noqa: E402
from vllm_flashinfer_vit.graphs.padded import PaddedManager  # noqa: E402
from vllm_flashinfer_vit.graphs.sizes import ReplaySizeError, usual_frames  # noqa: E402
from vllm_flashinfer_vit.kernels import attention_ref as reference  # noqa: E402
from vllm_flashinfer_vit.settings import (  # noqa: E402
    ENV_DISABLE_PATCHES,
    ENV_FIX_GRAPH_PADDING,
    ENV_STRICT,
)
from vllm_flashinfer_vit.towers import spec

pytestmark = pytest.mark.usefixtures("plain_kernel")

_KERNEL_LOOKUP = "vllm_flashinfer_vit.ops.attention._prepare_kernel"


@contextmanager
def attending_by(attend: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Have a function run in place of every kernel."""

    def prepare(*args: Any) -> Callable[[], torch.Tensor]:
        return partial(attend, *args)

    with mock.patch(_KERNEL_LOOKUP, lambda _: prepare):
        yield


@contextmanager
def strict_attention() -> Iterator[list[torch.Tensor]]:
    """Refuse negative lengths, as a kernel made for plain batches cannot."""
    seen: list[torch.Tensor] = []
    original = reference.attention_ref

    def attend(q: Any, k: Any, v: Any, cu_seqlens: torch.Tensor, *args: Any) -> Any:
        if cu_seqlens.diff().min() < 0:
            raise AssertionError(f"negative length in {cu_seqlens.tolist()}")
        seen.append(cu_seqlens.clone())
        return original(q, k, v, cu_seqlens, *args)

    with attending_by(attend):
        yield seen


@pytest.mark.parametrize("family", FAMILIES)
class TestReplay:
    @pytest.mark.parametrize("allow_video", [True, False])
    @pytest.mark.parametrize("limits", [LIMITS, {"frames_per_video": 3}])
    def test_equals_eager(self, family: str, limits: dict, allow_video: bool) -> None:
        tower = small_tower(family)
        with simulated_graphs(), strict_attention():
            manager = build_manager(
                tower, max_tokens=160, allow_video=allow_video, **limits
            )
            capture(manager, tower)
            for modality, grids in BATCHES:
                if modality == "video" and not allow_video:
                    continue
                got = run(manager, tower, modality, grids)
                expected = tower.encode(pixels(tower.spec, grids), grids)
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        assert manager.graph_misses == 0

    def test_wrong_without_the_patch(
        self, family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if family == "qwen2_5_vl":
            pytest.skip("vLLM repeats this model's last offset itself")
        monkeypatch.setenv(ENV_DISABLE_PATCHES, "encoder-graphs")
        tower = small_tower(family)
        with simulated_graphs(), strict_attention():
            manager = build_manager(tower, max_tokens=160, **LIMITS)
            capture(manager, tower)
            assert type(manager).__name__ == "EncoderCudaGraphManager"
            with pytest.raises(AssertionError, match="negative length"):
                run(manager, tower, *BATCHES[1])

    def test_poisoned_padding_reaches_nothing(self, family: str) -> None:
        tower = small_tower(family)
        modality, grids = BATCHES[1]
        with simulated_graphs():
            manager = build_manager(tower, max_tokens=160, **LIMITS)
            capture(manager, tower)
            expected = run(manager, tower, modality, grids)
            replays = [meta.graph.run for meta in metas(manager)]

            def poison(meta: Any, replay: Any) -> None:
                rows = sum(t * h * w for t, h, w in grids)
                for buffer in meta.input_buffers.values():
                    if buffer is None or buffer.dim() < 2:
                        continue
                    buffer[rows:] = math.nan
                replay()

            for meta, replay in zip(metas(manager), replays, strict=True):
                meta.graph.run = lambda meta=meta, replay=replay: poison(meta, replay)
            got = run(manager, tower, modality, grids)
        assert torch.equal(got, expected)

    def test_padding_rows_of_attention_are_zero(self, family: str) -> None:
        tower = small_tower(family)
        seen: list[tuple[int, torch.Tensor]] = []
        original = reference.attention_ref

        def attend(q: Any, k: Any, v: Any, cu_seqlens: Any, *args: Any) -> Any:
            for x in (q, k, v):
                x[int(cu_seqlens.max()) :] = math.nan
            out = original(q, k, v, cu_seqlens, *args)
            seen.append((int(cu_seqlens.max()), out))
            return out

        with simulated_graphs(), attending_by(attend):
            manager = build_manager(tower, max_tokens=160, **LIMITS)
            capture(manager, tower)
            seen.clear()
            run(manager, tower, *BATCHES[1])
        assert seen
        for end, out in seen:
            assert 0 < end < out.shape[0]
            assert not out[end:].any()
            assert out.isfinite().all()

    def test_graphs_hold_their_budget_and_no_more(self, family: str) -> None:
        tower = small_tower(family)
        unit = tower.spec.merge_size**2
        with simulated_graphs():
            manager = build_manager(tower, max_tokens=160, frames_per_video=3)
            capture(manager, tower)
        storages = set()
        for meta in metas(manager):
            held = meta.input_buffers
            assert held["pixel_values"].shape[0] == meta.token_budget * unit
            assert held["cu_seqlens"][-1] == meta.token_budget * unit
            assert held["cu_seqlens"].diff().min() >= 1
            storages.add(held["pixel_values"].untyped_storage().data_ptr())
        assert len(storages) == 1

    def test_too_many_frames_run_without_a_graph(self, family: str) -> None:
        tower = small_tower(family)
        grids = [[30, 2, 2], [10, 2, 2]]
        with simulated_graphs():
            manager = build_manager(tower, max_tokens=160, **LIMITS)
            capture(manager, tower)
            with (
                mock.patch.object(padded.logger, "warning_once") as warned,
                mock.patch.object(padded.logger, "debug") as said,
            ):
                got = run(manager, tower, "video", grids)
            assert (manager.graph_hits, manager.graph_misses) == (0, 2)
            # Nothing of the batch itself, which would be said for every batch.
            ((text, *words), _) = warned.call_args
            assert "ran without one" in text
            assert words[:2] == [spec.FAMILIES[family].model, "graph_size"]
            assert "encoder_cudagraph_max_frames_per_batch" in words[2]
            assert "has 41 entries" in str(said.call_args.args[1])
            manager.strict = True
            with pytest.raises(ReplaySizeError) as error:
                run(manager, tower, "video", grids)
        expected = tower.encode(pixels(tower.spec, grids), grids)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        for part in (
            "cu_seqlens of this batch has 41 entries",
            "captured with 33",
            spec.FAMILIES[family].model,
            "encoder_cudagraph_max_frames_per_batch",
        ):
            assert part in str(error.value)

    def test_embeddings_are_left_to_the_model(self, family: str) -> None:
        """Runners call the model where the manager returns nothing."""
        tower = small_tower(family)
        embeds = torch.zeros(4, 48, device=DEVICE)
        with simulated_graphs():
            manager = build_manager(tower, max_tokens=160, **LIMITS)
            capture(manager, tower)
            for modality in ("image", "video"):
                grids = {f"{modality}_grid_thw": torch.tensor([[1, 4, 4]])}
                given = {f"{modality}_embeds": embeds, **grids}
                assert manager.execute(given) is None
        assert (manager.graph_hits, manager.graph_misses) == (0, 0)

    @pytest.mark.parametrize("max_frames", [None, 150])
    def test_automatic_graphs_hold_no_video_of_tiny_frames(
        self, family: str, max_frames: int | None
    ) -> None:
        tower = small_tower(family)
        grids = [[145, 2, 2]]
        with simulated_graphs():
            manager = build_manager(
                tower,
                max_tokens=160,
                budgets=(160,),
                max_items=8,
                max_frames=max_frames,
                frames_per_video=500,
            )
            capture(manager, tower)
            (meta,) = metas(manager, "default")
            room = meta.input_buffers["cu_seqlens"].numel() - 1
            assert room == (max_frames or usual_frames(160))
            got = run(manager, tower, "video", grids)
            assert manager.graph_misses == (room < 145)
            if room < 145:
                manager.strict = True
                with pytest.raises(ReplaySizeError, match=f" {room} video frames"):
                    run(manager, tower, "video", grids)
        expected = tower.encode(pixels(tower.spec, grids), grids)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)

    def test_the_manager_is_of_this_package(
        self, family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # As a runner that imported vLLM's class before a layer was built.
        from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager as imported

        manager = build_manager(small_tower(family), max_tokens=160)
        assert type(manager) is exact.ExactManager
        assert isinstance(manager, imported)
        monkeypatch.setenv(ENV_FIX_GRAPH_PADDING, "1")
        manager = build_manager(small_tower(family, "TORCH_SDPA"), max_tokens=160)
        assert type(manager) is PaddedManager

    def test_data_parallel_with_an_empty_rank(self, family: str) -> None:
        tower = small_tower(family)
        modality, grids = BATCHES[0]
        values = pixels(tower.spec, grids).to(DEVICE)
        with simulated_graphs():
            sizes = {**LIMITS, "data_parallel": True}
            manager = build_manager(tower, max_tokens=160, **sizes)
            capture(manager, tower)
            got = as_two_ranks(manager, tower, request(modality, values, grids))
        expected = tower.encode(values, grids)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("budget", "modality", "grids"),
    [
        (16, "video", [[16, 2, 2]]),
        # 8 frames of a window and a column, and 24 of one token.
        (64, "video", [[8, 2, 10], [24, 2, 2]]),
        (16, "image", [[1, 2, 2]] * 7 + [[1, 2, 18]]),
    ],
)
def test_a_graph_holds_the_batch_with_the_most_windows(
    budget: int, modality: str, grids: list[list[int]]
) -> None:
    tower = small_tower("qwen2_5_vl")
    frames_per_video = 4 if modality == "video" else 0
    limits = {**LIMITS, "frames_per_video": frames_per_video}
    with simulated_graphs():
        manager = build_manager(tower, max_tokens=160, **limits)
        capture(manager, tower)
        windows = sum(t * -(-h // 8) * -(-w // 8) for t, h, w in grids)
        meta = manager.budget_graphs["default"][budget]
        # Room for them, and for no more.
        assert meta.input_buffers["cu_window_seqlens"].numel() == windows + 1
        got = run(manager, tower, modality, grids)
    assert (manager.graph_hits, manager.graph_misses) == (len(grids), 0)
    expected = tower.encode(pixels(tower.spec, grids), grids)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


class TestBudgets:
    def build(self, **limits: Any) -> Any:
        return build_manager(small_tower("qwen3_vl"), max_tokens=256, **limits)

    def test_automatic_ones_are_fine(self) -> None:
        manager = self.build()
        assert manager.token_budgets == [64, 80, 96, 112, 128, 160, 192, 224, 256]
        assert manager.max_batch_size <= manager.token_budgets[0]
        assert manager.get_num_graphs_to_capture() == 2 * 9
        if hasattr(manager, "path_token_budgets"):
            assert manager.path_token_budgets == {"default": manager.token_budgets}

    def test_the_users_stay(self) -> None:
        assert self.build(budgets=(100, 250)).token_budgets == [100, 250]
        assert self.build(budgets=(100, 250), max_items=4).token_budgets == [100, 250]


@pytest.mark.parametrize(
    "change", [{"modalities": []}, {"capture_axes": ((64, 128),)}], ids=str
)
def test_a_model_that_vllm_captures_otherwise_is_only_padded(
    change: dict[str, Any],
) -> None:
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    manager = build_manager(small_tower("qwen3_vl"), max_tokens=160)
    manager.__class__ = EncoderCudaGraphManager
    for name, value in change.items():
        setattr(manager.config, name, value)
    adopting.adopt(manager, flashinfer=True, strict=False)
    assert type(manager) is PaddedManager


def test_a_models_own_padding_is_kept() -> None:
    # As MiniMax M3's, whose rotary tables have their rows in the second dimension.
    def by_columns(buffer: torch.Tensor, values: torch.Tensor) -> None:
        buffer.zero_()
        buffer[:, : values.shape[1]].copy_(values)

    manager = build_manager(small_tower("qwen3_vl"), max_tokens=160)
    logics = manager.config.padding_logics
    logics["pixel_values"] = by_columns
    PaddedManager.adopt(manager, strict=False)
    buffer = torch.ones(2, 4)
    logics["pixel_values"](buffer, torch.full((2, 3), 7.0))
    assert buffer.tolist() == [[7, 7, 7, 0]] * 2
    with pytest.raises(ReplaySizeError, match="pixel_values of this batch"):
        logics["pixel_values"](buffer, torch.ones(2, 5))


def test_a_rank_encodes_its_share_alone_while_a_graph_does() -> None:
    tower = small_tower("qwen3_vl")
    manager = build_manager(tower, max_tokens=160, data_parallel=True)
    visual = tower.visual
    visual.use_data_parallel = True  # type: ignore[assignment]
    with pytest.raises(KeyError), manager._one_rank():
        assert not visual.use_data_parallel
        raise KeyError
    # What no graph holds the ranks share as they did.
    assert visual.use_data_parallel
    manager.use_dp = False
    with manager._one_rank():
        assert visual.use_data_parallel


class TestStockBackend:
    """FLASH_ATTN cannot run here; TORCH_SDPA takes the same buffers."""

    def shortest(self, family: str) -> int:
        """Return the smallest length that a replay leaves in a graph's buffers."""
        tower = small_tower(family, "TORCH_SDPA")
        with simulated_graphs():
            manager = build_manager(tower, max_tokens=160, **LIMITS)
            capture(manager, tower)
            for meta in metas(manager):
                # The kernel is vLLM's; only what it would be given counts here.
                meta.graph.run = lambda: None
            run(manager, tower, *BATCHES[1])
        return min(
            int(m.input_buffers["cu_seqlens"].diff().min()) for m in metas(manager)
        )

    @pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
    def test_padding_is_mended_on_request(
        self, family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.shortest(family) < 0
        monkeypatch.setenv(ENV_FIX_GRAPH_PADDING, "1")
        assert self.shortest(family) == 0

    @pytest.mark.parametrize("is_strict", [False, True])
    def test_whether_it_is_strict_is_settled_when_it_is_built(
        self, is_strict: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(ENV_STRICT, str(int(is_strict)))
        manager = build_manager(small_tower("qwen3_vl"), max_tokens=160)
        monkeypatch.delenv(ENV_STRICT)
        assert manager.strict == is_strict

    @pytest.mark.parametrize("is_strict", [False, True])
    def test_a_class_of_others_stays_what_it_is(
        self, is_strict: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.v1.worker import encoder_cudagraph as module

        tower = small_tower("qwen3_vl")

        class Other(module.EncoderCudaGraphManager):
            def capture(self, *_: Any) -> None:
                """Capture nothing."""

        if is_strict:
            monkeypatch.setenv(ENV_STRICT, "1")
        error = pytest.raises(TypeError, match="Other manages the encoder CUDA")
        with (
            mock.patch.object(module, "EncoderCudaGraphManager", Other),
            mock.patch.object(adopting.logger, "warning") as warned,
            error if is_strict else nullcontext(),
        ):
            manager = build_manager(tower, max_tokens=160)
        assert warned.called != is_strict
        if is_strict:
            return
        assert type(manager) is Other
        assert manager.token_budgets == [64, 128, 160]

    def test_other_managers_stay_vllms(self) -> None:
        small_tower("qwen3_vl")
        manager = build_manager(small_tower("qwen3_vl", "TORCH_SDPA"), max_tokens=160)
        assert type(manager).__name__ == "EncoderCudaGraphManager"
        assert manager.token_budgets == [64, 128, 160]


@pytest.mark.parametrize(
    ("graphs", "v2", "warned"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_a_runner_without_graphs_is_named(
    graphs: bool, v2: bool, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.attention import MMEncoderAttention

    from vllm_flashinfer_vit.engine import advice, layer

    tower = small_tower("qwen2_vl")
    config = tower.vllm_config
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setattr(config.compilation_config, "cudagraph_mm_encoder", graphs)
    monkeypatch.setattr(type(config), "use_v2_model_runner", v2)
    monkeypatch.setattr(advice, "vllm_version", lambda: "0.25.1")
    with tower.running(), mock.patch.object(layer.logger, "warning_once") as warning:
        MMEncoderAttention(num_heads=4, head_size=16)
    said = [" ".join(map(str, call.args)) for call in warning.call_args_list]
    assert any("VLLM_USE_V2_MODEL_RUNNER=0" in text for text in said) == warned
