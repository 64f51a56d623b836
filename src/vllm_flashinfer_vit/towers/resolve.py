# SPDX-License-Identifier: Apache-2.0
"""Which tower a user means: a checkpoint folder, or a model by name."""

from pathlib import Path

from vllm_flashinfer_vit.towers.spec import (
    ASK_FOR_RANDOM,
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
        model: As for `resolve_spec`, or a name in `WHOLE_MODELS`.
        random_weights: As for `resolve_spec`.
        depth: As for `resolve_spec`.

    Raises:
        TowerError: See `resolve_spec`.
        CheckpointError: See `resolve_spec`.
    """
    if Path(model).is_dir() or model in NAMED_MODELS:
        return resolve_spec(model, random_weights=random_weights, depth=depth)
    known = ", ".join([*NAMED_MODELS, *WHOLE_MODELS])
    if model in NOT_BUILT:
        raise TowerError(f"{model}: {NOT_BUILT[model]}; known are {known}")
    if model not in WHOLE_MODELS:
        raise TowerError(
            f"{model!r} is neither a folder nor a known model; known are {known}"
        )
    if not random_weights:
        raise TowerError(
            f"{model} is a name, and no weights are downloaded: {ASK_FOR_RANDOM}. "
            "Checkpoints of its family are read in an engine only"
        )
    whole = WHOLE_MODELS[model]
    full_depth = whole.vision[whole.depth]
    wanted = full_depth if depth is None else depth
    vision = cut_blocks(whole.vision, wanted, whole.depth)
    return ModelSpec(whole, vision, model, full_depth)
