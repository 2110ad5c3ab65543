"""Exit code 0 if this interpreter's environment has exactly what the given requirement files pin, 1 if not."""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def applies(marker: str) -> bool:
    """True if a pin with this environment marker ("" for none) applies to this machine.

    Also True for any marker if `packaging` is not installed, as in a fresh environment: then pip decides.
    """
    if not marker:
        return True
    try:
        from packaging.markers import Marker
    except ImportError:
        return True
    return Marker(marker).evaluate()


def unmet(files: list[str]) -> list[str]:
    """Return the pins (name==version; marker) that are not met; a local build such as 2.13.0+cpu meets 2.13.0."""
    wrong = []
    for file in files:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            pin, _, marker = (part.strip() for part in line.split("#")[0].partition(";"))
            if not pin or not applies(marker):
                continue
            name, _, wanted = pin.partition("==")
            try:
                installed = version(name).split("+")[0]
            except PackageNotFoundError:
                installed = ""
            if installed != wanted:
                wrong.append(pin)
    return wrong


if __name__ == "__main__":
    sys.exit(1 if sys.version_info < (3, 11) or unmet(sys.argv[1:]) else 0)
