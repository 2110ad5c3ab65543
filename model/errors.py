"""The one exception for a user's mistake."""


class UserError(ValueError):
    """A mistake that its maker can mend: one line that says what was wrong, where, and what to do.

    Command lines print it without a traceback and exit with code 2.
    """
