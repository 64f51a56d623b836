# SPDX-License-Identifier: Apache-2.0
"""What FP8 settings mean for a layer, and when scales are saved."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm_flashinfer_vit.choices.lookup import Choice  # noqa: E402
from vllm_flashinfer_vit.engine.selection import NotServedError  # noqa: E402
from vllm_flashinfer_vit.fp8 import policy as fp8  # noqa: E402
from vllm_flashinfer_vit.fp8 import scale_files as scales  # noqa: E402
from vllm_flashinfer_vit.fp8.scale_files import QKV, ScaleError  # noqa: E402
from vllm_flashinfer_vit.kernels.formats import DynamicScales  # noqa: E402
from vllm_flashinfer_vit.settings import (  # noqa: E402
    ENV_FP8_SCALES,
    ENV_FP8_SKIP_LAYERS,
    ENV_KERNEL,
    Settings,
)

NAME = "visual.blocks.3.attn.attn"
PLANS = {
    "block": (Choice("triton", 4095, ""), Choice("hopper_fp8", None, "")),
    "cudnn": (Choice("triton", 4095, ""), Choice("cudnn_fp8", None, "")),
}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The settings of an engine that asks for FP8, and what its GPU can run."""
    config = SimpleNamespace(
        mm_encoder_attn_dtype="fp8",
        mm_encoder_fp8_scale_path=None,
        mm_encoder_fp8_scale_save_path=None,
        mm_encoder_fp8_scale_save_margin=1.5,
        choices=PLANS["block"],
        compile_mm_encoder=False,
    )
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(model="some/model"), compilation_config=config
    )
    monkeypatch.setattr(fp8, "get_multimodal_config", lambda: config)
    monkeypatch.setattr(fp8, "get_current_vllm_config", lambda: vllm_config)
    monkeypatch.setattr(fp8, "resolve_fp8", lambda *args: config.choices)
    monkeypatch.setattr(fp8, "_saving", None)
    monkeypatch.setattr(fp8, "_states", set())
    monkeypatch.setattr(fp8, "_layers", set())
    return config


def policy(**settings: Any) -> fp8.Policy | None:
    return fp8.policy_for(NAME, 72, torch.bfloat16, Settings(**settings))


def required(**settings: Any) -> fp8.Policy:
    found = policy(**settings)
    assert found is not None
    return found


def put_scales(folder: Path, *names: str) -> Path:
    path = folder / "scales.json"
    amax = {name: (QKV(448.0, 44.8, 4.48), 72) for name in names}
    made_by = {**fp8.made_by_engine("some/model"), "command": "test"}
    scales.write(scales.from_amax(amax, 1.0, made_by), path)
    return path


class TestResolve:
    """What is an error where some kernels cannot run."""

    def resolve(
        self, monkeypatch: pytest.MonkeyPatch, refused: str, *left: Any
    ) -> tuple[Choice, ...]:
        choices = tuple(Choice(kernel, None, "") for kernel in left)
        refusals = {refused: f"{refused}: it cannot"}
        monkeypatch.setattr(fp8, "usable_choices", lambda *_, **__: (choices, refusals))
        return fp8.resolve_fp8.__wrapped__(96, torch.bfloat16, None)

    def test_no_fp8_kernel_is_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(NotServedError, match="triton_fp8: it cannot"):
            self.resolve(monkeypatch, "triton_fp8", "triton")

    def test_nothing_is_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(NotServedError, match="flash_attn: it cannot"):
            self.resolve(monkeypatch, "flash_attn")

    def test_there_was_none_to_be_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (choice,) = self.resolve(monkeypatch, "flash_attn", "flash_attn_4")
        assert choice.kernel == "flash_attn_4"


