# SPDX-License-Identifier: Apache-2.0
"""The files that the package writes: which may be written, how, and one at a time.

A file is replaced as a whole: whoever reads it sees the old or the new one, and an
error leaves the old one. Through a symlink, the file that it leads to is replaced.
"""

import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


class FileError(OSError):
    """A file cannot be written; the message names it and says what to do."""


def check(path: Path, *, keep: Iterable[Path] = ()) -> Path:
    """Check that a file may be written: call it before hours of work, too.

    Args:
        path: The file, which may exist, or a symlink to it.
        keep: Files that are read, or written by the same command; `path` must be none
            of them, through symlinks either.

    Returns:
        The file that will be created or replaced, without symlinks.

    Raises:
        FileError: It may not be written.
    """
    # Unlike `Path.resolve`, it does the same with a circle of symlinks in any Python.
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise FileError(f"{path} cannot be written: it is in a circle of symlinks")
    try:
        there = path.stat() if path.exists() else None
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error}") from None
    if there is not None and not stat.S_ISREG(there.st_mode):
        raise FileError(
            f"{path} cannot be written: it is {_kind(there.st_mode)}; give a file"
        )
    if not target.parent.is_dir():
        raise FileError(
            f"{path} cannot be written: the folder {target.parent} does not exist; "
            "give a file in a folder that exists"
        )
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise FileError(
            f"{path} cannot be written: you may not write to the folder "
            f"{target.parent}; choose another one"
        )
    if there is not None and not os.access(target, os.W_OK):
        raise FileError(f"{path} cannot be written: it is read-only; choose another")
    for other in keep:
        if os.path.realpath(other) == str(target):
            raise FileError(
                f"{path} cannot be written: this command also uses it as {other}; "
                "choose another name"
            )
    return target


def check_replaceable(path: Path, what: str, read: Callable[[Path], object]) -> None:
    """Check that a file is new, empty, or holds what is to be written to it.

    Args:
        path: See `check`.
        what: What is to be written, for the message.
        read: Raises an OSError or a ValueError where a file holds something else.

    Raises:
        FileError: It holds something else.
    """
    if not path.exists() or path.stat().st_size == 0:
        return
    try:
        read(path)
    except (OSError, ValueError):
        raise FileError(
            f"{path} is not replaced: it is not empty, and holds no {what} that can be "
            "read; delete it, or choose another name"
        ) from None


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


def write(path: Path, content: bytes) -> None:
    """Write a file as a whole.

    A new file gets the mode that the umask gives it, one that exists keeps its own.

    Args:
        path: See `check`.
        content: All of the file.

    Raises:
        FileError: It may not be written, or an error came up; the old file is kept.
    """
    target = check(path)
    draft = target.with_name(f".{secrets.token_hex(8)}.draft")
    # Not what somebody else has put there, and no symlink.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        opened = os.open(draft, flags, 0o666)
        try:
            with open(opened, "wb") as file:
                if target.exists():
                    os.fchmod(opened, stat.S_IMODE(target.stat().st_mode))
                file.write(content)
                file.flush()
                os.fsync(opened)
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error}") from error


@contextmanager
def locked(path: Path, timeout_s: float = 0.0) -> Iterator[None]:
    """Keep other processes, which lock it as well, from a file.

    Args:
        path: See `check`; the lock is a file beside it, there while the lock is held.
        timeout_s: How long to wait for another process.

    Raises:
        FileError: Another process has the lock, or there can be none.
    """
    target = check(path)
    lock_path = target.with_name(f".{target.name}.lock")
    lock = FileLock(lock_path)
    try:
        lock.acquire(timeout=timeout_s)
    except Timeout:
        raise FileError(
            f"{path} is being made by another process, which holds {lock_path}; wait "
            "until it has ended, or choose another file"
        ) from None
    except OSError as error:
        raise FileError(
            f"{path} cannot be locked: {error}; delete {lock_path} if no other process "
            "writes the file"
        ) from error
    try:
        yield
    finally:
        # While the lock is held: whoever waits for it sees that its file is gone.
        lock_path.unlink(missing_ok=True)
        lock.release()
