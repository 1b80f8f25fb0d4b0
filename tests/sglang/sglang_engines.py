"""Real SGLang engines for tests, each with processes of its own, on a CPU.

engine = Engine(model, grammar_backend="xgrammar")
answer = engine.generate("Once upon a time", {"max_new_tokens": 8, "temperature": 0})
info = engine.call(lambda engine: engine.get_server_info())
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from engine_words import PROMPT, Answer, Found, Item
from engines import TESTS, Host, HostedEngine

HERE = Path(__file__).resolve().parent

# What a CPU needs, and what makes a tiny model start and run fast on two cores.
FAST: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "dtype": "float32",
    "context_length": 256,
    "max_running_requests": 16,
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.2,
    "random_seed": 0,
    "skip_server_warmup": True,
    "sleep_on_idle": True,  # else an idle scheduler asks for work all the time, and takes a core
}

# Speculation with n-grams, with smaller trees and memory than by default.
NGRAM: dict[str, Any] = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 4,
    "speculative_ngram_capacity": 10_000,
}


def draft_model(model: Path | str, topk: int = 1) -> dict[str, Any]:
    """Speculation with a draft model, in chains of three tokens or, with `topk`, in trees."""
    return {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(model),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": 4 + 2 * (topk - 1),
    }


def environment() -> dict[str, str]:
    """The environment of an SGLang process on a CPU."""
    paths = [str(HERE / "cpu"), str(HERE), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TESTS_SGLANG_REPORTS": "1",  # cpu/sitecustomize.py
        "OMP_NUM_THREADS": "1",
        # What SGLang compiles for speculation takes longer to compile than a tiny model to answer.
        "TORCHDYNAMO_DISABLE": "1",
        # `cpu` stands in for what SGLang has no build of here; test modules must be importable where they run.
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
    }


class Engine(HostedEngine):
    """An `sglang.Engine` in a process of its own, from which it starts its others. Keyword arguments go to it.

    `env` is added to the environment before plugins are loaded, but after SGLang was imported: of SGLang's own
    variables, those that it reads as it is imported must be in this process's environment.
    """

    refusal = ValueError
    """What a refused request raises."""

    def __init__(
        self, model: Path | str, *, env: dict[str, str] | None = None, timeout: float = 120, **server_args: Any
    ) -> None:
        arguments = FAST | {"log_level": "info", "model_path": str(model)} | server_args
        super().__init__(host(), "the SGLang engine", timeout, env or {}, None, arguments)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`sglang.Engine.generate`: `prompt` or `input_ids`, one or a list, and `sampling_params`, one or a list.

        Returns a dict or a list of them, and with `stream=True` the list of what was streamed.
        """
        return self.call(_generate, args, kwargs)

    def ask(self, prompts: list[str] | list[list[int]], words: dict[str, Any] | list[dict[str, Any]]) -> list[Answer]:
        """The answers to texts or token ids, with one request's words or each one's: several of a prompt with `n`."""
        several = isinstance(words, list)
        given = [sampling_params(one) for one in words] if several else sampling_params(words)
        logprobs = ["logprobs" in one for one in words] if several else "logprobs" in words
        kind = "prompt" if isinstance(prompts[0], str) else "input_ids"
        found = self.generate(**{kind: prompts}, sampling_params=given, return_logprob=logprobs)
        return [answered(one) for one in found]

    def logits(self, prefix: list[int], tokens: list[int]) -> list[float]:
        """The model's own of these tokens after PROMPT and a prefix, up to a constant."""
        given = {"sampling_params": {"max_new_tokens": 1, "temperature": 1.0}, "token_ids_logprob": tokens}
        output = self.generate(input_ids=[*PROMPT, *prefix], return_logprob=True, **given)
        (entries,) = output["meta_info"]["output_token_ids_logprobs"]
        return [entry[0] for entry in entries]

    def rank(self, n: int, prompts: Any = (PROMPT, PROMPT), **words: Any) -> list[Found]:
        """A list of each prompt: of SGLang's `beam_width`, or of `width` beams and then its first n items."""
        beams = words.pop("width", n)
        given = sampling_params({"max_tokens": 40, "beam_width": beams} | ({} if beams == n else {"n": n}) | words)
        return [found_in(output) for output in self.generate(input_ids=list(prompts), sampling_params=given)]

    def draw(self, **words: Any) -> list[tuple[Item, float]]:
        """Items and their scores."""
        output = self.generate(input_ids=PROMPT, sampling_params=sampling_params({"max_tokens": 20} | words))
        assert all(one["meta_info"]["exact"] for one in output["meta_info"]["beam_results"])
        return [(item[:-1], score) for score, item in scored(output)]


def sampling_params(words: dict[str, Any]) -> dict[str, Any]:
    """SGLang's sampling parameters for words that both engines take."""
    own = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
    own |= {"json": "json_schema", "grammar": "ebnf"}
    texts = {
        word: json.dumps(value)
        for word, value in words.items()
        if word in ("json", "structural_tag") and not isinstance(value, str)
    }
    return {own.get(word, word): value for word, value in (words | texts).items() if word != "logprobs"}


def answered(output: dict[str, Any]) -> Answer:
    info = output["meta_info"]
    return Answer(tuple(output["output_ids"]), output["text"], info["finish_reason"]["type"], info)


def found_in(output: dict[str, Any]) -> Found:
    results, info = output["meta_info"]["beam_results"], output["meta_info"]
    assert [one["meta_info"]["rank"] for one in results] == list(range(1, len(results) + 1))
    texts, keys = [one["text"] for one in results], [one["meta_info"]["keys"] for one in results]
    return Found(scored(output), texts, keys, info["proven"], results[0]["meta_info"]["passes"])


def scored(output: dict[str, Any]) -> list[tuple[float, Item]]:
    """(log-probability, tokens with the end token) of each result of a list or of draws."""
    results = output["meta_info"]["beam_results"]
    return [(one["meta_info"]["logprob"], tuple(one["output_ids"])) for one in results]


def _generate(engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = engine.generate(*args, **kwargs)
    return list(result) if kwargs.get("stream") else result


@cache
def host() -> Host:
    """The process from which all engines and servers are forked."""
    return Host(HERE / "sglang_engine_host.py", environment())
