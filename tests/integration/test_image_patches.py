# SPDX-License-Identifier: Apache-2.0
"""Images and videos cut into patches: the bits of Transformers' own processors."""

import inspect
from types import SimpleNamespace
from unittest import mock

import cv2
import numpy as np
import pytest
import torch
import transformers
from _image_processors import applied_anew
from PIL import Image
from vllm.multimodal.processing.context import InputProcessingContext
from vllm.utils.torch_utils import set_default_torch_num_threads
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_flashinfer_vit.patches import image_patches
from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES, Settings

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


def own_method(cls):
    """Return a class's own method, whoever has replaced it."""
    return inspect.unwrap(vars(cls)["patchify"])


@pytest.fixture(autouse=True)
def applied():
    """Apply the patch and put all back, as it was before."""
    # As vLLM gives a processor; more, and its own method cuts.
    with applied_anew(image_patches.PATCHES), set_default_torch_num_threads(1):
        yield


def pixels(*shape):
    """Return random bytes, `[..., C, H, W]`."""
    return torch.from_numpy(GENERATOR.integers(0, 256, shape, dtype=np.uint8))


def channels_side_by_side(x):
    """Return the same values as a picture's file has them."""
    return x.movedim(-3, -1).contiguous().movedim(-1, -3)


@pytest.mark.parametrize("sizes", [(14, 2, 2), (16, 2, 2), (8, 1, 3), (4, 3, 1)])
@pytest.mark.parametrize(
    ("name", "leading"),
    [*((name, (2,)) for name in IMAGES), *((name, (2, 5)) for name in VIDEOS)],
)
def test_bits_are_the_processors_own(name, leading, sizes):
    original = own_method(processor_class(name))
    served = image_patches._by_runs(original)
    side = sizes[0] * sizes[1]
    for channels in (1, 3, 4):
        planes = pixels(*leading, channels, 2 * side, 3 * side)
        wide = pixels(*leading, channels, 2 * side, 4 * side)
        layouts = {
            "planes": planes,
            "channels side by side": channels_side_by_side(planes),
            "a part": wide[..., : 3 * side],
            "a part of those": channels_side_by_side(wide)[..., : 3 * side],
        }
        for layout, x in layouts.items():
            theirs, *grid = original(None, x, *sizes)
            ours, *found = served(None, x, *sizes)
            assert found == grid, layout
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), layout
            assert ours.is_contiguous()


def test_a_whole_image_processor():
    cls = processor_class("Qwen2VLImageProcessor")
    original = vars(cls)["patchify"]
    processor = cls(patch_size=16, size={"shortest_edge": 1024, "longest_edge": 2**20})
    images = [
        Image.fromarray(GENERATOR.integers(0, 256, (h, w, 3), dtype=np.uint8))
        for h, w in ((96, 160), (70, 333), (96, 160), (1, 150))
    ]
    how = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}
    theirs = processor(images=images, **how)
    image_patches.serve(SimpleNamespace(image_processor=processor))
    assert vars(cls)["patchify"] is not original
    ours = processor(images=images, **how)
    assert ours["pixel_values"].dtype == torch.uint8
    assert torch.equal(ours["pixel_values"], theirs["pixel_values"])
    assert torch.equal(ours["image_grid_thw"], theirs["image_grid_thw"])


def recorded(self, images, patch_size, merge_size, temporal_patch_size=2):
    return "the processor's own", images.shape


@pytest.mark.parametrize(
    "images",
    [
        pixels(1, 3, 16, 16).float(),
        pixels(1, 3, 16, 16).to("meta"),
        pixels(0, 3, 16, 16),
        pixels(1, 3, 16, 12),
        pixels(1, 3, 12, 16),
    ],
    ids=["normalised", "on a device", "none", "of another width", "height"],
)
def test_the_processors_own_method_cuts_the_rest(images):
    served = image_patches._by_runs(recorded)
    found = served(None, images=images, patch_size=4, merge_size=2)
    assert found == ("the processor's own", images.shape)


def test_with_several_threads_the_processors_own_method_cuts(monkeypatch):
    served = image_patches._by_runs(recorded)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert served(None, pixels(1, 3, 16, 16), 4, 2)[0] != "the processor's own"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert served(None, pixels(1, 3, 16, 16), 4, 2)[0] == "the processor's own"
    # A trial is of what fewer threads cut by.
    assert not image_patches._fits(other_order)


