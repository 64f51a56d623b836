# SPDX-License-Identifier: Apache-2.0
"""The encoder attention layer that vLLM builds in place of `MMEncoderAttention`."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mm_encoder_attention import (
    MMEncoderAttention,
)
from vllm.platforms import current_platform

from vllm_flashinfer_vit import __version__
from vllm_flashinfer_vit.blocks.attach import attach, mark_served, spec_of
from vllm_flashinfer_vit.blocks.program import BlockProgram
from vllm_flashinfer_vit.choices.arrival import arrival_of
from vllm_flashinfer_vit.choices.lookup import Choice, plan_of
from vllm_flashinfer_vit.choices.usable import NotServedError
from vllm_flashinfer_vit.engine.advice import fp8_later, graphs_off, ignored, served_by
from vllm_flashinfer_vit.engine.batch_check import check
from vllm_flashinfer_vit.engine.counting import Counting, count_stock_layer
from vllm_flashinfer_vit.engine.element_offsets import token_offsets
from vllm_flashinfer_vit.engine.hooks import Hooks
from vllm_flashinfer_vit.engine.selection import (
    flashinfer_requested,
    name_and_head_dim,
    served,
)
from vllm_flashinfer_vit.engine.sleep import forget_blas_workspaces, may_sleep
from vllm_flashinfer_vit.engine.warmup import WarmUp
from vllm_flashinfer_vit.fp8 import policy as fp8
from vllm_flashinfer_vit.fp8.state import EngineScales, ScaleState
from vllm_flashinfer_vit.kernels.catalog import KERNELS
from vllm_flashinfer_vit.kernels.formats import DeviceScales, QuantizedQKV
from vllm_flashinfer_vit.ops import attention as ops
from vllm_flashinfer_vit.ops.batch import LAYOUTS, Batch, Layout, Taken, Turning
from vllm_flashinfer_vit.settings import ENV_STRICT, Settings

logger = init_logger("vllm.plugins.flashinfer_vit")

# Takes a layer, what attends for it, and a batch; returns the output.
Watch = Callable[
    ["FlashInferViTAttention", Callable[[Batch], torch.Tensor], Batch], torch.Tensor
]


class FlashInferViTAttention(MMEncoderAttention):
    """Encoder attention by this package's custom op, if FLASHINFER was asked for.

    Otherwise the object becomes a plain `MMEncoderAttention` before it is built, so
    that other backends run exactly what they run without this package.

    Attributes:
        hooks: What every layer calls while it is built.
        counts: Counts passes through its tower.
        program: What runs the block that the layer is a part of, if anything does.
        turning: What unturned q and k arrive with; None where models turn them.
        gets_turned: Whether q and k of some batches are turned by their projection.
        layouts: How q, k and v may arrive.
    """

    hooks: ClassVar[Hooks] = Hooks()
    program: BlockProgram | None = None
    turning: Turning | None = None
    gets_turned: bool = False
    _gets_quantized = False
    layouts: tuple[Layout, ...] = LAYOUTS
    _watch: Watch | None = None

    def __init__(self, *args: Any, **named: Any) -> None:
        """Build the layer; the arguments are those of vLLM's `MMEncoderAttention`.

        Raises:
            NotServedError: FLASHINFER cannot be had, see `selection.served`, or not
                with these arguments; or FP8 attention, see `fp8.policy_for`.
            ScaleError: The file of FP8 scales cannot be used, or not for this head dim.
            PatchError: A patch does not fit, and the settings are strict.
            ValueError: A setting or a file of measured choices cannot be used.
        """
        settings = Settings.from_env()
        choices = policy = None
        if flashinfer_requested():
            prefix, head_size = name_and_head_dim(MMEncoderAttention, args, named)
            choices, policy = _choose(prefix, head_size, settings)
        if choices is None:
            # vLLM's `CustomOp.__new__` makes one of this class whatever is asked for.
            self.__class__ = MMEncoderAttention
            _prepare_stock(settings)
            MMEncoderAttention.__init__(self, *args, **named)
            return
        super().__init__(*args, **named)
        _watch_towers()
        self._settings = settings
        self._choices = choices
        self._plan = plan_of(choices)
        self._fp8_policy = policy
        config = get_current_vllm_config()
        self._warm_up = WarmUp.of(config)
        # When its weights are loaded for the first time.
        self._forgets_workspaces = may_sleep(config)
        self._patch()
        self._engine_scales: EngineScales | None = None
        self._fp8_state: ScaleState | None = None
        if fp8.requested():
            self._engine_scales = EngineScales.of(config)
            self._fp8_state = self._engine_scales.enroll(prefix, head_size, policy)
        self.counts = Counting.of(config).enroll(prefix, self._plan, self._fp8_state)
        try:
            for name in {name for choice in choices for name in choice.kernels}:
                KERNELS[name].decide(head_size)
        except RuntimeError as error:
            raise NotServedError(f"layer {prefix!r}: {error}") from None
        for problem in ignored(config):
            logger.warning_once("%s", problem)
        self._say(choices)

    def _patch(self) -> None:
        """Patch vLLM for layers like this one, and mark the engine as patched."""
        names = self.hooks.model_patches(self._settings)
        policy = self._fp8_policy
        method = f" {policy.method} {policy.save}" if policy else ""
        _name_in_compile_cache(names, self._plan.text + method)
        if policy is not None and policy.observes:
            self.hooks.fp8_patches(self._settings)

    def _say(self, choices: tuple[Choice, ...]) -> None:
        lines = [*served_by(choices, self.head_size, self.dtype)]
        if self._fp8_policy is not None:
            lines.append(self._fp8_policy.summary)
        if advice := graphs_off(get_current_vllm_config()):
            lines.append(advice)
        for line in lines:
            logger.info_once("vllm-flashinfer-vit %s: %s", __version__, line)

    def _init_fp8_state(self) -> None:
        # The base class would judge FP8 by the backend that the models are told.
        self.fp8_enabled = False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Warm up, with scales where the weights are; vLLM calls it after loading.

        Raises:
            NotServedError: Settings name a layer that the model does not have.
            ScaleError: The scale file does, or lacks this layer.
        """
        if self._engine_scales is not None:
            self._engine_scales.check_has_scales(self.layer_name)
            self._engine_scales.check_names(self._settings)
        self._settle_plan()
        if self._fp8_state is not None:
            self._fp8_state.materialize()
        if self.program is not None:
            self.program.build()
        if current_platform.is_cuda():
            self._warm_up.run(self)
            if self._forgets_workspaces:
                forget_blas_workspaces()
                self._forgets_workspaces = False
        if self._fp8_state is not None:
            self._fp8_state.reset()

    def _settle_plan(self) -> None:
        """Choose by what turns q and k, which is known with the blocks."""
        needs = self.turning is not None, self.gets_turned, self._gets_quantized
        choices, later, how = arrival_of(self._choices, *needs)
        self._plan = self.counts.plan = plan_of(choices)
        if later != self._choices:
            logger.info_once("%s", fp8_later(later, self.head_size, how))

    def settle_projection(self, turns: bool, quantizes: bool) -> None:
        """Take what is known once the projection's weights are loaded.

        Args:
            turns: Whether it turns q and k of some batches.
            quantizes: Whether it writes what FP8 attention reads of some.
        """
        self.gets_turned, self._gets_quantized = turns, quantizes
        self._settle_plan()

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
            cu_seqlens: `[N + 1] int32`, prefix sums over the B * S tokens; or None for
                B sequences of S tokens; or vLLM's offsets in elements, with
                `sequence_lengths`, see `token_offsets`.
            max_seqlen: `[]`, an upper bound of the sequence lengths.
            sequence_lengths: `[N]`, read with offsets in elements only.

        Returns:
            A contiguous tensor of the query's shape and dtype.

        Raises:
            ValueError: The tensors do not fit each other; the layer is named.
        """
        batch, q_len = query.shape[:2]
        cu_seqlens = token_offsets(cu_seqlens, sequence_lengths)
        if key.shape[1] != q_len:
            if cu_seqlens is not None:
                raise ValueError(
                    f"{self._where()}: one cu_seqlens cannot hold {q_len} query and "
                    f"{key.shape[1]} key tokens; call without it for a dense batch"
                )
            return self._fall_back(query, key, value)
        try:
            q = query.reshape(batch * q_len, self.num_heads, self.head_size)
            k = key.reshape(batch * q_len, self.num_kv_heads, self.head_size)
            v = value.reshape(batch * q_len, self.num_kv_heads, self.head_size)
        except RuntimeError as error:
            shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            raise ValueError(
                f"{self._where()}: query, key and value of {shapes} do not fit each "
                f"other and its heads: {error}"
            ) from None
        seq_len = q_len if cu_seqlens is None else 0
        tokens = Batch(q, k, v, None, None, cu_seqlens, max_seqlen, seq_len)
        return self.attend(tokens).view(query.shape)

    forward_cpu = forward_cuda

    def attend(self, batch: Batch) -> torch.Tensor:
        """Run the custom op on a checked batch.

        Args:
            batch: q, k and v of the layer's heads and dtype.

        Returns:
            `[T, H, D]`, contiguous, q's dtype.

        Raises:
            ValueError: The tensors do not fit each other; the layer is named.
        """
        # In this order, so that code compiled for one block has no guard on its place.
        if not torch.compiler.is_compiling() and self.counts.is_end:
            self.counts.passed("attention", batch)
        if self._watch is not None:
            return self._watch(self, self._attend, batch)
        return self._attend(batch)

    def _attend(self, batch: Batch) -> torch.Tensor:
        self._check(batch)
        return ops.attention(batch, self.scale, self._plan, self._fp8())

    def prepare(
        self,
        batch: Batch,
        sequence_lengths: torch.Tensor | None = None,
        is_clean: bool = False,
        quantized: QuantizedQKV | None = None,
    ) -> ops.Call:
        """Settle `attend` for what the batch's tensors will hold; see `ops.prepare`.

        Args:
            batch: As for `attend`; `cu_seqlens` may be vLLM's offsets in elements.
            sequence_lengths: As for `forward_cuda`.
            is_clean: As for `ops.prepare`, like `quantized`.
            quantized: None where the layer is watched.

        Raises:
            ValueError: As `attend`.
        """
        cu_seqlens = token_offsets(batch.cu_seqlens, sequence_lengths)
        if cu_seqlens is not batch.cu_seqlens:
            batch = batch._replace(cu_seqlens=cu_seqlens)
        if self.is_watched:
            return lambda *own_scales: self.attend(batch)
        self._check(batch)
        given = self.scale, self._plan, self._fp8()
        return ops.prepare(batch, *given, is_clean, quantized)

    @property
    def takes(self) -> set[Taken | None]:
        """What the plan's kernels take; see `ops.taken_by`."""
        return {ops.taken_by(name, self._fp8()) for name in self._plan.kernels}

    def taken(self, batch: Batch) -> Taken | None:
        """Return what a batch's kernel takes; see `ops.taken_by`."""
        return ops.taken_by(ops.kernel_for(batch, self._plan), self._fp8())

    @property
    def is_watched(self) -> bool:
        """Whether every call has to go through `attend`."""
        return self._watch is not None

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Have `watch(layer, attend, batch)` called where the layer attends.

        Args:
            watch: It returns what the layer is to return, as `attend(batch)` does.
        """
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    @property
    def prepares_for(self) -> tuple[object, ...]:
        """What a tower's layers have alike that can use each other's prepared calls."""
        return (*self.signature, self.scale)

    @property
    def own_scales(self) -> DeviceScales | None:
        """What prepared calls take of this layer; None if they take nothing."""
        state = self._fp8_state
        return None if state is None else state.scales_on_device

    def _fp8(self) -> ops.Fp8 | None:
        policy = self._fp8_policy
        if policy is None:
            return None
        return ops.Fp8(policy.method, policy.save, self.own_scales)

    def _where(self) -> str:
        # Only called to raise: torch.compile would guard on the name of every layer.
        return f"layer {self.layer_name!r}" if self.layer_name else "a nameless layer"

    def _check(self, batch: Batch) -> None:
        check(batch, self.dtype, self._where)

    def _fall_back(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if self._settings.strict:
            raise ValueError(
                f"{self._where()}: FLASHINFER cannot serve it: query and key lengths "
                f"differ. Unset {ENV_STRICT} to run vLLM's own kernel instead."
            )
        logger.warning_once(
            "FLASHINFER cannot serve layer %s: query and key lengths differ. vLLM's "
            "TORCH_SDPA runs it instead.",
            self.layer_name,
        )
        self.counts.fell_back("key_lengths")
        # The FLASH_ATTN path in vLLM's tree takes the key length from the query.
        return self._forward_sdpa(query, key, value)


@functools.cache
def _watch_towers() -> None:
    """Have torch say which blocks towers get; from a process's first layer on."""
    register_module_module_registration_hook(_attach_program)


