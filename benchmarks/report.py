"""Renders the tables of README.md and docs/ from the measurements in benchmarks/results.

    python benchmarks/report.py [--check]

A table stands between two comments, the first of which says in JSON what it shows:

    <!-- results {"file": "cpu-matmul.json", "where": {"bits": 4}, "columns": {"m": "M", "ratio": "times faster"}} -->
    <!-- end of results -->

``file`` is an object with a list ``rows`` of flat objects; its other entries describe the machine. ``where`` keeps the
rows with those values (a list: any of them), ``columns`` gives the fields to show and their headings. With
``"pivot": {"m": "M = "}`` and ``"value": "ratio"`` each value of the field ``m`` becomes a column of ``ratio``;
``columns`` tells rows apart. ``"lowest": {"ratio": 16}`` keeps the 16 rows with the least of a field, in that order.
``--check`` writes nothing and fails if a page is not what its results say.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
BLOCK = re.compile(r"(<!-- results (\{.*?\}) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and 0.99 <= value < 1:
        return f"{value:.4f}"  # what is left to 1 is what matters
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)


def table(headings: list[str], rows: list[list[object]]) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return lines + ["| " + " | ".join(map(cell, row)) + " |" for row in rows]


def describe(results: dict) -> str:
    """One line about the machine, from everything in a result file but its rows."""
    facts = []
    for key, value in results.items():
        if key == "rows":
            continue
        for name, fact in value.items() if isinstance(value, dict) else [(key, value)]:
            if fact != "":
                facts.append(f"{name.replace('_', ' ')} {cell(fact)}")
    return f"Measured on: {', '.join(facts)}."


def render(spec: dict) -> str:
    """Returns the text that stands between the two comments.

    Raises:
      KeyError: a field of ``spec`` is missing, or names no field of the rows.
    """
    file = RESULTS / spec["file"]
    if not file.is_file():
        return "Not measured yet.\n"
    results = json.loads(file.read_text())
    where = {key: value if isinstance(value, list) else [value] for key, value in spec.get("where", {}).items()}
    rows = [row for row in results["rows"] if all(row[key] in values for key, values in where.items())]
    if not rows:
        return "Not measured yet.\n"
    for field, count in spec.get("lowest", {}).items():
        rows = sorted(rows, key=lambda row: row[field])[:count]
    columns = spec["columns"]
    if "pivot" not in spec:
        lines = table(list(columns.values()), [[row[key] for key in columns] for row in rows])
    else:
        ((field, heading),) = spec["pivot"].items()
        across = sorted({row[field] for row in rows})
        values: dict[tuple, dict] = {}
        for row in rows:
            values.setdefault(tuple(row[key] for key in columns), {})[row[field]] = row[spec["value"]]
        lines = table(
            [*columns.values(), *(f"{heading}{value}" for value in across)],
            [[*key, *(found.get(value) for value in across)] for key, found in values.items()],
        )
    return "\n".join([*lines, "", describe(results), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    options = parser.parse_args()
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()
        new = BLOCK.sub(lambda match: match[1] + render(json.loads(match[2])) + match[3], text)
        if new != text:
            stale.append(page.relative_to(ROOT))
            if not options.check:
                page.write_text(new)
    for page in stale:
        print(f"{page} {'is out of date: run python benchmarks/report.py' if options.check else 'written'}")
    return int(bool(stale and options.check))


if __name__ == "__main__":
    sys.exit(main())
