"""A hook of MkDocs: links that leave docs/ lead to the repository, which the site does not hold."""

import re
import tomllib
from pathlib import Path
from typing import Any

PROJECT = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
REPOSITORY = f"{PROJECT['urls']['Homepage']}/blob/main"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    above = page.file.src_uri.count("/") + 1
    return re.sub(rf"\]\((?:\.\./){{{above}}}([^)]+)\)", rf"]({REPOSITORY}/\1)", markdown)
