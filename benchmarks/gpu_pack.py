"""Packs all that the fifteen minutes on a bare GPU machine need, into .gpu: python benchmarks/gpu_pack.py [FOLDER]

The machine has Python 3.12, torch 2.11 for CUDA 13, Triton 3.6, transformers, Numba and PyArrow, and no network. Run
this with the same versions, on any machine (--environment installs them: 7 GB):

    python3.12 benchmarks/gpu_pack.py --environment .venv-gpu
    .venv-gpu/bin/python benchmarks/gpu_pack.py

What it packs, in some two minutes: the real vLLM with its compiled operators and FlashAttention 3, of which only the
code for compute capability 9.0 is kept; the wheels that vLLM needs besides; what the kernels in Numba give
(`gpu_golden.py`); and what Triton compiles, made without a device (`gpu_nodev.py`).
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

from gpu_engine import CACHE, HOME, ROOT, TRITON_CACHE  # Triton's cache holds absolute paths

VLLM = "vllm==0.33.0"
LIBRARIES = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_vllm_fa3_C")  # FlashAttention 2 is not used on Hopper
OPERATORS = {"_C": 100, "_C_cache_ops": 15, "_moe_C": 15, "_vllm_fa3_C": 2}
"""How many operators these register at least."""
MOST_BYTES = 59_000_000  # of the pack: with this project's files it has to stay below 64 MiB
PYTHON, CAPABILITY = "3.12", 90
WHEELS = [  # that vLLM and the plugin need there; fastapi below 0.137, which wants opentelemetry
    "annotated-types", "apache-tvm-ffi", "astor", "blake3", "cachetools", "cbor2", "compressed-tensors", "depyf",
    "diskcache", "distro", "fastapi<0.137", "gguf", "httpcore2", "httpx2", "ijson", "interegular", "jiter", "lark",
    "llguidance", "lm-format-enforcer", "loguru", "msgspec", "openai", "oss-harmony", "outlines-core",
    "partial-json-parser", "platformdirs", "prometheus-fastapi-instrumentator", "pybase64", "pydantic",
    "pydantic-core", "python-json-logger", "pyzmq", "setproctitle", "sniffio", "starlette", "truststore",
    "typing-inspection", "watchfiles", "xgrammar",
]  # fmt: skip
MACHINE = [  # what such a machine has, of all that the steps import
    "torch==2.11.0", "transformers==5.17.0", "tokenizers==0.23.2", "accelerate", "aiohttp", "cloudpickle", "einops",
    "fsspec", "hypothesis", "numba", "numpy==2.5.2", "nvidia-ml-py", "opencv-python-headless", "pandas", "pillow",
    "prometheus-client", "protobuf", "psutil", "py-cpuinfo", "pyarrow", "pytest", "pyyaml", "regex", "requests",
    "scikit-learn", "scipy", "sentencepiece", "tiktoken", "tqdm", "uvloop", "wrapt", "msgspec", "platformdirs",
]  # fmt: skip
FATBIN, CUBIN = 0xBA55ED50, 2


def keep_capability(library: bytearray, capability: int = CAPABILITY) -> None:
    """Zero the device code of all other compute capabilities in an ELF file. Offsets stay as they are."""
    for name, offset, size in _sections(library):
        if name != ".nv_fatbin":
            continue
        at, end = offset, offset + size
        while at < end - 16:
            magic, _, header, length = struct.unpack_from("<IHHQ", library, at)
            if magic != FATBIN:
                at += 8
                continue
            entry, at = at + header, at + header + length
            while entry < at:
                kind, _, head, payload = struct.unpack_from("<HHIQ", library, entry)
                (of,) = struct.unpack_from("<I", library, entry + 28)
                if (kind, of) != (CUBIN, capability):
                    library[entry + head : entry + head + payload] = bytes(payload)
                entry += head + payload


def _sections(library: bytearray) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", library, table + i * size) for i in range(count)]
    for name, _, _, _, offset, length in rows:
        begin = rows[names][4] + name
        yield library[begin : library.index(b"\0", begin)].decode(), offset, length


def compress(path: Path, members: Iterator[tuple[str, bytes]] | list[tuple[str, bytes]]) -> None:
    with lzma.open(path, "wb", preset=6) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in members:
            about = tarfile.TarInfo(name)
            about.size, about.mode = len(content), 0o755
            archive.addfile(about, BytesIO(content))


def fetch(folder: Path, *wanted: str) -> None:
    """Download wheels for the machine's Python. pip takes each name of a platform as it is."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--dest", str(folder)]
    for year in ("_2_35", "_2_34", "_2_31", "_2_28", "_2_27", "_2_26", "_2_24", "_2_17", "2014", "1"):
        command += ["--platform", f"manylinux{year}_x86_64"]
    subprocess.run([*command, *wanted], check=True)


