#!/usr/bin/env python3
"""Make the pictures of the docs from a real run: `make pictures`. Needs `scripts/install_browser.sh`.

Plays `kvferry demo`, then serves the package's small model with one P and one D on this machine, sends it prompts of
several lengths, and takes screenshots of the page. Look at them before you commit them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("tests", "benchmarks", "scripts")]

from dashboard import wait_until_healthy  # noqa: E402
from kvferry.cli.router_address import RouterAddress  # noqa: E402
from kvferry.cli.watch.follow import events  # noqa: E402
from kvferry.cli.watch.top import Top  # noqa: E402
from support.browser import Browser, chromium  # noqa: E402
from terminal_picture import recorded, write_picture  # noqa: E402

MODEL = "kvferry/tiny-python"
WORDS = ("def", "self", "return", "value", "for", "import", "None", "data")
LOAD_S, TOP_S, PORT = 150, 8, 8791


def ask(url: str, num_words: int) -> None:
    """One streamed completion of a random prompt."""
    prompt = " ".join(f"{random.choice(WORDS)}{random.randrange(99)}" for _ in range(num_words))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 60, "stream": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def load(url: str, until: float) -> None:
    """Two clients: short prompts, and now and then a long one."""
    while time.monotonic() < until:
        clients = [threading.Thread(target=ask, args=(url, random.choice((20, 60, 60, 400)))) for _ in range(2)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        time.sleep(random.random())


async def top_picture(url: str) -> str:
    """`kvferry top` after some updates, as the SVG that textual makes, without the fonts that it would fetch."""
    address = RouterAddress(router=url)
    top = Top(address.router, lambda: events(address))
    async with top.run_test(size=(96, 18)):
        await asyncio.sleep(TOP_S)
        svg = top.export_screenshot(title=f"kvferry top {url}")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def take(tab: Browser, url: str, folder: Path) -> None:
    """The screenshots."""
    tab.resize(1180, 1010)
    tab.open(url + "/")
    clients = threading.Thread(target=load, args=(url, time.monotonic() + LOAD_S))
    clients.start()
    time.sleep(LOAD_S - 30)
    tab.screenshot(folder / "page-fleet.png")
    (folder / "top.svg").write_text(asyncio.run(top_picture(url)))
    tab.run("document.querySelector('#tab-requests').click()")
    tab.wait("return document.querySelector('#rows tr') !== null")
    script = "[...document.querySelectorAll('#rows tr')].find((row) => row.innerText.includes('→')).click()"
    tab.run(script)
    tab.resize(1180, 700)
    tab.screenshot(folder / "page-requests.png")
    tab.run(
        "document.querySelector('#tab-chat').click(); document.querySelector('#prompt').value = 'def read_lines(path):'"
    )
    tab.run("document.querySelector('#plain').click(); document.querySelector('#ask').requestSubmit()")
    time.sleep(0.3)
    tab.run("document.querySelector('#long').click()")
    time.sleep(6)
    tab.resize(1180, 640)
    tab.screenshot(folder / "page-chat.png")
    clients.join()


def play_demo(program: str, folder: Path) -> None:
    """The demo's output up to its sentence."""
    lines = recorded([program, "demo"])
    end = next(number for number, line in enumerate(lines) if line.text.startswith("Where each request"))
    write_picture(folder / "demo.svg", "kvferry demo", lines[: end - 1])


def main() -> None:
    """Write the pictures to docs/images."""
    folder = ROOT / "docs" / "images"
    folder.mkdir(exist_ok=True)
    url = f"http://127.0.0.1:{PORT}"
    program = str(Path(sys.executable).with_name("kvferry"))
    play_demo(program, folder)
    command = [program, "serve", MODEL, "--prefill=1", "--decode=1", f"--port={PORT}"]
    server = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        wait_until_healthy(url)
        with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as tab:
            take(tab, url, folder)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


if __name__ == "__main__":
    main()
