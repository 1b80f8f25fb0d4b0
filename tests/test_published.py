"""Published sets: one version is current and whole, whoever publishes, is killed, reads, or has a wrong clock."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import resource
import shutil
import tempfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import changes
import msgspec
import numpy as np
import pytest
from publishing import INDEXES, indexes, kill_at_every_line, names
from test_cli import run

import itemset
from itemset import ItemSetError, ItemSetWarning, cli, published
from itemset.trie import file as index_file

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def files(tmp_path):
    return indexes(tmp_path)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "sets" / "films"


@pytest.fixture
def films(files, folder):
    """A set with three versions: c is current, before it were b and a."""
    folder.parent.mkdir()
    for name in "abc":
        published.publish(files[name], folder)
    return folder


def letters(folder: Path) -> str:
    """The versions, the current one first, each by its index file's letter."""
    of_items = {str(sorted(items)): name for name, items in INDEXES.items()}
    return "".join(of_items[str(itemset.load(one.path).items())] for one in published.versions(folder))


def pointer(folder: Path) -> dict:
    return msgspec.json.decode((folder / "current.json").read_bytes())


def test_a_version_says_what_it_is(files, folder):
    folder.parent.mkdir()
    before = datetime.now(UTC).replace(microsecond=0)
    version = published.publish(files["a"], folder)
    assert version == published.current(folder) == published.versions(folder)[0]
    assert version.name == index_file.version(files["a"])
    assert version.path == folder / f"{version.name}.itemset"
    assert (version.sequence, version.items, version.bytes) == (1, 2, files["a"].stat().st_size)
    assert before <= version.published <= datetime.now(UTC)
    assert version.path.read_bytes() == files["a"].read_bytes()
    assert version.path.stat().st_mode & 0o222 == 0


def test_the_index_may_change_once_it_is_published(films, files):
    for change in changes.IN_PLACE.values():
        with changes.undone(files["c"]):
            change(files["c"])
            assert itemset.verify(published.current(films).path).items() == sorted(INDEXES["c"])


def test_the_same_index_again_makes_no_second_copy(films, files):
    inode = published.versions(films)[2].path.stat().st_ino
    assert published.publish(files["a"], films).sequence == 4
    assert (letters(films), published.current(films).path.stat().st_ino) == ("acb", inode)
    before = (films / "current.json").stat().st_ino
    assert published.publish(files["a"], films).sequence == 4  # it is current: nothing changes
    assert (films / "current.json").stat().st_ino == before
    assert published.publish(published.versions(films)[2].path, films).sequence == 5  # a file of the folder itself
    assert letters(films) == "bac"


@pytest.mark.parametrize("damage", [changes.flip, changes.cut, lambda path: path.write_bytes(b""), Path.unlink])
def test_a_damaged_version_is_copied_again(films, files, damage):
    version = published.current(films)
    version.path.chmod(0o600)
    damage(version.path)
    assert published.publish(files["c"], films) == version
    assert version.path.read_bytes() == files["c"].read_bytes()


def test_the_folders_above_are_made_too(files, tmp_path):
    folder = tmp_path / "sets" / "of" / "films"
    assert published.publish(files["a"], folder) == published.current(folder)


@pytest.mark.parametrize("damage", [changes.flip, changes.cut, Path.unlink])
def test_a_bad_index_is_refused_and_the_pointer_stays(films, files, damage, folder):
    before, there = pointer(films), names(films)
    damage(files["a"])
    with pytest.raises(ItemSetError, match=r"a\.itemset"):
        published.publish(files["a"], films)
    assert (pointer(films), names(films)) == (before, there)
    with pytest.raises(ItemSetError, match=r"a\.itemset"):
        published.publish(files["a"], folder.parent / "new")
    assert not (folder.parent / "new").exists()


def test_an_index_whose_checksums_are_right_and_whose_trie_is_wrong_is_refused(films, tmp_path):
    s = itemset.build([[1, 2], [1, 3], [4]])
    labels = np.array([4, 1, 3, 2], s.trie.tables.labels.dtype)
    wrong = itemset.ItemSet(
        s.trie.__class__(**(vars(s.trie) | {"tables": replace(s.trie.tables, labels=labels)})), s._keys
    )
    wrong.save(tmp_path / "wrong.itemset")
    before, there = pointer(films), names(films)
    with pytest.raises(ItemSetError, match=r"wrong\.itemset is corrupted, its tables are no trie"):
        published.publish(tmp_path / "wrong.itemset", films)
    assert (pointer(films), names(films)) == (before, there)


