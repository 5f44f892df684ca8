"""The root folder, its locks, and the addresses and ports that are chosen for leases."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from raytpu_ops.backends.local import addresses, layout
from raytpu_ops.backends.local.layout import ROOT_LOCK, Root
from raytpu_ops.tpu.errors import InvalidSpec, Misconfigured, RemoteUnavailable


def test_a_root_that_is_too_long_for_sockets_is_refused(root: Path) -> None:
    with pytest.raises(InvalidSpec, match=r"has \d+ characters, at most \d+ leave room .* RAYTPU_LOCAL_ROOT") as caught:
        Root(root / ("x" * 60)).check()
    assert "\n" not in str(caught.value)


def test_the_longest_root_that_is_taken_leaves_room_for_rays_longest_socket() -> None:
    for length in range(1, 60):
        path = Path("/tmp") / ("x" * length)
        try:
            Root(path).check()
        except InvalidSpec:
            break
        folder = Root(path).folder("some-lease") / layout.HEAD
        socket_path = f"{folder}/session_2026-01-01_00-00-00_000000_4194304/sockets/dash_TaskEventsHead"
        assert len(socket_path) <= layout._LIMIT
    assert length > 15, "the default root and a temporary folder with a prefix must fit"


def test_the_default_root_is_short_and_per_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(layout.ROOT_VARIABLE, raising=False)
    assert str(os.getuid()) in layout.default_root().name
    monkeypatch.setenv(layout.ROOT_VARIABLE, "/elsewhere")
    assert Root().path == Path("/elsewhere")


def test_a_root_that_others_may_enter_is_refused_and_not_touched(root: Path) -> None:
    root.chmod(0o755)
    with pytest.raises(Misconfigured, match="nobody else may enter"):
        Root(root).ensure()
    assert root.stat().st_mode & 0o777 == 0o755
    root.chmod(0o700)


def test_a_root_that_is_a_file_is_refused(root: Path) -> None:
    (root / "file").touch()
    with pytest.raises(Misconfigured, match="must be a folder of this user"):
        Root(root / "file").ensure()


def test_a_root_whose_parent_is_missing_is_refused(root: Path) -> None:
    with pytest.raises(Misconfigured, match="can't be created"):
        Root(root / "no" / "r").ensure()


def test_checking_creates_nothing(root: Path) -> None:
    Root(root / "r").check()
    assert list(root.iterdir()) == []


def test_a_lock_keeps_others_out_for_as_long_as_it_is_held(root: Path) -> None:
    place = Root(root)
    with place.locked("a"):
        with (
            pytest.raises(RemoteUnavailable, match=r"a\.lock is held by another process"),
            place.locked("a", limit_s=0.1),
        ):
            raise AssertionError("nobody may come in")
        with place.locked("b", limit_s=0.1):
            pass
    with place.locked("a", limit_s=0.1):
        pass


def test_who_waits_for_a_lock_that_is_removed_gets_the_new_one(root: Path) -> None:
    place, order = Root(root), []
    first = threading.Event()

    def wait() -> None:
        first.set()
        with place.locked("a"):
            order.append("waiter")
            assert (root / "a.lock").exists()

    waiter = threading.Thread(target=wait)
    with place.locked("a"):
        waiter.start()
        first.wait(10)
        order.append("holder")
        place.drop_lock("a")
    waiter.join(30)
    assert order == ["holder", "waiter"]


def test_tidying_removes_an_empty_root_and_no_other(root: Path) -> None:
    (root / "keep").touch()
    Root(root).tidy()
    assert {path.name for path in root.iterdir()} == {"keep", f"{ROOT_LOCK}.lock"}
    (root / "keep").unlink()
    Root(root).tidy()
    assert not root.exists()


def test_a_folder_is_removed_record_last(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = root / "lease"
    (folder / "h" / "session").mkdir(parents=True)
    (folder / layout.RECORD).touch()

    def refuse(path: object, **_: object) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    monkeypatch.setattr(layout.shutil, "rmtree", refuse)
    assert layout.remove_folder(folder) == [f"{folder / 'h'}: Device or resource busy"]
    assert (folder / layout.RECORD).exists()
    monkeypatch.undo()
    assert layout.remove_folder(folder) == []
    assert not folder.exists()


def test_blocks_are_loopback_distinct_and_stable() -> None:
    one = addresses.choose_block("lease-a", set())
    assert one == addresses.choose_block("lease-a", set())
    assert one.startswith("127.")
    assert not one.startswith("127.0.")
    assert addresses.choose_block("lease-a", {one}) not in ("", one)


def test_host_addresses_stay_within_the_block() -> None:
    made = {addresses.of_host("127.9.9", number) for number in range(1, 1000)}
    assert len(made) == 253
    assert addresses.of_head("127.9.9") not in made
    assert not {"127.9.9.0", "127.9.9.255"} & made


def test_a_port_that_somebody_listens_on_is_not_chosen() -> None:
    first = next(addresses.free_ports("lease-a", set()))
    with socket.socket() as listener:
        listener.bind(("127.5.5.5" if addresses.has_blocks() else "127.0.0.1", first))
        listener.listen()
        assert not addresses.is_free(first)
        assert next(addresses.free_ports("lease-a", set())) != first
    assert next(addresses.free_ports("lease-a", {first})) != first


def test_a_path_that_ray_cannot_start_from_is_refused_by_name(root: Path) -> None:
    with pytest.raises(Misconfigured, match=r"this Python '/opt/my env/bin/python' has ' ' in it"):
        layout.check_words("this Python", "/opt/my env/bin/python")
    with pytest.raises(Misconfigured, match="local root"):
        Root(root / "a b").check()
    layout.check_words("this Python", "/opt/größe_1.2/~x/py-3.11@a+b/bin/python")


def test_a_folder_with_other_things_is_no_root(root: Path) -> None:
    place = Root(root)
    place.check_ours()
    (root / "notes.txt").touch()
    with pytest.raises(InvalidSpec, match="is no root of the local backend"):
        place.check_ours()
    with place.locked(layout.ROOT_LOCK):
        pass
    place.check_ours()
