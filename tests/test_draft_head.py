"""A draft head: its beams against all items scored one by one, its file, and the one pass of a model before it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from models import SMALL
from safetensors.torch import load_file, save_file
from test_kernels import NothingReadBack
from views import KINDS, made

import itemset
from itemset.adapters.decode_loop import draft_search
from itemset.draft_head.head import DraftHead
from itemset.draft_head.training import Schedule, train_head
from itemset.errors import ItemSetError
from itemset.masking.arena import Arena, room_for
from itemset.text import TokenizerId

LEVELS, SIZE, VOCABULARY = 4, 16, 50
CODES = [range(10, 20), range(18, 30), range(5, 40, 3), range(10, 14)]
Item = tuple[int, ...]


def head_of(codes: Sequence[Any] = CODES, seed: int = 0, **more: Any) -> DraftHead:
    """A head of random weights, large enough that the state matters."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {"hidden_size": SIZE, "vocab_size": VOCABULARY}
    head = DraftHead(codes, range(40, 40 + len(codes)), **options | more)
    with torch.no_grad():
        for weights in head.parameters():
            weights.normal_(std=0.5)
    return head.eval().requires_grad_(False).to(DEVICE)


def hidden_of(rows: int, seed: int = 1, levels: int = LEVELS) -> torch.Tensor:
    return torch.randn(rows, levels + 1, SIZE, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def score_by_hand(head: DraftHead, hidden: torch.Tensor, item: Sequence[int]) -> float:
    """One item's score by the equations alone, in float64. hidden: [L + 1, d]."""
    weights = {name: value.cpu().double() for name, value in head.state_dict().items()}
    states = hidden.cpu().double()
    state, total = states[0], 0.0
    for level, token in enumerate(item):
        codes = weights[f"codes_{level}"].tolist()
        if token not in codes:
            return float("-inf")
        log = (weights[f"logits.{level}.weight"] @ (states[level + 1] + state)).log_softmax(0)
        total += log[codes.index(token)].item()
        if level + 1 < head.levels:
            chosen = weights[f"embeddings.{level}.weight"][codes.index(token)]
            cell = {
                part: weights[f"transitions.{level}.{part}"]
                for part in ("weight_ih", "bias_ih", "weight_hh", "bias_hh")
            }
            state = torch.tanh(
                cell["weight_ih"] @ chosen + cell["bias_ih"] + cell["weight_hh"] @ state + cell["bias_hh"]
            )
    return total


def by_hand(head: DraftHead, hidden: torch.Tensor, items: Sequence[Sequence[int]]) -> list[tuple[float, Item]]:
    """All items of finite score, best first."""
    scored = [(score_by_hand(head, hidden, item), item) for item in {tuple(item) for item in items}]
    return sorted((one for one in scored if one[0] > float("-inf")), reverse=True)


def placed(
    items: Sequence[Sequence[int]], kind: str = "whole", kernels: Any = "auto"
) -> tuple[Arena, int, itemset.ItemSet]:
    built = made([list(item) for item in items], kind)
    arena = Arena(room_for(built), DEVICE, kernels=kernels)
    return arena, arena.acquire(built), built


def listed(tokens: torch.Tensor) -> list[Item]:
    return [tuple(token for token in row if token >= 0) for row in tokens.tolist()]


KERNELS = ["auto", pytest.param("triton", marks=pytest.mark.slow)]
ITEMS = st.lists(
    st.lists(st.integers(0, VOCABULARY - 1) | st.sampled_from([10, 11, 12, 20, 23]), min_size=1, max_size=LEVELS),
    min_size=1,
    max_size=25,
)


@given(ITEMS, st.sampled_from(KINDS))
@settings(max_examples=60, deadline=None)
@pytest.mark.slow
def test_a_beam_as_wide_as_the_set_ranks_all_items(items: list[list[int]], kind: str) -> None:
    """Items of any lengths up to the head's, and prefixes of each other. Tokens that are no codes have no score."""
    arena, number, _ = placed(items, kind)
    head, hidden = head_of(), hidden_of(3)
    ranking = draft_search(arena, number, head, hidden, width=25)
    assert ranking.tokens.shape == (3, 25, LEVELS)
    for row in range(3):
        expected = by_hand(head, hidden[row], items)
        found = int(ranking.found[row])
        assert listed(ranking.tokens[row, :found]) == [item for _, item in expected]
        torch.testing.assert_close(
            ranking.scores[row, :found].cpu(), torch.tensor([score for score, _ in expected], dtype=torch.float32)
        )
        assert (ranking.tokens[row, found:] == -1).all()


def catalogue(count: int = 300, seed: int = 3) -> list[Item]:
    random = torch.Generator().manual_seed(seed)
    columns = [torch.tensor(row)[torch.randint(len(row), (count,), generator=random)] for row in map(list, CODES)]
    return sorted({tuple(row) for row in torch.stack(columns, 1).tolist()})


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("width", [1, 3, 20])
def test_a_narrow_beam_finds_items_with_their_own_scores(width: int, kernels: Any) -> None:
    items = catalogue()
    arena, number, _ = placed(items, kernels=kernels)
    head, hidden = head_of(), hidden_of(2)
    ranking = draft_search(arena, number, head, hidden, width=width)
    for row in range(2):
        found = listed(ranking.tokens[row])
        assert len(set(found)) == width
        assert set(found) <= set(items)
        scores = torch.tensor([score_by_hand(head, hidden[row], item) for item in found], dtype=torch.float32)
        torch.testing.assert_close(ranking.scores[row].cpu(), scores)
        assert (scores.diff() <= 1e-5).all()


@pytest.mark.parametrize("kernels", KERNELS)
def test_renormalised_scores_are_shares_of_the_legal_tokens(kernels: Any) -> None:
    """Here of all items: so they add up to one."""
    items = catalogue(40)
    arena, number, built = placed(items, kernels=kernels)
    head, hidden = head_of(), hidden_of(2)
    beams = head.beams(arena, [number] * 2, built.level_plan, hidden, width=40, k=len(items), renormalised=True)
    torch.testing.assert_close(beams.found.scores.exp().sum(1).cpu(), torch.ones(2, dtype=torch.float64))
    assert set(listed(beams.found.tokens[1])) == set(items)


@pytest.mark.parametrize("kernels", KERNELS)
def test_only_renormalised_lists_have_tails_that_the_head_cannot_draft(kernels: Any) -> None:
    """Here one of other tokens, longer than the head; before it stands alone, only codes have a probability."""
    items = [(10, 20, 5, 10), (11, 20, 49, 49, 49), (11, 29, 5, 11), (49, 20, 5, 10), (49, 21, 5, 10)]
    arena, number, built = placed(items, kernels=kernels)
    for renormalised, expected in ((False, {0, 2}), (True, {0, 1, 2})):
        options: dict[str, Any] = {"width": 5, "k": 5, "renormalised": renormalised}
        found = head_of().beams(arena, [number], built.level_plan, hidden_of(1), **options).found
        assert set(listed(found.tokens[0, : len(expected)])) == {items[at] for at in expected}
        assert found.scores[0].isfinite().sum() == len(expected)


def test_nothing_is_read_back() -> None:
    arena, number, built = placed(catalogue())
    head, hidden = head_of(), hidden_of(2)
    plan = built.level_plan
    with NothingReadBack():
        head.beams(arena, [number] * 2, plan, hidden, width=8, k=5)


def test_lists_of_several_sets_at_once() -> None:
    """Of one plan's shapes, each with its own items."""
    one = catalogue(100, seed=5)
    built = [made([list(item) for item in items], "whole") for items in (one[::2], one)]
    arena = Arena(sum(map(room_for, built)), DEVICE)
    numbers, head, hidden = [arena.acquire(each) for each in built], head_of(), hidden_of(1).expand(2, -1, -1)
    beams = head.beams(arena, numbers, built[1].level_plan, hidden, width=100, k=100)
    for row, items in enumerate((one[::2], one)):
        assert listed(beams.found.tokens[row, : len(items)]) == [item for _, item in by_hand(head, hidden[row], items)]


def test_a_head_that_was_saved_gives_the_same_list(tmp_path: Path) -> None:
    head = head_of(tokenizer=TokenizerId("tiny", "ab" * 32))
    head.save(tmp_path / "head.safetensors")
    again = DraftHead.load(tmp_path / "head.safetensors", DEVICE)
    assert (again.placeholders, again.tokenizer) == (head.placeholders, head.tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["head.safetensors"]
    for wrong in (tmp_path / "none" / "head.safetensors", tmp_path):
        with pytest.raises(ItemSetError, match=r"cannot be written .*: name a file in a folder"):
            head.save(wrong)
    arena, number, _ = placed(catalogue())
    first, second = (draft_search(arena, number, one, hidden_of(2), width=9) for one in (head, again))
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.scores, second.scores)


def test_a_head_learns_items_that_follow() -> None:
    """Of four prompts, each with an item of its own: what the loss teaches is what the beam finds."""
    items = catalogue()[::60][:4]
    head, hidden = head_of().requires_grad_(True), hidden_of(4)
    tokens = torch.tensor(items, device=DEVICE)
    optimizer = torch.optim.Adam(head.parameters(), 0.05)
    expected = -sum(score_by_hand(head, hidden[row], item) for row, item in enumerate(items)) / 4
    assert abs(head.loss(hidden, tokens).item() - expected) < 1e-3
    for token in (4, 13, 49):  # below, between and above the codes of level 2
        with pytest.raises(ItemSetError, match=f"token {token} is no code of level 2 of the draft head"):
            head.loss(hidden[:1], torch.tensor([[10, 20, token, 11]], device=DEVICE))
    for _ in range(60):
        optimizer.zero_grad()
        head.loss(hidden, tokens).backward()
        optimizer.step()
    arena, number, _ = placed(catalogue())
    assert listed(draft_search(arena, number, head, hidden, width=4).tokens[:, 0]) == items


def test_a_head_that_does_not_fit_says_what_to_do() -> None:
    head = head_of(tokenizer=TokenizerId("tiny", "ab" * 32), name="the draft head films.head")
    head.check(hidden_size=SIZE, vocab_size=VOCABULARY, fingerprint="ab" * 32)
    with pytest.raises(ItemSetError, match="a model with a hidden size of 16, this one has 32: give"):
        head.check(hidden_size=32)
    with pytest.raises(ItemSetError, match="a model with a vocabulary of 50, this one has 51: give"):
        head.check(vocab_size=51)
    with pytest.raises(ItemSetError, match=r"films\.head was trained with the tokenizer tiny \((ab)*\), not"):
        head.check(fingerprint="cd" * 32)
    head.check_set(itemset.build([[1, 2, 3, 4]]))
    with pytest.raises(ItemSetError, match=r"films\.head drafts 4 tokens, and the item set has an item of 5: train"):
        head.check_set(itemset.build([[1, 2, 3, 4, 5]]))
    arena, number, built = placed([[10, 20]])
    with pytest.raises(ValueError, match=r"takes \(1, 5, 16\) for these lists"):
        head.beams(arena, [number], built.level_plan, hidden_of(2), width=1, k=1)


@pytest.mark.parametrize(
    ("codes", "placeholders"), [([[1], []], [2, 3]), ([[1], [50]], [2, 3]), ([[1], [2]], [3]), ([], []), ([[1]], [-1])]
)
def test_a_head_of_other_tokens_is_refused(codes: list[list[int]], placeholders: list[int]) -> None:
    with pytest.raises(ItemSetError, match=r"the draft head has .*: give"):
        DraftHead(codes, placeholders, hidden_size=SIZE, vocab_size=VOCABULARY)


def changed(path: Path, about: Callable[[dict[str, str]], None], **tensors: torch.Tensor) -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    about(metadata)
    save_file(load_file(path) | tensors, path, metadata)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: path.unlink(), "cannot be read .*: give a safetensors file"),
    "of another kind": (lambda path: path.write_bytes(b"x" * 100), "cannot be read .*: give a safetensors file"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "cannot be read"),
    "a model": (lambda path: save_file({"a": torch.zeros(1)}, path), "is no draft head: give a file"),
    "newer": (lambda path: changed(path, lambda about: about.update(version="2")), "has the version 2, .* reads 1"),
    "without a word": (lambda path: changed(path, lambda about: about.pop("levels") and None), "is damaged .*: write"),
    "of other shapes": (
        lambda path: changed(path, lambda about: None, **{"logits.0.weight": torch.zeros(3, SIZE)}),
        "is damaged",
    ),
    "of more placeholders": (
        lambda path: changed(path, lambda about: about.update(placeholders=json.dumps([1, 2]))),
        "has 4 levels and 2 placeholders",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_is_no_head_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "films.head"
    head_of().save(path)
    spoil, message = BAD[kind]
    spoil(path)
    with pytest.raises(ItemSetError, match=f"films.head.*{message}"):
        DraftHead.load(path)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    small = SMALL | {"hidden_size": SIZE, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, **small)
    return LlamaForCausalLM(config).eval().to(DEVICE)


def test_one_pass_gives_the_states_of_each_prompt(model: Any) -> None:
    """Also of prompts of different lengths, padded at the left."""
    from itemset.adapters.huggingface import draft_states

    head, prompts = head_of(), [[3, 4, 5, 6, 7], [8, 9]]
    padded = torch.tensor([prompts[0], [0, 0, 0, *prompts[1]]], device=DEVICE)
    mask = torch.tensor([[1] * 5, [0] * 3 + [1] * 2], device=DEVICE)
    together = draft_states(model, head, padded, mask)
    assert together.shape == (2, LEVELS + 1, SIZE)
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt, *head.placeholders]], device=DEVICE)
        with torch.no_grad():
            alone = model(ids, output_hidden_states=True).hidden_states[-1][0, len(prompt) - 1 :]
        torch.testing.assert_close(together[row], alone)
    with pytest.raises(ItemSetError, match="a hidden size of 8, this one has 16"):
        draft_states(model, head_of(hidden_size=8), padded, mask)


