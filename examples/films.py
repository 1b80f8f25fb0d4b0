"""Demo: a server whose model can only answer with one of 1682 film titles.

Run it with `python3 bootstrap.py demo`, or with `--engine sglang` after it. It fetches the titles and a small model.
The first server has the model of `retrieval.py`, which has learnt what people watch, and gives a ranked list. The
second has a chat model, and builds the titles' index. Asked over the OpenAI-compatible API, it shows that every sampled
answer, and every film inside other answers, is a film of the list.

With `--forced-drafts` the vLLM server speculates: tokens that a title's first tokens leave no choice about are proposed
as a draft, and accepted in one step. That needs vLLM's model runner V2, which without a GPU runs in Triton's
interpreter: it works, but its times mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import inside
import openai
import retrieval
from films_data import CACHE, model_dir, print_ranked, titles, titles_by_key
from openai.types.chat.chat_completion import Choice
from serving import ANSWER_PATIENCE, MODEL_NAME, DemoError, Launch, run, running_server

TASTES = ["a space adventure", "a scary film", "something for children", "a love story"]
PROMPT = [
    {"role": "system", "content": "Answer with the title and year of a film."},
    {"role": "user", "content": "a comedy with robots"},
    {"role": "assistant", "content": "Short Circuit (1986)"},
    {"role": "user", "content": "a film about the war in Vietnam"},
    {"role": "assistant", "content": "Platoon (1986)"},
]
ANSWERS_PER_TASTE = 3  # the last of them is streamed
RANKED = 10
WATCHED = [1, 95, 71]  # Toy Story, Aladdin, The Lion King
ITEM_SET = "films"
SECONDS = {"vllm": (25, 65, 35), "sglang": (20, 105, 45)}  # measured: of a server's start, of the demo, more at first
DURATION = """\
Two servers start, one after the other. On two cores without a GPU each takes {} s, and the whole demo {} s.
The first time it takes {} s more: loops are compiled for this machine, and kept."""
BIGGER = """
Every answer is a film of the list. Which one it is depends on the model: this one knows few films. One of a few
billion parameters names films that fit, and one trained on what people watch, as above, ranks them by taste. The
list stays legal with each of them."""


@dataclass
class Answer:
    taste: str
    text: str
    key: int | None = None
    tokens: int = 0  # that it has, of one that was not streamed
    pieces: list[str] = field(default_factory=list)  # of a streamed answer


async def ask_all(url: str) -> list[Answer]:
    """Ask all questions at once, as the users of a busy server would."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=ANSWER_PATIENCE) as client:
        questions = []
        for seed, taste in enumerate(TASTES * ANSWERS_PER_TASTE):
            last = seed >= len(TASTES) * (ANSWERS_PER_TASTE - 1)
            questions.append(ask_streaming(client, taste, seed) if last else ask(client, taste, seed))
        answers_given = await asyncio.gather(*questions)
    return sorted(answers_given, key=lambda answer: TASTES.index(answer.taste))


def request(taste: str, seed: int) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "messages": [*PROMPT, {"role": "user", "content": taste}],
        "temperature": 0.8,
        "seed": seed,
        "max_tokens": 64,
        "extra_body": {"item_set": ITEM_SET},
    }


async def ask(client: openai.AsyncOpenAI, taste: str, seed: int) -> Answer:
    asked = request(taste, seed)
    asked["extra_body"]["return_token_ids"] = True
    completion = await client.chat.completions.create(**asked)
    choice = completion.choices[0]
    return Answer(taste, choice.message.content or "", key_of(choice), len(token_ids_of(choice)))


async def ask_streaming(client: openai.AsyncOpenAI, taste: str, seed: int) -> Answer:
    answer = Answer(taste, "")
    async for chunk in await client.chat.completions.create(stream=True, **request(taste, seed)):
        for choice in chunk.choices:
            piece = choice.delta.content or ""
            answer.text += piece
            answer.pieces += [piece] if piece else []
            answer.key = key_of(choice) or answer.key  # which the last event says
    return answer


