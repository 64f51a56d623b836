# SPDX-License-Identifier: Apache-2.0
"""Buckets hold what they are asked for, are few, and waste little."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_flashinfer_vit.kernels.buckets import bucket_max_len, bucket_num_seqs

MILLION = st.integers(min_value=1, max_value=1_000_000)


@pytest.mark.parametrize("bucket", [bucket_num_seqs, bucket_max_len])
@given(n=MILLION)
def test_bucket_holds_n_and_is_its_own_bucket(bucket, n):
    assert bucket(n) >= n
    assert bucket(bucket(n)) == bucket(n)


@pytest.mark.parametrize("bucket", [bucket_num_seqs, bucket_max_len])
@given(n=MILLION)
def test_bucket_never_falls(bucket, n):
    assert bucket(n) <= bucket(n + 1)


@given(n=st.integers(min_value=129, max_value=1_000_000))
def test_num_seqs_wastes_less_than_two_thirds(n):
    assert bucket_num_seqs(n) % 64 == 0
    assert bucket_num_seqs(n) < n * 5 / 3


@given(n=st.integers(min_value=64, max_value=1_000_000))
def test_max_len_wastes_less_than_the_length_itself(n):
    assert bucket_max_len(n) < 2 * n
    assert bucket_max_len(n) % 64 == 0


def test_num_seqs_starts_with_the_powers_of_two():
    assert [bucket_num_seqs(n) for n in (1, 8, 9, 16, 17, 32, 33, 64, 65)] == [
        8,
        8,
        16,
        16,
        32,
        32,
        64,
        64,
        128,
    ]


def test_windows_and_up_to_65536_sequences_need_few_buckets():
    assert len({bucket_num_seqs(n) for n in range(84, 737)}) == 5
    assert len({bucket_num_seqs(n) for n in range(1, 65537)}) <= 22


def test_max_len_is_a_power_of_two_up_to_128k():
    buckets = sorted({bucket_max_len(n) for n in range(1, 128 * 1024 + 1)})
    assert buckets == [64 << i for i in range(12)]
    assert bucket_max_len(128 * 1024 + 1) == 256 * 1024
    assert bucket_max_len(300 * 1024) == 384 * 1024


@pytest.mark.parametrize("n", [2**k for k in range(6, 17)])
def test_max_len_of_a_power_of_two_and_one_more(n):
    assert [bucket_max_len(n - 1), bucket_max_len(n)] == [n, n]
    assert bucket_max_len(n + 1) == 2 * n


@pytest.mark.parametrize("bucket", [bucket_num_seqs, bucket_max_len])
def test_one_more_than_a_bucket_is_the_next_ones(bucket):
    n = 1
    for _ in range(20):
        full = bucket(n)
        assert bucket(full) == full < bucket(full + 1)
        n = full + 1
