# SPDX-License-Identifier: Apache-2.0
"""The plan cache, without a GPU: FlashInfer's own graph builder runs on a stand-in."""

import logging
import sys
from importlib.metadata import version

import pytest
import torch
from _cudnn_graph import IMAGES, Graph, assert_close
from packaging.version import Version

from cases import CASES, Case, make_qkv, params
from vllm_flashinfer_vit.kernels import _cudnn
from vllm_flashinfer_vit.kernels import cudnn as kernel

pytestmark = [
    pytest.mark.usefixtures("nan_empty"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces the real cuDNN"),
]


def _layouts():
    """One batch in every layout that changes what a plan must address."""
    q, k, v = make_qkv(IMAGES, 4, 72, torch.bfloat16)
    gqa = make_qkv(IMAGES, 4, 72, torch.bfloat16, kv_heads=2)
    q_only = (q.contiguous(), k.contiguous(), v)
    packed = tuple(x.contiguous() for x in (q, k, v))
    wide = make_qkv(IMAGES, 4, 80, torch.bfloat16)
    half = make_qkv(IMAGES, 4, 72, torch.float16)
    narrow_v = (packed[0], packed[1], packed[2][..., :64])
    return {
        "views-of-qkv": (q, k, v),
        "v-a-view": q_only,
        "packed": packed,
        "k-a-view": (packed[0], k, packed[2]),
        "q-a-view": (q, packed[1], packed[2]),
        "gqa": gqa,
        "head-dim-80": wide,
        "fp16": half,
        "narrow-v": narrow_v,
    }


def _run(qkv, case, scale):
    return kernel.prepare(*qkv, case.cu_seqlens(), case.max_seqlen, scale)()


@pytest.mark.parametrize("case", params(CASES))
def test_each_case_is_right(flashinfer, case):
    qkv = make_qkv(case, 4, 80, torch.bfloat16, kv_heads=2)
    out = _run(qkv, case, 80**-0.5)
    assert not out[: case.tokens].isnan().any()
    assert out.dtype == torch.bfloat16 and out.is_contiguous()
    assert out.shape == qkv[0].shape
    assert_close(out, qkv, case, 80**-0.5)


def test_layouts_and_scales_in_one_process_never_share_a_plan(flashinfer, plans):
    layouts = _layouts()
    for _ in range(2):
        for qkv in layouts.values():
            for scale in (72**-0.5, 0.5):
                assert_close(_run(qkv, IMAGES, scale), qkv, IMAGES, scale)
    assert plans.built == len(flashinfer.graphs)
    # Of both that are read as `packed` is, but for q or k, there is a copy.
    assert plans.built == 2 * (len(layouts) - len(("k-a-view", "q-a-view")))


def test_the_cache_of_flashinfer_would_mix_layouts_up(flashinfer):
    """Shows that the test above fails with FlashInfer's cached builder in its place."""
    if Version(version("flashinfer-python")) >= Version("0.7.1"):
        pytest.skip("FlashInfer's key is whole since 0.7.1")
    backend = kernel._backend()._replace(build=flashinfer.prefill._build_prefill_graph)
    flashinfer.monkeypatch.setattr(kernel, "_backend", lambda: backend)
    layouts = _layouts()
    packed, views = layouts["packed"], layouts["views-of-qkv"]
    assert_close(_run(packed, IMAGES, 0.1), packed, IMAGES, 0.1)
    with pytest.raises(AssertionError):
        assert_close(_run(views, IMAGES, 0.1), views, IMAGES, 0.1)


def test_keys_are_no_coarser_than_those_of_flashinfer(flashinfer, plans):
    """Where FlashInfer tells two calls apart, so do the keys here; not the reverse."""
    theirs = set()
    key_of = flashinfer.prefill._sdpa_prefill_key_fn
    lengths = torch.zeros((8, 1, 1, 1), dtype=torch.int32)
    for q, k, v in _layouts().values():
        # Of others FlashInfer never sees the strides.
        if not all(kernel._are_read(q, k, v)):
            continue
        for scale in (72**-0.5, 0.5):
            _run((q, k, v), IMAGES, scale)
            theirs.add(
                key_of(
                    q,
                    k,
                    v,
                    scale,
                    max_token_seq_q=128,
                    max_sequence_kv=128,
                    actual_seq_lens_q=lengths,
                    actual_seq_lens_kv=lengths,
                    o_data_type=q.dtype,
                )
            )
    assert plans.built >= len(theirs)


def test_shapes_of_one_bucket_share_a_plan(flashinfer, plans):
    for lengths in ((100, 28), (65,), (128,) * 8, (1, 90, 0)):
        case = Case("any", lengths)
        qkv = make_qkv(case, 2, 80, torch.bfloat16)
        assert_close(_run(qkv, case, 0.1), qkv, case, 0.1)
    assert plans.built == 1
    graph = flashinfer.graphs[0]
    assert graph.q.dim == (8, 2, 128, 80)
    _run(make_qkv(IMAGES, 2, 80, torch.bfloat16), Case("129", (128,)), 0.1)
    assert plans.built == 1


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), id="HTD"
        ),
        pytest.param(lambda x: x.transpose(1, 2).contiguous().mT, id="D-strided"),
        pytest.param(
            lambda x: torch.nn.functional.pad(x, (0, 4))[..., :80], id="rows-unaligned"
        ),
        pytest.param(
            lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
            id="pointer-unaligned",
        ),
    ],
)
def test_what_cudnn_cannot_load_is_copied(flashinfer, plans, change):
    qkv = tuple(x.contiguous() for x in make_qkv(IMAGES, 2, 80, torch.bfloat16))
    out = _run(qkv, IMAGES, 0.1)
    changed = tuple(change(x) for x in qkv)
    assert all(torch.equal(a, b) for a, b in zip(qkv, changed, strict=True))
    assert torch.equal(_run(changed, IMAGES, 0.1), out)
    assert plans.built == 1


