"""Which items a prompt holds, and that a request with `exclude_prompt` gets none of them."""

from __future__ import annotations

import asyncio
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny_tokenizer
from strategies import item_sets

import itemset
from itemset.select.prompt_items import TextIndex, in_tokens, words_of
from itemset.serving.catalogue import Catalogue, RefusedError
from itemset.serving.config import ModelLimits, StaticConfig, Words
from itemset.serving.front.admission import Checks
from itemset.serving.front.request import ItemRequest
from itemset.serving.front.selections import Chosen
from itemset.text import decoded

TITLES = [
    *("Alien", "Aliens", "Alien 3", "The Godfather", "The Godfather: Part II", "Up", "Amélie", "M*A*S*H"),
    *("Schindler's List (1993)", "2001: A Space Odyssey", "Who's Afraid of Virginia Woolf?", "ครูบ้านนอก"),
    *("Тихий Дон", "千と千尋の神隠し", "!!!"),
]  # fmt: skip
KEYS = [f"film {i}" for i in range(len(TITLES))]
CODES = [[1000 + a, 1010 + b, 1020 + c] for a in range(4) for b in range(4) for c in range(4)]


@settings(max_examples=150, deadline=None)
@given(items=item_sets(max_items=20), data=st.data())
def test_tokens_that_stand_in_the_prompt(items, data):
    """The oracle: each item is looked for at each place."""
    made = itemset.build(items)
    few = st.lists(st.sampled_from(items) | st.lists(st.integers(0, 70), max_size=3), max_size=8)
    prompt = [token for part in data.draw(few) for token in part]
    numbers, whole = in_tokens(made, prompt).tolist(), made.items()
    held = [item for item in whole if any(prompt[i : i + len(item)] == item for i in range(len(prompt)))]
    assert sorted(whole[number] for number in numbers) == sorted(held)


@pytest.mark.parametrize("prefix", ["", " ", "\n", "Title: ", "ID"])
@pytest.mark.parametrize(
    ("prompt", "held"),
    [
        ("Seen:\nAlien\nUp\n", ["Alien", "Up"]),
        ("- Aliens\n- Amélie", ["Aliens", "Amélie"]),
        ("I have seen “The Godfather”, (UP), and alien 3!", ["The Godfather", "Up", "Alien", "Alien 3"]),
        ("the godfather part ii", ["The Godfather", "The Godfather: Part II"]),
        ("昨日は千と千尋の神隠しを見た。", ["千と千尋の神隠し"]),
        ("ฉันชอบครูบ้านนอกมาก", ["ครูบ้านนอก"]),
        ("ТИХИЙ ДОН; schindlers list (1993)", ["Тихий Дон"]),
        ("Schindler\N{RIGHT SINGLE QUOTATION MARK}s  List — 1993, m a s h", ["Schindler's List (1993)", "M*A*S*H"]),
        (unicodedata.normalize("NFD", "AMÉLIE"), ["Amélie"]),
        ("Updating the alienation of 2001: a space", []),
        ("_Amélie_ and M_A_S_H", ["Amélie", "M*A*S*H"]),
        ("who's afraid of Virginia", []),
        ("!!! ...", []),
        ("", []),
    ],
)
def test_texts_that_stand_in_the_prompt(prefix, prompt, held):
    tokenizer = tiny_tokenizer()
    made = itemset.build_text(TITLES, tokenizer, keys=KEYS, prefix=prefix)
    index = TextIndex(made, lambda rows: decoded(rows, tokenizer))
    numbers = index.numbers_in(prompt)
    assert {made.keys[int(number)].as_py() for number in numbers} == {KEYS[TITLES.index(title)] for title in held}