def key_of(choice: Any) -> int | None:
    """Return the key of an answer's film, a field beside the OpenAI format."""
    return ((choice.model_extra or {}).get("item") or {}).get("key")


def token_ids_of(choice: Choice) -> list[int]:
    """Return the tokens of an answer, which both engines add to the OpenAI format when asked, under their own names."""
    extra = choice.model_extra or {}
    return extra.get("token_ids") or extra.get("response_token_ids") or []


def show_list(engine: str, title_of: dict[int, str]) -> bool:
    """Serve the retrieval example's model and print a list of it; True if it has ten films that are not the watched."""
    with retrieval.serving(engine, *retrieval.prepare(CACHE / "retrieval", None)) as server:
        films = server.ranked(WATCHED, n=RANKED, width=retrieval.WIDTHS[-1], exclude_keys=WATCHED)
    print(f"\nwhat to watch after {', '.join(title_of[key] for key in WATCHED)}, by a model that has learnt")
    print("what 943 people watched; bars: probabilities")
    print_ranked(films, title_of)
    keys = {film["key"] for film in films}
    return len(keys) == RANKED and keys <= title_of.keys() - set(WATCHED)


def report(answers_given: list[Answer], title_of: dict[int, str]) -> bool:
    """Print a table of the answers with their films' keys; return True if every one is a film of the list."""
    row = "{:24}{:<8}{}"
    print(
        "\nsampled answers, a film each, by a model of 135 million parameters:\n" + row.format("taste", "key", "answer")
    )
    strangers = 0
    for answer in answers_given:
        known = title_of.get(answer.key) == answer.text
        strangers += not known
        print(row.format(answer.taste, answer.key if known else "none", answer.text))
    streamed = next(answer for answer in answers_given if answer.pieces)
    print(f"\nstreamed: {'|'.join(streamed.pieces)}")
    verdict = f"{strangers} of them NOT in the list" if strangers else "all of them in the list"
    print(f"{len(title_of)} films, {len(answers_given)} answers, {verdict}")
    return not strangers


def steps_an_answer(url: str, answers_given: list[Answer]) -> str:
    """Return the steps of the model for each answer, by vLLM's own counters; without drafts a step for each token."""
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    name = "vllm:spec_decode_num_drafts_total"
    verified = sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))
    counted = [answer.tokens for answer in answers_given if answer.tokens]
    mean = sum(counted) / len(counted)
    return f"{1 + verified / len(answers_given):.1f} steps an answer, of {mean:.1f} tokens each"


def questions(url: str, title_of: dict[int, str], forced_drafts: bool = False) -> bool:
    """Ask a server that has these films as `films`, and report; True if all is as it should be."""
    started = time.monotonic()
    try:
        answers_given = asyncio.run(ask_all(url))
    except openai.APIError as error:
        raise DemoError(str(error)) from error
    seconds = time.monotonic() - started
    good = report(answers_given, title_of)
    print(f"{len(answers_given)} answers in {seconds:.1f} s", flush=True)
    if forced_drafts:
        print(steps_an_answer(url, answers_given), flush=True)
    good &= inside.show(url, title_of)
    print(BIGGER, flush=True)
    return good


def show(engine: str, forced_drafts: bool) -> bool:
    """Serve, ask and report; True if all is as it should be."""
    print(DURATION.format(*SECONDS[engine]), flush=True)
    source, title_of = f"{titles()}?column=title&key=movie_id", titles_by_key()
    good = show_list(engine, title_of)
    with running_server(Launch(engine, model_dir(), f"{ITEM_SET}={source}", forced_drafts)) as url:
        return questions(url, title_of, forced_drafts) and good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forced-drafts", action="store_true", help="speculate with what the titles force")
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    arguments = parser.parse_args()
    if arguments.forced_drafts and arguments.engine != "vllm":
        parser.error("--forced-drafts is for vLLM")
    return run(partial(show, arguments.engine, arguments.forced_drafts))


if __name__ == "__main__":
    sys.exit(main())
