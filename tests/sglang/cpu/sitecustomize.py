"""Lets SGLang run on a CPU without triton and sglang-kernel, in every process that has this on PYTHONPATH.

Python imports `sitecustomize` before anything else, so that holds for the processes which SGLang starts as well.
Nothing happens unless SGLANG_USE_CPU_ENGINE is 1, and then only when the modules concerned are imported:

- triton: the stub that SGLang itself uses on a Mac, unless there is a real one;
- torchvision: the declarations of two operators, unless its extension can be loaded;
- our Triton kernels: Triton's interpreter, where bootstrap.py has put it;
- sgl_kernel: a module whose functions are those of `cpu_kernels`, and raise when called where that has none;
- some places in SGLang: what a CPU lacks for speculation with draft trees and sampling.

With TESTS_SGLANG_OVERLAP=1, the overlap scheduler stays on with speculation too, as it does on a GPU; without
speculation it is on anyway. With TESTS_SGLANG_REPORTS=1, the log says what tests count, which costs time.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def look_where_names_can_be(module: ModuleType) -> None:
    """After each hook SGLang looks through all modules for those that imported the function by name: 40 ms, for a
    hundred hooks in each of three processes. None imports a method so, and no library imports anything of SGLang's."""
    whole = sys.modules

    def propagate(original: Any, wrapped: Any, owner: Any) -> int:
        if isinstance(owner, type):
            return 0
        module.sys = SimpleNamespace(
            modules={name: one for name, one in whole.items() if name.partition(".")[0] in ("sglang", "sglang_static")}
        )
        return everywhere(original, wrapped, owner)

    everywhere, module._propagate_patch = module._propagate_patch, propagate


def stub_triton() -> None:
    """Install SGLang's stub of triton when it would on a Mac, without the rest of what it does there."""
    if PathFinder.find_spec("triton") is not None:
        return
    from unittest import mock

    import torch
    from sglang import _platform_stubs as stubs

    mac = SimpleNamespace(platform="darwin", modules=sys.modules, meta_path=sys.meta_path)
    with (
        mock.patch.multiple(
            stubs, sys=mac, platform=SimpleNamespace(machine=lambda: "arm64"), _patch_non_blocking=lambda: None
        ),
        mock.patch.object(torch.backends.mps, "is_available", return_value=True),
    ):
        stubs.install_platform_stubs()


def declare_torchvision_operators() -> None:
    """torchvision registers functions for operators of its extension, which PyPI builds for CUDA only."""
    import torch

    package = PathFinder.find_spec("torchvision").submodule_search_locations[0]
    for extension in Path(package).glob("_C.*so"):
        try:
            torch.ops.load_library(str(extension))
            return
        except OSError:
            continue
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["torchvision_library"] = library  # its definitions last as long as it does


def allow_seeds(module: ModuleType) -> None:
    """Accept `enable_deterministic_inference`, with which SGLang obeys the seeds of requests."""
    module.add_deterministic_attention_backend_choices(["torch_native"])
    module.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def patch_batch_invariant_ops(module: ModuleType) -> None:
    module.enable_batch_invariant_mode = lambda: None  # kernels for GPUs


def patch_torch_native_backend(module: ModuleType) -> None:
    import cpu_kernels

    cpu_kernels.add_tree_masks(module.TorchNativeAttnBackend)


def patch_draft_utils(module: ModuleType) -> None:
    import cpu_kernels

    cpu_kernels.add_draft_models(module.DraftBackendFactory)


def use_cpu_kernels(*names: str) -> Callable[[ModuleType], None]:
    def replace(module: ModuleType) -> None:
        import cpu_kernels

        for name in names:
            setattr(module, name, getattr(cpu_kernels, name))

    return replace


def patch_eagle_utils(module: ModuleType) -> None:
    """Verify sampled requests by sampling. For want of the kernel, SGLang verifies them greedily on a CPU."""
    module._verify_uses_greedy = lambda *, is_all_greedy, **_: is_all_greedy


