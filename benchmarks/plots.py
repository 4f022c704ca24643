"""Draws docs/speed-h100.svg from benchmarks/results/h100-matmul.json: time over tokens, measured and at the least.

    python benchmarks/plots.py [--check]

For each shape there are the dense product, the int4 product, and the least time that the int4 product could take: that
of reading its bytes at the highest bandwidth, or of its operations at the highest rate, that any dense product in the
file reaches. ``--check`` writes nothing and fails if the plot is not what the results say.
"""

import argparse
import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h100-matmul.json"
PLOT = ROOT / "docs" / "speed-h100.svg"
SHAPES = ((8192, 28672), (8192, 8192), (4096, 4096))
SCHEME = {"dtype": "bfloat16", "bits": 4, "group_size": 128, "zeros": "symmetric", "op": "matmul"}
WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 300, 52, 40, 18
LINES = (  # field, colour, dashes, label
    ("dense_us", "#888", "", "dense bfloat16"),
    ("us", "#0b62c4", "", "int4, measured"),
    ("least", "#c43d0b", "5 4", "int4, at the least"),
)


def measured() -> list[dict]:
    """The rows of the scheme, each with its least time."""
    rows = json.loads(RESULTS.read_text())["rows"]
    rows = [row for row in rows if all(row[key] == value for key, value in SCHEME.items())]
    bandwidth = max(2 * row["k"] * row["n"] / row["dense_us"] for row in rows)  # of bfloat16 weights
    rate = max(2 * row["m"] * row["k"] * row["n"] / row["dense_us"] for row in rows)
    for row in rows:
        weights = row["k"] * row["n"] * (SCHEME["bits"] / 8 + 2 / SCHEME["group_size"])
        activations = 2 * row["m"] * (row["k"] + row["n"])
        operations = 2 * row["m"] * row["k"] * row["n"]
        row["least"] = max((weights + activations) / bandwidth, operations / rate)
    return rows


def panel(rows: list[dict], left: float, least: float, most: float) -> list[str]:
    """One shape: log2 of the tokens to the right, log10 of the microseconds up."""
    last = max(math.log2(row["m"]) for row in rows)

    def x(m: float) -> float:
        return left + WIDTH * math.log2(m) / last

    def y(us: float) -> float:
        return TOP + HEIGHT * (1 - (math.log10(us) - least) / (most - least))

    k, n = rows[0]["k"], rows[0]["n"]
    parts = [f'<text x="{left + WIDTH / 2:.1f}" y="{TOP - 12}" text-anchor="middle">K = {k}, N = {n}</text>']
    for power in range(math.ceil(least), math.floor(most) + 1):
        parts.append(f'<path d="M{left:.1f} {y(10**power):.1f}h{WIDTH}" stroke="#ddd"/>')
        if left == LEFT:
            parts.append(f'<text x="{left - 6}" y="{y(10**power) + 4:.1f}" text-anchor="end">{10**power}</text>')
    for power in range(0, int(last) + 1, 2):
        parts.append(f'<text x="{x(2**power):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{2**power}</text>')
    for field, colour, dashes, _ in LINES:
        points = " ".join(f"{x(row['m']):.1f},{y(row[field]):.1f}" for row in sorted(rows, key=lambda row: row["m"]))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        )
    return parts


def draw() -> str:
    rows = measured()
    shown = [[row for row in rows if (row["k"], row["n"]) == shape] for shape in SHAPES]
    times = [row[field] for shape in shown for row in shape for field, *_ in LINES]
    least, most = math.log10(min(times)) - 0.05, math.log10(max(times)) + 0.05
    width, height = LEFT + len(SHAPES) * (WIDTH + GAP), TOP + HEIGHT + 66
    parts = ['<rect width="100%" height="100%" fill="white"/>']
    for i, shape in enumerate(shown):
        parts += panel(shape, LEFT + i * (WIDTH + GAP), least, most)
    parts.append(f'<text x="{width / 2:.1f}" y="{TOP + HEIGHT + 34}" text-anchor="middle">tokens M</text>')
    parts.append(f'<text transform="translate(14 {TOP + HEIGHT / 2}) rotate(-90)" text-anchor="middle">us</text>')
    for i, (_, colour, dashes, label) in enumerate(LINES):
        left, bottom = LEFT + 200 * i, height - 12
        parts.append(
            f'<path d="M{left} {bottom - 4}h28" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        )
        parts.append(f'<text x="{left + 34}" y="{bottom}">{label}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">\n' + "\n".join(parts) + "\n</svg>\n"
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
