# SPDX-License-Identifier: Apache-2.0
"""Buckets over all of int32: no gaps, and few plans whatever lengths come."""

import math

import pytest
from _fuzz import fuzz
from hypothesis import given
from hypothesis import strategies as st

from vllm_flashinfer_vit.kernels.buckets import bucket_max_len, bucket_num_seqs

BOTH = pytest.mark.parametrize("bucket", [bucket_num_seqs, bucket_max_len])
# Small numbers, any, and those beside powers of two and multiples of them.
SIZES = (
    st.integers(1, 300)
    | st.integers(1, 2**31 - 1)
    | st.builds(
        lambda power, times, off: max(1, times * 2**power + off),
        st.integers(0, 24),
        st.integers(1, 100),
        st.integers(-2, 2),
    )
)


@BOTH
@given(n=SIZES, part=st.floats(0, 1))
@fuzz(300)
def test_all_from_n_to_its_bucket_have_that_bucket(bucket, n, part):
    """It holds n, is its own bucket, and no smaller one lies between them."""
    full = bucket(n)
    assert n <= full
    assert bucket(n + math.floor((full - n) * part)) == full
    assert bucket(full + 1) > full


@BOTH
@given(sizes=st.lists(SIZES, max_size=40))
@fuzz(100)
def test_plans_are_few_and_never_more_than_batches(bucket, sizes):
    """About two plans for each doubling, and a step of 128K for longer sequences."""
    largest = max(sizes, default=1)
    plans = {bucket(n) for n in sizes}
    assert len(plans) <= len(set(sizes))
    assert len(plans) <= 2 * math.log2(largest) + largest / (128 * 1024) + 2


@given(n=SIZES)
@fuzz(300)
def test_waste_is_bounded(n):
    """A bucket is less than twice what is asked for, beyond the smallest one."""
    assert bucket_num_seqs(n) < max(9, 2 * n)
    assert bucket_max_len(n) < max(65, 2 * n)
    if n > 128 * 1024:
        assert bucket_max_len(n) - n < 128 * 1024
