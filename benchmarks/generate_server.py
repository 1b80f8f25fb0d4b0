"""Hugging Face's `generate()` as a server of /v1/completions: what many recommenders are served with. Our logits
processor keeps its beams in a set; `item_filter` leaves a view of the set. One request runs at a time.

python benchmarks/generate_server.py --model DIR --set films.itemset --port 8000
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import itemset
from itemset.adapters.huggingface import ItemSetLogitsProcessor


class Beams:
    """Lists of a set's items by `generate()`."""

    def __init__(self, folder: str, index: str) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._item_set, self._turn = itemset.load(index), Lock()
        self._part = cache(lambda query: itemset.view(self._item_set, json.loads(query)))

    def texts(self, prompt: list[int], n: int, max_tokens: int, item_filter: Any = None, **_: Any) -> list[str]:
        chosen = self._item_set if item_filter is None else self._part(json.dumps(item_filter))
        end = self._tokenizer.eos_token_id
        processor = ItemSetLogitsProcessor(chosen, prompt_length=len(prompt), stop_tokens=end)
        ids = torch.tensor([prompt], device=self._model.device)
        shape = {"num_beams": n, "num_return_sequences": n, "max_new_tokens": max_tokens, "length_penalty": 0.0}
        with self._turn:
            rows = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                logits_processor=[processor],
                pad_token_id=end,
                do_sample=False,
                **shape,
            )
        return self._tokenizer.batch_decode(rows[:, len(prompt) :], skip_special_tokens=True)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    beams: Beams

    def do_GET(self) -> None:
        self._answer({})  # /health

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer({"choices": [{"text": text} for text in self.beams.texts(**body)]})

    def _answer(self, what: dict[str, Any]) -> None:
        data = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--model", "--set", "--port"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    Handler.beams = Beams(arguments.model, arguments.set)
    ThreadingHTTPServer(("127.0.0.1", int(arguments.port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
