"""Lookahead decoding in slow plain Python: no cache, no tree, no mask.

Every token of the window and of a guess is asked about by a forward over the very text that it sees. Written from the
paper's section 3 as a check of model/lookahead.py; it shares no code with it.
"""

from __future__ import annotations

import random
from collections import OrderedDict

import torch


class SlowLookahead:
    def __init__(self, model, *, level, window, guess):
        self.model = model
        self.N = level
        self.W = window
        self.G = guess
        self.choices: dict[tuple[int, ...], int] = {}

    @torch.no_grad()
    def next_token(self, text):
        """The target's choice after a text: one whole forward."""
        key = tuple(text)
        if key not in self.choices:
            self.choices[key] = int(self.model(torch.tensor([list(text)])).logits[0, -1].argmax())
        return self.choices[key]

    def seen_by(self, grid, text, level, column):
        """The text that (level, column) sees, itself included; positions are the indices of this list."""
        row = [grid[0, i] for i in range(1, column + 1)]
        return text + row + [grid[j, column] for j in range(1, level + 1)]

    def remember(self, pool, ngram):
        kept = pool.setdefault(ngram[0], OrderedDict())
        kept[tuple(ngram[1:])] = True
        kept.move_to_end(tuple(ngram[1:]))
        while len(kept) > self.G:
            kept.popitem(last=False)

    def decode(self, prompt, limit, eos=()):
        """Return the tokens and the accepted lengths."""
        N = self.N
        W = self.W
        draw = random.Random(0)
        pool = {}
        # (level, column) -> token; (0, 0): the root
        grid = {(0, i): draw.choice(prompt) for i in range(1, W + N - 2)}
        depth = 0
        width = W + N - 2
        text = list(prompt)
        out = []
        lengths = []
        while True:
            full = depth == N - 2
            guesses = [list(g) for g in pool.get(text[-1], {})] if full else []
            branches = [self.seen_by(grid, text, depth, i)[len(text) :] for i in range(width)]
            seen = {tuple(c[:n]) for c in guesses + branches for n in range(1, len(c) + 1)}
            accepted = []
            while (*accepted, self.next_token(text + accepted)) in seen:
                accepted.append(self.next_token(text + accepted))
            root = self.next_token(text + accepted)

            new = {i: self.next_token(self.seen_by(grid, text, depth, i)) for i in range(width)}
            if full:
                for i in range(W):
                    key = text[-1] if i == 0 else grid[0, i]
                    self.remember(
                        pool, [key] + [grid[j, i] for j in range(1, depth + 1)] + [new[i]]
                    )
                moved = {
                    (level - 1, i): grid[level, i]
                    for level in range(1, depth + 1)
                    for i in range(W)
                }
                del moved[0, 0]  # the root's place
                grid = moved | {(depth, i): new[i] for i in range(W)}
            else:  # the text goes on by one, so what was column i + 1 is column i
                grid = {
                    (level, i - 1): token
                    for (level, i), token in grid.items()
                    if i - (level == 0) > 0
                }
                depth, width = depth + 1, width - 1
                grid |= {(depth, i): new[i + 1] for i in range(width)}
            text += accepted + [root]

            tokens = [*accepted, root][: limit - len(out)]
            tokens = next((tokens[: i + 1] for i, t in enumerate(tokens) if t in eos), tokens)
            out += tokens
            lengths.append(len(tokens))
            if tokens[-1] in eos or len(out) == limit:
                return out, lengths
