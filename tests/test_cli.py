"""The command line: every subcommand on real files, its exit codes, and errors as one line on stderr."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_text import make_bpe
from tokenizers import AddedToken, Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

import itemset
from itemset import cli

TITLES = ["Toy Story (1995)", "Toy Story", "GoldenEye (1995)", "Four Rooms (1995)", "Toy Story"]
KEYS = [11, 12, 13, 14, 15]
MATRIX = np.array([[5, 6, 7], [5, 6, 8], [5, 9, 7], [300, 1, 2], [5, 6, 7]], np.int32)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Folders of two byte-level BPE tokenizers with different merges."""
    folders = []
    for name, size in [("one", 300), ("two", 270)]:
        folder = tmp_path_factory.mktemp("tokenizers") / name
        make_bpe(vocab_size=size).save_pretrained(folder)
        folders.append(str(folder))
    return folders


@pytest.fixture
def csv(tmp_path):
    path = tmp_path / "films.csv"
    path.write_text("movie_id,title\n" + "".join(f"{k},{t}\n" for k, t in zip(KEYS, TITLES, strict=True)))
    return str(path)


@pytest.fixture
def npy(tmp_path):
    np.save(tmp_path / "sids.npy", MATRIX)
    return str(tmp_path / "sids.npy")


@pytest.fixture
def sids(npy, tmp_path, capsys):
    """An index file of semantic IDs whose keys are their row numbers."""
    path = str(tmp_path / "sids.itemset")
    assert cli.main(["build", npy, "-o", path]) == 0
    capsys.readouterr()
    return path


@pytest.fixture
def films(csv, tokenizers, tmp_path, capsys):
    path = str(tmp_path / "films.itemset")
    build = ["build", csv, "--column", "title", "--key", "movie_id", "--tokenizer", tokenizers[0], "--prefix", " "]
    assert cli.main([*build, "-o", path]) == 0
    capsys.readouterr()
    return path


def run(capsys, *argv):
    """Standard output of a command that succeeds."""
    code = cli.main(list(map(str, argv)))
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def refused(capsys, *argv):
    """The one line on standard error of a command that fails on its input."""
    assert cli.main(list(map(str, argv))) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("itemset: ")
    assert err.count("\n") == 1
    return err


def usage(capsys, *argv):
    with pytest.raises(SystemExit) as error:
        cli.main(argv)
    assert error.value.code == 2
    return capsys.readouterr().err


def spawn(*argv, **options):
    environment = os.environ | {"PYTHONPATH": str(Path(itemset.__file__).parents[1])}
    command = [sys.executable, "-m", "itemset", *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **options)


def test_build_texts(capsys, csv, tokenizers, tmp_path):
    path = tmp_path / "films.itemset"
    arguments = ["--column", "title", "--key", "movie_id", "--tokenizer", tokenizers[0], "--prefix", " "]
    out = run(capsys, "build", csv, *arguments, "-o", str(path))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizers[0])
    direct = itemset.build_text(TITLES, tokenizer, keys=KEYS, prefix=" ")
    saved = itemset.load(path)
    assert saved.digest == direct.digest
    assert saved.tokenizer.name == "one"
    assert saved.prefix == " "
    lengths = [len(tokenizer(" " + title)["input_ids"]) for title in TITLES]
    for line in [
        "items +4",
        "duplicates +1 folded",
        "keys +5; items with several: 1",
        rf"tokens +{min(lengths)} \(shortest item\) to {max(lengths)} \(longest\)",
        rf"size +{saved.nbytes:,} bytes, {saved.nbytes / 4:.2f} an item.*",
        rf"file +{re.escape(str(path))} \({path.stat().st_size:,} bytes\)",
        r"time +\d+\.\d s",
    ]:
        assert re.search(f"^{line}$", out, re.MULTILINE), line


