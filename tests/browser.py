"""A headless Chromium, driven over its own DevTools pipe: nothing to install but the browser."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


def find_browser() -> str | None:
    """The path of a Chromium on this machine, or of the one that CHROMIUM names; None if there is none."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in a fresh profile: `errors` is what its console says, `requests` the URLs that it asks for.

    Chromium reads commands from its file descriptor 3 and writes answers and events to 4, each ended by a NUL.
    """

    def __init__(self, path: str, profile: Path, *, seconds: float = 60) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.seconds, self.buffer, self.number, self.session = seconds, b"", 0, ""
        commands, self.write = os.pipe()
        self.read, answers = os.pipe()
        # exec in a shell that puts the pipes where Chromium looks for them, whatever numbers they have here
        line = f'exec "$@" 3<&{commands} 4>&{answers}'
        self.process = subprocess.Popen(
            ["bash", "-c", line, "bash", path, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.write)
        os.close(self.read)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command and wait for its answer; events that come before it are noted."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        number, answer = self.number, self._next()
        while answer.get("id") != number:
            self._note(answer)
            answer = self._next()
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + self.seconds
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read], [], [], max(0, until - time.monotonic()))
            data = os.read(self.read, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError("chromium ended" if ready else f"chromium gave no answer in {self.seconds:.0f} s")
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        given = event.get("params", {})
        kind = event.get("method")
        if kind == "Runtime.exceptionThrown":
            self.errors.append(str(given["exceptionDetails"]))
        elif kind == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.errors.append(str(given["args"]))
        elif kind == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.errors.append(given["entry"]["text"])
        elif kind == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"][:80])

    def open(self, page: Path) -> None:
        """Load a file and wait until it is there."""
        self.send("Page.navigate", url=page.resolve().as_uri())
        until = time.monotonic() + self.seconds
        while self.run("document.readyState") != "complete" or self.run("location.protocol") != "file:":
            assert time.monotonic() < until, f"{page} did not load"
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key as a person does: Tab, Enter, ArrowRight, ..."""
        code = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}[key]
        for kind in ("rawKeyDown", *(["char"] if key == "Enter" else []), "keyUp"):
            text = {"text": "\r"} if kind == "char" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """The window's size in CSS pixels, and what the system says of the colour scheme."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """The page as PNG, down to its end or as the window shows it."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))["data"]
        path.write_bytes(base64.b64decode(data))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def pdf(self, path: Path) -> None:
        """The page as it prints, A4."""
        data = self.send("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True)["data"]
        path.write_bytes(base64.b64decode(data))
