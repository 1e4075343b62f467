"""The page as a reader meets it: in headless Chromium, served by the real application, over real runs."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from tiny_runs import STEPS, tiny_run

from quatrain.inference.engine import Engine
from quatrain.model.pretrained import load_folder_tokenizer, load_model
from quatrain.tokens.store import TokenStore
from quatrain.web import through
from quatrain.web.app import create_app
from quatrain.web.dashboard import routes
from quatrain.web.guard import Door
from quatrain.web.listening import Server, address, listen
from quatrain.web.serving import Serving

HOSTILE = "</span><script>window.hit=1</script><img src=x onerror='window.hit=1'>"
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def folders(sonnets: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs; the first has a sample that would like to be a script."""
    parent = tmp_path_factory.mktemp("runs")
    runs = [tiny_run(sonnets, parent / name, seed) for name, seed in (("first", 42), ("second", 7))]
    with (runs[0] / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": STEPS, "sample": 2, "prompt": HOSTILE, "text": HOSTILE}) + "\n")
    return runs


@pytest.fixture(scope="module")
def url(folders: list[Path]) -> Iterator[str]:
    checkpoint = folders[0] / "checkpoints" / f"step_{STEPS:08d}"
    serving = Serving(Engine(load_model(checkpoint), 4), load_folder_tokenizer(checkpoint), "first").start()
    yield from served(serving, folders)


def served(serving: Serving | None, folders: list[Path]) -> Iterator[str]:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        end = serving.close if serving else lambda: None
        server = Server(create_app(serving, routes(folders), Door(port=port)), sock, end)
        server.beside()
        yield address("127.0.0.1", port)
        server.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        pytest.skip("no browser: playwright is not installed")
    if not CHROMIUM:
        pytest.skip("no browser: no chromium on this machine")
    with sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except Error as error:
            pytest.skip(f"no browser: chromium does not start ({str(error).splitlines()[0]})")
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """A page that fails the test where it asks another host, breaks the policy, or writes an error to the console."""
    yield from watched(browser, url)


def watched(
    browser: Any, url: str, viewport: dict[str, int] = WIDE, scheme: str = "light", clock: bool = False
) -> Iterator[Any]:
    context = browser.new_context(viewport=viewport, color_scheme=scheme)
    page = context.new_page()
    if clock:
        page.clock.install()
    page.set_default_timeout(15_000)
    wrong: list[str] = []
    hosts: set[str] = set()
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: hosts.add(urlparse(request.url).netloc))
    page.goto(url)
    yield page
    context.close()
    assert hosts == {urlparse(url).netloc}
    assert wrong == []


def expect_text(locator: Any, pattern: str) -> None:
    from playwright.sync_api import expect

    expect(locator).to_have_text(re.compile(pattern, re.S), timeout=15_000)


def shown(page: Any, host: str) -> list[str]:
    return page.locator(f"{host} blockquote").all_inner_texts()


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def inked(page: Any, title: str) -> int:
    """Pixels of a chart's canvas that are strongly coloured: its curves, not its axes."""
    figure = page.locator("figure", has=page.locator("strong", has_text=re.compile(f"^{title}$")))
    return figure.locator("canvas").evaluate(
        """canvas => {
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          let count = 0;
          for (let i = 0; i < data.length; i += 4) {
            const spread = Math.max(data[i], data[i + 1], data[i + 2]) - Math.min(data[i], data[i + 1], data[i + 2]);
            if (data[i + 3] > 200 && spread > 60) count += 1;
          }
          return count;
        }"""
    )


