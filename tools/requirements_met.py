"""Exit code 0 if this interpreter's environment has exactly what the given requirement files pin, 1 if not."""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def unmet(files: list[str]) -> list[str]:
    """The pins (name==version) that are not met; a local build such as 2.13.0+cpu meets 2.13.0."""
    wrong = []
    for file in files:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            pin = line.split("#")[0].strip()
            if not pin:
                continue
            name, _, wanted = pin.partition("==")
            try:
                found = version(name).split("+")[0]
            except PackageNotFoundError:
                found = ""
            if found != wanted:
                wrong.append(pin)
    return wrong


if __name__ == "__main__":
    sys.exit(1 if sys.version_info < (3, 11) or unmet(sys.argv[1:]) else 0)
