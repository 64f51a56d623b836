# SPDX-License-Identifier: Apache-2.0
"""What runs each linear layer of a block, resolved once its weights are loaded."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.utils import default_unquantized_gemm

from vllm_flashinfer_vit.blocks import (
    act_bound,
    fp8_linear,
    fp8_methods,
)
from vllm_flashinfer_vit.blocks.fp8_linear import Fp8Linear, Gemms
from vllm_flashinfer_vit.blocks.linear import (
    BlockWeights,
    OwnLinear,
    QuackGemm,
    Step,
    Weights,
    gemm,
    is_plain,
    is_unquantized,
    linear,
)
from vllm_flashinfer_vit.blocks.quack_steps import (
    BoundedLayer,
    QuackAct,
    QuackTurn,
    fp8_layer,
    like_row_scales,
)
from vllm_flashinfer_vit.blocks.tower_pass import TowerProgram
from vllm_flashinfer_vit.choices.gemm_table import GemmClass
from vllm_flashinfer_vit.choices.gemms import STOCK, in_words
from vllm_flashinfer_vit.choices.resolve import gemms_here
from vllm_flashinfer_vit.gemms import (
    activating_gemm,
    epilogue_gemm,
    quack,
    turning_gemm,
)
from vllm_flashinfer_vit.gemms.catalog import CUTLASS, GEMMS
from vllm_flashinfer_vit.gemms.epilogue_gemm import FP8
from vllm_flashinfer_vit.kernels.formats import GROUP, Activation

logger = init_logger("vllm.plugins.flashinfer_vit")

# From how many rows on QuACK is faster than cuBLAS and an activation on an H200, and
# than cuBLAS alone, where there is less to save (docs/experiments.md).
MIN_QUACK_ROWS = 1024
MIN_QUACK_PLAIN_ROWS = 2048
# The same, over another GEMM and a pass that turns q and k: in 16 bits, for heads as
# wide as a tile, and in FP8.
MIN_QUACK_TURN_ROWS = 1024
MIN_QUACK_TURN_ROWS_WIDE = 2048
MIN_QUACK_TURN_ROWS_FP8 = 256
# The same, over another GEMM in FP8 and a pass that activates and quantises; and where
# each pass computes bounds, for which it reads the weights once more.
MIN_QUACK_ACT_ROWS = 256
MIN_QUACK_BOUND_ROWS = 1024
_WIDE = 128


class QkvSteps(NamedTuple):
    """What runs a block's QKV projection.

    Attributes:
        step: What runs it, unless another does.
        large: What does for large batches, or None.
        turning: What does for them and turns q and k, where attention would have to, or
            None.
    """

    step: Step | OwnLinear | Fp8Linear
    large: QuackGemm | None = None
    turning: QuackTurn | None = None


class Layers(NamedTuple):
    """The layers of a block, as they are resolved.

    Attributes:
        block: The block.
        tower: Its tower's program.
        off: Names of `OPTIMISATIONS` that are left out.
        gets_adapters: Whether adapters are added to what a layer itself returns.
        weights: Of the layers that run past their own methods.
        steps: What runs each layer, for people.
        place: The block's, in its tower.
    """

    block: torch.nn.Module
    tower: TowerProgram
    off: frozenset[str]
    gets_adapters: bool
    weights: BlockWeights
    steps: dict[str, str]
    place: int

    def part(self, path: str) -> Any:
        """Return a part of the block."""
        found = self.block.get_submodule(path)
        # Of a model that does not tell vLLM which its tower is, LoRA wraps all layers.
        return found if self.gets_adapters else getattr(found, "base_layer", found)

    def is_direct(self, path: str) -> bool:
        """Whether a layer runs past its own method, in 16 bits."""
        return can_run(self.part(path)) and not self.gets_adapters

    def is_fp8(self, path: str) -> bool:
        """Whether a layer runs past its own method, in FP8."""
        return self._fp8_problem(path) is None

    def _fp8_problem(self, path: str) -> str | None:
        """Return why a layer does not run past its own method in FP8, None if so."""
        if "fp8_linear" in self.off:
            return "a setting leaves fp8_linear out"
        if self.gets_adapters:
            return "it may get LoRA adapters"
        layer = self.part(path)
        if problem := fp8_methods.problem(layer):
            return problem
        if failure := self._trial(layer, CUTLASS):
            logger.warning_once(
                "FP8 linear layer %s of the vision tower's blocks runs as vLLM's own: "
                "%s",
                path,
                failure,
            )
        return failure

    def _trial(self, layer: Any, gemm: str) -> str | None:
        """Return why a GEMM in FP8 cannot run a layer, None if it can."""
        key = "fp8", gemm, *fp8_linear.alike(layer)
        return self._tried(key, fp8_linear.trial, layer, gemm, self.tower.problems)

    def _tried(
        self, key: tuple[object, ...], trial: Callable[..., str | None], *given: object
    ) -> str | None:
        """Try a kernel once for all layers that are alike by `key`."""
        trials = self.tower.trials
        if key not in trials:
            trials[key] = trial(*given)
        return trials[key]

    def own(self, path: str) -> OwnLinear:
        """Return a layer as vLLM runs it, and say so if it is quantised."""
        layer = self.part(path)
        self.steps[path] = f"vLLM's own {type(layer).__name__}"
        if not is_unquantized(layer):
            method = type(layer.quant_method).__name__
            self.steps[path] += f" with {method}"
            logger.info_once(
                "%s of the vision tower's blocks runs as vLLM's own %s: %s.",
                path,
                method,
                self._fp8_problem(path)
                or "it is padded, or another part of its MLP does not run here",
            )
        return OwnLinear(self.block, path)

    def gemm(self, path: str, gelu: bool = False) -> tuple[Step, Weights]:
        """Return the step of a layer that `is_direct`, and its parameters."""
        weights = self.weights.add(Weights(self.part(path)))
        self.steps[path] = "cuBLAS"
        return gemm(weights, self.tower.problems, gelu), weights

    def fp8(self, path: str, with_bias: bool = True) -> Fp8Linear:
        """Return a layer that `is_fp8`, whose GEMM adds its bias or does not."""
        gemms = self._gemms(path)
        step = Fp8Linear(self.part(path), gemms, with_bias)
        self.weights.add(step.weights)
        scales = "the layer's scale" if step.is_static else "a scale for each token"
        if step.groups:
            scales = f"a scale for each {GROUP} values of a token"
        self.steps[path] = f"FP8 by {in_words(gemms.classes)}; {scales}"
        return step

    def _gemms(self, path: str) -> Gemms:
        """Return the GEMMs of a layer that `is_fp8`, the same object for all alike."""
        layer = self.part(path)
        key = layer.weight.device, fp8_linear.alike(layer)
        if (found := self.tower.gemms.get(key)) is None:
            classes, problems = self._gemm_classes(path, layer), self.tower.problems
            names = {name for _, name in classes}
            gemms = {n: fp8_linear.gemm_of(layer, n, problems) for n in names}
            found = self.tower.gemms[key] = Gemms(classes, gemms)
        return found

    def _gemm_classes(self, path: str, layer: Any) -> tuple[GemmClass, ...]:
        measured = fp8_methods.measured_as(layer)
        if measured is None or "fp8_gemm" in self.off:
            return STOCK
        choice = gemms_here(self.tower.tuned_dir).get(measured.key)
        if choice is None:
            return STOCK
        for name in {name for _, name in choice.classes} - {CUTLASS}:
            if reason := self._trial(layer, name):
                logger.warning_once(
                    "FP8 linear layer %s of the vision tower's blocks runs by CUTLASS "
                    "for every number of rows, since %s cannot: %s",
                    path,
                    GEMMS[name],
                    reason,
                )
                return STOCK
        return choice.classes

    def projection(self, path: str) -> Step | OwnLinear | Fp8Linear:
        """Return what runs a layer between buffers as wide as its weight."""
        if self.is_fp8(path) and fp8_methods.has_plain_sizes(self.part(path)):
            return self.fp8(path)
        return self.gemm(path)[0] if self.is_direct(path) else self.own(path)

    def qkv(
        self, path: str, turned: tuple[turning_gemm.Heads, torch.dtype] | None
    ) -> QkvSteps:
        """Return what runs the QKV projection.

        Args:
            path: The layer's.
            turned: What its outputs are, and the dtype of cosines and sines, if some
                kernel of attention has q and k turned before it.
        """
        if not self.is_direct(path):
            step = self.projection(path)
            turning = None
            # A weight with scales of blocks has a GEMM of its own.
            if isinstance(step, Fp8Linear) and step.groups == 0:
                bias = step.weights.scaled.bias
                like = fp8_layer(step, like_row_scales(step), bias)
                turning = self.turning(path, step, like, turned)
            return QkvSteps(step, None, turning)
        step, weights = self.gemm(path)
        large = None
        if "quack_qkv" not in self.off:
            rows, expected = MIN_QUACK_PLAIN_ROWS, functools.partial(linear, weights)
            large = self.quack(path, weights, None, rows, expected)
        like = epilogue_gemm.Layer(weights.weight, weights.bias)
        turning = self.turning(path, weights, like, turned)
        return QkvSteps(step, large, turning)

    def turning(
        self,
        path: str,
        source: Weights | Fp8Linear,
        like: epilogue_gemm.Layer,
        turned: tuple[turning_gemm.Heads, torch.dtype] | None,
    ) -> QuackTurn | None:
        """Return a projection's step that turns q and k, or None and say why."""
        if turned is None or "quack_turn" in self.off:
            return None
        if not epilogue_gemm.is_available():
            return None
        heads, table = turned
        dtype = self.part(path).params_dtype
        if not turning_gemm.fits(like, heads, table, dtype):
            return None
        key = "quack_turn", *like.alike, heads, table, dtype
        if reason := self._tried(key, turning_gemm.build, like, heads, table, dtype):
            logger.warning_once(
                "QuACK cannot turn q and k in %s of the vision tower's blocks, so a "
                "pass of its own turns them: %s",
                path,
                reason,
            )
            return None
        rows = MIN_QUACK_TURN_ROWS
        if isinstance(source, Fp8Linear):
            rows = MIN_QUACK_TURN_ROWS_FP8
        elif heads.head_dim >= _WIDE:
            rows = MIN_QUACK_TURN_ROWS_WIDE
        self.steps[path] += f"; from {rows} rows on QuACK turns q and k"
        kernels = self.tower.gemms.get(key)
        if kernels is None:
            gpu = torch.cuda.get_device_properties(like.weight.device)
            kernels = self.tower.gemms[key] = turning_gemm.Kernels(
                like, heads, table, dtype, rows, gpu.multi_processor_count
            )
        return QuackTurn(source, kernels)

    def activating(
        self, path: str, first: Fp8Linear, second: Fp8Linear, activation: Activation
    ) -> QuackAct | None:
        """Return what runs an MLP's first layer and its activation, or None.

        Args:
            path: The first layer's.
            first: It, which does not add its bias itself.
            second: The second layer, which reads the rows.
            activation: What is between them.
        """
        # Weights with scales of blocks have GEMMs of their own.
        if "quack_act" in self.off or first.groups or second.groups:
            return None
        if not epilogue_gemm.is_available():
            return None
        layer = self.part(path)
        needs_bound = not second.is_static
        outputs = getattr(layer, "output_size_per_partition", layer.output_size)
        dtype = layer.params_dtype
        act = activating_gemm.Act(activation, outputs, second.inputs, FP8)
        if act.is_gated and needs_bound:
            act = act._replace(columns=first.outputs // 2, dtype=dtype)
            needs_bound = False
        bounded = BoundedLayer(first, self.weights)
        like = bounded.read()
        if not activating_gemm.fits(like, act, dtype):
            return None
        key = "quack_act", *like.alike, act
        reason = self._tried(key, activating_gemm.build, like, act)
        if reason is None and needs_bound:
            reason = self._tried(("act_bound", *like.alike), act_bound.trial, like)
        if reason is not None:
            logger.warning_once(
                "QuACK cannot run %s of the vision tower's blocks with its activation, "
                "so a pass of its own applies that: %s",
                path,
                reason,
            )
            return None
        rows = MIN_QUACK_BOUND_ROWS if needs_bound else MIN_QUACK_ACT_ROWS
        self.steps[path] += f"; from {rows} rows on QuACK activates"
        kernel = self.tower.gemms.get(key)
        if kernel is None:
            kernel = activating_gemm.compiled(like, act, activating_gemm.TILE)
            self.tower.gemms[key] = kernel
        bounds = None
        if needs_bound:
            bounds = self.tower.bounds
            bounds.add(self.place, bounded, rows)
        return QuackAct(first, kernel, act, rows, bounds, self.place)

    def quack(
        self,
        path: str,
        weights: Weights,
        activation: str | None,
        min_rows: int,
        expected: Callable[[torch.Tensor], torch.Tensor],
    ) -> QuackGemm | None:
        """Return a layer's step by QuACK, or None and say why."""
        weight = weights.weight
        if not quack.has_quack():
            return None
        if not quack.fits(len(weight), weight.shape[1], weight.dtype, activation):
            return None
        has_bias = weights.bias is not None
        key = "quack", *weight.shape, weight.dtype, activation, has_bias
        given = weight, weights.bias, activation, expected
        if reason := self._tried(key, quack.build, *given):
            logger.warning_once(
                "QuACK cannot run %s of the vision tower's blocks, so batches of every "
                "size run as small ones do: %s",
                path,
                reason,
            )
            return None
        gpu = torch.cuda.get_device_properties(weight.device)
        self.steps[path] += f"; from {min_rows} rows on QuACK"
        return QuackGemm(weights, activation, min_rows, gpu.multi_processor_count)


def can_run(layer: Any) -> bool:
    """Whether a linear layer is run here, past its own method."""
    # On a CPU vLLM packs weights for kernels of its own.
    return is_plain(layer) and bool(layer.weight.is_cuda) and _has_default_gemm(layer)


def _has_default_gemm(layer: Any) -> bool:
    """Whether no other GEMM was chosen, as `--linear-backend` of vLLM 0.29 does."""
    chosen = getattr(layer.quant_method, "_gemm_impl", default_unquantized_gemm)
    return chosen is default_unquantized_gemm


def gets_adapters() -> bool:
    """Whether an engine adds LoRA adapters to layers of its vision tower."""
    from vllm.config import get_current_vllm_config

    lora = get_current_vllm_config().lora_config
    return lora is not None and lora.enable_tower_connector_lora
