"""A headless Chromium, spoken to over the WebDriver protocol with the standard library alone."""

import base64
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

import pytest

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
]  # fmt: skip
MISSING = "The page's tests need Chromium: apt-get install -y chromium chromium-driver"


def need_chromium():
    """Skip where there is no Chromium; fail where CI says that there has to be one."""
    if shutil.which("chromium") and shutil.which("chromedriver"):
        return
    if os.environ.get("CI") == "true":
        pytest.fail(MISSING)
    pytest.skip(MISSING)


class Browser:
    """One window. `logs` holds what the console said, errors of scripts among it."""

    def __init__(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.profile = tempfile.TemporaryDirectory()
        self.driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wait()
        arguments = [*FLAGS, f"--user-data-dir={self.profile.name}"]
        options = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}
        self.session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": options}})["sessionId"]

    def _wait(self):
        for _ in range(200):
            try:
                if self._call("GET", "/status")["ready"]:
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise RuntimeError("chromedriver did not start")

    def _call(self, method, path, body=None):
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def _in_session(self, path, body, method="POST"):
        return self._call(method, f"/session/{self.session}{path}", body)

    def cdp(self, command, **parameters):
        return self._in_session("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, path, *, dark=False, width=1280, height=900):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._in_session("/url", {"url": path.as_uri()})

    def run(self, script, *arguments):
        return self._in_session("/execute/sync", {"script": script, "args": list(arguments)})

    def hover(self, selector):
        """Move the mouse to the middle of the element's label, brought into view first."""
        box = self.run(
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.querySelector('.label').getBoundingClientRect();"
            "return [b.left + b.width / 2, b.top + b.height / 2]",
            selector,
        )
        time.sleep(0.2)
        for offset in (3, 0):
            self.cdp("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] - offset, y=box[1])

    def logs(self):
        return self._in_session("/se/log", {"type": "browser"})

    def screenshot(self, path, *, full=True):
        clip = {"clip": self._page()} if full else {}
        shot = self.cdp("Page.captureScreenshot", captureBeyondViewport=full, **clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _page(self):
        width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        return {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}

    def close(self):
        try:
            self._in_session("", None, "DELETE")
        finally:
            self.driver.terminate()
            self.driver.wait(20)
            self.profile.cleanup()
