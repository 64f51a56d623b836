# SPDX-License-Identifier: Apache-2.0
"""The blocks of Gemma 4's towers, at their true size: Transformers' encoder in vLLM.

An engine builds it with Transformers' own class, and puts vLLM's linear layers in. What
is in front of the blocks is a random stream here, and what comes after is left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_flashinfer_vit.towers.whole_models import WHOLE_MODELS

Grids = Sequence[Sequence[int]]


class Sizes(NamedTuple):
    """A tower's, as in its config.

    Attributes:
        depth: Blocks.
        width: Columns of the stream.
        num_heads: Of q, k and v.
        head_size: Values of a head.
        inner: Columns between the linear layers of an MLP.
    """

    depth: int
    width: int
    num_heads: int
    head_size: int
    inner: int


def _sizes(vision: Mapping[str, Any]) -> Sizes:
    return Sizes(
        vision["num_hidden_layers"],
        vision["hidden_size"],
        vision["num_attention_heads"],
        vision["head_dim"],
        vision["intermediate_size"],
    )


# Transformers' defaults, and the larger one of vLLM's list of towers.
TOWERS: Mapping[str, Sizes] = {
    "Gemma-4-768": Sizes(16, 768, 12, 64, 3072),
    "Gemma-4-1152": _sizes(WHOLE_MODELS["google/gemma-4-31B-it"].vision),
}


# What `bench_encoder.py` runs of them if it is not told: a small image and the largest.
CASES = ("1x1024", "8x1024", "1x2520", "8x2520")


class Gemma4Stack(nn.Module):
    """An encoder of Transformers in a model of vLLM's kind, called as a tower is.

    Attributes:
        encoder: Transformers' `Gemma4VisionEncoder`.
        sizes: What stands for an attention layer where no module attends.
    """

    def __init__(self, sizes: Sizes, depth: int, vllm_config: Any) -> None:
        """Build the blocks, in an engine's configuration.

        Raises:
            ImportError: This Transformers or vLLM knows no such tower.
        """
        from transformers import AutoModel, Gemma4VisionConfig
        from vllm.model_executor.models.interfaces import SupportsMultiModal
        from vllm.model_executor.models.transformers.utils import (
            recursive_replace_linear,
        )

        class Model(nn.Module, SupportsMultiModal):
            """What marks the tower as one."""

            def __init__(self) -> None:
                super().__init__()
                config = Gemma4VisionConfig(
                    hidden_size=sizes.width,
                    intermediate_size=sizes.inner,
                    num_hidden_layers=depth,
                    num_attention_heads=sizes.num_heads,
                    num_key_value_heads=sizes.num_heads,
                    head_dim=sizes.head_size,
                )
                with self._mark_tower_model(vllm_config, {"image", "video"}):
                    self.vision_tower = AutoModel.from_config(config)
                    recursive_replace_linear(
                        self.vision_tower,
                        vllm_config.quant_config,
                        prefix="vision_tower",
                    )

        super().__init__()
        self.encoder = Model().vision_tower.encoder
        self.sizes = sizes

    @torch.no_grad()
    def shrink_scores(self) -> None:
        """Give the queries' norms a weight of 1/sqrt(D).

        Scores have no scale of their own: norms of weight 1 make them so large that
        rounding alone decides what blocks of random weights return.
        """
        for block in self.blocks:
            block.self_attn.q_norm.weight.fill_(self.sizes.head_size**-0.5)

    @property
    def blocks(self) -> nn.Module:
        """The blocks, one after another."""
        return self.encoder.layers

    def prepare_encoder_metadata(self, grids: Grids) -> dict[str, torch.Tensor]:
        """Return what the encoder is given for images of one size.

        Raises:
            ValueError: They are of several.
        """
        if len({(h, w) for _, h, w in grids}) > 1:
            raise ValueError("a dense batch needs images of one size")
        images, (_, height, width) = sum(t for t, _, _ in grids), grids[0]
        rows, columns = torch.meshgrid(
            torch.arange(height), torch.arange(width), indexing="ij"
        )
        places = torch.stack([columns, rows], -1).view(1, -1, 2).repeat(images, 1, 1)
        on = next(self.parameters()).device
        return {
            "pixel_position_ids": places.to(on),
            "attention_mask": torch.ones(places.shape[:2], dtype=torch.bool, device=on),
        }

    def forward(
        self,
        pixels: torch.Tensor,
        grids: Grids,
        *,
        encoder_metadata: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run the blocks on a stream.

        Args:
            pixels: `[T, C]`.
            grids: As for `prepare_encoder_metadata`.
            encoder_metadata: What that returned, or None to prepare it.
        """
        if encoder_metadata is None:
            encoder_metadata = self.prepare_encoder_metadata(grids)
        images = sum(t for t, _, _ in grids)
        x = pixels.view(images, -1, pixels.shape[1])
        out = self.encoder(inputs_embeds=x, **encoder_metadata)
        return out.last_hidden_state.reshape(pixels.shape)
