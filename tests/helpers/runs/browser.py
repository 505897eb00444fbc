"""A headless Chromium with one page, driven through its DevTools protocol."""

import base64
import json
import shutil
import subprocess
import time
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path

from websockets.sync.client import connect

SECONDS = 10.0
"""Longest wait for a change of the page, on a busy machine."""


class Browser:
    def __init__(self, profile: Path, width: int = 1400, height: int = 1000) -> None:
        chromium = shutil.which("chromium")
        assert chromium, "chromium is not installed"
        command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += ["--disable-dev-shm-usage", "--remote-debugging-port=0"]
        command += [f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            [*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._closing = ExitStack()
        self._socket = self._closing.enter_context(
            connect(_page_address(profile), max_size=None, proxy=None)
        )
        self._last_id = 0
        self.events: list[dict] = []
        """Events of the page since it was opened."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        self._closing.close()
        self._process.terminate()
        self._process.wait(timeout=SECONDS)

    def send(self, method: str, **params: object) -> dict:
        self._last_id += 1
        self._socket.send(json.dumps({"id": self._last_id, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=SECONDS))
            if message.get("id") == self._last_id:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url="about:blank")
        self.wait_for("location.href === 'about:blank'")
        self.events.clear()  # now the page before sends no more requests
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def run(self, code: str) -> object:
        """The value of a JavaScript expression in the page."""
        result = self.send(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, (code, result)
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        end = time.monotonic() + SECONDS
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"not within {SECONDS:.0f} s: {condition}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Click on the middle of the first element that matches."""
        self.move_to(selector)
        for event in ("mousePressed", "mouseReleased"):
            self._mouse(event, button="left", clickCount=1)

    def move_to(self, selector: str) -> None:
        self._at = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        self._mouse("mouseMoved")

    def _mouse(self, event: str, **more: object) -> None:
        x, y = self._at
        self.send("Input.dispatchMouseEvent", type=event, x=x, y=y, **more)

    def press(self, key: str) -> None:
        for event in ("rawKeyDown", "keyUp"):
            code = {"Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}[key]
            self.send("Input.dispatchKeyEvent", type=event, key=key, windowsVirtualKeyCode=code)

    def type(self, selector: str, text: str) -> None:
        """Replace the text of an input, and leave it."""
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        if text:
            self.send("Input.insertText", text=text)
        else:
            self.run("document.execCommand('delete')")
        self.run("document.activeElement.blur()")

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select."""
        self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            f"e.value = {json.dumps(value)};"
            "for (const n of ['input', 'change']) e.dispatchEvent(new Event(n)); })()"
        )

    def texts(self, selector: str) -> list[str]:
        return self.run(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
        )

    def problems(self) -> list[dict]:
        """Exceptions of the page, and resources that the browser refused or did not find."""
        self.run("0")  # reads the events until now
        return [
            event
            for event in self.events
            if event["method"] == "Runtime.exceptionThrown"
            or (
                event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error"
            )
        ]

    def requested(self) -> set[str]:
        """URLs that the page has requested."""
        requests = [e["params"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return {params["request"]["url"] for params in requests}

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


def _page_address(profile: Path) -> str:
    """The page's DevTools address, as soon as the browser has written its port."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with suppress(OSError, IndexError, StopIteration):
            port = int((profile / "DevToolsActivePort").read_text(encoding="utf-8").splitlines()[0])
            connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
            connection.request("GET", "/json/list")
            targets = json.load(connection.getresponse())
            return next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page")
        time.sleep(0.05)
    raise TimeoutError(f"chromium has not started within {SECONDS:.0f} s")
