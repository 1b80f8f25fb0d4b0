"""The subcommand `bench`: lists of a running server with OpenAI's API, held against a set and the truth."""

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import numpy as np

import itemset
from itemset.cli.options import Command, add_tokenizer, positive, tokenizer_of
from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.text import encode

Row = dict[str, Any]


def add_to(command: Command) -> None:
    sub = command(
        "bench",
        bench,
        "itemset bench --url http://localhost:8000/v1 --set films.itemset --tokenizer DIR --users users.jsonl\n"
        """  itemset bench --url URL --set films.itemset --tokenizer DIR --body 'open={"use_beam_search": true}'""",
    )
    sub.add_argument(
        "--url", required=True, help="of the API, to /v1; to /generate: SGLang's own form, beams of its own"
    )
    sub.add_argument("--set", metavar="FILE", required=True, help="the index of the set")
    add_tokenizer(sub, "the set's tokenizer, which reads the answers", required=True)
    users = 'lines of {"prompt": text or token ids, "truth": [keys], "filter": {...}}; the last two may be missing'
    sub.add_argument("--users", metavar="FILE", help=users)
    sub.add_argument("-k", metavar="K", type=positive, default=10, help="items in a list (default: 10)")
    body = "what a request says beside prompt, n and max_tokens; may be repeated (default: a ranked list of the set)"
    sub.add_argument("--body", metavar="LABEL=JSON", action="append", type=_labelled, help=body)
    sub.add_argument("--model", default="", help="as the server calls it, if it has several")
    sub.add_argument("--concurrency", metavar="N", type=positive, nargs="+", default=[1, 8], help="default: 1 8")
    sub.add_argument("--requests", metavar="N", type=positive, help="of each kind (default: one a user, or 32)")
    sub.add_argument("--json", metavar="FILE", help="write the rows there, too; benchmarks/bench_plot.py draws them")


def _labelled(text: str) -> tuple[str, Row]:
    label, _, body = text.partition("=")
    try:
        return label, dict(json.loads(body))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not LABEL=JSON, such as open={{"use_beam_search": true}}'
        ) from None


def bench(args: argparse.Namespace) -> None:
    """Ask for all lists, and print a row for each kind. Raises ItemSetError for bad input or a server that refuses."""
    item_set = itemset.load(args.set)
    tokenizer, users, rows = tokenizer_of(args, item_set), _users(args), list[Row]()
    bodies = args.body or [("ranked list", {"item_set": Path(args.set).stem, "use_beam_search": True})]
    if truths := [key for user in users for key in user.get("truth") or ()]:
        try:
            item_set.tokens(truths)
        except ItemSetError as error:
            print(f"a truth is not in the set: {error}", file=sys.stderr)
    fixed = {"model": args.model, "n": args.k, "max_tokens": item_set.longest + 1}
    filters = [False, True] if any("filter" in user for user in users) else [False]
    for (label, body), filtered, concurrency in product(bodies, filters, args.concurrency):
        ask = partial(_ask, args.url, fixed | body, filtered)
        ask(users[0])  # which the server may have to warm up for
        start = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            lists, times = zip(*pool.map(ask, users), strict=True)
        row = {"body": label, "filter": filtered, "concurrency": concurrency, "k": args.k}
        row["lists a second"] = len(users) / (time.perf_counter() - start)
        row["p50 ms"], row["p95 ms"] = (1e3 * np.percentile(times, (50, 95))).tolist()
        rows.append(
            row | shares(item_set, tokenizer, users if filtered else [{**user, "filter": {}} for user in users], lists)
        )
        if len(rows) == 1:
            print("  ".join(f"{name:>14}" for name in rows[0]))
        print("  ".join(f"{f'{x:.3f}' if isinstance(x, float) else x!s:>14}" for x in rows[-1].values()), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"url": args.url, "set": args.set, "users": len(users), "rows": rows}))


def _users(args: argparse.Namespace) -> list[Row]:
    """Return what each request is about. Raises ItemSetError for a line that is none."""
    users: list[Row] = []
    for number, line in enumerate(Path(args.users).read_text().splitlines() if args.users else (), 1):
        try:
            users.append({"prompt": json.loads(line)["prompt"]} | json.loads(line))
        except (ValueError, TypeError, LookupError) as error:
            raise ItemSetError(f'{args.users}, line {number}: write {{"prompt": "...", "truth": [keys]}}') from error
    users = users or [{"prompt": "For instance: "}] * 32
    return list(islice(cycle(users), args.requests or len(users)))


def _ask(url: str, body: Row, filtered: bool, user: Row) -> tuple[list[str], float]:
    """Return the texts of a list, and the seconds that it took. Raises ItemSetError if the server refuses."""
    said = {**body, "prompt": user["prompt"]}
    if filtered and "filter" in user and "item_set" in body:  # no other request knows of filters
        said["item_filter"] = user["filter"]
    if own := url.endswith("/generate"):
        said = _as_generate(**said)
    data, kind = json.dumps(said).encode(), {"Content-Type": "application/json"}
    start = time.perf_counter()
    try:
        request = urllib.request.Request(url if own else f"{url.rstrip('/')}/completions", data, kind)
        with urllib.request.urlopen(request, timeout=600) as response:
            answer = json.load(response)
        texts = [one["text"] for one in (answer["meta_info"]["beam_results"] if own else answer["choices"])]
    except urllib.error.HTTPError as error:
        raise ItemSetError(f"{url} refuses {data.decode():.200}: {error.read().decode():.500}") from error
    except OSError as error:
        raise ItemSetError(f"{url} does not answer: {error}: check the address") from error
    return texts, time.perf_counter() - start


def _as_generate(model: str, prompt: str | list[int], n: int, max_tokens: int, **params: Any) -> Row:
    params = {"beam_width": n, "n": n, "max_new_tokens": max_tokens, **params}
    return {"text" if isinstance(prompt, str) else "input_ids": prompt, "sampling_params": params}


def shares(item_set: ItemSet, tokenizer: Any, users: list[Row], lists: tuple[list[str], ...]) -> Row:
    """Judge lists by their texts alone: what a server says of them counts for nothing.

    Returns `legal`, the share of answers that are items and pass their user's filter; of lists with a truth `recall`,
    the share of its keys that are in the list, and `hit`, the share of lists with one of them.
    """
    part = cache(lambda query: itemset.view(item_set, json.loads(query)))

    def key_of(of: ItemSet, text: str) -> int | str | None:
        try:
            tokens, _ = encode([text.strip()], tokenizer, prefix=of.prefix, escape=of.escape)
        except ItemSetError:  # no text at all, or one that no item can be
            return None
        return (of.find(tokens.tolist()) or (None,))[0]

    found = []
    for user, texts in zip(users, lists, strict=True):
        of = part(json.dumps(user["filter"])) if user.get("filter") else item_set
        found.append([key_of(of, text) for text in texts])
    row: Row = {"legal": sum(key is not None for keys in found for key in keys) / max(1, sum(map(len, found)))}
    true = [(set(user["truth"]), {*keys}) for user, keys in zip(users, found, strict=True) if user.get("truth")]
    if true:
        row["recall"] = float(np.mean([len(truth & keys) / len(truth) for truth, keys in true]))
        row["hit"] = float(np.mean([bool(truth & keys) for truth, keys in true]))
    return row
