# SPDX-License-Identifier: Apache-2.0
"""cuDNN's FP8 attention: without a GPU on a stand-in for cudnn-frontend's graph, which
computes only with what was declared, and on a GPU against fp32."""

import functools
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from cases import CASES, GPU_CASES, Case, make_qkv, params, relative_error
from vllm_flashinfer_vit.choices.trial import attempt
from vllm_flashinfer_vit.kernels import cudnn_fp8 as kernel
from vllm_flashinfer_vit.kernels._cudnn import PlanCache
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref
from vllm_flashinfer_vit.machine.versions import MIN_CUDNN_FP8_HOPPER

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
IMAGES = Case("two-images", (100, 28))
# Rounding to e4m3 is off by up to 2^-4 and by 2.6 % on average; the weights' errors
# average out, and Hopper rounds the output too.
LIMIT = 0.05


def quantize(x, width):
    """Per-tensor e4m3 `[T, H, width]` and its scale `[1] fp32`."""
    real = x[x.isfinite().all(-1).all(-1)].float()
    amax = real.abs().max() if real.numel() else torch.ones((), device=x.device)
    scale = (amax / FP8_MAX).reshape(1)
    x8 = torch.zeros(*x.shape[:2], width, dtype=FP8, device=x.device)
    x8[..., : x.shape[2]] = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return x8, scale


def make(case, heads, head_dim, width, *, kv_heads=None, device="cpu", seed=0):
    """Quantised q, k, v and scales; rows of no sequence are NaN, to be seen if read."""
    qkv = make_qkv(
        case,
        heads,
        head_dim,
        torch.float16,
        kv_heads=kv_heads,
        device=device,
        seed=seed,
    )
    (q, q_scale), (k, k_scale), (v, v_scale) = (quantize(x, width) for x in qkv)
    return q, k, v, torch.cat([q_scale, k_scale, v_scale])


def expected(qkv, scales, case, scale, head_dim):
    """Attention in fp32 on what the quantised tensors stand for."""
    q, k, v = (
        x[..., :head_dim].float().nan_to_num() * s
        for x, s in zip(qkv, scales, strict=True)
    )
    cu_seqlens = case.cu_seqlens(q.device)
    return attention_ref(q, k, v, cu_seqlens, max(case.max_seqlen, 1), scale)


def assert_right(out, qkv, scales, case, scale, head_dim):
    assert out.shape == (*qkv[0].shape[:2], head_dim) and out.is_contiguous()
    assert not out.isnan().any()
    assert (out[case.tokens :] == 0).all()
    want = expected(qkv, scales, case, scale, head_dim)
    assert relative_error(out[: case.tokens], want[: case.tokens]) <= LIMIT


class _Tensor:
    """A declared tensor: cudnn-frontend's attributes with chained setters."""

    def __init__(self, dim=(), stride=(), data_type=None):
        self.dim, self.stride, self.data_type = tuple(dim), tuple(stride), data_type
        self.uid = self.ragged = None

    def __getattr__(self, name):
        def set_value(value):
            attribute = {"ragged_offset": "ragged"}.get(name[4:], name[4:])
            setattr(self, attribute, value)
            return self

        return set_value


