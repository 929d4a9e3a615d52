"""Links of the README work on PyPI, which shows it without the repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINKS = re.findall(r"\]\(\s*([^)\s]+)", (ROOT / PROJECT["readme"]).read_text())


def test_no_link_is_relative():
    assert [link for link in LINKS if not link.startswith(("https://", "#"))] == []


def test_links_into_the_repository_name_existing_files():
    files = PROJECT["urls"]["Homepage"] + "/blob/main/"
    inside = [link for link in LINKS if link.startswith(PROJECT["urls"]["Homepage"])]
    assert inside and all(link.startswith(files) for link in inside)
    paths = [link.removeprefix(files).split("#")[0] for link in inside]
    assert [path for path in paths if not (ROOT / path).exists()] == []
