# SPDX-License-Identifier: Apache-2.0
"""Requests of a soak, and a server that answers them as a test wants."""

import asyncio
from collections.abc import Callable
from typing import Any

from _benchmarks import BENCHMARKS  # noqa: F401
from aiohttp import web
from aiohttp.test_utils import TestServer

from soak_inputs import Request

PATCH = 16


def asks(bad: str | None = None, **changes: Any) -> Request:
    given = {
        "seed": 0,
        "number": 0,
        "kind": "tiny",
        "sizes": ((8, 8),),
        "bad": bad,
        "cancel_after_s": None,
        "is_sampled": False,
        "max_tokens": 1,
    }
    return Request(**{**given, **changes})


def answer(off: float = 0.0, shared: int = 20) -> web.Response:
    """What vLLM answers, with log-probabilities that are `off`."""
    names = [f"token_id:{i if i < shared else 100 + i}" for i in range(20)]
    top = [{"token": name, "logprob": -1.0 - i} for i, name in enumerate(names)]
    top[3]["logprob"] += off
    choice = {"finish_reason": "length", "logprobs": {"content": [{}]}}
    choice["logprobs"]["content"][0]["top_logprobs"] = top
    return web.json_response({"choices": [choice], "usage": {"completion_tokens": 1}})


def refusal(status: int = 400) -> web.Response:
    return web.json_response({"error": {"message": "no"}}, status=status)


class Fake:
    """A server that answers as it is told, and notes who went away."""

    def __init__(self, answers: Callable[[], Any] = answer, busy: int = 0) -> None:
        self.answers, self.busy = answers, busy
        self.asked = self.left = 0

    async def start(self) -> str:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/metrics", self._metrics)
        self._server = TestServer(app)
        await self._server.start_server()
        return str(self._server.make_url("/")).rstrip("/")

    async def stop(self) -> None:
        await self._server.close()

    async def _chat(self, request: web.Request) -> web.Response:
        self.asked += 1
        await request.read()
        try:
            found = self.answers()
            return await found if asyncio.iscoroutine(found) else found
        except asyncio.CancelledError:
            self.left += 1
            raise

    async def _metrics(self, request: web.Request) -> web.Response:
        label = '{engine="0",model_name="model"}'
        text = f"vllm:num_requests_running{label} {self.busy}.0\n"
        return web.Response(text=text + f"vllm:num_requests_waiting{label} 0.0\n")
