"""Tiny random models with real tokenizers, made on the spot, so that no test needs a download."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "models"

# Raise it whenever a change below changes what is built, so that nobody tests a stale model.
RECIPE = 1

TOKENIZER_SIZE = 1200
SPECIAL_TOKENS = ["<s>", "</s>", "<pad>"]

# The usual shape of a chat template, short enough that a conversation fits a context of 256 tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    # In float32 a request's logits hardly depend on the batch it runs in, so greedy outputs can be compared.
    "dtype": "float32",
}
"""The shape of the tiny models."""

_ADJECTIVES = "red quiet lost golden last broken silver brave hidden little electric frozen endless secret wild"
_NOUNS = "river letter station harbour garden winter stranger mirror engine island captain library summer road"
_PATTERNS = [
    "The {0} {1} of the {2}",
    "A {0} {1} ({3})",
    "{1} and {2}, part {3}",
    "Which {1} is {0}? Answer with one {2}.",
    "I would like to watch the {0} {1} again in {3}",
]


def tiny_llama(directory: Path | str, vocab_size: int = 2112, seed: int = 0) -> Path:
    """Write a random two-layer Llama and its tokenizer into `directory` and return it.

    The model's vocabulary is larger than the tokenizer's, as in many published checkpoints: the token ids between
    the two have logits, but decode to nothing.
    """
    # transformers takes seconds to import, and most runs find their model in the cache.
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    directory = Path(directory)
    tokenizer = tiny_tokenizer()
    if vocab_size < len(tokenizer):
        raise ValueError(f"vocab_size {vocab_size} is smaller than the tokenizer's {len(tokenizer)} tokens")
    config = LlamaConfig(vocab_size=vocab_size, **SMALL, **marks_of(tokenizer))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**marks_of(tokenizer))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def cached_tiny_llama(vocab_size: int = 2112, seed: int = 0) -> Path:
    """The path of such a model in `.cache`, built on first use and again whenever what it is made of changes."""
    build = partial(tiny_llama, vocab_size=vocab_size, seed=seed)
    return cached(f"tiny-llama-{vocab_size}-{seed}", build, recipe=RECIPE, vocab_size=vocab_size, seed=seed)


def cached(name: str, build: Callable[[Path], object], **ingredients: int | str) -> Path:
    """A folder in `.cache` that `build(folder)` has filled, with these ingredients and the installed libraries."""
    ingredients |= {library: version(library) for library in ("torch", "transformers", "tokenizers")}
    digest = hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()[:12]
    path = CACHE / f"{name}-{digest}"
    if not path.is_dir():
        # Renamed into place when it is complete: an interrupted or simultaneous run never leaves half a model.
        unfinished = CACHE / f"{path.name}.{os.getpid()}"
        build(unfinished)
        try:
            unfinished.rename(path)
        except OSError:
            shutil.rmtree(unfinished)
            if not path.is_dir():
                raise
    return path


def marks_of(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that encodes any text and, like Llama's own, starts it with <s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _sentences() -> list[str]:
    """A few hundred English-like strings, always the same."""
    rng = random.Random(0)
    nouns = _NOUNS.split()
    return [
        rng.choice(_PATTERNS).format(adjective, noun, rng.choice(nouns), rng.randrange(1920, 2027))
        for adjective, noun in itertools.product(_ADJECTIVES.split(), nouns)
    ]
