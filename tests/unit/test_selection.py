# SPDX-License-Identifier: Apache-2.0
"""Whether FLASHINFER is served: by this vLLM, with a forced kernel, by which layer."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.model_executor.custom_op import op_registry_oot  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

from vllm_flashinfer_vit.choices.usable import NotServedError  # noqa: E402
from vllm_flashinfer_vit.engine import selection  # noqa: E402
from vllm_flashinfer_vit.settings import ENV_KERNEL, Settings  # noqa: E402

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("kernel", "attn_dtype", "forced"),
    [
        (None, "fp8", None),
        ("triton", "fp8", "triton"),
        ("triton_fp8", None, "triton_fp8"),
        # For what runs in FP8; other layers have their own.
        ("triton_fp8", "fp8", None),
    ],
)
def test_a_kernel_that_is_forced_for_fp8_is_not_forced_for_other_layers(
    kernel: str | None,
    attn_dtype: str | None,
    forced: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace(mm_encoder_attn_dtype=attn_dtype)
    monkeypatch.setattr(selection, "get_multimodal_config", lambda: config)
    monkeypatch.setattr(selection, "resolve", lambda *asked: asked)
    settings = Settings(kernel=kernel)
    asked = selection.served(72, BF16, settings)
    assert asked == (72, BF16, forced, settings.tuned_dir)


def test_a_kernel_is_forced_where_nothing_is_said_of_a_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selection, "get_multimodal_config", lambda: None)
    monkeypatch.setattr(selection, "resolve", lambda *asked: asked)
    asked = selection.served(72, BF16, Settings(kernel="triton_fp8"))
    assert asked is not None and asked[2] == "triton_fp8"


@pytest.mark.parametrize(
    ("forced", "advice"), [(None, ""), ("triton", rf"\. Unset {ENV_KERNEL}=triton")]
)
def test_what_no_kernel_serves_says_why(
    forced: str | None, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise NotServedError("why")

    monkeypatch.setattr(selection, "choices_here", refuse)
    with pytest.raises(
        NotServedError, match=rf"head dim 72 in torch\.bfloat16: why{advice}$"
    ):
        selection.resolve.__wrapped__(72, BF16, forced, None)


def test_an_old_vllm_is_refused_where_nothing_is_strict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selection, "vllm_version", lambda: "0.19.1")
    monkeypatch.setattr(selection, "resolve", selection.resolve.__wrapped__)
    with pytest.raises(NotServedError, match=r"vLLM 0\.19\.1 is installed"):
        selection.served(72, BF16, Settings())


@pytest.mark.parametrize("registered", [None, torch.nn.Module])
def test_without_its_layer_nothing_is_promised(
    registered: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if registered is None:
        monkeypatch.delitem(op_registry_oot, "MMEncoderAttention", raising=False)
    else:
        monkeypatch.setitem(op_registry_oot, "MMEncoderAttention", registered)
    monkeypatch.setattr(selection, "served", lambda *_: ())
    platform = SimpleNamespace(is_cuda=lambda: False, is_cpu=lambda: True)
    monkeypatch.setattr(selection, "current_platform", platform)

    def stock(*_: Any) -> None:
        raise AssertionError("vLLM was asked")

    answer = selection.answer_flash_attn(stock)
    with pytest.raises(NotServedError, match="could not register"):
        answer(object, 72, BF16, AttentionBackendEnum.FLASHINFER)


@pytest.mark.parametrize(
    ("backend", "is_cuda", "choices", "expected"),
    [
        ("TORCH_SDPA", True, (), "TORCH_SDPA"),
        ("FLASHINFER", False, (), "FLASHINFER"),
        # It then answers as if nothing was asked for.
        ("FLASHINFER", True, None, None),
    ],
    ids=["another-backend", "another-platform", "not-served"],
)
def test_vllm_answers_where_nothing_is_served(
    backend: str,
    is_cuda: bool,
    choices: tuple[()] | None,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selection, "served", lambda *_: choices)
    platform = SimpleNamespace(is_cuda=lambda: is_cuda, is_cpu=lambda: False)
    monkeypatch.setattr(selection, "current_platform", platform)
    answer = selection.answer_flash_attn(lambda *asked: asked)
    asked = answer(object, 72, BF16, AttentionBackendEnum[backend])
    theirs = None if expected is None else AttentionBackendEnum[expected]
    assert asked == (object, 72, BF16, theirs)


def test_it_knows_itself_within_another_plugins_wrapper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or it would wrap that one, too."""

    def stock(*_: Any) -> None: ...

    def wrapped(original: Any) -> Any:
        return functools.wraps(original)(lambda *asked: original(*asked))

    ours = selection.answer_flash_attn(stock)
    for method, expected in (
        (stock, False),
        (wrapped(stock), False),
        (ours, True),
        (wrapped(ours), True),
        (wrapped(wrapped(ours)), True),
    ):
        platform = type("Platform", (), {"get_vit_attn_backend": classmethod(method)})
        monkeypatch.setattr(selection, "current_platform", platform)
        assert selection.selection_is_wrapped() is expected


def test_a_layer_is_named_by_position_or_by_name() -> None:
    class Stock:
        def __init__(
            self,
            num_heads: int,
            head_size: int,
            scale: float | None = None,
            num_kv_heads: int | None = None,
            prefix: str = "",
        ) -> None: ...

    for args, named, expected in (
        ((4, 72), {}, ("", 72)),
        ((4, 72, None, None, "a.layer"), {}, ("a.layer", 72)),
        ((4,), {"head_size": 80, "prefix": "a.layer"}, ("a.layer", 80)),
    ):
        assert selection.name_and_head_dim(Stock, args, named) == expected


def test_what_an_engine_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = AttentionBackendEnum
    for config, expected in (
        # A model that takes no images.
        (None, False),
        (SimpleNamespace(mm_encoder_attn_backend=None), False),
        (SimpleNamespace(mm_encoder_attn_backend=backend.TORCH_SDPA), False),
        (SimpleNamespace(mm_encoder_attn_backend=backend.FLASHINFER), True),
    ):
        monkeypatch.setattr(selection, "get_multimodal_config", lambda c=config: c)
        assert selection.flashinfer_requested() is expected
