"""Compact records: all runs of an experiment in one compressed file that is kept in git and names nobody.

One JSON line a run (its folder's name, metadata, summary), then one an answer. Token ids are kept, as equality is
checked by them; the answers' text is not. The same runs give the same bytes by the same liblzma.
"""

from __future__ import annotations

import getpass
import json
import lzma
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from model.errors import UserError

from .rows import Row, parse_answers

FILE = "runs.jsonl.xz"
_LEFT_OUT = ("answer_id", "tstamp", "model_id")  # of an answer: a random number, a time, and what the run's name says
_OF_CONFIG = ("start", "bench", "model")  # what readers use; the rest is in `settings`
# An absolute path, one from a home folder or one that leaves the current folder; group 1 is its last part.
_PATH = re.compile(
    r"(?<![\w.:/\\~-])(?:~[\w.-]*|[A-Za-z]:|\.\.)?[/\\](?:[^\s'\",;=()\[\]{}]*[/\\])?([^\s'\",;=()\[\]{}/\\]+)[/\\]?"
)
# Backslashes may be doubled, as JSON writes them.
_HOME = re.compile(r"(?:/home|/Users|[A-Za-z]:\\+[Uu]sers)[/\\]+([^/\\\s'\",;=()\[\]{}]+)")
# User and password of a URL: all up to the last @ of its host, as a password may hold another.
_LOGIN = re.compile(r"(?<=://)[^/?#\s\"]+@")
# User and host names that name nobody, as containers and rented machines have them.
COMMON = frozenset({"root", "user", "admin", "ubuntu", "debian", "ec2-user", "runner", "localhost", "none", "unknown"})


def packed(runs: Iterable[tuple[str, dict[str, Any], Sequence[Row]]], *, public: Sequence[str] = ()) -> bytes:
    """Return the file's bytes for runs given as name, metadata with `summary`, and answers.

    Absolute paths are cut to their last part.

    Args:
        public: words that may be in the file although they are a user's or a host's name.

    Raises:
        UserError: a user's or host's name is left; says where.
    """
    lines: list[str] = []
    names: set[str] = set()
    for name, metadata, answers in runs:
        names |= private_names(metadata)
        lines.append(_line({"run": name, "metadata": cleaned(metadata)}))
        lines += [_line(_without_text(row)) for row in answers]
    refuse_names(lines, names, public=public)
    return lzma.compress("".join(lines).encode(), preset=9)


def unpacked(path: Path) -> Iterator[tuple[str, dict[str, Any], list[Row]]]:
    """Yield the runs of such a file: name, metadata, answers. Raises UserError if it is broken."""
    try:
        lines = lzma.decompress(path.read_bytes()).decode().split("\n")
        begins = [i for i, line in enumerate(lines) if line.startswith('{"run":')]
        for begin, end in zip(begins, [*begins[1:], len(lines)], strict=True):
            head = json.loads(lines[begin])
            rows, damage = parse_answers(lines[begin + 1 : end])
            if damage:
                raise UserError(f"{path}: {head['run']}: {damage}")
            yield head["run"], head["metadata"], list(rows.values())
    except UserError:
        raise
    except (OSError, EOFError, lzma.LZMAError, ValueError, KeyError) as error:
        raise UserError(f"{path}: not compact records, or cut short ({error}); take it from git again") from None


def cleaned(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return metadata without what only this machine knows: folders above a file, the interpreter, unused settings."""
    config = {key: value for key, value in metadata.get("config", {}).items() if key in _OF_CONFIG}
    command = metadata.get("command") or []
    place = next((i for i, part in enumerate(command[:2]) if Path(part).suffix == ".py"), None)
    if place is not None:
        module = f"{Path(command[place]).parent.name}.{Path(command[place]).stem}"
        command = ["python", "-m", module, *command[place + 1 :]]
    kept: dict[str, Any] = without_folders(metadata | {"config": config, "command": command, "texts": False})
    return kept


def without_folders(value: Any) -> Any:
    """Return JSON data whose absolute paths are cut to their last part."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if not isinstance(value, str):
        return value
    given = value.replace(str(Path.home()), "~") if len(Path.home().parts) > 1 else value
    return _PATH.sub(r"\1", _LOGIN.sub("", given))


def _without_text(row: Row) -> Row:
    choices = [choice | {"turns": ["" for _ in choice["turns"]]} for choice in row["choices"]]
    return {key: value for key, value in row.items() if key not in _LEFT_OUT} | {"choices": choices}


def private_names(data: Any) -> set[str]:
    """Return names not to be published: this machine's host and user, and the users whose homes the data name."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        user = ""
    host = platform.node()
    homes = _HOME.findall(json.dumps(data, ensure_ascii=False))
    names = {host, host.partition(".")[0], user, Path.home().name, *homes}
    return {name for name in names if name and name.lower() not in COMMON}


def refuse_names(lines: Iterable[str], names: set[str], *, public: Sequence[str] = ()) -> None:
    """Raise UserError at the first of these names in lines of JSON, in any case and as a word of its own.

    Args:
        public: names that are not refused, in any case.
    """
    allowed = {name.lower() for name in public}
    refused = "|".join(re.escape(name) for name in sorted(names) if name.lower() not in allowed)
    if not refused:
        return
    # Behind a line break or a tab, which JSON writes as a backslash and a letter, begins a word, too.
    begin, end = r"(?:(?<![^\W_])|(?<=(?<!\\)\\[nrt]))", r"(?![^\W_])"
    pattern = re.compile(f"{begin}(?:{refused}){end}", flags=re.I)
    for line in lines:
        if found := pattern.search(line):
            near = line[max(0, found.start() - 40) : found.end() + 20]
            raise UserError(
                f"{found[0]!r} is a user's or host's name and is in the records (...{near}...); rename what is called "
                f"so, or say that it may be public: --public {found[0]}"
            )


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"
