# SPDX-License-Identifier: Apache-2.0
"""Models other than Qwen's, whose checkpoint folders other_checkpoints.py writes."""

from collections.abc import Mapping

from other_checkpoints import OtherModel
from other_dense import DENSE_MODELS
from other_packed import PACKED_MODELS

OTHER_MODELS: Mapping[str, OtherModel] = {**PACKED_MODELS, **DENSE_MODELS}