def test_words_keep_their_vowel_signs():
    assert words_of("दिल") != words_of("दाल")
    assert words_of("x\u0323\u0301") != words_of("x")
    assert words_of("スター・ウォーズ") == words_of("スターウォーズ") == words_of("スター ウォーズ")
    assert words_of("\U00020000\U0001f600a") == ["\U00020000", "a"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_texts_are_found_word_by_word(data):
    """Against each item looked for in the folded prompt; some have equal words."""
    words = st.sampled_from(["a", "A", "b", "bb", "c.", "d-e", "é", "映", "画", "9"])
    separator = st.sampled_from([" ", ", ", "\n", ' "', "  "])
    texts = sorted(
        {
            separator_.join(row)
            for separator_, row in data.draw(
                st.lists(st.tuples(separator, st.lists(words, min_size=1, max_size=5)), min_size=1, max_size=12)
            )
        }
    )
    prompt = data.draw(separator).join(data.draw(st.lists(words, max_size=30)))
    made = itemset.build([[i] for i in range(len(texts))])
    index = TextIndex(made, lambda rows: [texts[row[0]] for row in rows])
    folded = f" {' '.join(words_of(prompt))} "
    expected = [i for i, text in enumerate(texts) if f" {' '.join(words_of(text))} " in folded]
    assert sorted(set(index.numbers_in(prompt).tolist())) == expected


class Front:
    """A front end's sets: of texts, of codes that know no tokenizer, and of codes that are tokens of their own."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = tiny_tokenizer()
        self.tokenizer.add_tokens([f"<{level}_{i}>" for level in "abc" for i in range(4)])
        codes = [[f"<a_{a - 1000}>", f"<b_{b - 1010}>", f"<c_{c - 1020}>"] for a, b, c in CODES]
        years = [1970 + i for i in range(len(TITLES))]
        texts = itemset.build_text(TITLES, self.tokenizer, keys=KEYS, attributes={"year": years})
        texts.save(folder / "films.itemset")
        itemset.build(CODES).save(folder / "codes.itemset")
        itemset.build(codes, tokenizer=self.tokenizer).save(folder / "named.itemset")
        paths = {name: str(folder / f"{name}.itemset") for name in ("films", "codes", "named")}
        self.config = StaticConfig.of({"item_sets": paths, "item_key_limit": 9})
        words, limits = Words("", "", "", ""), ModelLimits(2112, 256, 0, {1})
        self.checks = Checks(self.config, self.tokenizer, words, limits)

    def keys(self, name: str, prompt: Any, **selection: Any) -> set[Any]:
        """Those that are left."""
        asked = ItemRequest(item_set=name, selection={"exclude_prompt": True, **selection})
        made = self.checks.made(asked, prompt)
        beside = asyncio.run(self.checks.prepare(asked, prompt))
        assert beside.reference == made.reference
        return {key for keys in made.item_set.keys_of(made.item_set.items()) for key in keys}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Front:
    return Front(tmp_path_factory.mktemp("sets"))


def test_what_the_prompt_holds_joins_the_other_words(front):
    prompt = "I liked Alien 3, the Godfather, and UP."
    held = {KEYS[TITLES.index(title)] for title in ("Alien", "Alien 3", "The Godfather", "Up")}
    for sent in (prompt, front.tokenizer.encode(prompt)):
        assert front.keys("films", sent) == {*KEYS} - held
        assert front.keys("films", sent, exclude_keys=KEYS[8:]) == {*KEYS[:8]} - held
        assert front.keys("films", sent, only_keys=KEYS[:3]) == {KEYS[1]}
        assert front.keys("films", sent, item_filter={"year": {"$gte": 1972}}) == {*KEYS[2:]} - held
        both = {"item_filter": {"year": {"$gte": 1972}}, "exclude_keys": KEYS[6:10], "only_keys": KEYS[4:8]}
        assert front.keys("films", sent, **both) == {KEYS[4]}
    assert front.keys("films", "nothing of these") == {*KEYS}


def test_more_than_the_limit_of_keys_is_left_out(front):
    """`item_key_limit` is nine: it is of what a request sends."""
    history = [9, *CODES[5], *CODES[63], 7, *(token for code in CODES[20:40] for token in code), 2]
    assert front.keys("codes", history) == {*range(64)} - {5, 63, *range(20, 40)}
    text = "".join(f"<a_{a}>, <b_1>" for a in range(4)) + "".join(f"<a_3><b_{b}><c_2> " for b in range(3))
    left = {CODES.index([1003, 1010 + b, 1022]) for b in range(3)}
    for sent in (text, front.tokenizer.encode(text)):
        assert front.keys("named", sent) == {*range(64)} - left


def test_the_index_of_texts_is_made_once_and_counted(front, monkeypatch):
    made = []
    monkeypatch.setattr("itemset.serving.front.selections.TextIndex", lambda *args: made.append(1) or TextIndex(*args))
    catalogue = Catalogue(front.config)
    chosen = Chosen(catalogue, front.config, Words("", "", "", ""), front.tokenizer)
    before = catalogue.inline_bytes
    for prompt in ("nothing", "Up", "Alien", "nothing"):
        chosen.get({"exclude_prompt": True}, catalogue.reference("films"), prompt)
    assert made == [1]
    assert catalogue.inline_bytes - before > 40 * len(TITLES)
    catalogue.drop("films")
    assert catalogue.inline_bytes == before


@pytest.mark.parametrize("name", ["films", "codes", "named"])
def test_a_prompt_without_text_is_refused(front, name):
    for prompt in ((), []):
        with pytest.raises(RefusedError, match=r"embeddings are neither: send keys as exclude_keys") as raised:
            front.keys(name, prompt)
        assert raised.value.param == "exclude_prompt"
    assert front.keys(name, "")


def test_a_prompt_that_holds_the_whole_set_is_refused(front):
    for name, prompt in (("films", "\n".join(TITLES)), ("codes", [t for code in CODES for t in code])):
        chosen = {"only_keys": KEYS[:9]} if name == "films" else {}
        with pytest.raises(RefusedError, match="no item is left") as raised:
            front.keys(name, prompt, **chosen)
        assert raised.value.param == ("only_keys" if chosen else "exclude_prompt")
    with pytest.raises(RefusedError, match=r"exclude_prompt: no item is left: exclude_prompt leaves 0 of the 64"):
        front.keys("codes", [token for code in CODES for token in code])
