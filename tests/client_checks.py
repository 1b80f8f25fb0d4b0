"""`itemset.client` and the requests that `itemset serve` prints, asked of a server, whichever engine it is."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
from demo_checks import TITLE_OF
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel, Field, RootModel, ValidationError

import itemset
from itemset import cli
from itemset.cli.serve import requests_of
from itemset.client import Item, Of, choose, draw, fill, rank

ROOT = Path(__file__).resolve().parent.parent
LATE = {"year": {"$gt": 1968}}
Film = Item["films"]
Colour = Item[["red", "blue"]]
MESSAGES = [{"role": "user", "content": "Which film?"}]


class Pick(BaseModel):
    late: Annotated[Item, Of("films", item_filter=LATE)]


class Tip(BaseModel):
    film: Film
    picks: Annotated[list[Pick], Field(max_length=2)]
    colour: Colour


def known(items: list[Item]) -> bool:
    return all(TITLE_OF[item.key] == item.text for item in items)


def check(server: Any) -> None:
    client = server.client
    best = rank(client, "films", "A film: ", n=4, width=12)
    assert known(best)
    assert len(best) == len({item.key for item in best}) == 4
    assert all(item.keys == (item.key,) for item in best)
    assert [item.score for item in best] == sorted((item.score for item in best), reverse=True)
    late = rank(client, "films", MESSAGES, n=12, item_filter=LATE, exclude_keys=[12])
    assert {item.key for item in late} == {9, 10, 11}
    assert known(rank(client, "films", "A film: ", n=2, exclude_keys=None, only_keys={1, 2}))
    few = rank(client, "films", "A film: ", n=12, at_most={"region": 2}, item_attributes=["region"], exclude_keys=[12])
    assert sorted(item.attributes["region"] for item in few) == ["DE", "DE", "FR", "FR"]
    assert few == sorted(few, key=lambda item: -(item.score or 0))
    with pytest.raises(BadRequestError, match=r'at_most: there is no attribute .*brand.*: the set has "year"'):
        rank(client, "films", "A film: ", at_most={"brand": 2})
    seen = f"I saw {TITLE_OF[3].lower()}, {TITLE_OF[8]} and “{TITLE_OF[9]}”: "
    for prompt in (seen, [{"role": "user", "content": seen}]):
        new = rank(client, "films", prompt, n=12, exclude_prompt=True)
        assert {item.key for item in new} == TITLE_OF.keys() - {3, 8, 9}
        assert choose(client, "films", prompt, exclude_prompt=True, only_keys=[3, 4, 8]).key == 4
        drawn = draw(client, "films", prompt, n=9, replace=False, exclude_prompt=True, approximate=True)
        assert {item.key for item in drawn} == TITLE_OF.keys() - {3, 8, 9}
    assert known([choose(client, "films", "A film: ", temperature=0.5, extra_body={"only_keys": [3, 5]})])
    assert choose(client, ["red", "blue"], MESSAGES).text in ("red", "blue")
    _check_whole(client)
    drawn = draw(client, "films", "A film: ", n=3, seed=1, max_passes=200, approximate=True)
    assert len(drawn) == 3
    assert known(drawn)
    _check_attributes(client)
    with pytest.raises(BadRequestError, match="did you mean 'films'"):
        rank(client, "flims", "A film: ")
    with pytest.raises(ValueError, match="start the server with --item-set"):
        choose(client, [], "p", extra_body={"structured_outputs": None})
    _check_fields(client)
    asyncio.run(_check_async(server))


def _check_attributes(client: Any) -> None:
    """Answers say them on request, however their items were found; of a filter's items those of the key that passed."""
    columns = {"year": lambda key: 1960 + key, "region": lambda key: "DE" if key % 2 else "FR", "in_stock": bool}
    for names in (True, ["year"], ["in_stock", "region"]):
        more: dict[str, Any] = {"item_attributes": names}
        drawing = {"seed": 1, "max_passes": 200, "approximate": True}
        found = [
            *rank(client, "films", "A film: ", n=3, **more),
            *draw(client, "films", MESSAGES, n=2, **drawing, **more),
        ]
        found += rank(client, "films", "A film: ", n=3, item_filter=LATE, exclude_keys=[12], **more)
        found += [*choose(client, "films", MESSAGES, n=2, only_keys=[3, 5], **more)]
        found += [choose(client, "films", "A film: ", item_filter=LATE, **more)]
        tip = fill(client, Pick, MESSAGES, temperature=0, **more)
        assert known([fill(client, Tip, MESSAGES, temperature=0, max_tokens=200, **more).film])
        slate = {"slate": {"item_set": "films", "n": 2}, **more}
        answer = client.completions.create(model="", prompt="Films: ", max_tokens=80, extra_body=slate)
        told = {one["key"]: one["attributes"] for one in answer.choices[0].model_extra["items"]}
        told |= {item.key: item.attributes for item in [*found, tip.late]}
        wanted = columns if names is True else names
        assert told == {key: {name: columns[name](key) for name in wanted} for key in told}
    assert rank(client, "films", "A film: ", n=1)[0].attributes == {}
    slate = {"slate": {"item_set": "films", "n": 2}, "item_attributes": ["price"]}
    with pytest.raises(BadRequestError, match=r'no attribute .*the set has "year" .integer., "region"'):
        client.completions.create(model="", prompt="Films: ", extra_body=slate)
    with pytest.raises(BadRequestError, match="item_attributes are of the items of a registered set"):
        client.completions.create(model="", prompt="Films: ", extra_body={"item_attributes": True})


