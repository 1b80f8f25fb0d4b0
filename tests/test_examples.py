"""The parts of the retrieval example: semantic IDs, their tokens, and a model that learns them."""

from __future__ import annotations

import importlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import itemset
from itemset.errors import ItemSetError
from itemset.text import load_tokenizer

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import cluster_build
import cold_start
import films_data
import nezha_model
import retrieval_data
import retrieval_model
import serving

EXAMPLES = Path(cold_start.__file__).parent
CLIENTS = Path(sys.prefix) / "clients"  # packages of examples, which want others than the engines do


def test_examples_take_what_bootstrap_gives_them(monkeypatch):
    """Else they end with an error of their arguments, after minutes of installing."""
    monkeypatch.syspath_prepend(EXAMPLES.parent)
    for script in importlib.import_module("bootstrap").EXAMPLES.values():
        assert 'parser.add_argument("--engine", choices=["vllm", "sglang"]' in (EXAMPLES / script).read_text()


def test_a_cluster_encodes_what_a_build_encodes(tiny_model):
    block = pa.table({"title": ["Alien", "Up", "Alien"], "id": [7, 8, 9]})
    made, whole = cluster_build.encoded(block, str(tiny_model), "title"), load_tokenizer(str(tiny_model))
    assert made.drop_columns([cluster_build.IDS]) == block.drop_columns(["title"])
    items = itemset.build_text(block["title"].to_pylist(), whole)
    assert items.find(made[cluster_build.IDS].to_pylist()[1]) == (1, False)
    with pytest.raises(ItemSetError, match=r"in the rows that begin with 'Up': .* is empty"):
        cluster_build.encoded(pa.table({"title": ["Up", ""]}), str(tiny_model), "title")


@pytest.mark.slow
@pytest.mark.skipif(not (CLIENTS / "ray").exists(), reason="python3 bootstrap.py test installs Ray")
def test_a_cluster_builds_the_index_of_one_machine(tiny_model, tmp_path):
    """By a local Ray with two workers."""
    source, parts, index = tmp_path / "films", tmp_path / "parts", tmp_path / "films.itemset"
    source.mkdir()
    for part in range(4):
        keys = range(1_000 * part, 1_000 * (part + 1))
        titles = [f"film {key * 7 % 3_000}" for key in keys]  # a third of them twice, in other parts
        table = pa.table({"title": titles, "id": keys, "year": [1950 + key % 70 for key in keys]})
        parquet.write_table(table, source / f"{part}.parquet", row_group_size=300)
    asked = ["--column", "title", "--key", "id", "--attribute", "year", "--tokenizer", str(tiny_model)]
    command = [sys.executable, cluster_build.__file__, str(source), *asked, "--parts", str(parts), "-o", str(index)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (CLIENTS, EXAMPLES.parent)))}
    environment |= {"PYTHONSAFEPATH": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    made = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "encoded 4,000 items" in made.stdout, made.stderr
    source_of = {"column": "title", "key": "id", "attributes": ["year"], "tokenizer": load_tokenizer(str(tiny_model))}
    itemset.build_external(source, **source_of).save(tmp_path / "alone.itemset")
    assert index.read_bytes() == (tmp_path / "alone.itemset").read_bytes()
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert again.returncode == 1
    assert f"{parts} is there already" in again.stderr


@pytest.mark.parametrize(
    ("log", "told"),
    [("INFO ready\nCompiling loops for this machine, once: about half a minute\nmore\n", 1),
     ("static-backend: item set 'a': building an index of a.csv (its items)\n", 1),
     ("building an index of b.txt\nCompiling loops for this machine, once: 20 s\nbuilding an index of b.txt\n", 2),
     ("static-backend: item set 'a': a.csv, as it was built before\n", 0)],
)  # fmt: skip
def test_a_demo_says_what_a_first_start_waits_for(log, told, tmp_path, monkeypatch, capsys):
    (tmp_path / "health").touch()
    (tmp_path / "server.log").write_text(log)
    monkeypatch.setattr(serving, "SERVER_LOG", tmp_path / "server.log")
    port = serving.free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            serving.wait_until_healthy(server, f"http://127.0.0.1:{port}/health")
        finally:
            server.terminate()
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if not line.startswith("server ")]) == told
    assert len(set(log.splitlines()) & set(lines)) == told


