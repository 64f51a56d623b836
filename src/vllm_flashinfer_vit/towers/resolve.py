# SPDX-License-Identifier: Apache-2.0
"""Which tower a user means: a checkpoint folder, or a model by name."""

from pathlib import Path

from vllm_flashinfer_vit.towers.spec import (
    NAMED_MODELS,
    Spec,
    TowerError,
    cut_blocks,
    resolve_spec,
)
from vllm_flashinfer_vit.towers.whole import ModelSpec
from vllm_flashinfer_vit.towers.whole_models import NOT_BUILT, WHOLE_MODELS


def resolve(
    model: str, *, random_weights: bool = False, depth: int | None = None
) -> Spec:
    """Find out which tower a user means.

    Args:
        model: A local Hugging Face checkpoint folder, or a name in `NAMED_MODELS` or
            `WHOLE_MODELS`.
        random_weights: Seeded random weights instead of a checkpoint's. A name has no
            others.
        depth: Number of blocks to build, from the first on; None for all.

    Returns:
        A `TowerSpec` of a folder or a name in `NAMED_MODELS`, else a `ModelSpec`.

    Raises:
        TowerError: The model is unknown, a name comes without random weights, or the
            depth is out of range.
        CheckpointError: The folder's `config.json` is missing or not of a known family.
    """
    if not Path(model).is_dir():
        _check_name(model, random_weights)
        if model in WHOLE_MODELS:
            return _of_whole(model, depth)
    return resolve_spec(model, random_weights=random_weights, depth=depth)


def _check_name(model: str, random_weights: bool) -> None:
    """Check a model that is no folder; see `resolve`."""
    known = ", ".join([*NAMED_MODELS, *WHOLE_MODELS])
    if model in NOT_BUILT:
        raise TowerError(f"{model}: {NOT_BUILT[model]}; known are {known}")
    if model not in NAMED_MODELS and model not in WHOLE_MODELS:
        raise TowerError(
            f"{model!r} is neither a folder nor a known model; known are {known}"
        )
    if not random_weights:
        other = (
            ", or give the folder of a local checkpoint"
            if model in NAMED_MODELS
            else "; checkpoints of its family are read in an engine only"
        )
        raise TowerError(
            f"{model} is a name, and no weights are downloaded: ask for random weights "
            f"(--random-weights, or random_weights=True){other}"
        )


def _of_whole(model: str, depth: int | None) -> ModelSpec:
    whole = WHOLE_MODELS[model]
    vision = cut_blocks(whole.vision, depth, whole.depth)
    return ModelSpec(vision, model, whole.vision[whole.depth], whole=whole)
