"""`farhop console` in a real browser, on a live world and on a stage where a source says what a test wants."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from farhop.identity.operators import Operator, Operators, digest_of
from farhop.service.admin.console.acts import ActError
from farhop.service.admin.console.snapshot import LastSnapshot
from farhop.service.admin.server import AdminServer
from farhop.service.observability.decisions import Decisions
from farhop.telemetry.metrics import TierMetrics
from farhop_lab.world import world_file
from farhop_lab.world.world import WorldSettings
from tests.conftest import RunningWorld
from topology.law import Law
from topology.load import load, shipped

pytestmark = pytest.mark.browser
PATIENCE_S = 20.0
HOSTILE = '<img src=x onerror="document.title=1337">"\'</script><script>document.title=1337</script>'
TOKEN = "a-token-for-the-stage-0123"
READER = "a-token-that-only-reads-0123"
SUBMIT = "document.querySelector('#act form').requestSubmit()"


def until(true: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    end = time.monotonic() + patience_s
    while not (found := true()):
        assert time.monotonic() < end, "never so"
        time.sleep(0.03)
    return found


class Browser:
    """A page of Chromium, asked by selectors."""

    def __init__(self) -> None:
        webdriver = pytest.importorskip("selenium.webdriver")
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        for one in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
            options.add_argument(one)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self.size(1400, 860)

    def size(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def go(self, url: str) -> None:
        self.driver.get("about:blank")
        self.faults()  # of a page that was left: its server may have closed during its request
        self.driver.get(url)
        until(lambda: self.js("return document.querySelectorAll('#regions tbody tr[data-key]').length"))

    def view(self, name: str) -> None:
        self.js("location.hash = arguments[0]", name)
        until(lambda: not self.js("return document.getElementById(arguments[0]).hidden", name.split("/")[0]))

    def js(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def text(self, selector: str) -> str:
        return str(self.js("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def click(self, selector: str) -> None:
        self.js("document.querySelector(arguments[0]).click()", selector)

    def type(self, selector: str, text: str) -> None:
        self.js("const e = document.querySelector(arguments[0]); e.value = arguments[1]", selector, text)

    def intend(self, why: str) -> None:
        """Send the form of an act, which then asks for the name of what is meant."""
        self.type("#act-why", why)
        self.js(SUBMIT)
        until(lambda: self.js("return document.getElementById('act-confirm')"))

    def confirm(self, name: str) -> None:
        """Give that name, and send it."""
        self.type("#act-confirm", name)
        self.js(SUBMIT)

    def keys(self, *keys: str) -> None:
        """Press these, wherever the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        chain = ActionChains(self.driver, duration=0)
        for one in keys:
            chain.send_keys(one)
        chain.perform()

    def focused(self) -> str:
        """Where the focus is: its id, or what it says."""
        return str(self.js("const e = document.activeElement; return e.id || e.textContent"))

    def faults(self) -> list[str]:
        return [one["message"] for one in self.driver.get_log("browser") if one["level"] == "SEVERE"]

    def overlaps(self) -> list[str]:
        """Which of the page's bars lie over another, or beyond the window."""
        return list(
            self.js(
                """const found = [];
                const box = (s) => document.querySelector(s).getBoundingClientRect();
                let above = 0;
                for (const name of ['header', '#wrong', 'main', 'footer']) {
                  const b = box(name);
                  const cut = b.left < -1 || b.right > innerWidth + 1 || b.bottom > innerHeight + 1;
                  if (cut) found.push(name + ' is cut');
                  if (b.top < above - 1) found.push(name + ' lies over another');
                  above = b.bottom;
                }
                if (document.documentElement.scrollWidth > innerWidth) found.push('wider than the window');
                for (const e of document.querySelectorAll('.view:not([hidden]) .scroll'))
                  if (e.getBoundingClientRect().right > innerWidth + 1) found.push('a table leaves the window');
                return found"""
            )
        )


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    made = Browser()
    yield made
    made.driver.quit()


# -- on a live world


DRILL = """drill: quick
title: A region is drained for a moment
kind: traffic
parameters: {region: virginia}
blast_radius: {regions: ["{region}"]}
canaries: {rate_per_s: 12}
before_s: 2
steps: [{name: "{region} is drained", inject: [{do: drain, region: "{region}"}], soak_s: 1}]
after_s: 20
hypotheses: [{measure: residency_violations, at_most: 0}]
aborts: [{measure: residency_violations, above: 0}]
duration_max_s: 60
"""


