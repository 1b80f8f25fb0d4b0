"""Lists that a draft head makes inside a step of model runner V2: what the library makes of the same model and head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import test_vllm_thoughts as thoughts
import torch
from test_vllm_wide_lists import ROOMY, beside, given, items_of, prompt_of, same, ways
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.exceptions import VLLMValidationError

import itemset
from itemset.adapters.decode_loop import draft_search
from itemset.adapters.huggingface import draft_states
from itemset.draft_head.head import DraftHead
from itemset.errors import ItemSetError
from itemset.masking.arena import Arena, room_for
from itemset.serving.wire import EngineRequest, ListSpec, SetRef
from itemset.text import identify
from vllm_static.compat import list_params
from vllm_static.front.list_requests import RankingParams

LEVELS, VOCABULARY = 6, 2112
PLACEHOLDERS = range(2000, 2000 + LEVELS)
Item = tuple[tuple[int, ...], float]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A head of random weights, for the sets whose items have up to six tokens."""
    return saved(tmp_path_factory.mktemp("head") / "tiny.head", tiny_model)


def saved(path: Path, model: Path, **more: Any) -> Path:
    torch.manual_seed(3)
    about: dict[str, Any] = {"hidden_size": 128, "vocab_size": VOCABULARY}
    about["tokenizer"] = identify(AutoTokenizer.from_pretrained(model))
    head = DraftHead([range(100, 1000)] * LEVELS, PLACEHOLDERS, **about | more)
    with torch.no_grad():
        for weights in head.parameters():
            weights.normal_(std=0.2)
    head.save(path)
    return path


@pytest.fixture
def engine(engines: Any, tiny_model: Path, static: dict[str, Any], head: Path) -> Any:
    return engines("v2", tiny_model, **given(static, item_set_draft_head=str(head)), **ROOMY)


def in_library(
    model: Path, head: Path, item_set: itemset.ItemSet, length: int, width: int, k: int, renormalised: bool
) -> list[Item]:
    """A list of the library, from Hugging Face's own pass of the model."""
    torch.set_num_threads(1)
    loaded, drafts = AutoModelForCausalLM.from_pretrained(model).eval(), DraftHead.load(head)
    hidden = draft_states(loaded, drafts, torch.tensor([prompt_of(length)]))
    arena = Arena(room_for(item_set), "cpu")
    number = arena.acquire(item_set)
    if renormalised:
        beams = drafts.beams(arena, [number], item_set.level_plan, hidden, width=width, k=width, renormalised=True)
        tokens, scores = beams.found.tokens, beams.found.scores
    else:
        ranking = draft_search(arena, number, drafts, hidden, width=width)
        tokens, scores = ranking.tokens, ranking.scores
    rows = zip(tokens[0].tolist(), scores[0].tolist(), strict=True)
    return [(tuple(token for token in row if token >= 0), score) for row, score in rows if score > -torch.inf][:k]


def searched(llm: Any, lengths: list[int], k: int, extra: dict[str, Any]) -> list[tuple[list[Item], int, int]]:
    """In the engine's process: items of `LLM.beam_search`, the passes and the rounds."""
    prompts = [prompt_of(length) for length in lengths]
    params = RankingParams(beam_width=k, max_tokens=40, extra_args=extra)
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [
        ([(tuple(one.tokens[length:-1]), one.cum_logprob) for one in output.sequences], output.passes, output.rounds)
        for output, length in zip(outputs, lengths, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "width", "k", "renormalised"),
    [("fixed", 16, 10, False), ("large", 40, 12, False), ("labels", 150, 150, False), ("fixed", 9, 9, True)],
)
def test_the_list_of_the_library(engine, tiny_model, head, named_sets, name, width, k, renormalised):
    """For prompts that end at the end of a block of 32, beside it and, with their placeholders, over it."""
    lengths = [3, 26, 31, 32, 33, 70, 70]
    item_set = itemset.load(named_sets[name].path)
    extra = {"item_set": name, "width": width, "renormalised": renormalised}
    for length, (found, passes, rounds) in zip(lengths, engine.call(searched, lengths, k, extra), strict=True):
        same(found, in_library(tiny_model, head, item_set, length, width, k, renormalised))
        assert (passes, rounds) == (1, 1)
        assert {tokens for tokens, _ in found} <= named_sets[name].items


def test_a_connector_loads_no_prompt_of_a_head(engines, engine, tiny_model, static, head, tmp_path):
    """It has the KV, and not the hidden states that the head reads."""
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    connector["kv_connector_extra_config"] = {"shared_storage_path": str(tmp_path)}
    options = given(static, item_set_draft_head=str(head))
    other = engines("v2", tiny_model, **options, **ROOMY, kv_transfer_config=connector)
    ((expected, _, _),) = engine.call(searched, [158], 10, {"item_set": "fixed", "width": 16})
    for _ in range(2):
        ((found, _, _),) = other.call(searched, [158], 10, {"item_set": "fixed", "width": 16})
        same(found, expected)
        other.call(forgetting)


def forgetting(llm: Any) -> None:
    assert llm.reset_prefix_cache()


def test_the_list_after_a_thought(engine):
    """The head reads the states after the marker in the request that has thought: placeholders follow it there."""
    extra = thoughts.asked("fixed", thoughts.TWO, width=16)
    made, requests, _ = engine.call(thoughts.think, extra, [3, 40], 1)
    thoughts.same(made, engine.call(thoughts.in_two, extra, [3, 40], 1))
    assert requests == 2
    assert all(item["passes"] == 1 for _, _, items in made for item in items)


