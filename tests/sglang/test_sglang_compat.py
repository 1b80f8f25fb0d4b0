"""The hooks into SGLang: all there, all used, and missed with a sentence that says which."""

from __future__ import annotations

import argparse
import subprocess
import sys
from array import array

import contract
import hooked_names
import pages
import pytest
import real_tokenizers
from engine_tests import check_untouched
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_engines import environment

from itemset.serving import hooks
from sglang_static import compat, engine_config, plugin


def test_every_hook_is_said_why():
    assert all(hook.why for hook in compat.hook.declared)
    stale = "docs/hooks.md is old: run python tests/hooked_names.py"
    assert hooked_names.documented("sglang") == hooked_names.table(compat.hook), stale


def test_every_hook_takes_what_runs_around_it():
    assert hooked_names.problems(hooked_names.installed("sglang"), hooked_names.hooks_of("sglang")) == []


@pytest.mark.parametrize("version", ["0.5.22", "0.4.0"])
def test_an_unsupported_version_is_named(monkeypatch, version):
    monkeypatch.setattr(compat, "sglang_version", lambda: version)
    monkeypatch.setattr(compat, "hook", hooks.Hooks(hooks.IMPORTED))
    monkeypatch.delenv(compat.VARIABLE, raising=False)
    plugin.register()  # for other backends
    assert f"supports SGLang 0.5.23 to 0.5.23, this is {version}: install" in compat.hook.refusal
    for words in ("--grammar-backend static", "--grammar-backend=static", "--guided-decoding-backend static"):
        monkeypatch.setattr(sys, "argv", ["launch_server", *words.split()])
        with pytest.raises(SystemExit, match=rf"this is {version}: .* `python tests/contract.py sglang=={version}`"):
            plugin.register()


def test_the_supported_versions_have_passed_the_contract():
    assert contract.passed("sglang", 3) == sorted(set(compat.SUPPORTED))
    assert contract.stale("sglang") == []


def test_a_process_of_an_engine_that_has_our_backend_does_not_go_on_without_it(monkeypatch):
    """SGLang logs a plugin's exception and goes on: its answers would be free."""
    monkeypatch.setattr(compat, "sglang_version", lambda: "0.5.22")
    monkeypatch.setenv(compat.VARIABLE, "{}")
    with pytest.raises(SystemExit, match=r"static-backend supports SGLang 0\.5\.23"):
        plugin.register()


def test_a_missing_hook_ends_the_process_that_would_have_needed_it():
    """Nothing is masked in silence: the import of the module fails. Other backends hear of it, and go on."""
    code = """if True:
        from sglang_static import compat, engine_config, plugin
        compat.hook("sglang.srt.server_args:ServerArgs.gone", why="a reason")(print)
        plugin.register()
        import sglang.srt.server_args
    """
    for wanted, ends in (({compat.VARIABLE: "{}"}, True), ({}, False)):
        given = {"env": environment() | wanted, "capture_output": True, "text": True}
        ended = subprocess.run([sys.executable, "-c", code], **given)
        assert bool(ended.returncode) is ends
        assert (
            "SGLang 0.5.23 has no sglang.srt.server_args.ServerArgs.gone, which static-backend needs (a" in ended.stderr
        )


def test_flags_become_options(monkeypatch):
    monkeypatch.setenv(compat.VARIABLE, '{"item_sets": {"labels": "c"}, "inline_item_limit": 5}')
    args = argparse.Namespace(
        grammar_backend=None, guided_decoding_backend="static", item_set=["films=a", "songs=b"], item_set_path="host"
    )
    engine_config.apply_flags(args)
    assert args.grammar_backend == "static"
    assert compat.options() == {
        "item_sets": ["labels=c", "films=a", "songs=b"],
        "inline_item_limit": 5,
        "item_set_path": "host",
    }
    with pytest.raises(ValueError, match="--item-set and --item-set-path need the static backend: add"):
        engine_config.apply_flags(argparse.Namespace(grammar_backend="xgrammar", item_set=["films=a"]))


def test_the_servers_of_the_pages():
    from sglang.srt.server_args import ServerArgs

    plugin.register()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    (more,) = pages.commands_of("--device")
    served = pages.commands_of("python3", "-m", "sglang.launch_server")
    given = [parser.parse_args([*words, "--device", *more]) for words in served]
    assert [args.item_set for args in given] == [["movies=movies.csv"], ["films=sets/films"]]
    assert {(args.grammar_backend, args.device) for args in given} == {("static", "cpu")}


@pytest.mark.parametrize("text", ["{", "[]", '"films"'])
def test_options_that_are_no_json_object(monkeypatch, text):
    monkeypatch.setenv(compat.VARIABLE, text)
    with pytest.raises(ValueError, match="SGLANG_STATIC must be a JSON object such as"):
        compat.options()


def test_no_client_can_send_what_rolls_versions_out():
    """By the route that a debugging server has, with DUMPER_SERVER_PORT=reuse."""
    code = """if True:
        from urllib.parse import quote
        from sglang_static import compat, plugin
        plugin.register()
        from sglang.srt.entrypoints import http_server
        from starlette.testclient import TestClient
        client = TestClient(http_server.app, raise_server_exceptions=False)
        for method in (compat.METHOD, quote(compat.METHOD, ""), "reset"):
            print(client.post(f"/dumper/{method}", json={}).status_code)
    """
    given = {"env": environment() | {"DUMPER_SERVER_PORT": "reuse"}, "capture_output": True, "text": True}
    ended = subprocess.run([sys.executable, "-c", code], **given)
    assert ended.stdout.split() == ["404", "404", "500"], ended.stderr


def test_another_backend_answers_as_without_the_plugin(engines, tiny_model):
    without = engines(tiny_model, env={"SGLANG_PLUGINS": "none"}, grammar_backend="xgrammar")
    check_untouched(engines(tiny_model, grammar_backend="xgrammar"), without)


def test_no_hook_changes_a_call_while_another_backend_is_chosen(monkeypatch):
    monkeypatch.setattr(compat.hook, "chosen", False)
    assert hooked_names.lossy(compat.hook) == []


@pytest.mark.parametrize("text", ["Alien", "two words", "é千"])
def test_an_answer_is_decoded_without_the_prompt(text):
    """As SGLang's detokenizer does: what is read, less what stands before it."""
    tokenizer = real_tokenizers.tokenizer("llama")
    prompt, tokens = tokenizer.encode("A film:"), tokenizer.encode(text, add_special_tokens=False)
    request = Req("1", "", array("q", prompt), SamplingParams(max_new_tokens=9))
    compat.decode_alone(request)
    for count, token in enumerate(tokens, 1):
        request.output_ids.append(token)
        ids, read = request.init_incremental_detokenize()
        assert (list(ids), read) == (tokens[:count], 0)
    assert tokenizer.decode(list(ids)) == text