class _Graph:
    """Stands in for `cudnn.pygraph`; executes in fp32 on CPU tensors."""

    def __init__(self, handle, **types):
        assert handle == "handle"
        self.is_built = False

    def tensor(self, *, name, dim, stride, data_type):
        return _Tensor(dim, stride, data_type)

    def sdpa_fp8(self, *, name, generate_stats, use_padding_mask, **inputs):
        assert use_padding_mask and not generate_stats
        self.inputs, self.out = inputs, _Tensor()
        return self.out, None, _Tensor(), _Tensor()

    def build(self, heur_modes):
        self.is_built = True

    def get_workspace_size(self):
        return 4096

    def execute(self, tensors, workspace, handle):
        assert self.is_built and handle == "handle" and workspace.numel() >= 4096
        inputs = SimpleNamespace(**self.inputs)

        def scalar(name):
            data = tensors[getattr(inputs, name).uid]
            assert data.shape == (1,) and data.dtype == torch.float32
            return data

        lengths = tensors[inputs.seq_len_q.uid].flatten().tolist()
        assert lengths == tensors[inputs.seq_len_kv.uid].flatten().tolist()
        assert len(lengths) == inputs.q.dim[0] and max(lengths) <= inputs.q.dim[2]
        for i, length in enumerate(lengths):
            if length == 0:
                continue
            q, k, v, out = (
                self._sequence(tensors, x, i, length)
                for x in (inputs.q, inputs.k, inputs.v, self.out)
            )
            assert out.dtype == self.out.data_type
            group = q.shape[0] // k.shape[0]
            k, v = (x.float().repeat_interleave(group, dim=0) for x in (k, v))
            scores = q.float() @ k.mT * scalar("descale_q") * scalar("descale_k")
            scores *= inputs.attn_scale
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            weights8 = (weights * scalar("scale_s")).to(FP8).float()
            mean = weights8 @ v * scalar("descale_s") * scalar("descale_v")
            # Beyond the range torch makes NaN of it, which no test overlooks.
            out.copy_(mean / weights.sum(-1, keepdim=True) * scalar("scale_o"))

    def _sequence(self, tensors, declared, i, length):
        """`[H, L, D]` of sequence i, found only by what was declared."""
        offsets = tensors[declared.ragged.uid]
        assert offsets.dtype == torch.int64 == declared.ragged.data_type
        assert tuple(offsets.shape) == declared.ragged.dim
        _, heads, _, head_dim = declared.dim
        return tensors[declared.uid].as_strided(
            (heads, length, head_dim), declared.stride[1:], offsets[i].item()
        )


DATA_TYPES = SimpleNamespace(
    FP8_E4M3=FP8,
    BFLOAT16=torch.bfloat16,
    HALF=torch.float16,
    FLOAT=torch.float32,
    INT32=torch.int32,
    INT64=torch.int64,
)


@pytest.fixture(params=["hopper", "blackwell"])
def arch(request):
    return request.param


@pytest.fixture
def cudnn(monkeypatch, arch, nan_empty):
    """The stand-in in place of cudnn-frontend, on either kind of GPU."""
    if torch.cuda.is_available():
        pytest.skip("replaces the real cuDNN")
    frontend = SimpleNamespace(
        pygraph=_Graph,
        data_type=DATA_TYPES,
        heur_mode=SimpleNamespace(A="A"),
        set_stream=lambda handle, stream: None,
        backend_version=lambda: 92300,
    )
    monkeypatch.setattr(kernel, "_frontend", lambda: (frontend, "handle"))
    monkeypatch.setattr(kernel, "_writes_fp8", lambda device: arch == "hopper")
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return frontend


def run(plans, made, case, scale, head_dim, dtype=torch.float16):
    # The interpreter cannot round to bf16.
    *qkv, scales = made
    return kernel._attention(
        plans,
        *qkv,
        scales,
        case.cu_seqlens(),
        case.max_seqlen,
        scale,
        head_dim,
        dtype,
    )


@pytest.mark.parametrize("case", params(CASES))
def test_cases(cudnn, case):
    width = kernel.padded_head_dim(72, torch.device("cpu"))
    made = make(case, 4, 72, width, kv_heads=2)
    out = run(PlanCache(), made, case, 72**-0.5, 72)
    assert_right(out, made[:3], made[3], case, 72**-0.5, 72)


@pytest.mark.parametrize(("head_dim", "width"), [(80, 80), (64, 128), (96, 96)])
def test_widths(cudnn, head_dim, width):
    made = make(IMAGES, 2, head_dim, width)
    out = run(PlanCache(), made, IMAGES, 0.1, head_dim)
    assert_right(out, made[:3], made[3], IMAGES, 0.1, head_dim)


