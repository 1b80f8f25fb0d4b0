"""The subcommand `train-head`: a draft head for a model, from histories of items."""

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import itemset
from itemset.cli.options import Command, positive
from itemset.errors import ItemSetError, shown
from itemset.item_set import ItemSet

HEAD_FILE = "draft_head.safetensors"


def add_to(command: Command) -> None:
    sub = command(
        "train-head", train, "itemset train-head ids.itemset path/to/model taught --histories histories.jsonl"
    )
    sub.add_argument("set", metavar="FILE", help="the index of the set, whose items have as many tokens each")
    sub.add_argument("model", metavar="MODEL", help="a model of transformers; it is copied, and learns too")
    sub.add_argument("output", metavar="FOLDER", help=f"for the model, its tokenizer and {HEAD_FILE}")
    sub.add_argument("--histories", metavar="FILE", required=True, help="a JSON list of keys a line, the oldest first")
    window = "items of a history that are learnt together; shorter ones are left out"
    for name, default, about in (("window", 21, window), ("steps", 1_450, "of training"), ("batch", 48, "rows a step")):
        sub.add_argument(f"--{name}", metavar="N", type=positive, default=default, help=f"{about} (default: {default})")
    rate = "the model's highest learning rate (default: 0.003, for one that has learnt nothing yet)"
    sub.add_argument("--rate", metavar="X", type=float, default=3e-3, help=rate)
    sub.add_argument("--seed", metavar="N", type=int, default=0)


def train(args: argparse.Namespace) -> None:
    """Train, and save the model, its tokenizer and the head. Raises ItemSetError for bad input."""
    if (folder := Path(args.output)).exists():
        raise ItemSetError(f"{folder} is there already: name a new folder")
    item_set = itemset.load(args.set)
    histories = _histories(Path(args.histories), item_set)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from itemset.draft_head.training import Schedule, train_head

    try:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        raise ItemSetError(f"{args.model} is no model that transformers can load: {error!s:.200}") from error
    if item_set.tokenizer is not None:
        item_set.check_tokenizer(tokenizer)
    schedule = Schedule(args.window, args.steps, args.batch, args.seed, args.rate)
    head = train_head(model, tokenizer, item_set, histories, schedule)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    head.save(folder / HEAD_FILE)
    print(f"serve the model {folder} with item_set_draft_head: {folder / HEAD_FILE}")
    if item_set.tokenizer is not None:
        print(f"build the set again with --tokenizer {folder}, whose tokenizer has the placeholders")


def _histories(path: Path, item_set: ItemSet) -> list[list[list[int]]]:
    """Return the tokens of each line's items. Raises ItemSetError for what is no list of the set's keys."""
    lines, where = list[list[Any]](), str(path)
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{path}, line {number}"
            if not isinstance(keys := json.loads(line), list):
                raise ItemSetError(f"{shown(keys)} is no list")
            lines.append(keys)
        where = str(path)  # all lines are looked up together: a look-up passes over all keys of the set
        tokens = iter(item_set.tokens([key for keys in lines for key in keys]))
    except (OSError, ValueError) as error:
        raise ItemSetError(f"{where}: {error}: write a list of the set's keys in each line") from error
    return [list(islice(tokens, len(keys))) for keys in lines]