def _attach_program(module: torch.nn.Module, name: str, child: object) -> None:
    """Give a block its program when it is put into the list of its tower's blocks."""
    if not isinstance(child, torch.nn.Module):
        return
    if not isinstance(module, torch.nn.ModuleList):
        mark_served(module, child)
        return
    spec = spec_of(type(child))
    if spec is None:
        return
    # A tower of another backend may be of the same class.
    layers = (x for x in child.modules() if isinstance(x, FlashInferViTAttention))
    layer = next(layers, None)
    # A part of the list, which a pass may run through, is a list of blocks at work.
    if layer is not None and not (layer.program and layer.program.is_ready):
        layer.program = attach(spec, module, int(name), child, layer._settings)


def _choose(
    layer_name: str, head_size: int, settings: Settings
) -> tuple[tuple[Choice, ...] | None, fp8.Policy | None]:
    """Return a layer's choices, None for vLLM's own, and how it attends in FP8."""
    dtype = torch.get_default_dtype()
    try:
        if refusal := FlashInferViTAttention.hooks.refusal:
            raise NotServedError(refusal)
        policy = fp8.policy_for(layer_name, head_size, dtype, settings)
        choices = policy.choices if policy else served(head_size, dtype, settings)
        if choices is None and fp8.requested():
            # vLLM's own layer would refuse FP8 by the backend that it is told.
            raise NotServedError(
                "mm_encoder_attn_dtype=fp8 was asked for, and this layer, which is to "
                "stay in the model's dtype, has no kernel for that; leave "
                "--mm-encoder-attn-dtype out"
            )
    except NotServedError as error:
        raise NotServedError(f"layer {layer_name!r}: {error}") from None
    return choices, policy


