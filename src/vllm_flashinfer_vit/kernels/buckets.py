# SPDX-License-Identifier: Apache-2.0
"""Shapes that execution plans are built for: pure functions on ints.

A cuDNN plan declares a batch size and a longest sequence, and costs tens of
milliseconds to build. Rounding both up keeps plans few. What is declared and not there
costs thread blocks that end at once, not arithmetic.
"""

_SMALL_NUM_SEQS = (8, 16, 32, 64)
_MIN_MAX_LEN = 64
_MAX_LEN_STEP = 128 * 1024


def bucket_num_seqs(num_seqs: int) -> int:
    """Round a number of sequences up to one that plans are built for.

    8, 16, 32, 64, then steps of about x1.5 in multiples of 64: five buckets
    hold the 84 to 736 windows of Qwen2.5-VL's images.
    """
    for bucket in _SMALL_NUM_SEQS:
        if num_seqs <= bucket:
            return bucket
    bucket = _SMALL_NUM_SEQS[-1]
    while bucket < num_seqs:
        bucket = _round_up(bucket + bucket // 2, 64)
    return bucket


def bucket_max_len(max_len: int) -> int:
    """Round a longest sequence, in tokens, up to one that plans are built for.

    Powers of two from 64 to 128K, then multiples of 128K.
    """
    if max_len > _MAX_LEN_STEP:
        return _round_up(max_len, _MAX_LEN_STEP)
    return max(_MIN_MAX_LEN, 1 << (max_len - 1).bit_length())


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
