# SPDX-License-Identifier: Apache-2.0
"""What the soak sends: images are what they say, and bad requests are bad."""

import base64
import io
import json
import math
from collections import Counter

import pytest
from _soak import PATCH, asks
from PIL import Image, UnidentifiedImageError

import soak_inputs
from setups import MAX_TOKENS
from soak_inputs import BAD, KINDS, MAX_RATIO, Request, body, draw_request
from soak_servers import SERVERS

MANY = [draw_request(0, number, PATCH) for number in range(2000)]


def urls(request: Request) -> list[str]:
    (message,) = json.loads(body(request, PATCH))["messages"]
    *parts, question = message["content"]
    assert question["type"] == "text"
    return [part["image_url"]["url"] for part in parts]


def opened(url: str) -> Image.Image:
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    image.load()
    return image


class TestInputs:
    def test_images_have_the_sizes_that_requests_name(self) -> None:
        sizes = ((1, 200), (64, 31), (7, 7))
        first, again, other = (
            urls(asks(sizes=sizes, number=number)) for number in (1, 1, 2)
        )
        assert [opened(url).size[::-1] for url in first] == list(sizes)
        assert first == again
        assert not set(first) & set(other)

    def test_every_kind_is_drawn_and_fits_the_model(self) -> None:
        assert {request.kind for request in MANY} == set(KINDS)
        assert {request.bad for request in MANY} == {None, *BAD}
        counts = {len(request.sizes) for request in MANY}
        assert counts >= set(range(1, soak_inputs.MAX_IMAGES + 1))
        for request in MANY:
            # Images below a unit are enlarged to one.
            unit = soak_inputs.MERGE * PATCH
            tokens = sum(
                math.ceil(h / unit) * math.ceil(w / unit) for h, w in request.sizes
            )
            assert tokens < MAX_TOKENS - 500

    def test_long_and_low_images_are_what_they_say(self) -> None:
        strips = [r.sizes[0] for r in MANY if r.kind == "strip" and r.sizes]
        assert {max(size) / min(size) for size in strips} == {MAX_RATIO}
        assert {height > width for height, width in strips} == {True, False}
        low = [r.sizes[0] for r in MANY if r.kind == "low" and r.sizes]
        assert {min(size) for size in low} == {soak_inputs.MERGE * PATCH}
        assert max(max(size) for size in low) > 300 * PATCH

    def test_some_are_bad_and_some_are_given_up_but_no_sample_is(self) -> None:
        shares = [
            sum(r.bad is not None for r in MANY) / len(MANY),
            sum(r.cancel_after_s is not None for r in MANY) / len(MANY),
        ]
        assert shares == pytest.approx([0.1, 0.1], abs=0.02)
        samples = [r for r in MANY if r.is_sampled]
        of_servers = Counter(r.number % SERVERS for r in samples)
        assert of_servers == {0: 25, 1: 24}
        assert all(r.bad is None and r.cancel_after_s is None for r in samples)
        assert any(max(max(r.sizes)) > 50 * PATCH for r in samples)
        document = json.loads(body(samples[0], PATCH))
        assert (document["logprobs"], document["top_logprobs"]) == (True, 20)

    @pytest.mark.parametrize("bad", ["truncated", "no image", "empty"])
    def test_bad_images_cannot_be_read(self, bad: str) -> None:
        for number in range(50):
            good, url = urls(asks(bad, number=number))
            assert opened(good).size == (8, 8)
            with pytest.raises((UnidentifiedImageError, OSError)):
                opened(url)

    def test_other_bad_requests_are_bad_for_another_reason(self) -> None:
        for number in range(50):
            _, url = urls(asks("too long", number=number))
            long, short = sorted(opened(url).size, reverse=True)
            assert long / short > MAX_RATIO
        assert urls(asks("unknown scheme"))[1].startswith("gopher:")
        assert len(urls(asks("too many", sizes=()))) == soak_inputs.MAX_IMAGES + 1
