"""docs/benchmarks.md is what the script writes."""

from __future__ import annotations

import docs_page


def test_the_page_is_what_the_script_writes_from_the_results() -> None:
    assert docs_page.PAGE.read_text() == docs_page.page(), "run `make docs-benchmarks`"