def test_the_list_of_the_readme_is_what_the_demo_prints(monkeypatch):
    shown = (EXAMPLES.parent / "README.md").read_text().split("```text\nrank", 1)[1].split("```")[0].splitlines()[1:]
    rows = [re.fullmatch(r" +(\d+) +(-[\d.]+)  █+ +(\d+)  (.+)", line).groups() for line in shown]
    items = [{"rank": int(rank), "score": float(score), "key": int(key)} for rank, score, key, _ in rows]
    titles = {int(key): title for _, _, key, title in rows}
    for encoding, block in (("utf-8", "█"), ("ascii", "#")):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True))
        films_data.print_ranked(items, titles)
        printed = sys.stdout.buffer.getvalue().decode(encoding).splitlines()
        assert printed[1:] == [line.replace("█", block) for line in shown]
    assert len(items) == 5


@pytest.fixture(scope="module")
def codes():
    random = np.random.default_rng(0)
    centres = random.normal(size=(70, 16))
    points = centres.repeat(5, 0) + random.normal(scale=1e-3, size=(350, 16))
    return retrieval_data.semantic_ids(np.concatenate([points, points[:5]]).astype(np.float32))


def test_semantic_ids_are_distinct_and_near_points_begin_alike(codes):
    assert codes.shape == (355, retrieval_data.LEVELS + 1)
    assert len(np.unique(codes, axis=0)) == 355
    assert all(len(np.unique(group[:, 0])) == 1 for group in codes[:350].reshape(70, 5, -1))
    np.testing.assert_array_equal(codes[350:, :-1], codes[:5, :-1])  # equal points share all but the last code
    assert np.all(codes[350:, -1] != codes[:5, -1])


def test_an_index_of_their_texts_gives_the_keys_back(codes):
    tokenizer = retrieval_model.make_tokenizer(codes)
    texts = [retrieval_model.text_of(code) for code in codes]
    films = itemset.build_text(texts, tokenizer, keys=np.arange(1_000, 1_355))
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert {len(tokens) for tokens in encoded} == {codes.shape[1]}
    assert films.lookup(encoded).tolist() == list(range(1_000, 1_355))


