"""The one exception for a user's mistake, and text printed so that it cannot command the terminal."""

from __future__ import annotations


class UserError(ValueError):
    """A user's mistake, in one line: what is wrong, where, and what to do. Commands print it and exit with code 2."""


# Shown and not sent: C0 but newline and tab, DEL, C1 (U+009B opens a sequence as ESC [ does), and what reorders the
# text around it (bidirectional embeddings, overrides and isolates; the marks, which right-to-left text needs, stay).
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {0x09, 0x0A}
_ESCAPES = {code: f"\\u{code:04x}" for code in sorted(_CONTROLS)}


def visible(text: str) -> str:
    """Write control characters out, such as \\u001b for ESC; newlines and tabs stay. JSON keeps its meaning."""
    return text.translate(_ESCAPES)


def one_line(error: BaseException) -> str:
    """Return the message of an exception on one line."""
    return visible(" ".join(str(error).split()))
