"""A web page that shows what a model does with an item set: ranked lists, an answer's path token by token, sampling
beside exact draws, and answers with items in them.

`python3 bootstrap.py playground` starts a server with the demo's model and films, and the page in front of it; with
`--engine sglang` the other engine. For a server that runs, with `pip install gradio==6.31.0`:

python3 examples/playground.py --url http://localhost:8000 --item-set films=films.itemset --tokenizer path/to/model

`--item-set` and `--tokenizer` are for what no server says: how many tokens were allowed, and the attributes. They need
this project in the environment; without them the page asks the server alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import socket
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr
import playground_page as page
from playground_client import Choice, Index, Server, ServerError, parsed

PROMPT = """a comedy with robots: Short Circuit (1986)
a film about the war in Vietnam: Platoon (1986)
a space adventure: """
FILTER = '{"genres": "Sci-Fi", "year": {"$gte": 1990}}'
BOOST = 5  # where a slider ends: nats that an item one spread above the mean has more than one at the mean
JSON, TAGS, SLATE = "JSON", "text with tags", "slate"


def constraint(kind: str, item_set: str) -> str:
    """Return the first fields of a request for an answer with items of a set in it, as JSON."""
    item = {"type": "string", "item_set": item_set}
    if kind == JSON:
        properties = {"choice": item, "others": {"type": "array", "items": item, "uniqueItems": True, "maxItems": 2}}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        told = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
    elif kind == TAGS:
        tag = {"begin": "<item>", "content": {"type": "item_set", "item_set": item_set}, "end": "</item>"}
        form = {"type": "triggered_tags", "triggers": ["<item>"], "tags": [tag], "at_least_one": True}
        told = {"response_format": {"type": "structural_tag", "format": form}}
    else:
        told = {"slate": {"item_set": item_set, "n": 3}}
    return json.dumps(told, indent=2)


def shown(work: Callable[..., str]) -> Callable[..., str]:
    """Return the HTML of an answer, or of the error in the server's own words."""

    @wraps(work)
    def answered(*given: Any) -> str:
        try:
            return work(*given)
        except ServerError as error:
            return page.error(str(error))

    return answered


def whole(number: float | None) -> int:
    """Return a number that was typed. Raises ServerError if its field is empty."""
    if number is None:
        raise ServerError("a field for a number is empty: give one")
    return int(number)


def app(server: Server, prompt: str = PROMPT, item_filter: str = "") -> gr.Blocks:
    """Build the page. prompt, item_filter: their first values."""
    names = [one["name"] for one in server.sets()]
    first = names[0] if names else ""
    boosted = list(dict.fromkeys(name for index in server.indexes.values() for name in index.spreads()))

    @shown
    def about() -> str:
        heads = ["set", "items", "bytes", "masks made on the", "version"]
        rows = [
            (
                page.escape(one["name"]),
                f"{one['items']:,}" if "items" in one else "",
                f"{one['bytes']:,}" if "bytes" in one else "",
                page.escape(str(one.get("path", ""))),
                page.escape(str(one.get("version", ""))),
            )
            for one in server.sets()
        ]
        told = f"<p>{page.escape(server.model)} at {page.escape(server.url)} ({page.escape(server.engine)})</p>"
        return page.page(told, page.table(heads, rows))

    @shown
    def ranked(
        item_set: str, chosen: str, exclude: str, inline: str, prompt: str, n: float, width: float, *weights: float
    ) -> str:
        choice = Choice.of(item_set, chosen, exclude, inline)
        boost = server.boost(choice, dict(zip(boosted, weights, strict=True)))
        return page.ranked(server.ranked(prompt, choice, whole(n), width=max(whole(width), whole(n)), **boost))

    @shown
    def path(
        item_set: str, chosen: str, exclude: str, inline: str, prompt: str, temperature: float, seed: float
    ) -> str:
        choice = Choice.of(item_set, chosen, exclude, inline)
        return page.path(server.path(prompt, choice, temperature=temperature, seed=whole(seed)))

    @shown
    def compared(item_set: str, chosen: str, exclude: str, inline: str, prompt: str, n: float, passes: float) -> str:
        choice = Choice.of(item_set, chosen, exclude, inline)
        drawn, exact = server.drawn(prompt, choice, whole(n), max_passes=whole(passes), approximate=True)
        return page.compared(server.sampled(prompt, choice, whole(n)), drawn, exact)

    @shown
    def inside(question: str, told: str, temperature: float, seed: float) -> str:
        fields = parsed(told, "what is asked for")
        if not isinstance(fields, dict):
            raise ServerError("what is asked for must be an object: the fields of a request, in { }")
        return page.marked(*server.inside(question, fields, temperature=temperature, seed=whole(seed)))

    with gr.Blocks(title="Item sets") as blocks:
        gr.Markdown("## Item sets: what a model makes of them")
        with gr.Row():
            item_set = gr.Dropdown(names, value=first, label="set")
            item_filter_box = gr.Textbox(item_filter, label="item_filter", placeholder=FILTER, lines=2)
            exclude = gr.Textbox("", label="exclude_keys", placeholder="135, 50", lines=2)
            inline = gr.Textbox("", label="or a list of yours, by lines", lines=2)
        prompt_box = gr.Textbox(prompt, label="prompt", lines=3)
        asked = [item_set, item_filter_box, exclude, inline, prompt_box]
        with gr.Tab("Ranked list"):
            with gr.Row():
                n = gr.Number(10, label="items (n)", precision=0)
                width = gr.Number(10, label="width of the beam: wider is better and slower", precision=0)
            with gr.Row():
                sliders = [gr.Slider(-BOOST, BOOST, 0, step=0.25, label=f"boost by {name}") for name in boosted]
            answer(gr.Button("Rank", variant="primary"), ranked, [*asked, n, width, *sliders])
        with gr.Tab("Path of an answer"):
            with gr.Row():
                temperature = gr.Number(1.0, label="temperature")
                seed = gr.Number(1, label="seed", precision=0)
            answer(gr.Button("Sample", variant="primary"), path, [*asked, temperature, seed])
        with gr.Tab("Sampled and drawn"):
            with gr.Row():
                count = gr.Number(32, label="answers of each kind", precision=0)
                passes = gr.Number(200, label="most passes of the model for the draws", precision=0)
            answer(gr.Button("Compare", variant="primary"), compared, [*asked, count, passes])
        with gr.Tab("Items inside answers"):
            question = gr.Textbox("A film for a rainy Sunday, and two others?", label="question (a chat)")
            kind = gr.Radio([JSON, TAGS, SLATE], value=JSON, label="kind of answer")
            told = gr.Code(constraint(JSON, first), language="json", label="fields of the request", lines=8)
            with gr.Row():
                chat_temperature = gr.Number(0.7, label="temperature")
                chat_seed = gr.Number(1, label="seed", precision=0)
            gr.on([kind.change, item_set.change], constraint, [kind, item_set], told)
            answer(gr.Button("Ask", variant="primary"), inside, [question, told, chat_temperature, chat_seed])
        with gr.Tab("Server"):
            answer(gr.Button("Look again"), about, [], about())
    return blocks


