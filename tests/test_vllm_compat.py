"""The hooks into vLLM: all there, all used, and missed with a sentence that says which."""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib
import inspect
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import contract
import hooked_names
import pytest
import real_tokenizers
import torch
from engine_tests import check_untouched
from vllm import SamplingParams
from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.renderers.registry import renderer_from_config
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, SlowIncrementalDetokenizer
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

import itemset
from itemset.serving import config, hooks
from itemset.serving.constraint import after
from itemset.serving.front.answer_fields import Expected
from itemset.text import load_tokenizer
from vllm_static import compat, engine_config, plugin
from vllm_static.core import lists
from vllm_static.front import answers
from vllm_static.front.engine_lists import EngineLists
from vllm_static.front.front_end import FrontEnd
from vllm_static.metrics import Figures
from vllm_static.worker import drafts, list_hooks


def test_every_hook_is_said_why():
    assert all(hook.why for hook in compat.hook.declared)
    stale = "docs/hooks.md is old: run python tests/hooked_names.py"
    assert hooked_names.documented("vllm") == hooked_names.table(compat.hook), stale


def test_every_hook_is_used_once():
    plugin.register()
    plugin.register()
    used = [hook for hook in compat.hook.declared if hook.when not in (drafts.SPECULATION, list_hooks.LISTS)]
    assert len(used) > 20
    for hook in used:
        module, _, path = hook.target.partition(":")
        function = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        if not hook.extends:
            assert function.__code__.co_filename == hooks.__file__
            assert inspect.unwrap(function).__code__.co_filename != hooks.__file__
            assert function.__name__ == path.split(".")[-1]


WHEELS = sorted((Path(__file__).parent.parent / ".cache" / "wheels").glob("vllm*.whl"))  # of other versions, if any


@pytest.mark.parametrize("wheel", [None, *WHEELS], ids=lambda path: path.name if path else "installed")
def test_every_hook_takes_what_runs_around_it(wheel):
    read = hooked_names.wheel(wheel) if wheel else hooked_names.installed("vllm")
    assert hooked_names.problems(read, hooked_names.hooks_of("vllm")) == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def f(self, a, b=1): ...", None),
        ("async def f(self, a, b=1, *, c): ...", None),
        ("if True:\n    def f(self, a, *more): ...", None),
        ("def g(self, a): ...", "m:f is missing"),
        ("f = print", "m:f is missing"),
        ("class f: ...", "m:f is no function"),
        ("def f(self, b, a): ...", None),
        ("def f(self, *, a=1): ...", None),
        ("def f(self, b): ...", "m:f takes self, b, not a"),
        ("from n import g as f", "m:f takes none, not self"),
    ],
)
def test_a_change_of_a_hooked_function_is_found(source, problem):
    def around(original, self, a, later=None):
        raise NotImplementedError

    sources = {"m.py": source, "n/__init__.py": "def g(none): ..."}
    found = hooked_names.problems(sources.get, {"m:f": [around]})
    assert (found[0] if found else None) == problem


@pytest.mark.parametrize("version", ["0.31.0", "0.9.1rc1"])
def test_an_unsupported_version_is_named(monkeypatch, version):
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    hook = hooks.Hooks(hooks.START)
    monkeypatch.setattr(compat, "hook", hook)
    monkeypatch.setattr(engine_config, "hook", hook)
    plugin.register()  # as in `vllm --help`, and for other backends
    assert StructuredOutputsConfig(backend="xgrammar").backend == "xgrammar"
    sentence = rf"supports vLLM 0\.32 to 0\.33, this is {version}: .* by `python tests/contract.py vllm=={version}`"
    with pytest.raises(ValueError, match=sentence):
        StructuredOutputsConfig(backend="static")
    with pytest.raises(RuntimeError, match=sentence):  # the name came before the plugins
        plugin.register()


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.1.dev3"])
def test_a_supported_version_passes(monkeypatch, version):
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    compat.install(hooks.START)


def test_the_supported_versions_have_passed_the_contract():
    first, last = compat.SUPPORTED
    assert contract.passed("vllm", 2) == [(0, minor) for minor in range(first[1], last[1] + 1)]
    assert contract.stale("vllm") == []


