"""A real headless Chromium, for tests of the console: driven over its DevTools protocol, at an ephemeral port."""

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
_IN_VENV = Path(__file__).parents[3] / ".venv" / "chromium" / "usr" / "lib"
OTHER_NAME = "router.example"  # of this machine, which the browser takes for another one
_START_S = 60.0
_CALL_S = 60.0
_KEYS = {"Tab": 9, "Enter": 13, "End": 35, "ArrowRight": 39, " ": 32}


def _program() -> tuple[str, dict[str, str]]:
    """Path and environment of a browser. Skips the test without one."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is not None:
        return found, {}
    unpacked = _IN_VENV / "chromium" / "chromium-headless-shell"
    if not unpacked.exists():
        pytest.skip(
            "NOT TESTED: there is no Chromium. `make chromium` unpacks Debian's package into .venv; elsewhere, install "
            "Chromium or Chrome so that it is on PATH"
        )
    folders = {path.parent for path in _IN_VENV.rglob("*.so*")}
    return str(unpacked), {"LD_LIBRARY_PATH": ":".join(map(str, sorted(folders)))}


class Page:
    """One tab. Its network requests and the errors on its console are kept."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.urls: list[str] = []  # that it has asked for
        self.errors: list[str] = []  # exceptions, and what the browser blocked or complained about
        self._socket = socket
        self._session = ""
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_calls = 0

    async def listen(self) -> None:
        """Take the browser's messages until it leaves."""
        async for message in self._socket:
            data = json.loads(message.data)
            if (answer := self._answers.pop(data.get("id", -1), None)) is not None:
                if not answer.done():
                    answer.set_result(data)
                continue
            method, given = data.get("method"), data.get("params", {})
            if method == "Network.requestWillBeSent":
                self.urls.append(given["request"]["url"])
            elif method == "Runtime.exceptionThrown":
                details = given["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            elif method == "Log.entryAdded" and given["entry"]["level"] == "error":
                self.errors.append(f"{given['entry']['text']} ({given['entry'].get('url')})")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One call of the protocol. Raises AssertionError with the browser's message."""
        self._num_calls += 1
        answer = self._answers[self._num_calls] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": self._num_calls, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.send_json(message)
        data = await asyncio.wait_for(answer, _CALL_S)
        assert "error" not in data, f"{method}: {data['error']}"
        return data["result"]

    async def open_tab(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank", width=1280, height=860)
        self._session = (await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True))[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def js(self, expression: str) -> Any:
        """The value of an expression, awaited."""
        result = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """The value of an expression once it is true. Fails with what the page shows."""
        deadline = asyncio.get_running_loop().time() + 120
        while not (value := await self.js(expression)):
            if asyncio.get_running_loop().time() > deadline:
                shown = await self.js("document.body.innerText")
                raise AssertionError(f"never true: {expression}\nErrors: {self.errors}\nThe page shows:\n{shown}")
            await asyncio.sleep(0.05)
        return value

    async def text(self, selector: str) -> str:
        return await self.js(f"document.querySelector({json.dumps(selector)}).textContent")

    async def shows(self, selector: str, text: str) -> None:
        """Wait until an element's text contains this one."""
        await self.until(
            f"document.querySelector({json.dumps(selector)})?.textContent.includes({json.dumps(text)}) ?? false"
        )

    async def click(self, selector: str) -> None:
        """Click an element as soon as it is there, visible and enabled."""
        await self.until(
            "((element) => element?.checkVisibility() && !element.disabled && (element.click(), true))"
            f"(document.querySelector({json.dumps(selector)}))"
        )

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key, as a user does."""
        code = _KEYS[key]
        common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        common["modifiers"] = 8 if shift else 0
        text = {"text": {"Enter": "\r", " ": " "}[key]} if key in ("Enter", " ") else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def type(self, text: str) -> None:
        """Enter text where the focus is."""
        await self.call("Input.insertText", text=text)

    async def choose_files(self, selector: str, paths: list[Path]) -> None:
        """In a field for files."""
        root = (await self.call("DOM.getDocument"))["root"]["nodeId"]
        node = (await self.call("DOM.querySelector", nodeId=root, selector=selector))["nodeId"]
        await self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    async def focused(self) -> str:
        """The id, or the text, of what has the focus."""
        return await self.js("document.activeElement.id || document.activeElement.textContent.slice(0, 40)")


@asynccontextmanager
async def browsing() -> AsyncIterator[Page]:
    """A browser with one tab, and a profile of its own."""
    program, environment = _program()
    with tempfile.TemporaryDirectory(prefix="prelude-browser-", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            program,
            "--headless",
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
            "--no-sandbox",  # the pages are our own, and containers' root can have no sandbox
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            "--no-proxy-server",
            f"--host-resolver-rules=MAP {OTHER_NAME} 127.0.0.1",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **environment, "HOME": folder},
            start_new_session=True,
        )
        try:
            url = await _debugger_url(Path(folder), process)
            async with (
                aiohttp.ClientSession() as http,
                http.ws_connect(url, max_msg_size=64 * 1024**2, timeout=aiohttp.ClientWSTimeout(ws_close=1)) as socket,
            ):
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                try:
                    await page.open_tab()
                    yield page
                finally:
                    listening.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            await process.wait()


async def _debugger_url(folder: Path, process: asyncio.subprocess.Process) -> str:
    """Once the browser has written where it listens."""
    written = folder / "DevToolsActivePort"
    async with asyncio.timeout(_START_S):
        while not written.exists() or "/" not in written.read_text():
            assert process.returncode is None, "the browser did not start"
            await asyncio.sleep(0.05)
    port, path = written.read_text().splitlines()
    return f"ws://127.0.0.1:{port}{path}"
