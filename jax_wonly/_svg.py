"""Small charts as SVG text, without dependencies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 64, 16, 24, 48


@dataclass(frozen=True)
class Series:
    """Points ``(x, y)`` of one colour; the first ``joined`` of them (None: all) are joined by a line.

    ``dashed``: a dashed line through points that are not drawn.
    """

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()
    joined: int | None = None
    dashed: bool = False


def _ticks(low: float, high: float, count: int, log: bool) -> list[float]:
    """Round numbers from ``low`` to ``high``."""
    if log:
        powers = [2.0**i for i in range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)]
        return powers[:: math.ceil(len(powers) / 12)]
    step = 10 ** math.floor(math.log10((high - low) / 2))
    step *= next(f for f in (1, 2, 5, 10) if (high - low) / (f * step) <= count)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _tick_text(value: float, ticks: Sequence[float]) -> str:
    if len(ticks) > 1 and ticks[1] - ticks[0] < 1:
        return f"{value:.{-math.floor(math.log10(ticks[1] - ticks[0]))}f}"
    return f"{value:g}"


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "") -> str:
    fill = f' fill="{colour}"' if colour else ""
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{where}{fill}>{escape(text)}</text>'


def _document(width: int, height: int, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    x_range: tuple[float, float] | None = None,
    reference: tuple[float, str] | None = None,
    height: int = 320,
) -> str:
    """Returns an SVG of points and lines; ``reference`` is a dashed horizontal line with its name.

    Args:
      series: at least one point in all.
      x_label, y_label: of the axes.
      log_x, log_y: whether the axis is logarithmic, with powers of two. With ``log_y`` the names are on the left.
      x_range: of the x axis; default: that of the points.
      reference: a value of y and what it is.
      height: in pixels.
    """
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points] + ([reference[0]] if reference else [])
    x_low, x_high = x_range or (min(xs), max(xs))
    if x_low == x_high:
        x_low, x_high = (x_low / 2, x_high * 2) if log_x else (x_low - 1, x_high + 1)
    margin = 0.1 * (max(ys) - min(ys)) or 0.5 * abs(ys[0]) or 1.0
    y_low, y_high = (min(ys) / 1.2, max(ys) * 1.2) if log_y else (min(ys) - margin, max(ys) + margin)

    def x_at(x):
        share = math.log(x / x_low) / math.log(x_high / x_low) if log_x else (x - x_low) / (x_high - x_low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y_at(y):
        share = math.log(y_high / y) / math.log(y_high / y_low) if log_y else (y_high - y) / (y_high - y_low)
        return _TOP + share * (height - _TOP - _BOTTOM)

    body = []
    ticks = _ticks(y_low, y_high, 6, log_y)
    for value in ticks:
        body.append(f'<path d="M{_LEFT} {y_at(value):.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        body.append(_text(_LEFT - 8, y_at(value) + 4, _tick_text(value, ticks), "end"))
    ticks = _ticks(x_low, x_high, 10, log_x)
    for value in ticks:
        body.append(_text(x_at(value), height - _BOTTOM + 18, _tick_text(value, ticks), "middle"))
    if reference:
        at = y_at(reference[0])
        body.append(f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" stroke="#555" stroke-dasharray="5 4"/>')
        body.append(_text(_WIDTH - _RIGHT, at - 6, reference[1], "end"))
    for i, s in enumerate(series):
        colour = COLOURS[i % len(COLOURS)]
        line = [f"{x_at(x):.1f} {y_at(y):.1f}" for x, y in s.points[: s.joined]]
        if line:
            dashes = ' stroke-dasharray="5 4"' if s.dashed else ""
            body.append(f'<path d="M{"L".join(line)}" fill="none" stroke="{colour}"{dashes}/>')
        for j, (x, y) in enumerate(() if s.dashed else s.points):
            body.append(f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="4" fill="{colour}"/>')
            if j < len(s.labels):
                body.append(_text(x_at(x) + 8, y_at(y) - 6, s.labels[j], "start", colour))
    for i, s in enumerate(series):
        x, anchor = (_LEFT + 8, "start") if log_y else (_WIDTH - _RIGHT, "end")
        body.append(_text(x, _TOP + 16 * i + 12, s.name, anchor, COLOURS[i % len(COLOURS)]))
    body.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, height - 10, x_label, "middle"))
    body.append(
        f'<text transform="translate(16 {height / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    return _document(_WIDTH, height, body)


def bar_chart(bars: Sequence[tuple[str, float]], *, label: str, unit: str = "") -> str:
    """Returns an SVG of horizontal bars: names, and values from 0 on with ``unit`` behind them."""
    left = min(320, 16 + 7 * max((len(name) for name, _ in bars), default=0))
    width, row = left + 400, 20
    most = max((value for _, value in bars), default=0) or 1
    body = [_text(left, 18, label)]
    for i, (name, value) in enumerate(bars):
        y = 28 + row * i
        shown = name if len(name) <= 44 else "..." + name[-41:]
        body.append(_text(left - 8, y + 13, shown, "end"))
        body.append(
            f'<rect x="{left}" y="{y}" width="{310 * value / most:.1f}" height="{row - 4}" fill="{COLOURS[0]}"/>'
        )
        body.append(_text(left + 310 * value / most + 6, y + 13, f"{value:.3g}{unit}"))
    return _document(width, 40 + row * len(bars), body)