def test_the_curves_of_two_runs_are_drawn_with_their_numbers(page, folders):
    for title in ("Loss", "Bits per byte", "Learning rate", "Gradient norm", "Tokens per second"):
        page.locator("strong", has_text=re.compile(f"^{title}$")).wait_for()
        assert inked(page, title) > 200
    last = [row for row in rows(folders[0]) if "loss" in row][-1]
    validated = [row for row in rows(folders[0]) if "val_loss" in row][-1]
    cells = page.locator("#latest tbody tr").first.locator("td").all_inner_texts()
    assert cells[0] == f"{STEPS} of {STEPS}"
    assert cells[3:5] == [f"{last['loss']:.4f}", f"{validated['val_loss']:.4f}"]
    both = inked(page, "Loss")
    page.get_by_role("checkbox", name="second").uncheck()
    assert 0 < inked(page, "Loss") < both
    assert not page.get_by_label("reference lines").is_checked()  # a char tokenizer's losses are far from GPT-2's


def test_axes_and_reference_lines_can_be_chosen(page):
    readout = page.locator(".readout").first
    plot = page.locator(".plot").first
    expect_text(readout, "^last")
    for value, pattern in (
        ("tokens", r"^\S+K"),
        ("seconds", r"^\d+:\d\d"),
        ("flops", r"^\d(\.\d)?e\d+"),
        ("step", r"^\d+"),
    ):
        page.get_by_label("against").select_option(value)
        plot.press("ArrowLeft")
        expect_text(readout, pattern + ".*: first")
    page.get_by_label("log x").check()
    page.get_by_label("log y").check()
    assert inked(page, "Loss") > 200
    page.get_by_label("reference lines").check()
    expect_text(page.locator("#references"), "measured on another validation set")


def test_a_chart_is_looked_at_closer_and_whole_again(page):
    plot = page.locator(".plot").first
    readout = page.locator(".readout").first
    expect_text(readout, "^last")
    box = plot.bounding_box()
    left, right, height = box["x"] + 0.5 * box["width"], box["x"] + 0.7 * box["width"], box["y"] + 0.5 * box["height"]

    def first_step() -> int:
        page.mouse.move(box["x"] + 64, height)  # the left end of what is drawn
        return int(re.match(r"\d+", readout.inner_text())[0])

    page.mouse.move(left, height)
    page.mouse.down()
    page.mouse.move(right, height)
    page.mouse.up()
    zoomed = first_step()
    assert zoomed > 5
    page.get_by_label("smoothing").select_option("0")  # another picture, whose zoom begins anew
    assert first_step() <= 1
    page.mouse.move(left, height)
    page.mouse.down()
    page.mouse.move(right, height)
    page.mouse.up()
    assert first_step() == zoomed
    page.mouse.dblclick(left, height)
    assert first_step() <= 1


def test_a_run_that_is_being_written_grows_on_the_page(browser, folders, tmp_path):
    """By the page's own looks, which the test's clock brings nearer."""
    run = tmp_path / "going"
    shutil.copytree(folders[0], run)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:12]) + lines[12][:20])
    for url in served(None, [run]):
        for page in watched(browser, url, clock=True):
            step = page.locator("#latest tbody td").first
            bits = page.locator("figure", has=page.locator("strong", has_text="Bits per byte"))
            expect_text(step, r"^11 of|^10 of")
            assert bits.is_visible()
            with (run / "metrics.jsonl").open("ab") as file:
                file.write(lines[12][20:] + b"".join(lines[13:18]))
            expect_soon(page, step, "^1[5-7] of")
            cut = [line for line in lines[:8] if b"val_loss" not in line]
            (run / "metrics.jsonl").write_bytes(b"".join(cut))  # as a resume does
            expect_soon(page, step, "^7 of")
            assert bits.is_hidden()  # what is not in the file any longer is not drawn
            (run / "metrics.jsonl").write_bytes(b"".join(lines))
            expect_soon(page, step, f"^{STEPS} of")
            assert bits.is_visible()
            page.locator("#tab-playground").click()
            expect_text(page.locator("#playground-status"), "No model is served yet")


def expect_soon(page: Any, locator: Any, pattern: str) -> None:
    """A text behind one of the page's next looks; its clock is put forward to each."""
    for _ in range(500):
        if re.search(pattern, locator.inner_text()):
            return
        page.clock.fast_forward(2000)
        page.wait_for_timeout(20)  # of our own time, in which it is answered
    expect_text(locator, pattern)


