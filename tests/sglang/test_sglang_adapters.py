"""LoRA adapters in the real SGLang: answers, lists and draws have those that they name, also one after another."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter
from engine_words import EOS, PROMPT
from ranking import oracle_of, weights_of
from server_tests import MESSAGES, check_refused, item_of
from servers import HttpServer, wait_for
from sets import named_flags
from sglang_engines import found_in
from sglang_servers import start_expecting_failure
from transformers import AutoTokenizer

import itemset

CODES = [f"<{part}_{i}>" for part in "ab" for i in range(8)]
SEMANTIC = [f"<a_{i}><b_{j}>" for i in range(8) for j in range(i, 8)]
ADAPTERS = (None, "shop", "other")
Adapters = dict[str, tuple[Path, Path]]


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """The path of each, and that of the model with its weights. The first has tokens of its own, which the model has
    room for."""
    made = {name: make_adapter(tiny_model, tmp_path_factory.mktemp(name), i) for i, name in enumerate(ADAPTERS[1:])}
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens(CODES)
    tokenizer.save_pretrained(made["shop"][0])
    return made


@pytest.fixture(scope="module")
def semantic(adapters: Adapters, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("semantic") / "codes.itemset"
    itemset.build_text(SEMANTIC, AutoTokenizer.from_pretrained(adapters["shop"][0])).save(path)
    return path


@pytest.fixture
def server(servers, tiny_model, named_sets, adapters, semantic) -> HttpServer:
    paths = [f"{name}={adapter}" for name, (adapter, _) in adapters.items()]
    more = ("--enable-lora", "--lora-paths", *paths, "--max-lora-rank", "8", "--lora-backend", "torch_native")
    sets = [*named_flags(named_sets), f"codes={semantic}"]
    arguments = ("--grammar-backend", "static", "--tokenizer-path", str(adapters["shop"][0]), *more, *sets)
    return servers(tiny_model, arguments=arguments)


@pytest.fixture(scope="module")
def models(tiny_model: Path, adapters: Adapters) -> dict[str | None, Path]:
    return {None: tiny_model} | {name: merged for name, (_, merged) in adapters.items()}


def asked(server: HttpServer, adapter: str | None, **params: Any) -> Any:
    body = {"input_ids": PROMPT, "lora_path": adapter, "sampling_params": {"max_new_tokens": 20} | params}
    status, answer = server.post("/generate", body)
    assert status == 200, answer
    return answer


def ranked(server: HttpServer, adapter: str | None) -> list[tuple[float, tuple[int, ...]]]:
    """Of all items, by rounds."""
    return found_in(asked(server, adapter, item_set="fixed", beam_width=300, n=6)).items


def check(found: list[tuple[float, tuple[int, ...]]], wanted: list[tuple[float, tuple[int, ...]]]) -> None:
    assert [item[:-1] for _, item in found] == [item for _, item in wanted[:6]]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted[:6]], abs=2e-3)


def test_lists_have_their_adapter_beside_others(server, named_sets, models):
    items = named_sets["fixed"].items
    wanted = {name: oracle_of(path)(items) for name, path in models.items()}
    assert len({tuple(item for _, item in one[:6]) for one in wanted.values()}) == 3
    with ThreadPoolExecutor(3) as pool:
        for name, found in zip(ADAPTERS, pool.map(lambda one: ranked(server, one), ADAPTERS), strict=True):
            check(found, wanted[name])


def test_answers_and_draws_have_their_adapter_beside_others(server, named_sets, models):
    items = named_sets["ragged"].items
    words = {"item_set": "ragged", "temperature": 1.0}
    with ThreadPoolExecutor(9) as pool:
        sampled = pool.map(lambda one: asked(server, one, **words, return_set_weight=True), ADAPTERS * 2)
        drawn = pool.map(lambda one: asked(server, one, **words, draws=2), ADAPTERS)
        for name, answer in zip(ADAPTERS * 2, sampled, strict=True):
            tokens = tuple(token for token in answer["output_ids"] if token != EOS)
            weight, _ = weights_of(models[name])(items, tokens)
            assert answer["meta_info"]["item"]["set_weight"] == pytest.approx(weight, abs=2e-3)
        for name, answer in zip(ADAPTERS, drawn, strict=True):
            for one in answer["meta_info"]["beam_results"]:
                ((score, _),) = oracle_of(models[name])([tuple(one["output_ids"][:-1])])
                assert one["meta_info"]["sequence_score"] == pytest.approx(score, abs=2e-3)


def test_openai_endpoints_name_the_adapter_beside_the_model(server, models):
    prompt = AutoTokenizer.from_pretrained(models[None]).encode("p")
    several: tuple[dict[str, Any], ...] = ({}, {"use_beam_search": True, "n": 2}, {"draws": 2})
    for name in ADAPTERS:
        scores = oracle_of(models[name], prompt)
        model = "tiny" if name is None else f"tiny:{name}"
        for more in several:
            given = {"model": model, "max_tokens": 20, "item_set": "prefixes", "return_token_ids": True, **more}
            for path, words in (("/v1/completions", {"prompt": "p"}), ("/v1/chat/completions", {"messages": MESSAGES})):
                status, answer = server.post(path, given | words)
                assert status == 200, answer
                assert all(choice["item"] is not None for choice in answer["choices"])
                for choice in answer["choices"] if more and "prompt" in words else ():
                    score = choice["item"].get("score", choice["item"].get("logprob"))
                    assert score == pytest.approx(scores([item_of(choice)])[0][0], abs=2e-3)
    check_refused(server, "/v1/completions", {"model": "tiny:none", "prompt": "p", "item_set": "fixed"}, "adapter")


def test_tokens_of_an_adapter_are_served_with_its_tokenizer(server):
    for name in ADAPTERS:
        for more in ({}, {"beam_width": 5}, {"draws": 3}):
            answer = asked(server, name, item_set="codes", temperature=1.0, **more)
            texts = [one["text"] for one in answer["meta_info"].get("beam_results", [answer])]
            assert len(texts) == max(1, *more.values(), 0)
            assert set(texts) <= set(SEMANTIC)


def test_tokens_of_an_adapter_without_its_tokenizer_are_refused_at_the_start(tiny_model, adapters, semantic, tmp_path):
    """Or with it, where the model has no room for them."""
    tokenizer = AutoTokenizer.from_pretrained(adapters["shop"][0])
    tokenizer.add_tokens([f"<c_{i}>" for i in range(2000)])
    tokenizer.save_pretrained(tmp_path)
    itemset.build_text(["<c_1990>", "<c_1991>"], tokenizer).save(tmp_path / "codes.itemset")
    for path, more, message in (
        (semantic, (), "or start with the set's own, such as an adapter's with more tokens"),
        (tmp_path / "codes.itemset", ("--tokenizer-path", str(tmp_path)), "tokens that an adapter adds need a model"),
    ):
        flags = ("--grammar-backend", "static", "--item-set", f"codes={path}", *more)
        assert message in start_expecting_failure(tiny_model, arguments=flags).splitlines()[-1]


def test_an_adapter_takes_the_name_of_another(server, named_sets, models, adapters):
    """The prefix cache tells the two apart; a list by rounds has one of them from its first round to its last."""
    items = named_sets["fixed"].items
    for of in ("other", "shop"):
        load(server, "shop", adapters[of][0])
        check(ranked(server, "shop"), oracle_of(models[of])(items))
    answers = list[Any]()
    body = {"input_ids": PROMPT, "lora_path": "shop", "item_set": "large"}
    words = {"beam_width": 200, "exact": True, "max_new_tokens": 20}
    client = threading.Thread(
        target=lambda: answers.append(server.post("/generate", body | {"sampling_params": words}))
    )
    before = server.log().count("Prefill batch")
    client.start()
    wait_for(lambda: server.log().count("Prefill batch") > before + 5)
    load(server, "shop", adapters["other"][0])
    client.join()
    ((status, answer),) = answers
    assert status == 400
    assert "the adapter 'shop' was loaded anew while this list was made: ask again" in str(answer)
    load(server, "shop", adapters["shop"][0])


def load(server: HttpServer, name: str, path: Path) -> None:
    """Whoever asks for it meanwhile lets SGLang load the old one again: then once more."""

    def loaded() -> bool:
        server.post("/unload_lora_adapter", {"lora_name": name})
        return server.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})[0] == 200

    wait_for(loaded)