def _prepare_stock(settings: Settings) -> None:
    """Do what an engine needs whose encoders run on vLLM's own layer."""
    if settings.fix_graph_padding:
        FlashInferViTAttention.hooks.graph_patches()
    if flashinfer_requested():
        count_stock_layer()
    # On other platforms, vLLM has FP8 encoder attention of its own.
    serving = current_platform.is_cuda() or current_platform.is_cpu()
    if serving and fp8.requested() and not flashinfer_requested():
        logger.warning_once(
            "--mm-encoder-attn-dtype fp8 has no effect on vllm-flashinfer-vit without "
            "--mm-encoder-attn-backend FLASHINFER: it is left to vLLM, which may "
            "refuse to start. Set both, or leave the dtype out."
        )


def _name_in_compile_cache(patches: tuple[str, ...], plan: str) -> None:
    """Keep code that vLLM compiled with other patches, plans or ops out of this engine.

    Its cache goes by the engine's configuration and by sources that did not change. One
    that another plugin made an object of its own stays as it is. All layers are named.
    """
    config = get_current_vllm_config_or_none()
    if config is None or not isinstance(config.additional_config, dict):
        return
    known = config.additional_config.get("vllm_flashinfer_vit", ())
    names = sorted({__version__, *ops.schemas(), *patches, plan, *known})
    config.additional_config["vllm_flashinfer_vit"] = names
