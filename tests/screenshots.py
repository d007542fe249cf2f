"""`make screenshots`: the console's views on the demo world, in headless Chromium, as pictures for the README and docs.

Needs chromium and chromedriver. What it shows is what a live world did while it ran: nothing is drawn by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import tempfile
from pathlib import Path
from random import Random

from PIL import Image

from farhop_lab.world.world import WorldSettings
from tests.conftest import RunningWorld
from tests.farhop_cli.test_console import SUBMIT, Browser, Live, until

IMAGES = Path(__file__).parent.parent / "docs" / "images"
TENANTS = ("anywhere", "anywhere", "anywhere", "eu-only", "not-us", "japan-only")
BYTES_MAX = 200_000
BURST = 24
# Traffic of tokyo's entry that goes elsewhere; a decision that its entry recorded, and that the law limited.
MOVED = "return [...document.querySelectorAll('#arcs tr')].some((r) => /tokyo>(vir|fra)/.test(r.dataset.key))"
CONFINED = """[...document.querySelectorAll('#request .decisions tr')].find(
  (r) => ['not-us', 'eu-only'].includes(r.cells[1].innerText) && r.cells[2].innerText.length > 1).click()"""


async def traffic(up: RunningWorld, rng: Random) -> None:
    """Questions of all tenants from everywhere, until it is cancelled."""
    waiting: set[asyncio.Future[object]] = set()
    while True:
        for _ in range(BURST):
            tenant = rng.choice(TENANTS)
            region = "tokyo" if tenant == "japan-only" else rng.choice(("virginia", "frankfurt", "tokyo", "tokyo"))
            words = " ".join(rng.choices(("sea", "sky", "rain", "wind", "moon"), k=200))
            one = asyncio.get_running_loop().run_in_executor(
                None, _ask, up, region, tenant, words, rng.randint(20, 300)
            )
            waiting.add(one)
            one.add_done_callback(waiting.discard)
        await asyncio.sleep(1.0)


def _ask(up: RunningWorld, region: str, tenant: str, words: str, tokens: int) -> None:
    with contextlib.suppress(Exception):
        up.ask(region, tenant, words, max_tokens=tokens)


def keep(browser: Browser, name: str) -> None:
    """The window as it is now."""
    shot = (
        Image.open(io.BytesIO(browser.driver.get_screenshot_as_png()))
        .convert("RGB")
        .quantize(256, Image.Quantize.MAXCOVERAGE)
    )
    path = IMAGES / f"console-{name}.png"
    shot.save(path, optimize=True)
    size = path.stat().st_size
    assert size <= BYTES_MAX, f"{path}: {size} bytes"
    print(f"{path.relative_to(IMAGES.parent.parent)}: {size} bytes")


def main() -> None:
    """Make them all."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        up = RunningWorld(WorldSettings(speedup=10.0, profile="l4"), Path(folder) / "world")
        live = browser = None
        try:
            up.call(up.world.start())
            live, browser = Live(up, Path(folder)), Browser()
            browser.driver.execute_cdp_cmd(
                "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
            )
            asking = up.begin(traffic(up, Random(7)))
            take(browser, live)
            asking.cancel()
        finally:
            if browser is not None:
                browser.driver.quit()
            if live is not None:
                live.close()
            up.close()


def take(browser: Browser, live: Live) -> None:
    """Each view, with tokyo drained: that something happens is what the page is for."""
    browser.size(1280, 760)
    browser.go(live.url)
    until(lambda: browser.js("return document.querySelectorAll('#world .decisions tr[data-key]').length") > 12)
    rehearse(browser)
    browser.view("region/tokyo")
    until(lambda: "Drain" in browser.text("#region-acts"))
    browser.click("#region-acts button")
    browser.intend("patching the racks")
    browser.type("#act-confirm", "tokyo")
    keep(browser, "act")
    browser.js("const f = document.getElementById('act-force'); if (f) f.checked = true")
    browser.js(SUBMIT)
    until(lambda: "patching the racks" in browser.text("#wrong"))
    browser.view("world")
    until(lambda: browser.js(MOVED))
    keep(browser, "world")
    browser.view("region/frankfurt")
    keep(browser, "region")
    browser.view("request")
    until(lambda: browser.js(CONFINED.replace(".click()", " !== undefined").replace("[...", "return [...", 1)))
    browser.js(CONFINED)
    until(lambda: "Not asked".upper() in browser.text("#why").upper())
    browser.js("document.querySelector('#why .whatif button').click()")
    until(lambda: "→" in browser.text("#why"))
    keep(browser, "request")
    browser.view("law")
    keep(browser, "law")


def rehearse(browser: Browser) -> None:
    """A drill of a few seconds, begun from the page, and what it proved."""
    browser.view("drills")
    until(lambda: "quick" in browser.text("#begin-drill"))
    choose = "const s = document.getElementById('begin-drill'); s.value = 'quick'; s.dispatchEvent(new Event('change'))"
    browser.js(choose)
    until(lambda: browser.js("return document.querySelector('#begin-values input')"))
    browser.type("#begin-values input", "virginia")
    browser.js("document.getElementById('begin').requestSubmit()")
    browser.type("#act-why", "before the release")
    submit = "document.querySelector('#act form').requestSubmit()"
    browser.js(submit)
    until(lambda: browser.js("return document.getElementById('act-confirm')"))
    browser.type("#act-confirm", "quick")
    browser.js(submit)
    until(lambda: "PASS" in browser.text("#going-state"), 40.0)
    until(lambda: "PASS" in browser.text("#history tr[data-key^=quick-]"))
    until(lambda: "runs, by" not in browser.text("#wrong"))
    browser.js(choose.replace("quick", "law-change"))
    keep(browser, "drills")


if __name__ == "__main__":
    main()