def test_build_tokens_with_a_tokenizer_records_it(capsys, npy, tokenizers, tmp_path):
    path = str(tmp_path / "a.itemset")
    run(capsys, "build", npy, "--tokenizer", tokenizers[1], "--vocab-size", "301", "-o", path)
    saved = itemset.load(path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizers[1])
    assert saved.tokenizer == itemset.build(MATRIX, tokenizer=tokenizer, vocab_size=301).tokenizer
    assert saved.vocab_size == 301
    assert saved.digest == itemset.build(MATRIX).digest


def test_build_of_token_lists_with_string_keys(capsys, tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"sid": [1, 2, 3], "id": "x"}\n{"sid": [1], "id": "y"}\n')
    path = str(tmp_path / "a.itemset")
    run(capsys, "build", str(source), "--column", "sid", "--key", "id", "-o", path)
    assert run(capsys, "lookup", path, "--key", "y", "--tokens", "1,2,3") == "x\t1,2,3\ny\t1\n"
    assert "'7'" in refused(capsys, "lookup", path, "--key", "7")


def test_refused_builds(capsys, csv, npy, tokenizers, tmp_path):
    out = str(tmp_path / "a.itemset")
    assert "--tokenizer" in refused(capsys, "build", csv, "--column", "title", "-o", out)
    assert "'movie_id', 'title'" in refused(capsys, "build", csv, "--column", "x", "-o", out)
    (tmp_path / "ab.csv").write_text("a,b\nx,y\nz,w\n")
    (tmp_path / "titled.csv").write_text("id,title,genre\n1,Up,drama\n2,Down,comedy\n")
    titled = ["build", tmp_path / "titled.csv", "--attribute", "title", "--tokenizer", tokenizers[0]]
    assert "items of 'title', keys of 'id'" in run(
        capsys, *titled, "-o", tmp_path / "b.itemset"
    )  # an attribute may be that, too
    assert "say which one holds the items with --column" in refused(
        capsys, "build", str(tmp_path / "ab.csv"), "-o", out
    )
    texts = [csv, "--column", "title", "--tokenizer", tokenizers[0]]
    assert "--vocab-size" in refused(capsys, "build", *texts, "--vocab-size", "5", "-o", out)
    assert "--prefix" in refused(capsys, "build", npy, "--prefix", " ", "-o", out)
    assert "300" in refused(capsys, "build", npy, "--vocab-size", "300", "-o", out)
    assert "tokenizer.json" in refused(capsys, "build", npy, "--tokenizer", str(tmp_path), "-o", out)
    assert "no file" in refused(capsys, "build", str(tmp_path / "none.csv"), "-o", out)
    assert "cannot write" in refused(capsys, "build", npy, "-o", str(tmp_path / "none" / "a.itemset"))
    assert "cannot write" in refused(capsys, "build", npy, "-o", str(tmp_path))
    before = Path(npy).read_bytes()
    assert "source itself" in refused(capsys, "build", npy, "-o", npy)
    assert Path(npy).read_bytes() == before
    assert not Path(out).exists()


def test_info(capsys, films, sids, tokenizers):
    out = run(capsys, "info", films)
    saved = itemset.load(films)
    size = len(PreTrainedTokenizerFast.from_pretrained(tokenizers[0]))
    for words in [
        saved.digest,
        saved.tokenizer.fingerprint,
        "tokenizer    one (",
        "prefix       ' '",
        "keys         5; items with several: 1",
        "duplicates   1 folded",
        f"vocabulary   {size}",
    ]:
        assert words in out
    table = out.split("\n\n")[1].splitlines()
    assert {line.split()[0]: int(line.split()[1].replace(",", "")) for line in table[1:]} == saved.sections
    assert len({line.rindex("%") if "%" in line else line.rindex("e") for line in table}) == 1
    out = run(capsys, "info", sids)
    for words in ["tokenizer    none recorded", "prefix       none", "vocabulary   not recorded"]:
        assert words in out


