# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's encoder: Transformers' blocks in a handful of kernels each.

Transformers runs a block's seven norms, rotary, sums and activation as more than a
hundred small kernels, most of them in fp32. Here they are four: one for the heads of q,
k and v, one for each sum with the norms at its sides, and the activation. Linear layers
stay modules that are called, so that what vLLM makes of them (quantised, with adapters)
is what runs; so does attention, by this package's layer.

Numerics: see the kernels. Norms and sums that follow each other are not rounded in
between, and cosines and sines are fp32, where Transformers has the model's dtype.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from vllm_flashinfer_vit.patches.source import fingerprint

# What was read, in Transformers 5.16 to 5.24: the work that `Encoder` does. Forms of a
# method differ in decorators, and in how the rotary tables are written down.
_MODULE = "transformers.models.gemma4.modeling_gemma4"
_ROTARY = "Gemma4VisionRotaryEmbedding"
_ABSENT = ""
_READ: Mapping[str, tuple[str, ...]] = {
    "Gemma4VisionEncoder.__init__": ("1785d64aba7f",),
    "Gemma4VisionEncoder.forward": ("d1a5c655fd9a",),
    "Gemma4VisionEncoderLayer.__init__": ("3b4cc29c4cb2",),
    "Gemma4VisionEncoderLayer.forward": ("74b85f5bc463", "7ca19a0ee521"),
    "Gemma4VisionAttention.__init__": ("cc7638acd1b7",),
    "Gemma4VisionAttention.forward": ("e0560a408691", "320e5e1c63c7"),
    "Gemma4VisionMLP.__init__": ("507cbe420b23",),
    "Gemma4VisionMLP.forward": ("d53cb3e4f854",),
    "Gemma4RMSNorm.__init__": ("bf2eff494265",),
    "Gemma4RMSNorm.forward": ("1710b1dc7aa2",),
    "Gemma4RMSNorm._norm": ("b8568170345a",),
    f"{_ROTARY}.forward": (
        "717891f6bcd1",
        "77b3e81090e2",
        "68df3684fd0e",
        "bda0c3ab1541",
        "d7888756c72d",
    ),
    # The first form of `forward` does not call it.
    f"{_ROTARY}.recomposition_frequencies": ("04c369ed5acb", _ABSENT),
    "apply_multidimensional_rope": ("50d59453a1f5",),
    "apply_rotary_pos_emb": ("81657c8e019a",),
    "rotate_half": ("f224148c2150",),
}
_ACTIVATION = "gelu_pytorch_tanh"


def unread() -> str | None:
    """Say in what the installed Transformers is not as it was read, None if it is."""
    for name, marks in _READ.items():
        try:
            found = fingerprint(f"{_MODULE}:{name}")
        except LookupError as error:
            if _ABSENT in marks:
                continue
            return str(error.args[0])
        if found not in marks:
            return f"{name} of this Transformers is not as it was read"
    return None


def unfit(tower: Any) -> str | None:
    """Say why a tower's blocks stay Transformers' own, None if they need not.

    Args:
        tower: Transformers' `Gemma4VisionModel`.
    """
    from vllm import envs

    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set"
    activation = tower.config.hidden_activation
    if activation != _ACTIVATION:
        return f"their activation is {activation}"
    return unread()


class _Kernels(NamedTuple):
    """What runs between linear layers; the same in PyTorch on a CPU."""

    turn: Callable[..., None]
    norm_add: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    gated_gelu: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    @classmethod
    def on(cls, device: torch.device) -> "_Kernels":
        if device.type == "cuda":
            from vllm_flashinfer_vit.kernels.gated_gelu import gated_gelu
            from vllm_flashinfer_vit.kernels.norm_add import norm_add
            from vllm_flashinfer_vit.kernels.turn import turn

            return cls(turn, norm_add, gated_gelu)
        from vllm_flashinfer_vit.kernels.gated_gelu_ref import gated_gelu_ref
        from vllm_flashinfer_vit.kernels.norm_add_ref import norm_add_ref
        from vllm_flashinfer_vit.kernels.turn_ref import turn_ref

        return cls(turn_ref, norm_add_ref, gated_gelu_ref)


