"""Ranked lists after prompts with images, whose positions have several dimensions, and after sounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import test_vllm_thoughts as thoughts
import test_vllm_wide_lists as plain
from models import SMALL, cached, marks_of, tiny_tokenizer
from test_vllm_beam_attention import TRITON, by_graphs
from test_vllm_wide_lists import ROOMY, ROUNDS, Item, fixed_shapes, given, same
from vllm import SamplingParams

from vllm_static.front.list_requests import RankingParams

MARKS = {"image_token": "<image>", "vision_start_token": "<begin>", "vision_end_token": "<end>"}
FIRST_MARK = 1100  # after the tokens of all items
IMAGE, BEGIN, END = range(FIRST_MARK, FIRST_MARK + len(MARKS))
Sizes = tuple[tuple[int, int], ...]  # of a prompt's images: height and width in pixels
PARTS = ("encoder", "decoder")
SIZES: list[Sizes] = [(), ((56, 84),), ((84, 28), (112, 112))]  # of 0, 6 and 3 + 16 tokens


def build(path: Path) -> None:
    """Write a PaddleOCR-VL: as Qwen2-VL it counts an image's tokens by time, rows and columns."""
    import torch
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration, PreTrainedTokenizerFast
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
    from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<{i}>" for i in range(len(tokenizer), FIRST_MARK)])
    tokenizer.add_tokens([*MARKS.values()], special_tokens=True)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    text = SMALL | marks_of(tokenizer) | {"vocab_size": 2112, "head_dim": 32, "initializer_range": 0.1}
    text |= {"rope_parameters": rope, "tie_word_embeddings": True}
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    marks = {"image_token_id": IMAGE, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = PaddleOCRVLConfig(text_config=text, vision_config=vision | {"image_size": 56}, **marks)
        PaddleOCRVLForConditionalGeneration(config).save_pretrained(path)
    names = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "chat_template")}
    known = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, extra_special_tokens=MARKS, **names)
    pixels = {"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28}
    PaddleOCRVLProcessor(PaddleOCRVLImageProcessorPil(size=pixels), known).save_pretrained(path)


@pytest.fixture
def engine(request: Any, engines: Any, static: dict[str, Any]) -> Any:
    model = cached("tiny-paddleocr", build, recipe=Path(__file__).read_text())
    return engines("v2", model, **given(static, ranked_list_beams=160), **ROOMY, **getattr(request, "param", {}))


def prompt_of(sizes: Sizes, said: list[int] | None = None) -> dict[str, Any]:
    """Images between words, and what is said after them."""
    from PIL import Image

    random, tokens = np.random.default_rng(len(sizes)), plain.prompt_of(9)
    for i in range(len(sizes)):
        tokens += [BEGIN, IMAGE, END, *plain.prompt_of(20 + i)]
    images = [Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)) for size in sizes]
    return {"prompt_token_ids": [*tokens, *(said or ())], "multi_modal_data": {"image": images} if images else {}}


def inside(
    llm: Any, name: str, width: int, k: int, renormalised: bool, prompts: list[Sizes] = SIZES
) -> list[list[Item]]:
    """In the engine's process: lists of prompts with such images, asked for together."""
    given = [prompt_of(sizes) for sizes in prompts]
    outputs = llm.generate(given, plain.asked(name, width, k, renormalised), use_tqdm=False)
    return [plain.items_of(output) for output in outputs]


def as_accelerators(llm: Any, *arguments: Any) -> list[list[Item]]:
    with fixed_shapes(llm):
        return inside(llm, *arguments)


def in_rounds(llm: Any, name: str, width: int, k: int, renormalised: bool) -> list[list[Item]]:
    options = {"item_set": name, "width": width, "renormalised": renormalised, **ROUNDS}
    params = RankingParams(beam_width=k, max_tokens=40, extra_args=options)
    found = llm.beam_search([prompt_of(sizes) for sizes in SIZES], params)
    assert all(one.rounds > 0 for one in found)
    lengths = [len(one.sequences[0].orig_prompt["prompt_token_ids"]) for one in found]
    assert np.subtract(lengths, lengths[0]).tolist() == [0, 28, 64]  # images count with all their tokens
    return [
        [(tuple(item.tokens[length:-1]), item.cum_logprob) for item in one.sequences]
        for one, length in zip(found, lengths, strict=True)
    ]


def without_deltas(llm: Any, *arguments: Any) -> list[list[Item]]:
    """`inside`, if positions went on as many tokens as the prompt has."""
    from vllm_static.worker.beam_kv import BeamKV

    with mock.patch.object(BeamKV, "_position", lambda kv, prompt: prompt.tokens):
        return inside(llm, *arguments)


LISTS = [("ragged", 9, 5, False), ("fixed", 16, 10, True), ("large", 24, 12, False)]


