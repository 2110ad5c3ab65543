"""LogitSpec: drafts the last logits' runners-up, and copied text (arXiv 2507.01449).

The rules are those of the public code at its default settings, github.com/smart-lty/LogitSpec at
659bba9. A step there commits its root and the accepted drafts, so an answer that ends by EOS has
one step less here.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...engine import Device, Draft, Drafter, Needs, Verification, top_k
from ...engine.rule.tree import arranged
from ..copying.history import History, TextSession
from ..limits import check_whole

NGRAM = 3  # tokens of the longest n-gram
MAX_COPY = 20  # maximum tokens of one continuation
REWRITTEN = 2 * MAX_COPY  # last positions whose continuations are written again after each step
PATHS = ((8, 4), (32, 3))  # tokens of a path, by the highest rank of the candidate it begins with
NOTHING = 0, 0  # instead of a continuation
SHORTEST_PATH = 1  # tokens of a path that begins with any other candidate


class LogitSpec(Drafter):
    """Drafts a copied continuation of the root, then the logits' other candidates with theirs.

    Paths are not merged: a token may be drafted twice below the root.
    """

    # many candidates are needed, but only of the last accepted node
    needs = Needs(logits=True)

    def __init__(
        self,
        vocab_size: int,
        *,
        nodes: int = 63,
        history_tokens: int = 32768,
        device: Device = "cpu",
    ) -> None:
        check_whole("logitspec", 1, nodes=nodes)
        super().__init__(device, vocab_size)
        self.nodes = nodes
        self.max_nodes = 1 + nodes
        self.ranked = min(nodes + 1, vocab_size)  # candidates: one of them is mostly the root
        self.history = History(history_tokens, Continuations, vocab_size)
        self.stores = [self.history]
        self.stateful = history_tokens > 0

    def session(self) -> LogitSpecSession:
        return LogitSpecSession(self)


class Continuations:
    """One continuation of at most MAX_COPY tokens for each n-gram of a text that grows.

    It ends where the text ended when it was written, and is replaced by one as long or longer.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        # by n-gram: the index after it, and the index where its continuation ends
        self._continued: dict[tuple[int, ...], tuple[int, int]] = {}
        self._all_written = 0  # length of the text when all positions were last written
        self._written = 0  # length of the text when any position was last written
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        self.tokens += tokens
        self._write(self._all_written - MAX_COPY - NGRAM)
        self._all_written = len(self.tokens)

    def commit(self, tokens: Iterable[int]) -> None:
        self.tokens += tokens
        # A continuation that had all its MAX_COPY tokens already would be written unchanged.
        self._write(len(self.tokens) - REWRITTEN, self._written - MAX_COPY + 1)

    def _write(self, first: int, first_end: int = 0) -> None:
        text = self.tokens
        continued = self._continued
        length = self._written = len(text)
        for n in range(1, NGRAM + 1):
            for end in range(max(n, first + n, first_end), length):
                gram = tuple(text[end - n : end])
                stop = min(end + MAX_COPY, length)
                old, old_stop = continued.get(gram, NOTHING)
                if stop - end >= old_stop - old:
                    continued[gram] = end, stop

    def after(self, tokens: list[int], limit: int) -> list[int]:
        """Return up to `limit` tokens after the longest indexed n-gram that ends these tokens."""
        for begin in range(len(tokens)):
            end, stop = self._continued.get(tuple(tokens[begin:]), NOTHING)
            if stop:
                return self.tokens[end : min(stop, end + limit)]
        return []


class LogitSpecSession(TextSession):
    drafter: LogitSpec
    text: Continuations

    def begin(self, prompt: list[int]) -> Draft | None:
        self._ranked: list[int] | None = None  # None: the root is the prompt's last token
        return super().begin(prompt)

    def draft(self, root: int) -> Draft:
        tokens = [root]
        parents = [0]
        for path in self._paths(root):  # they share the root alone
            parents += [0, *range(len(tokens), len(tokens) + len(path) - 1)]
            tokens += path
        draft, _ = arranged(tokens, parents)
        return draft

    def _paths(self, root: int) -> list[list[int]]:
        text = self.text
        left = self.drafter.nodes  # nodes left to fill
        before = text.tokens[1 - NGRAM :]
        paths = []
        if first := text.after([*before, root], left):
            paths.append(first)
            left -= len(first)

        for rank, token in enumerate(self._ranked or ()):
            if left == 0:
                break
            if token != root:
                lengths = (length for highest, length in PATHS if rank <= highest)
                length = min(next(lengths, SHORTEST_PATH), left)
                path = [token]
                if length > 1:
                    path += text.after([before[-1], root, token], length - 1)
                paths.append(path)
                left -= len(path)

        return paths

    def observe(self, verification: Verification) -> None:
        node = verification.node
        assert verification.logits is not None
        if self._ranked is not None:  # the prompt's last token is in the text from the beginning
            self.text.commit([int(verification.draft.tokens[0]), *verification.tokens[:-1]])
        self._ranked = top_k(verification.logits[node : node + 1], self.drafter.ranked)[0].tolist()