def test_rollback_goes_to_the_version_before_and_a_second_one_undoes_it(films):
    times = {one.name: one.published for one in published.versions(films)}
    assert published.rollback(films) == published.current(films)
    assert (letters(films), published.current(films).sequence) == ("bca", 4)
    assert published.rollback(films).sequence == 5
    assert letters(films) == "cba"
    first = published.versions(films)[2].name
    assert published.rollback(films, first[:8]).sequence == 6
    assert published.rollback(films, first.upper()).sequence == 6  # it is current
    assert letters(films) == "acb"
    assert {one.name: one.published for one in published.versions(films)} == times
    assert published.publish(films.parents[1] / "d.itemset", films).sequence == 7
    assert letters(films) == "dacb"


def test_a_rollback_that_cannot_be_is_refused(films, files, folder):
    before = pointer(films)
    missing = published.versions(films)[1]
    with pytest.raises(ItemSetError, match=f"has no version 'xyz': choose one of .*{missing.name}"):
        published.rollback(films, "xyz")
    with pytest.raises(ItemSetError, match="has 3 versions whose names begin with ''"):
        published.rollback(films, "")
    missing.path.unlink()
    with pytest.raises(ItemSetError, match=f"{missing.name}.itemset is missing or damaged: publish its index again"):
        published.rollback(films)
    assert pointer(films) == before
    one = published.publish(files["a"], folder.parent / "one")
    with pytest.raises(ItemSetError, match="has one version, there is none to go back to"):
        published.rollback(one.path.parent)
    with pytest.raises(ItemSetError, match="is no published set"):
        published.rollback(folder.parent)
    assert sorted(os.listdir(folder.parent)) == ["films", "one"]


def test_older_versions_are_deleted_but_never_the_current_one_or_the_one_before(films, files):
    (films / "notes").touch()  # not ours
    published.publish(files["d"], films, keep=3)
    assert letters(films) == "dcb"
    assert names(films) == {one.path.name for one in published.versions(films)} | {"notes"}
    published.rollback(films, published.versions(films)[2].name)
    assert letters(films) == "bdc"
    published.publish(files["b"], films, keep=1)  # it is current, the others go all the same
    assert letters(films) == "bd"
    assert len(names(films)) == 3
    with pytest.raises(ItemSetError, match="0 versions cannot be kept"):
        published.publish(files["a"], films, keep=0)


def test_a_version_that_cannot_be_deleted_is_a_warning(films, files):
    (films / f"{'0' * 32}.itemset").mkdir()
    with pytest.warns(ItemSetWarning, match=r"0000\.itemset is no longer needed and cannot be deleted"):
        published.publish(files["d"], films)
    assert letters(films) == "dcba"


def test_a_clock_that_goes_backwards_does_not_matter(films, files):
    future = datetime.now(UTC) + timedelta(days=36_500)
    written = pointer(films)
    for one in written["versions"]:
        one["published"] = future.isoformat()
    (films / "current.json").write_bytes(msgspec.json.encode(written))
    for path in films.iterdir():
        os.utime(path, (future.timestamp(), future.timestamp()))
    assert published.current(films).published == future
    version = published.publish(files["d"], films, keep=3)
    assert version == published.current(films)
    assert version.published < future
    assert (version.sequence, letters(films)) == (4, "dcb")
    published.rollback(films)
    assert letters(films) == "cdb"


def test_a_missing_pointer_says_what_to_do(films, files, tmp_path):
    for folder in (tmp_path / "none", tmp_path, files["a"]):
        with pytest.raises(ItemSetError, match=r"is no published set, it has no file current.json: publish an index"):
            published.current(folder)
    (films / "current.json").unlink()
    published.publish(files["b"], films, keep=1)
    assert len(names(films)) == 3  # what the lost pointer named is still there
    assert letters(films) == "b"


ENTRY = {"name": "0" * 32, "sequence": 2, "published": "2026-01-01T00:00:00Z", "items": 1, "bytes": 9}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 300,
        b"[]",
        b"{",
        {"versions": [ENTRY]},
        {"format": 1, "versions": []},
        {"format": 1, "versions": [ENTRY, ENTRY]},
        {"format": 1, "versions": [ENTRY | {"sequence": 0}]},
        {"format": 1, "versions": [ENTRY | {"sequence": 2**64 - 1}]},
        b" " * (published.POINTER_BYTES + 1),
        {"format": 1, "versions": [ENTRY | {"name": "../../" + "0" * 26}]},
        {"format": 1, "versions": [ENTRY | {"name": "0" * 32 + "\n"}]},
        {"format": 1, "versions": [ENTRY | {"published": "yesterday"}]},
    ],
)
def test_a_damaged_pointer_says_what_to_do(films, files, content):
    (films / "current.json").write_bytes(content if isinstance(content, bytes) else msgspec.json.encode(content))
    there = names(films)
    for ask in (
        published.current,
        published.versions,
        published.rollback,
        lambda at: published.publish(files["a"], at),
    ):
        with pytest.raises(ItemSetError, match=r"current\.json is damaged \(.*\): delete it, and publish an index"):
            ask(films)
    assert names(films) == there


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path), lambda path: os.symlink(path, path)],
    ids=["pipe", "folder", "device", "loop"],
)
def test_a_pointer_that_is_no_file_keeps_nobody_waiting(films, make):
    (films / "current.json").unlink()
    make(films / "current.json")
    with pytest.raises(ItemSetError, match=r"current\.json( is damaged \(it is no regular file\)|: cannot be read: )"):
        published.current(films)
    assert published.sets_in(films.parent) <= {"films"}