def test_samples_are_shown_by_step_and_a_script_in_them_stays_text(page, folders):
    expect_text(page.locator("#samples"), re.escape(HOSTILE))
    assert shown(page, "#samples")[-1] == HOSTILE * 2
    page.locator("#samples-form input").press("Home")
    expect_text(page.locator("#samples-form output"), "^0$")
    first = [json.loads(line) for line in (folders[0] / "samples.jsonl").read_text().splitlines()][:2]
    kept = page.locator("#samples blockquote").evaluate_all("all => all.map(one => one.textContent)")
    assert kept == [row["prompt"] + row["text"] for row in first]
    assert page.evaluate("window.hit") is None


def test_a_prompt_goes_through_the_checkpoints(page, monkeypatch):
    form = page.locator("#through-form")
    form.locator("option").first.wait_for(state="attached")
    form.get_by_label("prompt").fill("Shall I")
    form.get_by_label("tokens").fill("8")
    form.get_by_role("button", name="Continue it").click()
    expect_text(page.locator("#through-status"), "3 checkpoints, oldest first")
    assert page.locator("#through h3").all_inner_texts() == ["step 10", "step 20", "step 30"]
    assert all(text.startswith("Shall I") and len(text) > len("Shall I") for text in shown(page, "#through"))
    monkeypatch.setattr(through, "CHECKPOINTS", 2)  # of the three
    page.evaluate(
        """() => {
          window.told = [];
          const status = document.getElementById("through-status");
          new MutationObserver(() => window.told.push(status.textContent)).observe(status, { childList: true });
        }"""
    )
    form.get_by_role("button", name="Continue it").click()
    expect_text(page.locator("#through-status"), "^2 checkpoints, oldest first")
    assert "1 of 2 checkpoints …" in page.evaluate("window.told")


def begin(page: Any, url: str, tokens: int = 12) -> None:
    page.goto(url + "#playground")
    form = page.locator("#playground-form")
    form.locator("option").first.wait_for(state="attached")
    form.get_by_label("prompt").fill("Shall I")
    form.get_by_label("max tokens").fill(str(tokens))
    form.get_by_role("button", name="Write").click()


def drawn(page: Any) -> list[str]:
    return page.locator(".token").evaluate_all("all => all.map(one => one.textContent)")


def test_a_sample_is_streamed_and_continued_from_an_alternative(page, url):
    begin(page, url)
    expect_text(page.locator("#playground-status"), "12 tokens.*ended|12 tokens.*reached")
    before = drawn(page)
    assert len(before) == 12
    assert re.search(r"“.+”, [\d.]+ %", page.locator(".token").nth(4).get_attribute("aria-label"))
    page.locator(".token").nth(4).click()
    offers = page.locator("#alternatives-list button")
    assert offers.count() >= 5
    other = page.locator("#alternatives-list button:not([aria-current])").first
    chosen = other.locator("code").inner_text().strip("“”")
    with page.expect_request(lambda request: json.loads(request.post_data or "{}").get("stream")) as asked:
        other.click()
    expect_text(page.locator("#playground-status"), "7 tokens.*reached")
    after = drawn(page)
    assert after[:4] == before[:4]
    assert after[4].replace("\n", "↵") == chosen
    assert len(after) == 12
    body = json.loads(asked.value.post_data)
    assert all(isinstance(token, int) for token in body["prompt"])
    assert len(body["prompt"]) == len("Shall I") + 5  # a char tokenizer
    assert body["max_tokens"] == 7


def test_the_same_alternative_gives_the_text_that_was_there(page, url):
    """What is drawn is a function of seed and position: going on from the token that stands there changes nothing."""
    begin(page, url)
    expect_text(page.locator("#playground-status"), "12 tokens.*reached")
    before = drawn(page)
    page.locator(".token").nth(4).click()
    page.locator("#alternatives-list button[aria-current]").click()
    expect_text(page.locator("#playground-status"), "7 tokens.*reached")
    assert drawn(page) == before


