"""Texts into token sequences, and what identifies the tokenizer that did it."""

import hashlib
import json
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from itemset.errors import Faults, ItemSetError, ItemSetWarning, shown

ITEM = "item {}"
BATCH = 10_000  # texts a tokenizer call: large enough for its threads, small enough for its Python lists

Escape = Literal["json", "text", "space"]  # inside longer texts: as in a JSON string, as they are, or after a space
_CARRIER = "\n"  # joins no word, and tokenizers that mark a word's start have a token or a byte of its own for it
_CARRIED = ("x", "The film", "1", "é")

# They tell tokenizers with one vocabulary apart by normaliser (case, accents, width, spaces), pre-tokeniser (digits,
# punctuation, newlines, contractions) and merges (long words, bytes of rare characters).
_PROBES = [
    "The quick brown fox jumps over the lazy dog.",
    " leading, trailing ",
    "two  spaces\tand a tab\n\nand lines\r\n",
    "UPPER lower MiXeD iPhone",
    "Amélie café nai\u0308ve Å\u212b \ufb01 \uff21",
    "0 12 345 6789 3.14159 1,000,000 (1995)",
    "don't we'll it's -- 'quoted' \"x\" [y] {z}/\\|<>",
    "千と千尋の神隠し 东京 서울 مرحبا Привет",
    "😀 \U0001f469\u200d\U0001f467 ☃ \u200b \U0001d518",
    "internationalization antidisestablishmentarianism",
]


@dataclass(frozen=True)
class TokenizerId:
    """Which tokenizer an item set was encoded with."""

    name: str  # for people
    fingerprint: str  # equal if two tokenizers encode alike, see `fingerprint`