def test_a_folder_whose_name_no_request_could_carry_is_no_set(films, tmp_path):
    for name in (b"a:b", b"line\nbreak", b"\xff\xfe", b"with a space", "Füße@home".encode(), b".hidden"):
        shutil.copytree(films, films.parent / os.fsdecode(name))
    assert published.sets_in(films.parent) == {"films", "with a space", "Füße@home", ".hidden"}
    (films.parent / "loop").symlink_to("loop")
    (films.parent / "a file").touch()
    assert published.sets_in(films.parent) == {"films", "with a space", "Füße@home", ".hidden"}


def test_a_pointer_of_a_later_format_says_to_upgrade(films):
    (films / "current.json").write_bytes(msgspec.json.encode({"format": 2, "versions": [ENTRY]}))
    with pytest.raises(ItemSetError, match=r"has the format 2, this is 1: upgrade static-backend"):
        published.current(films)


def test_a_pointer_to_a_missing_file_says_what_to_do(films, files):
    version = published.current(films)
    version.path.unlink()
    with pytest.raises(ItemSetError, match=r"the current version, cannot be read: No such file .* --rollback"):
        published.current(films)
    assert published.publish(files["c"], films) == version
    version.path.unlink()
    assert published.rollback(films) == published.current(films)
    assert published.load_current(films)[1].items() == sorted(INDEXES["b"])


def test_a_folder_that_vanishes_and_comes_back_is_what_it_was(films, files, tmp_path):
    before = published.current(films)
    films.rename(tmp_path / "elsewhere")
    with pytest.raises(ItemSetError, match="is no published set"):
        published.current(films)
    (tmp_path / "elsewhere").rename(films)
    assert published.current(films) == before
    assert published.publish(files["d"], films).sequence == 4


def test_a_copy_of_the_folder_works_without_the_folder(films, files, tmp_path):
    shutil.copytree(films, tmp_path / "copy")
    shutil.rmtree(films)
    version, item_set = published.load_current(tmp_path / "copy")
    assert version.path.parent == tmp_path / "copy"
    assert item_set.items() == sorted(INDEXES["c"])
    assert published.publish(files["d"], tmp_path / "copy").sequence == 4
    assert letters(tmp_path / "copy") == "dcba"


def test_a_reader_whose_version_is_deleted_opens_the_next(films, files, monkeypatch):
    asked = []

    def load(path: Path) -> itemset.ItemSet:
        asked.append(path)
        if len(asked) == 1:  # meanwhile
            for name in "da":
                published.publish(files[name], films, keep=1)
            assert not path.exists()
        return itemset.load(path)

    monkeypatch.setattr(published, "load", load)
    version, item_set = published.load_current(films)
    assert (version.sequence, len(asked), item_set.items()) == (5, 2, sorted(INDEXES["a"]))

    def refuse(path: Path) -> None:
        raise ItemSetError("of another model")

    monkeypatch.setattr(published, "load", refuse)
    with pytest.raises(ItemSetError, match="of another model"):
        published.load_current(films)


def test_asking_for_the_current_version_keeps_nothing_open(films):
    before = os.listdir("/proc/self/fd")
    for _ in range(50):
        published.current(films)
    assert os.listdir("/proc/self/fd") == before


def publish_often(gate, own: list[Path], folder: Path) -> None:
    gate.wait()
    for index in own:
        published.publish(index, folder, keep=100)


