"""Ranked lists of one trained model from several servers, one after the other: `itemset bench` asks each for the same
users and judges the texts of the answers.

python benchmarks/side_by_side.py --sglang .venv-sglang/bin/python --json docs/benchmarks/side_by_side.json

In vLLM's environment. The model is that of `bootstrap.py retrieval`, the truth the film that a user watched next, the
filter a quarter of the films, which are in stock. vLLM and SGLang make lists of the set, and beams of their own, which
know of no set; `generate()` has our logits processor. Illegal is counted as FlashRec does (docs/baselines.md in
sohu-mptc/FlashRec): the share of the beams that are no item. With a filter, also of those that do not pass it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from runner import ROOT, Report, Row, parser

import itemset

IN_STOCK = {"in_stock": True}
SET = {"item_set": "films", "use_beam_search": True}


def launches(model: Path, index: Path, sglang: Path) -> list[tuple[str, Any, list[tuple[str, str, Row]]]]:
    """Servers, how each is started, and the ways to ask it: a label, where it answers, and the request's body."""
    from serving import Launch

    class WithMore(Launch):
        def environment(self) -> dict[str, str]:
            return {**super().environment(), "OMP_NUM_THREADS": "1"}

        def command(self, port: int) -> list[str]:
            command = super().command(port)
            if self.engine == "sglang":
                room = ("--max-running-requests", "1024", "--max-total-tokens", "65536", "--sleep-on-idle")
                return [str(sglang), *command[1:], *room]
            return [*command, "--max-logprobs", "-1"]

    class Generate(WithMore):
        def command(self, port: int) -> list[str]:
            server = str(ROOT / "benchmarks" / "generate_server.py")
            return [sys.executable, server, "--model", str(model), "--set", str(index), "--port", str(port)]

    set_of, of_set = f"films={index}", ("the set", "/v1", SET)
    return [
        (
            "vLLM",
            WithMore("vllm", model, set_of, dtype="float32"),
            [of_set, ("its own beams", "/v1", {"use_beam_search": True})],
        ),
        ("SGLang", WithMore("sglang", model, set_of, dtype="float32"), [of_set, ("its own beams", "/generate", {})]),
        ("generate()", Generate("vllm", model, set_of), [of_set]),
    ]


def prepared(folder: Path, count: int) -> tuple[Path, Path]:
    """The model, and an index of its films with what is in stock; the users are in the folder."""
    import retrieval
    import retrieval_data
    from films_data import CACHE, titles_by_key
    from transformers import AutoTokenizer

    stock = random.Random(0)
    in_stock = [stock.random() < 0.25 for _ in titles_by_key()]
    model, index = retrieval.prepare(CACHE / "side-by-side", None, in_stock=in_stock)
    films, end = itemset.load(index), AutoTokenizer.from_pretrained(model).eos_token_id
    with (folder / "users.jsonl").open("w") as file:
        for *watched, last in retrieval_data.histories()[:count]:
            items = films.tokens(watched[-retrieval.retrieval_model.MEMORY :])
            prompt = [token for item in items for token in (*item, end)]
            file.write(json.dumps({"prompt": prompt, "truth": [last], "filter": IN_STOCK}) + "\n")
    return model, index


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sglang", type=Path, required=True, help="the Python of SGLang's environment")
    options.add_argument("--users", type=int, default=100)
    options.add_argument("--servers", nargs="+", default=["vLLM", "SGLang", "generate()"])
    options.add_argument("-k", type=int, default=50)
    options.add_argument("--concurrency", nargs="+", default=["1", "8"])
    arguments = options.parse_args()
    from serving import running_server

    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, index = prepared(folder, arguments.users)
        for server, launch, ways in launches(model, index, arguments.sglang.absolute()):
            if server not in arguments.servers:
                continue
            with running_server(launch) as url:
                for label, path, body in ways:
                    command = [sys.executable, "-m", "itemset", "bench", "--url", url.removesuffix("/v1") + path]
                    command += ["--set", str(index), "--tokenizer", str(model), "--users", str(folder / "users.jsonl")]
                    given = {"width": arguments.k} if "item_set" in body else {}  # as many beams as the others
                    command += ["-k", str(arguments.k), "--body", f"{label}={json.dumps(body | given)}"]
                    command += ["--concurrency", *arguments.concurrency, "--json", str(folder / "bench.json")]
                    subprocess.run(command, check=True)
                    rows.append(in_one(server, json.loads((folder / "bench.json").read_text())["rows"]))
    Report(arguments).add(f"lists of {arguments.k}", rows)


def in_one(server: str, rows: list[Row]) -> Row:
    """What `itemset bench` says of one way of asking."""
    plain, filtered = ([row for row in rows if row["filter"] is one] for one in (False, True))
    few, many = plain[0], plain[-1]
    one: Row = {"server": server, "lists of": few["body"], "illegal": 1 - many["legal"]}
    one |= {"illegal, filter": 1 - filtered[-1]["legal"]} if filtered else {}
    one[f"p50 ms, {few['concurrency']} at a time"] = few["p50 ms"]
    one[f"lists a second, {many['concurrency']} at a time"] = many["lists a second"]
    return one


if __name__ == "__main__":
    main()