def encode(
    texts: Iterable[str], tokenizer: Any, *, prefix: str = "", escape: Escape | None = None, before: int = 0,
    name: str = ITEM, faults: Faults | None = None, lossy: "Lossy | None" = None,
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:  # fmt: skip
    """Encode each of N texts as the one token sequence that the tokenizer gives for `prefix` and the text.

    tokenizer: a Hugging Face tokenizer, or one with an engine's tokenizer protocol. No special tokens are added,
        nothing is padded or cut.
    escape: for items that stand inside a longer text: the tokens are those that `prefix` and the text have in the
        middle of one, without the mark of a word's start that some tokenizers put before a whole text. "json" also
        escapes both as in a JSON string, but for characters that are not ASCII; "text" escapes nothing; "space" puts a
        space before both.
    before: number of items before these, if they are a part of many: errors count from the first of all.
    name: what errors call an item, with {} for its position. lossy: takes the texts that their tokens do not give back.
    faults: takes what is wrong with texts, which are omitted then; without it, all of that is raised at once.
    Returns tokens [T], int32, and offsets [N + 1], int64: text i is ``tokens[offsets[i]:offsets[i + 1]]``.
    Raises ItemSetError, naming items by their position from 0: not a string, empty, no token, a lone surrogate or
    whatever else the tokenizer refuses, the tokenizer's unknown or end-of-sequence token; with `escape`, if what
    stands before a text changes its tokens. Also if the tokenizer fails whatever the text is.
    """
    if isinstance(tokenizer, str | PurePath):
        raise ItemSetError(f"the tokenizer must be a tokenizer object, not {tokenizer}: open it with load_tokenizer()")
    if isinstance(texts, str | bytes):
        raise ItemSetError(f"texts must be a list of texts, not the one text {shown(texts)}: put it in a list")
    if prefix and (why := _refusal(prefix, tokenizer)):
        raise ItemSetError(f"the prefix {shown(prefix)} {why}: give another prefix")
    if escape not in (None, *get_args(Escape)):
        raise ItemSetError(f"escape must be json, text or space, not {shown(escape)}")
    carrier = _CARRIER if escape and not continues(tokenizer) else ""
    found, before_these = Faults("items") if faults is None else faults, 0 if faults is None else faults.count
    tokens: list[NDArray[np.int32]] = [np.zeros(0, np.int32)]
    lengths: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
    done, rest = before, iter(texts)
    while batch := list(islice(rest, BATCH)):
        ids = _encode_batch(batch, done, tokenizer, prefix, escape, carrier, name, found, lossy)
        if found.count == before_these:
            lengths.append(np.fromiter(map(len, ids), np.int64, len(ids)))
            tokens.append(np.fromiter(chain.from_iterable(ids), np.int32, int(lengths[-1].sum())))
        done += len(batch)
    if faults is None:
        found.check()
    return np.concatenate(tokens), np.cumsum(np.concatenate(lengths))


def encode_pieces(
    items: Iterable[Any], tokenizer: Any, *, name: str = ITEM, before: int = 0, faults: Faults | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the tokens of items that are lists of tokens by their names, as `encode` does, whose parameters these are.

    An item with a string that the vocabulary does not have is a text in parts. Raises ItemSetError, or adds to the
    faults: a value that is no string, a token that no item may hold, a bad text.
    """
    vocabulary, forbidden = tokenizer.get_vocab(), _forbidden_tokens(tokenizer)
    found, rows = Faults("items") if faults is None else faults, list[list[int]]()
    for position, item in enumerate(items, before):
        known = [vocabulary.get(piece, -1) if isinstance(piece, str) else -2 for piece in item]
        if -1 in known and -2 not in known:
            known = encode(["".join(item)], tokenizer, name=name, before=position, faults=found)[0].tolist()
        for token in {-2, *forbidden} & set(known):
            why = forbidden.get(token, "has other values than strings: give every token by its name")
            found.add(f"{named(name, position, str(item))} {why}")
        rows.append(known)
    if faults is None:
        found.check()
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())), np.append(0, np.cumsum(lengths))


class Lossy:
    """Texts that differ from what their tokens decode to: counted, and the first as an example."""

    def __init__(self) -> None:
        self.count, self.example = 0, ("", "")

    def add(self, text: str, decoded: str) -> None:
        if text != decoded:
            self.example = self.example if self.count else (text, decoded)
            self.count += 1

    def warn(self) -> None:
        """Warn, for the caller of the function that builds a set, if there are any."""
        if self.count:
            before, after = map(shown, self.example)
            warnings.warn(
                f"{self.count:,} items come back from the tokenizer with another text, such as {before} as {after}: "
                "answers have that one, and items that become equal are folded; tell them by their keys, which "
                "--keep-text (in a source &keep_text=yes) makes of the texts as they are given",
                ItemSetWarning,
                stacklevel=3,
            )


def escaped(text: str, escape: Escape | None) -> str:
    """Return a text as it stands in an answer: for "json" without the quotes around it."""
    if escape == "json":
        return json.dumps(text, ensure_ascii=False)[1:-1]
    return " " + text if escape == "space" else text


def space_token(tokenizer: Any) -> int | None:
    """Return the token that a space is at the end of a text; None if that is no token of its own."""
    before, after = _token_ids(["x:", "x: "], tokenizer)
    return after[-1] if after[:-1] == before else None


def continues(tokenizer: Any) -> bool:
    """Return whether a text encodes alike at the beginning and in the middle: SentencePiece marks a word's start."""
    carrier, *texts = _token_ids([_CARRIER, *_CARRIED], tokenizer)
    after = _token_ids([_CARRIER + text for text in _CARRIED], tokenizer)
    return after == [carrier + text for text in texts]


def load_tokenizer(path_or_name: str, *, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """Load the Hugging Face tokenizer in a folder, or of a model name.

    trust_remote_code: whether to run the code of a tokenizer that brings its own. revision: of the model name.
    Raises ItemSetError: transformers is not installed, no such folder, no tokenizer there.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ItemSetError("texts need transformers: pip install static-backend[text]") from error
    path = Path(path_or_name).expanduser()
    # A model name has at most one slash: what cannot be one must not cost a try over the network.
    if not path.is_dir() and (path.exists() or path.is_absolute() or len(path.parts) > 2 or path_or_name[:1] in "~."):
        raise ItemSetError(f"no folder {path_or_name}: give the folder that holds tokenizer.json, or a model name")
    with loading(path_or_name):  # False, not None: that would ask on a terminal
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code, revision=revision)


@contextmanager
def loading(path_or_name: str) -> Iterator[None]:
    """Turn whatever loading a tokenizer raises into an ItemSetError."""
    try:
        yield
    except Exception as error:  # OSError, ValueError, KeyError, ImportError and its libraries' own
        reason = str(error).strip().partition("\n")[0]
        if isinstance(error, ImportError):
            raise ItemSetError(f"transformers cannot be used here: {reason}") from error
        mend = "give the folder that holds tokenizer.json, or a model name"
        if "trust_remote_code" in str(error):
            mend = "it brings code of its own, which --trust-remote-code allows"
        raise ItemSetError(f"no tokenizer in {path_or_name} ({reason}): {mend}") from error


def fingerprint(tokenizer: Any, added: Collection[str] = ()) -> str:
    """Return the SHA-256, in hex, of the vocabulary and of the encodings of fixed probe texts.

    How the tokenizer was loaded or wrapped, pads or truncates does not count. added: tokens that do not, either.
    """
    tokenizer = getattr(tokenizer, "transformers_tokenizer", tokenizer)  # vLLM's class around Mistral's own
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary.keys() - added)
    digest = hashlib.sha256(json.dumps([tokens, *_token_ids(_PROBES, tokenizer)]).encode())
    digest.update(np.fromiter(map(vocabulary.__getitem__, tokens), "<i8", len(tokens)).tobytes())
    return digest.hexdigest()


def identify(tokenizer: Any) -> TokenizerId:
    """Return the fingerprint, and the name of the tokenizer's model or folder, else of its class."""
    path = PurePath(getattr(tokenizer, "name_or_path", None) or "")
    parts = [part for part in path.parts if part not in ("/", ".", "..")]
    name = "/".join(parts if len(parts) == len(path.parts) <= 2 and not Path(path).is_dir() else parts[-1:])
    for part in parts:
        if part.startswith("models--"):  # the folder's name in Hugging Face's cache, above one named by a commit
            name = part.removeprefix("models--").replace("--", "/")
    return TokenizerId(name or type(tokenizer).__name__, fingerprint(tokenizer))


def _token_ids(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Return the canonical encodings, whatever the tokenizer was set to do before."""
    if (compiled := _compiled(tokenizer)) is not None:
        return [one.ids for one in compiled.encode_batch_fast(texts, add_special_tokens=False)]
    if not _has_all_options(tokenizer):
        return [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    off = ("add_special_tokens", "padding", "truncation", "return_attention_mask", "return_token_type_ids", "verbose")
    return tokenizer(texts, **dict.fromkeys(off, False))["input_ids"]


_WRAPPERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
_WRAPPED = ("__call__", "_call_one", "batch_encode_plus", "_encode_plus", "_batch_encode_plus", "decode", "_decode")


def _compiled(tokenizer: Any) -> Any:
    """Return the compiled tokenizer, nearly twice as fast, of a wrapper that does nothing of its own; else None."""
    kind = type(tokenizer)
    base = next((one for one in kind.__mro__[::-1] if one.__name__ in _WRAPPERS), None)
    if base is None or any(getattr(kind, name, None) is not getattr(base, name, None) for name in _WRAPPED):
        return None
    compiled = tokenizer.backend_tokenizer
    set_otherwise = compiled.padding or compiled.truncation or compiled.encode_special_tokens
    return None if set_otherwise or tokenizer.split_special_tokens else compiled


def _has_all_options(tokenizer: Any) -> bool:
    """Return whether it takes Hugging Face's options, else those of the engines' protocols alone, as Mistral's own."""
    classes = {one.__name__ for one in type(tokenizer).__mro__}
    protocol = hasattr(type(tokenizer), "encode") and "PreTrainedTokenizerBase" not in classes
    return not protocol and "MistralCommonBackend" not in classes


def decoded(rows: list[list[int]], tokenizer: Any, *, skip_special_tokens: bool = False) -> list[str]:
    """Return the text of each row of tokens, as `decode` does."""
    if (compiled := _compiled(tokenizer)) is not None:
        return compiled.decode_batch(rows, skip_special_tokens=skip_special_tokens)
    return [decode(tokens, tokenizer, skip_special_tokens=skip_special_tokens) for tokens in rows]


def decode(tokens: list[int], tokenizer: Any, *, skip_special_tokens: bool = False) -> str:
    """Return the text of tokens, special ones among them unless they are to be skipped."""
    options = {"clean_up_tokenization_spaces": False} if _has_all_options(tokenizer) else {}
    return str(tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, **options))


def _encode_batch(
    batch: list[str], first: int, tokenizer: Any, prefix: str, escape: Escape | None, carrier: str, name: str,
    faults: Faults, lossy: Lossy | None,
) -> list[list[int]]:  # fmt: skip
    """Return the tokens of the batch's texts; what is wrong with some goes to the faults.

    first: the position of its first item. carrier: text before each, whose tokens are cut off.
    """
    given = faults.count
    for i, text in enumerate(batch):
        if not isinstance(text, str):
            faults.add(f"{named(name, first + i, text)} is not a string: give every item as a text")
        elif not text:
            faults.add(f"{named(name, first + i, text)} is empty: remove it")
    if faults.count > given:
        return []
    try:
        "".join(batch).encode()  # a Python tokenizer would let lone surrogates through
        whole = [carrier + escaped(prefix + text, escape) for text in batch]
        ids = _token_ids(whole, tokenizer)
    except Exception as error:
        for i, text in enumerate(batch):
            if why := _refusal(text, tokenizer):
                faults.add(f"{named(name, first + i, text)} {why}: remove or correct it")
        if faults.count > given:
            return []
        raise _failed(tokenizer, error) from error  # no single text is to blame
    if lossy is not None:
        for text, back in zip(whole, decoded(ids, tokenizer), strict=True):
            lossy.add(text, back)
    (cut,) = _token_ids([carrier], tokenizer) if carrier else ([],)
    forbidden = _forbidden_tokens(tokenizer)
    for i, tokens in enumerate(ids):
        if tokens[: len(cut)] != cut:
            faults.add(
                f"{named(name, first + i, batch[i])} has other tokens after {carrier!r} than alone, so they do not "
                "tell what it has inside a longer text: remove or correct it"
            )
        del tokens[: len(cut)]
        if not tokens:
            faults.add(f"{named(name, first + i, batch[i])} encodes to no token: remove it")
        for token in forbidden.keys() & tokens:
            faults.add(f"{named(name, first + i, batch[i])} {forbidden[token]}")
            break
    return ids


def _refusal(text: str, tokenizer: Any) -> str | None:
    """Return why this text cannot be encoded, None if it can. Raises ItemSetError if no text can be."""
    try:
        text.encode()
        _token_ids([text], tokenizer)
    except UnicodeEncodeError:
        return "holds half of a surrogate pair, which is no character"
    except Exception as error:
        try:
            _token_ids(["a"], tokenizer)
        except Exception:
            raise _failed(tokenizer, error) from error
        return f"is refused by the tokenizer ({error})"
    return None


def _failed(tokenizer: Any, error: Exception) -> ItemSetError:
    what = f"{type(tokenizer).__name__} raises {type(error).__name__}: {error}"
    return ItemSetError(f"the tokenizer encodes no text ({what}): load it as the engine does")


def _forbidden_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the tokens that no item may hold, and what to say of an item that does."""
    unknown, end = getattr(tokenizer, "unk_token_id", None), getattr(tokenizer, "eos_token_id", None)
    reasons = {
        unknown: f"encodes to the unknown token {shown(getattr(tokenizer, 'unk_token', None))} (id {unknown}): remove "
        "the characters that the tokenizer does not know",
        end: f"holds the end-of-sequence token {shown(getattr(tokenizer, 'eos_token', None))} (id {end}), at which an "
        "answer ends: remove it from the text",
    }  # the end comes last: it counts if it is the unknown token, too
    return {token: reason for token, reason in reasons.items() if token is not None}


def named(name: str, position: int, text: object) -> str:
    """Return what an error calls the item at a position: its name, as `encode` takes it, and its text's beginning."""
    return f"{name.format(position)} ({shown(text)})"
