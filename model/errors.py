"""The one exception for a user's mistake, and what to answer to settings by the names that they had before."""

# Each as a command line names it. The library takes the last part alone: Spine(carry=0), Decoder(linear="packed").
RENAMED = {
    "mixed": "allow_mixed",
    "bench.half": "bench.split",
    "bench.half=0": "bench.split=dev",
    "bench.half=1": "bench.split=held_out",
    "method.carry": "method.history_tokens",
    "method.carry_pairs": "method.history_pairs",
    "method.stands": "method.accept_probs",
    "model.linear=packed": "model.linear=onednn",
    "model.linear=joint": "model.linear=fused",
    "model.linear=stock": "model.linear=torch",
}


class UserError(ValueError):
    """A mistake that its maker can mend: one line that says what was wrong, where, and what to do.

    Command lines print it without a traceback and exit with code 2.
    """


def new_names(*asked: str) -> str:
    """Say what old settings are called now, as the end of a message; empty if none of them is an old one.

    Args:
        asked: `name` or `name=value`, with its group's prefix or, as the library takes it, without.
    """
    names = RENAMED | {old.rpartition(".")[2]: new.rpartition(".")[2] for old, new in RENAMED.items()}
    said = [f"{old} is called {names[old]} now" for old in asked if old in names]
    return f"; {', '.join(said)}" if said else ""