def test_scales_are_read_by_each_call_and_are_no_part_of_a_plan(cudnn):
    plans = PlanCache()
    q, k, v, scales = make(IMAGES, 2, 80, 80)
    for factors in ((1.0, 1.0, 1.0), (3.0, 0.5, 7.0)):
        now = scales * torch.tensor(factors)
        out = run(plans, (q, k, v, now), IMAGES, 0.1, 80)
        assert_right(out, (q, k, v), now, IMAGES, 0.1, 80)
    assert plans.stats.built == 1


def test_the_largest_output_does_not_saturate(cudnn):
    q, k, v, scales = make(IMAGES, 2, 80, 80)
    v = torch.full_like(v.half(), FP8_MAX).to(FP8)
    scales[2] = 3.0
    out = run(PlanCache(), (q, k, v, scales), IMAGES, 0.1, 80)
    # The weights do not add up to 1 after rounding, in either direction.
    assert out.isfinite().all()
    torch.testing.assert_close(
        out, torch.full_like(out, 3 * FP8_MAX), rtol=LIMIT, atol=0
    )


def test_plans_follow_buckets_and_outputs(cudnn, arch):
    plans = PlanCache()
    for lengths in ((100, 28), (65,), (128,) * 8):
        case = Case("any", lengths)
        run(plans, make(case, 2, 80, 80), case, 0.1, 80)
    assert plans.stats.built == 1
    run(plans, make(IMAGES, 2, 80, 80), IMAGES, 0.1, 80, torch.bfloat16)
    # Hopper's plan writes e4m3 whatever the activations are.
    assert plans.stats.built == (1 if arch == "hopper" else 2)
    run(plans, make(IMAGES, 2, 80, 96), IMAGES, 0.1, 80)
    run(plans, make(IMAGES, 2, 80, 80), IMAGES, 0.2, 80)
    run(plans, make(IMAGES, 2, 80, 80, kv_heads=1), IMAGES, 0.1, 80)
    assert plans.stats.built == (4 if arch == "hopper" else 5)


def test_capture_refuses_to_build(cudnn, monkeypatch):
    made = make(IMAGES, 2, 80, 80)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"num_seqs=8, max_len=128.*before the capt"):
        run(PlanCache(), made, IMAGES, 0.1, 80)


def test_hopper_runs_no_cudnn_that_would_end_the_context(cudnn, arch, monkeypatch):
    monkeypatch.setattr(cudnn, "backend_version", lambda: 92299)
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    plans, made = PlanCache(), make(IMAGES, 2, 80, 80)
    if arch == "blackwell":
        run(plans, made, IMAGES, 0.1, 80)
        return
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"9\.22\.99 builds no.*needs cuDNN 9\.23"
        ):
            run(plans, made, IMAGES, 0.1, 80)
    assert plans.stats.built == 0


def test_nothing_to_attend_needs_no_plan(cudnn):
    plans = PlanCache()
    empty = Case("empty", ())
    assert run(plans, make(empty, 2, 72, 80), empty, 0.1, 72).shape == (0, 2, 72)
    assert plans.stats.built == 0


