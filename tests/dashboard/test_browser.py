"""End-to-end tests of the dashboard: `streamlit run` with stored results, visited by Chromium."""

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from made_up_runs import ENDED, store_hostile_runs
from playwright.sync_api import (
    BrowserContext,
    Error,
    Page,
    Playwright,
    ViewportSize,
    expect,
    sync_playwright,
)
from processes import CHROMIUM, free_ports

from jobs.schema.states import PointState, RunState
from orchestrator.store import Store
from orchestrator.store import records as rec

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[2]
RUN, HALF = "20261121-100000-demo-ab12", "20261121-113000-m7c-cd34"
WIDE, NARROW = ViewportSize(width=1440, height=900), ViewportSize(width=390, height=800)
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    """A browser for all tests, with a profile that keeps Streamlit's scripts and what they were compiled to."""
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        context = _launch(playwright, tmp_path_factory.mktemp("profile"))
        context.set_default_timeout(PATIENCE_MS)
        yield context
        context.close()


def _launch(playwright: Playwright, profile: Path) -> BrowserContext:
    try:
        return playwright.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, args=["--no-sandbox"], viewport=WIDE
        )
    except Error as err:
        pytest.skip(f"no Chromium: {str(err).splitlines()[0]}; install it, or run `playwright install chromium`")


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    first = context.pages[0]  # empty; without any page the browser would end
    yield context.new_page()
    for opened in context.pages:
        if opened is not first:
            opened.close()
    context.clear_cookies()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, complete_file: Path) -> Path:
    """The dashboard's home folder, with the complete database."""
    home = tmp_path_factory.mktemp("home")
    shutil.copy(complete_file, home / "nsa.db")
    return home