def test_an_unknown_version_starts_with_the_command_that_tries_it(monkeypatch, caplog):
    for version, spoken in (("0.34.0+cpu", "0.34.0"), ("1.0", "1.0")):
        monkeypatch.setattr(compat, "vllm_version", lambda version=version: version)
        compat.install()
        compat.install()
        (said,) = [one for one in caplog.messages if version in one]
        assert said.endswith(f"`python tests/contract.py vllm=={spoken}` in its checkout")
    monkeypatch.setattr(compat, "BROKEN", ("1.0",))
    with pytest.raises(RuntimeError, match=r"this is 1\.0: install a supported version"):
        compat.install()


@pytest.mark.parametrize("hook", ["vllm.engine.arg_utils:EngineArgs.gone", "vllm.gone:Class.function"])
def test_a_missing_hook_is_named(monkeypatch, hook):
    monkeypatch.setattr(compat.hook, "declared", list(compat.hook.declared))
    compat.hook(hook, why="a reason")(print)
    with pytest.raises(RuntimeError, match=rf"has no {hook.replace(':', '.')}, .* \(a reason\): install another"):
        compat.install(hooks.START, hooks.IMPORTED)


def test_flags_end_up_in_vllms_own_configuration():
    args = argparse.Namespace(
        structured_outputs_config={"enable_in_reasoning": True},
        guided_decoding_backend="static",
        item_set=["films=a", "songs=b"],
        additional_config={"item_sets": {"labels": "c"}, "other": 1},
        middleware=[],
    )
    engine_config.apply_flags(args)
    assert args.structured_outputs_config == {"enable_in_reasoning": True, "backend": "static"}
    assert args.additional_config == {"item_sets": ["labels=c", "films=a", "songs=b"], "other": 1}
    assert args.middleware == [engine_config.MIDDLEWARE]
    args = argparse.Namespace(structured_outputs_config={}, item_set=["films=a"])
    with pytest.raises(ValueError, match="--item-set needs the static backend: add"):
        engine_config.apply_flags(args)


def test_fields_that_vllm_allows_with_xgrammars_name_alone():
    plugin.register()
    assert StructuredOutputsConfig(backend="static", disable_any_whitespace=True).disable_any_whitespace
    for backend, field in (("outlines", "disable_any_whitespace"), ("static", "disable_additional_properties")):
        with pytest.raises(ValueError, match=f"{field} is only supported"):
            StructuredOutputsConfig(backend=backend, **{field: True})


def test_flags_are_read_once_however_often_they_are_asked_for(tmp_path, monkeypatch):
    plugin.register()
    monkeypatch.setattr(config, "_from_flags", [])  # the tests after this one were not started by flags
    itemset.build([[5, 6]]).save(tmp_path / "films.itemset")
    args = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(
        ["--guided-decoding-backend", "static", "--item-set", f"films={tmp_path / 'films.itemset'}"]
    )
    first = EngineArgs.from_cli_args(args).additional_config
    (tmp_path / "films.itemset").unlink()  # several API servers: each reads the flags of the first process
    assert EngineArgs.from_cli_args(args).additional_config == first
    assert list(first["item_set_versions"]) == ["films"]


def test_the_arguments_that_verl_makes_of_its_configuration(named_sets, monkeypatch):
    """As `build_cli_args_from_config` of verl 0.9.1 has made them of `engine_kwargs` in docs/training.md."""
    plugin.register()
    monkeypatch.setattr(config, "_from_flags", [])
    sets = {"item_sets": {"films": named_sets["one"].path}}
    args = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(
        ["--structured_outputs_config", '{"backend": "static"}', "--additional_config", json.dumps(sets)]
    )
    engine = EngineArgs.from_cli_args(args)
    assert engine.structured_outputs_config.backend == "static"
    assert engine.additional_config["item_sets"] == sets["item_sets"]


def test_another_item_set_compiles_no_graph_anew(tiny_model, named_sets):
    def config(**options):
        structured = {"backend": "static"}
        arguments = EngineArgs(str(tiny_model), structured_outputs_config=structured, additional_config=options)
        return arguments.create_engine_config()

    one, other = ({"item_sets": {"a": named_sets[name].path}} for name in ("one", "labels"))
    assert (
        config(**one).additional_config["item_set_versions"] != config(**other).additional_config["item_set_versions"]
    )
    assert config(**one).compute_hash() == config(**other).compute_hash() != config(**one, mine=1).compute_hash()


