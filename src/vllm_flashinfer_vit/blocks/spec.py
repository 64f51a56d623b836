# SPDX-License-Identifier: Apache-2.0
"""What a block of a vision tower is: data, from which `program` makes its launches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

# What is done beside vLLM's own steps, by the names that settings leave it out by: by
# the program, the same for every tower, but for `gemma4_blocks`, which `models` does.
OPTIMISATIONS: Mapping[str, str] = MappingProxyType(
    {
        "add_norm": "residual sums and the norm after them are one kernel",
        "aligned": "an MLP's rows are padded to whole loads, in FP8 to whole tiles",
        "fp8_gemm": "linear layers in FP8 run the GEMM that was measured fastest",
        "fp8_linear": "norms and activations quantise the rows of linear layers in FP8",
        "fused_gelu": "cuBLASLt applies the tanh GELU after an MLP's first GEMM",
        "gemma4_blocks": "four kernels are what lies between Gemma 4's linear layers",
        "quack_act": "QuACK applies an MLP's activation after its first GEMM in FP8",
        "quack_mlp": "QuACK runs an MLP's first GEMM with its activation",
        "quack_qkv": "QuACK runs the QKV projection",
        "quack_quantize": "QuACK quantises q, k and v within the QKV projection",
        "quack_turn": "QuACK turns q and k within the QKV projection",
    }
)


@dataclass(frozen=True)
class Rotary:
    """What a block's `forward` is given to turn q and k by.

    Attributes:
        form: `tables` for cos and sin `[T, R / 2]`; `doubled` for both `[T, R]`, of
            which the halves are alike; `pair` for a tuple of such tables in fp32;
            `angles` for what they are of; `complex` for `[T, D / 2]` complex, or its
            real view, by interleaved pairs; `real` for that view by halves;
            `exact` for cos and sin `[T, 1, R / 2]` in fp32; `planes` for both
            `[3, T, R / 2]` in fp32, a third of the columns from each.
        parameters: The names in `forward`.
        own: Makes it for one sequence of a dense batch, where attention turns q and k
            by what its module keeps: of the block, the stream, whose values do not
            matter, and the parameters' values, by which sizes are told. All blocks of
            a tower make the same. None where `forward` is given it.
        dim: Path of how many values of a head turn, as a block knows it; empty for all.
    """

    form: Literal[
        "tables", "doubled", "pair", "angles", "complex", "real", "exact", "planes"
    ]
    parameters: tuple[str, ...]
    own: Callable[[Any, Any, tuple[Any, ...]], Any] | None = None
    dim: str = ""

    @property
    def is_interleaved(self) -> bool:
        """Which columns turn together; see `Batch`."""
        return self.form == "complex"


TABLES = Rotary("tables", ("rotary_pos_emb_cos", "rotary_pos_emb_sin"))
ANGLES = Rotary("angles", ("rotary_pos_emb",))


@dataclass(frozen=True)
class BlockSpec:
    """Where a block has its parts, and how it is called.

    A block is `y = x + proj(attention(qkv(norm1(x))))` and, of that,
    `y + second(act(first(norm2(y))))`. Parts are named by their path in the block; what
    norms and activation compute, they say themselves.

    Attributes:
        first: The MLP's first linear layer; of a gated one stacked, [gate; up].
        act: Its activation.
        second: Its second linear layer.
        norm1: The norm in front of attention, a LayerNorm or an RMSNorm.
        norm2: The norm in front of the MLP.
        own_norm: `module:Class` of an RMSNorm that is the model's own, in fp32 and
            rounded once, with a weight and `eps`; None where norms are PyTorch's or
            vLLM's.
        qkv: The projection to q, k and v, in this order.
        older_qkv: Its path in older releases of vLLM; None where that is the same.
        attention: The attention layer.
        proj: The projection of what attention returns.
        split: Returns a block's method that makes q, k and v, `[T, 1, H, D]` each, of a
            projection `[T, 1, ...]` whose ranks do not hold whole heads; None where
            each rank does.
        rotary: What turns q and k; None where nothing does.
        qk_norms: The RMSNorms of each head's q and k, in front of rotary, in blocks
            that have them; None where none has. Pairs are not interleaved then.
        layer_scales: The parameters `[C]` that what attention and the MLP add to the
            stream is multiplied by, in blocks that have them; None where none has.
        is_packed: Whether `forward` takes `cu_seqlens`, and a stream of one batch
            `[T, 1, C]`, `[1, T, C]` or `[T, C]`. Else the stream is `[B, S, C]`.
        packed_by: The name of an object whose `cu_seqlens` and `max_seqlen` `forward`
            is given with a packed batch, for blocks that get dense ones without it.
            None where there is none.
        key_mask: The name of what `forward` adds to the scores of a dense batch,
            `[B, 1, 1, S]`: 0 for tokens, and the lowest number for the padding after
            them. None where it takes no mask.
        is_clamped_in_fp16: Whether a block ends by clamping its stream if that is in
            fp16, which no program does.
        returned_with: What comes after the stream in the tuple that `forward` returns;
            None where it returns the stream itself.
        is_compiled_whole: Whether vLLM compiles a tower of such blocks as one, not
            block by block, where it compiles encoders.
    """

    first: str
    act: str
    second: str
    norm1: str = "norm1"
    norm2: str = "norm2"
    own_norm: str | None = None
    qkv: str = "attn.qkv"
    older_qkv: str | None = None
    attention: str = "attn.attn"
    proj: str = "attn.proj"
    split: Callable[[Any], Callable[..., Any]] | None = None
    rotary: Rotary | None = TABLES
    qk_norms: tuple[str, str] | None = None
    layer_scales: tuple[str, str] | None = None
    is_packed: bool = True
    packed_by: str | None = None
    key_mask: str | None = None
    is_clamped_in_fp16: bool = False
    returned_with: tuple[None, ...] | None = None
    is_compiled_whole: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for what no kernel does."""
        if self.qk_norms and self.rotary is not None and self.rotary.is_interleaved:
            raise ValueError(
                "kernels/turn.py normalises q and k, and turns no interleaved pairs "
                "then, got qk_norms and complex rotary"
            )
