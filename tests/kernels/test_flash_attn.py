# SPDX-License-Identifier: Apache-2.0
"""What reaches vLLM's FlashAttention, and calls of it that were prepared.

`test_attention.py` has what it owes its caller on a GPU.
"""

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cases import CASES, GPU_CASES, Case, make_qkv, params
from vllm_flashinfer_vit.kernels import _launch
from vllm_flashinfer_vit.kernels import flash_attn as kernel
from vllm_flashinfer_vit.kernels.attention_ref import attention_ref

CAN_RUN = torch.cuda.is_available()
HAS_HOPPER = CAN_RUN and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.usefixtures("nan_empty")
no_gpu = pytest.mark.skipif(CAN_RUN, reason="replaces the real FlashAttention")
hopper = pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
# From 257 sequences on, newer releases look blocks up in sums that they derive before.
MANY = Case("300x16", (16,) * 300)


def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    """The functions of a module that needs a GPU to load."""
    body = ast.parse(path.read_text()).body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


@pytest.fixture
def calls(monkeypatch):
    """The keyword arguments of each call; the reference computes the output."""
    if CAN_RUN:
        pytest.skip("replaces the real FlashAttention")
    seen = []

    def varlen(q, k, v, **kwargs):
        seen.append({**kwargs, "v": v})
        cu_seqlens = kwargs["cu_seqlens_q"]
        longest = kwargs["max_seqlen_q"]
        rows = cu_seqlens.max()
        out = attention_ref(q, k, v, cu_seqlens, longest, kwargs["softmax_scale"])
        kwargs["out"][:rows] = out[:rows]

    monkeypatch.setattr(kernel, "_varlen_func", lambda: varlen)
    monkeypatch.setattr(kernel, "_forward_3", lambda: None)
    monkeypatch.setattr(kernel, "_forward_4", lambda: varlen)
    monkeypatch.setattr(kernel, "_version", lambda head_dim: 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return seen


@pytest.fixture(params=[kernel.prepare, kernel.prepare_4])
def prepare(request):
    return request.param


@pytest.mark.parametrize("is_capturing", [False, True])
@pytest.mark.parametrize("case", params(CASES))
def test_rows_are_right_and_padding_is_zero_in_a_graph(
    prepare, calls, monkeypatch, case, is_capturing
):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    q, k, v = make_qkv(case, 4, 80, torch.float16, kv_heads=2)
    cu_seqlens = case.cu_seqlens()
    out = prepare(q, k, v, cu_seqlens, case.max_seqlen, 0.1)()
    expected = attention_ref(q, k, v, cu_seqlens, case.max_seqlen, 0.1)
    assert out.is_contiguous()
    assert torch.equal(out[: case.tokens], expected[: case.tokens])
    if is_capturing:
        assert (out[case.tokens :] == 0).all()
    if case.rows == 0:
        assert not calls


def test_only_a_capture_derives_cu_seqlens(prepare, calls, monkeypatch):
    case = Case("zero-tail", (10, 20), zeros=2, pad_rows=4)
    q, k, v = make_qkv(case, 2, 64, torch.float16)
    cu_seqlens = case.cu_seqlens()
    prepare(q, k, v, cu_seqlens, 20, 0.1)()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    prepare(q, k, v, cu_seqlens, 20, 0.1)()
    eager, captured = calls
    assert eager["cu_seqlens_q"] is eager["cu_seqlens_k"] is cu_seqlens
    assert captured["cu_seqlens_q"] is captured["cu_seqlens_k"]
    assert captured["cu_seqlens_q"].tolist() == [0, 10, 30, 30, 30]
    assert torch.equal(captured["v"][:30], v[:30])
    assert (captured["v"][30:] == 0).all()
    assert captured["max_seqlen_q"] == captured["max_seqlen_k"] == 20
    assert captured["causal"] is False
    if prepare is kernel.prepare:
        assert captured["fa_version"] == 3


def test_version_4_has_the_tile_that_was_measured(calls):
    for head_dim in (64, 72, 80, 96):
        q, k, v = make_qkv(Case("one", (4,)), 2, head_dim, torch.float16)
        cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
        kernel.prepare_4(q, k, v, cu_seqlens, 4, 0.1)()
    tiles = [call.get("tile_mn") for call in calls]
    assert tiles == [None, (192, 112), (192, 112), None]


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_version_4_gets_rows_that_it_can_load(calls, offset):
    """Eight values of 16 bits at a time, from where 16 bytes begin."""
    shape = (6, 2, 64)
    memory = torch.randn(6 * 2 * 64 + 16).half()
    memory = memory[(-memory.data_ptr() // 2) % 8 :]
    v = memory[offset:].as_strided(shape, (128, 64, 1))
    odd = memory.as_strided(shape, (65, 64, 1))
    cu_seqlens = torch.tensor([0, 6], dtype=torch.int32)
    for given in (v, odd):
        out = kernel.prepare_4(v, v, given, cu_seqlens, 6, 0.1)()
        torch.testing.assert_close(out, attention_ref(v, v, given, cu_seqlens, 6, 0.1))
    assert (calls[0]["v"] is v) is (offset != 1)
    assert calls[1]["v"].is_contiguous()


def test_vllm_takes_the_arguments(prepare, calls):
    """Its modules need a GPU to load, so the sources are read."""
    vllm = importlib.util.find_spec("vllm")
    folder = Path(vllm.origin).parent / "vllm_flash_attn"
    path, name = folder / "flash_attn_interface.py", "flash_attn_varlen_func"
    if prepare is kernel.prepare_4:
        path, name = folder / "cute" / "interface.py", "_flash_attn_fwd"
    functions = {
        name: {arg.arg for arg in node.args.args + node.args.kwonlyargs}
        for name, node in functions_of(path).items()
    }
    q, k, v = make_qkv(Case("one", (4,)), 2, 80, torch.float16)
    prepare(q, k, v, torch.tensor([0, 4], dtype=torch.int32), 4, 0.1)()
    assert set(calls[0]) <= functions[name]

    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    assert "head_size" in inspect.signature(get_flash_attn_version).parameters


@pytest.mark.parametrize("is_clean", [False, True])
@pytest.mark.parametrize("is_capturing", [False, True])
def test_a_prepared_call_reads_new_values(
    prepare, calls, monkeypatch, is_capturing, is_clean
):
    """In a capture each layer's v has padding of its own, unless that is clean."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    case = Case("zero-tail", (10, 20), zeros=2 * is_capturing, pad_rows=4)
    q, k, v = make_qkv(case, 2, 64, torch.float16)
    cu_seqlens = case.cu_seqlens()
    call = prepare(q, k, v, cu_seqlens, 20, 0.1, is_clean)
    assert not calls
    outs = []
    for seed in (1, 2):
        for x, new in zip(
            (q, k, v), make_qkv(case, 2, 64, torch.float16, seed=seed), strict=True
        ):
            x.copy_(new)
        v[30:] = 1 if is_clean else float("nan")
        outs.append(call())
        expected = attention_ref(q, k, v, cu_seqlens, 20, 0.1)
        assert torch.equal(outs[-1][:30], expected[:30])
        if is_capturing:
            assert (v[30:] == is_clean).all() and (outs[-1][30:] == 0).all()
    assert outs[0] is outs[1]
    assert len(calls) == 2


@pytest.mark.parametrize(("tokens", "offsets"), [(0, [0, 0]), (3, [0])])
def test_a_prepared_call_without_a_sequence(prepare, calls, tokens, offsets):
    qkv = torch.ones(3, tokens, 2, 64, dtype=torch.float16)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    call = prepare(*qkv, cu_seqlens, 1, 0.1)
    for _ in range(2):
        out = call()
        assert out.shape == (tokens, 2, 64) and (out == 0).all()
        out.fill_(1)
    assert not calls


def test_version_3_gets_what_vllm_gives_it(calls, monkeypatch):
    """vLLM's own call of the op, evaluated from its source."""
    given = []
    monkeypatch.setattr(kernel, "_forward_3", lambda: lambda *args: given.append(args))
    q, k, v = make_qkv(Case("two", (4, 6)), 2, 80, torch.float16)
    cu_seqlens = torch.tensor([0, 4, 10], dtype=torch.int32)
    out = kernel.prepare(q, k, v, cu_seqlens, 6, 0.1)()
    assert not calls

    vllm = Path(importlib.util.find_spec("vllm").origin).parent
    path = vllm / "vllm_flash_attn" / "flash_attn_interface.py"
    varlen = functions_of(path)["flash_attn_varlen_func"]
    first = -len(varlen.args.defaults)
    names = {
        arg.arg: ast.literal_eval(default)
        for arg, default in zip(
            varlen.args.args[first:], varlen.args.defaults, strict=True
        )
        if not isinstance(default, ast.Name)
    }
    names |= {"q": q, "k": k, "v": v, "out": out, "real_window_size": (-1, -1)}
    names |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    names |= {"max_seqlen_q": 6, "max_seqlen_k": 6, "softmax_scale": 0.1}
    (call,) = (
        node
        for node in ast.walk(varlen)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("fa3_C.fwd")
    )
    expected = [eval(ast.unparse(argument), names) for argument in call.args]
    assert not call.keywords
    (arguments,) = given
    assert len(arguments) == len(expected) == len(kernel._ARGUMENTS_3)
    for name, x, y in zip(kernel._ARGUMENTS_3, arguments, expected, strict=True):
        assert x is y or (type(x), x) == (type(y), y), name


def test_version_3_runs_by_an_op_that_is_known_only(monkeypatch, caplog):
    _launch.say_unknown.cache_clear()
    caplog.set_level("INFO", "vllm.plugins.flashinfer_vit")
    arguments = [SimpleNamespace(name=name) for name in kernel._ARGUMENTS_3]
    schema = SimpleNamespace(arguments=arguments)
    op = SimpleNamespace(_schema=schema)
    module = SimpleNamespace(fwd=SimpleNamespace(default=op))
    monkeypatch.setattr(kernel, "_varlen_func", lambda: None)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", module, raising=False)
    find = kernel._forward_3.__wrapped__
    assert find() is op
    assert not caplog.records
    arguments.append(SimpleNamespace(name="new"))
    assert find() is None
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace())
    assert find() is None
    # Said, since only the host's time shows it; and said once.
    (record,) = caplog.records
    assert "FlashAttention 3" in record.getMessage()


def test_version_3_leaves_another_d_stride_to_vllm(calls, monkeypatch):
    """Its interface copies such a tensor, which each call must do anew."""
    seen = []
    monkeypatch.setattr(kernel, "_forward_3", lambda: pytest.fail)
    monkeypatch.setattr(kernel, "_varlen_func", lambda: lambda *a, **k: seen.append(a))
    q, k, v = make_qkv(Case("one", (4,)), 2, 64, torch.float16)
    wide = torch.randn(4, 2, 128).half()[..., ::2]
    kernel.prepare(q, k, wide, torch.tensor([0, 4], dtype=torch.int32), 4, 0.1)()
    assert seen[0][2] is wide


class Forward:
    """vLLM's interface of version 4 as far as its compiled functions go."""

    def __init__(self, launches: int = 1) -> None:
        self.launches = launches
        self.compile_cache = self.cache = {}
        self.launched = 0
        self.fails = False

    def __call__(self, q, k, v, **kwargs):
        if self.fails:
            raise RuntimeError("cannot compile")

        def compiled(q, k, v, out, cu_seqlens, longest, scale):
            self.launched += 1
            out.copy_(attention_ref(q, k, v, cu_seqlens, longest, scale))

        cache = self.compile_cache
        if "key" not in cache:
            cache["key"] = compiled
        for _ in range(self.launches):
            cache["key"](
                q.detach(),
                k.detach(),
                v.detach(),
                kwargs["out"].detach(),
                kwargs["cu_seqlens_q"],
                kwargs["max_seqlen_q"],
                kwargs["softmax_scale"],
            )


@pytest.fixture
def forward(calls, monkeypatch):
    forward = Forward()
    monkeypatch.setattr(kernel, "_forward_4", lambda: forward)
    return forward


def prepare_4(v: torch.Tensor):
    """A call of version 4, and what it should return by then."""
    q, k, _ = make_qkv(Case("two", (4, 6)), 2, 64, torch.float16)
    cu_seqlens = torch.tensor([0, 4, 10], dtype=torch.int32)
    call = kernel.prepare_4(q, k, v, cu_seqlens, 6, 0.1)
    return call, lambda: attention_ref(q, k, v, cu_seqlens, 6, 0.1)


def test_version_4_is_called_by_its_compiled_function(forward):
    v = torch.randn(10, 2, 64).half()
    call, expected = prepare_4(v)
    assert list(forward.cache) == ["key"]
    assert forward.compile_cache is forward.cache
    assert forward.launched == 0
    # From here on the interface is not called.
    forward.fails = True
    for factor in (1, 2):
        v *= factor
        assert torch.equal(call(), expected())
    assert forward.launched == 2


def test_version_4_copies_odd_rows_each_time(forward):
    v = torch.randn(10, 2, 65).half()[..., :64]
    call, expected = prepare_4(v)
    for factor in (1, 2):
        v *= factor
        assert torch.equal(call(), expected())


@pytest.mark.parametrize("launches", [0, 2])
def test_version_4_with_other_launches_runs_by_its_interface(forward, launches):
    forward.launches = launches
    v = torch.randn(10, 2, 64).half()
    call, _ = prepare_4(v)
    assert forward.launched == 0
    call()
    call()
    assert forward.launched == 2 * launches


def test_version_4_that_fails_leaves_the_interface_as_it_was(forward):
    forward.fails = True
    with pytest.raises(RuntimeError, match="cannot compile"):
        prepare_4(torch.randn(10, 2, 64).half())
    assert forward.compile_cache is forward.cache


@no_gpu
@pytest.mark.extended
def test_version_4_compiles_for_hopper():
    """No GPU is needed to see whether this vLLM's does."""
    script = Path(__file__).with_name("compile_flash_attn_4.py")
    env = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "3"


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("case", params([*GPU_CASES, MANY]))
@pytest.mark.parametrize("version", [3, 4])
def test_a_prepared_call_has_the_bits_of_the_interface(
    version, case, head_dim, dtype, monkeypatch
):
    if version == 3 and kernel.fa_version(head_dim) != 3:
        pytest.skip("vLLM picks another version")
    run = kernel._run if version == 3 else kernel._run_4
    prepare = kernel.prepare if version == 3 else kernel.prepare_4
    # An offset that falls would be a negative length outside of a graph.
    cu_seqlens = Case(case.name, case.lengths, case.repeats).cu_seqlens("cuda")
    q, k, v = make_qkv(case, 4, head_dim, dtype, device="cuda")
    # Outside of a graph nothing keeps NaN after the last sequence from its last rows.
    v[case.tokens :] = 0
    call = prepare(q, k, v, cu_seqlens, case.max_seqlen, 0.1)
    expected = []
    for _ in range(2):
        q.mul_(1.5)
        v.add_(1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        longest = {"max_seqlen_q": case.max_seqlen, "max_seqlen_k": case.max_seqlen}
        offsets = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        run(q, k, v, softmax_scale=0.1, causal=False, out=out, **offsets, **longest)
        expected.append((q.clone(), v.clone(), out))
    with monkeypatch.context() as context:
        # What is prepared needs neither.
        context.setattr(kernel, "_varlen_func", lambda: pytest.fail("not the op"))
        context.setattr(kernel, "_forward_4", lambda: pytest.fail("not compiled"))
        for new_q, new_v, out in expected:
            q.copy_(new_q)
            v.copy_(new_v)
            assert torch.equal(call()[: case.tokens], out[: case.tokens])


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("is_clean", [False, True])
def test_prepared_calls_in_a_graph(prepare, is_clean):
    """One call for two layers, each of which writes NaN to v's padding, or numbers."""
    case = Case("zero-tail", (10, 20), zeros=2, pad_rows=34)
    q, k, v = make_qkv(case, 4, 80, torch.bfloat16, device="cuda")
    layers = [v.clone(), v.clone() + 1]
    for layer in layers:
        layer[case.tokens :] = 3.0 if is_clean else float("nan")
    cu_seqlens = case.cu_seqlens("cuda")
    # Compiles outside of the capture.
    plain = Case("plain", case.lengths).cu_seqlens("cuda")
    prepare(q, k, v, plain, case.rows, 0.1)()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call = prepare(q, k, v, cu_seqlens, case.rows, 0.1, is_clean)
        outs = []
        for layer in layers:
            v.copy_(layer)
            outs.append(call().clone())
    for lengths in ((10, 20), (30,), (1, 2, 3)):
        new = Case("new", lengths, zeros=4 - len(lengths)).cu_seqlens("cuda")
        cu_seqlens.copy_(new)
        graph.replay()
        tokens = sum(lengths)
        for layer, out in zip(layers, outs, strict=True):
            assert (out[tokens:] == 0).all()
            exact = Case("exact", lengths).cu_seqlens("cuda")
            expected = prepare(
                q[:tokens], k[:tokens], layer[:tokens], exact, tokens, 0.1
            )()
            torch.testing.assert_close(out[:tokens], expected, atol=0.01, rtol=0.01)
