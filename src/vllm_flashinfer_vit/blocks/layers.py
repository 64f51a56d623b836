# SPDX-License-Identifier: Apache-2.0
"""What runs each linear layer of a block, resolved once its weights are loaded."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.utils import default_unquantized_gemm

from vllm_flashinfer_vit.blocks import fp8_linear, fp8_methods
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
)
from vllm_flashinfer_vit.blocks.tower_pass import TowerProgram
from vllm_flashinfer_vit.choices.gemm_table import GemmClass
from vllm_flashinfer_vit.choices.gemms import STOCK, in_words
from vllm_flashinfer_vit.choices.resolve import gemms_here
from vllm_flashinfer_vit.gemms import quack
from vllm_flashinfer_vit.gemms.catalog import CUTLASS, GEMMS
from vllm_flashinfer_vit.kernels.formats import GROUP

logger = init_logger("vllm.plugins.flashinfer_vit")


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
        """Return a part of the block, of a layer with adapters the layer itself."""
        found = self.block.get_submodule(path)
        # Weights may come after vLLM has wrapped layers.
        return getattr(found, "base_layer", found)

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
        return self.tried(key, fp8_linear.trial, layer, gemm, self.tower.problems)

    def tried(
        self, key: tuple[object, ...], trial: Callable[..., str | None], *given: object
    ) -> str | None:
        """Try a kernel once for all layers that are alike by `key`.

        Returns:
            None if all is right, else why it cannot run them.
        """
        trials = self.tower.trials
        if key not in trials:
            try:
                trials[key] = trial(*given)
            # A library that is built otherwise than is known here fails in any way.
            except Exception as error:
                trials[key] = f"{type(error).__name__}: {error}"
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
        if reason := self.tried(key, quack.build, *given):
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
