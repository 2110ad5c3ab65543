"""Goose's step, slowly: rows in plain dictionaries, n-grams found by reading the whole text, nodes as paths."""

import math

import torch

from tests.model.methods.streams import logits_of

Path = tuple[int, ...]


class SlowGoose:
    """One request.

    Args:
        base, largest: nodes without and with all confidence, root included.
        most: nodes below the root, at most.
    """

    def __init__(self, prompt: list[int], seed: int, base: int = 60, largest: int = 100, most: int = 100) -> None:
        self.base, self.largest, self.most, self.seed = base, largest, most, seed
        self.text, self.ema = list(prompt), 0.5
        self.token_rows: dict[int, list[tuple[int, float]]] = {}
        self.pair_rows: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for i in range(len(prompt)):
            self.write(prompt[: i + 1], pair=i > 0)
        self.text.append(int(logits_of(prompt, seed).argmax()))

    def write(self, context: list[int], pair: bool) -> None:
        values, ids = logits_of(context, self.seed).topk(10)
        scores = torch.softmax(values, -1)
        self.token_rows[context[-1]] = list(zip(ids.tolist(), scores.half().tolist(), strict=True))
        if pair:
            self.pair_rows[context[-2], context[-1]] = list(zip(ids.tolist(), scores.tolist(), strict=True))

    def candidates(self, before: int, token: int) -> list[tuple[int, float]]:
        return self.pair_rows.get((before, token)) or self.token_rows.get(token) or []

    def places(self, tail: list[int]) -> tuple[int, list[int]]:
        """The longest n-gram with a match, and the starts of its matches."""
        for n in (5, 4, 3):
            if len(tail) >= n:
                starts = [i for i in range(len(self.text) - n) if self.text[i : i + n] == tail[-n:]]
                if starts:
                    return n, starts
        return 0, []

    def copy(self, tail: list[int]) -> tuple[list[int], bool]:
        n, starts = self.places(tail)
        if not starts:
            return [], False
        followers = {self.text[i + n] for i in starts}
        return self.text[starts[0] + n :][:20], len(starts) > 1 and len(followers) == 1

    def chain(self) -> tuple[list[int], float]:
        """What is copied, extended where there is confidence, and the confidence."""
        chain, agreed = self.copy(self.text)
        c = 0.0
        if chain:
            length = len(chain)
            c = 1.0 if agreed else min(0.9, 0.7 + 0.2 * (length - 8) / 12.0) if length >= 8 else 0.6 * length / 8
        if c > 0.6:
            while len(chain) < int(self.most * c):
                more, sure = self.copy(self.text + chain)
                if not more:
                    break
                chain = chain + more
                if c == 1.0 and not sure:
                    break
        return chain, c

    def plan(self) -> tuple[str, list[Path], list[Path]]:
        """The route, the spine's nodes and the branches, as paths below the anchor, in the order they are made."""
        anchor, before = self.text[-1], self.text[-2]
        if (before, anchor) not in self.pair_rows and anchor not in self.token_rows:
            chain = self.copy(self.text)[0][: self.most]
            return ("c", [tuple(chain[: i + 1]) for i in range(len(chain))], []) if chain else ("s", [], [])
        chain, c = self.chain()
        b = self.base + int(c * (self.largest - self.base))
        r0 = 0.15 if self.ema < 0.2 else 0.3 if self.ema < 0.4 else 0.5
        s = min(len(chain), int(b * (r0 + c * (1 - r0))), self.most)
        spine = [tuple(chain[: i + 1]) for i in range(s)]
        left = b - 1 - s
        on_spine = max(1, int(left * 0.5)) if s > 0 and left > 0 else 0
        branches: list[Path] = []
        queue: list[tuple[Path, float]] = []

        def room() -> int:
            return b - 1 - s - len(branches)

        def behind(path: Path) -> list[tuple[int, float]]:
            whole = (before, anchor, *path)
            return self.candidates(whole[-2], whole[-1])

        def hang(path: Path, token: int, score: float) -> None:
            branches.append((*path, token))
            if len(path) + 1 < 6:
                queue.append(((*path, token), score))

        used = 0
        for token, score in behind(()):
            if used >= left - on_spine or score < 0.01:
                break
            if not spine or token != chain[0]:
                hang((), token, score)
                used += 1
        total, remains = sum(1 / i for i in range(1, s + 1)), on_spine
        for i, node in enumerate(spine, 1):
            share = min(max(1, int(on_spine * (1 / i) / total)), remains) if remains > 0 else 0
            remains -= share
            used = 0
            for token, score in behind(node):
                if used >= share:
                    break
                if i < s and token == chain[i]:
                    continue
                if score < 0.01:
                    break
                hang(node, token, score)
                used += 1
        while queue and room() > 0:
            path, q = queue.pop(0)
            found = behind(path)
            width = min(max(1, min(len(found), math.ceil(room() * q))), max(1, 10 // len(path)))
            for token, score in found[:width]:
                if room() <= 0 or score < 0.01:
                    break
                hang(path, token, score)
        return ("t" if spine or branches else "s"), spine, branches

    def step(self) -> tuple[str, list[Path], list[Path], list[int]]:
        """Draft, verify, learn, commit: the route, spine and branches, and the tokens committed."""
        route, spine, branches = self.plan()
        nodes = [(), *spine, *branches]
        for path in nodes:
            context = [*self.text, *path]
            self.write(context, pair=bool(path) or route != "t")
        path: Path = ()
        bonus = int(logits_of(self.text, self.seed).argmax())
        while (*path, bonus) in nodes:
            path = (*path, bonus)
            bonus = int(logits_of([*self.text, *path], self.seed).argmax())
        if spine and route == "t":
            self.ema = 0.3 * sum(path[: i + 1] in spine for i in range(len(path))) / len(spine) + 0.7 * self.ema
        self.text += [*path, bonus]
        return route, spine, branches, [*path, bonus]