def test_a_token_that_vllm_adds_makes_no_other_tokenizer(tiny_model, tmp_path):
    plugin.register()
    path = tmp_path / "films.itemset"
    itemset.build_text(["river", "letter"], load_tokenizer(str(tiny_model))).save(path)
    arguments = EngineArgs(
        str(tiny_model),
        enable_prompt_embeds=True,
        structured_outputs_config={"backend": "static"},
        additional_config={"item_sets": {"films": str(path)}, "item_set_path": "host"},
    )
    config = arguments.create_engine_config()
    renderer = renderer_from_config(config)
    assert "<prompt_embeds>" in renderer.tokenizer.added_tokens_encoder
    assert len(FrontEnd(config, renderer.tokenizer).checks.catalogue["films"]) == 2


MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
WHISPER = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 32}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
WHY_ROUNDS: list[tuple[str | None, dict, dict]] = [  # why, what the model's configuration has, the engine's arguments
    (None, {}, {}),
    (None, MIXTRAL, {}),
    ("experts under data parallelism", MIXTRAL, {"data_parallel_size": 2}),
    ("cross-attention to an encoder", WHISPER, {}),
    ("pipeline parallelism", {}, {"pipeline_parallel_size": 2}),
    ("context parallelism", {}, {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}),
    ("context parallelism", {}, {"tensor_parallel_size": 2, "prefill_context_parallel_size": 2}),
    (None, MROPE, {}),
    ("cross-attention to an encoder", {"is_encoder_decoder": True}, {}),
]


@pytest.mark.parametrize(("reason", "model", "arguments"), WHY_ROUNDS)
def test_engines_that_make_no_lists_inside_a_step(tiny_model, tmp_path, monkeypatch, reason, model, arguments):
    """By their configurations, which are vLLM's own; such engines need other machines."""
    plugin.register()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)  # where there is no GPU, as in the interpreter
    monkeypatch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda look: look())  # ten seconds
    path = tmp_path / "model"
    shutil.copytree(tiny_model, path)
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | model))
    args = EngineArgs(str(path), structured_outputs_config={"backend": "static"}, **arguments)
    config = args.create_engine_config()
    assert compat.why_rounds(config) == reason
    said = EngineLists(config).by_rounds
    assert (said or "None").startswith(str(reason))
    assert ("(" in (said or "")) == (reason in ("experts under data parallelism", "pipeline parallelism"))


def test_caches_that_beams_cannot_share():
    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
    full, sliding = FullAttentionSpec(**sizes), SlidingWindowSpec(**sizes, sliding_window=64)
    for specs in ([full], [full, sliding, sliding], [sliding], [FullAttentionSpec(**sizes, sliding_window=64)]):
        assert lists._known(specs)
    of_states = {"block_size": 256, "page_size_padded": full.page_size_bytes, "dtypes": (torch.float32,) * 2}
    state = MambaSpec(**of_states, shapes=((3, 8), (2, 4, 4)))
    assert lists._known([state, full])
    assert not lists._known([state])
    others = [MambaSpec(**of_states, shapes=((3, 8),)), replace(state, mamba_type=MambaAttentionBackendEnum.MAMBA1)]
    others += [replace(state, page_size_padded=2 * full.page_size_bytes)]
    others += [MLAAttentionSpec(**sizes), ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=64)]
    others += [FullAttentionSpec(**sizes, attention_chunk_size=64), FullAttentionSpec(**sizes | {"block_size": 32})]
    for other in others:
        assert not lists._known([full, other])
    assert not lists._known([])


OF_XGRAMMAR = {"structured_outputs_config": {"backend": "xgrammar"}}


def with_numba() -> None:
    """What this process needs also without the plugin, because it has Numba as well."""
    from llvmlite.binding import ffi

    compat._name_no_kernels(ffi)


def test_another_backend_answers_as_without_the_plugin(engines, tiny_model):
    without = engines("v1", tiny_model, prepare=with_numba, env={"VLLM_PLUGINS": "none"}, **OF_XGRAMMAR)
    several = {"temperature": 0.9, "seed": 3, "n": 2, "stop": ["e"]}
    check_untouched(engines("v1", tiny_model, **OF_XGRAMMAR), without, {"choice": ["river", "letter"]}, several)


def test_no_hook_changes_a_call_while_another_backend_is_chosen(monkeypatch):
    monkeypatch.setattr(compat.hook, "chosen", False)
    assert hooked_names.lossy(compat.hook) == []


