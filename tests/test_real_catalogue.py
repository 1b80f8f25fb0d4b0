"""A real catalogue in which products share semantic IDs: built by the command, no product of it is lost."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

import itemset
from itemset import cli

SOURCE = Path(__file__).parent / "data" / "industrial_and_scientific.csv"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer with the recommender's tokens, as MiniOneRec adds them to a model's own."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    made.add_tokens([AddedToken(f"<{letter}_{code}>", normalized=False) for letter in "abc" for code in range(256)])
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("memory", ["1GB", "1"])
def test_no_product_is_lost(capsys, tmp_path, tokenizer, memory):
    path = str(tmp_path / "products.itemset")
    columns = ["--column", "sid", "--key", "item", "--attribute", "item", "--tokenizer", tokenizer]
    assert cli.main(["build", str(SOURCE), *columns, "--memory", memory, "-o", path]) == 0
    assert "keys         3,686; items with several: 15\n" in capsys.readouterr().out
    with SOURCE.open() as file:
        products = {int(row["item"]): row["sid"] for row in csv.DictReader(file)}
    sharing = defaultdict(list)
    for product, sid in products.items():
        sharing[sid].append(product)
    s = itemset.load(path)
    assert (len(products), len(s), s.duplicates, s.shared) == (3_686, 3_670, 16, 15)
    assert sorted(s.keys.to_pylist()) == sorted(products)
    assert s.attributes.column("item").to_pylist() == s.keys.to_pylist()
    opened = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    every = list(products)
    tokens = s.tokens(every)
    assert [opened.decode(one).replace(" ", "") for one in tokens] == list(products.values())
    assert s.keys_of(tokens) == [sharing[products[product]] for product in every]
    assert s.lookup_text(list(sharing), opened).tolist() == [first for first, *_ in sharing.values()]