@pytest.fixture(scope="module")
def address(context: BrowserContext, folder: Path) -> Iterator[str]:
    """The running dashboard's address; needs the browser, so that nothing is started without one."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "streamlit", "run", "dashboard/app.py", f"--server.port={port}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
    log_file = folder / "dashboard.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--server.address=127.0.0.1"],
            cwd=ROOT,
            env={**environment, "NSA_HOME": str(folder)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _await(f"{url}/_stcore/health", process, log_file)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)
    assert "Traceback" not in log_file.read_text()


def _await(url: str, process: subprocess.Popen, log: Path) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(url, timeout=2)
            return
        except OSError:
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
    raise AssertionError(f"the dashboard did not answer: {log.read_text()}")


def visit(page: Page, address: str, title: str) -> None:
    page.goto(address)
    settled(page, title)


def settled(page: Page, title: str) -> None:
    """Wait until the page is drawn, and check that it shows no exception."""
    expect(page.get_by_role("heading", name=title, level=1)).to_be_visible()
    expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")
    expect(page.get_by_test_id("stException")).to_have_count(0)


def test_every_page_shows_real_results(page: Page, address: str):
    visit(page, address, "Overview")
    expect(page.get_by_text("NO-GO").first).to_be_visible()
    rules = page.get_by_test_id("stTable").filter(has_text="Naive contrast").first
    expect(rules.get_by_role("row")).to_have_count(6)  # header, verdict and four rules
    expect(page.get_by_text("UNKNOWN").first).to_be_visible()
    grid = page.get_by_test_id("stDataFrame").first
    expect(grid.locator("canvas").first).to_be_visible()
    grid.hover()
    expect(page.get_by_test_id("stElementToolbar").get_by_role("button", name="Search").first).to_be_visible()
    expect(page.get_by_role("button", name="Download as CSV")).to_have_count(0)  # its cells may be formulas

    page.get_by_test_id("stSidebarNav").get_by_role("link", name="Scaling").click()
    settled(page, "Scaling")
    charts = page.get_by_test_id("stVegaLiteChart")
    expect(charts).to_have_count(6)
    for number in range(6):
        drawn = charts.nth(number).locator("canvas, svg.marks").first
        drawn.scroll_into_view_if_needed()
        expect(drawn).to_be_visible()
        box = drawn.bounding_box()
        assert box is not None
        assert box["width"] > 300
        assert box["height"] > 100
    expect(page.get_by_test_id("stDataFrame")).to_have_count(3)  # exponents, points without a number, numbers

    page.get_by_test_id("stSidebarNav").get_by_role("link", name="Runs").click()
    settled(page, "Runs")
    expect(page.get_by_test_id("stDataFrame").locator("canvas").first).to_be_visible()

    visit(page, f"{address}/runs?run={RUN}", "demo")
    expect(page.get_by_text("24 ok · 3 failed · 1 skipped of 28 points")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Rows as CSV").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0].startswith("run_id,")
    assert sum(",hang," in line for line in lines) == 1


@pytest.mark.parametrize(("path", "title"), [("", "Overview"), (f"runs?run={RUN}", "demo")])
def test_a_narrow_screen_scrolls_down_only_and_cuts_nothing_of_importance(
    page: Page, address: str, path: str, title: str
):
    page.set_viewport_size(NARROW)
    visit(page, f"{address}/{path}", title)
    width = page.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth")
    assert width <= NARROW["width"]
    header = page.get_by_test_id("stHeader").bounding_box()
    first = page.get_by_test_id("stMainBlockContainer").locator("h1, a").first.bounding_box()
    assert header
    assert first
    assert header["y"] + header["height"] <= first["y"]


def test_a_click_on_a_row_opens_it_and_the_way_back_leads_to_what_was_left(page: Page, address: str):
    visit(page, f"{address}/scaling", "Scaling")
    grid = page.get_by_test_id("stDataFrame").nth(1)
    grid.scroll_into_view_if_needed()
    expect(grid.locator("canvas").first).to_be_visible()
    page.wait_for_timeout(500)  # the grid is drawn after it is attached
    grid.click(position={"x": 220, "y": 90})  # of its second row, a point without a number
    settled(page, "naive forward+backward S=8217")
    page.go_back()
    settled(page, "Scaling")
    expect(page).to_have_url(f"{address}/scaling")


def test_filters_and_tabs_are_in_the_address(page: Page, address: str):
    """A copied link is opened in another tab, where nothing of the first is known."""
    visit(page, f"{address}/scaling", "Scaling")
    filters = page.get_by_role("button", name="Runs and filters")
    filters.click()
    page.get_by_test_id("stPopoverBody").get_by_role("button", name="forward", exact=True).click()
    page.get_by_test_id("stPopoverBody").get_by_role("button", name="forward+backward", exact=True).click()
    expect(page).to_have_url(f"{address}/scaling?pass=forward")
    link = page.url
    copied = page.context.new_page()
    visit(copied, link, "Scaling")
    copied.get_by_role("button", name="Runs and filters").click()
    chosen = copied.get_by_test_id("stPopoverBody").get_by_role("button", name="forward", exact=True)
    expect(chosen).to_have_attribute("aria-pressed", "true")
    copied.keyboard.press("Escape")
    expect(copied).to_have_url(link)
    visit(page, f"{address}/runs?run={RUN}", "demo")
    page.get_by_role("tab", name="Spec").click()
    expect(page).to_have_url(f"{address}/runs?run={RUN}&tab=Spec")
    visit(copied, page.url, "demo")
    expect(copied.get_by_role("tab", name="Spec")).to_have_attribute("aria-selected", "true")


def test_pages_follow_a_run_without_being_reloaded(page: Page, address: str, folder: Path):
    visit(page, f"{address}/?why-linear-scaling=CPU", "Overview")
    with Store.open(f"sqlite:///{folder / 'nsa.db'}") as store:
        start = datetime.now(UTC)
        axes = {"implementation": "chunked", "workload": "attention", "seq_len": 512, "device": "cpu"}
        store.apply_many(
            [
                rec.RunRecord(run_id=HALF, at=start, name="fresh", kind="scaling", spec={}, spec_hash="1"),
                rec.PointRecord(
                    run_id=HALF, point_id=f"{HALF}/0", index=0, key="k", label="fresh point", config={}, axes=axes
                ),
                rec.StartRecord(run_id=HALF, point_id=f"{HALF}/0", attempt=1),
            ]
        )
        store.beat(rec.Progress(HALF, f"{HALF}/0", datetime.now(UTC), "timing", 7, 10))
        expect(page.get_by_text("timing 7/10")).to_be_visible()
        end = rec.OutcomeRecord(run_id=HALF, point_id=f"{HALF}/0", attempt=1, state=PointState.CRASH, reason="signal 9")
        store.apply_many([end, rec.RunEndRecord(run_id=HALF, state=RunState.DONE)])
    expect(page.get_by_text(re.compile(r"which measured less, shows .*fresh point \(crash\)")).first).to_be_visible()
    expect(page.get_by_text("timing 7/10")).to_have_count(0)
    settled(page, "Overview")


def test_hostile_text_fetches_nothing_and_links_nowhere(page: Page, address: str, folder: Path):
    store_hostile_runs(f"sqlite:///{folder / 'nsa.db'}")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for path in ("", f"runs?run={ENDED}", f"runs?point={ENDED}/0", f"scaling?run={ENDED}"):
        page.goto(f"{address}/{path}")
        expect(page.get_by_role("heading", level=1).first).to_be_visible()
        expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")
        expect(page.get_by_test_id("stException")).to_have_count(0)
        if "run?" in path or "point" in path:
            for shown in (page.get_by_test_id("stTable").last, page.get_by_role("heading", level=1)):
                expect(shown).to_contain_text("evil.invalid")
        expect(page.locator("[src*='.invalid'], [href*='.invalid']:not([href*='runs?'])")).to_have_count(0)
    assert {urllib.parse.urlsplit(url).hostname for url in asked} <= {"127.0.0.1", None}
