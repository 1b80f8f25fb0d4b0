"""The site: pages without a server run as they stand, and all are built without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pages
import pytest


def test_rollouts_and_training(tmp_path, tiny_model):
    _, texts, loss = pages.follow("tutorials/rollouts.md", tmp_path, tiny_model)
    assert set(re.findall("'([^']+)'", texts)) <= {"Toy Story", "GoldenEye", "The Third Man", "Rear Window"}
    assert float(loss) > 0


@pytest.mark.skipif(importlib.util.find_spec("mkdocstrings") is None, reason="pip install '.[docs]'")
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=pages.DOCS.parent, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    for page, name in (("reference", "itemset.client.rank"), ("tutorials/labels", "renormalised")):
        assert name in (tmp_path / "site" / page / "index.html").read_text()