def pin_nothing(module: ModuleType) -> None:
    """What SGLang's LoRA adapters pin stays as it is: without an accelerator PyTorch refuses to pin."""
    import torch

    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    for name in ("empty", "tensor", "zeros"):
        make = getattr(torch, name)
        if not hasattr(make, "pinned"):

            def unpinned(*args: Any, make: Any = make, pin_memory: bool = False, **kwargs: Any) -> Any:
                return make(*args, **kwargs)

            unpinned.pinned = False  # type: ignore[attr-defined]
            setattr(torch, name, unpinned)


def keep_overlap(module: ModuleType) -> None:
    """Leave the overlap scheduler on where SGLang would turn it off because it speculates on a CPU."""
    disable = module._disable_overlap_schedule_for_cpu

    def disable_unless_told(server_args: Any) -> None:
        if os.environ.get("TESTS_SGLANG_OVERLAP") != "1":
            disable(server_args)

    module._disable_overlap_schedule_for_cpu = disable_unless_told


def add_reasoning_parser(module: ModuleType) -> None:
    """A parser for the tiny models, "tiny", whose marks are two of their ordinary tokens."""

    class TinyDetector(module.BaseReasoningFormatDetector):
        def __init__(self, **options: Any) -> None:
            super().__init__("letter", "station", **options)

    module.ReasoningParser.DetectorMap["tiny"] = TinyDetector


