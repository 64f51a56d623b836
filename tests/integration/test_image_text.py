# SPDX-License-Identifier: Apache-2.0
"""Images prepared without a text that nothing reads: the same inputs for the engine."""

import sys
from pathlib import Path

import numpy as np
import pytest
import transformers
from _image_processors import applied_anew, build, drawn
from packaging.version import Version
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from make_checkpoint import byte_tokenizer, make_checkpoint  # noqa: E402
from vllm_flashinfer_vit.machine.versions import TESTED_VLLM, vllm_version  # noqa: E402
from vllm_flashinfer_vit.patches import image_text  # noqa: E402
from vllm_flashinfer_vit.patches.fingerprints import left_out  # noqa: E402
from vllm_flashinfer_vit.settings import ENV_DISABLE_PATCHES  # noqa: E402

pytestmark = pytest.mark.skipif(
    image_text.PATCH.name in left_out(), reason="this vLLM gives all processors a text"
)
SIZES = [(64, 96), (320, 320), (320, 320), (28, 500)]


def make_paddleocr_vl(folder: Path) -> None:
    end, image = "</s>", "<|IMAGE_PLACEHOLDER|>"
    special = {"image_token": image}
    kinds = {"eos_token": end, "pad_token": end, "extra_special_tokens": special}
    tokenizer = byte_tokenizer((image, end), **kinds)
    config = transformers.PaddleOCRVLConfig(
        image_token_id=tokenizer.convert_tokens_to_ids(image)
    )
    config.architectures = ["PaddleOCRVLForConditionalGeneration"]
    config.save_pretrained(folder)
    images = transformers.PaddleOCRVLImageProcessor()
    transformers.PaddleOCRVLProcessor(images, tokenizer).save_pretrained(folder)


MODELS = {
    "qwen3_vl": lambda folder: make_checkpoint(folder, "Qwen/Qwen3-VL-2B-Instruct"),
    "paddleocr_vl": make_paddleocr_vl,
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    """A folder with config, tokenizer and processor, as an engine reads it."""
    folder = tmp_path_factory.mktemp(request.param)
    MODELS[request.param](folder)
    is_tested = Version(vllm_version()).base_version in TESTED_VLLM
    if not is_tested and not image_text._is_read(type(build(folder))):
        pytest.skip("this vLLM's class may read the text")
    return folder


@pytest.fixture(autouse=True)
def applied():
    """Apply the patch and put all back, as it was before."""
    with applied_anew(image_text.PATCHES):
        yield


@pytest.fixture
def split(monkeypatch):
    """Each text that a tokenizer splits."""
    texts = []
    original = PreTrainedTokenizerBase.__call__

    def noting(self, text=None, *args, **kwargs):
        texts.append(text)
        return original(self, text, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", noting)
    return texts


def prepared(processor, sizes):
    """Return an engine's inputs, as plain data."""
    items = processor.info.parse_mm_data({"image": drawn(sizes)})
    prompt = [5, *[processor.info.get_hf_config().image_token_id] * len(sizes), 7]
    found = processor.apply(ProcessorInputs(prompt, items), TimingContext(False))
    data = found["mm_kwargs"].get_data()
    tensors = {name: (t.dtype, t.tolist()) for name, t in data.items()}
    return [
        tensors,
        *(found[n] for n in ("prompt_token_ids", "mm_hashes", "mm_placeholders")),
    ]


@pytest.mark.parametrize("sizes", [SIZES[:1], SIZES], ids=["one", "several"])
def test_the_same_inputs_without_splitting_a_text(checkpoint, sizes, split):
    processor = build(checkpoint)
    split.clear()
    found = prepared(processor, sizes)
    assert not split
    image_text.PATCH.revert()
    expected = prepared(processor, sizes)
    assert split
    assert found == expected
    assert len(found[1]) > len(sizes) + 2


@pytest.mark.parametrize(
    ("backend", "disabled"), [("TORCH_SDPA", ""), (None, ""), ("FLASHINFER", "on")]
)
def test_only_where_flashinfer_is_asked_for(
    checkpoint, backend, disabled, split, monkeypatch
):
    if disabled:
        monkeypatch.setenv(ENV_DISABLE_PATCHES, image_text.PATCH.name)
    processor = build(checkpoint, backend)
    split.clear()
    prepared(processor, SIZES[:1])
    assert split


def inputs_of(processor, data):
    """Return the inputs of a processor of Transformers."""
    items = processor.info.parse_mm_data(data)
    return processor._get_hf_mm_inputs(items, {}).hf_data


@pytest.mark.parametrize("name", [*image_text._READ])
def test_a_class_that_may_read_the_text_gets_it(checkpoint, name):
    processor = build(checkpoint)
    data = {"image": drawn(SIZES[:1])}
    assert "text" not in inputs_of(processor, data)
    cls = type(processor)

    def method(self, *args, **kwargs):
        return getattr(cls, name)(self, *args, **kwargs)

    processor.__class__ = type("Other", (cls,), {name: method})
    assert "text" in inputs_of(processor, data)


@pytest.mark.parametrize(
    "name", ["__call__", "prepare_inputs_layout", "validate_inputs"]
)
def test_a_processor_that_may_need_the_text_gets_it(checkpoint, name, monkeypatch):
    processor = build(checkpoint)
    cls = type(processor.info.get_hf_processor())

    def method(self, *args, **kwargs):
        return getattr(ProcessorMixin, name)(self, *args, **kwargs)

    monkeypatch.setattr(cls, name, method)
    assert "text" in inputs_of(processor, {"image": drawn(SIZES[:1])})


def test_videos_keep_the_text(tmp_path):
    MODELS["qwen3_vl"](tmp_path)
    processor = build(tmp_path)
    video = np.zeros((4, 64, 64, 3), np.uint8)
    metadata = {"fps": 2.0, "frames_indices": [0, 1, 2, 3], "total_num_frames": 4}
    data = {"image": drawn(SIZES[:1]), "video": [(video, metadata)]}
    assert {"text", "images", "videos"} <= set(inputs_of(processor, data))


def test_no_image_at_all(checkpoint):
    assert not inputs_of(build(checkpoint), {})
