"""A headless Chromium, driven over WebDriver."""

import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver's name of an element's id
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic",
    "--window-size=1000,1100",
]  # fmt: skip


def is_found() -> bool:
    return all(map(shutil.which, ("chromedriver", "chromium")))


class Browser:
    """One window. Elements are named by CSS selectors."""

    def __init__(self, folder: Path):
        self._log = (folder / "chromedriver.log").open("wb")
        self._url = f"http://127.0.0.1:{self._start()}"
        chrome = {
            "args": [*FLAGS, f"--user-data-dir={folder / 'profile'}"],
            "binary": shutil.which("chromium"),
        }
        asked = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._send("POST", "/session", {"capabilities": {"alwaysMatch": asked}})
        self._url += f"/session/{session['sessionId']}"

    def _start(self) -> int:
        """Start chromedriver, and return its port. Another program can take the port that chromedriver has
        chosen. chromedriver then ends, so the start has three tries."""
        for _ in range(3):
            self._driver = subprocess.Popen(
                ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=self._log, text=True
            )
            assert self._driver.stdout is not None
            for line in self._driver.stdout:
                if "started successfully on port" in line:
                    return int(line.rpartition("port ")[2].rstrip(".\n"))
            self._driver.wait()
        raise AssertionError("chromedriver did not start")

    def _send(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"content-type": "application/json"})
        request.method = method
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        self._send("POST", "/url", {"url": url})

    def emulate(self, width: int, height: int, scheme: str, media: str = "screen") -> None:
        """A screen of this size, light or dark, or with `media` "print" a sheet of paper."""
        self._command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._command("Emulation.setEmulatedMedia", media=media, features=features)

    def _command(self, name: str, **params: Any) -> None:
        """A command of the browser's own protocol."""
        self._send("POST", "/goog/cdp/execute", {"cmd": name, "params": params})

    def run(self, script: str, *args: Any) -> Any:
        """The value that a script in the page returns."""
        return self._send("POST", "/execute/sync", {"script": script, "args": args})

    def _element(self, selector: str) -> str:
        return self._send("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]

    def click(self, selector: str) -> None:
        self._send("POST", f"/element/{self._element(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._send("POST", f"/element/{self._element(selector)}/value", {"text": text})

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def sees(self, selector: str) -> bool:
        """Is the element there, and not hidden?"""
        return self.run(
            "const e = document.querySelector(arguments[0]); return !!e && !!e.offsetParent", selector
        )

    def wait(self, condition: Any, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.log()
            time.sleep(0.05)

    def log(self) -> list[str]:
        """What the browser's console has said since the last call: errors, breaches of the policy."""
        return [entry["message"] for entry in self._send("POST", "/se/log", {"type": "browser"})]

    def screenshot(self) -> str:
        """A PNG, in base64."""
        return self._send("GET", "/screenshot")

    def close(self) -> None:
        try:
            self._send("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(20)
            self._log.close()
