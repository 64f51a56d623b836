# SPDX-License-Identifier: Apache-2.0
"""Passes through the blocks of a tower: sums handed on, and buffers that are kept."""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _blocks import blocks, build, call, noted, outputs, programs, stream, tables
from _dense_models import idefics2
from _encoders import DENSE
from _models import encode, engine, offsets
from _towers import cpu_only

from cases import relative_error
from vllm_flashinfer_vit.blocks import tower_pass
from vllm_flashinfer_vit.blocks.mlp import Mlp
from vllm_flashinfer_vit.blocks.tower_pass import Pass, TowerProgram
from vllm_flashinfer_vit.towers.tower import Tower

pytestmark = cpu_only

# Sums of a few hundred fp32 terms in another order.
TOLERANCE = 1e-6


@pytest.fixture
def qwen3(either: None) -> tuple[Tower, Tower]:
    """The deepest tower, by programs and as vLLM's own."""
    return build("qwen3_vl"), build("qwen3_vl", "TORCH_SDPA")


@pytest.fixture
def normed(qwen3: tuple[Tower, Tower]) -> Iterator[list[int]]:
    """The blocks whose first norm is called by itself, in order."""
    with noted([block.norm1 for block in blocks(qwen3[0])]) as seen:
        yield seen


class TestChain:
    def run(self, tower: Tower, *places: int) -> list[torch.Tensor]:
        """Return the stream and what blocks make of it, each of the one before."""
        sums, with_ = [stream(tower)], tables(tower)
        for place in places:
            sums.append(call(tower, place, sums[-1], with_))
        return sums

    def test_a_pass_normalises_once(
        self, qwen3: tuple[Tower, Tower], normed: list[int]
    ) -> None:
        served, stock = qwen3
        found, expected = self.run(served, 0, 1, 2), self.run(stock, 0, 1, 2)
        assert normed == [0]
        for one, other in zip(found, expected, strict=True):
            assert relative_error(one, other) < TOLERANCE

    def test_what_the_caller_keeps_is_not_written(
        self, qwen3: tuple[Tower, Tower]
    ) -> None:
        served, _ = qwen3
        sums, with_, copies = [stream(served)], tables(served), []
        for place in range(3):
            copies.append(sums[-1].clone())
            sums.append(call(served, place, sums[-1], with_))
        assert len({x.data_ptr() for x in sums}) == 4
        for kept, copy in zip(sums, copies, strict=False):
            assert torch.equal(kept, copy)

    def test_another_sum_is_normalised_anew(
        self, qwen3: tuple[Tower, Tower], normed: list[int]
    ) -> None:
        served, stock = qwen3
        first = self.run(served, 0)[-1]
        with_ = tables(served)
        found = call(served, 1, 2 * first, with_)
        assert normed == [0, 1]
        assert relative_error(found, call(stock, 1, 2 * first, with_)) < TOLERANCE

    @pytest.mark.parametrize("places", [(1,), (0, 2), (0, 0), (1, 0), (2, 0)], ids=str)
    def test_blocks_in_another_order(
        self, places: tuple[int, ...], qwen3: tuple[Tower, Tower], normed: list[int]
    ) -> None:
        served, stock = qwen3
        found, expected = self.run(served, *places), self.run(stock, *places)
        assert normed == [*places]
        assert relative_error(found[-1], expected[-1]) < TOLERANCE

    def test_two_passes_in_turns(self, qwen3: tuple[Tower, Tower]) -> None:
        served, stock = qwen3
        with_ = tables(served)
        xs = [stream(served), -stream(served)]
        expected = xs
        for place in range(3):
            xs = [call(served, place, x, with_) for x in xs]
            expected = [call(stock, place, x, with_) for x in expected]
        for one, other in zip(xs, expected, strict=True):
            assert relative_error(one, other) < TOLERANCE

    @pytest.mark.parametrize("has_config", [True, False])
    def test_parts_of_the_list(self, has_config: bool, ran: list[int]) -> None:
        """Taken in each pass, as by MiniCPM-V 4.6, where an engine has no config."""
        served = build("qwen2_5_vl")
        expected, (first, second) = outputs(served), programs(served)
        config = served.running() if has_config else contextlib.nullcontext()
        with config:
            parts = served.visual.blocks[:1], served.visual.blocks[1:]
        assert [len(part) for part in parts] == [1, 1]
        assert programs(served) == [first, second]
        ran.clear()
        assert torch.equal(outputs(served), expected)
        assert ran == [0, 1]

    def test_a_block_that_is_taken_out(self, ran: list[int]) -> None:
        """Its weights are never loaded, and so its program is never built."""

        def without_the_last(m: Any) -> Any:
            tower, run = idefics2(m)
            del tower.layers[-1]
            return tower, run

        shorter = replace(DENSE["idefics2"], build=without_the_last)
        backends = "TORCH_SDPA", "FLASHINFER"
        stock, found = (encode(shorter, engine(backend)) for backend in backends)
        assert ran == [0]
        assert relative_error(found.out, stock.out) < TOLERANCE

    def test_a_mask_is_read_in_its_pass_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A pass that is kept neither holds its mask nor what follows from it."""
        made: list[torch.Tensor] = []
        kept: list[Pass] = []
        offsets_of, end = tower_pass.row_offsets, TowerProgram.end

        def row_offsets(tokens: torch.Tensor, length: int) -> torch.Tensor:
            made.append(tokens)
            return offsets_of(tokens, length)

        def noting(self: TowerProgram, now: Pass) -> None:
            end(self, now)
            kept.append(now)

        monkeypatch.setattr(tower_pass, "row_offsets", row_offsets)
        monkeypatch.setattr(TowerProgram, "end", noting)
        encode(DENSE["idefics2-masked"], engine("FLASHINFER"))
        assert kept[0] is kept[1]
        assert [tokens.tolist() for tokens in made] == [[9, 4, 7], [1, 9, 9]]
        assert kept[0]._masked is None

    def test_other_images_after_a_block(self, qwen3: tuple[Tower, Tower]) -> None:
        """Of one pass all tables may be others, as windows' are."""
        served, stock = qwen3
        found, expected = [
            call(tower, 1, self.run(tower, 0)[-1], self.turned(tower))
            for tower in (served, stock)
        ]
        assert relative_error(found, expected) < TOLERANCE

    @staticmethod
    def turned(tower: Tower) -> dict[str, Any]:
        with_ = tables(tower)
        cos, sin = with_["rotary_pos_emb_cos"], with_["rotary_pos_emb_sin"]
        return {
            **with_,
            "cu_seqlens": offsets([4] * 6),
            "rotary_pos_emb_cos": -cos.flip(0),
            "rotary_pos_emb_sin": sin.flip(0),
        }