def test_widths_to_pad_to(monkeypatch):
    device = torch.device("cpu")
    dims = (40, 64, 72, 80, 96, 128, 136)
    monkeypatch.setattr(kernel, "_writes_fp8", lambda device: True)
    widths = [kernel.padded_head_dim(dim, device) for dim in dims]
    assert widths == [64, 64, 128, 128, 128, 128, 144]
    monkeypatch.setattr(kernel, "_writes_fp8", lambda device: False)
    widths = [kernel.padded_head_dim(dim, device) for dim in dims]
    assert widths == [48, 64, 80, 80, 96, 128, 144]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"q": a["q"].half()}, "torch.float16"),
        (lambda a: a | {"v": a["v"].mT.contiguous().mT}, "contiguous"),
        (lambda a: a | {"k": a["k"][:-1]}, r"\(127, 4, 80\)"),
        (
            lambda a: a | {x: a[x][:, :3].contiguous() for x in "kv"},
            "divisor of H",
        ),
        (lambda a: a | {"head_dim": 88}, "up to 80.*got 88"),
        (lambda a: a | {"head_dim": 76}, "multiple of 8"),
        (lambda a: a | {"dtype": torch.float32}, "got torch.float32"),
        (lambda a: a | {"scales": a["scales"][:2]}, r"\[3\] fp32, got \(2,\)"),
        (lambda a: a | {"scales": a["scales"].double()}, "float64"),
        (lambda a: a | {"cu_seqlens": a["cu_seqlens"].to("meta")}, "meta"),
        (lambda a: a | {"cu_seqlens": a["cu_seqlens"].long()}, "int64"),
    ],
)
@pytest.mark.parametrize("arch", ["hopper"], indirect=True)
def test_arguments_that_do_not_fit_are_refused(cudnn, change, message):
    q, k, v, scales = make(IMAGES, 4, 80, 80)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "scales": scales,
        "cu_seqlens": IMAGES.cu_seqlens(),
        "max_seqlen": 100,
        "scale": 0.1,
        "head_dim": 80,
        "dtype": torch.float16,
    }
    with pytest.raises(ValueError, match=message):
        kernel.attention(**change(arguments))


def test_a_missing_frontend_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    kernel._frontend.cache_clear()
    with pytest.raises(RuntimeError, match="cannot be loaded.*flashinfer-vit doctor"):
        kernel._frontend()


@pytest.mark.parametrize(
    ("sm", "head_dim", "out_dtype"), [(90, 128, FP8), (100, 80, torch.bfloat16)]
)
def test_the_real_frontend_takes_the_graph(monkeypatch, sm, head_dim, out_dtype):
    """As far as it judges without a GPU: cuDNN itself is not asked for a plan."""
    try:
        import cudnn
    except Exception as error:
        pytest.skip(f"cudnn-frontend does not load: {type(error).__name__}: {error}")

    def make_graph(*, handle, **options):
        return cudnn.pygraph(sm_version=sm, **options)

    frontend = SimpleNamespace(
        pygraph=make_graph,
        data_type=cudnn.data_type,
        heur_mode=cudnn.heur_mode,
        backend_version=lambda: 92300,
    )
    monkeypatch.setattr(kernel, "_frontend", lambda: (frontend, None))
    validated = []

    def validate(graph, heur_modes):
        graph.validate()
        validated.append(graph)

    monkeypatch.setattr(cudnn.pygraph, "build", validate)
    layout = (16, head_dim, 16 * head_dim, head_dim, 1)
    key = kernel.PlanKey(8, 4096, FP8, out_dtype, layout, layout, layout, 0.1)
    try:
        kernel._build(key)
    except RuntimeError as error:
        if "cuda_get_device" not in str(error):
            raise
        pytest.skip(f"this cudnn-frontend asks the GPU: {error}")
    assert len(validated) == 1


DEVICE = "cuda"


@functools.cache
def _refusal():
    return attempt("cudnn_fp8", 80, torch.bfloat16)


@pytest.fixture
def served():
    """Skips where cuDNN has no FP8 attention for this GPU."""
    if refusal := _refusal():
        pytest.skip(refusal)


def _run(made, case, head_dim, dtype=torch.bfloat16):
    *qkv, scales = made
    return kernel.attention(
        *qkv,
        scales,
        case.cu_seqlens(DEVICE),
        case.max_seqlen,
        head_dim**-0.5,
        head_dim,
        dtype,
    )


def _make(case, head_dim, **options):
    width = kernel.padded_head_dim(head_dim, torch.device(DEVICE, 0))
    return make(case, 16, head_dim, width, device=DEVICE, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128])