def report_delays(module: ModuleType) -> None:
    """Write to the log each time sampling waits for the host, as it does for grammars."""
    forward = module.TpModelWorker.forward_batch_generation

    @functools.wraps(forward)
    def forward_and_report(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        if result.delay_sample_func is not None:
            print("a sampling was delayed", flush=True)
        return result

    module.TpModelWorker.forward_batch_generation = forward_and_report


def report_unnamed_reads(module: ModuleType) -> None:
    """Write to the log when a step reads an item set that it has not named to the arena before. On a GPU such a step
    could be ahead of the copy of its set."""
    use, named = module.Arena.use, set()

    def named_use(arena: Any, numbers: Any, *, begins: bool = True) -> None:
        if begins:
            named.clear()
        named.update(numbers)
        use(arena, numbers, begins=begins)

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(slots: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(slots, batch, *args, **kwargs)
            states = slots.row_states[: batch.rows]
            sets = states[states & module.LOCAL != FREE] >> STATE_BITS
            print("sets were read", "named" if named.issuperset(sets.tolist()) else "UNNAMED", flush=True)
            return result

        return call

    from itemset.trie.walk import FREE, STATE_BITS

    module.Arena.use = named_use
    module.Slots.step, module.Slots.walk = watched(module.Slots.step), watched(module.Slots.walk)


def report_reads(module: ModuleType) -> None:
    """Write to the log from how many rows the next beams of a list are chosen, and how often the host waits for it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.default")
            self.count += any(word in str(func) for word in waits)
            return func(*args, **(kwargs or {}))

    select = module.ItemGroup.select

    def watched(group: Any, pieces: Any, *args: Any) -> Any:
        with Reads() as reads:
            chosen = select(group, pieces, *args)
        print(f"beams of a list chosen from {sum(map(len, pieces))} rows, read back: {reads.count}", flush=True)
        return chosen

    module.ItemGroup.select = watched


def report_left(module: ModuleType) -> None:
    """When the cache is flushed, write to the log which rows and KV slots neither are free nor were in the cache."""
    flush = module.Scheduler.flush_cache

    def report_and_flush(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows = self.req_to_token_pool.size - self.req_to_token_pool.available_size()
        slots = self.max_total_num_tokens - self.token_to_kv_pool_allocator.available_size()
        print(f"left: {rows} rows, {slots - self.tree_cache.evictable_size()} slots", flush=True)
        return flush(self, *args, **kwargs)

    module.Scheduler.flush_cache = report_and_flush


def report_reclaimed(module: ModuleType) -> None:
    """Write to the log whether the KV slots that a beam search moves are reclaimed once their step was read, or the
    stream has waited for it. On a GPU they are garbage before."""
    import torch

    coordinator, stream = module.BeamCoordinator, torch.cpu.Stream
    apply, commit, collect = coordinator._apply_survivors, coordinator.commit_decode, module.collect_orphan_slots
    wait, ahead, launched_on = stream.wait_stream, dict[int, int](), list[Any]()

    def launched(self: Any, group: Any, tokens: Any, parents: Any, tick: int) -> None:
        apply(self, group, tokens, parents, tick)
        if parents is not None:
            ahead[id(group.pending_orphans[-1].new_mapping)] = tick
            launched_on[:] = [torch.cpu.current_stream()]

    def read(self: Any, batch: Any) -> Any:
        for key in [key for key, tick in ahead.items() if tick <= batch.forward_iter]:
            del ahead[key]
        return commit(self, batch)

    def waited(self: Any, other: Any) -> None:
        if self is torch.cpu.current_stream() and other in launched_on:
            ahead.clear()
        wait(self, other)

    def collected(old: Any, new: Any) -> Any:
        print("moved slots were reclaimed", "UNREAD" if ahead.pop(id(new), None) else "read", flush=True)
        return collect(old, new)

    coordinator._apply_survivors, coordinator.commit_decode, stream.wait_stream = launched, read, waited
    module.collect_orphan_slots = collected


def report_turns(module: ModuleType) -> None:
    """Write to the log which steps lists sit out, and how many rows lists have in the others."""
    parted, others = module._parted, module.Turns.others

    def counted(self: Any, batch: Any) -> Any:
        groups = [one.beam_group for one in batch.reqs if module.is_list(one.beam_group)]
        rows = [1 + group.num_member_rows for group in groups if not group.retired]
        print(f"a step of {len(rows)} lists with {sum(rows)} rows", flush=True)
        return others(self, batch)

    module.Turns.others = counted

    def report(batch: Any, which: Any) -> Any:
        part = parted(batch, which)
        print(f"lists sit out a step of {len(part.reqs)} requests", flush=True)
        return part

    module._parted = report


def limit_memory(module: ModuleType) -> None:
    """Let a device have DEVICE_BYTES, if that is set."""
    reserve = module.reserve

    def limited(device: Any, nbytes: int) -> None:
        if nbytes > int(os.environ.get("DEVICE_BYTES", nbytes)):
            raise RuntimeError("out of memory")
        reserve(device, nbytes)

    module.reserve = limited


def sample_on_the_entry_rank(module: ModuleType) -> None:
    """With TESTS_SGLANG_ENTRY_RANK=1, where a batch has grammars all ranks take the first one's tokens, in place of the
    least of all: as SGLang's pull request 39053 has it."""
    import torch

    agree = module.Sampler._sync_token_ids_across_tp

    def broadcast(self: Any, tokens: Any, info: Any) -> None:
        if os.environ.get("TESTS_SGLANG_ENTRY_RANK") != "1":
            agree(self, tokens, info)
        elif info.grammars:
            torch.distributed.broadcast(tokens, src=0, group=self.tp_sync_group)

    module.Sampler._sync_token_ids_across_tp = broadcast


def mask_on_the_entry_rank(module: ModuleType) -> None:
    """The other half of it: no other rank fills or applies a grammar's mask."""
    import torch

    update = module.SamplingBatchInfo.update_regex_vocab_mask

    def of_entry(self: Any) -> None:
        if os.environ.get("TESTS_SGLANG_ENTRY_RANK") == "1" and torch.distributed.get_rank() > 0:
            self.grammar_mask = None
            print("a rank has left the masks of grammars to the first", flush=True)
        else:
            update(self)

    module.SamplingBatchInfo.update_regex_vocab_mask = of_entry


def report_fills(module: ModuleType) -> None:
    """Write to the log how many rows of a bitmask each compiled call fills."""
    fill = module._fill_rows

    def fill_and_report(addresses: Any, states: Any, rows: Any, bitmask: Any) -> None:
        fill(addresses, states, rows, bitmask)
        print(f"rows of item sets filled at once: {len(rows)}", flush=True)

    module._fill_rows = fill_and_report


BEFORE: dict[str, Callable[[], None]] = {"sglang.srt.utils": stub_triton, "torchvision": declare_torchvision_operators}

AFTER: dict[str, Callable[[ModuleType], None]] = {
    "sglang.kernels.ops.sampling.murmur_hash": use_cpu_kernels("murmur_hash32"),
    "sglang.kernels.ops.sampling.renorm": use_cpu_kernels("top_k_renorm_prob", "top_p_renorm_prob"),
    "sglang.kernels.ops.speculative.gather_spec_extras": use_cpu_kernels("gather_spec_extras"),
    "sglang.kernels.ops.speculative.verify_sampling": use_cpu_kernels("tree_speculative_sampling_target_only"),
    "sglang.srt.arg_groups.choices": allow_seeds,
    "sglang.srt.arg_groups.speculative_hook": keep_overlap,
    "sglang.srt.batch_invariant_ops.batch_invariant_ops": patch_batch_invariant_ops,
    "sglang.srt.layers.attention.torch_native_backend": patch_torch_native_backend,
    "sglang.srt.lora.lora_manager": pin_nothing,
    "sglang.srt.parser.reasoning_parser": add_reasoning_parser,
    "sglang.srt.plugins.hook_registry": look_where_names_can_be,
    "sglang.srt.speculative.draft_utils": patch_draft_utils,
    "sglang.srt.speculative.eagle_utils": patch_eagle_utils,
}


def give_further_arguments(hooks: ModuleType) -> None:
    """Let hooks be given an argument that they do not know."""
    runpy.run_path(str(Path(__file__).parents[2] / "further.py"))


REPORTS: dict[str, Callable[[ModuleType], None]] = {
    "itemset.serving.hooks": give_further_arguments,
    "itemset.masking.host": report_fills,
    "sglang.srt.beam_search.coordinator": report_reclaimed,
    "sglang.srt.layers.sampler": sample_on_the_entry_rank,
    "sglang.srt.managers.scheduler": report_left,
    "sglang.srt.managers.tp_worker": report_delays,
    "sglang.srt.sampling.sampling_batch_info": mask_on_the_entry_rank,
    "sglang_static.scheduler.list_hooks": limit_memory,
    "sglang_static.scheduler.lists": report_reads,
    "sglang_static.scheduler.masks": report_unnamed_reads,
    "sglang_static.scheduler.turns": report_turns,
}
if os.environ.get("TESTS_SGLANG_REPORTS") == "1":
    AFTER |= REPORTS

# Other submodules must not be found: SGLang asks for some of them to learn what this build of the kernels can do.
OUR_KERNELS = (
    "itemset.masking.triton_tables",
    "itemset.masking.triton_kernels",
    "itemset.ranking.triton_kernels",
    "itemset.ranking.triton_merge",
    "itemset.ranking.triton_reads",
)
KERNEL_MODULES = ("sgl_kernel", "sgl_kernel.speculative")


class OnImport(MetaPathFinder):
    """Does the above when the modules are imported."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname in KERNEL_MODULES and PathFinder.find_spec("sgl_kernel") is None:
            return ModuleSpec(fullname, KernelLoader(), is_package=fullname == "sgl_kernel")
        if fullname in AFTER:
            spec = PathFinder.find_spec(fullname, path)
            if spec is not None and spec.loader is not None:
                spec.loader = ThenLoader(spec.loader, AFTER[fullname])
            return spec
        if fullname in OUR_KERNELS:
            import interpreted_triton

            spec = PathFinder.find_spec(fullname, path)
            if spec is not None and interpreted_triton.FOLDER.exists():
                spec.loader = WithRealTriton(spec.loader)
            return spec
        if fullname in BEFORE and PathFinder.find_spec(fullname, path) is not None:
            BEFORE.pop(fullname)()
        return None


class ThenLoader(Loader):
    """Loads a module and calls a function with it."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)


class WithRealTriton(ThenLoader):
    """Loads a module for which `triton` is the real one."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, lambda module: None)

    def exec_module(self, module: ModuleType) -> None:
        import interpreted_triton

        with interpreted_triton.real_triton():
            super().exec_module(module)


class KernelLoader(Loader):
    """Makes the modules of `sgl_kernel`."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return KernelModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class KernelModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        import cpu_kernels

        def missing(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name} has no version for tests on a CPU")

        return getattr(cpu_kernels, name, missing)


# The environment may have installed another checkout's as Python started: the last one counts.
if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != OnImport.__name__]
    sys.meta_path.insert(0, OnImport())
