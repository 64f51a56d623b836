# SPDX-License-Identifier: Apache-2.0
"""The client of soak.py: sends requests to several servers at once, and judges.

A request ends as it should if it is answered, if it is refused and ought to be, or if
its client went away first. Everything else is a fault: a status of 5xx, a lost
connection, no answer in time, an answer to what cannot be answered.
"""

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from serve_inputs import NAME
from soak_inputs import TOP_LOGPROBS, Request, body

ANSWER_S = 120.0
# A server that is lost would otherwise be asked thousands of times.
MAX_FAULTS = 50
# Of natural logarithms, between the answers of bf16 with FP8 attention and of fp32.
# With these weights bf16 alone is off by 0.02 to 0.14, and an error of 3 % in all
# embeddings, more than FP8 attention makes of any of these towers, by 0.03 to 0.13.
MAX_DIFFERENCE = 0.4
# Answers to other images mostly have fewer of their 20 likeliest tokens in common.
MIN_SHARED = TOP_LOGPROBS // 2
IDLE_S = 20.0
_BUSY = re.compile(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", re.MULTILINE)

Logprobs = Mapping[str, float]


@dataclass
class Tally:
    """How requests ended.

    Attributes:
        sent: How many.
        answered: Status 200, with an answer.
        refused: Bad ones with a status of 4xx and a message.
        cancelled: Their client went away before an answer.
        faults: All others, in words.
        differences: Of sampled answers from the judge's.
        others: The same from the judge's answer to another request.
    """

    sent: int = 0
    answered: int = 0
    refused: int = 0
    cancelled: int = 0
    faults: list[str] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Sampled answers that are too far from the judge's."""
        return sum(not off <= MAX_DIFFERENCE for off in self.differences)

    @property
    def noticed(self) -> float:
        """The share of answers to other requests that would count as wrong."""
        if not self.others:
            return math.nan
        return sum(not off <= MAX_DIFFERENCE for off in self.others) / len(self.others)


@dataclass(frozen=True)
class Target:
    """Where requests go.

    Attributes:
        servers: Addresses, asked in turns.
        judge: Address of the server whose answers are right.
        patch: Side of the model's patches in pixels.
    """

    servers: Sequence[str]
    judge: str
    patch: int


def difference(found: Logprobs, right: Logprobs) -> float:
    """Return the largest difference of tokens that both list; inf if those are few."""
    shared = found.keys() & right.keys()
    if len(shared) < MIN_SHARED:
        return math.inf
    return max(abs(found[token] - right[token]) for token in shared)


def logprobs(answer: Any) -> Logprobs:
    """Return the log-probabilities of the first token's candidates.

    Raises:
        LookupError: The answer has none.
        TypeError: As before.
    """
    first = answer["choices"][0]["logprobs"]["content"][0]
    return {entry["token"]: entry["logprob"] for entry in first["top_logprobs"]}


def fault_of(request: Request, status: int, answer: Any) -> str | None:
    """Return what is wrong with an answer, None if it is as it should be."""
    try:
        if request.bad is None:
            good = status == 200 and answer["usage"]["completion_tokens"] >= 1
        else:
            good = 400 <= status < 500 and bool(answer["error"]["message"])
    except (LookupError, TypeError):
        good = False
    return None if good else f"status {status}: {json.dumps(answer)[:300]}"


class Client:
    """Sends a run's requests."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, drawing: Executor
    ) -> None:
        """Begin without requests.

        Args:
            session: See `new_session`.
            target: Where they go.
            drawing: Draws their images.
        """
        self.tally = Tally()
        self._session, self._target, self._drawing = session, target, drawing
        self._before: Logprobs | None = None

    async def send(
        self, requests: Iterator[Request], at_once: int, is_over: Callable[[], bool]
    ) -> None:
        """Send requests until there are no more, it is over, or too much went wrong.

        Args:
            requests: In the order in which they are sent.
            at_once: How many are under way.
            is_over: Asked before each.
        """

        async def work() -> None:
            for request in requests:
                if is_over() or len(self.tally.faults) >= MAX_FAULTS:
                    return
                await self._one(request)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())

    async def _one(self, request: Request) -> None:
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(
            self._drawing, body, request, self._target.patch
        )
        server = self._target.servers[request.number % len(self._target.servers)]
        self.tally.sent += 1
        answer = await self._ask(server, request, data, request.cancel_after_s)
        if answer is None:
            return
        if request.bad is not None:
            self.tally.refused += 1
            return
        self.tally.answered += 1
        if request.is_sampled:
            right = await self._ask(self._target.judge, request, data, None)
            if right is not None:
                self._compare(request, answer, right)

    async def _ask(
        self, server: str, request: Request, data: bytes, cancel_after_s: float | None
    ) -> Any:
        """Return the answer that is as it should be; count and return None if not."""
        limit = ANSWER_S if cancel_after_s is None else cancel_after_s
        try:
            status, answer = await asyncio.wait_for(
                post(self._session, server, data), limit
            )
        except TimeoutError:
            if cancel_after_s is None:
                self._fault(server, request, f"no answer in {ANSWER_S:.0f} s")
            else:
                self.tally.cancelled += 1
            return None
        except (aiohttp.ClientError, OSError) as error:
            self._fault(server, request, f"{type(error).__name__}: {error}")
            return None
        if (fault := fault_of(request, status, answer)) is not None:
            self._fault(server, request, fault)
            return None
        return answer

    def _compare(self, request: Request, answer: Any, right: Any) -> None:
        try:
            found, judged = logprobs(answer), logprobs(right)
        except (LookupError, TypeError) as error:
            self._fault("", request, f"no log-probabilities: {error!r}")
            return
        off = difference(found, judged)
        self.tally.differences.append(off)
        if not off <= MAX_DIFFERENCE:
            print(f"  wrong: {described(request)}: off by {off:.3g}", flush=True)
        if self._before is not None:
            self.tally.others.append(difference(found, self._before))
        self._before = judged

    def _fault(self, server: str, request: Request, reason: str) -> None:
        line = f"{server} {described(request)}: {reason}".strip()
        self.tally.faults.append(line)
        print(f"  fault: {line}", flush=True)


def described(request: Request) -> str:
    """Return a request in words; its seed and number are enough to draw it again."""
    sizes = " ".join(f"{height}x{width}" for height, width in request.sizes)
    bad = f", then {request.bad}" if request.bad else ""
    return f"request {request.number} ({request.kind} {sizes}{bad})"


def new_session() -> aiohttp.ClientSession:
    """Return a session without limits; use it as a context."""
    # A server closes a connection that has idled, at times just as it is used again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=connector, timeout=timeout)


async def post(
    session: aiohttp.ClientSession, server: str, data: bytes
) -> tuple[int, Any]:
    """Return the status and the document that a server answers with.

    Raises:
        aiohttp.ClientError: The connection was refused or lost.
    """
    headers = {"Content-Type": "application/json"}
    url = f"{server}/v1/chat/completions"
    async with session.post(url, data=data, headers=headers) as response:
        text = await response.text()
    try:
        return response.status, json.loads(text)
    except ValueError:
        return response.status, text


async def left_over(session: aiohttp.ClientSession, server: str) -> str | None:
    """Return what a server still has to do when it should have nothing, or None.

    It also says if the server answers no more.
    """
    document = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Are you there?"}],
        "max_tokens": 1,
    }
    try:
        # Its numbers are those of the last step, so there has to be one.
        status, answer = await asyncio.wait_for(
            post(session, server, json.dumps(document).encode()), ANSWER_S
        )
        if status != 200:
            return f"status {status} at the end: {answer}"
        async with asyncio.timeout(IDLE_S):
            while True:
                async with session.get(f"{server}/metrics") as response:
                    text = await response.text()
                found = [float(value) for value in _BUSY.findall(text)]
                if found and not any(found):
                    return None
                await asyncio.sleep(0.5)
    except TimeoutError:
        return f"it is still busy {IDLE_S:.0f} s after the last request"
    except (aiohttp.ClientError, OSError) as error:
        return f"lost at the end: {type(error).__name__}: {error}"
