"""Real tokenizers, from the data of the package mistral_common, which both engines install."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from models import cached, tiny_tokenizer

Piece = TypeVar("Piece", str, bytes)

RECIPE = 2  # as in models.py
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


def _merges(tokens: Sequence[Piece]) -> list[tuple[Piece, Piece]]:
    """The merges of a BPE of which only the tokens are known, by their ranks."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    found = []
    for token in tokens:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in pairs if left in ranks and right in ranks]
        found += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return found


def _llama(folder: Path) -> None:
    """Mistral's first one, which is of Llama's kind: a mark before each word, and bytes for rare characters."""
    from sentencepiece import SentencePieceProcessor
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    given = SentencePieceProcessor(model_file=str(_data() / "tokenizer.model.v1"))
    tokens = [given.id_to_piece(token) for token in range(given.vocab_size())]
    vocabulary = {token: rank for rank, token in enumerate(tokens)}
    merges = _merges([token for token in tokens if not given.is_byte(vocabulary[token])])
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(spaces)
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    wrapped.save_pretrained(str(folder))


def _tekken(folder: Path) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    given = json.loads((_data() / "tekken_240911.json").read_text())
    letters = bytes_to_unicode()
    tokens = [base64.b64decode(one["token_bytes"]) for one in given["vocab"][:TEKKEN_TOKENS]]
    names = {token: "".join(letters[byte] for byte in token) for token in tokens}
    merges = [(names[left], names[right]) for left, right in _merges(tokens)]
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