def test_another_backend_refuses_an_item_set(engines, tiny_model):
    engine = engines("v1", tiny_model, **OF_XGRAMMAR)
    with pytest.raises(VLLMValidationError, match="this engine has no item sets: start it with"):
        engine.generate(["p"], SamplingParams(extra_args={"item_set": "films"}))


@pytest.mark.parametrize("name", ["tiny", "tekken", "llama"])
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("slow", [False, True])
def test_an_item_is_decoded_as_a_text_of_its_own(name, thinks, slow):
    """By vLLM's own detokenizers, a delta a token; after a thought, too."""
    tokenizer = real_tokenizers.tokenizer(name)
    special, end = tokenizer.all_special_tokens[0], tokenizer.eos_token_id
    marker, prompt = tokenizer.encode(" so:", add_special_tokens=False), tokenizer.encode("A film:")
    for text in ("Alien", "two words", f"{special}x{special}", "é千"):
        films = itemset.build([tokenizer.encode(text, add_special_tokens=False)])
        content = partial(after, marker) if thinks else None
        expected, tokens = Expected(films, frozenset([end]), content), [*films.items()[0], end]
        request = EngineCoreRequest(
            request_id="1", prompt_token_ids=prompt, mm_features=None, sampling_params=SamplingParams(),
            pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        kind = SlowIncrementalDetokenizer if slow else FastIncrementalDetokenizer
        state = SimpleNamespace(detokenizer=kind(tokenizer, request))
        answers.decode_items(state, tokenizer, request, expected)
        deltas = []
        for token in [*marker * thinks, *tokens]:
            state.detokenizer.update([token], stop_terminated=token == end)
            deltas.append(state.detokenizer.get_next_output_text(token == end, delta=True))
        said = "".join(deltas[len(marker) * thinks :])
        assert said == tokenizer.decode(films.items()[0]), deltas
        assert state.detokenizer.output_token_ids == [*marker * thinks, *tokens]


CODE = """
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast


class Own(PreTrainedTokenizerFast):
    vocab_files_names = {"data_file": "own.json"}

    def __init__(self, data_file=None, **options):
        options = {name: value for name, value in options.items() if name not in ("tokenizer_object", "tokenizer_file")}
        super().__init__(tokenizer_object=Tokenizer.from_file(data_file), **options)
"""


def test_a_file_is_built_with_the_tokenizer_that_the_engine_loads(tmp_path, tiny_model):
    remote, films = tmp_path / "remote", tmp_path / "films.csv"
    remote.mkdir()
    shutil.copy(tiny_model / "config.json", remote)
    shutil.copy(tiny_model / "tokenizer.json", remote / "own.json")
    (remote / "own_code.py").write_text(CODE)
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own_code.Own", "own_code.Own"]}}
    (remote / "tokenizer_config.json").write_text(json.dumps(own))
    films.write_text("id,title\n1,The red river\n2,A garden\n")
    options = {"item_sets": {"films": str(films)}, "item_set_cache": str(tmp_path / "cache")}
    expected = load_tokenizer(str(tiny_model))
    for given in (
        {"model": str(remote), "trust_remote_code": True},
        {"model": str(tmp_path), "tokenizer": str(remote), "trust_remote_code": True},
        {"model": str(tmp_path), "tokenizer": str(tiny_model), "tokenizer_mode": "hf"},
    ):
        args = EngineArgs(additional_config=dict(options), **given)
        engine_config._add_indexes(args)
        made = itemset.load(args.additional_config["item_sets"]["films"])
        assert made.lookup_text(["A garden"], expected).tolist() == [2]
    with pytest.raises(itemset.ItemSetError, match="it brings code of its own, which --trust-remote-code allows"):
        engine_config._add_indexes(EngineArgs(model=str(remote), additional_config=dict(options)))
    with pytest.raises(itemset.ItemSetError, match="--trust-remote-code"):
        load_tokenizer(str(remote))


def test_scrapes_share_a_question_to_the_engine():
    asked = []

    async def answer(method):
        asked.append(method)
        await asyncio.sleep(0)
        return {"by_path": {}, "sampled_steps": {}, "arena": (0, 0)}

    core = SimpleNamespace(call_utility_async=answer)
    app, figures = SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(engine_core=core))), Figures()

    async def scrape():
        await asyncio.gather(*(figures.refresh(app) for _ in range(50)))

    asyncio.run(scrape())
    assert len(asked) == 1
    asyncio.run(scrape())
    assert len(asked) == 2
