# SPDX-License-Identifier: Apache-2.0
"""Processes of vLLM, and all that they start."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

START_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 20.0


class GroupProcess:
    """A process that is ended with all that it starts."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        """Start it.

        Args:
            command: What to run.
            log: The file that gets all it prints.
            environment: All of its variables.
            folder: Where it runs; None for this process's own.
        """
        self._log = log
        with log.open("w") as file:
            # A group of its own, so that what it starts can be ended with it.
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The first process."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the first process is gone."""
        return self._process.poll() is not None

    def log(self) -> str:
        """All that it has said."""
        return self._log.read_text(errors="replace")

    def wait_for_end(self, seconds: float) -> int | None:
        """Return what the first process ended with, None if it has not by then."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """End it and all that it started.

        Of a process that has ended before only its group is known, not the groups that
        it began.
        """
        started = _descendants(self._process.pid)
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, how)
                self._process.wait(STOP_TIMEOUT_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        # A benchmark's servers have groups of their own, and may outlast it.
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


class ServerProcess(GroupProcess):
    """A process that is to answer at a port."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        """Start it; `wait` returns once it answers.

        Args:
            command: What to run.
            port: Where it is going to listen.
            log: See `GroupProcess`, like the other arguments.
            environment: See `log`.
            folder: See `log`.
        """
        super().__init__(command, log, environment, folder)
        self.port = port

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def wait(self, until: float) -> None:
        """Wait until it answers.

        Args:
            until: The latest moment, by `time.monotonic`.

        Raises:
            RuntimeError: It ended, or did not answer in time.
        """
        while time.monotonic() < until:
            if (status := self._process.poll()) is not None:
                raise RuntimeError(f"it ended with {status}: {self._last_error()}")
            try:
                # Its address begins with http.
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):  # noqa: S310
                    return
            except OSError:
                time.sleep(1)
        raise RuntimeError(f"no answer in {START_TIMEOUT_S:.0f} s, see {self._log}")

    def _last_error(self) -> str:
        errors = [line for line in self.log().splitlines() if "Error" in line]
        return errors[-1].strip() if errors else f"no error in {self._log}"


def check_free(port: int) -> None:
    """Check that nobody listens at a port where a server is to start.

    vLLM would share the port with another server of this user, and its requests, too.

    Raises:
        RuntimeError: Somebody does.
    """
    with socket.socket() as other:
        if other.connect_ex(("127.0.0.1", port)) == 0:
            raise RuntimeError(f"something listens at port {port} already: end it")


def stop_as_by_ctrl_c() -> None:
    """Let SIGTERM raise KeyboardInterrupt: servers are stopped, and do not stay behind.

    They are in process groups of their own, which no signal to this one reaches.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
