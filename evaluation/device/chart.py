"""Lines over nodes, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from html import escape

WIDTH, HEIGHT, LEFT, BELOW, RIGHT, ABOVE = 420, 230, 52, 34, 92, 12
Point = Callable[[float, float], tuple[float, float]]  # nodes and a value as a place in the drawing
COLOURS = ("#1f5fa8", "#b5462b", "#3b7d3b", "#7a4a9c", "#6b6b6b")


def lines(curves: Mapping[str, Mapping[int, float]], unit: str) -> str:
    """A chart of named curves, values by nodes below the root, from 0 up; named at their right ends.

    Args:
        unit: of the values.
    """
    most_x = max(n for curve in curves.values() for n in curve) or 1
    most_y = _round_up(max(value for curve in curves.values() for value in curve.values()))

    def at(n: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * n / most_x
        return x, HEIGHT - BELOW - (HEIGHT - BELOW - ABOVE) * value / most_y

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">']
    for i in range(5):
        value = most_y * i / 4
        x, y = at(0, value)
        parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for n in range(0, most_x + 1, 20 if most_x <= 100 else 40):
        x, y = at(n, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{n}</text>')
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 4}" text-anchor="middle">nodes below the root</text>')
    parts.append(f'<text x="4" y="{ABOVE - 1}">{escape(unit)}</text>')
    parts += _curves(curves, at)
    return "".join([*parts, "</svg>"])


def _curves(curves: Mapping[str, Mapping[int, float]], at: Point) -> list[str]:
    """Each as a line with its points, and its name at the right end."""
    parts, ends = [], []
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [at(n, value) for n, value in sorted(curve.items())]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}"/>' for x, y in points]
        ends.append((points[-1][1], points[-1][0], name, colour))
    lowest = -math.inf
    for y, x, name, colour in sorted(ends):  # names of curves that end together stand below one another
        lowest = max(y, lowest + 13)
        parts.append(f'<text x="{x + 6:.1f}" y="{lowest + 4:.1f}" style="fill:{colour}">{escape(name)}</text>')
    return parts


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 6, 8, 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value * 0.999)