@pytest.fixture
def words() -> Any:
    """A tokenizer of 40 tokens and an end token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{token}": token for token in range(40)} | {"<e>": 40}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>")


def test_training_keeps_the_rows_that_a_model_has_beyond_its_tokenizer(model: Any, words: Any) -> None:
    """An item may have tokens there. The placeholders are the first of them."""
    items = [[44, 2], [45, 4], [44, 3]]
    head = train_head(model, words, itemset.build(items), [items] * 2, Schedule(2, 1, 2), log=lambda _: None)
    assert head.placeholders == (41, 42)
    assert head.vocab_size == model.get_input_embeddings().num_embeddings == VOCABULARY


def test_what_cannot_be_learnt_changes_nothing(model: Any, words: Any) -> None:
    good = [[1, 2], [3, 4], [5, 6]]
    bad: dict[str, tuple[list[list[int]], list[list[int]], Schedule]] = {
        "token id 41, the tokenizer 41 tokens and the model 50": ([[41, 2]], [[41, 2]] * 2, Schedule(2)),
        "token id 50, ": ([[50, 2]], [[50, 2]] * 2, Schedule(2)),
        r"tokens \[3, 5\] .number 1 of those asked. are no item": (good, [[1, 2], [3, 5]], Schedule(2)),
        r"tokens \[3\] .number 1 of those asked. are no item": (good, [[1, 2], [3]], Schedule(2)),
        "window=1, .*make the window at least 2": (good, good, Schedule(1)),
        "steps=0, .*others at least 1": (good, good, Schedule(2, 0)),
        "no history has 4 items": (good, good, Schedule(4)),
    }
    for message, (items, history, schedule) in bad.items():
        with pytest.raises(ItemSetError, match=message):
            train_head(model, words, itemset.build(items), [history], schedule)
        assert (len(words), model.get_input_embeddings().num_embeddings) == (41, VOCABULARY)


def test_the_command_trains_a_head_for_a_model(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture) -> None:
    """What it saves opens together; what it cannot use is named with the mend."""
    from transformers import AutoModelForCausalLM

    from itemset import cli

    items = torch.randint(100, 300, (40, 3), generator=torch.Generator().manual_seed(0))
    itemset.build(items.numpy()).save(index := tmp_path / "ids.itemset")
    (histories := tmp_path / "histories.jsonl").write_text(f"{list(range(9))}\n[4, 2]\n{list(range(30, 36))}\n")
    given = ["train-head", str(index), str(tiny_model), str(tmp_path / "taught"), "--histories", str(histories)]
    given += ["--steps", "2", "--batch", "2", "--window"]
    assert cli.main([*given, "10"]) == 1
    assert "no history has 10 items, the longest has 9: give a smaller window" in capsys.readouterr().err
    assert cli.main([*given, "5"]) == 0
    head = DraftHead.load(tmp_path / "taught" / "draft_head.safetensors")
    head.check_set(itemset.load(index))
    assert [codes.tolist() for codes in head.codes] == [column.unique().tolist() for column in items.T]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "taught")
    head.check(hidden_size=model.config.hidden_size, vocab_size=model.get_input_embeddings().num_embeddings)
    assert cli.main([*given, "5"]) == 1
    assert "is there already: name a new folder" in capsys.readouterr().err
    given[3] = str(tmp_path / "again")
    for lines, message in (
        ("[1, 2, 3]\n[1, 99]\n", "histories.jsonl: no item has the key 99: write a list of the set's keys in each"),
        ("[1, 2]\n{}\n", "histories.jsonl, line 2: an object is no list"),
        ("[1, 2]\n[1\n", "histories.jsonl, line 2: Expecting"),
    ):
        histories.write_text(lines)
        assert cli.main([*given, "2"]) == 1
        assert message in capsys.readouterr().err
    itemset.build([[1], [2, 3]]).save(index)
    histories.write_text("[0, 1]\n")
    assert cli.main([*given, "2"]) == 1
    assert "items of 1 to 2 tokens: give one whose items have as many" in capsys.readouterr().err
