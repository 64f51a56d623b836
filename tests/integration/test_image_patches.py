# SPDX-License-Identifier: Apache-2.0
"""Images and videos cut into patches: the bits of Transformers' own processors."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from vllm.multimodal.processing.context import InputProcessingContext
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_flashinfer_vit.models import image_patches
from vllm_flashinfer_vit.plugin import apply_fitting, revert_group
from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES

IMAGES = (
    "Qwen2VLImageProcessor",
    "Glm4vImageProcessor",
    "Glm46VImageProcessor",
    "Ernie4_5_VLMoeImageProcessor",
)
VIDEOS = ("Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor")
GENERATOR = np.random.default_rng(0)


def processor_class(name):
    """Return a class of Transformers that has a method of its own for patches."""
    found = getattr(transformers, name, None)
    if found is None or "patchify" not in vars(found):
        pytest.skip(f"Transformers {transformers.__version__} has no {name}.patchify")
    return found


@pytest.fixture
def own_method(monkeypatch):
    """Return a class's own method, which is put back after the test."""

    def put_back(cls):
        method = inspect.unwrap(vars(cls)["patchify"])
        monkeypatch.setattr(cls, "patchify", method)
        return method

    return put_back


def pixels(shape, dtype):
    """Return random pixels, `[..., C, H, W]`."""
    values = GENERATOR.integers(0, 256, shape, dtype=np.uint8)
    return torch.from_numpy(values).to(dtype)


def channels_side_by_side(x):
    """Return the same values as a picture's file has them."""
    return x.movedim(-3, -1).contiguous().movedim(-1, -3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize(
    ("name", "leading"),
    [*((name, (2,)) for name in IMAGES), *((name, (2, 3)) for name in VIDEOS)],
)
def test_bits_are_the_processors_own(name, leading, patch, dtype, own_method):
    original = own_method(processor_class(name))
    served = image_patches._by_runs(original)
    planes = pixels((*leading, 3, 4 * patch, 6 * patch), dtype)
    layouts = {
        "planes": planes,
        "channels side by side": channels_side_by_side(planes),
        "a part": pixels((*leading, 3, 4 * patch, 7 * patch), dtype)[..., : 6 * patch],
    }
    for layout, x in layouts.items():
        sizes = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
        theirs, *grid = original(None, x, **sizes)
        ours, *found = served(None, x, **sizes)
        assert found == grid, layout
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), layout
        assert ours.is_contiguous()


def test_a_whole_image_processor(own_method):
    cls = processor_class("Qwen2VLImageProcessor")
    original = own_method(cls)
    processor = cls(patch_size=16, size={"shortest_edge": 1024, "longest_edge": 2**20})
    images = [
        Image.fromarray(GENERATOR.integers(0, 256, (h, w, 3), dtype=np.uint8))
        for h, w in ((96, 160), (70, 333), (96, 160), (1, 150))
    ]
    for how in ({}, {"do_rescale": False, "do_normalize": False}):
        cls.patchify = original
        theirs = processor(images=images, return_tensors="pt", **how)
        image_patches.serve(SimpleNamespace(image_processor=processor))
        assert vars(cls)["patchify"] is not original
        ours = processor(images=images, return_tensors="pt", **how)
        assert torch.equal(ours["pixel_values"], theirs["pixel_values"])
        assert torch.equal(ours["image_grid_thw"], theirs["image_grid_thw"])


def test_what_does_not_fit_a_grid_fails_as_ever(own_method):
    original = own_method(processor_class("Qwen2VLImageProcessor"))
    served = image_patches._by_runs(original)
    x = pixels((1, 3, 33, 64), torch.uint8)
    with pytest.raises(RuntimeError, match="invalid for input of size") as theirs:
        original(None, x, 16, 2, 2)
    with pytest.raises(RuntimeError, match="invalid for input of size") as ours:
        served(None, x, 16, 2, 2)
    assert str(ours.value) == str(theirs.value)


def other_order(self, images, patch_size, merge_size, temporal_patch_size):
    cls = processor_class("Qwen2VLImageProcessor")
    method = inspect.unwrap(vars(cls)["patchify"])
    patches, *grid = method(self, images, patch_size, merge_size, temporal_patch_size)
    return patches.flip(-1), *grid


def other_arguments(self, images, patch_size):
    return images, patch_size


def needs_its_processor(self, images, patch_size, merge_size, temporal_patch_size):
    return self.cut(images)


@pytest.mark.parametrize("method", [other_order, other_arguments, needs_its_processor])
def test_other_processors_are_left_alone(method):
    cls = type("Processor", (), {"patchify": method})
    image_patches.serve(SimpleNamespace(image_processor=cls(), video_processor=None))
    assert cls.patchify is method


@pytest.fixture
def patched():
    """Apply the patch; put all back."""
    was_applied = [patch.applied for patch in image_patches.PATCHES]
    assert not apply_fitting(image_patches.PATCHES)
    yield
    if not all(was_applied):
        revert_group(image_patches.PATCHES)


@pytest.mark.parametrize(
    ("backend", "disabled", "is_served"),
    [("FLASHINFER", "", True), ("FLASH_ATTN", "", False), (None, "", False)]
    + [("FLASHINFER", "image-patches", False)],
)
@pytest.mark.usefixtures("patched")
def test_only_where_flashinfer_is_asked_for(
    backend, disabled, is_served, monkeypatch, own_method
):
    cls = processor_class("Qwen2VLImageProcessor")
    original = own_method(cls)
    if disabled:
        monkeypatch.setenv(ENV_DISABLE_PATCHES, disabled)
    processor = SimpleNamespace(image_processor=cls())
    monkeypatch.setattr(
        "vllm.multimodal.processing.context.cached_processor_from_config",
        lambda *args, **kwargs: processor,
    )
    monkeypatch.setattr(
        InputProcessingContext, "get_merged_mm_kwargs", lambda self, kwargs: kwargs
    )
    asked = AttentionBackendEnum[backend] if backend else None
    multimodal = SimpleNamespace(mm_encoder_attn_backend=asked)
    config = SimpleNamespace(multimodal_config=multimodal)
    context = InputProcessingContext(config, tokenizer=None)
    assert context.get_hf_processor(object) is processor
    assert (vars(cls)["patchify"] is not original) == is_served
