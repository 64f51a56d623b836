# SPDX-License-Identifier: Apache-2.0
"""Files that are written: which may be, through symlinks, modes, failures, locks."""

import multiprocessing
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_flashinfer_vit.machine import files
from vllm_flashinfer_vit.machine.files import FileError

as_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")


@pytest.fixture
def umask() -> Iterator[None]:
    old = os.umask(0o027)
    yield
    os.umask(old)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestWrite:
    def test_a_new_file_gets_the_mode_of_the_umask(
        self, tmp_path: Path, umask: None
    ) -> None:
        path = tmp_path / "a.json"
        files.write(path, b"new")
        assert path.read_bytes() == b"new"
        assert mode(path) == 0o640
        assert names(tmp_path) == ["a.json"]

    @pytest.mark.parametrize("old", [0o600, 0o664, 0o644])
    def test_an_existing_file_keeps_its_mode(
        self, tmp_path: Path, umask: None, old: int
    ) -> None:
        path = tmp_path / "a.json"
        path.write_bytes(b"old")
        path.chmod(old)
        files.write(path, b"new")
        assert path.read_bytes() == b"new"
        assert mode(path) == old

    def test_a_symlink_stays_one(self, tmp_path: Path) -> None:
        (tmp_path / "store").mkdir()
        target = tmp_path / "store" / "a.json"
        target.write_bytes(b"old")
        link = tmp_path / "link.json"
        link.symlink_to(Path("store", "a.json"))
        files.write(link, b"new")
        assert link.is_symlink()
        assert target.read_bytes() == b"new"
        assert names(target.parent) == ["a.json"]

    def test_a_symlink_to_no_file_yet_makes_it(self, tmp_path: Path) -> None:
        link = tmp_path / "link.json"
        link.symlink_to("a.json")
        files.write(link, b"new")
        assert link.is_symlink()
        assert (tmp_path / "a.json").read_bytes() == b"new"

    @pytest.mark.parametrize("step", ["fsync", "rename"])
    def test_a_failure_keeps_the_old_file(
        self, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "a.json"
        path.write_bytes(b"old")

        def fail(*args: object) -> None:
            raise OSError(28, "No space left on device")

        owner, name = (os, "fsync") if step == "fsync" else (Path, "replace")
        monkeypatch.setattr(owner, name, fail)
        with pytest.raises(FileError, match=r"a\.json cannot be written: .*No space"):
            files.write(path, b"new")
        assert path.read_bytes() == b"old"
        assert names(tmp_path) == ["a.json"]

    def test_an_interrupt_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*args: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            files.write(tmp_path / "a.json", b"new")
        assert names(tmp_path) == []

    def test_a_planted_draft_is_not_followed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        victim = tmp_path / "victim"
        victim.write_bytes(b"old")
        monkeypatch.setattr(files.secrets, "token_hex", lambda size: "known")
        draft = tmp_path / ".known.draft"
        draft.symlink_to(victim)
        with pytest.raises(FileError, match="exists"):
            files.write(tmp_path / "a.json", b"new")
        assert victim.read_bytes() == b"old"
        # It is not ours to remove.
        assert draft.is_symlink()


class TestCheck:
    def refused(self, path: Path, what: str, keep: list[Path] | None = None) -> None:
        with pytest.raises(FileError, match=what) as caught:
            files.check(path, keep=keep or [])
        assert str(path) in str(caught.value)

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        def read(path: Path) -> None:
            if path.read_text() != "ours":
                raise ValueError("not ours")

        path = tmp_path / "a.json"
        files.check_replaceable(path, "numbers", read)
        path.touch()
        files.check_replaceable(path, "numbers", read)
        path.write_text("ours")
        files.check_replaceable(path, "numbers", read)
        path.write_text("theirs")
        with pytest.raises(FileError, match="holds no numbers .*; delete it, or"):
            files.check_replaceable(path, "numbers", read)

    def test_a_device(self) -> None:
        self.refused(Path("/dev/null"), "it is a device")

    def test_a_link_to_a_device(self, tmp_path: Path) -> None:
        link = tmp_path / "a.json"
        link.symlink_to("/dev/null")
        self.refused(link, "it is a device")
        with pytest.raises(FileError):
            files.write(link, b"new")
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode)

    def test_a_named_pipe(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        self.refused(tmp_path / "pipe", "it is a pipe")

    def test_a_pipe_of_a_shell(self) -> None:
        reading, writing = os.pipe()
        try:
            self.refused(Path(f"/proc/self/fd/{writing}"), "it is a pipe")
        finally:
            os.close(reading)
            os.close(writing)

    def test_a_folder(self, tmp_path: Path) -> None:
        self.refused(tmp_path, "it is a folder")

    def test_no_folder(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "no" / "a.json", "in a folder that exists")

    def test_a_circle_of_symlinks(self, tmp_path: Path) -> None:
        (tmp_path / "a").symlink_to("b")
        (tmp_path / "b").symlink_to("a")
        self.refused(tmp_path / "a", "cannot be written")

    @as_root
    def test_a_folder_of_others(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        self.refused(tmp_path / "a.json", "may not write to the folder")

    @as_root
    def test_a_read_only_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        path.write_bytes(b"")
        path.chmod(0o400)
        self.refused(path, "read-only")

    def test_a_file_that_is_read_too(self, tmp_path: Path) -> None:
        image = tmp_path / "a.png"
        image.write_bytes(b"")
        self.refused(image, r"also uses it as .*a\.png", [tmp_path / "b", image])
        link = tmp_path / "link"
        link.symlink_to(image)
        self.refused(link, "also uses it", [image])
        self.refused(image, "also uses it", [link])
        self.refused(tmp_path / "x" / ".." / "a.png", "also uses it", [image])

    def test_a_file_that_is_also_written(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "new", "also uses it", [tmp_path / "new"])


def _hold(path: Path, is_held: object, may_end: object) -> None:
    with files.locked(path):
        is_held.set()  # type: ignore[attr-defined]
        may_end.wait(60)  # type: ignore[attr-defined]


def _count(path: Path, barrier: object) -> None:
    barrier.wait(60)  # type: ignore[attr-defined]
    for _ in range(50):
        with files.locked(path, timeout_s=60):
            number = int(path.read_text()) if path.exists() else 0
            files.write(path, str(number + 1).encode())


class TestLock:
    def test_leaves_no_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        with files.locked(path):
            assert len(names(tmp_path)) == 1
        assert names(tmp_path) == []
        with pytest.raises(KeyError), files.locked(path):
            raise KeyError
        assert names(tmp_path) == []

    def test_another_process_is_told(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        (tmp_path / "link.json").symlink_to(path)
        context = multiprocessing.get_context("spawn")
        is_held, may_end = context.Event(), context.Event()
        holder = context.Process(target=_hold, args=(path, is_held, may_end))
        holder.start()
        try:
            assert is_held.wait(60)
            for name in ("a.json", "link.json"):
                with (
                    pytest.raises(FileError, match="made by another process"),
                    files.locked(tmp_path / name),
                ):
                    pass
        finally:
            may_end.set()
            holder.join(60)
        with files.locked(path):
            pass

    def test_waiting_processes_lose_nothing(self, tmp_path: Path) -> None:
        # The lock's file goes and comes back meanwhile.
        path = tmp_path / "a.json"
        context = multiprocessing.get_context("spawn")
        barrier = context.Barrier(4)
        children = [
            context.Process(target=_count, args=(path, barrier)) for _ in range(4)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
        assert path.read_text() == "200"
        assert names(tmp_path) == ["a.json"]

    def test_a_planted_symlink_is_not_followed(self, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        (tmp_path / ".a.json.lock").symlink_to(victim)
        with (
            pytest.raises(FileError, match=r"delete .*\.a\.json\.lock"),
            files.locked(tmp_path / "a.json"),
        ):
            pass
        assert not victim.exists()
