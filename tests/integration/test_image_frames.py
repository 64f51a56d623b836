# SPDX-License-Identifier: Apache-2.0
"""Images sent once: half of the bytes, and the same batch for the encoder."""

import sys
from inspect import signature
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from _image_processors import applied_anew, build, drawn
from vllm.config import ModelConfig
from vllm.multimodal import inputs
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.utils.torch_utils import set_default_torch_num_threads
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from make_checkpoint import make_checkpoint  # noqa: E402
from vllm_flashinfer_vit.patches import image_frames, image_patches  # noqa: E402
from vllm_flashinfer_vit.patches.patch import apply_fitting, revert_group  # noqa: E402
from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES  # noqa: E402

pytestmark = pytest.mark.skipif(
    "mm_device_do_normalize" not in signature(ModelConfig).parameters,
    reason="this vLLM normalises all pixels before it sends them",
)
PATCHES = (*image_patches.PATCHES, *image_frames.PATCHES)
SIZES = [(64, 96), (320, 320), (320, 320), (32, 512)]
MODELS = ("Qwen2-VL-7B", "Qwen2.5-VL-7B", "Qwen3-VL-8B")


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    """A folder with config, tokenizer and processor, as an engine reads it."""
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(folder, f"Qwen/{request.param}-Instruct")
    items = prepared(build(folder, "TORCH_SDPA"), {"image": drawn(SIZES[:1])})
    if items[0][1]["pixel_values"].data.dtype != torch.uint8:
        pytest.skip("this vLLM normalises this model's pixels before it sends them")
    return folder


@pytest.fixture(autouse=True)
def applied():
    """Apply the patches and put all back, as it was before."""
    # As vLLM gives a processor.
    with applied_anew(PATCHES), set_default_torch_num_threads(1):
        yield


def prepared(processor, data):
    """Return the items that a request of an engine has, by their modality."""
    items = processor.info.parse_mm_data(data)
    found = processor._apply_hf_processor_main(items, {})
    config = processor._get_mm_fields_config(found, {})
    made = MultiModalKwargsItems.from_hf_inputs(found, config)
    return [(kind, item) for kind in made for item in made[kind]]


def sent(items):
    """Return items as another process gets them, and how many bytes they took."""
    encoder = MsgpackEncoder(size_threshold=1)
    decoder = MsgpackDecoder(MultiModalKwargsItem)
    found, size = [], 0
    for kind, item in items:
        buffers = encoder.encode(item)
        size += sum(memoryview(buffer).nbytes for buffer in buffers)
        found.append((kind, decoder.decode(buffers)))
    return found, size


def batches(items):
    """Return what the encoder gets, as plain data."""
    return [
        (kind, count, {name: (t.dtype, t.tolist()) for name, t in batch.items()})
        for kind, count, batch in group_and_batch_mm_kwargs(items, device="cpu")
    ]


def is_once(items):
    """Whether images have one frame."""
    (dims,) = {item["pixel_values"].data.dim() for _, item in items}
    assert dims in (2, 5)
    return dims == 5


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("sizes", [SIZES[:1], SIZES], ids=["one", "several"])
def test_half_of_the_bytes_and_the_same_batch(checkpoint, sizes, threads):
    processor, data = build(checkpoint), {"image": drawn(sizes)}
    with set_default_torch_num_threads(threads):
        items, size = sent(prepared(processor, data))
    revert_group(PATCHES)
    whole, whole_size = sent(prepared(processor, data))
    assert is_once(items) and not is_once(whole)
    assert size < 0.51 * whole_size
    apply_fitting(PATCHES)
    assert batches(items) == batches(whole)


def test_images_of_several_requests_are_one_batch(checkpoint):
    processor = build(checkpoint)
    requests = [[size] for size in SIZES], [SIZES]
    apart, together = (
        [i for sizes in of for i in prepared(processor, {"image": drawn(sizes)})]
        for of in requests
    )
    assert is_once(apart)
    ((_, count, batch),) = group_and_batch_mm_kwargs(apart, device="cpu")
    rows = sum(len(item["pixel_values"].data) for _, item in together)
    assert (count, batch["pixel_values"].shape[0]) == (len(SIZES), rows)


def test_a_device_gets_one_frame(checkpoint, monkeypatch):
    """The other one is made there."""
    moved = []
    original = inputs._nested_tensors_h2d

    def noting(data, *args, **kwargs):
        moved.append(data)
        return original(data, *args, **kwargs)

    monkeypatch.setattr(inputs, "_nested_tensors_h2d", noting)
    batches(prepared(build(checkpoint), {"image": drawn(SIZES)}))
    assert {data.dim() for data in moved if data.dtype == torch.uint8} == {5}


@pytest.mark.parametrize("is_first", [True, False])
def test_images_that_another_process_has_cut_twice(checkpoint, is_first):
    """They are one batch with those that are sent once."""
    processor, data = build(checkpoint), {"image": drawn(SIZES)}
    once = prepared(processor, data)
    image_frames.SENT.revert()
    whole = prepared(processor, data)
    assert is_once(once) and not is_once(whole)
    mixed = [*whole[:2], *once[2:]] if is_first else [*once[:2], *whole[2:]]
    assert batches(mixed) == batches(whole)


