# SPDX-License-Identifier: Apache-2.0
"""Who is told of encoder CUDA graphs, and that what is said of them was measured."""

import csv
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _towers import FAMILIES, cpu_only, small_tower

from vllm_flashinfer_vit.engine import advice
from vllm_flashinfer_vit.engine.advice import FLAG, SPEED_UP, graphs_off, ignored
from vllm_flashinfer_vit.machine.versions import ENV_V2_RUNNER
from vllm_flashinfer_vit.settings import ENV_FP8_SCALES, ENV_FP8_SKIP_LAYERS

ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "eager.csv"


@pytest.fixture
def config_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return vLLM's configuration of a model on a GPU, as far as graphs go."""
    monkeypatch.delenv(ENV_V2_RUNNER, raising=False)

    def config_of(family: str = "qwen2_vl", v2: bool = False) -> Any:
        config = small_tower(family).vllm_config
        from vllm.config import CUDAGraphMode

        mode = CUDAGraphMode.FULL_AND_PIECEWISE
        monkeypatch.setattr(config.compilation_config, "cudagraph_mode", mode)
        monkeypatch.setattr(type(config), "use_v2_model_runner", v2)
        return config

    return config_of


@cpu_only
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_that_are_off(family: str, config_of: Callable[..., Any]) -> None:
    text = graphs_off(config_of(family))
    assert text is not None
    assert text.endswith(f"add {FLAG}.")


@cpu_only
class TestNothingToSay:
    def test_graphs_that_are_on(self, config_of: Callable[..., Any]) -> None:
        config = config_of()
        config.compilation_config.cudagraph_mm_encoder = True
        assert graphs_off(config) is None

    def test_no_graphs_are_wanted(self, config_of: Callable[..., Any]) -> None:
        from vllm.config import CUDAGraphMode

        config = config_of()
        config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        assert graphs_off(config) is None

    def test_videos_are_pruned(self, config_of: Callable[..., Any]) -> None:
        config = config_of("qwen3_vl")
        config.model_config.multimodal_config.video_pruning_rate = 0.5
        assert graphs_off(config) is None

    @pytest.mark.parametrize("found", [object, ValueError("no such architecture")])
    def test_no_model_with_graphs(
        self,
        found: Any,
        config_of: Callable[..., Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        config = config_of()
        from vllm.model_executor.model_loader import utils

        def get_model_cls(model: object) -> type:
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(utils, "get_model_cls", get_model_cls)
        assert graphs_off(config) is None

    def test_no_model(self) -> None:
        assert graphs_off(SimpleNamespace(model_config=None)) is None


@cpu_only
@pytest.mark.parametrize(
    ("v2", "release", "named"),
    [(True, "0.25.1", True), (True, "0.33.0", False), (False, "0.25.1", False)],
)
def test_a_runner_without_graphs_is_named(
    v2: bool,
    release: str,
    named: bool,
    config_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(advice, "vllm_version", lambda: release)
    text = graphs_off(config_of(v2=v2))
    assert text is not None
    assert (f"set {ENV_V2_RUNNER}=0" in text) is named


@cpu_only
def test_a_vllm_with_a_single_runner(
    config_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    monkeypatch.setattr(advice, "vllm_version", lambda: "99.0")
    monkeypatch.delattr(type(config), "use_v2_model_runner")
    text = graphs_off(config)
    assert text is not None and text.endswith(f"add {FLAG}.")
    config.compilation_config.cudagraph_mm_encoder = True
    assert not list(ignored(config))


@cpu_only
@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("eager", [True, False])
def test_graphs_that_enforce_eager_leaves_out_are_said(
    asked: bool, eager: bool, config_of: Callable[..., Any]
) -> None:
    config = config_of()
    config.compilation_config.cudagraph_mm_encoder = asked
    config.model_config.enforce_eager = eager
    said = [text for text in ignored(config) if "enforce_eager" in text]
    assert len(said) == (asked and eager)


@cpu_only
@pytest.mark.parametrize("dtype", [None, "fp8"])
def test_settings_of_fp8_without_fp8_are_said(
    dtype: str | None, config_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    multimodal = config.model_config.multimodal_config
    monkeypatch.setattr(multimodal, "mm_encoder_attn_dtype", dtype)
    monkeypatch.setenv(ENV_FP8_SCALES, "auto")
    monkeypatch.setenv(ENV_FP8_SKIP_LAYERS, "")
    assert not list(ignored(config))
    monkeypatch.setenv(ENV_FP8_SCALES, "block")
    monkeypatch.setenv(ENV_FP8_SKIP_LAYERS, "0")
    said = [text.partition(" has no effect without")[0] for text in ignored(config)]
    assert said == ([] if dtype else [ENV_FP8_SCALES, ENV_FP8_SKIP_LAYERS])


@cpu_only
def test_a_tower_without_a_model_enforces_nothing(
    config_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    config.compilation_config.cudagraph_mm_encoder = True
    monkeypatch.setattr(config, "model_config", None)
    assert not list(ignored(config))


@cpu_only
@pytest.mark.parametrize("text", ["graphs are off", None])
def test_the_layer_says_it(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = small_tower("qwen2_vl")
    from vllm.model_executor.layers.attention import MMEncoderAttention

    from vllm_flashinfer_vit.engine import layer

    said: list[str] = []
    asked: list[Any] = []
    logger = SimpleNamespace(info_once=lambda text, *args: said.append(text % args))
    monkeypatch.setattr(layer, "logger", logger)
    monkeypatch.setattr(
        layer, "graphs_off", lambda config: asked.append(config) or text
    )
    with tower.running():
        MMEncoderAttention(num_heads=4, head_size=16)
    assert asked == [tower.vllm_config]
    assert any("graphs are off" in line for line in said) is (text is not None)


@cpu_only
def test_the_flag_is_vllms(config_of: Callable[..., Any]) -> None:
    config_of()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(shlex.split(FLAG))
    assert parsed.compilation_config.cudagraph_mm_encoder is True


def test_the_speed_up_was_measured() -> None:
    times: dict[tuple[str, ...], dict[str, float]] = {}
    with ROWS.open() as file:
        for row in csv.DictReader(file):
            if row["provider"] == "plugin" and row["case"].startswith("1x"):
                key = (row["model"], row["case"], row["vllm"])
                times.setdefault(key, {})[row["mode"]] = float(row["p50_ms"])
    ratios = [
        by_mode["eager"] / by_mode["graph"]
        for (_, case, _), by_mode in times.items()
        if int(case[2:]) <= 4096 and {"eager", "graph"} <= by_mode.keys()
    ]
    least, most = SPEED_UP
    assert round(min(ratios), 1) == least
    assert round(max(ratios), 1) == most