@pytest.mark.parametrize(("name", "width", "k", "renormalised"), LISTS)
def test_lists_are_those_of_rounds(engine, name, width, k, renormalised):
    expected = engine.call(in_rounds, name, width, k, renormalised)
    for form in (inside, as_accelerators):
        for found, one in zip(engine.call(form, name, width, k, renormalised), expected, strict=True):
            same(found, one)
            assert found
    text, *others = zip(engine.call(without_deltas, name, width, k, renormalised), expected, strict=True)
    same(*text)
    for found, one in others:
        with pytest.raises(AssertionError):
            same(found, one)


def recorded(llm: Any, prompts: list[Sizes]) -> Any:
    """In the engine's process: lists by graphs, how many were recorded and replayed, and the same lists without."""
    with mock.patch("test_vllm_beam_attention.inside", inside):
        found, *counts = by_graphs(llm, "ragged", False, prompts)
    return found, counts, as_accelerators(llm, "ragged", 4, 3, False, prompts)


@pytest.mark.parametrize("engine", [TRITON], indirect=True)
def test_a_recorded_list_is_made_again_after_another_image(engine):
    """Whose tokens take other positions."""
    found, counts, expected = engine.call(recorded, [((28, 84),), ((56, 84),), ((112, 112),), ((56, 56),)])
    assert counts == [1, 2]
    for items, one in zip(found, expected, strict=True):
        same(items, one)
        assert items


def after_thoughts(llm: Any, extra: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """In the engine's process: lists after thoughts about the images, and those of requests for lists alone."""
    outputs = llm.generate([prompt_of(sizes) for sizes in SIZES], thoughts.words(llm, extra_args=extra), use_tqdm=False)
    made = [(list(one.token_ids), one.finish_reason, one.items) for output in outputs for one in output.outputs]
    prompts = [prompt_of(sizes, said) for sizes, (said, *_) in zip(SIZES, made, strict=True)]
    options = {name: extra[name] for name in ("item_set", "width")} | ROUNDS
    found = llm.beam_search(prompts, RankingParams(beam_width=extra["list"], max_tokens=40, extra_args=options))
    lists = [[(one.key, one.cum_logprob) for one in best.sequences] for best in found]
    return made, [(said, items) for (said, *_), items in zip(made, lists, strict=True)]


@pytest.mark.parametrize("options", [{}, ROUNDS], ids=["inside", "by rounds"])
def test_a_list_after_a_thought_about_an_image(engine, options):
    thoughts.same(*engine.call(after_thoughts, thoughts.asked("large", thoughts.TWO, width=24, **options)))


def build_whisper(path: Path) -> None:
    import torch
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|startoftranscript|>"], special_tokens=True)
    tokenizer.save_pretrained(path)
    WhisperFeatureExtractor(processor_class="WhisperProcessor").save_pretrained(path)
    sizes = {f"{part}_{name}": 1 + 127 * (name == "ffn_dim") for part in PARTS for name in ("layers", "ffn_dim")}
    sizes |= dict.fromkeys((f"{part}_attention_heads" for part in PARTS), 4)
    start = tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    given = {"vocab_size": 2112, "d_model": 128, "max_target_positions": 256, "init_std": 0.1, "dtype": "float32"}
    given |= {"decoder_start_token_id": start, "suppress_tokens": [], "begin_suppress_tokens": []}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = WhisperConfig(**given, **sizes, **marks_of(tokenizer))
        WhisperForConditionalGeneration(config).save_pretrained(path)


def after_sounds(llm: Any) -> tuple[list[Any], list[Any]]:
    """In the engine's process: the best tokens of `labels` after two sounds, by lists and by a step's logprobs."""
    sounds = np.random.default_rng(0).standard_normal((2, 16_000)).astype(np.float32)
    start = llm.get_tokenizer().convert_tokens_to_ids("<|startoftranscript|>")
    prompts: Any = [{"prompt_token_ids": [start, 200], "multi_modal_data": {"audio": (one, 16_000)}} for one in sounds]
    params = RankingParams(beam_width=5, max_tokens=2, item_set="labels", without_end=True)
    lists = [[(one.tokens[2], one.cum_logprob) for one in best.sequences] for best in llm.beam_search(prompts, params)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, logprobs=-1), use_tqdm=False)
    steps = [{token: one.logprob for token, one in output.outputs[0].logprobs[0].items()} for output in outputs]
    legal = [sorted(((token, each[token]) for token in range(100, 250)), key=lambda one: -one[1]) for each in steps]
    return lists, [one[:5] for one in legal]


def test_lists_after_what_an_encoder_has_heard(engines, static):
    """They take rounds, each request of which has the sound."""
    model = cached("tiny-whisper", build_whisper, recipe=Path(__file__).read_text())
    engine = engines("v2", model, **static, **ROOMY, max_logprobs=-1)
    assert "Ranked lists take rounds of requests: cross-attention to an encoder" in engine.log()
    found, expected = engine.call(after_sounds)
    for items, one in zip(found, expected, strict=True):
        same(items, one)
    assert abs(found[0][0][1] - found[1][0][1]) > 1e-3
