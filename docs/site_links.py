"""A hook of MkDocs: links that leave docs/ lead to the repository, which the site does not hold."""

import re
from typing import Any

REPOSITORY = "https://github.com/OWNER/static-backend/blob/main"  # OWNER: as in pyproject.toml


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    above = page.file.src_uri.count("/") + 1
    return re.sub(rf"\]\((?:\.\./){{{above}}}([^)]+)\)", rf"]({REPOSITORY}/\1)", markdown)