def test_by_keyboard_alone_from_tab_to_tab_and_to_an_alternative(page):
    page.keyboard.press("Tab")
    expect_text(page.locator(":focus"), "^Run$")
    page.keyboard.press("ArrowRight")
    expect_text(page.locator(":focus"), "^Playground$")
    page.locator("#panel-playground").wait_for()
    assert page.locator("#tab-playground").get_attribute("aria-selected") == "true"
    assert page.locator("#panel-run").is_hidden()
    page.keyboard.press("End")
    page.locator("#panel-data").wait_for()
    page.keyboard.press("ArrowLeft")
    page.locator("#panel-playground").wait_for()
    page.locator("#playground-form option").first.wait_for(state="attached")
    page.keyboard.press("Tab")  # colours
    page.keyboard.press("Tab")
    page.keyboard.type("Thy")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect_text(page.locator(":focus"), "^Write$")
    page.keyboard.press("Enter")
    expect_text(page.locator("#playground-status"), r"tokens.*(reached|ended)")
    page.locator(".token").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.locator("#alternatives-list button").first.evaluate("one => one === document.activeElement")
    page.keyboard.press("Escape")
    assert page.locator(".token").nth(1).evaluate("one => one === document.activeElement")


def test_a_script_in_the_models_text_stays_text_and_errors_are_sentences(page, url):
    logprobs = {
        "token_ids": [1],
        "tokens": [HOSTILE],
        "token_logprobs": [-0.1],
        "top": [[{"id": 1, "text": HOSTILE, "logprob": -0.1}]],
    }
    events = [
        {"choices": [{"text": HOSTILE, "logprobs": logprobs, "finish_reason": None}]},
        {"error": {"message": "the engine failed <b>here</b>"}},
    ]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    begin(page, url)
    expect_text(page.locator("#playground-error"), "^the engine failed <b>here</b>$")
    assert drawn(page) == [HOSTILE]
    page.locator(".token").click()
    assert HOSTILE in page.locator("#alternatives-list code").inner_text()
    assert page.evaluate("window.hit") is None


def test_a_character_of_several_tokens_is_drawn_with_its_last(page, url):
    parts = ["bytes:\\xe2\\x80", "bytes:\\x94", " ok"]
    logprobs = {"token_ids": [1, 2, 3], "tokens": parts, "token_logprobs": [-0.1] * 3, "top": [[]] * 3}
    body = f"data: {json.dumps({'choices': [{'logprobs': logprobs, 'finish_reason': 'stop'}]})}\n\ndata: [DONE]\n\n"
    page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    begin(page, url)
    expect_text(page.locator("#playground-status"), "3 tokens")
    assert drawn(page) == ["·", "—", " ok"]


def test_stop_ends_the_text_that_is_being_written(page, url):
    page.route("**/v1/completions", lambda route: None)  # an answer that does not come
    begin(page, url, 50)
    page.locator("#playground-stop").click()
    expect_text(page.locator("#playground-status"), "^stopped$")
    assert page.locator("#playground-stop").is_disabled()


def test_the_store_is_shown_with_windows_and_borders(page, url, sonnets):
    page.goto(url + "#data")
    expect_text(page.locator("#data .figures"), r"documents8.*char")
    expect_text(page.locator("#data table").first, f"{len(sonnets.train):,}")
    expect_text(page.locator("#data .window"), "document 2 of 7 begins")
    first = page.locator("#data .window").inner_text()
    page.get_by_role("button", name="Another window").click()
    expect_text(page.locator("#data .window"), "^(?!" + re.escape(first[:20]) + ")")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_telephone_and_the_colours_follow(browser, url, scheme):
    for page in watched(browser, url, NARROW, scheme):
        page.locator("strong", has_text="Loss").wait_for()
        for name in ("run", "playground", "data"):
            page.locator(f"#tab-{name}").click()
            page.locator(f"#panel-{name}").wait_for()
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 384) is (scheme == "dark")
        page.locator("#theme").click()
        page.locator("#theme").click()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert sum(map(int, re.findall(r"\d+", dark)[:3])) < 384
