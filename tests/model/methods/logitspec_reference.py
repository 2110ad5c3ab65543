"""LogitSpec's step, slowly: copies of continuations by tuples, all of the window written every time."""

from tests.model.methods.streams import logits_of


class SlowLogitSpec:
    """One turn: the stream, the pool, the logits of the last committed token."""

    def __init__(self, prompt: list[int], seed: int, capacity: int = 64) -> None:
        self.stream, self.seed, self.capacity = list(prompt), seed, capacity
        self.pool: dict[tuple[int, ...], list[int]] = {}
        self.write(0)

    def write(self, first: int) -> None:
        for i in range(max(first, 0), len(self.stream)):
            for n in (1, 2, 3):
                if i + n < len(self.stream):
                    gram, found = tuple(self.stream[i : i + n]), self.stream[i + n : i + n + 20]
                    if len(self.pool.get(gram, [])) <= len(found):
                        self.pool[gram] = found

    def look_up(self, tokens: list[int]) -> list[int]:
        for n in (3, 2, 1):
            if len(tokens) >= n and tuple(tokens[-n:]) in self.pool:
                return self.pool[tuple(tokens[-n:])]
        return []

    def step(self) -> tuple[int, list[list[int]], list[int]]:
        """The root, the paths below it, and what is committed: the root and what was accepted."""
        logits = logits_of(self.stream, self.seed)
        root, ranked = int(logits.argmax()), logits.topk(min(self.capacity, len(logits))).indices.tolist()
        paths, drafted = [], 0
        first = self.look_up([*self.stream, root])[: self.capacity - 1]
        if first:
            paths.append(first)
            drafted += len(first)
        for idx, token in enumerate(ranked):
            if drafted >= self.capacity - 1:
                break
            if token == root:
                continue
            path = [token, *self.look_up([*self.stream, root, token])]
            path = path[: 4 if idx <= 8 else 3 if idx <= 32 else 1]
            path = path[: self.capacity - 1 - drafted]
            paths.append(path)
            drafted += len(path)
        best: list[int] = []
        for path in paths:
            reward = 0
            while reward < len(path):
                if int(logits_of([*self.stream, root, *path[:reward]], self.seed).argmax()) != path[reward]:
                    break
                reward += 1
            if reward > len(best):
                best = path[:reward]
        self.stream += [root, *best]
        self.write(len(self.stream) - 40)
        return root, paths, [root, *best]
