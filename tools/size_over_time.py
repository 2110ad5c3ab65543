"""python -m tools.size_over_time MODEL FIGURE: the draft size that `nodes="auto"` takes, and tokens/s, over time.

Some processes keep the cores busy in the middle third. MODEL is a folder or a name of the hub.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from itertools import cycle
from pathlib import Path

import numpy as np

from model.decoder import Decoder
from model.files import ROOT

WINDOW = 16  # steps that a point of tokens/s is of


def busy() -> None:
    """Use a core."""
    while True:
        pass


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.size_over_time", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("figure", type=Path)
    parser.add_argument("--seconds", type=float, default=90.0)
    given = parser.parse_args()
    lines = (ROOT / "data/sample/question.jsonl").read_text().splitlines()
    chats = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]
    draw(*measure(Decoder.from_pretrained(given.model), chats, given.seconds), given.seconds, given.figure)


def measure(
    decoder: Decoder, chats: list[list[dict[str, str]]], seconds: float
) -> tuple[list[float], list[float], list[float]]:
    """Of each step: when it ended, the nodes of its draft, and its tokens."""
    others = [multiprocessing.Process(target=busy, daemon=True) for _ in range(os.cpu_count() or 1)]
    ends, nodes, tokens = list[float](), list[float](), list[float]()
    start = time.perf_counter()
    try:
        for chat in cycle(chats):
            for step in decoder.stream(chat, max_new_tokens=128):
                now = time.perf_counter() - start
                ends.append(now)
                nodes.append(step.nodes - 1)
                tokens.append(step.accepted)
                if now > seconds:
                    return ends, nodes, tokens
                for other in others:
                    if now > seconds / 3 and other.pid is None:
                        other.start()
                    if now > 2 * seconds / 3 and other.is_alive():
                        other.kill()
    finally:
        for other in others:
            if other.pid is not None:
                other.kill()
    raise AssertionError("chats come again and again")


def draw(ends: list[float], nodes: list[float], tokens: list[float], seconds: float, path: Path) -> None:
    """Both over time, in two panels."""
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 4.2), constrained_layout=True)
    above.plot(ends, nodes, ".", markersize=3, color="#0072B2")
    above.set_ylabel("nodes of the draft")
    speed = np.convolve(tokens, np.ones(WINDOW), "valid")[1:] / (np.array(ends[WINDOW:]) - np.array(ends[:-WINDOW]))
    below.plot(ends[WINDOW:], speed, color="#D55E00", linewidth=1)
    below.set_ylabel(f"tokens/s, {WINDOW} steps")
    below.set_xlabel("seconds")
    below.set_ylim(bottom=0)
    for axes in (above, below):
        axes.axvspan(seconds / 3, 2 * seconds / 3, color="#dddddd", zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
    above.set_title(f"grey: {os.cpu_count()} busy processes on {os.cpu_count()} cores", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