def test_capture_zeroes_the_rows_of_no_sequence(flashinfer, monkeypatch):
    case = Case("padded", (10, 20), zeros=3, pad_rows=9)
    qkv = make_qkv(case, 2, 80, torch.bfloat16)
    eager = _run(qkv, case, 0.1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = _run(qkv, case, 0.1)
    assert torch.equal(captured[:30], eager[:30])
    assert (captured[30:] == 0).all()


def test_capture_refuses_to_build(flashinfer, monkeypatch):
    qkv = make_qkv(IMAGES, 2, 80, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"num_seqs=8, max_len=128.*before the capt"):
        _run(qkv, IMAGES, 0.1)
    assert not flashinfer.graphs


def test_workspace_covers_every_plan_and_is_never_freed(flashinfer, plans, monkeypatch):
    for head_dim, size in ((64, 100), (72, 3 << 20), (80, 1 << 20), (96, 5 << 20)):
        monkeypatch.setattr(Graph, "workspace_size", size)
        _run(make_qkv(IMAGES, 2, head_dim, torch.bfloat16), IMAGES, 0.1)
    sizes = [workspace.numel() for workspace in plans._workspaces]
    assert sizes == [1 << 20, 4 << 20, 8 << 20]
    assert plans.workspace_bytes == 13 << 20


def test_a_build_is_counted_and_logged(flashinfer, plans, caplog, monkeypatch):
    # Once vLLM is imported its loggers no longer reach the root, where caplog listens.
    monkeypatch.setattr(_cudnn, "logger", logging.getLogger("test_cudnn"))
    with caplog.at_level(logging.DEBUG, logger="test_cudnn"):
        _run(make_qkv(IMAGES, 2, 80, torch.bfloat16), IMAGES, 0.1)
    assert plans.built == 1
    assert "num_seqs=8, max_len=128" in caplog.text


def test_a_second_device_is_refused(flashinfer, plans):
    qkv = make_qkv(IMAGES, 2, 80, torch.bfloat16)
    _run(qkv, IMAGES, 0.1)
    plans._device = torch.device("cuda:1")
    with pytest.raises(RuntimeError, match=r"on cuda:1 and cannot do so on cpu too"):
        _run(qkv, IMAGES, 0.1)


def test_a_refusal_says_what_cudnn_said(flashinfer, plans, monkeypatch):
    def refuse(graph, heur_modes):
        raise ValueError("hidden_dim should be multiple of 8")

    monkeypatch.setattr(Graph, "build", refuse)
    qkv = make_qkv(IMAGES, 2, 76, torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"\(2, 76, .*multiple of 8.*Choose another"):
        _run(qkv, IMAGES, 0.1)
    assert plans.built == 0


def test_nothing_to_attend_needs_no_plan(flashinfer):
    empty = torch.empty(0, 2, 80, dtype=torch.bfloat16)
    cu_seqlens = torch.zeros(3, dtype=torch.int32)
    out = kernel.prepare(empty, empty, empty, cu_seqlens, 0, 0.1)()
    assert out.shape[0] == 0
    q, k, v = make_qkv(IMAGES, 2, 80, torch.bfloat16)
    out = kernel.prepare(q, k, v, cu_seqlens[:1], 0, 0.1)()
    assert out.shape == q.shape and (out == 0).all()
    assert not flashinfer.graphs


def test_a_missing_flashinfer_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer.cudnn", None)
    kernel._backend.cache_clear()
    with pytest.raises(RuntimeError, match="cannot be loaded.*flashinfer-vit doctor"):
        kernel._backend()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, cu: (q, k[:-1], v, cu), r"got \(128, 4, 80\), \(127, 4, 80\)"),
        (
            lambda q, k, v, cu: (q, k[:, :3], v[:, :3], cu),
            "4 query heads .* 3 kv",
        ),
        (lambda q, k, v, cu: (q, k, v.half(), cu), "torch.bfloat16 and torch.float16"),
        (lambda q, k, v, cu: (q.float(), k.float(), v.float(), cu), "float32"),
        (lambda q, k, v, cu: (q, k, v, cu.to("meta")), "cpu and meta"),
        (lambda q, k, v, cu: (q, k, v, cu.long()), "torch.int64"),
        (lambda q, k, v, cu: (q.flatten(1), k, v, cu), r"got \(128, 320\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    args = change(*make_qkv(IMAGES, 4, 80, torch.bfloat16), IMAGES.cu_seqlens())
    with pytest.raises(ValueError, match=message):
        kernel.prepare(*args, 100, 0.1)
