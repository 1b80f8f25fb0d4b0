"""The hooks into vLLM: all there, all used, and missed with a sentence that says which."""

from __future__ import annotations

import argparse

import pytest
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_static import compat, drafts, plugin


def test_every_hook_is_used_and_said_why():
    extended = {"vllm.config.structured_outputs:StructuredOutputsConfig", "vllm.v1.engine.core:EngineCore"}
    assert set(plugin.AROUND) | extended == set(compat.HOOKS)
    assert set(drafts.AROUND) == set(compat.WORKER_HOOKS)
    assert set(plugin.AROUND_LATER) == set(compat.LATER_HOOKS)
    compat.check(compat.LATER_HOOKS)
    plugin.register()
    plugin.register()
    assert LLM.__init__.__name__ == "__init__"


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.0", "0.9.1rc1"])
def test_an_unsupported_version_is_named(monkeypatch, version):
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    with pytest.raises(RuntimeError, match=rf"supports vLLM 0\.31 to 0\.33, this is {version}: install"):
        plugin.register()


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0+cpu", "0.33.1.dev3"])
def test_a_supported_version_passes(monkeypatch, version):
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    compat.check()


@pytest.mark.parametrize("hook", ["vllm.engine.arg_utils:EngineArgs.gone", "vllm.gone:Class.function"])
def test_a_missing_hook_is_named(monkeypatch, hook):
    monkeypatch.setitem(compat.HOOKS, hook, "a reason")
    with pytest.raises(RuntimeError, match=rf"has no {hook.replace(':', '.')}, .* \(a reason\): install another"):
        plugin.register()


def test_flags_end_up_in_vllms_own_configuration():
    args = argparse.Namespace(
        structured_outputs_config={"enable_in_reasoning": True},
        guided_decoding_backend="static",
        item_set=["films=a", "songs=b"],
        additional_config={"item_sets": {"labels": "c"}, "other": 1},
        middleware=[],
    )
    compat.apply_flags(args)
    assert args.structured_outputs_config == {"enable_in_reasoning": True, "backend": "static"}
    assert args.additional_config == {"item_sets": ["labels=c", "films=a", "songs=b"], "other": 1}
    assert args.middleware == [compat.MIDDLEWARE]
    args = argparse.Namespace(structured_outputs_config={}, item_set=["films=a"])
    with pytest.raises(ValueError, match="--item-set needs the static backend: add"):
        compat.apply_flags(args)


def test_another_backend_refuses_an_item_set(engines, tiny_model):
    engine = engines("v1", tiny_model, structured_outputs_config={"backend": "xgrammar"})
    with pytest.raises(VLLMValidationError, match="this engine has no item sets: start it with"):
        engine.generate(["p"], SamplingParams(extra_args={"item_set": "films"}))