class Live:
    """A world with a console of it that may act, and one that may read."""

    def __init__(self, up: RunningWorld, folder: Path) -> None:
        self.running, self.file, self.out = up, folder / "world.json", folder / "out"
        world_file.write(self.file, up.world.describe(os.getpid()))
        drills = folder / "drills"
        drills.mkdir()
        (drills / "quick.yaml").write_text(DRILL)
        self.processes: list[subprocess.Popen[str]] = []
        self.url = self.console("--folder", str(drills), "--out", str(self.out))
        self.reading = self.console("--read-only")

    def console(self, *more: str) -> str:
        command = [sys.executable, "-m", "farhop_cli", "console", "--world", str(self.file), "--by", "ann", *more]
        made = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.processes.append(made)
        assert made.stdout is not None
        return made.stdout.readline().strip()

    def close(self) -> None:
        for one in self.processes:
            one.send_signal(signal.SIGTERM)
        assert not any(one.wait(60) for one in self.processes)
        for one in self.processes:
            assert one.stdout is not None
            one.stdout.close()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("console")
    running = RunningWorld(WorldSettings(speedup=20.0, replicas=1), folder / "world")
    try:
        running.call(running.world.start())
        made = Live(running, folder)
        yield made
        made.close()
    finally:
        running.close()


def test_every_view_of_a_live_world(browser: Browser, live: Live) -> None:
    asked = [
        live.running.ask(at, tenant, "why is the sky blue?")
        for at, tenant in (("virginia", "anywhere"), ("virginia", "eu-only"), ("frankfurt", "eu-only"))
    ]
    decision = asked[-1].headers["x-farhop-decision"]
    browser.go(live.url)
    assert "#" not in browser.js("return location.href").replace("#world", "")  # the token is not left in the address
    until(lambda: browser.js("return document.querySelectorAll('#places .place').length") == 3)
    until(lambda: "Nothing is wrong: 3 regions up, 6 balancers seen" in browser.text("#wrong"))
    until(
        lambda: (
            decision
            in browser.js("return [...document.querySelectorAll('#world .decisions tr')].map((r) => r.dataset.key)")
        )
    )
    browser.js("const s = document.getElementById('tenant'); s.value = 'eu-only'; s.dispatchEvent(new Event('change'))")
    assert "eu-only may be computed in frankfurt" in browser.text("#zone")
    assert "not tokyo: tenant eu-only: processing allows only eu" in browser.text("#zone")
    assert browser.js("return document.querySelector('.place[data-region=tokyo]').classList.contains('outside')")
    browser.view("region/frankfurt")
    until(lambda: "frankfurt-0" in browser.text("#replicas"))
    assert "1 of 1 up" in browser.text("#region-facts")
    browser.view(f"request/{decision}")
    until(lambda: "processing allows only eu" in browser.text("#why"))
    assert "regional frankfurt: why".upper() in browser.text("#why").upper()
    browser.js(
        "[...document.querySelectorAll('#why .whatif button')].find((b) => b.textContent === 'frankfurt').click()"
    )
    until(lambda: "refused: nobody else was lawful and served" in browser.text("#why"))
    browser.type("#ask-text", "hello")
    browser.js("document.getElementById('ask').requestSubmit()")
    until(lambda: "request would go now" in browser.text("#why"))
    browser.view("law")
    until(lambda: "japan-only" in browser.text("#matrix"))
    assert browser.text("#epochs").count("topology") == 6
    browser.view("drills")
    until(lambda: "No drill runs." in browser.text("#running"))
    for width, height in ((1400, 860), (360, 780)):
        browser.size(width, height)
        for name in ("world", "region/tokyo", f"request/{decision}", "law", "drills"):
            browser.view(name)
            assert browser.overlaps() == [], (width, name)
    browser.size(1400, 860)
    assert browser.faults() == []