def test_items_that_are_left_by_a_filter_and_exclusions(engine, tiny_model, head, named_sets):
    whole = itemset.load(named_sets["tagged"].path)
    assert whole.longest <= LEVELS
    keys = whole.keys.to_pylist()[:4]
    for extra in ({"item_filter": {"tag": {"$lt": 1}}}, {"exclude_keys": keys}, {"only_keys": keys}):
        ((found, passes, _),) = engine.call(searched, [40], 3, {"item_set": "tagged", "width": 30} | extra)
        part = itemset.view(
            whole, extra.get("item_filter"), exclude_keys=extra.get("exclude_keys"), only_keys=extra.get("only_keys")
        )
        same(found, in_library(tiny_model, head, part, 40, 30, 3, False))
        assert passes == 1


def test_a_prompt_in_chunks(engines, engine, tiny_model, static, head, named_sets):
    """Whose last token and placeholders fall into several steps, beside other prompts."""
    small = engines(
        "v2", tiny_model, **given(static, item_set_draft_head=str(head)), **ROOMY, max_num_batched_tokens=32
    )
    lengths = [93, 20, 62, 100]
    extra = {"item_set": "fixed", "width": 12}
    made, expected = (one.call(searched, lengths, 5, extra) for one in (small, engine))
    for (found, *_), (items, *_) in zip(made, expected, strict=True):
        same(found, items)


def cached(llm: Any, length: int) -> list[tuple[int, list[Item]]]:
    """A list twice, whose prompt the prefix cache has the second time."""
    prompt = {"prompt_token_ids": [*prompt_of(length), *PLACEHOLDERS]}
    llm.reset_prefix_cache()
    params = list_params(EngineRequest(SetRef("fixed"), ListSpec(5, 16, 1, placeholders=LEVELS)))
    outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2)]
    return [(output.num_cached_tokens, items_of(output)) for output in outputs]


@pytest.mark.parametrize(("length", "known"), [(90, 64), (96, 64), (97, 96), (20, 0)])
def test_the_end_of_a_prompt_is_never_taken_from_the_prefix_cache(engine, length, known):
    """Blocks of 32 tokens: with the placeholders the third is full in the first case, but its hidden states are not
    kept."""
    (none, first), (some, second) = engine.call(cached, length)
    assert (none, some) == (0, known)
    same(second, first)


def test_neighbours_stay_as_they_are(engine):
    assert engine.call(beside_drafts, 5) == engine.call(beside, 0)


def beside_drafts(llm: Any, lists: int) -> list[list[int]]:
    """`beside`, with lists that the head makes."""
    import test_vllm_wide_lists as wide

    def asked(name: str, width: int, k: int, renormalised: bool) -> Any:
        short = {"ragged": "fixed"}.get(name, name)
        spec = ListSpec(k, width, 1, renormalised=renormalised, placeholders=LEVELS)
        return list_params(EngineRequest(SetRef(short), spec))

    with mock.patch.object(wide, "asked", asked):
        return beside(llm, lists)


def test_which_lists_the_head_makes(engine):
    """Those of registered sets with short items; neither an exact list nor one that ends early."""
    sets = [("fixed", {}), ("ragged", {}), ("fixed", {"exact": True, "width": 300}), ("fixed", {"max_passes": 10})]
    lists = [{"extra_args": {"item_set": name, **more}} for name, more in sets]
    _, counted = engine.call(ways, lists)
    assert counted == {"draft head": 1, "one request": 1, "exact": 1, "max_passes": 1}


def test_no_room_for_the_placeholders_is_said(engine):
    """The context has 256 tokens."""
    with pytest.raises(VLLMValidationError, match="shorten the prompt"):
        engine.call(searched, [247], 2, {"item_set": "fixed"})
    ((found, *_),) = engine.call(searched, [240], 2, {"item_set": "fixed"})
    assert len(found) == 2


def test_a_head_of_another_model_ends_the_start(engines, tiny_model, static, tmp_path):
    bad = saved(tmp_path / "other.head", tiny_model, hidden_size=64)
    with pytest.raises(ItemSetError, match=r"other\.head .*a hidden size of 64, this one has 128"):
        engines("v2", tiny_model, **given(static, item_set_draft_head=str(bad)), **ROOMY)


def test_an_engine_without_lists_inside_refuses_a_head(engines, tiny_model, static, head):
    with pytest.raises(ItemSetError, match=r"needs lists inside the engine, .*: model runner V1\. Omit"):
        engines("v1", tiny_model, **given(static, item_set_draft_head=str(head)))
    with pytest.raises(ItemSetError, match=r"no\.head cannot be read"):
        engines("v2", tiny_model, **given(static, item_set_draft_head=str(head.with_name("no.head"))), **ROOMY)


def test_lists_over_http(servers, tiny_model, named_sets, head, engine):
    flags = ("--guided-decoding-backend", "static", "--item-set", f"fixed={named_sets['fixed'].path}")
    options = ("--additional-config", json.dumps({"item_set_draft_head": str(head), "ranked_list_beams": 4}))
    server = servers("v2", tiny_model, arguments=(*flags, *options))
    asked = {"model": "tiny", "use_beam_search": True, "n": 8, "width": 16, "max_tokens": 20, "item_set": "fixed"}
    status, answer = server.post("/v1/completions", asked | {"prompt": prompt_of(30)})
    assert status == 200, answer
    ((expected, *_),) = engine.call(searched, [30], 8, {"item_set": "fixed", "width": 16})
    scores = [choice["item"]["score"] for choice in answer["choices"]]
    assert scores == pytest.approx([score for _, score in expected], abs=1e-4)
    assert answer["choices"][0]["item"]["passes"] == 1
