# SPDX-License-Identifier: Apache-2.0
"""cuDNN's FP8 attention on a stand-in for cudnn-frontend's graph, which computes only
with what was declared."""

import sys
from types import SimpleNamespace

import pytest
import torch
from _cudnn_fp8 import FP8, FP8_MAX, IMAGES, LIMIT, assert_right, make

from cases import CASES, Case, params
from vllm_flashinfer_vit.kernels import cudnn_fp8 as kernel


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
def cudnn(monkeypatch, arch, plans, nan_empty):
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


def run(made, case, scale, head_dim, dtype=torch.float16):
    # The interpreter cannot round to bf16.
    *qkv, scales = made
    return kernel.attention(
        *qkv,
        scales,
        case.cu_seqlens(),
        case.max_seqlen,
        scale,
        head_dim,
        dtype,
    )


@pytest.mark.parametrize("case", params(CASES))
def test_each_case_is_right(cudnn, case):
    width = kernel.padded_head_dim(72, torch.device("cpu"))
    made = make(case, 4, 72, width, kv_heads=2)
    out = run(made, case, 72**-0.5, 72)
    assert_right(out, made[:3], made[3], case, 72**-0.5, 72)


@pytest.mark.parametrize(("head_dim", "width"), [(80, 80), (64, 128), (96, 96)])
def test_padded_heads_are_right(cudnn, head_dim, width):
    made = make(IMAGES, 2, head_dim, width)
    out = run(made, IMAGES, 0.1, head_dim)
    assert_right(out, made[:3], made[3], IMAGES, 0.1, head_dim)


def test_scales_are_read_by_each_call_and_are_no_part_of_a_plan(cudnn, plans):
    q, k, v, scales = make(IMAGES, 2, 80, 80)
    for factors in ((1.0, 1.0, 1.0), (3.0, 0.5, 7.0)):
        now = scales * torch.tensor(factors)
        out = run((q, k, v, now), IMAGES, 0.1, 80)
        assert_right(out, (q, k, v), now, IMAGES, 0.1, 80)
    assert plans.built == 1


def test_constants_are_written_by_each_call(cudnn, monkeypatch):
    """vLLM's sleep mode discards what was made while it loaded the weights."""
    execute = _Graph.execute

    def execute_and_lose(self, tensors, workspace, handle):
        execute(self, tensors, workspace, handle)
        for name in ("descale_s", "scale_s", "scale_o"):
            tensors[self.inputs[name].uid].fill_(float("nan"))

    monkeypatch.setattr(_Graph, "execute", execute_and_lose)
    *qkv, scales = make(IMAGES, 2, 80, 80)
    for _ in range(2):
        out = run((*qkv, scales), IMAGES, 0.1, 80)
        assert_right(out, qkv, scales, IMAGES, 0.1, 80)


def test_the_largest_output_does_not_saturate(cudnn):
    q, k, v, scales = make(IMAGES, 2, 80, 80)
    v = torch.full_like(v.half(), FP8_MAX).to(FP8)
    scales[2] = 3.0
    out = run((q, k, v, scales), IMAGES, 0.1, 80)
    # The weights do not add up to 1 after rounding, in either direction.
    assert out.isfinite().all()
    torch.testing.assert_close(
        out, torch.full_like(out, 3 * FP8_MAX), rtol=LIMIT, atol=0
    )


def test_plans_follow_buckets_and_outputs(cudnn, plans, arch):
    for lengths in ((100, 28), (65,), (128,) * 8):
        case = Case("any", lengths)
        run(make(case, 2, 80, 80), case, 0.1, 80)
    assert plans.built == 1
    run(make(IMAGES, 2, 80, 80), IMAGES, 0.1, 80, torch.bfloat16)
    # Hopper's plan writes e4m3 whatever the activations are.
    assert plans.built == (1 if arch == "hopper" else 2)
    run(make(IMAGES, 2, 80, 96), IMAGES, 0.1, 80)
    run(make(IMAGES, 2, 80, 80), IMAGES, 0.2, 80)
    run(make(IMAGES, 2, 80, 80, kv_heads=1), IMAGES, 0.1, 80)
    assert plans.built == (4 if arch == "hopper" else 5)


def test_capture_refuses_to_build(cudnn, monkeypatch):
    made = make(IMAGES, 2, 80, 80)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"num_seqs=8, max_len=128.*before the capt"):
        run(made, IMAGES, 0.1, 80)


def test_hopper_runs_no_cudnn_that_would_end_the_context(
    cudnn, plans, arch, monkeypatch
):
    monkeypatch.setattr(cudnn, "backend_version", lambda: 92299)
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    made = make(IMAGES, 2, 80, 80)
    if arch == "blackwell":
        run(made, IMAGES, 0.1, 80)
        return
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"9\.22\.99 builds no.*needs cuDNN 9\.23"
        ):
            run(made, IMAGES, 0.1, 80)
    assert plans.built == 0


def test_nothing_to_attend_needs_no_plan(cudnn, plans):
    empty = Case("empty", ())
    assert run(make(empty, 2, 72, 80), empty, 0.1, 72).shape == (0, 2, 72)
    assert plans.built == 0


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