def test_an_act_shows_first_and_asks_by_name(browser: Browser, live: Live) -> None:
    browser.go(live.url)
    browser.view("region/frankfurt")
    until(lambda: "Drain" in browser.text("#region-acts"))
    browser.click("#region-acts button")
    browser.type("#act-why", "patching")
    browser.js(SUBMIT)
    until(lambda: "Dry run" in browser.text("#act-effects") or "DRY RUN" in browser.text("#act-effects"))
    assert "strands: eu-only (llama-3.1-8b)" in browser.text("#act-effects")
    browser.confirm("frankfurter")
    until(lambda: "confirm: repeat the name" in browser.text("#act .error"))
    browser.type("#act-confirm", "frankfurt")
    browser.js(SUBMIT)
    until(lambda: "last region serving eu-only" in browser.text("#act .error"))
    browser.click("#act-force")
    browser.js(SUBMIT)
    until(lambda: "draining, by ann: patching" in browser.text("#wrong"))
    until(lambda: "Undrain" in browser.text("#region-acts"))
    browser.click("#region-acts button")
    browser.intend("patched")
    browser.confirm("frankfurt")
    until(lambda: "frankfurt" not in browser.text("#wrong"))
    assert not [one for one in browser.faults() if "/console/of/act" not in one]


def test_a_model_is_split_and_the_split_taken_back(browser: Browser, live: Live) -> None:
    browser.go(live.url)
    browser.view("region/tokyo")
    until(lambda: "Split" in browser.text("#region-acts"))
    browser.js(
        "[...document.querySelectorAll('#region-acts button')].find((one) => one.textContent == 'Split…').click()"
    )
    for field, text in {"model": "llama-3.1-8b", "weights": "v1=95,v2=5", "why": "canary"}.items():
        browser.type(f"#act-{field}", text)
    browser.js(SUBMIT)
    until(lambda: "shares: v1 95 %, v2 5 %" in browser.text("#act-effects"))
    assert "strands: v2: no replica there has it" in browser.text("#act-effects")
    browser.confirm("tokyo")
    until(lambda: not browser.js("return document.getElementById('act').open"))
    undo = "find((one) => one.textContent.startsWith('Take a split')).click()"
    browser.js(f"[...document.querySelectorAll('#region-acts button')].{undo}")
    browser.type("#act-model", "llama-3.1-8b")
    browser.intend("enough")
    assert "It replaces what ann set: canary" in browser.text("#act-effects")
    browser.confirm("tokyo")
    until(lambda: not browser.js("return document.getElementById('act').open"))


TAB, ENTER, SPACE, ESCAPE, RIGHT, LEFT = "\ue004", "\ue007", "\ue00d", "\ue00c", "\ue014", "\ue012"


def choose_quick(browser: Browser, live: Live, region: str) -> None:
    """Come to the form that begins the drill `quick` in this region, by keys, and have it looked at."""
    browser.go(live.url)
    browser.keys("5")
    until(lambda: "law-change" in browser.text("#begin-drill"))
    browser.js("document.getElementById('begin-drill').focus()")
    browser.keys("quick")
    until(lambda: "A region is drained for a moment" in browser.text("#begin-about"))
    browser.keys(TAB)
    browser.type("#begin-values input", region)
    browser.keys(ENTER)
    until(lambda: browser.js("return document.getElementById('act').open"))


def test_blocked_drill_shows_its_reason_and_has_no_start_button(browser: Browser, live: Live) -> None:
    choose_quick(browser, live, "frankfurt")
    assert "lose-a-region" not in browser.text("#begin-drill")  # a fault: this world supports none
    browser.keys("a rehearsal", ENTER)
    until(lambda: "It must not run now" in browser.text("#act-effects"))
    assert "last-site" in browser.text("#act-effects")
    assert not browser.js("return document.getElementById('act-confirm')")
    assert browser.js("return document.getElementById('act-go').disabled")
    browser.keys(ESCAPE)
    until(lambda: not browser.js("return document.getElementById('act').open"))
    assert browser.js("return document.activeElement.name") == "region"  # in its old position


