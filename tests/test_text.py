"""Texts into tokens: the same sequences as one call a text, every refusal, and what a fingerprint depends on."""

import copy
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import itemset
from itemset import ItemSetError
from itemset.text import (
    _PROBES,
    BATCH,
    Lossy,
    TokenizerId,
    decode,
    encode,
    encode_pieces,
    fingerprint,
    identify,
    load_tokenizer,
)

CORPUS = [
    "Toy Story (1995)",
    "GoldenEye (1995)",
    "Four Rooms (1995)",
    "Get Shorty (1995)",
    "the story of the rooms",
] * 20


def make_bpe(*, normalizer=None, vocab_size=340, **special):
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", **special)


def make_words(**special):
    """Knows three words and nothing else."""
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "red": 1, "green": 2, "blue": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.fixture(scope="module")
def bpe():
    return make_bpe()


def split(tokens, offsets):
    return [tokens[a:b].tolist() for a, b in pairwise(offsets)]


def alone(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), max_size=8),
    prefix=st.text("a (1", max_size=2),
)
def test_equals_one_call_a_text(bpe, texts, prefix):
    tokens, offsets = encode(texts, bpe, prefix=prefix)
    assert tokens.dtype == np.int32
    assert offsets.dtype == np.int64
    assert split(tokens, offsets) == [alone(bpe, prefix + text) for text in texts]


def test_several_batches_from_a_generator(bpe):
    texts = [f"Story {i}" for i in range(BATCH * 2 + 7)]
    tokens, offsets = encode((text for text in texts), bpe)
    assert len(offsets) == len(texts) + 1
    for i in (0, BATCH - 1, BATCH, 2 * BATCH, len(texts) - 1):
        assert bpe.decode(tokens[offsets[i] : offsets[i + 1]]) == texts[i]


def test_no_special_tokens_padding_or_cutting():
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_bpe(pad_token="<|endoftext|>", model_max_length=4)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.backend_tokenizer.enable_padding(length=64)
    tokenizer.backend_tokenizer.enable_truncation(4)
    assert len(tokenizer("Toy")["input_ids"]) > 1
    texts = ["Toy", "a long text that has many tokens"]
    plain = make_bpe()
    assert split(*encode(texts, tokenizer)) == [alone(plain, text) for text in texts]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["a", 5], ["item 1 (5)", "not a string"]),
        (["a", None], ["item 1 (None)", "not a string"]),
        (["a", "b", ""], ["item 2 ('')", "empty"]),
        (["a", "x\ud800"], ["item 1 ('x\\ud800')", "surrogate"]),
        # Two halves in neighbouring items are no pair.
        (["a\ud83d", "\ude00"], ["item 0", "surrogate"]),
        ("Toy Story", ["'Toy Story'", "list"]),
        (["b" * 100, "c" * 100 + "\udfff"], ["item 1 ('" + "c" * 60 + "'...)"]),
    ],
)
def test_refused_texts(bpe, texts, words):
    with pytest.raises(ItemSetError) as error:
        encode(texts, bpe)
    for word in words:
        assert word in str(error.value)


def test_position_counts_over_batches(bpe):
    texts = ["a"] * (BATCH + 3)
    texts[BATCH + 2] = ""
    with pytest.raises(ItemSetError, match=rf"item {BATCH + 2} "):
        encode(texts, bpe)


def test_text_without_tokens():
    with pytest.raises(ItemSetError, match=r"item 1 \('  '\) encodes to no token"):
        encode(["red", "  "], make_words(unk_token="[UNK]"))


def test_unknown_token():
    tokenizer = make_words(unk_token="[UNK]")
    assert split(*encode(["red green", "blue"], tokenizer)) == [[1, 2], [3]]
    with pytest.raises(ItemSetError, match=r"item 2 \('red pink'\).*unknown token '\[UNK\]' \(id 0\)"):
        encode(["red green", "blue", "red pink"], tokenizer)
    # A tokenizer that names no unknown token: id 0 is a token like any other.
    assert split(*encode(["red pink"], make_words())) == [[1, 0]]


