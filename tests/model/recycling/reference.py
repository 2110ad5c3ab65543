"""Token Recycling once more, slowly, in plain Python lists; written from the method's description, not from the engine.

Two things are deliberately kept from the official loop: it only looks at the limit and at EOS after a step, so its last
step may run past either; and it writes nothing back of a step in which an accepted draft is EOS.
"""

import torch


class Reference:
    """The official algorithm. `matrix[t]` holds k tokens; zero at first."""

    def __init__(self, model, vocab: int, k: int, paths: list[tuple[int, ...]], update="all"):
        self.model = model
        self.k = k
        self.update = update
        self.paths = [()] + sorted(paths, key=lambda p: (len(p), p))
        self.matrix = [[0] * k for _ in range(vocab)]

    def logits_after(self, texts: list[list[int]]) -> list[torch.Tensor]:
        """Logits after each text, by plain forwards without any cache or tree."""
        with torch.inference_mode():
            return [self.model(torch.tensor([text])).logits[0, -1] for text in texts]

    def answer(
        self, prompt: list[int], limit: int, eos: tuple[int, ...] = ()
    ) -> tuple[list[int], list[int]]:
        """New tokens and accepted lengths, the last step whole."""
        text = list(prompt[:-1])
        lengths = []
        root = prompt[-1]
        while True:
            tokens: dict[tuple[int, ...], int] = {(): root}
            for path in self.paths[1:]:
                tokens[path] = self.matrix[tokens[path[:-1]]][path[-1]]
            texts = [text + [tokens[path[:i]] for i in range(len(path) + 1)] for path in self.paths]
            logits = dict(zip(self.paths, self.logits_after(texts), strict=True))
            choice = {path: int(logits[path].argmax()) for path in self.paths}
            best: tuple[int, ...] = ()
            for path in self.paths:
                good = all(tokens[path[: i + 1]] == choice[path[:i]] for i in range(len(path)))
                if good and len(path) > len(best):
                    best = path
            drafts = [tokens[best[: i + 1]] for i in range(len(best))]
            if not any(token in eos for token in drafts):
                written = {
                    "all": self.paths,
                    "path": [best[:i] for i in range(len(best) + 1)],
                    "root": [()],
                    "frozen": [],
                }
                # in order, so that the last node with a token has the last word
                for path in written[self.update]:
                    self.matrix[tokens[path]] = logits[path].topk(self.k).indices.tolist()
            text += [root, *drafts]
            root = choice[best]
            new = [*drafts, root]
            lengths.append(len(new))
            produced = [*text, root][len(prompt) :]
            if any(token in eos for token in new) or len(produced) >= limit:
                return produced, lengths
