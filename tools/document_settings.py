"""python -m tools.document_settings: write docs/configuration.md from the comments of configs/*.yaml.

A file's first comment describes the choice, the comment after a key the setting. A comment line below a key continues
that key's comment.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from model.errors import RENAMED
from model.files import ROOT

CONFIGS = ROOT / "configs"
PAGE = ROOT / "docs" / "configuration.md"
KEY = re.compile(r"^(?P<indent> *)(?P<name>[\w.]+):(?: (?P<value>[^#]*?))?(?: ?# (?P<comment>.*))?$")
CHOICE = re.compile(r"^  - (?:optional )?(?P<group>\w+): (?P<value>\S+)(?: # (?P<comment>.*))?$")

HEAD = """# Configuration: every setting

For those who change a run: each setting, its default and its meaning.
Written by `python -m tools.document_settings` from the comments of `configs/`: edit those.

- Set a value: `python -m evaluation.run method=recycling method.k=4 tree=best tree.nodes=24`.
- Sweep: `bash eval.sh -m tree=best tree.nodes=8,24 start=cold,hot`. A method without a swept setting runs once.
- Choose a file of a group by its name: `model=vicuna-7b`. Change a setting in it: `model.dtype=bfloat16`.
- Add a group's folder of your own: `--config-dir=FOLDER` ([extending.md](extending.md)).
- In Python write `method__k=4` for `method.k=4` ([library.md](library.md#measure-from-a-notebook)).
"""


@dataclass
class Setting:
    """A key of a YAML file: its dotted name, the value as written, and its comment."""

    name: str
    value: str
    comment: str


@dataclass
class Document:
    """The contents of a YAML file: its first comment, its `defaults` list (group, value, comment), its settings."""

    header: list[str] = field(default_factory=list)
    groups: list[Setting] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)

    def without(self, *tops: str) -> list[Setting]:
        """Return the settings outside these top-level keys."""
        return [setting for setting in self.settings if setting.name.split(".")[0] not in tops]


def read(path: Path) -> Document:
    """Read a file's comments and settings. A key without value and comment opens a block and is no setting."""
    document, above, last, in_defaults = Document(), dict[int, str](), None, False
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not document.settings and not document.groups:
            document.header += [line.removeprefix("#").removeprefix(" ")] if "@package" not in line else []
        elif line.strip().startswith("#"):
            if last is not None and last.comment:
                last.comment += " " + line.strip().removeprefix("#").strip()
        elif choice := CHOICE.match(line) if in_defaults else None:
            last = Setting(choice["group"], choice["value"], choice["comment"] or "")
            document.groups.append(last)
        elif key := KEY.match(line):
            indent, name = len(key["indent"]), key["name"]
            above = {depth: part for depth, part in above.items() if depth < indent} | {indent: name}
            in_defaults = name == "defaults"
            last = Setting(".".join(above.values()), (key["value"] or "").strip(), key["comment"] or "")
            if last.value or last.comment:
                document.settings.append(last)
    return document


def table(settings: Iterable[Setting], prefix: str = "") -> list[str]:
    """Return settings as lines of a table; no lines if there are none."""
    rows = [f"| {code(prefix + s.name)} | {code(s.value)} | {cell(s.comment)} |" for s in settings]
    return ["", "| setting | default | meaning |", "|---|---|---|", *rows] if rows else []


def choices(group: str, *, title: str) -> list[str]:
    """Return the files of a group as a table, with their first comments."""
    rows = [f"| {code(path.stem)} | {cell(about(read(path)))} |" for path in files(group)]
    return ["", f"| {title} | |", "|---|---|", *rows]


def variants(group: str, base: str, *, title: str) -> list[str]:
    """Return the files of a group as a table, with what each sets other than the group's base."""
    rows = []
    for path in files(group):
        document = read(path)
        values = [f"{s.name}={s.value}" for s in document.without("name", "path") if path.stem != base]
        rows.append(f"| {code(path.stem)} | {cell(about(document))} | {code(' '.join(values))} |")
    return ["", f"| {title} | | sets |", "|---|---|---|", *rows]


def files(group: str) -> list[Path]:
    return sorted((CONFIGS / group).glob("*.yaml"))


def about(document: Document) -> str:
    """Return the first comment on one line, without its commands."""
    lines = [line for line in document.header if not re.match(r" |bash eval\.sh", line)]
    return " ".join(lines)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def page() -> str:
    """Return the whole page."""
    top = read(CONFIGS / "config.yaml")
    lines = [HEAD.rstrip(), "", "## Groups"]
    lines += table(group for group in top.groups if group.comment)
    lines += ["", "## The run", *table(top.without("companions", "hydra"))]
    lines += ["", "## model", *table(read(CONFIGS / "model/embedded.yaml").without("name"), "model.")]
    lines += variants("model", "embedded", title="`model=`")
    lines += [
        "",
        "## companions",
        "",
        "Heads, draft models and datastores of a model: `configs/companions/MODEL.yaml`.",
    ]
    lines += table(read(CONFIGS / "companions/embedded.yaml").settings, "companions.")
    lines += ["", "## bench", *table(read(CONFIGS / "bench/sample.yaml").without("name"), "bench.")]
    lines += choices("bench", title="`bench=`")
    lines += ["", "## tree", *table(read(CONFIGS / "tree/2.2.2.yaml").without("name"), "tree.")]
    lines += variants("tree", "2.2.2", title="`tree=`")
    lines += ["", "## method"]
    for path in files("method"):
        document = read(path)
        lines += ["", f"### {path.stem}", "", *textwrap.wrap(about(document), 118)]
        lines += table(document.without("name", "drafter"), "method.")
    lines += ["", "## experiment", *choices("experiment", title="`bash eval.sh experiment=`")]
    lines += ["", "## preset", *choices("preset", title="`preset=`")]
    lines += ["", "## launcher"]
    for path in files("launcher"):
        document = read(path)
        lines += ["", f"### {path.stem}", "", *textwrap.wrap(about(document), 118)]
        options = [setting for setting in document.settings if setting.name.startswith("hydra.launcher.")]
        lines += table(setting for setting in options if not setting.name.endswith("_target_"))
    lines += [
        "",
        "## Renamed settings",
        "",
        "An old command line is answered with the new name. Records under old names are refused: run them again.",
        "",
        "| before | now |",
        "|---|---|",
        *(f"| `{old}` | `{new}` |" for old, new in RENAMED.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