def test_verify(capsys, films, tmp_path):
    assert "each of 4 items" in run(capsys, "verify", films)
    data = bytearray(Path(films).read_bytes())
    data[-1] ^= 1
    damaged = tmp_path / "damaged.itemset"
    damaged.write_bytes(data)
    assert "checksum" in refused(capsys, "verify", str(damaged))
    damaged.write_bytes(data[:-9])
    assert "truncated" in refused(capsys, "verify", str(damaged))
    assert "not an item-set index" in refused(capsys, "verify", __file__)
    assert "no such file" in refused(capsys, "verify", str(tmp_path / "none"))


def test_lookup_both_ways(capsys, sids):
    out = run(capsys, "lookup", sids, "--tokens", "5,6,8", "--tokens", "300 1 2", "--key", "2", "--key", "0")
    assert out == "1\t5,6,8\n3\t300,1,2\n2\t5,9,7\n0\t5,6,7\n"


def test_lookup_of_texts(capsys, films, tokenizers):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizers[0])
    ids = ",".join(map(str, tokenizer(" Toy Story")["input_ids"]))
    lines = [f"{key}\t{ids}\t' Toy Story'\n" for key in (12, 15)]
    assert run(capsys, "lookup", films, "--text", "Toy Story", "--tokenizer", tokenizers[0]) == "".join(lines)
    for key, line in zip(("12", "15"), lines, strict=True):
        assert run(capsys, "lookup", films, "--key", key, "--tokenizer", tokenizers[0]) == line


def test_lookup_of_texts_in_python(films, tokenizers):
    saved = itemset.load(films)
    one, two = map(PreTrainedTokenizerFast.from_pretrained, tokenizers)
    assert saved.lookup_text([], one).tolist() == []
    assert saved.lookup_text(["GoldenEye (1995)", "Toy Story", "Toy Story"], one).tolist() == [13, 12, 12]
    with pytest.raises(itemset.ItemSetError, match=r"the text 'Tenet' \(number 1 of .*\) is no item of the set"):
        saved.lookup_text(["Toy Story", "Tenet"], one)
    with pytest.raises(itemset.ItemSetError, match="was built with another tokenizer, one: give that one"):
        saved.lookup_text(["Toy Story"], two)
    with pytest.raises(itemset.ItemSetError, match="must be a list of texts, not the one text 'Toy Story'"):
        saved.lookup_text("Toy Story", one)


def test_refused_lookups(capsys, sids, films, tokenizers):
    assert "[5, 6]" in refused(capsys, "lookup", sids, "--tokens", "5,6")
    assert "99" in refused(capsys, "lookup", sids, "--key", "99")
    assert "'abc'" in refused(capsys, "lookup", sids, "--key", "abc")
    assert "--tokenizer" in refused(capsys, "lookup", films, "--text", "Toy Story")
    message = refused(capsys, "lookup", films, "--text", "Toy Story", "--tokenizer", tokenizers[1])
    assert "another tokenizer" in message
    message = refused(capsys, "lookup", films, "--text", "Tenet", "--tokenizer", tokenizers[0])
    assert message == "itemset: the text 'Tenet' is no item of the set\n"
    message = refused(capsys, "lookup", films, "--text", "", "--tokenizer", tokenizers[0])
    assert message == "itemset: the text ('') is empty: remove it\n"
    for token in ("0", "299", "301", "65536", str(2**31 - 1)):
        for tokens in (token, f"5,6,{token}", f"5,6,7,{token}"):
            refused(capsys, "lookup", sids, "--tokens", tokens)
    refused(capsys, "lookup", sids, "--key", str(2**70))


def test_usage(capsys, npy, sids):
    assert "COMMAND" in usage(capsys)
    assert "-o" in usage(capsys, "build", npy)
    assert "positive" in usage(capsys, "build", npy, "--vocab-size", "0", "-o", "x")
    assert "--tokens, --key, --text" in usage(capsys, "lookup", sids)
    unquoted = usage(capsys, "build", "parts/a.parquet", "parts/b.parquet", "-o", "x")
    assert "unrecognized arguments: parts/b.parquet; for all files of a pattern put it in quotes" in unquoted
    assert "quotes" not in usage(capsys, "build", npy, "--colour", "a", "-o", "x")
    for tokens in ("1,x", "-1", "1.5", str(2**31), str(2**70)):
        assert "such as 1,2,3" in usage(capsys, "lookup", sids, f"--tokens={tokens}")