def pack_vllm(folder: Path, wheel_of_vllm: Path) -> None:
    with zipfile.ZipFile(wheel_of_vllm) as wheel:
        names = wheel.namelist()
        endings = (".py", ".json", "METADATA", "RECORD", "entry_points.txt")
        python = [(name, wheel.read(name)) for name in names if name.endswith(endings)]
        libraries = {name: bytearray(wheel.read(name)) for name in names if _is_wanted(name)}

    def one(name: str) -> None:
        keep_capability(libraries[name])
        compress(folder / f"{Path(name).name.partition('.')[0]}.tar.xz", [(name, bytes(libraries[name]))])

    with ThreadPoolExecutor(2) as pool:  # lzma lets go of the interpreter
        rest = pool.submit(compress, folder / "python.tar.xz", python)
        list(pool.map(one, libraries))
        rest.result()


def _is_wanted(name: str) -> bool:
    return name.endswith(".so") and any(f"/{one}." in name for one in LIBRARIES)


def pack_kernels(folder: Path) -> None:
    """Record what the kernels in Numba give, and compile those in Triton by running what was recorded."""
    golden = folder / "golden.pt"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": ""}
    script = str(ROOT / "benchmarks" / "gpu_golden.py")
    subprocess.run([sys.executable, script, "record", str(golden)], check=True, env=environment)
    shutil.rmtree(TRITON_CACHE, ignore_errors=True)
    environment |= {"TRITON_CACHE_DIR": str(TRITON_CACHE)}
    subprocess.run([sys.executable, script, "compile", str(golden)], check=True, env=environment)
    wanted = [path for path in sorted(TRITON_CACHE.rglob("*")) if path.is_file()]
    compress(folder / CACHE, [(str(path.relative_to(HOME)), path.read_bytes()) for path in wanted])


def pack(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    fetch(folder / "wheels", *WHEELS)
    with tempfile.TemporaryDirectory() as name:
        fetch(Path(name), VLLM)
        pack_vllm(folder, next(Path(name).glob("vllm-*.whl")))
    pack_kernels(folder)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / "commit").write_text(commit())
    (folder / "sizes.json").write_text(json.dumps(sizes, indent=1))
    print(f"{sum(sizes.values()) / 1e6:.1f} MB in {folder}")


def pretended_libcuda(folder: Path) -> Path:
    """Make a libcuda with the names that libraries look for, which do nothing: to load them without a card."""
    names = "cuGetProcAddress_v2", "cuPointerGetAttribute", "cuTensorMapEncodeTiled"
    (folder / "stub.c").write_text("".join(f"int {name}() {{ return 1; }}\n" for name in names))
    library = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(folder / "stub.c"), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def commit() -> str:
    return subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True).stdout


def environment(folder: Path) -> None:
    """Install what the machine has."""
    import venv

    venv.create(folder, with_pip=True)
    subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *MACHINE], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".gpu")
    parser.add_argument(
        "--environment", type=Path, metavar="DIR", help="install what the machine has, and nothing else"
    )
    arguments = parser.parse_args()
    environment(arguments.environment) if arguments.environment else pack(arguments.folder)
