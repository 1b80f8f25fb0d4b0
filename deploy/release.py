"""Build the sdist and the wheel of the commit that is checked out: the same commit gives the same bytes.

python deploy/release.py dist

needs git, and setuptools, which the environments of bootstrap.py have. docs/release.md has the steps around it.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def build(source: Path, out: Path, when: int) -> tuple[Path, Path]:
    """Build a source tree into `out`: the sdist, and the wheel of nothing but that. Returns both.

    when: the time that all their files get, in seconds since 1970. Raises CalledProcessError if a build fails.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        raw = _built("build_sdist", source, folder / "raw", when)
        sdist = _normal(raw, out / raw.name, when)
        with tarfile.open(sdist) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        (unpacked,) = (folder / "unpacked").iterdir()
        wheel = _built("build_wheel", unpacked, folder / "wheel", when)
        (out / wheel.name).write_bytes(wheel.read_bytes())
    return sdist, out / wheel.name


def with_absolute_links(readme: str, homepage: str, version: str) -> str:
    """Return README.md with links to the version's files: a package index shows it without the repository. Raises
    SystemExit, as links that lead nowhere cannot be taken back."""
    if "/OWNER/" in homepage:
        sys.exit(f"pyproject.toml: {homepage} is no address yet: put the repository's owner in the place of OWNER")

    def absolute(found: re.Match[str]) -> str:
        kind = "raw" if found[1] == "!" else "blob"
        return f"{found[1]}[{found[2]}]({homepage}/{kind}/v{version}/{found[3]})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", absolute, readme)


def _built(what: str, source: Path, out: Path, when: int) -> Path:
    """Call setuptools for the sdist or the wheel. It imports nothing of this checkout, and takes no time but `when`."""
    out.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["SOURCE_DATE_EPOCH"] = str(when)
    command = [sys.executable, "-c", BUILD, what, out]
    subprocess.run(command, cwd=source, env=environment, check=True, stdout=subprocess.DEVNULL)
    (path,) = out.iterdir()
    return path


def _normal(sdist: Path, out: Path, when: int) -> Path:
    """The same archive without who built it, when, and with which permissions."""
    with (
        tarfile.open(sdist) as given,
        gzip.GzipFile(filename="", mode="wb", fileobj=out.open("wb"), mtime=when) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for one in sorted(given.getmembers(), key=lambda member: member.name):
            one.mtime, one.mode = when, 0o755 if one.isdir() else 0o644
            one.uid = one.gid = 0
            one.uname = one.gname = ""
            one.pax_headers = {}
            archive.addfile(one, given.extractfile(one) if one.isfile() else None)
    return out


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        committed = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", scratch], input=committed, check=True)
        project = tomllib.loads(Path(scratch, "pyproject.toml").read_text())["project"]
        readme = Path(scratch, "README.md")
        readme.write_text(with_absolute_links(readme.read_text(), project["urls"]["Homepage"], project["version"]))
        asked = ["git", "show", "--no-patch", "--format=%ct", "HEAD"]
        when = int(subprocess.run(asked, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
        for path in build(Path(scratch), Path(sys.argv[1]).resolve(), when):
            print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
