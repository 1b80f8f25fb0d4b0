"""What is served: the copy stays what it was, whatever happens to the file, to other processes and to the copy."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import changes
import numpy as np
import pytest

import itemset
from itemset.errors import ItemSetError
from itemset.serving import private_copies
from itemset.serving.catalogue import Catalogue, with_versions
from itemset.serving.config import StaticConfig

ITEMS, OTHERS = [[9], [5, 6, 7], [5, 8]], [[1, 2], [3, 4]]


CHANGES = changes.IN_PLACE | {"delete": Path.unlink}


OPEN = "import sys; from itemset.serving import private_copies; print(private_copies.open_copy(*sys.argv[1:])[1])"


@pytest.fixture
def path(tmp_path):
    itemset.build(ITEMS, keys=["a", "b", "c"]).save(tmp_path / "films.itemset")
    return tmp_path / "films.itemset"


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "copies"


def options(path: Path, cache: Path) -> dict:
    return {"item_sets": {"films": str(path)}, "item_set_cache": str(cache)}


def copies(cache: Path) -> list[str]:
    return sorted(name for name in os.listdir(cache) if name != "lock")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_all_processes_of_a_server_open_the_version_it_began_with(path, cache, change):
    resolved = with_versions(options(path, cache))
    first = Catalogue(StaticConfig.of(resolved))
    change(path)
    for catalogue in (first, Catalogue(StaticConfig.of(resolved))):
        assert catalogue.registered["films"].items() == ITEMS
        assert catalogue.registered["films"].lookup(ITEMS) == ["a", "b", "c"]
    assert with_versions(resolved) == resolved


def test_another_machine_makes_its_own_copy_of_the_same_version_or_does_not_start(path, cache, tmp_path):
    resolved = with_versions(options(path, cache))
    there = resolved | {"item_set_cache": str(tmp_path / "there")}
    assert Catalogue(StaticConfig.of(there)).registered["films"].items() == ITEMS
    changes.copy_over(path)
    elsewhere = resolved | {"item_set_cache": str(tmp_path / "elsewhere")}
    with pytest.raises(ItemSetError, match=r"'films'.*films.itemset is not the file that the server was started with"):
        Catalogue(StaticConfig.of(elsewhere))
    assert copies(tmp_path / "elsewhere") == []


def test_a_copy_is_private_and_named_by_all_that_is_in_the_file(path, cache):
    _, version = private_copies.open_copy(str(path), str(cache))
    assert copies(cache) == [version]
    assert (cache.stat().st_mode & 0o777, (cache / version).stat().st_mode & 0o777) == (0o700, 0o400)
    before = (cache / version).stat()
    assert private_copies.open_copy(str(path), str(cache))[1] == version
    assert (cache / version).stat().st_ino == before.st_ino
    itemset.build(ITEMS, keys=["a", "b", "d"]).save(path)
    assert private_copies.open_copy(str(path), str(cache))[1] != version
    assert len(copies(cache)) == 2


@pytest.mark.parametrize("damage", [changes.flip, changes.cut, lambda copy: os.truncate(copy, 0)])
def test_a_damaged_copy_is_made_again(path, cache, damage):
    _, version = private_copies.open_copy(str(path), str(cache))
    (cache / version).chmod(0o600)
    damage(cache / version)
    assert private_copies.open_copy(str(path), str(cache), version)[0].items() == ITEMS
    assert (cache / version).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("change", [changes.flip, changes.cut, Path.unlink])
def test_a_bad_file_is_refused_although_there_is_a_copy(path, cache, change):
    private_copies.open_copy(str(path), str(cache))
    change(path)
    with pytest.raises(ItemSetError, match=r"films\.itemset"):
        private_copies.open_copy(str(path), str(cache))


def test_copies_that_nobody_maps_go_after_a_while(path, cache, tmp_path):
    _, mine = private_copies.open_copy(str(path), str(cache))
    others = subprocess.run(
        [sys.executable, "-c", OPEN, str(save(tmp_path / "others.itemset", OTHERS)), str(cache)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (cache / "notes").touch()  # not ours
    (cache / "incomplete").write_bytes(b"of a start that was killed")
    built = private_copies.folder_of_indexes(str(cache))
    forms = [built / f"{version}-json.itemset" for version in (mine, "0" * 32)]  # of a copy, and of none any more
    for form in (*forms, built / f"{'1' * 32}.itemset"):
        form.touch()
    private_copies.delete_unused(str(cache))
    assert {*built.iterdir()} == {forms[0], built / f"{'1' * 32}.itemset"}
    shutil.rmtree(built)
    assert copies(cache) == sorted([mine, others, "notes"])
    for name in copies(cache):
        os.utime(cache / name, (0, time.time() - private_copies.KEPT_SECONDS - 1))
    private_copies.delete_unused(str(cache))
    assert copies(cache) == sorted([mine, "notes"])


def save(path: Path, items: object) -> Path:
    itemset.build(items).save(path)
    return path


def test_a_folder_that_cannot_be_used_names_the_option(path, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ItemSetError, match=r"cannot be copied to .*file/copies: Not a directory: .*item_set_cache"):
        private_copies.open_copy(str(path), str(tmp_path / "file" / "copies"))
    with pytest.raises(ItemSetError, match="item_set_cache must be the path of a folder, not 3"):
        StaticConfig.of({"item_set_cache": 3})
    # By default the user's cache folder, then a folder of the user's own among the temporary files.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    version = private_copies.open_copy(str(path))[1]
    assert copies(tmp_path / "xdg" / "static-backend") == [version]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(private_copies.tempfile, "gettempdir", lambda: str(tmp_path))
    private_copies.open_copy(str(path))
    own = tmp_path / f"static-backend-{os.geteuid()}"
    assert copies(own) == [version]
    own.chmod(0o777)
    with pytest.raises(ItemSetError, match="others can write to it: name another folder with the option item_set_ca"):
        private_copies.open_copy(str(path))


def test_a_disk_that_is_full_names_the_option_and_leaves_nothing(path, cache):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))

    failed = subprocess.run(
        [sys.executable, "-B", "-c", OPEN, str(path), str(cache)], capture_output=True, text=True, preexec_fn=limit
    )
    assert "cannot be copied to" in failed.stderr.splitlines()[-1]
    assert "make room there, or name another folder with the option item_set_cache" in failed.stderr
    assert copies(cache) == []


def open_after(gate, path: str, cache: str) -> None:
    gate.wait()
    private_copies.open_copy(path, cache)


@pytest.mark.slow
def test_starts_at_the_same_time_and_kills_at_any_moment_leave_one_whole_copy(tmp_path, cache):
    path = save(tmp_path / "big.itemset", np.random.default_rng(0).integers(0, 2048, (200_000, 8)))
    version, chosen = itemset.trie.file.version(path), random.Random(0)
    fork = multiprocessing.get_context("fork")
    ended: Counter[int] = Counter()
    rounds = 0
    while rounds < 6 or ended[-signal.SIGKILL] < 3:  # a busy machine may kill them too late
        rounds += 1
        assert rounds < 100
        shutil.rmtree(cache, ignore_errors=True)
        gate = fork.Event()
        starts = [fork.Process(target=open_after, args=(gate, str(path), str(cache))) for _ in range(4)]
        for process in starts:
            process.start()
        gate.set()
        time.sleep(chosen.uniform(0, 0.05))
        for process in starts[:3]:
            process.kill()
        for process in starts:
            process.join()
        ended.update(process.exitcode for process in starts)
        assert starts[3].exitcode == 0
        assert (cache / version).read_bytes() == path.read_bytes()
        private_copies.delete_unused(str(cache))
        assert copies(cache) == [version]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["pipe", "device"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, cache, make):
    make(tmp_path / "films.itemset")
    for open_it in (itemset.load, itemset.verify, lambda path: private_copies.open_copy(str(path), str(cache))):
        with pytest.raises(ItemSetError, match=r"films.itemset is a pipe, a socket or a device: give a file"):
            open_it(tmp_path / "films.itemset")