def test_a_model_learns_what_comes_next(codes, tmp_path, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(retrieval_model, "STEPS", 60)
    monkeypatch.setattr(retrieval_model, "BATCH", 4)
    tokenizer = retrieval_model.make_tokenizer(codes)
    encoded = {
        key: tokenizer.encode(retrieval_model.text_of(code), add_special_tokens=False) for key, code in enumerate(codes)
    }
    watched = [[0, 1, 2] * 20]
    retrieval_model.train(watched, encoded, tokenizer, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    end = tokenizer.eos_token_id
    prompt = torch.tensor([retrieval_model.tokens_of([0, 1, 2, 0, 1], encoded, end)])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    answer = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=end)
    assert answer[0, prompt.shape[1] :].tolist() == [*encoded[2], end]


def test_the_model_that_comes_with_the_example_is_what_was_packed(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    codes = retrieval_model.shipped_ids()
    assert codes.shape == np.unique(codes, axis=0).shape == (1_682, retrieval_data.LEVELS + 1)
    retrieval_model.unpack(retrieval_model.make_tokenizer(codes), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    texts = [retrieval_model.text_of(code) for code in codes]
    assert tokenizer.batch_decode(tokenizer(texts, add_special_tokens=False).input_ids) == texts
    retrieval_model.pack(tmp_path / "model", codes, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == retrieval_model.SHIPPED.read_bytes()
    model, films = AutoModelForCausalLM.from_pretrained(tmp_path / "model"), itemset.build_text(texts, tokenizer)
    with torch.no_grad():
        after = model(torch.tensor([[*films.items()[0], tokenizer.eos_token_id]])).logits[0, -1].softmax(-1)
    assert after[films.children([])[0].astype(int)].sum() > 0.9  # it has learnt that films begin so


def test_a_draft_head_learns_from_the_states_that_a_list_has(codes, tmp_path, monkeypatch):
    """A row of the training has twenty instances: each sees what it would see alone. The file fits its model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from itemset.adapters.huggingface import draft_states
    from itemset.draft_head.head import DraftHead
    from itemset.draft_head.training import Rows

    for module, steps in ((retrieval_model, 2), (nezha_model, 2)):
        monkeypatch.setattr(module, "STEPS", steps)
        monkeypatch.setattr(module, "BATCH", 2)
    tokenizer = retrieval_model.make_tokenizer(codes)
    texts = [retrieval_model.text_of(code) for code in codes]
    tokens = np.array([tokenizer.encode(text, add_special_tokens=False) for text in texts])
    encoded = {key: row.tolist() for key, row in enumerate(tokens)}
    watched = [list(range(40))]
    retrieval_model.train(watched, encoded, tokenizer, tmp_path / "before")
    nezha_model.train(watched, encoded, tokens, tmp_path / "before", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    head = DraftHead.load(tmp_path / "model" / nezha_model.HEAD_FILE)
    assert tokenizer.convert_ids_to_tokens(list(head.placeholders)) == ["<sp_1>", "<sp_2>", "<sp_3>", "<sp_4>"]
    head.check_set(itemset.build_text(texts, tokenizer))
    films = range(5, 6 + retrieval_model.MEMORY)
    window = retrieval_model.tokens_of(films, encoded, tokenizer.eos_token_id)
    with torch.no_grad():
        states, items, _ = Rows(4, 5, 1 + retrieval_model.MEMORY).run(model, head, torch.tensor([window]))
    assert items.tolist() == [encoded[film] for film in films[1:]]
    for i in (0, 7, 19):
        alone = draft_states(model, head, torch.tensor([window[: 5 * (i + 1)]]))
        torch.testing.assert_close(states[i], alone[0], atol=1e-5, rtol=1e-4)


def test_rollouts_beside_each_other_are_those_of_each_alone(tiny_model):
    """A prompt is computed once for all of its rollouts, and they do not see each other."""
    import torch
    import training
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    films = training.Films(itemset.build([[100 + i, 200 + i % 3] for i in range(20)], keys=np.arange(20)), end=1)
    prompts = torch.tensor([[7, 8, 9], [10, 11, 12]])
    torch.manual_seed(0)
    passes = training.Beside(model, prompts)
    ids = passes.rollouts(4, films, inside=True)
    keys = films.index.lookup(ids[..., :-1].flatten(0, 1).tolist()).tolist()  # raises if one is no item
    with torch.no_grad():
        together = passes.logits(ids)
        for i, (prompt, rows) in enumerate(zip(prompts, ids, strict=True)):
            alone = model(torch.cat((prompt.expand(4, -1), rows), 1)).logits[:, 2:]
            torch.testing.assert_close(together[i], alone, atol=1e-5, rtol=1e-4)
    rewards = films.rewards(ids, [([], [keys[0]]), ([], [keys[4], keys[0]])])
    assert rewards[:, 0].tolist() == [1, 1]
    assert set(rewards.flatten().tolist()) <= {0.0, 1.0, rewards.new_tensor(1 / np.log2(3)).item()}


def test_a_cold_start_holds_out_the_newest_films_altogether():
    titles = {key: f"Film {key} ({1980 + key})" for key in range(1, 20)} | {20: "Film 20", 21: "Seven (Se7en) (1999)"}
    years = cold_start.years(titles)
    assert (years[1], years[20], years[21]) == (1981, 0, 1999)
    histories = [[1, 19, 2, 21], [21, 3], [4, 5], [6, 7, 21]]
    fresh = cold_start.newest(years, histories)
    assert fresh == {19, 21}  # of 21 films: both of 1999
    assert cold_start.without(histories, fresh) == [[1, 2], [3], [4, 5], [6, 7]]
    assert cold_start.cases(histories, fresh) == [([1], 19), ([6, 7], 21)]
    assert cold_start.recalls([[19, 1], [1, *range(2, 10), 21], [5]], [19, 21, 4]) == (1 / 3, 2 / 3)