def test_a_drill_is_begun_watched_and_read_by_keys_alone(browser: Browser, live: Live) -> None:
    choose_quick(browser, live, "virginia")
    browser.keys("a rehearsal", ENTER)
    until(lambda: "1. virginia is drained: drain virginia, for 1 s" in browser.text("#act-effects"))
    browser.keys("quick", ENTER)
    until(lambda: "by ann: a rehearsal" in browser.text("#going-state"))
    until(lambda: "runs since" in browser.text("#running"))
    until(lambda: "step 1 of 1: virginia is drained" in browser.text("#going-lines"))
    until(lambda: "PASS" in browser.text("#going-state"), 40.0)
    until(lambda: "PASS" in browser.text("#history tr[data-key^=quick-]"))
    assert "a rehearsal" not in browser.text("#wrong")
    until(lambda: "The whole report" in browser.text("#going-report"))
    script = """const done = arguments[0], a = document.querySelector('#going-report a');
      fetch(a.href).then(async (r) => done([r.status, r.headers.get('content-security-policy'), await r.text()]))"""
    status, policy, text = browser.driver.execute_async_script(script)
    assert (status, "sandbox" in policy) == (200, True)
    assert "A region is drained for a moment" in text
    browser.js("document.querySelector('#history tr[data-key^=quick-]').focus()")
    browser.keys(ENTER)
    until(lambda: "Report of quick-" in browser.text("#report") or "REPORT OF QUICK-" in browser.text("#report"))
    browser.js("document.querySelector('#report button').focus()")  # into the replay
    browser.keys(ENTER)
    until(lambda: "s ago" in browser.text("#moment"))
    assert browser.js("return location.hash") == "#world"
    assert not [one for one in browser.faults() if "/console/of/act" not in one]
    look_back_on_quick(browser, live.console("--out", str(live.out)))


def look_back_on_quick(browser: Browser, url: str) -> None:
    """A console that did not stand when it ran has its pictures from its report."""
    browser.go(url)
    browser.view("drills")
    until(lambda: "Replay" in browser.text("#history tr[data-key^=quick-]"))
    browser.click("#history tr[data-key^=quick-] button")
    until(lambda: browser.js("return location.hash") == "#world" and "/" in browser.text("#moment"))
    browser.js("document.getElementById('scrub').focus()")

    def drained() -> bool:
        browser.keys(RIGHT)
        return "draining" in browser.text("#regions tr[data-key=virginia]")

    until(drained)
    browser.click("#live")
    until(lambda: "/" not in browser.text("#moment") and "up" in browser.text("#regions tr[data-key=virginia]"))


def test_stopped_drill_restores_and_reports_it(browser: Browser, live: Live) -> None:
    browser.go(live.url)
    browser.view("drills")
    until(lambda: "drain-and-return" in browser.text("#begin-drill"))
    choose = "const s = document.getElementById('begin-drill'); s.value = 'drain-and-return';"
    browser.js(choose + " s.dispatchEvent(new Event('change'))")
    browser.js("document.getElementById('begin').requestSubmit()")
    browser.intend("to be stopped")
    browser.confirm("drain-and-return")
    until(lambda: "Stop it" in browser.text("#running"))
    browser.click("#running button")
    browser.intend("seen enough")
    browser.confirm(browser.text("#act-title").removeprefix("Stop drill "))
    until(lambda: "stopped by ann: seen enough" in browser.text("#going-state"))
    until(lambda: "No drill runs." in browser.text("#running"))


def test_every_control_is_reachable_by_tab_with_a_visible_stable_focus(browser: Browser, live: Live) -> None:
    browser.go(live.url)
    until(lambda: browser.js("return document.querySelectorAll('#places .place').length") == 3)
    for name in ("world", "region/frankfurt", "request", "law", "drills"):
        browser.view(name)
        until(lambda name=name: name != "region/frankfurt" or "Drain" in browser.text("#region-acts"))
        until(lambda name=name: name != "drills" or (browser.text("#begin-drill") and browser.text("#running")))
        until(lambda: browser.js("return document.getElementById('scrub').min < document.getElementById('scrub').max"))
        browser.js(MARK)
        unseen, found = [], 0
        browser.js("document.querySelector('.skip').focus()")
        for _ in range(400):
            browser.keys(TAB)
            state = browser.js(SEEN)
            if state == "again":  # once around
                break
            found += state == "seen"
            unseen += [state] if state.startswith("unseen") else []
        assert unseen == [], name
        assert browser.js(LEFT_OUT) == [], name
        assert found >= 12, name
    # A button that is drawn again each second keeps the focus; a dialog returns it.
    browser.view("region/frankfurt")
    until(lambda: "Drain" in browser.text("#region-acts"))
    browser.js("document.querySelector('#region-acts button').focus()")
    moment = browser.text("#moment")
    until(lambda: browser.text("#moment") not in (moment, ""))
    assert browser.focused() == "Drain…"
    browser.keys(ENTER)
    until(lambda: browser.js("return document.getElementById('act').open"))
    assert browser.focused() == "act-why"
    browser.keys(ESCAPE)
    until(lambda: browser.focused() == "Drain…")

    # The hour by arrow keys, a second each.
    def earlier() -> bool:
        browser.js("document.getElementById('scrub').focus()")
        browser.keys(LEFT, LEFT)
        return "s ago" in browser.text("#moment")

    until(earlier)
    browser.keys(TAB, "l")
    until(lambda: "ago" not in browser.text("#moment"))


