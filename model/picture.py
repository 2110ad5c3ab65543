"""Draw an answer as SVG: its text, coloured by the tokens of each step, and one draft tree."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .decoder import Decoder, Prompt, pieces
from .engine import RankPath, StepRecord, decode, exhaust
from .errors import visible

# characters per line, width of a character, height of a line
COLUMNS = 66
CHAR = 8.4
LINE = 23
WIDTH = 32 + COLUMNS * CHAR
# in the tree: width of a character, height of a row, gap between a node and its children
LABEL = 7.2
ROW = 17
GAP = 26
STYLE = """
text { font: 14px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1d2126 }
.quiet { fill: #5c636b } .small { font-size: 12px } .words { font: 13px system-ui, "Segoe UI", Arial, sans-serif }
.card { fill: #fff; stroke: #d9dad4 } .edge { fill: none; stroke: #b9bdc2 } .path { stroke: #0072b2; stroke-width: 2.5 }
.on { fill: #00568a; font-weight: 700 }
.s1 { fill: #eef1f4 } .s2 { fill: #d3e4f3 } .s3 { fill: #a9cdea } .s4 { fill: #7db4de } .s5 { fill: #56a0d3 }
@media (prefers-color-scheme: dark) {
text { fill: #e4e5e3 } .quiet { fill: #a0a7ae } .card { fill: #15181c; stroke: #353b42 }
.edge { stroke: #4a525a } .path { stroke: #40a4e0 } .on { fill: #7cc4f2 }
.s1 { fill: #23282e } .s2 { fill: #243d54 } .s3 { fill: #275178 } .s4 { fill: #2b669c } .s5 { fill: #2f7cc0 } }
"""  # noqa: E501
Nodes = list[tuple[RankPath, str, bool]]  # of a draft: rank path, text, and True if accepted


@dataclass(frozen=True)
class Picture:
    pieces: list[tuple[str, int]]
    ids: list[int]
    lengths: list[int]
    step: int
    nodes: Nodes

    @classmethod
    def watch(cls, decoder: Decoder, prompt: Prompt, *, max_new_tokens: int = 96) -> Picture:
        """Decode greedily; the draft kept is of the first step that accepted most nodes."""
        with decoder.target.turns:
            session: Any = decoder.method.session()

        observe = session.observe
        steps = list[StepRecord]()
        drafts: dict[int, Nodes] = {}

        def watched(verification: Any) -> None:
            draft = verification.draft
            path = set(verification.path)
            rows = enumerate(zip(draft.tree.rank_paths, draft.tokens.tolist(), strict=True))
            drafts[len(steps) + 1] = [
                (ranks, decoder.text_of([t]), node in path) for node, (ranks, t) in rows
            ]
            observe(verification)

        session.observe = watched
        ids = decoder.ids_of(prompt)
        settings = dict(max_new_tokens=max_new_tokens, eos=decoder.eos)
        out = exhaust(decode(decoder.target, session, ids, **settings), steps.append)

        step = max(drafts, key=lambda number: sum(ok for _, _, ok in drafts[number]), default=0)
        parts = list(pieces(steps, decoder.text_of, decoder.probes))
        return cls(parts, out.tokens, out.accept_lengths, step, drafts.get(step, []))

    def svg(self, *notes: str) -> str:
        parts, bottom = _text(self)
        width = WIDTH
        if self.nodes:
            drawn, bottom, right = _tree(self, bottom + 2 * ROW)
            parts += drawn
            width = max(width, right + 16)

        parts += [_words(16, bottom + 19 * number, note) for number, note in enumerate(notes, 1)]
        height = bottom + 19 * len(notes) + 16
        size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
        data = f"<metadata>{_escaped(json.dumps(asdict(self)))}</metadata>"
        card = (
            f'<rect class="card" x=".5" y=".5" width="{width - 1:.0f}" height="{height - 1:.0f}"'
            ' rx="8"/>'
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
        return "\n".join([head, data, f"<style>{STYLE}</style>", card, *parts, "</svg>\n"])


def _escaped(text: str) -> str:
    return html.escape(re.sub("[\ud800-\udfff\ufffe\uffff]", "\ufffd", visible(text)))


def _words(x: float, y: float, text: str) -> str:
    return f'<text class="quiet words" x="{x:.0f}" y="{y:.0f}">{_escaped(text)}</text>'


def _fitted(x: float, y: float, text: str, width: float, kind: str = "") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" textLength="{width:.1f}"'
        f' lengthAdjust="spacingAndGlyphs" xml:space="preserve">{_escaped(text)}</text>'
    )


def _lines(parts: list[tuple[str, int]]) -> Iterator[tuple[int, int, str, int]]:
    row = 0
    column = 0
    for text, count in parts:
        start = column
        shown = ""
        for word in re.findall(rf"\n+|[^\S\n]|\S{{1,{COLUMNS}}}", visible(text)):
            newlines = word.count("\n")
            if newlines or column + len(word) > COLUMNS:
                if shown.strip():
                    yield row, start, shown, count
                row += min(newlines or 1, 2)
                start = column = 0
                shown = ""
            if column or not word.isspace():
                shown += word
                column += len(word)
        if shown.strip():
            yield row, start, shown, count


def _text(picture: Picture) -> tuple[list[str], float]:
    mean = sum(picture.lengths) / max(len(picture.lengths), 1)
    parts = [
        _words(16, 26, "tokens that a step added:"),
        _words(16 + 45 * CHAR, 26, f"mean {mean:.2f}"),
    ]
    legend = [(-2, 19 + 4 * n, f" {n} " if n < 5 else " 5+ ", n) for n in range(1, 6)]
    for row, start, text, length in [*legend, *_lines(picture.pieces)]:
        x = 16 + CHAR * start
        y = 66 + LINE * row + (6 if row < 0 else 0)
        width = CHAR * len(text)
        box = f'x="{x + 0.5:.1f}" y="{y - 15:.1f}" width="{width - 1:.1f}" height="20" rx="3"'
        parts += [f'<rect class="s{min(length, 5)}" {box}/>', _fitted(x, y, text, width)]

    return parts, y


def _tree(picture: Picture, top: float) -> tuple[list[str], float, float]:
    """Draw the draft: a node's first child is on its row, each other one begins a new row."""
    accepted = [path for path, _, ok in picture.nodes if ok]  # the root included
    parts = list[str]()
    y = top + 1.5 * ROW
    ends: dict[RankPath, tuple[float, float]] = {}  # where each node's edges begin
    parents = set[RankPath]()  # nodes with a child that is drawn

    for path, text, ok in sorted(picture.nodes):  # depth-first
        if len(path) > len(accepted):
            continue
        x = 16.0
        if path:
            parent = path[:-1]
            y += ROW * (parent in parents)
            parents.add(parent)
            left, above = ends[parent]
            x = left + GAP
            bend = f"c8 0 6 {y - above:.1f} {GAP - 6} {y - above:.1f}"
            kind = "edge path" if ok else "edge"
            parts.append(f'<path class="{kind}" d="M{left:.1f} {above - 4:.1f}{bend}"/>')
        label = visible(text).replace("\n", "⏎").replace(" ", "·") or "∅"
        width = LABEL * len(label)
        parts.append(_fitted(x, y, label, width, "small on" if ok else "small quiet"))
        ends[path] = (x + width + 3, y)

    drafted = len(picture.nodes) - 1
    drawn = f", {len(ends) - 1} drawn" if len(ends) <= drafted else ""
    note = f"step {picture.step}: {drafted} tokens drafted, {len(accepted) - 1} accepted{drawn}"
    parts.append(_words(16, top, f"{note}; · is a space"))
    return parts, y + ROW, max(end for end, _ in ends.values())
