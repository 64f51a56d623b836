# SPDX-License-Identifier: Apache-2.0
"""What FP8 settings mean for a layer, and what the layers of an engine share."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from _fp8_engine import NAME, NAMES, STEP, Engine, engine_config  # noqa: E402

from vllm_flashinfer_vit.choices.lookup import Choice  # noqa: E402
from vllm_flashinfer_vit.choices.usable import NotServedError  # noqa: E402
from vllm_flashinfer_vit.fp8 import policy as fp8  # noqa: E402
from vllm_flashinfer_vit.fp8 import scale_files as scales  # noqa: E402
from vllm_flashinfer_vit.fp8.scale_files import QKV, ScaleError  # noqa: E402
from vllm_flashinfer_vit.fp8.state import EngineScales, ScaleState, made_by_engine  # noqa: E402
from vllm_flashinfer_vit.kernels.formats import DeviceScales  # noqa: E402
from vllm_flashinfer_vit.settings import ENV_FP8_SCALES, ENV_FP8_SKIP_LAYERS, Settings  # noqa: E402

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
    vllm_config = engine_config()
    vllm_config.compilation_config = config
    monkeypatch.setattr(fp8, "get_multimodal_config", lambda: config)
    monkeypatch.setattr(fp8, "get_current_vllm_config", lambda: vllm_config)
    monkeypatch.setattr(fp8, "resolve_fp8", lambda *args: config.choices)
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
    made_by = {**made_by_engine("some/model"), "command": "test"}
    scales.write(scales.from_amax(amax, 1.0, made_by), path)
    return path


class TestPolicy:
    def test_nothing_was_asked_for(
        self, engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert fp8.requested()
        engine.mm_encoder_attn_dtype = None
        assert not fp8.requested() and policy() is None
        # A model that takes no images.
        monkeypatch.setattr(fp8, "get_multimodal_config", lambda: None)
        assert not fp8.requested() and policy() is None

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
        assert "for no length" in required().summary

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

    def test_scales_of_batches_before_contradict_bits_that_no_batch_changes(
        self, engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        with pytest.raises(NotServedError, match=f"{ENV_FP8_SCALES}=dynamic contra"):
            policy(fp8_scales="dynamic")
        assert required().method == "block"

    def test_a_damaged_file(self, engine: SimpleNamespace, tmp_path: Path) -> None:
        path = tmp_path / "scales.json"
        path.write_text("{")
        engine.mm_encoder_fp8_scale_path = str(path)
        with pytest.raises(ScaleError, match="scales.json"):
            Engine(required())

    def test_saving_keeps_track_with_block_scales_too(
        self, engine: SimpleNamespace, tmp_path: Path
    ) -> None:
        engine.mm_encoder_fp8_scale_save_path = str(tmp_path / "new.json")
        found = required()
        assert (found.method, found.save, found.has_state) == ("block", True, True)

    def test_the_summary_says_from_which_length(self, engine: SimpleNamespace) -> None:
        assert "sequences of 4096 tokens or more, with" in required().summary
        engine.choices = (
            Choice("triton", 1024, ""),
            Choice("triton_fp8", 2048, ""),
            Choice("hopper_fp8", 8192, ""),
            Choice("flash_attn", 32768, ""),
            Choice("triton_fp8", None, ""),
        )
        spans = "sequences of 1025 to 8192 and of 32769 tokens or more, with"
        assert spans in required().summary


class TestSkippedLayers:
    @pytest.mark.parametrize(
        "entry", ["3", "03", NAME, "visual.blocks.3", "visual.blocks.3.attn"]
    )
    def test_are_named_by_block_or_name(
        self, entry: str, engine: SimpleNamespace
    ) -> None:
        with mock.patch.object(fp8.logger, "info_once") as said:
            assert policy(fp8_skip_layers=frozenset({"0", entry})) is None
        assert said.call_args.args[1:] == (NAME, torch.bfloat16, ENV_FP8_SKIP_LAYERS)

    @pytest.mark.parametrize("entry", ["4", "33", "visual.blocks.31", "blocks.3"])
    def test_are_not_others(self, entry: str, engine: SimpleNamespace) -> None:
        assert policy(fp8_skip_layers=frozenset({entry})) is not None

    @pytest.mark.parametrize("entry", ["visual.blocks.3", "3", "visual.blocks.3.attn"])
    def test_a_longer_number_is_another_block(self, entry: str) -> None:
        assert fp8.names(entry, "visual.blocks.3.attn.attn")
        assert not fp8.names(entry, "visual.blocks.31.attn.attn")

    def test_a_layer_outside_the_blocks_has_no_number(self) -> None:
        assert not fp8.names("3", "visual.pooler.attn")

    def test_unknown_ones_are_an_error(self, engine: SimpleNamespace) -> None:
        layers = EngineScales(engine_config())
        layers.enroll(NAME, 72, None)
        layers.check_names(Settings(fp8_skip_layers=frozenset({"3"})))
        with pytest.raises(
            NotServedError, match=f"{ENV_FP8_SKIP_LAYERS} names '7'.*{NAME}"
        ):
            layers.check_names(Settings(fp8_skip_layers=frozenset({"3", "7"})))

    def test_compiled_blocks_cannot_differ(self, engine: SimpleNamespace) -> None:
        engine.compile_mm_encoder = True
        assert policy() is not None
        with pytest.raises(NotServedError, match="compile_mm_encoder"):
            policy(fp8_skip_layers=frozenset({"3"}))


class TestState:
    def test_static_scales_of_the_layer(
        self, engine: SimpleNamespace, tmp_path: Path
    ) -> None:
        path = put_scales(tmp_path, NAME, "other")
        engine.mm_encoder_fp8_scale_path = str(path)
        found = required()
        layers = EngineScales(engine_config())
        state = layers.enroll(NAME, 72, found)
        assert state is not None
        torch.testing.assert_close(state.scales, torch.tensor([1.0, 0.1, 0.01]))
        for tensor in state.buffers():
            tensor.fill_(7)
        state.reset()
        for name, tensor in state.named_buffers():
            assert tensor.any() == (name == "scales")
        torch.testing.assert_close(state.scales, torch.tensor([1.0, 0.1, 0.01]))
        assert not state.state_dict()
        with pytest.raises(ScaleError, match="'other'.*is none of this model"):
            layers.check_names(Settings())

    def test_a_layer_that_the_file_lacks(
        self, engine: SimpleNamespace, tmp_path: Path
    ) -> None:
        """It may be built: models drop blocks, and then nobody asks for its scales."""
        engine.mm_encoder_fp8_scale_path = str(put_scales(tmp_path, NAME))
        layers = Engine(required(), NAMES).layers
        # One of 16 bits needs none.
        layers.enroll("visual.blocks.5.attn.attn", 80, None)
        for layer_name in (NAME, "visual.blocks.5.attn.attn"):
            layers.check_has_scales(layer_name)
        with pytest.raises(ScaleError, match=f"{NAMES[1]!r} is not in the file"):
            layers.check_has_scales(NAMES[1])

    def test_a_layer_of_another_head_dim(
        self, engine: SimpleNamespace, tmp_path: Path
    ) -> None:
        engine.mm_encoder_fp8_scale_path = str(put_scales(tmp_path, NAME))
        with pytest.raises(ScaleError, match="head dim 80, but 72"):
            EngineScales(engine_config()).enroll(NAME, 80, required())

    def test_block_scales_need_none(self, engine: SimpleNamespace) -> None:
        assert EngineScales(engine_config()).enroll(NAME, 72, required()) is None

    def test_is_what_the_kernels_take(self) -> None:
        state = ScaleState(NAME, 72, None)
        for name, tensor in DeviceScales.on("cpu")._asdict().items():
            buffer = getattr(state, name)
            assert (buffer.dtype, buffer.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(buffer, tensor)


class TestEngines:
    """Two engines, or two towers, in one process know nothing of each other."""

    def test_layers_of_one_engine_share_a_record(self) -> None:
        config = engine_config()
        first = EngineScales.of(config)
        # vLLM derives configs for parts of a model, with the same compilation config.
        part = SimpleNamespace(**vars(config))
        assert EngineScales.of(part) is first
        assert EngineScales.find(part) is first
        assert EngineScales.of(engine_config()) is not first

    def test_a_record_goes_with_its_layers(self) -> None:
        config = engine_config()
        layers = EngineScales.of(config)
        layers.enroll(NAME, 72, None)
        del layers
        assert EngineScales.find(config) is None

    def test_names_are_those_of_the_engine(
        self, engine: SimpleNamespace, tmp_path: Path
    ) -> None:
        engine.mm_encoder_fp8_scale_path = str(put_scales(tmp_path, *NAMES))
        found = required()
        whole, part = Engine(found), Engine(found, NAMES[:1])
        whole.layers.check_names(Settings())
        with pytest.raises(ScaleError, match=f"{NAMES[1]!r}.*is none of this model"):
            part.layers.check_names(Settings())
        skip = Settings(fp8_skip_layers=frozenset({"4"}))
        whole.layers.check_names(skip)
        with pytest.raises(NotServedError, match="names '4'"):
            part.layers.check_names(skip)

    def test_an_engine_reads_its_file_once(
        self,
        engine: SimpleNamespace,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        path = put_scales(tmp_path, *NAMES)
        engine.mm_encoder_fp8_scale_path = str(path)
        read, seen = scales.read, list[Path]()

        def counted(path: Path) -> scales.ScaleFile:
            seen.append(path)
            return read(path)

        monkeypatch.setattr(scales, "read", counted)
        for _ in range(2):
            layers = Engine(required()).layers
            for _ in NAMES:
                layers.check_names(Settings())
        # Each engine anew: calibrate may have made another file in between.
        assert seen == [path, path]

    def test_each_counts_and_saves_what_it_saw(
        self, engine: SimpleNamespace, tmp_path: Path
    ) -> None:
        engines = []
        for name in ("one.json", "two.json"):
            engine.mm_encoder_fp8_scale_save_path = str(tmp_path / name)
            engines.append(Engine(required()))
        one, two = engines
        one.states[0].history[0] = 1.0
        two.states[1].history[0] = 2.0
        for _ in range(15):
            one.step()
            two.step()
        two.layers.forget_dummies()
        assert one.states[0].history.any() and not two.states[1].history.any()
        one.step()
        two.step()
        assert list(scales.read(tmp_path / "one.json").layers) == [NAMES[0]]
        assert not (tmp_path / "two.json").exists()

    def test_the_worker_finds_its_own(
        self, engine: SimpleNamespace, tmp_path: Path
    ) -> None:
        from vllm_flashinfer_vit.patches import fp8_scales

        engine.mm_encoder_fp8_scale_save_path = str(tmp_path / "new.json")
        one, two = Engine(required()), Engine(required())
        forget, count = (
            patch.replace(lambda *args: args[1:]) for patch in fp8_scales.PATCHES
        )
        worker = SimpleNamespace(vllm_config=one.config)
        one.states[0].history[0] = two.states[0].history[0] = 3.0
        forget(worker)
        assert not one.states[0].history.any() and two.states[0].history.all(1).any()
        one.states[0].history[0] = 3.0
        for _ in range(16):
            assert count(worker, STEP) == (STEP,)
        assert scales.read(tmp_path / "new.json").layers[NAME].amax == (3.0, 3.0, 3.0)
        # A worker whose engine has no FP8 layer goes on as ever.
        other = SimpleNamespace(vllm_config=engine_config())
        assert (forget(other), count(other, STEP)) == ((), (STEP,))