# The controls to reach: all that are visible and not disabled when the round begins, and still are at its end:
# a request that appears after the focus has passed its table is not a control that was skipped.
# A control that is redrawn while others are tried is identified by its name.
CONTROLS = (
    "[...document.querySelectorAll('a[href], button, input, select, [tabindex=\"0\"]')]"
    ".filter((e) => !e.disabled && e.checkVisibility() && !e.closest('dialog'))"
)
MARK = f"""window.reached = new WeakSet(); window.reachedNames = new Set();
  window.nameOf = (e) => e.id || e.dataset.key || (e.closest('tr')?.dataset.key || '') + e.outerHTML.slice(0, 90);
  window.meant = new Set({CONTROLS}.map(nameOf));"""
SEEN = """const e = document.activeElement;
  if (e === document.body) return 'the window';
  if (reached.has(e)) return 'again';
  reached.add(e); reachedNames.add(nameOf(e));
  const s = getComputedStyle(e), b = e.getBoundingClientRect();
  const lined = s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2;
  const halo = e.matches('.place') && getComputedStyle(e.querySelector('.halo')).stroke !== 'none';
  const shown = b.bottom > 0 && b.top < innerHeight && (halo || lined);
  return shown ? 'seen' : 'unseen: ' + (e.id || e.outerHTML.slice(0, 90))"""
FLOW = "return getComputedStyle(document.getElementById('flow')).display"
LEFT_OUT = f"return {CONTROLS}.map(nameOf).filter((name) => meant.has(name) && !reachedNames.has(name))"


def test_no_motion_if_the_browser_prefers_none(browser: Browser, live: Live) -> None:
    browser.go(live.url)
    for wanted, shown in (("reduce", "none"), ("no-preference", "block")):
        features = [{"name": "prefers-reduced-motion", "value": wanted}]
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        until(lambda shown=shown: (browser.js(FLOW) == "none") == (shown == "none"))
        assert browser.js("return document.getAnimations().length") == 0
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_read_only_viewer_is_offered_no_acts_and_refused(browser: Browser, live: Live) -> None:
    browser.go(live.reading)
    browser.view("region/frankfurt")
    until(lambda: "last seen" in browser.text("#region-facts"))
    assert browser.text("#region-acts") == ""
    browser.view("drills")
    until(
        lambda: (
            "To begin one needs" in browser.text("#begin-about")
            or "drills cannot be started" in browser.text("#begin-about")
        )
    )
    assert browser.js("return document.getElementById('begin').hidden")
    until(lambda: "quick" in browser.text("#history"))  # readers see them
    script = """const done = arguments[0]; fetch('/console/of/act', {method: 'POST', headers: {'x-farhop-console': '1'},
      body: JSON.stringify({do: 'drain', target: 'tokyo', why: 'x'})}).then((a) => done(a.status))"""
    assert browser.driver.execute_async_script(script) == 403
    assert browser.js("return document.cookie") == ""  # no script sees it


def test_a_region_that_is_killed_is_seen_and_looked_back_on(browser: Browser, live: Live) -> None:
    browser.go(live.url)
    until(lambda: "Nothing is wrong" in browser.text("#wrong"))
    time.sleep(1.2)  # a whole second before, to look back on
    before_ms = browser.js("return Number(document.getElementById('scrub').value)")
    tokyo = live.running.world.regions["tokyo"]

    async def kill() -> None:
        await asyncio.gather(
            *(one.kill() for one in (*tokyo.engines, tokyo.regional, tokyo.global_) if one is not None)
        )

    live.running.call(kill())
    began, late_s = time.monotonic(), 0.0
    while not {"suspect", "down"} & set(browser.text("#regions tr[data-key=tokyo]").split()):
        asked = time.monotonic()
        time.sleep(0.02)
        late_s += max(0.0, time.monotonic() - asked - 0.05)
        assert time.monotonic() - began < PATIENCE_S
    assert time.monotonic() - began - late_s < 2.0
    until(lambda: "down" in browser.text("#regions tr[data-key=tokyo]"))
    # A balancer that is cut off is shown as such, with the time of its last snapshot, and not as idle.
    until(lambda: "cut off: " in browser.text("#wrong") and "last seen" in browser.text("#wrong"))
    until(lambda: "⌁" in browser.text("#regions tr[data-key=tokyo]"))  # the page is drawn piece by piece
    assert "–" in browser.text("#regions tr[data-key=tokyo] td:nth-child(7)")
    browser.js(
        "const s = document.getElementById('scrub'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))",
        before_ms,
    )
    until(lambda: "Nothing is wrong" in browser.text("#wrong"))
    assert "up" in browser.text("#regions tr[data-key=tokyo]")
    browser.click("#mark")
    browser.click("#live")
    until(lambda: "down" in browser.text("#regions tr[data-key=tokyo]"))
    browser.click("#diff")
    until(lambda: "regions › tokyo › state" in browser.text("#compare"))
    browser.click("#compare-close")