@pytest.mark.parametrize("command", ["build", "info", "verify", "lookup"])
def test_help_has_an_example(capsys, command):
    with pytest.raises(SystemExit) as error:
        cli.main([command, "--help"])
    assert error.value.code == 0
    assert f"example:\n  itemset {command} " in capsys.readouterr().out


@pytest.mark.parametrize("memory", ["1GB", "1"])
def test_attributes(capsys, tmp_path, memory):
    source, path = tmp_path / "a.csv", str(tmp_path / "a.itemset")
    source.write_text("sid,region,released,stars\n<a>,DE,2026-11-14,4.5\n<b>,,2026-11-01,3\n<a>,AT,,1\n")
    backend = Tokenizer(models.WordLevel({"<a>": 0, "<b>": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(tmp_path / "tokenizer")
    columns = [word for name in ("region", "released", "stars") for word in ("--attribute", name)]
    given = ["--column", "sid", *columns, "--tokenizer", str(tmp_path / "tokenizer"), "--memory", memory]
    assert cli.main(["build", str(source), *given, "-o", path]) == 0
    out = capsys.readouterr().out
    for text in (out, run(capsys, "info", path)):
        assert re.search(r"^attributes +region \(string\), released \(date\), stars \(float\)$", text, re.MULTILINE)
    saved = itemset.load(path)
    assert saved.keys.to_pylist() == [0, 2, 1]
    assert saved.attributes.column("region").to_pylist() == ["DE", "AT", None]
    assert cli.main(["build", str(source), *given, "--attribute", "nothing", "-o", path]) == 1
    assert "has no column 'nothing'" in capsys.readouterr().err


def test_texts_that_the_tokenizer_alters_are_named(capsys, tmp_path, tokenizers):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizers[0])
    tokenizer.add_tokens([AddedToken("<a_1>", special=True)], special_tokens=True)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save_pretrained(tmp_path / "lower")
    for name, text, said in (("a", "Toy\ntoy", "1 items come back"), ("b", "<a_1>x\ntoy", "")):
        (tmp_path / f"{name}.txt").write_text(text)
        out = str(tmp_path / f"{name}.itemset")
        assert (
            cli.main(["build", str(tmp_path / f"{name}.txt"), "--tokenizer", str(tmp_path / "lower"), "-o", out]) == 0
        )
        err = capsys.readouterr().err
        assert err.startswith(f"itemset: {said}" if said else "")
        assert bool(err) == bool(said)


def test_interrupted(capsys, npy, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("itemset.cli.build.build_external", interrupt)
    assert cli.main(["build", npy, "-o", str(tmp_path / "a.itemset")]) == 130
    assert capsys.readouterr().err == "itemset: interrupted\n"


@pytest.mark.slow
def test_as_a_module(sids, tmp_path):
    process = spawn("lookup", sids, "--tokens", "5,6,8")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, b"1\t5,6,8\n", b"")
    process = spawn("info", str(tmp_path / "none"))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.startswith(b"itemset: ")


@pytest.mark.slow
def test_closed_pipe(tmp_path):
    items = np.full((200_000, 1), 5, dtype=np.int32)
    itemset.build(items).save(tmp_path / "many_keys.itemset")
    process = spawn("lookup", str(tmp_path / "many_keys.itemset"), "--tokens", "5")
    assert process.stdout.read(8) == b"0\t5\n1\t5\n"
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize(
    ("flags", "emulated"),
    [("flags : fma avx2", True), ("flags : avx512f avx512_bf16", False), ("flags : amx_bf16 amx_tile", False),
     ("Features : fp asimd", True), ("Features : asimd bf16 i8mm", False), (None, False)],
)  # fmt: skip
def test_serve_takes_float32_where_bfloat16_is_emulated(flags, emulated, monkeypatch, tmp_path):
    from itemset.cli import serve

    if flags is not None:
        (tmp_path / "cpuinfo").write_text(flags)
    monkeypatch.setattr(serve, "_CPU", tmp_path / "cpuinfo")
    monkeypatch.setattr(serve, "find_spec", lambda name: name == "vllm" or None)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))  # no GPU
    args = cli.parse(["serve", "a.csv", "--model", "m"])
    command, *_ = serve.command_of(args, ["--seed", "3"])
    assert (command[-4:-2] == ["--dtype", "float32"]) is emulated
    command, *_ = serve.command_of(args, ["--dtype", "half"])
    assert command[-2:] == ["--dtype", "half"]
    assert command.count("--dtype") == 1


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_serve_composes_the_engines_command(engine, monkeypatch):
    from itemset.cli import serve

    monkeypatch.setattr(serve, "find_spec", lambda name: name == engine or None)
    args = cli.parse(["serve", "data/my films.csv?key=id", "--model", "m", "--port", "81"])
    command, _, url, name = serve.command_of(args, ["--seed", "3"])
    assert (url, name) == ("http://localhost:81/v1", "my_films")
    assert command[-2:] == ["--seed", "3"]
    assert "my_films=data/my films.csv?key=id" in command
    args = cli.parse(["serve", "a-b=x/y=z.csv", "--model", "m"])
    assert serve.command_of(args, [])[2:] == (f"http://localhost:{8000 if engine == 'vllm' else 30000}/v1", "a-b")
    other = "sglang" if engine == "vllm" else "vllm"
    with pytest.raises(itemset.ItemSetError, match=rf"{other} is not installed here: pip install .*\[{other}\]"):
        serve.command_of(cli.parse(["serve", "a.csv", "--model", "m", "--engine", other]), [])


