"""What a person waits for: loops are compiled by one process of a machine, and a command loads no torch for a
tokenizer, nor calls it through its wrapper where that changes nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from models import tiny_tokenizer
from real_tokenizers import NAMES, tokenizer

import itemset
from itemset import text
from itemset.serving import warm_up

TEXTS = ["The film", " a b  c ", "Amélie 映画", "</s>", "a</s>b", "it's 1995", "\n", "<s> The"]
HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(1, flush=True)
time.sleep(60)
"""
COMMAND = """
import sys
from itemset.cli import main
code = main()
print("torch" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture
def runs(tmp_path, monkeypatch) -> list[tuple[float, float]]:
    """When each process, here a thread, has run the loops; the cache is empty."""
    runs: list[tuple[float, float]] = []

    def run_all() -> None:
        began = time.monotonic()
        time.sleep(0.1)
        runs.append((began, time.monotonic()))

    monkeypatch.setattr(warm_up, "_mark", lambda: tmp_path / "cache" / "all-loops-1")
    monkeypatch.setattr(warm_up, "_run_all", run_all)
    return runs


def at_once(count: int) -> None:
    threads = [threading.Thread(target=warm_up.compile_all.__wrapped__) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_one_process_compiles_and_the_others_wait(runs):
    at_once(3)
    runs.sort()
    assert len(runs) == 3
    assert all(runs[0][1] <= begin for begin, _ in runs[1:])  # these load what it has saved


def test_nobody_waits_once_all_loops_are_there(runs):
    at_once(1)
    runs.clear()
    at_once(3)
    assert max(begin for begin, _ in runs) < min(end for _, end in runs)


def test_a_process_that_is_killed_holds_no_lock(runs):
    warm_up._mark().parent.mkdir()
    lock = str(warm_up._mark().with_name("all-loops.lock"))
    with subprocess.Popen([sys.executable, "-c", HOLDER, lock], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"1\n"
        waiting = threading.Thread(target=at_once, args=(1,))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        holder.send_signal(signal.SIGKILL)
        waiting.join(30)
    assert len(runs) == 1


@pytest.mark.parametrize("name", NAMES)
def test_texts_have_the_tokens_that_the_wrapper_gives(name):
    given = tokenizer(name)
    assert text._compiled(given) is not None
    through = [given(one, add_special_tokens=False)["input_ids"] for one in TEXTS]
    assert text._token_ids(TEXTS, given) == through
    assert text.decoded(through, given) == [text.decode(tokens, given) for tokens in through]


def test_what_a_wrapper_does_of_its_own_is_done():
    """A class of its own, and settings that the compiled tokenizer would follow."""
    given = tiny_tokenizer()

    class Lower(type(given)):
        def __call__(self, texts, **options):
            return super().__call__([one.lower() for one in texts], **options)

    other = Lower(tokenizer_object=given.backend_tokenizer)
    assert text._token_ids(["ABC"], other) == text._token_ids(["abc"], given) != text._token_ids(["ABC"], given)
    before = text._token_ids(TEXTS, given)
    for setting in ("enable_truncation", "enable_padding"):
        changed = tiny_tokenizer()
        getattr(changed.backend_tokenizer, setting)(**({"max_length": 1} if "trunc" in setting else {"length": 9}))
        assert text._compiled(changed) is None
        assert text._token_ids(TEXTS, changed) == before


def test_a_command_builds_the_same_without_torch(tmp_path: Path) -> None:
    folder, source, made = tmp_path / "tokenizer", tmp_path / "names.txt", tmp_path / "names.itemset"
    tiny_tokenizer().save_pretrained(folder)
    names = [f"name {i}" for i in range(50)]
    source.write_text("\n".join(names))
    command = [sys.executable, "-c", COMMAND, "build", source, "--tokenizer", folder, "-o", made]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "False"
    with_torch = itemset.build_text(names, itemset.text.load_tokenizer(str(folder)))
    assert itemset.load(made).trie.tables.labels.tobytes() == with_torch.trie.tables.labels.tobytes()