# -- on a stage


class Stage:
    """A source that says what a test wants, on an admin port with tokens."""

    name = "the stage"

    def __init__(self, regions: int, replicas: int, named: str = "") -> None:
        topology = load(shipped("three-regions"))
        self._law, self._n, self._replicas, self._named = Law(topology), regions, replicas, named
        self._look = 0

    async def snapshots(self) -> Mapping[str, LastSnapshot]:
        self._look += 1
        now, named = int(time.time() * 1e3), self._named
        found = {}
        for i in range(self._n):
            region = ("tokyo", "virginia", "frankfurt")[i] if i < 3 else f"region-{i}"
            lower, upper = self._regional(region), self._global(region, f"{self._look:08x}{i:08x}", now)
            found[f"regional {region}{named}"] = LastSnapshot(lower, now, named, "regional", region)
            found[f"global {region}{named}"] = LastSnapshot(upper, now, "", "global", region)
        return found

    def _regional(self, region: str) -> dict[str, Any]:
        look, named = self._look, self._named
        return {
            "tier": "regional",
            "region": region,
            "instance": "a",
            "epoch": 1,
            "replicas": {f"{named}{region}-{k}": self._replica(k) for k in range(self._replicas)},
            "queued": look % 3,
            "queue": {f"0 {named or 't'}": look % 3 + 1},
            "under_way": look % 40,
            "law": {"author": named, "why": named},
        }

    def _replica(self, k: int) -> dict[str, Any]:
        look, named = self._look, self._named
        return {
            "state": "up",
            "why": named or "proven",
            "in_flight": (look * 7 + k) % 60,
            "slots": 64,
            "running": (look + k) % 50,
            "waiting": 0,
            "kv": ((look * 3 + k) % 97) / 100,
            "hit": 0.4,
            "tpot_ms": 11.5,
            "prefill_ms": 0.2,
            "models": [named or "m"],
            "age_s": 0,
            "version": named or "v1",
        }

    def _global(self, region: str, decision_id: str, now: int) -> dict[str, Any]:
        look, named = self._look, self._named
        decision = {
            "at": now,
            "tenant": named or "t",
            "model": named or "m",
            "to": region,
            "status": 200,
            "outcome": "served",
            "ttft_ms": 99,
        }
        seen = {
            "state": "up",
            "why": named or "ok",
            "wait_ms": look % 20,
            "used": 0.5,
            "drain": {"author": named, "why": named} if named else None,
        }
        return {
            "tier": "global",
            "region": region,
            "instance": "a",
            "epoch": 1,
            "under_way": look % 30,
            "trouble": named or None,
            "arcs": {region: {"ok": 1.5 * look % 9}},
            "decisions": {decision_id: decision},
            "regions": {region: seen},
        }

    def law(self) -> Law:
        return self._law

    async def decision(self, decision_id: str) -> dict[str, dict[str, Any]]:
        del decision_id
        named = self._named
        reasons = {
            "chosen": named,
            "candidates": [{"region": named, "score": 1.0}],
            "notes": [named],
            "policy": named,
            "unlawful": {named: named},
        }
        return {
            named: {
                "tenant": named,
                "model": named,
                "at_unix_ms": 1,
                "duration_ms": 5.0,
                "ttft_ms": 2.0,
                "outcome": named,
                "status": 200,
                "attempts": [{"target": named, "outcome": named}],
                "reasons": reasons,
            }
        }

    async def explain(self, question: bytes) -> dict[str, Any]:
        raise ActError(question.decode()[:10])

    def acts(self) -> None:
        return None

    def author(self, operator: Operator) -> str:
        return operator.name


