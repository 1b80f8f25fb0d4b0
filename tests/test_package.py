"""The sdist and the wheel: all of every package is in them, and the wheel works in an empty environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["itemset", "vllm_static", "sglang_static"]
BESIDE = ["pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in"]
WHEN = 1_790_000_000
sys.path.append(str(ROOT / "deploy"))
import release  # noqa: E402


def files_of_packages() -> set[str]:
    kinds = ("*.py", "*.html", "*.svg")
    files = (path for name in PACKAGES for kind in kinds for path in (ROOT / name).rglob(kind))
    return {str(path.relative_to(ROOT)) for path in files} | {f"{name}/py.typed" for name in PACKAGES}


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that imports nothing from this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def copied(source: Path) -> Path:
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in BESIDE:
        shutil.copy(ROOT / name, source)
    (source / "tests").mkdir()
    (source / "tests" / "test_nothing.py").touch()
    return source


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist, and a wheel that is built from it alone."""
    return release.build(copied(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("out"), WHEN)


@pytest.mark.slow
def test_a_build_of_the_same_files_has_the_same_bytes(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Elsewhere, later, and with other permissions."""
    (tmp_path / "elsewhere").mkdir()
    source = copied(tmp_path / "elsewhere")
    for path in source.rglob("*.py"):
        os.utime(path, (1, 1))
        path.chmod(0o775)
    again = release.build(source, tmp_path / "out", WHEN)
    assert [path.name for path in again] == [path.name for path in built]
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in built]


def test_links_of_the_readme_lead_to_the_version() -> None:
    readme = release.with_absolute_links((ROOT / "README.md").read_text(), "https://example.org/us", "0.1.0")
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("http")] == []
    assert "https://example.org/us/raw/v0.1.0/docs/pictures/first_request.svg" in links
    assert "https://example.org/us/blob/v0.1.0/docs/index.md" in links
    with pytest.raises(SystemExit, match="put the repository's owner in the place of OWNER"):
        release.with_absolute_links("", "https://example.org/OWNER/us", "0.1.0")


def test_the_version_stands_in_one_place(built: tuple[Path, Path]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert [path.name.split("-")[1].removesuffix(".tar.gz") for path in built] == [version, version]


def test_the_sdist_holds_every_package_and_no_tests(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert files_of_packages() | set(BESIDE) <= names
    assert not [name for name in names if name.startswith("tests/")]


def test_the_wheel_holds_every_package_and_the_licence(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        names = set(archive.namelist())
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        metadata: Message = message_from_bytes(archive.read(f"{info}/METADATA"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert {name for name in names if not name.startswith(info)} == files_of_packages()
    assert f"{info}/licenses/LICENSE" in names
    assert metadata["License-Expression"] == "Apache-2.0"
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert len(metadata.get_all("Classifier", [])) > 3
    for group in ("console_scripts", "vllm.general_plugins", "vllm.platform_plugins", "sglang.srt.plugins"):
        assert f"[{group}]" in entry_points


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Empty but for what it requires, which is this environment's: nothing is downloaded."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    scripts, python = tmp_path / "venv" / "bin", tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--no-deps", "--no-index", built[1], cwd=tmp_path)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(python, "-c", code, cwd=tmp_path).strip())
    # A path in a .pth file stands after the environment's own packages, and .pth files over there are not read.
    (packages / "required.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / "items.jsonl").write_text('{"ids": [1, 2, 3], "key": "A"}\n{"ids": [1, 4], "key": "B"}\n')
    build = ["build", "items.jsonl", "--column", "ids", "--key", "key", "-o", "items.itemset"]
    assert "items        2" in run(scripts / "itemset", *build, cwd=tmp_path)
    assert run(scripts / "itemset", "lookup", "items.itemset", "--tokens", "1,4", cwd=tmp_path) == "B\t1,4\n"
    code = "import itemset; print(itemset.__file__, itemset.load('items.itemset').tokens(['A']))"
    code += "; import sys; assert not {'torch', 'vllm', 'sglang', 'transformers'}.intersection(sys.modules)"
    assert run(python, "-c", code, cwd=tmp_path) == f"{packages / 'itemset' / '__init__.py'} [[1, 2, 3]]\n"
