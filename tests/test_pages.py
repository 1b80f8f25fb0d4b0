"""The site: pages without a server run as they stand, every block of code has its test, and all pages are built without
a warning."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys

import numpy as np
import pages
import pytest
from transformers import AutoTokenizer

import itemset
from itemset import cli, published

BOOTSTRAP = runpy.run_path(str(pages.DOCS.parent / "bootstrap.py"))
FOLLOWED = {  # pages whose Python and bash blocks run, and where
    "here": {"library.md", "publishing.md", "draft_head.md", "tutorials/rollouts.md"},
    "test_vllm_inside.py": {
        "index.md",
        "inside.md",
        *(f"tutorials/{name}.md" for name in pages.TUTORIALS),
    },
    "test_vllm_deployment.py": {"deployment.md", "training.md"},
}
PROGRAMS = {  # commands whose words are tried, and where
    "here": ("itemset", "python3 bootstrap.py", "python3 examples/playground.py"),
    "test_vllm_inside.py, test_sglang_inside.py": ("curl",),
    "test_vllm_deployment.py": (
        "python -m vllm.entrypoints.openai.api_server",
        "python -m itemset.serving.warm_up",
    ),
    "test_sglang_compat.py": ("python3 -m sglang.launch_server", "--device"),
    "test_examples.py": ("python examples/cluster_build.py",),
}
NOT_HERE = (  # of other packages, they want a GPU (test_gpu_script tries these), or they change the machine
    "apt-get install", "export", "source", "pip install", "docker build", "kubectl", "python serve_films.py",
    "python -m sglang_router.launch_router", "python3.12 benchmarks/gpu_pack.py", "bash benchmarks/gpu.sh",
    ".venv-gpu/bin/python benchmarks/gpu_pack_sglang.py",
)  # fmt: skip


def test_rollouts_and_training(tmp_path, tiny_model):
    _, texts, loss = pages.follow("tutorials/rollouts.md", tmp_path, tiny_model)
    assert set(re.findall("'([^']+)'", texts)) <= {"Toy Story", "GoldenEye", "The Third Man", "Rear Window"}
    assert float(loss) > 0


@pytest.fixture
def films(tmp_path, tiny_model):
    """Saves an index of films, and returns the tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    keys = [1, 2, 4, 7, 242, 302, *range(1000, 1010)]
    texts = [f"Film {key} ({2000 + key % 30})" for key in keys]
    itemset.build_text(texts, tokenizer, keys=keys).save(tmp_path / "films.itemset")
    return tokenizer


@pytest.mark.slow
def test_the_library(tmp_path, tiny_model, films):
    codes, keys = np.random.default_rng(0).integers(100, 2_000, (50, 4)), np.arange(50)
    np.save(tmp_path / "codes.npy", codes)
    days = [datetime.date(2014 + 12 * (key > 9), 11, 15) for key in keys]
    titles = itemset.load(tmp_path / "films.itemset")
    tokens, old = titles.items(), titles.keys_of(titles.items())
    attributes = {"released": days[: len(old)]}
    itemset.build(tokens, keys=[key for (key,) in old], attributes=attributes).save(tmp_path / "films.itemset")
    given = {"product_ids": keys, "regions": ["DE", "FR"] * 25, "dates": days}
    given |= {"new_codes": [[1, 2, 3, 4]], "new_ids": [99], "gone_ids": [3]}
    printed = pages.follow("library.md", tmp_path, tiny_model, **given)
    assert itemset.load(tmp_path / "catalogue.itemset").keys_of([[1, 2, 3, 4]]) == [[99]]
    assert len(printed[-2].splitlines()) == len(printed[-1].splitlines()) == 10


def test_publishing(tmp_path, tiny_model, films):
    earlier = itemset.load(tmp_path / "films.itemset").updated(remove=[1])
    earlier.save(tmp_path / "earlier.itemset")
    published.publish(tmp_path / "earlier.itemset", tmp_path / "sets" / "films")
    (tmp_path / "tomorrow.csv").write_text("sku;name\n7;Red lamp\n8;Blue lamp\n")
    items = earlier.tokens([2, 4])
    (version, renewed, _) = pages.follow(
        "publishing.md", tmp_path, tiny_model, itemset=itemset, tokenizer=films, items=items
    )
    assert version.split()[1:] == ["2", "16"]
    assert renewed.split()[1] == "None"
    assert published.load_current(tmp_path / "sets" / "films")[0].items == 15  # rolled back
    assert len(itemset.load(tmp_path / "films2.itemset")) == 16 + 1 - 2 - 2


@pytest.mark.slow
def test_a_draft_head_in_your_own_loop(tmp_path, tiny_model):
    import torch

    from itemset.draft_head.head import DraftHead

    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model.iterdir():
        (model / file.name).symlink_to(file)
    DraftHead([range(100, 2_000)] * 4, range(2_000, 2_004), hidden_size=128, vocab_size=2_112).save(
        model / "draft_head.safetensors"
    )
    codes = np.random.default_rng(0).integers(100, 2_000, (50, 4))
    itemset.build(codes).save(tmp_path / "films.itemset")
    given = {"prompt_ids": torch.tensor([[7, 8, 9]])}
    pages.follow("draft_head.md", tmp_path, model, **given)


def test_every_block_of_the_site_has_its_test():
    followed = set().union(*FOLLOWED.values())
    known = [program.split() for programs in PROGRAMS.values() for program in programs]
    known += [program.split() for program in NOT_HERE]
    for page, blocks in pages.site().items():
        for kind, block in blocks:
            assert kind in ("", "python", "bash", "json", "text"), f"{page}: {kind}"
            assert kind not in ("python", "bash") or page in followed, f"{page}: nobody runs\n{block}"
            if kind == "json":
                json.loads(block)
            for words in pages.commands(block) if not kind else ():
                assert any(words[: len(one)] == one for one in known), f"{page}: nobody tries {words}"


def test_the_commands_of_the_pages():
    lines = pages.commands_of("itemset")
    assert {words[0] for words in lines} == {"serve", "build", "publish", "update", "bench", "train-head"}
    for words in lines:
        cli.parse(words)
    assert all(
        words[0] in BOOTSTRAP["EXAMPLES"] or words == ["setup"]
        for words in pages.commands_of("python3", "bootstrap.py")
    )
    (words,) = pages.commands_of("python3", "examples/playground.py")
    script = pages.DOCS.parent / "examples" / "playground.py"
    options = set(re.findall(r'"(--[\w-]+)"', script.read_text() + script.with_name("serving.py").read_text()))
    assert {word for word in words if word.startswith("--")} <= options


@pytest.mark.skipif(importlib.util.find_spec("mkdocstrings") is None, reason="pip install '.[docs]'")
@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=pages.DOCS.parent, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    for page, name in (("reference", "itemset.client.rank"), ("tutorials/labels", "renormalised")):
        assert name in (tmp_path / "site" / page / "index.html").read_text()
