"""Real tokenizers, from the data of the package mistral_common, which both engines install."""

from __future__ import annotations

import base64
import functools
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from models import cached, tiny_tokenizer

RECIPE = 1  # as in models.py
TEKKEN_TOKENS = 43_000  # the most frequent ones; `"The` is the 42,948th


@functools.cache
def tokenizer(name: str) -> Any:
    """One of NAMES."""
    if name == "tiny":
        return tiny_tokenizer()
    from transformers import PreTrainedTokenizerFast

    folder = cached(
        f"tokenizer-{name}", {"tekken": _tekken, "llama": _llama}[name], recipe=RECIPE, tokens=TEKKEN_TOKENS
    )
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


NAMES = ("tiny", "tekken", "llama")
"""Bytes with few tokens; bytes with many, among them a quote and a word, or all that closes a string; SentencePiece."""


def _data() -> Path:
    found = find_spec("mistral_common")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "data"


def _llama(folder: Path) -> None:
    """Mistral's first one, which is of Llama's kind: a mark before each word, and bytes for rare characters."""
    from transformers import LlamaTokenizer

    folder.mkdir(parents=True)
    shutil.copy(_data() / "tokenizer.model.v1", folder / "tokenizer.model")
    LlamaTokenizer.from_pretrained(str(folder)).save_pretrained(str(folder))


def _tekken(folder: Path) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    given = json.loads((_data() / "tekken_240911.json").read_text())
    letters = bytes_to_unicode()
    tokens = [base64.b64decode(one["token_bytes"]) for one in given["vocab"][:TEKKEN_TOKENS]]
    names = {token: "".join(letters[byte] for byte in token) for token in tokens}
    merges = [
        (names[token[:cut]], names[token[cut:]])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in names and token[cut:] in names
    ]
    model = models.BPE({name: rank for rank, name in enumerate(names.values())}, merges, ignore_merges=True)
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(given["config"]["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>").save_pretrained(str(folder))