@pytest.mark.parametrize(
    ("source", "message"),
    [("none.csv?column=a", "no file none.csv?column=a: check the path"), ("x=none", "no file none: check the path"),
     ("none.itemset", "no file none.itemset")],
)  # fmt: skip
def test_serve_looks_for_the_file_before_the_engine_begins(source, message, monkeypatch, tmp_path, capsys):
    from itemset.cli import serve

    monkeypatch.setattr(serve, "find_spec", lambda name: name == "vllm" or None)
    monkeypatch.setattr(serve.subprocess, "Popen", None)
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, "serve", source, "--model", "m")


def test_bench_says_what_is_wrong(sids, tokenizers, tmp_path, capsys):
    (tmp_path / "users.jsonl").write_text('{"prompt": "p"}\n\n{"prompts": 7}\n')
    words = ["bench", "--url", "http://localhost:9/v1", "--set", sids, "--tokenizer", tokenizers[0]]
    message = refused(capsys, *words, "--users", str(tmp_path / "users.jsonl"))
    assert 'users.jsonl, line 2: write {"prompt": "...", "truth": [keys]}' in message
    assert "localhost:9/v1 does not answer" in refused(capsys, *words)
    with pytest.raises(SystemExit):
        cli.main([*words, "--body", "open"])
    assert "is not LABEL=JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "absent"),
    [(["--help"], "numpy numba pyarrow"), (["-h"], "numpy numba pyarrow"), ([], "numpy numba pyarrow"),
     (["nothing"], "numpy numba pyarrow"), (["info", "FILE"], "pandas duckdb transformers torch"),
     (["verify", "FILE"], "pandas duckdb transformers torch"), (["info", "-h"], "pandas duckdb transformers torch")],
)  # fmt: skip
def test_commands_import_what_they_need(words, absent, tmp_path):
    file = tmp_path / "a.itemset"
    itemset.build([[1, 2], [1, 3], [4]], keys=[7, 8, 9]).save(file)
    code = (
        "import sys, contextlib\nfrom itemset.cli import main\n"
        "with contextlib.suppress(SystemExit):\n    main(sys.argv[2:])\n"
        "print(set(sys.argv[1].split()) & sys.modules.keys())"
    )
    given = [str(file) if word == "FILE" else word for word in words]
    done = subprocess.run([sys.executable, "-c", code, absent, *given], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
