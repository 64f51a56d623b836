# SPDX-License-Identifier: Apache-2.0
"""A process that holds something costly, a tower or an engine, and answers calls."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any, Protocol
from unittest import mock

# An engine's process first ends others.
_END_WITHIN_S = 30.0
_KILLED_WITHIN_S = 10.0


class Held(Protocol):
    """What such a process holds."""

    def running(self) -> AbstractContextManager[object]:
        """Hold what calls need."""

    def ready(self) -> object:
        """Prepare for calls, within `running`; return the first answer."""


def serve(
    make: Callable[..., Held], arguments: Sequence[object], pipe: Connection
) -> None:
    """Make it, and answer `(method, arguments)` until the other end closes."""
    _end_with_parent()
    try:
        held = make(*arguments)
        with held.running():
            pipe.send((True, held.ready()))
            while True:
                method, given = pipe.recv()
                try:
                    pipe.send((True, getattr(held, method)(*given)))
                except Exception as error:
                    pipe.send((False, f"{type(error).__name__}: {error}"))
    except EOFError:
        return
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    """End this process and what it starts when its parent is gone, whatever it does.

    A tower compiles for minutes. Left alone, it would use the cores and the GPU of what
    is measured next.
    """
    os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


class RemoteError(RuntimeError):
    """The process could not do what it was asked, or is gone."""


class Remote:
    """This side of such a process's pipe."""

    def __init__(
        self,
        make: Callable[..., Held],
        arguments: Sequence[object],
        environment: Mapping[str, str],
        answer_within_s: float,
    ) -> None:
        """Start the process; `wait` says whether it is ready.

        Args:
            make: Called there; it and its arguments can be pickled.
            arguments: See `make`.
            environment: Variables to set there.
            answer_within_s: Seconds that an answer may take.
        """
        self._answer_within_s = answer_within_s
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(make, arguments, theirs))
        with mock.patch.dict(os.environ, environment):
            self._process.start()
        theirs.close()

    def call(self, method: str, *arguments: object) -> Any:
        """Return what a method of it returns.

        Raises:
            RemoteError: It raised, took too long, or the process is gone.
        """
        self.ask(method, *arguments)
        return self.wait()

    def ask(self, method: str, *arguments: object) -> None:
        """Have it run a method, whose answer `wait` returns.

        Raises:
            RemoteError: The process is gone.
        """
        try:
            self._pipe.send((method, arguments))
        except OSError:
            raise self._gone() from None

    def wait(self) -> Any:
        """Return the next answer; the first one means ready.

        Raises:
            RemoteError: As `call`.
        """
        try:
            if not self._pipe.poll(self._answer_within_s):
                self._process.kill()
                # `is_there` tells the truth then.
                self._process.join(_KILLED_WITHIN_S)
                raise RemoteError(f"no answer within {self._answer_within_s:.0f} s")
            done, answer = self._pipe.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if not done:
            raise RemoteError(answer)
        return answer

    @property
    def is_there(self) -> bool:
        """Whether its process runs."""
        return self._process.is_alive()

    def close(self) -> None:
        """End the process."""
        self.let_go()
        self._process.join(_END_WITHIN_S)
        if self._process.is_alive():
            self._process.kill()

    def let_go(self) -> None:
        """Have the process end, and do not wait for it."""
        self._pipe.close()

    def _gone(self) -> RemoteError:
        self._process.join(_KILLED_WITHIN_S)
        return RemoteError(f"its process ended with {self._process.exitcode}")


def close_all(remotes: Sequence[Remote]) -> None:
    """End processes, all at once: a tower's takes seconds to end."""
    for remote in remotes:
        remote.let_go()
    for remote in remotes:
        remote.close()