def test_bytes_and_floats_in_one_request(checkpoint):
    """Each image by itself may be either."""
    floats = np.random.default_rng(0).random((320, 320, 3), dtype=np.float32)
    processor, data = build(checkpoint), {"image": [*drawn(SIZES[:1]), floats]}
    found = prepared(processor, data)
    assert not is_once(found)
    revert_group(PATCHES)
    assert batches(found) == batches(prepared(processor, data))


def test_an_image_and_a_video_in_one_request(checkpoint):
    """The video is as it was."""
    video = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), np.uint8)
    frames = {"fps": 2.0, "frames_indices": [0, 1, 2, 3], "total_num_frames": 4}
    processor = build(checkpoint)
    data = {"image": drawn(SIZES[:1]), "video": [(video, frames)]}
    found = dict(prepared(processor, data))
    revert_group(PATCHES)
    whole = dict(prepared(processor, data))
    apply_fitting(PATCHES)
    videos = [items["video"]["pixel_values_videos"].data for items in (found, whole)]
    assert torch.equal(*videos)
    once, twice = ([("image", items["image"])] for items in (found, whole))
    assert is_once(once) and batches(once) == batches(twice)


@pytest.mark.parametrize(
    ("backend", "disabled"),
    [("TORCH_SDPA", "")] + [("FLASHINFER", patch.name) for patch in (*PATCHES,)],
)
def test_only_where_it_is_asked_for(checkpoint, backend, disabled, monkeypatch):
    monkeypatch.setenv(ENV_DISABLE_PATCHES, disabled)
    processor = build(checkpoint, backend)
    assert not is_once(prepared(processor, {"image": drawn(SIZES[:1])}))


def test_nothing_is_sent_that_would_not_be_received(checkpoint):
    image_frames.RECEIVED.revert()
    processor = build(checkpoint)
    assert not is_once(prepared(processor, {"image": drawn(SIZES[:1])}))


@pytest.mark.parametrize(
    "change",
    [lambda patches: patches.repeat(1, 2), lambda patches: patches.float() / 2],
    ids=["twice", "floats"],
)
def test_a_processor_that_does_more_with_its_patches(checkpoint, change, monkeypatch):
    """It gets them whole."""
    processor = build(checkpoint)
    data = {"image": drawn(SIZES)}
    cls = type(processor.info.get_hf_processor().image_processor)
    original = cls._preprocess

    def changed(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        found["pixel_values"] = change(found["pixel_values"])
        return found

    monkeypatch.setattr(cls, "_preprocess", changed)
    with mock.patch.object(image_frames.logger, "warning_once") as warned:
        found = prepared(processor, data)
    assert not is_once(found)
    name = type(processor.info.get_hf_processor()).__name__
    assert warned.call_args.args[1:] == (name, ENV_DISABLE_PATCHES, "image-frames")
    monkeypatch.setattr(cls, "_preprocess", original)
    revert_group(PATCHES)
    for (_, item), (_, expected) in zip(found, prepared(processor, data), strict=True):
        whole = expected["pixel_values"].data
        assert torch.equal(item["pixel_values"].data, change(whole))


def test_a_processor_that_fails_leaves_nothing_behind(checkpoint, monkeypatch):
    processor = build(checkpoint)
    cls = type(processor.info.get_hf_processor().image_processor)
    with monkeypatch.context() as patched:
        patched.setattr(cls, "_preprocess", None)
        with pytest.raises(ValueError, match="Failed to apply"):
            prepared(processor, {"image": drawn(SIZES[:1])})
    assert image_patches.ONE_FRAME.get() is None


def test_a_request_that_fails_after_its_images_is_no_reason_to_warn(
    checkpoint, monkeypatch
):
    processor = build(checkpoint)
    cls = type(processor.info.get_hf_processor().image_processor)
    original = cls._preprocess

    def fail(self, *args, **kwargs):
        original(self, *args, **kwargs)
        raise ValueError("no text for it")

    with monkeypatch.context() as patched:
        patched.setattr(cls, "_preprocess", fail)
        warned = mock.Mock()
        patched.setattr(image_frames.logger, "warning_once", warned)
        with pytest.raises(ValueError, match="Failed to apply"):
            prepared(processor, {"image": drawn(SIZES[:1])})
    warned.assert_not_called()


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(4, 3, 1, 8, 8),
        torch.zeros(4, 3, 2, 8, 8, dtype=torch.uint8),
        torch.zeros(4, 3, 1, 8, 6, dtype=torch.uint8),
        torch.zeros(4, 192, dtype=torch.uint8),
        [torch.zeros(4, 3, 1, 8, 8, dtype=torch.uint8)] * 2,
    ],
    ids=["floats", "frames", "no patches", "rows", "list"],
)
def test_other_data_is_left_alone(data):
    assert not image_frames._holds_one_frame(data)


def test_items_of_a_batch_are_no_patches():
    data = torch.zeros(4, 3, 1, 8, 8).byte()
    field = inputs.MultiModalBatchedField()
    elems = field.build_elems("image", "pixel_values", data)
    assert field.reduce_data(elems).shape == data.shape


def test_no_patches_at_all():
    assert image_frames._holds_one_frame(none := torch.zeros(0, 3, 1, 8, 8).byte())
    field = inputs.MultiModalFlatField(slices=[slice(0, 0)])
    (elem,) = field.build_elems("image", "pixel_values", none)
    assert field.reduce_data([elem]).shape == (0, 384)
