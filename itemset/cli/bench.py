"""The subcommand `bench`: lists of a running server with OpenAI's API, held against a set and the truth."""

import argparse
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import itemset
from itemset.cli.options import Command, positive, tokenizer_of
from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.text import encode

Row = dict[str, Any]
_SHARES, _TIMES = ("legal", "recall", "hit"), ("lists a second", "p50 ms", "p95 ms")


def add_to(command: Command) -> None:
    """Add the subcommand."""
    sub = command(
        "bench",
        bench,
        "ask a server for lists: how many of its answers are in the set, how good and how fast they are",
        "itemset bench --url http://localhost:8000/v1 --set films.itemset --tokenizer DIR --users users.jsonl\n"
        """  itemset bench --url URL --set films.itemset --tokenizer DIR --body 'open={"use_beam_search": true}'""",
    )
    sub.add_argument("--url", required=True, help="of the API, to /v1")
    sub.add_argument("--set", metavar="FILE", required=True, help="the index of the set")
    sub.add_argument("--tokenizer", metavar="DIR", required=True, help="the set's tokenizer, which reads the answers")
    users = 'lines of {"prompt": text or token ids, "truth": [keys], "filter": {...}}; the last two may be missing'
    sub.add_argument("--users", metavar="FILE", help=users)
    sub.add_argument("--prompt", default="For instance: ", help="in place of users (default: %(default)r)")
    sub.add_argument("-k", metavar="K", type=positive, default=10, help="items in a list (default: 10)")
    body = (
        "what a request says beside prompt, n and max_tokens; repeated, for several (default: a ranked list of --name)"
    )
    sub.add_argument("--body", metavar="LABEL=JSON", action="append", type=_labelled, help=body)
    sub.add_argument("--name", help="of the set on the server (default: that of the file)")
    sub.add_argument("--model", default="", help="as the server calls it, if it has several")
    sub.add_argument("--concurrency", metavar="N", type=positive, nargs="+", default=[1, 8], help="default: 1 8")
    sub.add_argument("--requests", metavar="N", type=positive, help="of each kind (default: one a user, or 32)")
    sub.add_argument("--json", metavar="FILE", help="write the rows there, too")
    sub.add_argument("--plot", metavar="FILE", help="draw them there (needs matplotlib)")


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
    judge = Judge(item_set, tokenizer_of(args, item_set))
    users = list(_users(args))
    name = args.name or Path(args.set).stem
    bodies = args.body or [("ranked list", {"item_set": name, "use_beam_search": True})]
    fixed = {"model": args.model, "n": args.k, "max_tokens": item_set.longest + 1}
    filters = [False, True] if any("filter" in user for user in users) else [False]
    rows = []
    for (label, body), filtered, concurrency in product(bodies, filters, args.concurrency):
        ask = partial(_ask, args.url, fixed | body, filtered)
        ask(users[0])  # which the server may have to warm up for
        start = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            answers = list(pool.map(ask, users))
        seconds = time.perf_counter() - start
        rows.append({"body": label, "filter": filtered, "concurrency": concurrency, "k": args.k})
        rows[-1] |= judge.shares(users, [texts for texts, _ in answers], filtered, args.k)
        p50, p95 = np.percentile([1e3 * took for _, took in answers], (50, 95))
        rows[-1] |= dict(zip(_TIMES, (len(users) / seconds, p50, p95), strict=True))
        _print(rows)
    if args.json:
        Path(args.json).write_text(
            json.dumps({"url": args.url, "set": name, "users": len(users), "rows": rows}, indent=1)
        )
    if args.plot:
        plot(rows, args.plot)