class Encoder:
    """Runs the blocks of an encoder, in place of its `forward`."""

    def __init__(
        self,
        encoder: Any,
        attentions: list[torch.nn.Module],
        offsets: Callable[..., torch.Tensor | None],
    ) -> None:
        """Take an encoder whose tower is not `unfit`.

        Args:
            encoder: Transformers' `Gemma4VisionEncoder`.
            attentions: The layer that attends in each block.
            offsets: As `transformers_towers.offsets`.
        """
        self._encoder = encoder
        self._stock = encoder.forward
        self._attentions = attentions
        self._offsets = offsets

    def __call__(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        pixel_position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Encode images, as `Gemma4VisionEncoder.forward` does.

        Args:
            inputs_embeds: `[B, S, C]`.
            attention_mask: `[B, S] bool`, True for tokens, which come before padding;
                None where there is no padding.
            pixel_position_ids: `[B, S, 2]`, the column and row of each patch.
            **kwargs: What Transformers hands on to its attention.
        """
        if (
            pixel_position_ids is None
            or inputs_embeds.requires_grad
            or torch.compiler.is_compiling()
        ):
            return self._stock(
                inputs_embeds,
                attention_mask,
                pixel_position_ids=pixel_position_ids,
                **kwargs,
            )
        from transformers.modeling_outputs import BaseModelOutputWithPast

        hidden = inputs_embeds
        # Transformers' own cannot take an empty batch.
        if hidden.numel():
            hidden = self._run(hidden, attention_mask, pixel_position_ids)
        return BaseModelOutputWithPast(last_hidden_state=hidden)

    def _run(
        self,
        embeds: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        kernels = _Kernels.on(embeds.device)
        rows, length, width = embeds.shape
        cu_seqlens = self._offsets(rows, length, mask)
        cos, sin = self._tables(embeds, positions)
        x = embeds.reshape(-1, width)
        # A slice of a ModuleList would be a new one, in every pass.
        blocks = [*self._encoder.layers][: self._encoder.config.num_hidden_layers]
        normed: torch.Tensor | None = blocks[0].input_layernorm(x)
        for place, (block, attend) in enumerate(
            zip(blocks, self._attentions, strict=True)
        ):
            attention, mlp = block.self_attn, block.mlp
            q, k, v = (
                project(normed).view(rows * length, -1, attention.head_dim)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            weights = attention.q_norm.weight, attention.k_norm.weight
            span = attention.head_dim // 4
            kernels.turn(q, k, cos, sin, weights, attention.q_norm.eps, span=span, v=v)
            heads = (one.view(rows, length, *one.shape[1:]) for one in (q, k, v))
            context = attend(*heads, cu_seqlens=cu_seqlens, max_seqlen=length)
            branch = attention.o_proj(context.reshape(rows * length, -1))
            norm = block.post_attention_layernorm
            following = block.pre_feedforward_layernorm.weight
            x, normed = kernels.norm_add(x, branch, norm.weight, norm.eps, following)
            hidden = kernels.gated_gelu(mlp.gate_proj(normed), mlp.up_proj(normed))
            branch = mlp.down_proj(hidden)
            norm = block.post_feedforward_layernorm
            is_last = place + 1 == len(blocks)
            following = None if is_last else blocks[place + 1].input_layernorm.weight
            x, normed = kernels.norm_add(x, branch, norm.weight, norm.eps, following)
        return x.view(embeds.shape)

    def _tables(
        self, embeds: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, `[T, D / 2]` fp32: of columns, then of rows."""
        # It asks its first argument for nothing but dtype and device.
        like = embeds.new_empty(0, dtype=torch.float32)
        cos, sin = (
            # Each half of a head has its angles twice.
            table.unflatten(-1, (2, 2, -1))[..., 0, :].flatten(0, 1).flatten(1)
            for table in self._encoder.rotary_emb(like, positions)
        )
        return cos, sin