class Theatre:
    """A stage on a port, in the loop of a thread of its own."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self.thread = RunningWorld(WorldSettings(), folder)  # its world is not started: only its loop runs
        tokens = {"actor": (digest_of(TOKEN), "act"), "reader": (digest_of(READER), "read")}
        metrics = TierMetrics("console", "", "")
        self.server = AdminServer(SimpleNamespace(), metrics, Decisions(), None, Operators(tokens))  # type: ignore[arg-type]
        self.server.have(stage)
        self.port = self.thread.call(self.server.open("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.port}/console"

    def close(self) -> None:
        self.thread.call(self.server.close())
        self.thread.close()


def test_names_are_never_markup(browser: Browser, tmp_path: Path) -> None:
    stage = Theatre(Stage(3, 2, HOSTILE), tmp_path)
    try:
        browser.go(f"{stage.url}#{TOKEN}")
        for name in ("world", "region/tokyo", "request/00000001", "law", "drills"):
            browser.view(name)
            until(lambda name=name: "onerror" in browser.text("body") or name == "drills")
            assert browser.js("return document.querySelectorAll('img[src=x], main script').length") == 0
        assert "1337" not in browser.js("return document.title")
        text = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
        script = (
            "const done = arguments[0]; fetch('/console').then((a) => done(a.headers.get('content-security-policy')))"
        )
        assert browser.driver.execute_async_script(script) == text
        assert not [one for one in browser.faults() if "Content Security Policy" in one]
    finally:
        stage.close()


@pytest.mark.parametrize(
    "named",
    [
        "\u202e\u2066evil\u200f",
        "y" * 10_240,
        "\ufdfd" * 200,
        "a" + "\u0301" * 5000,
        "a\0\r\n\tb\u2028",
        "__proto__",
        "constructor",
    ],
    ids=["right to left", "10 KB", "wide", "marks", "controls", "__proto__", "constructor"],
)
def test_unusual_names_do_not_break_the_page(browser: Browser, tmp_path: Path, named: str) -> None:
    stage = Theatre(Stage(3, 2, named), tmp_path)
    try:
        browser.go(f"{stage.url}#{TOKEN}")
        for name in ("world", "region/tokyo", "request/00000001", "law"):
            browser.view(name)
            until(lambda: browser.js("return document.querySelectorAll('.view:not([hidden]) tbody tr').length"))
            assert browser.overlaps() == []
        assert browser.faults() == []
        assert browser.js("return Object.keys(Object.prototype).length + Object.keys([]).length") == 0
    finally:
        stage.close()


def test_viewer_without_a_token_is_asked_for_one_and_fifty_can_view_together(browser: Browser, tmp_path: Path) -> None:
    stage = Theatre(Stage(12, 20), tmp_path)
    try:
        browser.driver.get("about:blank")
        browser.driver.get(stage.url)
        until(lambda: browser.js("return document.getElementById('login').open"))
        browser.type("#token", "not-this-one-0123456789")
        browser.js("document.querySelector('#login form').requestSubmit()")
        until(lambda: "not known" in browser.text("#login .error"))
        browser.type("#token", READER)
        browser.js("document.querySelector('#login form').requestSubmit()")
        until(lambda: browser.js("return document.querySelectorAll('#regions tbody tr[data-key]').length") == 12)
        bytes_per_s = asyncio.run(_look(stage.port, 50, 3))
        assert max(bytes_per_s) <= 20_000, max(bytes_per_s)
        until(lambda: len(browser.js("return document.querySelector('#moment').textContent")) > 4)
        assert browser.overlaps() == []
    finally:
        stage.close()


async def _look(port: int, viewers: int, seconds: int) -> list[float]:
    """Bytes a second that each of so many viewers is sent beyond the first picture."""

    async def one(http: aiohttp.ClientSession) -> float:
        sizes = []
        async with http.get(f"http://127.0.0.1:{port}/console/of/events") as answer:
            assert answer.status == 200
            async for line in answer.content:
                if line.startswith(b"data: "):
                    sizes.append(len(line))
                if len(sizes) > seconds:
                    return sum(sizes[1:]) / seconds
        raise AssertionError("a viewer was let go")

    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(
        headers=headers, connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20
    ) as http:
        return list(await asyncio.gather(*(one(http) for _ in range(viewers))))