def _users(args: argparse.Namespace) -> Iterator[Row]:
    """Yield what each request is about. Raises ItemSetError for a line that is none."""
    if not args.users:
        yield from [{"prompt": args.prompt}] * (args.requests or 32)
        return
    lines = [line for line in Path(args.users).read_text().splitlines() if line.strip()]
    for number, line in enumerate((lines * (1 + (args.requests or 0) // max(1, len(lines))))[: args.requests], 1):
        try:
            yield {"prompt": json.loads(line)["prompt"]} | json.loads(line)
        except (ValueError, TypeError, LookupError) as error:
            raise ItemSetError(f'{args.users}, line {number}: write {{"prompt": "...", "truth": [keys]}}') from error


def _ask(url: str, body: Row, filtered: bool, user: Mapping[str, Any]) -> tuple[list[str], float]:
    """Return the texts of a list, and the seconds that it took. Raises ItemSetError if the server refuses."""
    said = {**body, "prompt": user["prompt"]}
    if filtered and "filter" in user:
        said["item_filter"] = user["filter"]
    request = urllib.request.Request(
        f"{url.rstrip('/')}/completions", json.dumps(said).encode(), {"Content-Type": "application/json"}
    )
    start = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            choices = json.load(response)["choices"]
    except urllib.error.HTTPError as error:
        raise ItemSetError(f"{url} refuses {json.dumps(said):.200}: {error.read().decode():.500}") from error
    except OSError as error:
        raise ItemSetError(f"{url} does not answer: {error}: check the address") from error
    return [choice["text"] for choice in choices], time.perf_counter() - start


class Judge:
    """Says which answers are items, by their texts alone: what the server says of them counts for nothing."""

    def __init__(self, item_set: ItemSet, tokenizer: Any) -> None:
        self._set, self._tokenizer = item_set, tokenizer
        self._part: Callable[[str], ItemSet] = cache(lambda query: itemset.view(item_set, json.loads(query)))

    def shares(self, users: Sequence[Row], lists: Sequence[list[str]], filtered: bool, k: int) -> Row:
        """Return `legal`, the share of answers that are items (which pass the filter), and of those with a truth
        `recall`, the share of its keys that are in the list, and `hit`, the share of lists with one of them."""
        found = [self._keys(user if filtered else {}, texts) for user, texts in zip(users, lists, strict=True)]
        true = [
            (set(user["truth"]), set(keys[:k])) for user, keys in zip(users, found, strict=True) if user.get("truth")
        ]
        row: Row = {"legal": sum(key is not None for keys in found for key in keys) / max(1, sum(map(len, found)))}
        if true:
            row["recall"] = float(np.mean([len(truth & keys) / len(truth) for truth, keys in true]))
            row["hit"] = float(np.mean([bool(truth & keys) for truth, keys in true]))
        return row

    def _keys(self, user: Row, texts: list[str]) -> list[int | str | None]:
        item_set = self._part(json.dumps(user["filter"])) if "filter" in user else self._set
        return [self._key(item_set, text.strip()) for text in texts]

    def _key(self, item_set: ItemSet, text: str) -> int | str | None:
        try:
            tokens, _ = encode([text], self._tokenizer, prefix=item_set.prefix, escape=item_set.escape)
        except ItemSetError:  # no text at all, or one that no item can be
            return None
        found = item_set.find(tokens.tolist())
        return None if found is None else found[0]


def _print(rows: list[Row]) -> None:
    columns = [*rows[0]]
    if len(rows) == 1:
        print("  ".join(f"{name:>14}" for name in columns))
    shown = [f"{value:.3f}" if isinstance(value, float) else value for value in rows[-1].values()]
    print("  ".join(f"{value!s:>14}" for value in shown), flush=True)


def plot(rows: Sequence[Row], file: str) -> None:
    """Draw lists a second over latency, a line for each body and filter. Raises ItemSetError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ItemSetError("a plot needs matplotlib: pip install matplotlib, or omit --plot") from error
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    for label, filtered in dict.fromkeys((row["body"], row["filter"]) for row in rows):
        mine = [row for row in rows if (row["body"], row["filter"]) == (label, filtered)]
        legal = f"{label}{', filtered' if filtered else ''}: {mine[0]['legal']:.0%} legal"
        axes.plot([row["p50 ms"] for row in mine], [row["lists a second"] for row in mine], marker="o", label=legal)
    axes.set(xlabel="median latency, ms", ylabel="lists a second")
    axes.legend()
    figure.savefig(file)
