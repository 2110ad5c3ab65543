"""What a run of the tests has left out, and why, as its last line: pytest itself gives but a number."""

from collections import Counter

import pytest


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """One line behind pytest's own last one, where any test was skipped; for tests/conftest.py."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if hasattr(config, "workerinput") or reporter is None:  # a worker of xdist: the one that started it tells
        return
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reporter.stats.get("skipped", []))
    if reasons:
        told = "; ".join(f"{n} ({reason})" for reason, n in reasons.most_common())
        reporter.write_line(f"NOT TESTED, skipped here: {told}", yellow=True)
