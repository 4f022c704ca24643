"""The pages of docs/: code that is written as doctests runs and prints what they say, and the site shows every page."""

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if ">>> " in page.read_text())

for needed in ("flax", "optax", "orbax.checkpoint"):
    pytest.importorskip(needed)


def test_pages_are_found():
    assert {"flax.md", "lora.md", "memory.md"} <= set(PAGES)


def test_every_page_is_in_the_navigation():
    listed = set()
    for page in DOCS.rglob("*.md"):
        for tree in re.findall(r"^```{toctree}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / f"{name}.md").relative_to(DOCS) for name in names}
    assert listed | {Path("index.md")} == {page.relative_to(DOCS) for page in DOCS.rglob("*.md")}


@pytest.mark.parametrize("page", PAGES)
def test_code_prints_what_the_page_says(page):
    # Fences become empty lines, so that the closing one is not taken for output.
    text = re.sub(r"^```.*$", "", (DOCS / page).read_text(), flags=re.MULTILINE)
    test = doctest.DocTestParser().get_doctest(text, {}, page, str(DOCS / page), 0)
    report: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.REPORT_NDIFF
    result = doctest.DocTestRunner(optionflags=flags).run(test, out=report.append)
    assert result.attempted and not result.failed, "".join(report)
