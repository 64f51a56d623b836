# SPDX-License-Identifier: Apache-2.0
"""The soak's client: what is an answer, a refusal, a fault, a wrong answer."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from _soak import PATCH, Fake, answer, asks, refusal
from aiohttp import web

import soak_client
from soak_client import MAX_DIFFERENCE, Client, Target
from soak_inputs import Request


async def hang() -> None:
    await asyncio.sleep(60)


async def crash() -> None:
    raise web.HTTPInternalServerError(text="Traceback")


def asked(
    requests: list[Request], server: Fake, judge: Fake | None = None
) -> soak_client.Tally:
    judge = judge or Fake()

    async def run() -> soak_client.Tally:
        addresses = [await fake.start() for fake in (server, judge)]
        with ThreadPoolExecutor(1) as drawing:
            async with soak_client.new_session() as session:
                target = Target(addresses[:1], addresses[1], PATCH)
                client = Client(session, target, drawing)
                await client.send(iter(requests), 4, lambda: False)
                await asyncio.sleep(0.1)
        await server.stop()
        await judge.stop()
        return client.tally

    return asyncio.run(run())


class TestClient:
    def test_answers_and_refusals_are_counted(self) -> None:
        tally = asked([asks()] * 3, Fake())
        assert (tally.sent, tally.answered, tally.faults) == (3, 3, [])
        tally = asked([asks("empty")] * 2, Fake(refusal))
        assert (tally.sent, tally.refused, tally.faults) == (2, 2, [])

    @pytest.mark.parametrize(
        ("request_", "answers", "said"),
        [
            (asks(), refusal, "status 400"),
            (asks(), crash, "status 500"),
            (asks(), lambda: web.json_response({"usage": None}), "status 200"),
            (asks("empty"), answer, "status 200"),
            (asks("empty"), lambda: refusal(500), "status 500"),
            (asks("empty"), lambda: web.Response(status=400), "status 400"),
        ],
    )
    def test_everything_else_is_a_fault(self, request_, answers, said) -> None:
        tally = asked([request_], Fake(answers))
        assert (tally.answered, tally.refused) == (0, 0)
        (line,) = tally.faults
        assert said in line and "request 0 (tiny 8x8" in line

    def test_a_server_that_hangs_or_drops_is_a_fault(self, monkeypatch) -> None:
        monkeypatch.setattr(soak_client, "ANSWER_S", 0.3)
        (line,) = asked([asks()], Fake(hang)).faults
        assert "no answer in" in line

        async def lost() -> soak_client.Tally:
            async with soak_client.new_session() as session:
                with ThreadPoolExecutor(1) as drawing:
                    # A port that nobody listens on.
                    target = Target(["http://127.0.0.1:9"], "", PATCH)
                    client = Client(session, target, drawing)
                    await client.send(iter([asks()] * 500), 4, lambda: False)
            return client.tally

        tally = asyncio.run(lost())
        assert all("ClientConnectorError" in line for line in tally.faults)
        # It is not asked for ever.
        assert tally.sent < 60

    def test_who_goes_away_is_gone_for_the_server(self) -> None:
        server = Fake(hang)
        tally = asked([asks(cancel_after_s=0.2)] * 5, server)
        assert (tally.cancelled, tally.faults) == (5, [])
        assert (server.asked, server.left) == (5, 5)
        # It was quicker.
        tally = asked([asks(cancel_after_s=20.0)], Fake())
        assert (tally.cancelled, tally.answered) == (0, 1)

    def test_sampled_answers_are_compared_with_the_judges(self) -> None:
        sample = [asks(is_sampled=True, number=number) for number in range(3)]
        tally = asked(sample, Fake(lambda: answer(0.125)), Fake())
        assert tally.differences == pytest.approx([0.125] * 3)
        assert (tally.wrong, tally.faults, len(tally.others)) == (0, [], 2)
        far = asked(sample, Fake(lambda: answer(2 * MAX_DIFFERENCE)), Fake())
        assert far.wrong == 3 and far.noticed == 1.0
        foreign = asked(sample, Fake(lambda: answer(shared=9)), Fake())
        assert foreign.differences == [math.inf] * 3
        assert (foreign.wrong, foreign.answered) == (3, 3)

    def test_a_judge_that_fails_is_a_fault(self) -> None:
        sample = [asks(is_sampled=True)]
        assert "status 500" in asked(sample, Fake(), Fake(crash)).faults[0]
        bare = Fake(lambda: web.json_response({"usage": {"completion_tokens": 1}}))
        assert "no log-probabilities" in asked(sample, bare).faults[0]

    @pytest.mark.parametrize(
        ("server", "said"),
        [
            (Fake(), None),
            (Fake(busy=1), "still busy"),
            (Fake(crash), "status 500 at the end"),
        ],
    )
    def test_what_is_left_at_the_end(self, server, said, monkeypatch) -> None:
        monkeypatch.setattr(soak_client, "IDLE_S", 0.2)

        async def run() -> str | None:
            address = await server.start()
            async with soak_client.new_session() as session:
                found = await soak_client.left_over(session, address)
            await server.stop()
            return found

        found = asyncio.run(run())
        assert found is None if said is None else said in str(found)
