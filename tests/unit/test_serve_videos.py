# SPDX-License-Identifier: Apache-2.0
"""The videos that servers are asked for: what is written, and what vLLM makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import vllm
from _benchmarks import BENCHMARKS
from packaging.version import Version

from make_checkpoint import make_checkpoint
from serve_inputs import (
    IMAGE_WORKLOADS,
    TEMPORAL,
    WORKLOADS,
    Workload,
    image_tokens,
    write_dataset,
    write_videos,
)
from tower_cases import CASES, MODELS
from vllm_flashinfer_vit.towers.cpu_platform import use_cpu_platform
from vllm_flashinfer_vit.towers.spec import NAMED_MODELS

cv2 = pytest.importorskip("cv2", reason="OpenCV writes the videos")

assert BENCHMARKS.is_dir()
VIDEO = WORKLOADS["video"]
SMALL = Workload((((4, 6),),), frames=3)


def frames_of(path: Path) -> tuple[list[Any], float]:
    """Return the frames of a video, and how many a second it has."""
    capture = cv2.VideoCapture(str(path))
    frames = []
    while (read := capture.read())[0]:
        frames.append(read[1])
    return frames, capture.get(cv2.CAP_PROP_FPS)


def test_the_workload_is_a_case_of_towers() -> None:
    (grids,) = VIDEO.kinds
    assert CASES["video16x1024"] == tuple((VIDEO.frames, *grid) for grid in grids)
    assert VIDEO.is_video and "video" not in IMAGE_WORKLOADS
    assert set(IMAGE_WORKLOADS) < set(WORKLOADS)
    assert image_tokens(VIDEO, [1, 2]) == 2 * 4096


def test_videos_are_all_different(tmp_path: Path) -> None:
    path = tmp_path / "requests.json"
    write_videos(path, SMALL, 16, [3, 4])
    entries = json.loads(path.read_text())
    files = [tmp_path / f"video-{seed}.mp4" for seed in (3, 4)]
    assert [entry["video"] for entry in entries] == [file.as_uri() for file in files]
    first, second = (file.read_bytes() for file in files)
    assert first != second
    frames, rate = frames_of(files[0])
    assert rate == 2.0
    assert [frame.shape for frame in frames] == [(64, 96, 3)] * (TEMPORAL * 3)
    # The window moves.
    assert len({frame.tobytes() for frame in frames}) == len(frames)
    write_videos(path, SMALL, 16, [3])
    again, _ = frames_of(files[0])
    assert [f.tobytes() for f in again] == [f.tobytes() for f in frames]


def test_a_video_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="cannot write .*none/video-3.mp4"):
        write_videos(tmp_path / "none" / "requests.json", SMALL, 16, [3])


@pytest.mark.parametrize(
    "model",
    [
        # vLLM looks at each model in a process of its own, the first time.
        pytest.param(name, marks=() if "Qwen3" in name else pytest.mark.extended)
        for name in MODELS
    ],
)
def test_a_model_gets_the_frames_and_patches_of_the_case(
    model: str, tmp_path: Path
) -> None:
    if "Qwen3" in model and Version(vllm.__version__) < Version("0.33"):
        pytest.skip("this vLLM and Transformers refuse every video of Qwen3-VL")
    use_cpu_platform()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.media import MediaConnector
    from vllm.tokenizers import cached_tokenizer_from_config

    make_checkpoint(tmp_path, model)
    patch_size = NAMED_MODELS[model][1]["patch_size"]
    options = write_dataset(tmp_path, VIDEO, patch_size, [5])
    (entry,) = json.loads((tmp_path / "requests.json").read_text())
    engine = EngineArgs(model=str(tmp_path), max_model_len=16384, dtype="bfloat16")
    config = engine.create_model_config()
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    kind = type(processor.info.get_hf_processor().video_processor).__name__
    connector = MediaConnector(allowed_local_media_path=str(tmp_path))
    video = connector.fetch_video(entry["video"], video_processor=kind)
    place = "<|vision_start|><|video_pad|><|vision_end|>"
    found = processor(
        cached_tokenizer_from_config(config).encode(place),
        processor.info.parse_mm_data({"video": [video]}),
        hf_processor_mm_kwargs=json.loads(options[-1])["mm_processor_kwargs"],
    )
    (item,) = found["mm_kwargs"]["video"]
    assert tuple(item["video_grid_thw"].data.tolist()) == CASES["video16x1024"][0]
    (tokens,) = found["mm_placeholders"]["video"]
    assert tokens.get_num_embeds() == image_tokens(VIDEO, [5])
