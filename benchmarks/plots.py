"""Draws what is in benchmarks/results/h100-matmul.json over the number of tokens: docs/speed-h100.svg, how many times
faster than dense products are, and docs/time-h100.svg, how long they take.

    python benchmarks/plots.py [--check]

Beside what was measured stand roofs: the time that the int4 product's bytes take at the highest bandwidth, and its
operations at the highest rate, that any dense product in the file reaches. ``--check`` writes nothing and fails if a
plot is not what the results say.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jax_wonly._svg import Series, line_chart

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h100-matmul.json"
SHAPES = ((8192, 28672), (8192, 8192), (4096, 4096))
SCHEME = {"dtype": "bfloat16", "bits": 4, "group_size": 128, "zeros": "symmetric", "op": "matmul"}


class Roofs:
    """The least microseconds of the int4 product of a row, by its bytes and by its operations."""

    def __init__(self, rows: list[dict]):
        self.bandwidth = max(2 * row["k"] * row["n"] / row["dense_us"] for row in rows)  # of bfloat16 weights
        self.rate = max(2 * row["m"] * row["k"] * row["n"] / row["dense_us"] for row in rows)

    def memory(self, row: dict) -> float:
        weights = row["k"] * row["n"] * (SCHEME["bits"] / 8 + 2 / SCHEME["group_size"])
        return (weights + 2 * row["m"] * (row["k"] + row["n"])) / self.bandwidth

    def arithmetic(self, row: dict) -> float:
        return 2 * row["m"] * row["k"] * row["n"] / self.rate


def of_shape(rows: list[dict], k: int, n: int) -> list[dict]:
    return sorted((row for row in rows if (row["k"], row["n"]) == (k, n)), key=lambda row: row["m"])


def speeds(rows: list[dict], roofs: Roofs) -> str:
    series = [Series(f"{k} x {n}", [(row["m"], row["ratio"]) for row in of_shape(rows, k, n)]) for k, n in SHAPES]
    k, n = SHAPES[0]
    most = [(row["m"], row["dense_us"] / max(roofs.memory(row), roofs.arithmetic(row))) for row in of_shape(rows, k, n)]
    return line_chart(
        [*series, Series(f"{k} x {n}, at most", most)],
        x_label="tokens M",
        y_label="times faster",
        log_x=True,
        reference=(1.0, "dense bfloat16"),
    )


def times(rows: list[dict], roofs: Roofs) -> str:
    k, n = SHAPES[0]
    shape = of_shape(rows, k, n)
    series = [
        Series(f"int4, {k} x {n}", [(row["m"], row["us"]) for row in shape]),
        Series("dense bfloat16", [(row["m"], row["dense_us"]) for row in shape]),
        Series("its bytes at the highest bandwidth", [(row["m"], roofs.memory(row)) for row in shape], dashed=True),
        Series(
            "its operations at the highest rate",
            [(row["m"], us) for row in shape if (us := roofs.arithmetic(row)) > roofs.memory(row) / 4],
            dashed=True,
        ),
    ]
    return line_chart(series, x_label="tokens M", y_label="microseconds", log_x=True, log_y=True, height=400)


PLOTS = {ROOT / "docs" / "speed-h100.svg": speeds, ROOT / "docs" / "time-h100.svg": times}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a plot is out of date")
    options = parser.parse_args()
    rows = json.loads(RESULTS.read_text())["rows"]
    rows = [row for row in rows if all(row[key] == value for key, value in SCHEME.items())]
    stale = False
    for plot, draw in PLOTS.items():
        drawn = draw(rows, Roofs(rows))
        if plot.is_file() and plot.read_text() == drawn:
            continue
        stale = True
        if not options.check:
            plot.write_text(drawn)
        what = "is out of date: run python benchmarks/plots.py" if options.check else "written"
        print(f"{plot.relative_to(ROOT)} {what}")
    return int(stale and options.check)


if __name__ == "__main__":
    sys.exit(main())
