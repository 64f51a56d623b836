# SPDX-License-Identifier: Apache-2.0
"""Which head room scales in FP8 may have."""

from vllm_flashinfer_vit.fp8.scale_files import ScaleError
from vllm_flashinfer_vit.kernels.formats import E4M3_MAX


def check_margin(margin: float, option: str) -> None:
    """Check head room before anything is seen that it would spoil.

    Args:
        margin: What the abs-max is to be multiplied by.
        option: What gave it, for the message.

    Raises:
        ScaleError: e4m3 cannot hold values with such scales.
    """
    if not 1 / E4M3_MAX <= margin <= E4M3_MAX:
        raise ScaleError(
            f"{option} is {margin:g}: use a number from 1/448 to 448, such as 1.5; "
            "with more, one unit of e4m3 is above all values, with less, all beyond a "
            "448th of the largest are cut off"
        )