class TestPolicy:
    def test_nothing_was_asked_for(self, engine: SimpleNamespace) -> None:
        engine.mm_encoder_attn_dtype = None
        assert policy() is None

    def test_where_it_never_paid_layers_stay_as_they_are(
        self, engine: SimpleNamespace
    ) -> None:
        engine.choices = (Choice("triton", 4095, ""), Choice("flash_attn", None, ""))
        assert policy() is None

    def test_where_it_never_paid_scales_are_saved_all_the_same(
        self, engine: SimpleNamespace, tmp_path: Path
    ) -> None:
        engine.choices = (Choice("triton", 4095, ""), Choice("flash_attn", None, ""))
        engine.mm_encoder_fp8_scale_save_path = str(tmp_path / "scales.json")
        assert required().observes
        assert "of no length" in required().summary

    def test_a_dtype_of_the_future(self, engine: SimpleNamespace) -> None:
        engine.mm_encoder_attn_dtype = "fp4"
        with pytest.raises(NotServedError, match="'fp4'.*use fp8"):
            policy()

    @pytest.mark.parametrize(
        ("plan", "setting", "method"),
        [
            ("block", None, "block"),
            ("block", "block", "block"),
            ("block", "dynamic", "dynamic"),
            ("cudnn", None, "dynamic"),
            ("cudnn", "dynamic", "dynamic"),
        ],
    )
    def test_the_method_follows_the_kernels(
        self, plan: str, setting: Any, method: str, engine: SimpleNamespace
    ) -> None:
        engine.choices = PLANS[plan]
        found = required(fp8_scales=setting)
        assert found.method == method
        assert found.has_state == found.observes == (method == "dynamic")

    def test_cudnn_has_no_block_scales(self, engine: SimpleNamespace) -> None:
        engine.choices = PLANS["cudnn"]
        with pytest.raises(
            NotServedError, match=f"{ENV_FP8_SCALES}=block, but cudnn_fp8"
        ):
            policy(fp8_scales="block")

    @pytest.mark.parametrize("plan", PLANS)
    def test_a_file_means_static_scales(
        self, plan: str, engine: SimpleNamespace, tmp_path: Path
    ) -> None:
        engine.choices = PLANS[plan]
        engine.mm_encoder_fp8_scale_path = str(put_scales(tmp_path, NAME))
        found = required()
        assert (found.method, found.has_state, found.observes) == (
            "static",
            True,
            False,
        )

    def test_a_file_contradicts_another_method(
        self, engine: SimpleNamespace, tmp_path: Path
    ) -> None:
        engine.mm_encoder_fp8_scale_path = str(put_scales(tmp_path, NAME))
        with pytest.raises(NotServedError, match=f"{ENV_FP8_SCALES}=dynamic contra"):
            policy(fp8_scales="dynamic")

    def test_a_damaged_file(self, engine: SimpleNamespace, tmp_path: Path) -> None:
        path = tmp_path / "scales.json"
        path.write_text("{")
        engine.mm_encoder_fp8_scale_path = str(path)
        with pytest.raises(ScaleError, match="scales.json"):
            policy()

    def test_saving_keeps_track_with_block_scales_too(
        self, engine: SimpleNamespace, tmp_path: Path
    ) -> None:
        engine.mm_encoder_fp8_scale_save_path = str(tmp_path / "new.json")
        found = required()
        assert (found.method, found.save, found.has_state) == ("block", True, True)

    def test_a_path_that_scales_cannot_be_saved_to_is_said_at_once(
        self, engine: SimpleNamespace, tmp_path: Path
    ) -> None:
        path = tmp_path / "upstream.json"
        path.write_text('{"a": {"q": 1, "k": 1, "v": 1}}')
        engine.mm_encoder_fp8_scale_save_path = str(path)
        with pytest.raises(ScaleError, match="not written by this package"):
            policy()

    def test_the_summary_says_from_which_length(self, engine: SimpleNamespace) -> None:
        assert "from 4096 tokens on" in required().summary
        engine.choices = (
            Choice("triton", 1024, ""),
            Choice("triton_fp8", 2048, ""),
            Choice("hopper_fp8", 8192, ""),
            Choice("flash_attn", 32768, ""),
            Choice("triton_fp8", None, ""),
        )
        spans = "of 1025 to 8192 tokens and from 32769 tokens on"
        assert spans in required().summary


class TestSkippedLayers:
    @pytest.mark.parametrize(
        "entry", ["3", "03", NAME, "visual.blocks.3", "visual.blocks.3.attn"]
    )
    def test_are_named_by_block_or_name(
        self, entry: str, engine: SimpleNamespace
    ) -> None:
        assert policy(fp8_skip_layers=frozenset({"0", entry})) is None

    @pytest.mark.parametrize("entry", ["4", "33", "visual.blocks.31", "blocks.3"])
    def test_are_not_others(self, entry: str, engine: SimpleNamespace) -> None:
        assert policy(fp8_skip_layers=frozenset({entry})) is not None

    def test_unknown_ones_are_an_error(self, engine: SimpleNamespace) -> None:
        layer = SimpleLayer(NAME)
        fp8.enroll(layer)
        fp8.check_names(None, Settings(fp8_skip_layers=frozenset({"3"})))
        with pytest.raises(
            NotServedError, match=f"{ENV_FP8_SKIP_LAYERS} names '7'.*{NAME}"
        ):
            fp8.check_names(None, Settings(fp8_skip_layers=frozenset({"3", "7"})))

    def test_compiled_blocks_cannot_differ(self, engine: SimpleNamespace) -> None:
        engine.compile_mm_encoder = True
        with pytest.raises(NotServedError, match="compile_mm_encoder"):
            policy(fp8_skip_layers=frozenset({"3"}))


class SimpleLayer(torch.nn.Module):
    def __init__(self, layer_name: str) -> None:
        super().__init__()
        self.layer_name = layer_name


