"""Draws docs/speed-h100.svg from benchmarks/results/h100-matmul.json: times faster than dense over tokens.

    python benchmarks/plots.py [--check]

Beside what was measured stands the most that could be: the dense product's time over the least time of the int4
product, which is that of reading its bytes at the highest bandwidth, or of its operations at the highest rate, that any
dense product in the file reaches. ``--check`` writes nothing and fails if the plot is not what the results say.
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
PLOT = ROOT / "docs" / "speed-h100.svg"
SHAPES = ((8192, 28672), (8192, 8192), (4096, 4096))
SCHEME = {"dtype": "bfloat16", "bits": 4, "group_size": 128, "zeros": "symmetric", "op": "matmul"}


def draw() -> str:
    rows = json.loads(RESULTS.read_text())["rows"]
    rows = [row for row in rows if all(row[key] == value for key, value in SCHEME.items())]
    bandwidth = max(2 * row["k"] * row["n"] / row["dense_us"] for row in rows)  # of bfloat16 weights
    rate = max(2 * row["m"] * row["k"] * row["n"] / row["dense_us"] for row in rows)

    def least(row: dict) -> float:
        weights = row["k"] * row["n"] * (SCHEME["bits"] / 8 + 2 / SCHEME["group_size"])
        activations = 2 * row["m"] * (row["k"] + row["n"])
        return max((weights + activations) / bandwidth, 2 * row["m"] * row["k"] * row["n"] / rate)

    series = []
    for k, n in SHAPES:
        shape = sorted((row for row in rows if (row["k"], row["n"]) == (k, n)), key=lambda row: row["m"])
        series.append(Series(f"{k} x {n}", [(row["m"], row["ratio"]) for row in shape]))
        if (k, n) == SHAPES[0]:
            bound = Series(f"{k} x {n}, at most", [(row["m"], row["dense_us"] / least(row)) for row in shape])
    return line_chart(
        [*series, bound], x_label="tokens M", y_label="times faster", log_x=True, reference=(1.0, "dense bfloat16")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the plot is out of date")
    options = parser.parse_args()
    drawn = draw()
    stale = not PLOT.is_file() or PLOT.read_text() != drawn
    if stale and not options.check:
        PLOT.write_text(drawn)
    if stale:
        what = "is out of date: run python benchmarks/plots.py" if options.check else "written"
        print(f"{PLOT.relative_to(ROOT)} {what}")
    return int(stale and options.check)


if __name__ == "__main__":
    sys.exit(main())
