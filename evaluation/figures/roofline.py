"""The roofline: what a step achieves against what the device can do, from the object that the step bench prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from .style import colour, footnote, legend, marker, panels


def roofline(found: Mapping[str, Any]) -> Figure:
    """Operations a second over operations a byte: no step lies above the line of the measured copy and product rates.

    Args:
        found: the step bench's JSON object.
    """
    bandwidth, peak = found["rates"]["bytes_per_second"] / 1e9, found["rates"]["flop_per_second"] / 1e9
    steps = {name: found[name] for name in ("vanilla", "recycling")}
    ridge = peak / bandwidth  # where the device's two limits meet
    intensity = {name: step["flop"] / step["bytes"] for name, step in steps.items()}
    left, right = min(*intensity.values(), ridge) / 3, max(*intensity.values(), ridge) * 3
    figure, (axes,) = panels(height=2.2)
    label = f"the device: {bandwidth:.0f} GB/s copied, {peak:.0f} GFLOP/s multiplied"
    axes.loglog([left, ridge, right], [left * bandwidth, peak, peak], color=colour(1), label=label)
    for i, (name, step) in enumerate(steps.items()):
        reached = step["flop"] / step["step_us"] / 1e3
        share = 100 * step["floor_us"] / step["step_us"]
        nodes = f"{step['nodes']} node{'s' if step['nodes'] > 1 else ''}"
        label = f"{name}, {nodes}: {step['step_us'] / 1e3:.2f} ms a step, {share:.0f} % of the limit"
        axes.plot(intensity[name], reached, marker(i + 2), color=colour(i + 2), markersize=5, label=label)
    axes.set_xlim(left, right)
    axes.margins(y=0.1)
    axes.set_xlabel("FLOP a byte that must be read")
    axes.set_ylabel("GFLOP/s of a whole step")
    axes.grid(axis="x")
    legend(figure, axes)
    footnote(figure, f"{found['what']} on {found['device']}, {found['execution']}")
    return figure