def _check_whole(client: Any) -> None:
    """Nobody says how many tokens an item has, and what a caller has cut is no item."""
    several = choose(client, "films", "A film: ", n=3)
    assert len(several) == 3
    assert known(several)
    long = " and ".join(["a film"] * 40)
    assert {one.text for one in rank(client, [long, "short"], "A film: ", n=2, max_tokens=1)} == {long, "short"}
    assert choose(client, [long], "A film: ").text == long
    for given in ({"max_tokens": 1}, {"stop": " film"}, {"max_tokens": 2, "n": 2}):
        with pytest.raises(ValueError, match="is no whole item: max_tokens or a stop string has cut it"):
            choose(client, [long], "A film: ", **given)
    for function in (rank, choose, draw):
        with pytest.raises(ValueError, match="omit stream"):
            function(client, "films", "A film: ", stream=True)
        with pytest.raises(ValueError, match="several prompts take a call each"):
            function(client, "films", ["A film: ", "Another: "])


def _check_fields(client: Any) -> None:
    tip = fill(client, Tip, MESSAGES, temperature=0, max_tokens=200)
    assert known([tip.film, *(pick.late for pick in tip.picks)])
    assert all(pick.late.key > 8 for pick in tip.picks)
    assert (tip.colour.text, tip.colour.key) in (("red", 0), ("blue", 1))
    assert Tip.model_validate_json(tip.model_dump_json()).film == Item(None, tip.film.text)
    assert known([fill(client, RootModel[Film], MESSAGES, temperature=0).root])
    with pytest.raises(ValidationError):
        fill(client, Tip, MESSAGES, temperature=0, max_tokens=4)


async def _check_async(server: Any) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        lists = await asyncio.gather(*(rank(client, "films", "A film: ", n=n) for n in (1, 3)))
        assert [len(one) for one in lists] == [1, 3]
        assert known([(await fill(client, Tip, MESSAGES, temperature=0, max_tokens=200)).film])


