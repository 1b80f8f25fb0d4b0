"""Packs what a bare GPU machine needs for SGLang, into .gpu-sglang: python benchmarks/gpu_pack_sglang.py [FOLDER]

As `gpu_pack.py`, for the same machine and with the same Python (--environment there); CUDA's compiler, 13.0, has to be
here as well. In some three minutes it packs SGLang's Python code and the wheels that it needs besides; its kernels
(`sgl_kernel`), of which only the code for compute capability 9.0 is kept; the kernels that it compiles as it runs; and
what Triton compiles for item sets (`gpu_jit.py`).

The machine's PyTorch is 2.11. SGLang 0.5.23 asks for another, for which the kernels of its time are built; of them the
Python code is packed, beside the library of the last ones for 2.11, which has all operators that Qwen3 needs.
FlashAttention 3 takes more room than there is: attention is Triton's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gpu_jit
from gpu_engine import CACHE, HOME, ROOT, TRITON_CACHE, extract, install
from gpu_pack import commit, compress, fetch, keep_capability, pretended_libcuda

SGLANG = "sglang==0.5.23"
KERNELS, BUILT = "sglang-kernel==0.4.10", "sglang-kernel==0.4.4"  # what SGLang asks for; the last for PyTorch 2.11
LIBRARY = "sgl_kernel/sm90/common_ops.abi3.so"
OPERATORS = 80
"""How many operators it registers at least."""
MOST_BYTES = 57_000_000  # of the pack: with this project's files it has to stay below 64 MiB
WHEELS = [  # that SGLang and the plugin need there; fastapi below 0.137, which wants opentelemetry
    "annotated-doc", "annotated-types", "apache-tvm-ffi==0.1.11", "asttokens", "compressed-tensors==0.18.0",
    "decorator", "dill", "distro", "executing", "fastapi<0.137", "gguf", "httpcore", "httpx", "ipython",
    "ipython-pygments-lexers", "jiter", "loguru", "matplotlib-inline", "msgspec", "openai==2.8.0", "orjson", "parso",
    "partial-json-parser", "platformdirs", "prompt-toolkit", "pure-eval", "pybase64", "pydantic", "pydantic-core",
    "python-multipart", "pyzmq", "setproctitle", "sniffio", "stack-data", "starlette<1", "torchvision==0.26.0",
    "traitlets", "typing-inspection", "uvicorn", "watchfiles", "wcwidth", "xgrammar", "xxhash",
]  # fmt: skip
TREE = "sglang/srt/mem_cache/rust_tree_core/mem_cache."  # the radix cache: without it Python's takes its place
OTHER_USES = ("sglang/multimodal_gen/", "sglang/test/", "sglang/benchmark/")  # images and videos, tests


def pack_sglang(folder: Path, downloads: Path) -> None:
    with zipfile.ZipFile(next(downloads.glob("sglang-*.whl"))) as wheel:
        python = [(name, wheel.read(name)) for name in wheel.namelist() if _is_wanted(name)]
    with zipfile.ZipFile(next(downloads.glob("sglang_kernel-0.4.10-*.whl"))) as wheel:
        endings = (".py", "METADATA", "RECORD")
        python += [(name, wheel.read(name)) for name in wheel.namelist() if name.endswith(endings)]
    with zipfile.ZipFile(next(downloads.glob("sglang_kernel-0.4.4-*.whl"))) as wheel:
        library = bytearray(wheel.read(LIBRARY))
    keep_capability(library)
    with ThreadPoolExecutor(2) as pool:  # lzma lets go of the interpreter
        rest = pool.submit(compress, folder / "python.tar.xz", python)
        compress(folder / "common_ops.tar.xz", [(LIBRARY, bytes(library))])
        rest.result()


def _is_wanted(name: str) -> bool:
    """Code, and the sources of what is compiled as SGLang runs: they are part of its cache's keys."""
    code = name.endswith((".py", ".json", "METADATA", "RECORD", "entry_points.txt"))
    code = code or (name.startswith("sglang/kernels/jit/") and not name.endswith("/")) or name.startswith(TREE)
    tuned = name.endswith(".json") and "device_name" in name  # mixtures of experts, by card
    return code and not tuned and not name.startswith(OTHER_USES)


def pack_compiled(folder: Path) -> None:
    """Compile with what has been packed, as it will lie there."""
    with tempfile.TemporaryDirectory() as name:
        site, built, modules = Path(name, "site"), Path(name, "jit"), Path(name, gpu_jit.FOLDER)
        for archive in folder.glob("*.tar.xz"):
            extract(archive, site)
        install(folder / "wheels", site)
        given = os.environ | {"SGLANG_JIT_CACHE_DIR": str(built)}
        paths = (ROOT / "tests" / "pretended_card", site, ROOT, ROOT / "benchmarks")
        given |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "CUDA_HOME": cuda_home()}
        given |= {"PRETENDED_LIBCUDA": str(pretended_libcuda(Path(name))), "PRETENDED_DEVICE": "1"}
        script = [sys.executable, str(ROOT / "benchmarks" / "gpu_jit.py")]
        subprocess.run([*script, "build", str(modules)], check=True, env=given)
        libraries = [(f"{gpu_jit.FOLDER}/{path.name}", path.read_bytes()) for path in sorted(modules.iterdir())]
        compress(folder / "jit.tar.xz", libraries)
        shutil.rmtree(TRITON_CACHE, ignore_errors=True)  # it holds absolute paths
        subprocess.run([*script, "triton"], check=True, env=given | {"TRITON_CACHE_DIR": str(TRITON_CACHE)})
    wanted = [path for path in sorted(TRITON_CACHE.rglob("*")) if path.is_file()]
    compress(folder / CACHE, [(str(path.relative_to(HOME)), path.read_bytes()) for path in wanted])


def cuda_home() -> str:
    """Return the folder of CUDA's compiler, past links and scripts."""
    found = os.environ.get("CUDA_HOME") or next((str(path) for path in Path("/usr/local").glob("cuda-13*")), "")
    if not Path(found, "bin", "nvcc").exists():
        raise SystemExit("CUDA's compiler, 13.0, is needed: set CUDA_HOME")
    return found


def pack(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    fetch(folder / "wheels", *WHEELS)
    with tempfile.TemporaryDirectory() as name:
        for one in (SGLANG, KERNELS, BUILT):
            fetch(Path(name), one)
        pack_sglang(folder, Path(name))
    pack_compiled(folder)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / "commit").write_text(commit())
    (folder / "sizes.json").write_text(json.dumps(sizes, indent=1))
    print(f"{sum(sizes.values()) / 1e6:.1f} MB in {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".gpu-sglang")
    if "STATIC_GPU_HOME" not in os.environ:  # of SGLang's steps in `gpu.py`: read as modules are imported
        environment = os.environ | {"STATIC_GPU_HOME": f"{HOME}_sglang"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    pack(parser.parse_args().folder)
