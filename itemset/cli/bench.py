"""The subcommand `bench`: lists of a running server with OpenAI's API, held against a set and the truth."""

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import cycle, islice, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

import itemset
from itemset.cli.options import Command, add_tokenizer, positive, tokenizer_of
from itemset.errors import ItemSetError
from itemset.item_set import ItemSet
from itemset.text import encode

Row = dict[str, Any]
Key = int | str | None
Answer = list[tuple[Key, float | None]]  # a list: of each place the item's key and score


def add_to(command: Command) -> None:
    sub = command(
        "bench",
        bench,
        "itemset bench --url http://localhost:8000/v1 --set films.itemset --tokenizer DIR --users users.jsonl\n"
        """  itemset bench --url URL --set films.itemset --tokenizer DIR --body 'open={"use_beam_search": true}'""",
    )
    url = "of the API, to /v1; to /generate: SGLang's own form, beams of its own. May be repeated, to compare servers"
    sub.add_argument("--url", action="append", required=True, help=url)
    called = "the index of the set; without --body its name is that of the set at the server"
    sub.add_argument("--set", metavar="FILE", required=True, help=called)
    add_tokenizer(sub, "the set's tokenizer, which reads the answers", required=True)
    users = 'lines of {"prompt": text or token ids, "truth": [keys], "filter": {...}}; the last two may be missing'
    asked = sub.add_mutually_exclusive_group()
    asked.add_argument("--users", metavar="FILE", help=users)
    replay = 'lines of {"body": {a whole request}, "answer": [{"key": ..., "score": ...}]}; the answer may be missing'
    asked.add_argument("--replay", metavar="FILE", help=replay)
    sub.add_argument("--answers", metavar="FILE", help="write the first way's requests and answers there, for --replay")
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
    listed = ("ranked list", {"item_set": Path(args.set).stem, "use_beam_search": True})
    bodies = args.body or [("replay", {}) if args.replay else listed]
    if truths := [key for user in users for key in user.get("truth") or ()]:
        try:
            item_set.tokens(truths)
        except ItemSetError as error:
            print(f"a truth is not in the set: {error}", file=sys.stderr)
    fixed = {"model": args.model, "n": args.k, "max_tokens": item_set.longest + 1}
    filters = [False, True] if not args.replay and any("filter" in user for user in users) else [False]
    log, before = list[Row](), dict[bool, list[Answer]]()  # what lists are compared with, filtered or not
    if any("answer" in user for user in users):
        before[False] = [[(one["key"], one.get("score")) for one in user.get("answer", ())] for user in users]
    for url, (label, body), filtered, concurrency in product(args.url, bodies, filters, args.concurrency):
        ask = partial(_ask, url, fixed | body, filtered)
        ask(users[0])  # which the server may have to warm up for
        start = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            lists, times = zip(*pool.map(ask, users), strict=True)
        row: Row = {"url": url} if len(args.url) > 1 else {}
        row |= {"body": label, "filter": filtered, "concurrency": concurrency, "k": args.k}
        row["lists a second"] = len(users) / (time.perf_counter() - start)
        row["p50 ms"], row["p95 ms"] = (1e3 * np.percentile(times, (50, 95))).tolist()
        asked = users if filtered or args.replay else [{**user, "filter": {}} for user in users]
        answers = _keyed(item_set, tokenizer, asked, lists)
        row |= shares(asked, answers) | changes(before.setdefault(filtered, answers), answers)
        if (url, label, concurrency) == (args.url[0], bodies[0][0], args.concurrency[0]):
            log += [
                {
                    "body": _said(fixed | body, filtered, user),
                    "truth": user.get("truth"),
                    "answer": [{"key": key, "score": score} for key, score in answer],
                }
                for user, answer in zip(users, answers, strict=True)
            ]
        rows.append(row)
        if len(rows) == 1:
            print("  ".join(f"{name:>14}" for name in row))
        print("  ".join(f"{f'{x:.3f}' if isinstance(x, float) else x!s:>14}" for x in row.values()), flush=True)
    if args.answers:
        Path(args.answers).write_text("".join(json.dumps(line) + "\n" for line in log))
    if args.json:
        Path(args.json).write_text(json.dumps({"url": args.url, "set": args.set, "users": len(users), "rows": rows}))


def _users(args: argparse.Namespace) -> list[Row]:
    """Return what each request is about. Raises ItemSetError for a line that is none."""
    file, form = args.replay or args.users, '{"prompt": "...", "truth": [keys]}'
    if args.replay:
        form = '{"body": {"prompt": "..."}, "answer": [{"key": 1, "score": -2.5}]}'
    users: list[Row] = []
    try:
        lines = Path(file).read_text().rstrip("\n").split("\n") if file else []
    except OSError as error:
        raise ItemSetError(f"{file} cannot be read: {error.strerror}: write its lines as {form}") from error
    for number, line in enumerate(lines, 1):
        try:
            user = dict(json.loads(line))
            said = user["body"] if args.replay else user
            more = {"filter": said["item_filter"]} if args.replay and said.get("item_filter") else {}
            users.append(user | {"prompt": said["prompt"], **more})
            _ = [one["key"] for one in user.get("answer", ())]
        except (ValueError, TypeError, LookupError) as error:
            raise ItemSetError(f"{file}, line {number}: write {form}") from error
    users = users or [{"prompt": "For instance: "}] * 32
    return list(islice(cycle(users), args.requests or len(users)))