def test_unknown_token_that_is_also_the_end_of_text():
    text = "Toy<|endoftext|>"
    with pytest.raises(ItemSetError, match=r"item 1 .*endoftext"):
        encode(["Toy", text], make_bpe(unk_token="<|endoftext|>"))
    with pytest.raises(ItemSetError, match=r"item 0 .*endoftext.* end-of-sequence token|item 0 .*end-of-sequence"):
        encode([text], make_bpe())


def test_prefix_that_cannot_be_encoded(bpe):
    with pytest.raises(ItemSetError, match="prefix"):
        encode(["Toy"], bpe, prefix="\ud800")


def test_failure_that_no_text_is_to_blame_for():
    class Broken:
        unk_token_id = None

        def encode(self, text, **kwargs):
            raise RuntimeError("Already borrowed")

    with pytest.raises(ItemSetError, match=r"encodes no text .Broken raises RuntimeError: Already borrowed"):
        encode(["a", "b"], Broken())


def test_fingerprint_ignores_state_wrapping_and_path(bpe, tmp_path):
    expected = fingerprint(bpe)
    assert len(bytes.fromhex(expected)) == 32
    used = make_bpe(pad_token="<|endoftext|>", padding_side="left", model_max_length=3)
    used(["a", "a long text"], padding=True, truncation=True)
    used.backend_tokenizer.enable_truncation(2)
    assert fingerprint(used) == expected

    class Cached(type(bpe)):
        def get_vocab(self):
            return dict(reversed(super().get_vocab().items()))

    wrapped = copy.copy(bpe)
    wrapped.__class__ = Cached
    assert fingerprint(wrapped) == expected
    bpe.save_pretrained(tmp_path / "somewhere" / "else")
    loaded = load_tokenizer(str(tmp_path / "somewhere" / "else"))
    assert identify(loaded) == TokenizerId("else", expected)


def test_fingerprint_sees_every_kind_of_difference(bpe):
    def changed(change):
        tokenizer = make_bpe()
        backend = tokenizer.backend_tokenizer
        change(tokenizer, backend)
        return fingerprint(tokenizer)

    def without_last_merge(tokenizer, backend):
        state = json.loads(backend.to_str())
        state["model"]["merges"].pop(0)
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))

    prints = [
        fingerprint(bpe),
        fingerprint(make_bpe(vocab_size=290)),
        changed(lambda t, b: t.add_tokens(["<sid_1>"])),
        changed(lambda t, b: setattr(b, "normalizer", normalizers.Lowercase())),
        changed(lambda t, b: setattr(b, "normalizer", normalizers.NFKC())),
        changed(lambda t, b: setattr(b, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True))),
        changed(
            lambda t, b: setattr(
                b,
                "pre_tokenizer",
                pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
            )
        ),
        changed(without_last_merge),
    ]
    assert len(set(prints)) == len(prints)


def test_identify_names_the_model_or_its_folder(tmp_path, monkeypatch):
    tokenizer = make_bpe()
    assert identify(tokenizer).name == type(tokenizer).__name__
    (tmp_path / "models" / "smol").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path, name in [
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("/home/alice/models/smol/", "smol"),
        ("/models/.cache/smol", "smol"),
        ("../smol", "smol"),
        ("models/smol", "smol"),
        ("/h/hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/93efa2f0", "HuggingFaceTB/SmolLM2-135M"),
        ("/smol", "smol"),
        (".", type(tokenizer).__name__),
    ]:
        tokenizer.name_or_path = path
        assert identify(tokenizer).name == name