class TestForcedKernel:
    def test_must_be_one_of_fp8(self) -> None:
        with pytest.raises(NotServedError, match=f"{ENV_KERNEL}=triton contradicts"):
            fp8.resolve_fp8(72, torch.bfloat16, "triton")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
    def test_that_cannot_run_says_why(self) -> None:
        with pytest.raises(
            NotServedError, match=r"triton_fp8: it needs an NVIDIA GPU.*leave|Leave"
        ):
            fp8.resolve_fp8(72, torch.bfloat16, "triton_fp8")


class TestState:
    def test_static_scales_of_the_layer(
        self, engine: SimpleNamespace, tmp_path: Path
    ) -> None:
        path = put_scales(tmp_path, NAME, "other")
        engine.mm_encoder_fp8_scale_path = str(path)
        found = required()
        state = fp8.ScaleState(found, NAME, 72)
        torch.testing.assert_close(state.scales, torch.tensor([1.0, 0.1, 0.01]))
        state.scales.zero_()
        state.reset()
        torch.testing.assert_close(state.scales, torch.tensor([1.0, 0.1, 0.01]))
        assert not state.state_dict()
        fp8.enroll(SimpleLayer(NAME))
        with pytest.raises(ScaleError, match="'other'.*is none of this model"):
            fp8.check_names(found, Settings())

    def test_a_layer_that_the_file_lacks(
        self, engine: SimpleNamespace, tmp_path: Path
    ) -> None:
        engine.mm_encoder_fp8_scale_path = str(put_scales(tmp_path, "other"))
        with pytest.raises(ScaleError, match=NAME):
            fp8.ScaleState(required(), NAME, 72)

    def test_is_what_the_kernels_take(self, engine: SimpleNamespace) -> None:
        state = fp8.ScaleState(required(fp8_scales="dynamic"), NAME, 72)
        for name, tensor in DynamicScales.on("cpu")._asdict().items():
            buffer = getattr(state, name)
            assert (buffer.dtype, buffer.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(buffer, tensor)


STEP = SimpleNamespace(scheduled_encoder_inputs={"request": [0]})
TEXT_STEP = SimpleNamespace(scheduled_encoder_inputs={})


class TestSaving:
    @pytest.fixture
    def path(self, engine: SimpleNamespace, tmp_path: Path) -> Path:
        path = tmp_path / "new.json"
        engine.mm_encoder_fp8_scale_save_path = str(path)
        return path

    def states(self) -> list[fp8.ScaleState]:
        names = [NAME, NAME.replace("3", "4")]
        return [fp8.ScaleState(required(), name, 72) for name in names]

    def test_at_the_16th_pass_and_never_again(self, path: Path) -> None:
        states = self.states()
        for i in range(16):
            for state in states:
                state.history[i] = torch.tensor([1.0 + i, 2.0, 3.0])
            fp8.after_step(TEXT_STEP)
            assert not path.exists()
            fp8.after_step(STEP)
        file = scales.read(path)
        assert file.layers[NAME].amax == (16.0, 2.0, 3.0)
        assert len(file.layers) == 2
        assert file.margin == 1.5
        assert file.made_by["model"] == "some/model"
        path.unlink()
        for _ in range(32):
            fp8.after_step(STEP)
        assert not path.exists()

    def test_dummies_do_not_count(self, path: Path) -> None:
        states = self.states()
        for state in states:
            state.history.fill_(1e6)
            state.position.fill_(5)
        for _ in range(15):
            fp8.after_step(STEP)
        buffers = [state.history.data_ptr() for state in states]
        fp8.forget_dummies()
        # Captured graphs hold the addresses.
        assert buffers == [state.history.data_ptr() for state in states]
        assert all(not state.position.any() for state in states)
        for state in states:
            state.history[0] = 2.0
        for _ in range(15):
            fp8.after_step(STEP)
        assert not path.exists()
        fp8.after_step(STEP)
        assert scales.read(path).layers[NAME].amax == (2.0, 2.0, 2.0)

    def test_a_rank_without_images_waits(self, path: Path) -> None:
        states = self.states()
        for _ in range(20):
            fp8.after_step(STEP)
        assert not path.exists()
        states[0].history[0] = 1.0
        fp8.after_step(STEP)
        assert list(scales.read(path).layers) == [NAME]

    def test_ranks_are_merged(self, path: Path) -> None:
        for rank in range(2):
            states = self.states()
            for state in states:
                state.history[0] = torch.tensor([1.0 + rank, 2.0 - rank, 1.0])
            for _ in range(16):
                fp8.after_step(STEP)
            fp8._states.clear()
        assert scales.read(path).layers[NAME].amax == (2.0, 2.0, 1.0)

    def test_an_engine_outlives_a_full_disk(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        states = self.states()
        states[0].history[0] = 1.0
        calls = []

        def full(*args: Any) -> None:
            calls.append(args)
            raise OSError("no space left")

        monkeypatch.setattr(scales, "save", full)
        for _ in range(32):
            fp8.after_step(STEP)
        assert len(calls) == 1