def _said(body: Row, filtered: bool, user: Row) -> Row:
    """Return the body of a request."""
    said = {**body, **user.get("body", {}), "prompt": user["prompt"]}
    said["model"] = body["model"] or said["model"]
    if filtered and "filter" in user and "item_set" in body:  # no other request knows of filters
        said["item_filter"] = user["filter"]
    return said


def _ask(url: str, body: Row, filtered: bool, user: Row) -> tuple[list[tuple[str, float | None]], float]:
    """Return texts and scores of a list, and the seconds that it took. Raises ItemSetError if the server refuses."""
    said = _said(body, filtered, user)
    if own := url.endswith("/generate"):
        said = _as_generate(**said)
    data, kind = json.dumps(said).encode(), {"Content-Type": "application/json"}
    start = time.perf_counter()
    try:
        request = urllib.request.Request(url if own else f"{url.rstrip('/')}/completions", data, kind)
        with urllib.request.urlopen(request, timeout=600) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise ItemSetError(f"{url} refuses {data.decode():.200}: {error.read().decode():.500}") from error
    except OSError as error:
        raise ItemSetError(f"{url} does not answer: {error}: check the address") from error
    seconds = time.perf_counter() - start
    if own:
        each = answer["meta_info"].get("beam_results", [answer])
        return [(one["text"], one["meta_info"].get("sequence_score")) for one in each], seconds
    return [(one["text"], (one.get("item") or {}).get("score")) for one in answer["choices"]], seconds


def _as_generate(model: str, prompt: str | list[int], n: int, max_tokens: int, **params: Any) -> Row:
    params = {"beam_width": n, "n": n, "max_new_tokens": max_tokens, **params}
    return {"text" if isinstance(prompt, str) else "input_ids": prompt, "sampling_params": params}


def _keyed(item_set: ItemSet, tokenizer: Any, users: list[Row], lists: Sequence[Any]) -> list[Answer]:
    """Return the keys and scores of lists, by their texts alone: what a server says of keys counts for nothing. None
    is the key of what is no item, or does not pass its user's filter."""
    part = cache(lambda query: itemset.view(item_set, json.loads(query)))

    def key_of(of: ItemSet, text: str) -> Key:
        try:
            tokens, _ = encode([text.strip()], tokenizer, prefix=of.prefix, escape=of.escape)
        except ItemSetError:  # no text at all, or one that no item can be
            return None
        return (of.find(tokens.tolist()) or (None,))[0]

    found = []
    for user, answers in zip(users, lists, strict=True):
        of = part(json.dumps(user["filter"])) if user.get("filter") else item_set
        found.append([(key_of(of, text), score) for text, score in answers])
    return found


def shares(users: list[Row], answers: Sequence[Answer]) -> Row:
    """Judge lists.

    Returns `legal`, the share of answers that are items and pass their user's filter; `distinct`, the share of these
    that stand in their list for the first time; of lists with a truth `recall`, the share of its keys that are in the
    list, `hit`, the share of lists with one of them, and `ndcg`.
    """
    places = [[key for key, _ in answer] for answer in answers]
    keys = [[key for key in one if key is not None] for one in places]
    legal = sum(map(len, keys))
    row: Row = {"legal": legal / max(1, sum(map(len, answers)))}
    row["distinct"] = sum(len({*one}) for one in keys) / max(1, legal)
    true = [(set(user["truth"]), one) for user, one in zip(users, places, strict=True) if user.get("truth")]
    if true:
        row["recall"] = fmean(len(truth & {*one}) / len(truth) for truth, one in true)
        row["hit"] = fmean(not truth.isdisjoint(one) for truth, one in true)
        row["ndcg"] = fmean(_gain(truth, one) for truth, one in true)
    return row


def _gain(truth: set[Any], keys: list[Key]) -> float:
    """Return the NDCG of a list, of which a key counts where it stands first."""
    gains = 1 / np.log2(np.arange(2, len(keys) + 2))
    found = sum(gain for place, gain in enumerate(gains) if keys[place] in truth and keys[place] not in keys[:place])
    return float(found / gains[: len(truth)].sum()) if keys else 0.0


def changes(before: Sequence[Answer], answers: Sequence[Answer]) -> Row:
    """Compare lists with others of the same requests.

    Returns `overlap`, the share of the others' items that are in the list; of these `rank shift`, by how many places
    they have moved, and `score drift`, the difference of their scores where both are known, in the mean; and `most
    drift`, the largest of them. None where nothing can be compared.
    """
    overlaps, shifts, drifts = list[float](), list[int](), list[float]()
    for was, now in zip(before, answers, strict=True):
        places = {key: (place, score) for place, (key, score) in reversed([*enumerate(now)]) if key is not None}
        known = [(place, key, score) for place, (key, score) in enumerate(was) if key is not None]
        overlaps += [sum(key in places for _, key, _ in known) / len(known)] if known else []
        for place, key, score in known:
            at, found = places.get(key, (place, None))
            shifts += [abs(place - at)] if key in places else []
            drifts += [abs(score - found)] if score is not None and found is not None else []
    means: dict[str, Sequence[float]] = {"overlap": overlaps, "rank shift": shifts, "score drift": drifts}
    row: Row = {name: fmean(each) if each else None for name, each in means.items()}
    return row | {"most drift": max(drifts, default=None)}
