# SPDX-License-Identifier: Apache-2.0
"""What a layer does when it is built: whom it serves, what it patches, what it says."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _encoders import DENSE, PACKED, programs_of
from _layers import HEAD_DIM, build
from _models import engine
from _towers import FAMILIES, cpu_only, small_tower
from torch import nn
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_flashinfer_vit import plugin
from vllm_flashinfer_vit.choices.lookup import Choice
from vllm_flashinfer_vit.choices.usable import NotServedError
from vllm_flashinfer_vit.models import transformers_towers
from vllm_flashinfer_vit.ops.batch import Turning
from vllm_flashinfer_vit.patches import encoder_graphs, fp8_scales, image_patches
from vllm_flashinfer_vit.patches.fingerprints import left_out
from vllm_flashinfer_vit.patches.patch import PatchError
from vllm_flashinfer_vit.settings import (
    ENV_DISABLE_PATCHES,
    ENV_STRICT,
    ENV_TUNED_DIR,
    Settings,
)
from vllm_flashinfer_vit.towers.tower import Tower

pytestmark = cpu_only

MODEL_PATCHES = [p for p in plugin.all_patches() if not p.name.startswith("select-")]


@pytest.fixture(scope="module")
def flashinfer() -> Tower:
    return engine("FLASHINFER")


@pytest.fixture
def unpatched(flashinfer: Tower) -> Iterator[None]:
    """Begin without model patches, and leave them applied."""
    dtype = torch.get_default_dtype()
    plugin.revert_all()
    plugin.apply_platform_patches()
    yield
    # vLLM's context manager leaves it changed after an error.
    torch.set_default_dtype(dtype)
    plugin.apply_model_patches(Settings())


def layers_of(module: nn.Module) -> list[Any]:
    from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention

    return [m for m in module.modules() if isinstance(m, FlashInferViTAttention)]


@pytest.mark.usefixtures("unpatched")
class TestRotary:
    """Who turns q and k; the first layer of a process is built before any patch."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_warm_up_is_of_what_calls_the_layers(
        self, family: str, flashinfer: Tower, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm_flashinfer_vit.engine import warmup

        qwen = layers_of(small_tower(family).visual)
        others = self.layers(flashinfer, "llava_onevision2")
        assert qwen and others
        ran: list[tuple[bool, torch.dtype | None]] = []

        def attend(is_programmed: bool, batch: Any) -> None:
            assert (batch.cos is None) is (batch.sin is None)
            turned = None if batch.cos is None else batch.cos.dtype
            ran.append((is_programmed, turned))

        # What a warm-up makes on a GPU.
        for name in ("zeros", "ones", "full"):
            monkeypatch.setattr(torch, name, on_cpu(getattr(torch, name)))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        for is_programmed, layers in ((True, qwen), (False, others)):
            with flashinfer.running():
                warm_up = warmup.WarmUp(flashinfer.vllm_config)
                for layer in layers:
                    monkeypatch.setattr(layer, "attend", partial(attend, is_programmed))
                    warm_up.run(layer)
        assert set(ran) == {(True, torch.float32), (False, None)}

    def layers(self, tower: Tower, name: str) -> list[Any]:
        """Return the attention layers of an encoder, built within a tower's engine."""
        encoder = {**PACKED, **DENSE}[name]
        try:
            with tower.running():
                module, _ = encoder.build(encoder.load())
        except (ImportError, NotImplementedError) as error:
            pytest.skip(f"not in this vLLM, or its transformers: {error}")
        return layers_of(module)

    @pytest.mark.parametrize(
        "name, expected",
        [
            ("glm4_1v", (torch.bfloat16, False)),
            ("ernie45_vl", (torch.float32, False)),
            ("kimi_k25", (torch.float32, True)),
            ("pixtral", (torch.float32, True)),
            ("pixtral_hf", (torch.bfloat16, False)),
            ("keye", (torch.float32, False)),
            ("siglip2navit", (torch.float32, False)),
            # Turned in front of attention, or never.
            ("glm_ocr", None),
            ("siglip", None),
        ],
    )
    def test_what_programs_hand_to_attention(
        self, name: str, expected: tuple[torch.dtype, bool] | None
    ) -> None:
        tower = small_tower("qwen3_vl", dtype=torch.bfloat16)
        with set_default_torch_dtype(torch.bfloat16):
            layers = self.layers(tower, name)
        whole = None
        if expected is not None and programs_of(name):
            whole = Turning(expected[0], layers[0].head_size, expected[1])
        assert {layer.turning for layer in layers} == {whole}

    def test_a_program_that_turns_a_part_of_a_head(self) -> None:
        """78 of MiniMax-M3's 80 values; where this vLLM has it."""
        tower = small_tower("qwen3_vl", dtype=torch.bfloat16)
        with set_default_torch_dtype(torch.bfloat16):
            layers = self.layers(tower, "minimax_m3")
        assert {layer.turning for layer in layers} == {Turning(torch.float32, 78)}

    @pytest.mark.parametrize("family", FAMILIES)
    def test_not_where_the_patch_is_left_out(
        self, family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = [p.name for p in MODEL_PATCHES if p.name.endswith("-blocks")]
        monkeypatch.setenv(ENV_DISABLE_PATCHES, ",".join(names))
        layers = layers_of(small_tower(family).visual)
        assert layers
        assert not any(layer.turning for layer in layers)


def on_cpu(make: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        return make(*args, **{**kwargs, "device": "cpu"})

    return made


@pytest.mark.usefixtures("unpatched")
class TestPatches:
    def test_a_layer_by_itself_patches_nothing(
        self, flashinfer: Tower, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm_flashinfer_vit.engine.hooks import Hooks
        from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention

        monkeypatch.setattr(FlashInferViTAttention, "hooks", Hooks())
        assert type(build(flashinfer)) is FlashInferViTAttention
        assert not any(patch.applied for patch in MODEL_PATCHES)

    @pytest.mark.parametrize("strict", [False, True])
    def test_one_that_does_not_fit(
        self,
        strict: bool,
        flashinfer: Tower,
        messages: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        patch = next(p for p in MODEL_PATCHES if p.name == "qwen2_vl-blocks")
        monkeypatch.setattr(patch, "parameters", ("self", "y"))
        monkeypatch.setenv(ENV_STRICT, str(int(strict)))
        if strict:
            with pytest.raises(PatchError, match="qwen2_vl-blocks"):
                build(flashinfer)
        else:
            # Every layer finds it.
            assert layers_of(build(flashinfer)) and layers_of(build(flashinfer))
            (line,) = [line for line in messages if "leaves a patch out" in line]
            assert (
                f"patch qwen2_vl-blocks does not fit this vLLM: {patch.target}" in line
            )
            assert f"Without it: {patch.why}" in line
            loaded = {p.name for p in plugin._MODEL_PATCHES if p.loaded}
            applied = {p.name for p in MODEL_PATCHES if p.applied}
            assert loaded - applied - left_out() == {patch.name}
        assert not patch.applied

    def test_a_newer_vllm_is_served_and_told(
        self,
        flashinfer: Tower,
        messages: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(plugin, "vllm_version", lambda: "0.99.0.dev1")
        for _ in range(2):
            assert layers_of(build(flashinfer))
        (line,) = [line for line in messages if "newer than those" in line]
        assert "vLLM 0.99.0.dev1" in line

    def test_one_that_an_earlier_engine_runs_with(
        self,
        flashinfer: Tower,
        messages: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        told = f"{ENV_DISABLE_PATCHES} comes too late for qwen2_vl-blocks: "
        build(flashinfer)
        assert not any(told in line for line in messages)
        monkeypatch.setenv(ENV_DISABLE_PATCHES, "qwen2_vl-blocks,add_norm")
        build(flashinfer)
        assert sum(told in line for line in messages) == 1

    @pytest.mark.parametrize("strict", [False, True])
    def test_a_selection_that_does_not_fit(
        self,
        strict: bool,
        flashinfer: Tower,
        messages: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from vllm.model_executor.custom_op import op_registry_oot
        from vllm.model_executor.layers.attention import MMEncoderAttention

        from vllm_flashinfer_vit.engine.layer import FlashInferViTAttention
        from vllm_flashinfer_vit.patches import platform

        plugin.revert_all()
        for patch in platform.PATCHES:
            monkeypatch.setattr(patch, "parameters", ("cls", "head_size", "backend"))
        monkeypatch.setenv(ENV_STRICT, str(int(strict)))
        hooks = FlashInferViTAttention.hooks
        monkeypatch.setattr(FlashInferViTAttention, "hooks", hooks)
        monkeypatch.delitem(op_registry_oot, "MMEncoderAttention")
        if strict:
            with pytest.raises(PatchError, match="patch select-cpu does not fit"):
                plugin.register()
        else:
            plugin.register()
            told = "cannot serve FLASHINFER: patch select-cpu does not fit this vLLM"
            assert sum(told in line for line in messages) == 1
            with pytest.raises(NotServedError, match=f"layer 'a.layer': .*{told}"):
                build(flashinfer)
            assert type(build(engine("TORCH_SDPA"))) is MMEncoderAttention
        monkeypatch.undo()
        assert plugin.apply_platform_patches() is None

    @pytest.mark.parametrize("strict", [False, True])
    def test_a_module_of_early_patches_that_is_missing(
        self, strict: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(image_patches, "MODULE", "vllm.multimodal.no_such_module")
        monkeypatch.setenv(ENV_STRICT, str(int(strict)))
        told = "patch image-patches does not fit this vLLM: No module named"
        if strict:
            with pytest.raises(PatchError, match=told):
                plugin.apply_early_patches()
        else:
            (error,) = plugin.apply_early_patches()
            assert str(error).startswith(told)
        # The others are in place.
        assert all(patch.applied for patch in transformers_towers.PATCHES)

    def test_padding_that_was_asked_for_and_does_not_fit(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (patch,) = encoder_graphs.PATCHES
        monkeypatch.setattr(patch, "parameters", ("self",))
        with pytest.raises(PatchError, match="encoder-graphs"):
            plugin.apply_graph_patches()

    @pytest.mark.parametrize("strict", [False, True])
    def test_one_of_fp8_that_does_not_fit(
        self, strict: bool, messages: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import vllm.v1.worker.gpu_worker  # noqa: F401

        patch, other = fp8_scales.PATCHES
        monkeypatch.setattr(patch, "parameters", ("self", str(strict)))
        if strict:
            with pytest.raises(PatchError, match=patch.name):
                plugin.apply_fp8_patches(Settings(strict=True))
        else:
            plugin.apply_fp8_patches(Settings())
            (line,) = [line for line in messages if "leaves a patch out" in line]
            assert patch.name in line
        assert other.applied and not patch.applied

    @pytest.mark.parametrize(
        "left_out", [(), ("fp8-save-scales",), ("fp8-forget-dummies",)]
    )
    def test_those_of_fp8(self, left_out: tuple[str, ...]) -> None:
        import vllm.v1.worker.gpu_worker  # noqa: F401

        plugin.apply_fp8_patches(Settings(disabled_patches=frozenset(left_out)))
        names = {"fp8-save-scales", "fp8-forget-dummies"}
        applied = {p.name for p in MODEL_PATCHES if p.applied}
        assert applied & names == names - {*left_out}


@pytest.mark.usefixtures("unpatched")
class TestServed:
    @pytest.fixture
    def nothing_runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm_flashinfer_vit.choices import resolve

        refused = {"triton": "triton: needs another GPU"}
        monkeypatch.setattr(resolve, "usable_choices", lambda *_, **__: ((), refused))
        # Answers are kept by their arguments, of which this is one.
        monkeypatch.setenv(ENV_TUNED_DIR, str(tmp_path))

    def test_nothing_can(
        self, flashinfer: Tower, nothing_runs: None, messages: list[str]
    ) -> None:
        from vllm.model_executor.layers.attention import MMEncoderAttention

        for _ in range(2):
            assert type(build(flashinfer)) is MMEncoderAttention
        (line,) = [line for line in messages if "FLASHINFER was asked for" in line]
        assert "needs another GPU" in line
        assert "vLLM's own kernel runs instead" in line
        assert not any(patch.applied for patch in MODEL_PATCHES)

    def test_nothing_can_and_strict(
        self,
        flashinfer: Tower,
        nothing_runs: None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv(ENV_STRICT, "1")
        with pytest.raises(NotServedError, match="'a.layer'.*needs another GPU"):
            build(flashinfer)

    def test_each_folder_of_tables_has_its_answer(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flashinfer: Tower
    ) -> None:
        from vllm_flashinfer_vit.choices import resolve
        from vllm_flashinfer_vit.engine import selection

        asked: list[Path] = []

        def usable(
            stack: Any, head_dim: int, dtype: Any, forced: Any, folder: Path, **_
        ):
            asked.append(folder)
            return (Choice("reference", None, folder.name),), {}

        monkeypatch.setattr(resolve, "usable_choices", usable)
        for name in ("one", "other", "one"):
            monkeypatch.setenv(ENV_TUNED_DIR, str(tmp_path / name))
            settings = Settings.from_env()
            with flashinfer.running():
                (choice,) = selection.served(HEAD_DIM, torch.float32, settings)
            assert choice.reason == name
        assert asked == [tmp_path / "one", tmp_path / "other"]

    def test_what_is_said(
        self, flashinfer: Tower, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm_flashinfer_vit.engine import layer as module

        messages: list[str] = []

        def say(text: str, *values: object) -> None:
            messages.append(text % values)

        # Whatever level this vLLM logs, and whatever was said before.
        logger = SimpleNamespace(info_once=say, warning_once=say)
        monkeypatch.setattr(module, "logger", logger)
        choices = (
            Choice("reference", 77, "a test of short ones"),
            Choice("reference", None, "a test of long ones"),
        )
        monkeypatch.setattr(module, "served", lambda *_: choices)
        monkeypatch.setenv("VLLM_FLASHINFER_VIT_KERNAL", "auto")
        build(flashinfer)
        monkeypatch.setattr(module, "served", lambda *_: choices[1:])
        build(flashinfer)
        served = " (head dim 16, torch.float32) are served by reference: a test of "
        assert any(f"sequences of up to 77 tokens{served}short" in m for m in messages)
        assert any(f"longer sequences{served}long" in m for m in messages)
        assert any(f"all sequences{served}long" in m for m in messages)
        assert any("VLLM_FLASHINFER_VIT_KERNAL has no effect" in m for m in messages)


class TestFp8WithoutFlashInfer:
    """It is vLLM's to judge, which differs between versions."""

    def test_as_in_stock(
        self, messages: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.model_executor.layers.attention import MMEncoderAttention

        from vllm_flashinfer_vit.engine import layer as module

        tower = engine("TORCH_SDPA")
        multimodal = tower.vllm_config.model_config.multimodal_config
        monkeypatch.setattr(multimodal, "mm_encoder_attn_dtype", "fp8")
        said: list[str] = []
        logger = SimpleNamespace(warning_once=lambda text, *args: said.append(text))
        monkeypatch.setattr(module, "logger", logger)
        errors = []
        for make in (build, self.build_stock):
            with pytest.raises(ValueError) as error:
                make(tower)
            errors.append(str(error.value))
        # On a CPU, vLLM refuses it.
        assert errors[0] == errors[1]
        monkeypatch.setattr(MMEncoderAttention, "_init_fp8_state", lambda self: None)
        layer = build(tower)
        assert type(layer) is MMEncoderAttention
        assert layer._forward_method.__func__ is MMEncoderAttention.forward_cpu
        assert said and "--mm-encoder-attn-backend FLASHINFER" in said[0]
        assert "--mm-encoder-attn-dtype fp8" in said[0]

    def build_stock(self, tower: Tower) -> Any:
        from vllm.model_executor.custom_op import op_registry_oot

        with pytest.MonkeyPatch.context() as context:
            context.delitem(op_registry_oot, "MMEncoderAttention")
            return build(tower)


def test_a_skipped_fp8_layer_without_a_kernel_is_an_error_of_ours(
    flashinfer: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own layer would be refused by the backend that models are told."""
    from vllm_flashinfer_vit.choices.usable import NotServedError
    from vllm_flashinfer_vit.engine import layer

    monkeypatch.setattr(layer.fp8, "requested", lambda: True)
    monkeypatch.setattr(layer.fp8, "policy_for", lambda *args: None)
    monkeypatch.setattr(layer, "served", lambda *args: None)
    with pytest.raises(NotServedError, match=r"layer 'a\.layer': .*has no kernel"):
        build(flashinfer, prefix="a.layer")