def test_gpu_attempt_finds_it_right(head_dim, dtype):
    major = torch.cuda.get_device_capability()[0]
    if major not in (9, 10):
        pytest.skip("cuDNN has FP8 attention for Hopper and data-centre Blackwell")
    answer = attempt("cudnn_fp8", head_dim, dtype)
    frontend, _ = kernel._frontend()
    if major == 9 and frontend.backend_version() < MIN_CUDNN_FP8_HOPPER:
        assert "FP8 on Hopper needs cuDNN" in answer
        torch.cuda.synchronize()
        return
    if major == 9:
        # Seen with cuDNN 9.24: Hopper's FP8 sums lose the small terms of long rows.
        assert "values around 2" in answer
        return
    assert answer is None


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [72, 80])
@pytest.mark.parametrize("case", params(CASES + GPU_CASES))
def test_gpu_cases(served, nan_empty, case, head_dim):
    made = _make(case, head_dim)
    out = _run(made, case, head_dim)
    assert_right(out, made[:3], made[3], case, head_dim**-0.5, head_dim)


@pytest.mark.gpu
def test_gpu_grouped_heads(served, nan_empty):
    made = _make(IMAGES, 80, kv_heads=4)
    out = _run(made, IMAGES, 80)
    assert_right(out, made[:3], made[3], IMAGES, 80**-0.5, 80)


@pytest.mark.gpu
def test_gpu_the_largest_output_does_not_saturate(served, nan_empty):
    case = Case("one", (4096,))
    q, k, v, scales = _make(case, 72)
    v[..., :72] = torch.full_like(v[..., :72].half(), FP8_MAX).to(FP8)
    out = _run((q, k, v, scales), case, 72)
    limit = (FP8_MAX * scales[2]).item()
    assert not out.isnan().any()
    assert out.min() >= (1 - LIMIT) * limit and out.max() <= limit * (1 + 2**-7)


@pytest.mark.gpu
def test_gpu_the_second_pass_goes_beyond_int32():
    rows = 2**31 // (16 * 80) + 200
    padded = torch.ones(rows, 16, 128, device=DEVICE, dtype=torch.float16).to(FP8)
    scales = torch.tensor([1.0, 1.0, 3.0], device=DEVICE)
    end = (rows - 100) * 16 * 128
    offsets = torch.tensor([0, end], device=DEVICE).view(2, 1, 1, 1)
    out = kernel._finish(padded, scales, offsets, 80, torch.bfloat16)
    assert out.numel() > 2**31
    assert (out[:-100] == 3).all()
    assert not out[-100:].any()


@pytest.mark.gpu
def test_gpu_nan_stays_in_its_sequence(served, nan_empty):
    case = Case("three", (300, 500, 700))
    made = _make(case, 80)
    right = _run(made, case, 80)
    poisoned = tuple(x.clone() for x in made[:3])
    for x in poisoned:
        x[400] = torch.full_like(x[400].half(), math.nan).to(FP8)
    out = _run((*poisoned, made[3]), case, 80)
    assert out[300:800].isnan().any()
    assert torch.equal(out[:300], right[:300])
    assert torch.equal(out[800:], right[800:])


@pytest.mark.gpu
def test_gpu_replay_follows_lengths_and_scales(served):
    first = Case("first", (700, 300, 24))
    second = Case("second", (100, 600), zeros=1, pad_rows=324)
    made = tuple(x.clone() for x in _make(first, 80))
    cu_seqlens = first.cu_seqlens(DEVICE)

    def attend():
        *qkv, scales = made
        return kernel.attention(*qkv, scales, cu_seqlens, 1024, 0.1, 80, torch.bfloat16)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for case in (first, second):
        for mine, new in zip(made, _make(case, 80, seed=3), strict=True):
            mine.copy_(new)
        made[3].mul_(2)
        cu_seqlens.copy_(case.cu_seqlens(DEVICE))
        graph.replay()
        assert torch.equal(out, attend())
        assert_right(out, made[:3], made[3], case, 0.1, 80)
