# SPDX-License-Identifier: Apache-2.0
"""FP8 layers and their op, on vLLM's own classes."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _dense_models import idefics2_masked
from _models import Call, Encoder, encode, engine
from _towers import cpu_only

from cases import Case, make_cos_sin, make_qkv, relative_error
from vllm_flashinfer_vit.choices.trial import attempt
from vllm_flashinfer_vit.choices.usable import NotServedError
from vllm_flashinfer_vit.fp8 import scale_files
from vllm_flashinfer_vit.fp8.scale_files import QKV, LayerScales, ScaleFile
from vllm_flashinfer_vit.fp8.state import (
    EngineScales,
    ScaleState,
    _warn_of_origin,
    made_by_engine,
)
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref
from vllm_flashinfer_vit.kernels.formats import HISTORY, DeviceScales
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.ops.plan import Plan
from vllm_flashinfer_vit.settings import (
    ENV_FP8_SCALES,
    ENV_FP8_SKIP_LAYERS,
    ENV_KERNEL,
    Settings,
)
from vllm_flashinfer_vit.towers.spec import resolve_spec
from vllm_flashinfer_vit.towers.tower import Tower, build_tower

HEADS, HEAD_DIM = 4, 16
SCALE = HEAD_DIM**-0.5
NAME = "visual.blocks.0.attn.attn"
MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"
IDEFICS2 = "model_executor.models.idefics2_vision_model"

BATCH = Case("", (300, 40, 129), zeros=2, pad_rows=20)
PLAN = "128:reference,*:reference_fp8"


def run_op(
    inputs: tuple[torch.Tensor, ...],
    method: str = "block",
    state: DeviceScales | None = None,
    save: bool = False,
    plan: str = PLAN,
    batch: Case = BATCH,
) -> torch.Tensor:
    from vllm_flashinfer_vit.ops.attention import Fp8, attention

    longest = torch.tensor(batch.max_seqlen)
    cu_seqlens = batch.cu_seqlens(str(inputs[0].device))
    fp8 = Fp8(method, save, state)  # type: ignore[arg-type]
    return attention(Batch(*inputs, cu_seqlens, longest), SCALE, Plan.decode(plan), fp8)


def op_inputs(batch: Case = BATCH, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    qkv = make_qkv(batch, HEADS, HEAD_DIM, torch.float32, kv_heads=2, **kwargs)
    return (*qkv, *make_cos_sin(batch, HEAD_DIM))


def state_tensors(state: Any) -> list[torch.Tensor]:
    return [getattr(state, name) for name in DeviceScales._fields]


@cpu_only
class TestOp:
    def exact(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        from vllm_flashinfer_vit.ops.attention import rotate

        q, k, v, cos, sin = inputs
        q, k = rotate(q, k, cos, sin)
        return attention_ref(q, k, v, BATCH.cu_seqlens(), BATCH.max_seqlen, SCALE)

    @pytest.mark.parametrize("method", ["block", "static", "dynamic"])
    def test_is_about_what_fp8_can_be(self, method: str) -> None:
        inputs = op_inputs()
        state = DeviceScales.on("cpu")
        state.scales.fill_(5 / 448)
        error = relative_error(run_op(inputs, method, state), self.exact(inputs))
        assert 1e-3 < error < 8e-2

    def test_windows_are_not_quantised(self) -> None:
        batch = Case("", (64,) * 4)
        inputs = op_inputs(batch)
        state = DeviceScales.on("cpu")
        out = run_op(inputs, "dynamic", state, batch=batch)
        plain = run_op(inputs, plan="*:reference", batch=batch)
        assert torch.equal(out, plain)
        assert not state.position.any()

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    @pytest.mark.parametrize("method", ["block", "static", "dynamic"])
    def test_an_image_with_nan_spoils_no_other(self, method: str, bad: float) -> None:
        inputs = op_inputs()
        clean = DeviceScales.on("cpu")
        expected = run_op(inputs, method, clean)
        spoilt = [x.clone() for x in inputs]
        for x in spoilt[:3]:
            # Smaller than what stands elsewhere, or the clean scales would differ.
            x[310, 0, 3] = bad
        state = DeviceScales.on("cpu")
        out = run_op(tuple(spoilt), method, state)
        others = [*range(300), *range(340, BATCH.rows)]
        assert out[300:340].isnan().any()
        assert torch.equal(out[others], expected[others])
        # Nor in a later pass.
        for one, other in zip(state, clean, strict=True):
            assert torch.equal(one, other)
        again = run_op(inputs, method, state)
        assert torch.equal(again, run_op(inputs, method, clean))

    def test_dynamic_scales_follow_16_passes(self) -> None:
        inputs = op_inputs()
        state = DeviceScales.on("cpu")
        loud = tuple(x * 10 for x in inputs[:3]) + inputs[3:]
        run_op(loud, "dynamic", state)
        first = state.scales.clone()
        for _ in range(15):
            run_op(inputs, "dynamic", state)
        assert torch.equal(state.scales, first)
        run_op(inputs, "dynamic", state)
        torch.testing.assert_close(state.scales, first / 10)

    def test_saving_counts_passes_that_are_not_quantised(self) -> None:
        batch = Case("", (64,))
        inputs = op_inputs(batch)
        state = DeviceScales.on("cpu")
        out = run_op(inputs, "block", state, save=True, batch=batch)
        assert torch.equal(out, run_op(inputs, plan="*:reference", batch=batch))
        assert state.position.item() == 1
        assert state.history[0].all()

    @pytest.mark.parametrize("save", [False, True])
    @pytest.mark.parametrize("method", ["block", "static", "dynamic"])
    def test_is_well_behaved(self, method: str, save: bool) -> None:
        from vllm_flashinfer_vit.ops import attention as ops  # noqa: F401

        inputs = op_inputs()
        longest = torch.tensor(BATCH.max_seqlen)
        args = (*Batch(*inputs, BATCH.cu_seqlens(), longest), SCALE)
        state = DeviceScales.on("cpu")
        op = torch.ops.vllm_flashinfer_vit.fp8_attention
        torch.library.opcheck(op, (*args, PLAN, method, save, *state))
        if method == "block" and not save:
            torch.library.opcheck(op, (*args, PLAN, method, save, *(None,) * 5))


@pytest.fixture
def fp8_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tower]:
    tower = engine("FLASHINFER")
    config = tower.vllm_config.model_config.multimodal_config
    monkeypatch.setattr(config, "mm_encoder_attn_dtype", "fp8")
    yield tower


def build(tower: Tower, **kwargs: Any) -> torch.nn.Module:
    from vllm.model_executor.layers.attention import MMEncoderAttention
    from vllm.utils.torch_utils import set_default_torch_dtype

    settings = {"num_heads": HEADS, "head_size": HEAD_DIM, "prefix": NAME}
    # As an engine builds models; their buffers may then change in any mode.
    normal = torch.inference_mode(False)
    with tower.running(), normal, set_default_torch_dtype(tower.dtype):
        return MMEncoderAttention(**{**settings, **kwargs})


def call(layer: torch.nn.Module, batch: Case = BATCH) -> torch.Tensor:
    q, k, v = make_qkv(batch, HEADS, HEAD_DIM, torch.float32)
    longest = torch.tensor(batch.max_seqlen)
    return layer(q[None], k[None], v[None], batch.cu_seqlens(), longest)


@cpu_only
class TestLayer:
    def test_runs_fp8(self, fp8_engine: Tower) -> None:
        layer = build(fp8_engine)
        assert layer.kernel_for(300) == "reference_fp8"
        assert layer.kernel_for(64) == "reference"
        plain = build(engine("FLASHINFER"))
        error = relative_error(call(layer), call(plain))
        assert 1e-3 < error < 8e-2

    def test_two_engines_know_nothing_of_each_other(
        self,
        fp8_engine: Tower,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from vllm.config import replace

        monkeypatch.setenv(ENV_FP8_SCALES, "dynamic")
        other = engine("FLASHINFER")
        config = other.vllm_config.model_config.multimodal_config
        monkeypatch.setattr(config, "mm_encoder_attn_dtype", "fp8")
        second = NAME.replace("0", "1")
        ours, theirs = build(fp8_engine), build(other, prefix=second)
        call(ours)
        call(theirs)
        record = EngineScales.find(fp8_engine.vllm_config)
        assert record is not None
        assert record is not EngineScales.find(other.vllm_config)
        # As vLLM derives it for a part of the model.
        assert record is EngineScales.find(replace(fp8_engine.vllm_config))
        record.forget_dummies()
        assert not ours._fp8_state.position.any()
        assert theirs._fp8_state.position.item() == 1
        skip = Settings(fp8_skip_layers=frozenset({"1"}))
        with pytest.raises(NotServedError, match=rf"names '1'.*the layers are {NAME}$"):
            record.check_names(skip)

    def test_a_forced_kernel_is_for_what_runs_in_fp8(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(ENV_KERNEL, "reference_fp8")
        built = build_tower(
            resolve_spec(MODEL, random_weights=True, depth=1),
            backend="FLASHINFER",
            dtype=torch.float32,
            device="cpu",
            attn_dtype="fp8",
        )
        (layer,) = built.attention_layers().values()
        assert layer.kernel_for(4096) == "reference_fp8"

    def test_a_layer_may_be_left_out(
        self, fp8_engine: Tower, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(ENV_FP8_SKIP_LAYERS, "0")
        assert build(fp8_engine).kernel_for(300) == "reference"
        other = build(fp8_engine, prefix="visual.blocks.1.attn.attn")
        assert other.kernel_for(300) == "reference_fp8"

    def test_an_error_names_the_layer(
        self, fp8_engine: Tower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "scales.json"
        path.write_text('{"other": {"q": 1, "k": 1, "v": 1}}')
        config = fp8_engine.vllm_config.model_config.multimodal_config
        monkeypatch.setattr(config, "mm_encoder_fp8_scale_path", str(path))
        layer: Any = build(fp8_engine)
        with pytest.raises(ValueError, match=rf"'{NAME}' is not in.*scales.json"):
            layer.process_weights_after_loading(torch.float32)

    def test_a_tower_that_drops_a_block_takes_the_scales_that_it_saved(
        self, fp8_engine: Tower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As MiniCPM-V drops the last one that it builds."""
        towers: list[torch.nn.Module] = []

        def three_blocks_less_one(m: Any) -> tuple[torch.nn.Module, Call]:
            tower, run = idefics2_masked(m)
            towers.append(tower)
            return tower, run

        path = str(tmp_path / "scales.json")
        encoder = Encoder(IDEFICS2, three_blocks_less_one)
        config = fp8_engine.vllm_config.model_config.multimodal_config
        monkeypatch.setattr(config, "mm_encoder_fp8_scale_save_path", path)
        encode(encoder, fp8_engine)
        record = EngineScales.find(fp8_engine.vllm_config)
        assert record is not None
        for _ in range(HISTORY):
            record.after_step(SimpleNamespace(scheduled_encoder_inputs={"a": [0]}))
        assert len(scale_files.read(Path(path)).layers) == 2
        del record
        towers.clear()
        monkeypatch.setattr(config, "mm_encoder_fp8_scale_save_path", None)
        monkeypatch.setattr(config, "mm_encoder_fp8_scale_path", path)
        assert encode(encoder, fp8_engine).ops
        states = [m for m in towers[0].modules() if isinstance(m, ScaleState)]
        assert [state.is_static for state in states] == [True, True]

    def test_scales_of_a_model_built_without_memory(
        self, fp8_engine: Tower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As `--load-format ipc_cache` builds it: weights are another process's."""
        path = tmp_path / "scales.json"
        path.write_text(json.dumps({NAME: dict.fromkeys("qkv", 0.02)}))
        config = fp8_engine.vllm_config.model_config.multimodal_config
        monkeypatch.setattr(config, "mm_encoder_fp8_scale_path", str(path))
        expected = call(build(fp8_engine))
        with torch.device("meta"):
            layer: Any = build(fp8_engine)
        # One of a tower that this rank does not run is never processed.
        layer._fp8_state.reset()
        assert layer._fp8_state.scales.is_meta
        layer.process_weights_after_loading(torch.float32)
        assert torch.equal(call(layer), expected)
        assert not layer.state_dict()

    def test_reloads_wait_for_no_scales(
        self, fp8_engine: Tower, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else vLLM warns of each layer that its weights failed to load."""
        from vllm.model_executor.model_loader.reload import utils

        if not hasattr(utils, "get_tensor_load_numel"):
            pytest.skip("this vLLM waits for all elements")
        monkeypatch.setenv(ENV_FP8_SCALES, "dynamic")
        layer: Any = build(fp8_engine)
        assert utils.get_layer_size(layer._fp8_state) == 0

    @pytest.mark.parametrize("method", ["block", "dynamic"])
    def test_compiles_once_for_all_layers(
        self, method: str, fp8_engine: Tower, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from torch._dynamo.testing import CompileCounterWithBackend

        monkeypatch.setenv(ENV_FP8_SCALES, method)
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")

        def block(layer: torch.nn.Module, *args: torch.Tensor) -> torch.Tensor:
            return layer(*args) * 2

        compiled = torch.compile(block, fullgraph=True, backend=counter)
        qkv = (x[None] for x in make_qkv(BATCH, HEADS, HEAD_DIM, torch.float32))
        args = (*qkv, BATCH.cu_seqlens(), torch.tensor(BATCH.max_seqlen))
        for index in range(3):
            name = f"visual.blocks.{index}.attn.attn"
            one, two = (build(fp8_engine, prefix=name) for _ in range(2))
            for _ in range(2):
                assert torch.equal(
                    compiled(one, *args).nan_to_num(), block(two, *args).nan_to_num()
                )
            if method == "dynamic":
                assert one._fp8_state.position.item() == 2
                for a, b in zip(
                    state_tensors(one._fp8_state),
                    state_tensors(two._fp8_state),
                    strict=True,
                ):
                    assert torch.equal(a, b)
        assert counter.frame_count == 1
        torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [72, 80, 128])
@pytest.mark.parametrize("kernel", ["triton_fp8", "hopper_fp8", "cudnn_fp8"])
class TestOnGpu:
    def state(self, method: str) -> DeviceScales:
        state = DeviceScales.on("cuda")
        if method == "static":
            state.scales.fill_(6 / 448)
        return state

    @pytest.fixture(autouse=True)
    def runs_here(self, kernel: Any, head_dim: int) -> None:
        if error := attempt(kernel, head_dim, torch.bfloat16):
            pytest.skip(error)

    @pytest.mark.parametrize("method", ["block", "static", "dynamic"])
    def test_replay_equals_eager(self, method: str, kernel: str, head_dim: int) -> None:
        if kernel == "cudnn_fp8" and method == "block":
            pytest.skip("cuDNN takes one scale for each tensor")
        batch = Case("", (4100, 700, 33), zeros=3, pad_rows=167)
        passes = []
        for seed in range(4):
            qkv = make_qkv(batch, 4, head_dim, torch.bfloat16, device="cuda", seed=seed)
            factor = 1 + seed % 3
            angles = make_cos_sin(batch, head_dim, device="cuda")
            passes.append((*(x * factor for x in qkv), *angles))
        plan = f"*:{kernel}"
        eager_state = self.state(method)
        expected = [
            run_op(one, method, eager_state, plan=plan, batch=batch) for one in passes
        ]
        fed = tuple(x.clone() for x in passes[0])
        state = self.state(method)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run_op(fed, method, self.state(method), plan=plan, batch=batch)
        graph = torch.cuda.CUDAGraph()
        longest = torch.tensor(batch.max_seqlen)
        cu_seqlens = batch.cu_seqlens("cuda")
        from vllm_flashinfer_vit.ops.attention import Fp8, attention

        with torch.cuda.graph(graph, stream=stream):
            out = attention(
                Batch(*fed, cu_seqlens, longest),
                SCALE,
                Plan.decode(plan),
                Fp8(method, state=state),  # type: ignore[arg-type]
            )
        for one, wanted in zip(passes, expected, strict=True):
            for x, y in zip(fed, one, strict=True):
                x.copy_(y)
            graph.replay()
            assert torch.equal(out, wanted)
            assert not out[batch.tokens :].any()
        if method == "dynamic":
            assert torch.equal(state.scales, eager_state.scales)

    def test_nan_stays_in_its_image(self, kernel: str, head_dim: int) -> None:
        method = "static" if kernel == "cudnn_fp8" else "block"
        batch = Case("", (4100, 700, 33))
        qkv = make_qkv(batch, 4, head_dim, torch.bfloat16, device="cuda")
        angles = make_cos_sin(batch, head_dim, device="cuda")
        plan = f"*:{kernel}"
        state = self.state(method)
        expected = run_op((*qkv, *angles), method, state, plan=plan, batch=batch)
        spoilt = tuple(x.clone() for x in qkv)
        for x in spoilt:
            x[4200] = float("nan")
        out = run_op((*spoilt, *angles), method, state, plan=plan, batch=batch)
        others = [*range(4100), *range(4800, batch.rows)]
        assert out[4100:4800].isnan().any()
        assert torch.equal(out[others], expected[others])


def test_signed_maxima_are_said_after_a_merge_too(
    tmp_path: Path, messages: list[str]
) -> None:
    scale = QKV(1.0, 1.0, 1.0)
    upstream = ScaleFile({NAME: LayerScales(scale, scale, None)})
    own = scale_files.from_amax({NAME: (scale, 16)}, 1.5, made_by_engine("m"))
    merged = scale_files.merge(upstream, own)
    for name, file in (("own", own), ("vllm", upstream), ("merged", merged)):
        _warn_of_origin(tmp_path / name, file, "another")
    _warn_of_origin(tmp_path / "same", own, "m")
    said = [
        (line.split(f"{tmp_path}/")[1][:3], "come from" in line) for line in messages
    ]
    assert said == [("own", False), ("vll", True), ("mer", True), ("mer", False)]