def check_printed(server: Any, folder: Path) -> None:
    """What `itemset serve` prints is what may be pasted into a shell."""
    printed = requests_of(f"{server.url}/v1", "films", server.model_name)
    commands = re.split(r"\n# \d\. .*\n", printed)[1:]
    environment = os.environ | {"no_proxy": "127.0.0.1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    running = [
        subprocess.Popen(["bash", "-ec", one], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        for one in commands
    ]
    item, best, field = (process.communicate(timeout=120)[0] for process in running)
    assert '"key"' in item
    assert sorted(int(line.partition(" ")[0]) for line in best.splitlines())
    assert len(best.splitlines()) == 10
    assert '"path":"$.choice"' in field.replace(" ", "")


CLIENTS = Path(sys.prefix) / "clients"


def check_frameworks(server: Any) -> None:
    """The examples of LangChain and Instructor, whose packages lie in a folder of their own, name films of the set."""
    if not CLIENTS.exists():
        pytest.skip("python3 bootstrap.py test installs LangChain and Instructor")
    paths = os.pathsep.join(map(str, (CLIENTS, ROOT)))
    environment = os.environ | {"no_proxy": "127.0.0.1", "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, ROOT / "examples" / f"{name}_films.py", f"{server.url}/v1"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("langchain", "instructor")
    ]
    for process, keyed in zip(running, (3, 1), strict=True):
        field, *lines = process.communicate(timeout=240)[0].splitlines()
        assert process.returncode == 0
        assert field.removeprefix("field: ") in TITLE_OF.values()
        assert len(set(lines)) == len(lines) == keyed
        assert all(TITLE_OF[int(key)] == title for key, title in (line.split(" ", 1) for line in lines))


def check_bench(server: Any, tokenizer: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lists of a set hold its items alone, by filter too; the engine's own beams, which know of none, do not."""
    index, users, report = folder / "films.itemset", folder / "users.jsonl", folder / "bench.json"
    years = [1960 + key for key in TITLE_OF]
    loaded = itemset.text.load_tokenizer(str(tokenizer))
    itemset.build_text([*TITLE_OF.values()], loaded, keys=[*TITLE_OF], attributes={"year": years}).save(index)
    asked = [{"prompt": "A film: ", "truth": [9, 10, 11, 12], "filter": LATE}, {"prompt": [5, 6], "truth": [99]}]
    users.write_text("".join(json.dumps(one) + "\n" for one in asked))
    words = ["bench", "--url", f"{server.url}/v1", "--set", str(index), "--tokenizer", str(tokenizer), "-k", "4"]
    bodies = ["--body", 'set={"item_set": "films", "use_beam_search": true}', "--body", "open={}"]
    assert cli.main([*words, *bodies, "--users", str(users), "--concurrency", "1", "2", "--json", str(report)]) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [(row["body"], row["filter"], row["concurrency"]) for row in rows] == [
        (body, filtered, count) for body in ("set", "open") for filtered in (False, True) for count in (1, 2)
    ][: len(rows)]
    assert {row["legal"] for row in rows if row["body"] == "set"} == {1.0}
    assert [(row["recall"], row["hit"]) for row in rows if row["body"] == "set" and row["filter"]] == [(0.5, 0.5)] * 2
    assert {row["legal"] for row in rows if row["body"] == "open"} == {0.0}
    assert [row["distinct"] for row in rows if row["body"] == "set"] == [1.0] * 4
    assert [row["overlap"] for row in rows] == [1.0] * 4 + [0.0] * 4  # with the first way's lists
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows) == 9
    _check_replay(words, folder, report)
    capsys.readouterr()
    assert cli.main([*words, "--body", 'bad={"item_set": "flims"}']) == 1
    assert "did you mean 'films'" in capsys.readouterr().err


def _check_replay(words: list[str], folder: Path, report: Path) -> None:
    """The same lists again, and with a drift: by titles that were not there, and by another score."""
    body = json.dumps({"item_set": "films", "use_beam_search": True, "width": 16})
    log, alone = folder / "answers.jsonl", ["--concurrency", "1", "--json", str(report)]
    assert cli.main([*words, "--body", f"set={body}", "--requests", "3", "--answers", str(log), *alone]) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [len(line["answer"]) for line in lines] == [4] * 3
    assert cli.main([*words, "--replay", str(log), *alone]) == 0
    (row,) = json.loads(report.read_text())["rows"]
    assert (row["overlap"], row["rank shift"]) == (1, 0)
    assert row["most drift"] < 1e-3
    excluded = lines[0]["answer"][1]["key"]
    for line in lines:
        line["body"]["exclude_keys"] = [excluded]  # as if the set of today had one less
    lines[2]["answer"][0]["score"] += 0.5
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main([*words, "--replay", str(log), *alone]) == 0
    (row,) = json.loads(report.read_text())["rows"]
    had = sum(excluded in {one["key"] for one in line["answer"]} for line in lines)
    assert row["overlap"] == pytest.approx(1 - had / 12)
    assert row["rank shift"] > 0
    assert row["most drift"] == pytest.approx(0.5, abs=1e-2)


def check_bench_of_generate(server: Any, tokenizer: Path, folder: Path) -> None:
    """SGLang's own form, after `check_bench`: a set's beams are items, its own are none."""
    report, url = folder / "bench.json", f"{server.url}/generate"
    words = ["bench", "--url", url, "--set", str(folder / "films.itemset"), "--tokenizer", str(tokenizer), "-k", "4"]
    bodies = ["--body", 'set={"item_set": "films"}', "--body", "open={}", "--concurrency", "2", "--requests", "2"]
    assert cli.main([*words, *bodies, "--json", str(report)]) == 0
    assert [row["legal"] for row in json.loads(report.read_text())["rows"]] == [1.0, 0.0]