def test_fingerprint_asks_the_tokenizer_twice_however_large_it_is():
    vocabulary = {f"word{i}": i for i in range(150_000)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="word0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    asked = []

    class Counted(PreTrainedTokenizerFast):
        def get_vocab(self):
            asked.append("vocabulary")
            return super().get_vocab()

        def __call__(self, texts, **options):
            asked.append(len(texts))
            return super().__call__(texts, **options)

    tokenizer = Counted(tokenizer_object=backend)
    asked.clear()
    fingerprint(tokenizer)
    assert asked == ["vocabulary", len(_PROBES)]


@pytest.mark.parametrize("where", ["missing", "a/b/c", "~/no-such-folder-here", "empty", "file"])
def test_tokenizer_that_cannot_be_loaded(tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("{}")
    asked = str(tmp_path / "missing") if where == "missing" else where
    with pytest.raises(ItemSetError, match=r"tokenizer\.json"):
        load_tokenizer(asked)


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ItemSetError, match=r"pip install static-backend\[text\]"):
        load_tokenizer("anything")


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """A folder with Mistral's own tokenizer."""
    from mistral_common import __file__ as package

    folder = tmp_path_factory.mktemp("mistral")
    data = Path(package).parent / "data" / "tekken_240911.json"
    (folder / "tekken.json").symlink_to(data)
    (folder / "config.json").write_text('{"model_type": "mistral", "architectures": ["MistralForCausalLM"]}')
    return folder


@pytest.mark.slow
def test_a_tokenizer_with_the_engines_protocol_alone(mistral):
    from vllm.tokenizers.mistral import MistralTokenizer

    own, other = MistralTokenizer.from_pretrained(str(mistral)), load_tokenizer(str(mistral))
    texts = ["Alien", "千と千尋", " a space", "[INST]", "x" * 300]
    tokens, offsets = encode(texts, own)
    assert [decode(row, own) for row in split(tokens, offsets)] == texts
    assert fingerprint(own) == fingerprint(other)
    assert split(*encode(texts, other, prefix="b ")) == split(*encode(texts, own, prefix="b "))
    films = itemset.build_text(texts, own)
    assert films.lookup_text(texts, other).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ItemSetError, match=r"item 1 .* is empty"):
        encode(["a", ""], own)


def test_items_that_are_lists_of_tokens_by_name():
    tokenizer = make_bpe()
    tokenizer.add_tokens(["<a_1>", "<b_2>", "<c_3>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s_1>"]})
    items = [["<a_1>", "<b_2>"], ["<s_1>", "<c_3>", "<a_1>"], ["T", "o"]]
    ids = [tokenizer.convert_tokens_to_ids(item) for item in items]
    assert split(*encode_pieces(items, tokenizer)) == ids
    assert itemset.build(items, tokenizer=tokenizer, keys=["x", "y", "z"]).tokens(["x", "y", "z"]) == ids
    # What the vocabulary does not have is text in parts.
    assert split(*encode_pieces([["Toy ", "Story"]], tokenizer)) == [alone(tokenizer, "Toy Story")]
    for bad, words in [(["<a_1>", 5], "other values than strings"), (["<|endoftext|>"], "end-of-sequence")]:
        with pytest.raises(ItemSetError, match=f"item 1 .*{words}"):
            encode_pieces([["<a_1>"], bad], tokenizer)


@pytest.mark.parametrize(
    ("normalizer", "text", "back"),
    [
        (normalizers.NFC(), "Ame\u0301lie", "Amélie"),
        (normalizers.NFKC(), "ﬁlm", "film"),
        (normalizers.Lowercase(), "Alien", "alien"),
        (normalizers.Strip(), " Heat ", "Heat"),
    ],
)
def test_texts_that_come_back_altered_are_said(normalizer, text, back, recwarn):
    tokenizer, lossy = make_bpe(normalizer=normalizer), Lossy()
    encode([text, "same", text], tokenizer, lossy=lossy)
    assert (lossy.count, lossy.example) == (2, (text, back))
    with pytest.warns(itemset.ItemSetWarning, match="2 items come back from the tokenizer with another text"):
        itemset.build_text([text, "same", text + "x"], tokenizer)
    itemset.build_text(["same", "plain"], tokenizer)
    assert not recwarn.list


def test_all_bad_texts_are_told_at_once(bpe):
    with pytest.raises(ItemSetError) as error:
        encode(["a", "", "b", None, "<|endoftext|>", "c", ""], bpe, name="row {}")
    assert str(error.value).startswith("3 items are bad, such as row 1 ('') is empty: remove it; row 3 (None)")