@pytest.mark.parametrize(
    ("x", "temporal", "is_once"),
    [
        (pixels(1, 3, 16, 16), 2, True),
        (pixels(1, 3, 16, 16), 1, False),
        (pixels(1, 3, 16, 16), 3, False),
        (pixels(1, 3, 16, 16).float(), 2, False),
        (pixels(1, 4, 3, 16, 16), 2, False),
    ],
    ids=["an image", "one frame", "three frames", "normalised", "a video"],
)
def test_which_images_are_once_in_their_patches(x, temporal, is_once):
    original = own_method(processor_class("Qwen2VLImageProcessor"))
    served = image_patches._by_runs(original)
    whole, *_ = served(None, x, 4, 2, temporal)
    frame = image_patches.Frame()
    token = image_patches.ONE_FRAME.set(frame)
    try:
        found, *_ = served(None, x, 4, 2, temporal)
    finally:
        image_patches.ONE_FRAME.reset(token)
    assert frame.shape == ((3, 1, 4, 4) if is_once else None)
    if is_once:
        whole = whole.unflatten(-1, (3, 2, 16))[..., 0, :].flatten(-2)
    assert torch.equal(found, whole)


def test_a_default_of_the_processors_own_method_counts():
    served = image_patches._by_runs(recorded)
    patches, rows, columns = served(None, pixels(1, 3, 16, 16), 4, merge_size=2)
    assert patches.shape == (1, 16, 3 * 2 * 16) and (rows, columns) == (4, 4)


def qwen(self, images, *sizes):
    return own_method(processor_class("Qwen2VLImageProcessor"))(self, images, *sizes)


def other_order(self, images, patch_size, merge_size, temporal_patch_size):
    patches, *grid = qwen(self, images, patch_size, merge_size, temporal_patch_size)
    return patches.flip(-1), *grid


def other_sizes(self, images, patch_size, merge_size, temporal_patch_size):
    return qwen(self, images, merge_size, patch_size, temporal_patch_size)


def other_dtype(self, images, patch_size, merge_size, temporal_patch_size):
    images = images.float()
    return qwen(self, images, patch_size, merge_size, temporal_patch_size)


def other_grid(self, images, patch_size, merge_size, temporal_patch_size):
    patches, *grid = qwen(self, images, patch_size, merge_size, temporal_patch_size)
    return patches, *reversed(grid)


def other_arguments(self, images, patch_size):
    return images, patch_size


def other_names(self, images, patch, merge, temporal):
    return qwen(self, images, patch, merge, temporal)


def needs_its_processor(self, images, patch_size, merge_size, temporal_patch_size):
    return self.cut(images)


@pytest.mark.parametrize(
    "method",
    [other_order, other_sizes, other_dtype, other_grid, other_arguments]
    + [other_names, needs_its_processor],
)
def test_other_processors_are_left_alone(method):
    cls = type("Processor", (), {"patchify": method})
    image_patches.serve(SimpleNamespace(image_processor=cls(), video_processor=None))
    assert cls.patchify is method


@pytest.mark.parametrize("name", ["Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"])
def test_an_opencv_that_splits_otherwise_is_not_used(name, monkeypatch):
    original = own_method(processor_class(name))
    image_patches._fits.cache_clear()
    assert image_patches._fits(original)
    for split in (lambda pixels, into: into, None):
        monkeypatch.setattr(cv2, "split", split)
        image_patches._fits.cache_clear()
        assert not image_patches._fits(original)
    monkeypatch.undo()
    image_patches._fits.cache_clear()


def test_a_class_is_served_once_and_put_back():
    cls = processor_class("Qwen2VLImageProcessor")
    original = vars(cls)["patchify"]
    # It inherits the method.
    processor = SimpleNamespace(image_processor=type("Derived", (cls,), {})())
    with mock.patch.object(image_patches.logger, "info_once") as said:
        for _ in range(2):
            image_patches.serve(processor)
            assert vars(cls)["patchify"].__wrapped__ is original
    assert [call.args[1] for call in said.call_args_list] == [cls.__name__]
    image_patches.PATCH.revert()
    assert vars(cls)["patchify"] is original
    assert not image_patches.PATCH.applied


@pytest.mark.parametrize(
    ("backend", "disabled", "is_served"),
    [("FLASHINFER", "", True), ("FLASH_ATTN", "", False), (None, "", False)]
    + [("FLASHINFER", "image-patches", False)],
)
def test_only_where_flashinfer_is_asked_for(backend, disabled, is_served, monkeypatch):
    cls = processor_class("Qwen2VLImageProcessor")
    original = vars(cls)["patchify"]
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


def test_an_image_does_not_wait_for_all_settings(monkeypatch):
    monkeypatch.setattr(Settings, "from_env", pytest.fail)
    monkeypatch.setenv(ENV_DISABLE_PATCHES, "image-text, image-frames")
    multimodal = SimpleNamespace(
        mm_encoder_attn_backend=AttentionBackendEnum.FLASHINFER
    )
    config = SimpleNamespace(multimodal_config=multimodal)
    names = "image-patches", "image-frames", "image-text"
    asked = [image_patches.is_asked_for(config, name) for name in names]
    assert asked == [True, False, False]


def test_formats_are_loaded_before_the_first_image(monkeypatch):
    loaded = []
    monkeypatch.setattr(Image, "init", lambda: loaded.append(True))
    image_patches.serve(SimpleNamespace())
    assert loaded == [True]
