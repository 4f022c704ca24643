"""The pages of docs/ whose code is written as doctests: it runs, and prints what they say."""

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md") if ">>> " in page.read_text())

for needed in ("flax", "optax", "orbax.checkpoint"):
    pytest.importorskip(needed)


def test_pages_are_found():
    assert {"flax.md", "lora.md", "memory.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_code_prints_what_the_page_says(page):
    # Fences become empty lines, so that the closing one is not taken for output.
    text = re.sub(r"^```.*$", "", (DOCS / page).read_text(), flags=re.MULTILINE)
    test = doctest.DocTestParser().get_doctest(text, {}, page, str(DOCS / page), 0)
    report: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.REPORT_NDIFF
    result = doctest.DocTestRunner(optionflags=flags).run(test, out=report.append)
    assert result.attempted and not result.failed, "".join(report)
