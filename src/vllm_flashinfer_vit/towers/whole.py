# SPDX-License-Identifier: Apache-2.0
"""Models that vLLM builds whole, but for their language model: what describes one.

Their towers take other arguments than patches and grids, and a projector of the model's
own comes after. `whole_models` has the descriptions.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_type_hints

from vllm_flashinfer_vit.machine.versions import installed
from vllm_flashinfer_vit.towers.spec import Spec, TowerError

# Of the language model: vLLM reads and sometimes builds it, and nothing runs it.
_SMALL_TEXT: Mapping[str, Any] = {
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

Fields = Mapping[str, Any]


class Cut(NamedTuple):
    """An image as a model takes it.

    Attributes:
        inputs: Arguments of the model's `embed_multimodal`.
        grid: Images or frames that attend apart, rows and columns of patches.
    """

    inputs: Mapping[str, Any]
    grid: tuple[int, int, int]


def nested(vision: Fields, text: Fields) -> dict[str, Any]:
    """Lay a config out as most have it."""
    return {"vision_config": vision, "text_config": text}


@dataclass(frozen=True)
class WholeModel:
    """A model of true dimensions, but for its language model.

    Attributes:
        module: vLLM's module of the model's class.
        model: The class.
        tower: vLLM's module of the tower, as `docs/models.toml` has it.
        config: `module:class` of the config.
        vision: The config's fields of the tower.
        head_dim: Of the tower's attention.
        processor: `module:class` of the image processor.
        cut: Takes what the image processor returns, and `vision`.
        depth: Which field of `vision` counts its blocks.
        processor_fields: What the image processor is made with.
        text: Fields of the language model: what the projector needs, and what vLLM
            checks.
        fields: Other fields of the config.
        layout: Puts the fields of tower and language model where the config has them.
        architecture: The model's name in a config, if it is not its class.
        extra_tokens: What attends beside the patches of each image.
        follows_counts: Whether the tower attends where its counts are: on its device in
            releases of vLLM that do not keep them on the CPU.
        pixel_schema: vLLM's class that checks the pixels, where releases differ in
            whether it wants a list of images or the patches of all.
    """

    module: str
    model: str
    tower: str
    config: str
    vision: Fields
    head_dim: int
    processor: str
    cut: Callable[[Mapping[str, Any], Fields], Cut]
    depth: str = "num_hidden_layers"
    processor_fields: Fields = field(default_factory=dict)
    text: Fields = field(default_factory=dict)
    fields: Fields = field(default_factory=dict)
    layout: Callable[[Fields, Fields], dict[str, Any]] = nested
    architecture: str = ""
    extra_tokens: int = 0
    follows_counts: bool = False
    pixel_schema: str = ""


@dataclass(frozen=True)
class ModelSpec(Spec):
    """What to build of a model, with seeded random weights; see also `Spec`.

    Attributes:
        whole: The model.
    """

    whole: WholeModel = field(kw_only=True)

    @property
    def depth(self) -> int:
        """Number of blocks that are built."""
        return self.vision_config[self.whole.depth]

    def config(self) -> Any:
        """Return the model's config.

        Raises:
            TowerError: The installed packages have no such config.
        """
        whole = self.whole
        cls = self._class(whole.config)
        try:
            fields = whole.layout(self.vision_config, {**_SMALL_TEXT, **whole.text})
            config = cls(**fields, **whole.fields)
        # Transformers checks fields, and raises errors of its own kinds.
        except Exception as error:
            raise self.unbuildable(error) from error
        config.architectures = [whole.architecture or whole.model]
        return config

    def image_processor(self) -> Any:
        """Return the model's image processor.

        Raises:
            TowerError: The installed packages have none.
        """
        cls = self._class(self.whole.processor)
        try:
            return cls(**self.whole.processor_fields)
        except Exception as error:
            raise self.unbuildable(error) from error

    def model_class(self) -> Any:
        """Return vLLM's class of the model. The process has to have a platform.

        Raises:
            TowerError: The installed vLLM has none.
        """
        module = f"vllm.model_executor.models.{self.whole.module}"
        return self._class(f"{module}:{self.whole.model}")

    def counts_on_device(self) -> bool:
        """Whether the installed vLLM hands the model its counts on its device."""
        module = sys.modules[self.model_class().__module__]
        kept = "keep_on_cpu" in inspect.getsource(module)
        return self.whole.follows_counts and not kept

    def has_images_apart(self) -> bool:
        """Whether the installed vLLM hands the model a list of images' pixels."""
        if not self.whole.pixel_schema:
            return False
        module = sys.modules[self.model_class().__module__]
        schema = getattr(module, self.whole.pixel_schema)
        hints = get_type_hints(schema, include_extras=True)
        (shape,) = hints["pixel_values"].__metadata__
        return shape.dims[0] == "bn"

    def unbuildable(self, error: Exception) -> TowerError:
        """Return the error for what the installed packages do not do."""
        return TowerError(
            f"{self.model} cannot be built with {_installed()} "
            f"({type(error).__name__}: {error}); use other versions of them, or "
            "another model"
        )

    def _class(self, path: str) -> Any:
        module, _, name = path.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise TowerError(
                f"{self.model} needs {name} of {module}, which {_installed()} lack "
                f"({error}); use other versions of them, or another model"
            ) from error


def _installed() -> str:
    found = ((name, installed(name)) for name in ("vllm", "transformers"))
    return " and ".join(f"{name} {v}" if v else f"no {name}" for name, v in found)
