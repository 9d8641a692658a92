"""The cache is this user's: what others may have written there is not read, and nothing is written for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfexport.system import disk_cache

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no modes of folders")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tfexport"


def test_what_was_kept_is_loaded(cache: Path) -> None:
    assert disk_cache.load("kernels") == b""
    disk_cache.keep("kernels", memoryview(b"code"))
    assert disk_cache.load("kernels") == b"code"
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_not_used(cache: Path, mode: int) -> None:
    disk_cache.keep("kernels", b"ours")
    cache.chmod(mode)
    assert disk_cache.load("kernels") == b""
    disk_cache.keep("kernels", b"new")
    assert (cache / "kernels").read_bytes() == b"ours"


def test_a_folder_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_cache.keep("kernels", b"theirs")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert disk_cache.load("kernels") == b""


@pytest.mark.parametrize("name", ["tfexport", "tfexport/packed"])
def test_a_link_is_not_followed(cache: Path, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "kernels").write_bytes(b"theirs")
    (tmp_path / name).parent.mkdir(mode=0o700, exist_ok=True)
    (tmp_path / name).symlink_to(elsewhere)
    with pytest.raises(disk_cache.NotOwned, match="not a folder, but a link"):
        disk_cache.own_folder("packed")
    assert disk_cache.load("packed/kernels" if "/" not in name else "none") == b""
    if name == "tfexport":
        assert disk_cache.load("kernels") == b""
        disk_cache.keep("kernels", b"ours")
        assert (elsewhere / "kernels").read_bytes() == b"theirs"


def test_a_pipe_in_the_cache_is_passed_over(cache: Path) -> None:
    disk_cache.own_folder()
    os.mkfifo(cache / "kernels")
    assert disk_cache.load("kernels") == b""
