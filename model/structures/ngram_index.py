"""Index of the first occurrence of each n-gram of a text.

Methods copy the tokens after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class NgramIndex:
    """The first occurrence of each n-gram of a text that grows at its end.

    An n-gram is indexed once a token follows it, so that the n-gram at the text's end does not
    match itself.

    Args:
        lengths: the values of n, each at least 1.

    Attributes:
        tokens: the text.
    """

    def __init__(self, lengths: Iterable[int]) -> None:
        self.tokens: list[int] = []
        self._lengths = sorted(lengths, reverse=True)
        # n-gram -> the index after its first occurrence
        self._after: dict[tuple[int, ...], int] = {}
        # n-gram seen twice or more -> always followed by one token?
        self._unanimous: dict[tuple[int, ...], bool] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens, and index every n-gram that now has a token after it."""
        text = self.tokens
        first = len(text)
        text += tokens
        for end in range(max(first, 1), len(text)):
            for n in self._lengths:
                if n <= end:
                    gram = tuple(text[end - n : end])
                    start = self._after.setdefault(gram, end)
                    if start != end:
                        self._unanimous[gram] = (
                            self._unanimous.get(gram, True) and text[start] == text[end]
                        )

    def find(self, tail: Sequence[int]) -> tuple[int, bool]:
        """Find the longest indexed n-gram that ends `tail`.

        Returns:
            The index after its first occurrence, and whether it has occurred twice or more, always
            followed by the same token. 0 and False if none is indexed.
        """
        for n in self._lengths:
            if n <= len(tail):
                gram = tuple(tail[-n:])
                start = self._after.get(gram)
                if start is not None:
                    return start, self._unanimous.get(gram, False)
        return 0, False