def answer(button: gr.Button, work: Callable[..., str], inputs: list[Any], first: str = "") -> None:
    button.click(work, inputs, gr.HTML(first))


def opened(server: Server, arguments: argparse.Namespace, **defaults: str) -> bool:
    """Serve the page until the user stops it."""
    print(f"the page: http://{arguments.host}:{arguments.port} (Ctrl+C ends it)", flush=True)
    fonts: dict[str, Any] = {"font": ["system-ui", "sans-serif"], "font_mono": ["monospace"]}  # none from elsewhere
    app(server, **defaults).launch(
        server_name=arguments.host,
        server_port=arguments.port,
        css=page.CSS,
        theme=gr.themes.Default(**fonts),
        inbrowser=False,
        quiet=True,  # it would speak of links that this has not
    )
    return True


def check_port(arguments: argparse.Namespace) -> None:
    """Raise OSError if the page could not be served: a server takes a minute to start, in vain."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((arguments.host, arguments.port))
        except OSError as error:
            raise OSError(f"{arguments.host}:{arguments.port}: {error.strerror}: give another --port") from error


def own_server(arguments: argparse.Namespace) -> bool:
    """Build the films' index with their years and genres, start a server with it, and open the page in front of it."""
    from films_data import CACHE, build_index, model_dir, titles
    from serving import DemoError, Launch, running_server

    try:
        check_port(arguments)
    except OSError as error:
        raise DemoError(str(error)) from error
    model, catalogue, index = model_dir(), CACHE / "playground.jsonl", CACHE / "playground.itemset"
    if not catalogue.exists():
        catalogue.write_text("".join(json.dumps(film) + "\n" for film in films(titles())), encoding="utf-8")
    build_index(catalogue, "title", model, index, ["year", "genres"])
    with running_server(Launch(arguments.engine, model, f"films={index}")) as url:
        server = Server(url, indexes={"films": Index(str(index), str(model))})
        return opened(server, arguments, item_filter=FILTER)


def films(titles: Path) -> list[dict[str, Any]]:
    """Return the films with years and genres as attributes, from the demo's file."""
    with titles.open(newline="", encoding="utf-8") as file:
        return [
            {
                "movie_id": int(row["movie_id"]),
                "title": row["title"],
                "year": int(year) if (year := row["title"][-5:-1]).isdigit() else None,
                "genres": row["genres"].split(),
            }
            for row in csv.DictReader(file)
        ]


def indexes(arguments: argparse.Namespace, names: list[str]) -> dict[str, Index]:
    """Open the given index files. names: the server's sets. Raises ValueError for a name that is not among them."""
    if arguments.tokenizer and not Path(arguments.tokenizer).is_dir():
        raise ValueError(f"no folder {arguments.tokenizer}: give that of the model or its tokenizer")
    found = {}
    for given in arguments.item_set:
        name, equals, file = given.partition("=")
        if not equals or not file:
            raise ValueError(f"--item-set must be NAME=FILE, such as films=films.itemset, not {given}")
        if name not in names:
            raise ValueError(f"the server has no set {name!r}: it has {', '.join(names) or 'none'}")
        found[name] = Index(file, arguments.tokenizer)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server that runs; without it one is started")
    parser.add_argument("--api-key", default="none", help="of that server")
    parser.add_argument("--item-set", action="append", default=[], metavar="NAME=FILE", help="index of a set of it")
    parser.add_argument("--tokenizer", metavar="DIR", help="the model's tokenizer, for the texts of allowed tokens")
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm", help="of the server to start")
    parser.add_argument("--host", default="127.0.0.1", help="address of the page")
    parser.add_argument("--port", type=int, default=7860, help="its port")
    arguments = parser.parse_args()
    if not arguments.url:
        from serving import run

        return run(partial(own_server, arguments))
    try:
        check_port(arguments)
        server = Server(arguments.url, arguments.api_key)
        server.indexes = indexes(arguments, [one["name"] for one in server.sets()])
        opened(server, arguments)
    except (ServerError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