def test_publishers_at_the_same_time_and_killed_ones_lose_no_version(tmp_path, folder):
    folder.parent.mkdir()
    indexes = []
    for number in range(32):
        itemset.build([[number + 1, 2], [3]]).save(tmp_path / f"{number}.itemset")
        indexes.append(tmp_path / f"{number}.itemset")
    gate, chosen = FORK.Event(), random.Random(0)
    publishers = [FORK.Process(target=publish_often, args=(gate, indexes[i::4], folder)) for i in range(4)]
    for process in publishers:
        process.start()
    gate.set()
    publishers[0].join(chosen.uniform(0, 0.02))
    publishers[0].kill()
    for process in publishers:
        process.join()
    assert [process.exitcode for process in publishers[1:]] == [0, 0, 0]
    found = published.versions(folder)
    expected = {index_file.version(index) for i in (1, 2, 3) for index in indexes[i::4]}
    assert expected <= {version.name for version in found}
    assert [version.sequence for version in found] == list(range(len(found), 0, -1))
    assert all(index_file.version(version.path) == version.name for version in found)
    publish_often(gate, indexes[::4], folder)
    assert names(folder) == {version.path.name for version in published.versions(folder)}
    assert len(names(folder)) == 32


@pytest.mark.slow
def test_a_kill_at_any_line_leaves_the_old_version_or_the_new_one():
    seen = kill_at_every_line()
    assert set(seen) == {"first: none", "first: a", "next: b", "next: c", "rollback: b", "rollback: a"}
    assert min(seen["first: none"], seen["next: b"], seen["rollback: b"]) > 30


def refusal(send, prepare, index: Path, folder: Path) -> None:
    prepare()
    try:
        published.publish(index, folder, keep=100)
        send.send("")
    except ItemSetError as error:
        send.send(str(error))


def refused(prepare, index: Path, folder: Path) -> str:
    """The sentence with which `publish` ends in a process of its own, after `prepare`."""
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=refusal, args=(send, prepare, index, folder))
    process.start()
    said = receive.recv()
    process.join()
    return said


def test_a_folder_that_cannot_be_written_is_an_error():
    def as_nobody() -> None:
        if os.geteuid() == 0:  # who may write anywhere
            os.seteuid(65534)

    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        place.chmod(0o755)
        files, folder = indexes(place), place / "set"
        published.publish(files["a"], folder)
        folder.chmod(0o555)
        (folder / "lock").chmod(0o444)
        before = pointer(folder)
        said = refused(as_nobody, files["b"], folder)
        assert re.search("cannot publish to .*set: Permission denied: choose a folder", said)
        assert (pointer(folder), len(names(folder))) == (before, 1)
        folder.chmod(0o755)


def test_a_file_is_no_folder(files):
    with pytest.raises(ItemSetError, match=r"cannot publish to .*b\.itemset: File exists: choose a folder"):
        published.publish(files["a"], files["b"])


@pytest.mark.parametrize("room", [1_000, 2_500])
def test_a_disk_that_is_full_leaves_the_pointer_and_no_litter(tmp_path, folder, files, room):
    """Room for less than the index, and for the index but not for the pointer of many versions."""
    folder.parent.mkdir()
    for number in range(20):
        itemset.build([[number + 10, 2], [3]]).save(tmp_path / "index")
        published.publish(tmp_path / "index", folder, keep=100)
    assert files["a"].stat().st_size < 2_500 < (folder / "current.json").stat().st_size
    before = pointer(folder)
    said = refused(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)), files["a"], folder)
    assert re.search("cannot publish to .*films: File too large: choose a folder .* with room", said)
    assert pointer(folder) == before
    assert not [name for name in names(folder) if not name.endswith(".itemset")]
    published.publish(files["a"], folder, keep=100)
    assert len(names(folder)) == len(published.versions(folder)) == 21


def test_the_command(capsys, files, folder):
    folder.parent.mkdir()
    first = run(capsys, "publish", files["a"], folder)
    name = index_file.version(files["a"])
    assert re.search(rf"current +{name}\nsequence +1\npublished +20\S+Z\nitems +2\n", first)
    run(capsys, "publish", files["b"], folder)
    assert "kept         2 versions" in run(capsys, "publish", "--keep", "1", files["c"], folder)
    listed = run(capsys, "publish", folder, "--list").splitlines()
    assert [re.split(" +", line)[1] for line in listed] == ["sequence", "3", "2"]
    assert listed[1].endswith("  current")
    assert listed[1].startswith(index_file.version(files["c"]))
    third = index_file.version(files["c"])[:6]
    for argv in (["--rollback", folder], [folder, "--rollback"], [folder, "--rollback", third]):
        run(capsys, "publish", *argv)
    assert letters(folder) == "cb"
    assert cli.main(["publish", str(folder), "--rollback", "none"]) == 1
    assert "itemset: " in capsys.readouterr().err
    for wrong in ([folder], [], [files["a"], folder, "--list"], ["--list"], [folder, "--list", "--keep", "3"]):
        with pytest.raises(SystemExit) as end:
            cli.main(["publish", *map(str, wrong)])
        assert end.value.code == 2
        assert "publish" in capsys.readouterr().err