class TestBuffers:
    @pytest.fixture
    def passes(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """References to passes, and so to their buffers, as they are made."""
        made: list[weakref.ref[Pass]] = []
        make = Pass.__init__

        def init(now: Pass, *args: Any) -> None:
            make(now, *args)
            made.append(weakref.ref(now))

        monkeypatch.setattr(Pass, "__init__", init)
        return made

    def test_kept_for_the_next_pass_of_the_size(
        self, qwen3: tuple[Tower, Tower], passes: Any
    ) -> None:
        served, _ = qwen3
        for _ in range(3):
            self.run_all(served, 24)
        assert len(passes) == 1
        self.run_all(served, 20)
        self.run_all(served, 24)
        self.run_all(served, 20)
        assert len(passes) == 2

    def test_not_kept_for_blocks_with_other_steps(
        self, qwen3: tuple[Tower, Tower], passes: Any
    ) -> None:
        served, _ = qwen3
        self.run_all(served, 44)
        # As when an engine that runs loads weights anew.
        programs(served)[0].build()
        assert passes[0]() is None
        self.run_all(served, 44)
        assert len(passes) == 2

    def test_not_kept_of_a_capture(
        self,
        qwen3: tuple[Tower, Tower],
        passes: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The memory is the graph's, which holds it as long as it lives."""
        served, _ = qwen3
        monkeypatch.setattr(tower_pass, "_pass_key", lambda x: None)
        for _ in range(2):
            self.run_all(served, 48)
        assert [now() for now in passes] == [None, None]

    def test_kept_for_what_can_use_the_buffers(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gpu = SimpleNamespace(stream=5, is_capturing=False)
        capturing, stream = "is_current_stream_capturing", "_cuda_getCurrentRawStream"
        monkeypatch.setattr(torch.cuda, capturing, lambda: gpu.is_capturing)
        monkeypatch.setattr(torch._C, stream, lambda index: gpu.stream, raising=False)
        device = SimpleNamespace(index=0)
        given = {"shape": (8, 64), "dtype": torch.bfloat16, "device": device}

        def key(**other: Any) -> object:
            x: Any = SimpleNamespace(is_cuda=True, **given | other)
            return tower_pass._pass_key(x)

        same = key()
        assert key() == same is not None
        others = [
            key(shape=(4, 64)),
            key(dtype=torch.float16),
            key(device=SimpleNamespace(index=1)),
        ]
        with torch.inference_mode():
            others.append(key())
        gpu.stream = 6
        others.append(key())
        assert same not in others
        gpu.is_capturing = True
        assert key() is None

    def run_all(self, of: Tower, rows: int) -> None:
        x, with_ = stream(of, rows), tables(of, rows)
        for place in range(3):
            x = call(of, place, x, with_)

    def test_kept_up_to_a_limit(
        self, qwen3: tuple[Tower, Tower], passes: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served, _ = qwen3
        self.run_all(served, 36)
        (first,) = passes
        monkeypatch.setattr(tower_pass, "MAX_KEPT_BYTES", first().nbytes)
        # The oldest go first; one that is too large is not kept, and drives none out.
        self.run_all(served, 32)
        assert first() is None
        assert passes[1]() is not None
        self.run_all(served, 40)
        assert [now() is not None for now in passes] == [False, True, False]

    def test_two_passes_do_not_share(
        self, qwen3: tuple[Tower, Tower], passes: Any
    ) -> None:
        served, stock = qwen3
        self.run_all(served, 28)
        x, with_ = stream(served, 28), tables(served, 28)
        xs = [call(served, 0, x, with_), call(served, 0, -x, with_)]
        for at, found in enumerate(xs):
            expected = call(stock, 0, (x, -x)[at], with_)
            assert relative_error(found, expected) < TOLERANCE

    def test_kept_passes_read_new_tables(self, qwen3: tuple[Tower, Tower]) -> None:
        """Of other batches of as many rows, and offsets that are written in place."""
        served, stock = qwen3
        x, with_ = stream(served), tables(served)
        for lengths in ([8, 16], [12, 12]):
            with_["cu_seqlens"].copy_(offsets(lengths))
            turned = -with_["rotary_pos_emb_cos"]
            for other in (
                with_,
                {**with_, "cu_seqlens": offsets(lengths[::-1])},
                {**with_, "rotary_pos_emb_cos": turned},
            ):
                found = call(served, 2, x, other)
                assert relative_error(found, call(stock, 2, x, other)) < TOLERANCE

    def test_many_batches_of_one_size(self, qwen3: tuple[Tower, Tower]) -> None:
        served, stock = qwen3
        x, with_ = stream(served, 60), tables(served, 60)
        for length in range(1, 40):
            with_["cu_seqlens"] = offsets([length, 60 - length])
            found = call(served, 2, x, with_)
            assert relative_error(found, call(stock, 2, x, with_)) < TOLERANCE

    def test_freed_when_nobody_goes_on(
        self, qwen3: tuple[Tower, Tower], passes: Any
    ) -> None:
        served, _ = qwen3
        total = call(served, 0, stream(served), tables(served))
        assert passes[-1]() is not None
        del total
        assert passes[-1]() is None

    def test_freed_after_an_error(
        self, qwen3: tuple[Tower, Tower], passes: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served, stock = qwen3
        x, with_ = stream(served), tables(served)
        total = call(served, 0, x, with_)
        with monkeypatch.context() as context:
            # After the second norm.
            context.setattr(Mlp, "hidden_of", self.fail)
            with pytest.raises(KeyError):
                call(served, 1, total, with_)
        gc.collect()
        assert passes[-1]() is None
        # What the block has left behind is not taken for the norm of its sum.
        found = call(served, 1, total, with_)
        assert relative_error(found, call(stock, 1, total, with_)) < TOLERANCE

    @staticmethod
    def fail(*_: Any) -> None:
        raise KeyError

    def test_every_value_is_written(
        self, qwen3: tuple[Tower, Tower], nan_empty: None
    ) -> None:
        assert not outputs(qwen3[0]).isnan().any()
