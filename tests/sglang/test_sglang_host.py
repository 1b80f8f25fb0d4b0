"""The host path of a batch in SGLang: which call fills which rows, and what they hold."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from models import cached_tiny_llama
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from transformers import AutoTokenizer
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo

import itemset
from itemset.masking import host
from itemset.serving import hooks
from sglang_static.scheduler import hooks as scheduler_hooks
from sglang_static.scheduler.backend import StaticGrammar

VOCABULARY = 2112
FILL = "sglang.srt.constrained.base_grammar_backend:BaseGrammarObject.fill_vocab_mask_batched"


@pytest.fixture(scope="module")
def compiled():
    """An xgrammar grammar for the tiny model's tokenizer."""
    info = TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(cached_tiny_llama()), vocab_size=VOCABULARY)
    return GrammarCompiler(info).compile_regex("[0-9]{12}")


@pytest.mark.parametrize("first", ["set", "xgrammar", "free"])
def test_the_rows_of_sets_are_filled_by_one_call(monkeypatch, compiled, first):
    """Whichever grammar is the first of its batch; each row as its grammar alone fills it, and free rows stay free."""
    monkeypatch.setattr(BaseGrammarObject, "fill_vocab_mask_batched", BaseGrammarObject.__dict__[FILL.split(".")[-1]])
    hook = hooks.Hooks(hooks.START)
    hook(FILL, why="as the plugin")(scheduler_hooks._fill_rows)
    hook.choose(True)
    hook.install("SGLang", hooks.START)
    items = np.random.default_rng(5).integers(0, VOCABULARY, (3_000, 4)).tolist()
    item_set, grammars = itemset.build(items), []
    for i in range(16):
        grammars.append(StaticGrammar(partial(host.HostState, item_set, {1, 7})))
        for token in items[i][: i % 5]:
            grammars[-1].accept_token(token)
    others = [XGrammarGrammar(GrammarMatcher(compiled), VOCABULARY, compiled, None) for _ in range(3)]
    grammars[5:5] = [None, others[0]]
    grammars += [others[1], None]
    grammars[:0] = {"set": [], "xgrammar": [others[2]], "free": [None]}[first]
    calls: Counter[str] = Counter()
    fill_rows, fill_row = host._fill_rows, host.HostState.fill_bitmask
    monkeypatch.setattr(host, "_fill_rows", lambda *rows: (calls.update(batched=1), fill_rows(*rows)))
    monkeypatch.setattr(host.HostState, "fill_bitmask", lambda *row: (calls.update(single=1), fill_row(*row)))
    info = SamplingBatchInfo(
        **dict.fromkeys(("top_ps", "top_ks", "min_ps")),
        temperatures=torch.ones(len(grammars), 1),
        is_all_greedy=True,
        is_any_greedy=True,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=VOCABULARY,
        grammars=grammars,
        device="cpu",
    )
    info.update_regex_vocab_mask()
    assert calls == {"batched": 1}
    expected = others[0].allocate_vocab_mask(VOCABULARY, len(grammars), "cpu")
    for row, grammar in enumerate(grammars):
        if grammar is not None:
            grammar.fill_vocab_mask(expected, row)
    assert torch.equal(info.grammar_mask.vocab_mask, expected)
