# SPDX-License-Identifier: Apache-2.0
"""The encoder attention layer that vLLM builds in place of `MMEncoderAttention`."""

import os
from importlib.metadata import version

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mm_encoder_attention import (
    MMEncoderAttention,
)
from vllm.platforms import current_platform

from vllm_flashinfer_vit import __version__, patches
from vllm_flashinfer_vit.choices.lookup import plan_of
from vllm_flashinfer_vit.engine import warmup
from vllm_flashinfer_vit.engine.selection import (
    NotServedError,
    flashinfer_requested,
    served,
)
from vllm_flashinfer_vit.fp8 import policy as fp8
from vllm_flashinfer_vit.kernels.flash_attn import fa_version
from vllm_flashinfer_vit.ops import attention as ops
from vllm_flashinfer_vit.ops.batch import Batch
from vllm_flashinfer_vit.settings import ENV_STRICT, Settings

logger = init_logger("vllm.plugins.flashinfer_vit")


class FlashInferViTAttention(MMEncoderAttention):
    """Encoder attention by this package's custom op, if FLASHINFER was asked for.

    Otherwise the object becomes a plain `MMEncoderAttention` before it is built, so
    that other backends run exactly what they run without this package.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        prefix: str = "",
    ) -> None:
        """Build the layer; see `MMEncoderAttention` for the arguments.

        Raises:
            NotServedError: FLASHINFER cannot be had, see `selection.served`; or FP8
                attention, see `fp8.policy_for`.
            ScaleError: The file of FP8 scales cannot be used, or not for this layer.
        """
        choices = policy = None
        settings = Settings.from_env()
        if flashinfer_requested():
            dtype = torch.get_default_dtype()
            try:
                policy = fp8.policy_for(prefix, head_size, dtype, settings)
                choices = policy.choices if policy else served(head_size, dtype)
            except NotServedError as error:
                raise NotServedError(f"layer {prefix!r}: {error}") from None
        if choices is None:
            _refuse_fp8(prefix)
            if settings.fix_graph_padding:
                patches.apply_graph_patches()
            self.__class__ = MMEncoderAttention
            MMEncoderAttention.__init__(
                self, num_heads, head_size, scale, num_kv_heads, prefix
            )
            return
        super().__init__(num_heads, head_size, scale, num_kv_heads, prefix)
        self._settings = settings
        self._strict = settings.strict
        self._plan = plan_of(choices)
        self._fp8_policy = policy
        method = f" {policy.method} {policy.save}" if policy else ""
        patches.apply_model_patches(settings, self._plan.text + method)
        _warn_of_ignored_graphs()
        if any("flash_attn" in choice.kernels for choice in choices):
            # Decided here, where the engine's configuration is in force.
            fa_version(head_size)
        for choice in choices:
            logger.info_once(
                "vllm-flashinfer-vit %s: sequences %s tokens, head dim %d, %s: %s (%s)",
                __version__,
                f"of up to {choice.max_len}" if choice.max_len else "of any other",
                head_size,
                self.dtype,
                choice.served_by,
                choice.reason,
            )
        self._fp8_state = None
        if fp8.requested():
            fp8.enroll(self)
        if policy is not None:
            logger.info_once("vllm-flashinfer-vit %s: %s", __version__, policy.summary)
            if policy.has_state:
                self._fp8_state = fp8.ScaleState(policy, prefix, head_size)
            if policy.observes:
                patches.apply_fp8_patches(settings)

    def _init_fp8_state(self) -> None:
        # The base class would judge FP8 by the backend that the models are told.
        self.fp8_enabled = False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Warm up, with scales where the weights are; vLLM calls it after loading.

        Raises:
            NotServedError: Settings name a layer that the model does not have.
            ScaleError: The scale file does.
        """
        if fp8.requested():
            fp8.check_names(self._fp8_policy, self._settings)
        if current_platform.is_cuda():
            warmup.warm_up(self)
        if self._fp8_state is not None:
            self._fp8_state.reset()

    @property
    def signature(self) -> tuple[object, ...]:
        """What selects the variants of kernels; equal layers run the same ones."""
        heads = (self.num_heads, self.num_kv_heads, self.head_size)
        method = self._fp8_policy.method if self._fp8_policy else None
        return (self._plan.text, self.dtype, *heads, method)

    @property
    def bounds(self) -> tuple[int, ...]:
        """The lengths, in tokens, up to which other kernels serve; ascending."""
        return self._plan.bounds

    def kernel_for(self, max_seqlen: int, mean_len: float | None = None) -> str:
        """Return the name of a batch's kernel; see `Plan.kernel_for`."""
        return self._plan.kernel_for(max_seqlen, mean_len)

    def forward_cuda(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: torch.Tensor | None = None,
        sequence_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend within each sequence.

        Args:
            query: `[B, S, H, D]` or `[B, S, H * D]`, any strides.
            key: `[B, S_kv, H_kv, D]` or `[B, S_kv, H_kv * D]`, any strides.
            value: As `key`.
            cu_seqlens: `[N + 1] int32`, prefix sums over the B * S tokens, or None for
                B sequences of S tokens.
            max_seqlen: `[]`, an upper bound of the sequence lengths.
            sequence_lengths: Not used; lengths come from `cu_seqlens`.

        Returns:
            A contiguous tensor of the query's shape and dtype.

        Raises:
            ValueError: The tensors do not fit each other; the layer is named.
        """
        batch, q_len = query.shape[:2]
        if key.shape[1] != q_len:
            if cu_seqlens is not None:
                raise ValueError(
                    f"{self._where()}: one cu_seqlens cannot hold {q_len} query and "
                    f"{key.shape[1]} key tokens; call without it for a dense batch"
                )
            return self._fall_back("query and key lengths differ", query, key, value)
        q = query.reshape(batch * q_len, self.num_heads, self.head_size)
        k = key.reshape(batch * q_len, self.num_kv_heads, self.head_size)
        v = value.reshape(batch * q_len, self.num_kv_heads, self.head_size)
        batch_of_tokens = Batch(
            q,
            k,
            v,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            seq_len=q_len if cu_seqlens is None else 0,
        )
        out = self.attend(batch_of_tokens)
        return out.view(query.shape)

    forward_cpu = forward_cuda

    def attend(self, batch: Batch) -> torch.Tensor:
        """Run the custom op on a checked batch.

        Args:
            batch: q, k and v of the layer's heads and dtype. `max_seqlen` may be a
                plain int, as some models hand it over.

        Returns:
            `[T, H, D]`, contiguous, q's dtype.

        Raises:
            ValueError: The tensors do not fit each other; the layer is named.
        """
        self._check(batch)
        if isinstance(batch.max_seqlen, int):
            max_seqlen = torch.tensor(batch.max_seqlen, dtype=torch.int32)
            batch = batch._replace(max_seqlen=max_seqlen)
        policy = self._fp8_policy
        if policy is None:
            return ops.attention(batch, self.scale, self._plan)
        state = None if self._fp8_state is None else self._fp8_state.scales_on_device
        fp8 = ops.Fp8(policy.method, policy.save, state)
        return ops.fp8_attention(batch, self.scale, self._plan, fp8)

    def _where(self) -> str:
        # Only called to raise: torch.compile would guard on the name of every layer.
        return f"layer {self.layer_name!r}" if self.layer_name else "a nameless layer"

    def _check(self, batch: Batch) -> None:
        q, k, v, cu_seqlens = batch.q, batch.k, batch.v, batch.cu_seqlens
        if not q.dtype == k.dtype == v.dtype:
            raise ValueError(
                f"{self._where()}: query, key and value are {q.dtype}, {k.dtype}, "
                f"{v.dtype}; they must share one dtype"
            )
        if q.dtype != self.dtype:
            raise ValueError(
                f"{self._where()}: built for {self.dtype}, called with {q.dtype}; "
                "convert the input or set --dtype to the activation dtype"
            )
        if not q.device == k.device == v.device:
            raise ValueError(
                f"{self._where()}: query, key and value are on {q.device}, {k.device}, "
                f"{v.device}; they must share one device"
            )
        if cu_seqlens is None:
            return
        if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
            raise ValueError(
                f"{self._where()}: cu_seqlens is {cu_seqlens.dtype} of shape "
                f"{tuple(cu_seqlens.shape)}; it must be int32 of shape [N + 1]"
            )
        if cu_seqlens.shape[0] < 2:
            raise ValueError(
                f"{self._where()}: cu_seqlens has {cu_seqlens.shape[0]} entries, so "
                "there is no sequence; was the list of grids empty?"
            )
        if cu_seqlens.device != q.device:
            raise ValueError(
                f"{self._where()}: cu_seqlens is on {cu_seqlens.device}, the query on "
                f"{q.device}; move it once per forward pass, not per layer"
            )

    def _fall_back(
        self,
        reason: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        if self._strict:
            raise ValueError(
                f"{self._where()}: FLASHINFER cannot serve it: {reason}. "
                f"Unset {ENV_STRICT} to run vLLM's own kernel instead."
            )
        logger.warning_once(
            "FLASHINFER cannot serve layer %s: %s. vLLM's TORCH_SDPA runs it instead.",
            self.layer_name,
            reason,
        )
        # The FLASH_ATTN path in vLLM's tree takes the key length from the query.
        return self._forward_sdpa(query, key, value)


def _warn_of_ignored_graphs() -> None:
    config = get_current_vllm_config_or_none()
    if (
        config is None
        or not config.compilation_config.cudagraph_mm_encoder
        or not config.use_v2_model_runner
    ):
        return
    from vllm_flashinfer_vit.commands.doctor import runner_note

    if note := runner_note(version("vllm"), os.environ):
        logger.warning_once("%s", note)


def _refuse_fp8(layer_name: str) -> None:
    # On other platforms, vLLM has FP8 encoder attention of its own.
    if fp8.requested() and (current_platform.is_cuda() or current_platform.is_cpu()):
        raise ValueError(
            f"layer {layer_name!r}: mm_encoder_attn_dtype=fp8 runs with "
            "--mm-encoder-attn-backend FLASHINFER; set it, or leave "
            "--mm-encoder-attn-dtype out"
        )
