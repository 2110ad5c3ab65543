"""The page in a real browser: it sorts, filters and draws, without an error and without a foreign script."""

import base64
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
WANTED = "no Chromium; Debian: apt-get install chromium; or name one with CHROMIUM=PATH"
SCRIPT = Path(__file__).with_name("use_page.js").read_text()


def used(page, folder, width):
    """What the script has seen of this page in a window of this width. The page's policy admits the script by hash."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    text = page.read_text().replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    copy = folder / "used.html"
    copy.write_text(text.replace("<style>", f"<script>{SCRIPT}</script><style>", 1))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={width},900",
        f"--user-data-dir={folder}",
    ]
    command = [str(CHROMIUM), *flags, "--dump-dom", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return json.loads(
        html.unescape(re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)[1])
    )


@pytest.mark.skipif(CHROMIUM is None, reason=WANTED)
def test_the_page_can_be_used(report_folder, tmp_path):
    seen = used(report_folder / "report.html", tmp_path, 1280)
    assert (
        seen["errors"] == [] and seen["styled"] and all(seen["images"]) and len(seen["images"]) == 2
    )
    heads = [
        "Figures",
        "Draft trees",
        "Losslessness",
        "Setup",
        "Commands",
    ]
    assert seen["heads"] == heads and seen["overflow"] <= 0
    assert seen["table"] < 400 and seen["right"] < 1280, "verdict, MAT and speed fit a screen"
    first, down, up = seen["mats"]
    assert down == sorted(first, key=float, reverse=True) and up == down[::-1]
    assert seen["folded"] == ["overall"] * 2 and len(seen["opened"]) == 5 and "qa" in seen["opened"]
    assert (
        seen["every"] == "8 of 8 rows"
        and seen["qa"] == ["qa"] * 2
        and seen["vanilla"] == ["vanilla"]
    )
    assert seen["found"] == "1 of 8 rows" and seen["extra"] == ["none", "table-cell"]
    assert (
        seen["nodes"] == 3
        and seen["shades"] == 2
        and seen["node"].startswith("ranks 0·0: accepted in")
    )
