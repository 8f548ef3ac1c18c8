"""The page at /, in a real browser against the real service: what a visitor does, and what the visitor then reads."""

import base64
import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from attackers import encoded
from attackers import picture as make_picture
from service_process import ServiceProcess, save_small_checkpoint

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
expect = sync_api.expect

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
MODES = ("population", "sample", "expected")
OWN_MODE, CROP = "expected", 0.8  # of the checkpoints below
LABELS = [f"<b onclick='x'>class {number}</b>, also called {number}" for number in range(10)]
AWKWARD_NAME = 'it\'s 1 "photo", or; two\\.png'  # every character that a shell or curl could take for its own

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser: apt-get install chromium to test the page")


def picture(number=0):
    return encoded(make_picture(27 + 5 * number, side=160).crop((0, 0, 160, 120)))


@dataclass
class Visit:
    """A page that is open, the errors in its console and the hosts that it asked."""

    page: sync_api.Page
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def drop(self, name, content, media_type):
        make = """([name, text, type]) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], name, { type }));
            return transfer;
        }"""
        data = self.page.evaluate_handle(make, [name, base64.b64encode(content).decode(), media_type])
        for event in ("dragover", "drop"):
            self.page.dispatch_event("#zone", event, {"dataTransfer": data})

    def choose(self, name, content):
        self.page.set_input_files("#file", [{"name": name, "mimeType": "image/png", "buffer": content}])

    def paste(self, content):
        """Through the clipboard and the keyboard, as a visitor would."""
        write = """async (text) => {
            const blob = new Blob([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], { type: "image/png" });
            await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
        }"""
        self.page.evaluate(write, base64.b64encode(content).decode())
        self.page.keyboard.press("Control+V")

    def wait(self, state="done"):
        expect(self.page.locator("#answer")).to_have_attribute("data-state", state)

    def compare(self, state="done"):
        """Unfold the three modes, and wait for them."""
        self.page.get_by_text("Compare the three modes").click()
        for mode in MODES:
            expect(self.page.locator(f"[data-mode={mode}]")).to_have_attribute("data-state", state)

    def read(self, mode):
        """The labels and scores that the page shows for a mode, or as its "answer"."""
        bars = self.page.get_by_test_id(f"bars-{mode}").locator("li")
        labels, scores = (bars.locator(f".bar-{name}").all_text_contents() for name in ("label", "score"))
        return list(zip(labels, scores, strict=True))

    def forget(self, status):
        """Drop the console's note of answers with a status that the test has provoked."""
        self.errors = [error for error in self.errors if f"status of {status} " not in error]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    save_small_checkpoint(folder / "small", LABELS, seed=1)
    save_small_checkpoint(folder / "tiny", LABELS, seed=2)
    for path in folder.glob("*/config.json"):
        config = json.loads(path.read_text())
        config |= {"default_statistics": OWN_MODE, "training": {"measured_on": "ten photographs"}}
        config["preprocessing"]["crop"] = CROP
        path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def server(checkpoints):
    with ServiceProcess(checkpoints) as service:
        yield service


@pytest.fixture(scope="module")  # as long as it lives, Playwright keeps an event loop running that others would meet
def browser():
    expect.set_options(timeout=30_000)  # the default of 5 s is short for a machine that runs other tests too
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield chromium
        chromium.close()


def open_page(browser, url, **options):
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
    context.set_default_timeout(30_000)
    visit = Visit(context.new_page())
    visit.page.on("console", lambda message: visit.errors.append(message.text) if message.type == "error" else None)
    visit.page.on("pageerror", lambda error: visit.errors.append(str(error)))
    context.on("request", lambda request: visit.hosts.add(urlsplit(request.url).netloc))
    visit.page.goto(url)
    return visit


@pytest.fixture
def visit(browser, server):
    """The page, just opened. Whatever a test does, no other host may be asked and the console stays free of errors."""
    visit = open_page(browser, server.url, viewport={"width": 1280, "height": 800})
    yield visit
    visit.page.context.close()
    assert visit.hosts - {""} == {urlsplit(server.url).netloc}  # "" are the preview (blob:) and the icon (data:)
    assert visit.errors == []


def ask(server, content, mode):
    """What the service answers to the same call without the page."""
    return list(server.ask(f"/v1/classify?model=small&statistics={mode}&top_k=5", content).scores().items())


def check_scores(visit, place, expected):
    shown = visit.read(place)
    assert [label for label, _ in shown] == [label for label, _ in expected]
    assert len(shown) == 5
    for (_, text), (_, score) in zip(shown, expected, strict=True):
        number = 0.0 if text.startswith("<") else float(text.removesuffix("\N{NO-BREAK SPACE}%"))
        assert number == pytest.approx(100 * score, abs=0.11)
    timing = visit.page.get_by_test_id(f"timing-{place}").inner_text()
    assert re.fullmatch(r"network \d+(\.\d)?\sms · queue \d+(\.\d)?\sms · round trip \d+(\.\d)?\sms", timing)


def test_answer_in_the_models_own_mode_comes_first(visit, server):
    asked = []
    visit.page.on("request", lambda request: asked.append(request.url) if request.method == "POST" else None)
    expect(visit.page.locator("#model")).to_have_value("small")
    visit.drop("waves.png", picture(), "image/png")
    visit.wait()
    expected = ask(server, picture(), OWN_MODE)
    check_scores(visit, "answer", expected)
    caption = f"waves.png · 160 \N{MULTIPLICATION SIGN} 120 · {len(picture())} bytes"
    expect(visit.page.locator("#caption")).to_have_text(caption)
    frame, whole = (visit.page.locator(name).bounding_box() for name in ("#frame", "#preview"))
    sizes = [frame[side] / whole[side] for side in ("width", "height")]
    assert sizes == pytest.approx([0.75 * CROP, CROP], abs=0.02)
    # The labels of the checkpoint stay text.
    assert visit.page.locator("main b").count() == 0
    assert len(asked) == 1, "other modes are asked for when they are compared"


def test_each_mode_can_be_chosen_and_compared(visit, server):
    page = visit.page
    visit.choose("waves.png", picture())
    visit.wait()
    for number, mode in enumerate(MODES):
        with page.expect_response("**/v1/classify") as answer:
            page.get_by_role("radio", name="sample" if mode == OWN_MODE else OWN_MODE).check()
            page.get_by_role("radio", name=mode).check()
        assert answer.value.ok
        about = page.locator(f"[data-mode={mode}] .explanation").text_content()
        expect(page.locator("#mode-about")).to_have_text(about)
        measured = f"top-1 accuracy {10 + number}.0 % on ten photographs, not on the test images of its data set"
        expect(page.locator("#mode-measured")).to_have_text(measured)
        expect(page.locator("#command")).to_contain_text(f"statistics={mode}")
        expected = ask(server, picture(), mode)
        expect(page.get_by_test_id("bars-answer").locator(".bar-label").first).to_have_text(expected[0][0])
        check_scores(visit, "answer", expected)
    visit.compare()
    for mode in MODES:
        check_scores(visit, mode, ask(server, picture(), mode))
        expect(page.locator(f"[data-mode={mode}] .measured")).to_contain_text("% on ten photographs")
    expect(page.locator("#comparison")).to_have_text(re.compile("The modes differ: population says|All three"))
    page.get_by_role("radio", name="sample").check()
    page.get_by_role("combobox", name="Model").select_option("tiny")
    expect(page.get_by_role("radio", name=OWN_MODE)).to_be_checked()


@pytest.mark.parametrize(
    ("scores", "uncertain", "kind", "words"),
    [
        ([0.39, 0.36], False, "tie", "Nearly a tie"),
        ([0.39, 0.36], True, "uncertain", "The model is uncertain: the picture may show none of its 10 classes."),
        ([0.8, 0.1], False, "answer", "one, 80.0"),
    ],
)
def test_only_a_clear_answer_is_set_in_large_letters(visit, scores, uncertain, kind, words):
    def answer(route):
        found = [{"label": label, "score": score} for label, score in zip(("one", "two"), scores, strict=True)]
        route.fulfill(json=route.fetch().json() | {"predictions": found, "uncertain": uncertain})

    visit.page.route("**/v1/classify", answer)
    visit.choose("waves.png", picture())
    visit.wait()
    expect(visit.page.locator("#answer")).to_have_attribute("data-kind", kind)
    expect(visit.page.locator("#status")).to_contain_text(words)
    sizes = "(texts) => texts.map((text) => parseFloat(getComputedStyle(text).fontSize))"
    first, second = visit.page.get_by_test_id("bars-answer").locator(".bar-text").evaluate_all(sizes)
    assert (first > 1.5 * second) == (kind == "answer")
    # A clear answer is announced, but seen once only.
    assert (visit.page.locator("#status").bounding_box()["width"] <= 1) == (kind == "answer")


def test_sample_or_pasted_image_is_classified(visit, server):
    seen = []
    for name, file in (("a cat", "cat.jpg"), ("a cup of coffee", "coffee.jpg")):
        visit.page.get_by_role("button", name=f"Sample: {name}").click()
        expect(visit.page.locator("#caption")).to_contain_text(f"{file} · 420")
        visit.wait()
        seen.append(visit.read("answer"))
    visit.paste(picture(9))
    expect(visit.page.locator("#caption")).to_contain_text("image.png")
    visit.wait()
    assert visit.read("answer") != seen[1] != seen[0]
    notice = visit.page.get_by_role("link", name="sources").get_attribute("href")
    assert b"CC0 1.0" in server.ask(f"/{notice}").body


def test_class_list_can_be_searched(visit):
    page = visit.page
    page.get_by_text("The 10 classes that this model knows").click()
    names = page.get_by_role("list", name="The 10 classes that this model knows").get_by_role("listitem")
    expect(names).to_have_text(LABELS)
    for text, found, words in (("called 7", LABELS[7:8], "1 of 10 classes"), ("no such", [], "None of the 10 classes")):
        page.get_by_role("searchbox", name="Search the classes").fill(text)
        expect(names).to_have_text(found)
        expect(page.locator("#class-count")).to_contain_text(words)


@pytest.mark.parametrize(("loaded", "words"), [(True, "Still working"), (False, "The service loads this model first")])
def test_slow_first_answer_is_explained(visit, loaded, words):
    page, held = visit.page, []

    def answer(route):
        listed = route.fetch().json()
        listed["models"][0]["loaded"] = loaded
        route.fulfill(json=listed)

    page.route("**/v1/models", answer, times=1)
    page.route("**/v1/classify", lambda route: held.append(route))
    page.reload()
    expect(page.locator("#model")).to_be_enabled()
    assert ("not loaded yet" in page.locator("#model-facts").inner_text()) is not loaded
    visit.choose("waves.png", picture())
    expect(page.locator("#status")).to_contain_text(words)
    held[0].continue_()
    visit.wait()
    expect(page.locator("#model-facts")).not_to_contain_text("not loaded yet")


def test_keyboard_suffices_and_the_copied_command_works(visit, tmp_path):
    page = visit.page
    (tmp_path / AWKWARD_NAME).write_bytes(picture(2))
    # Listened for from the start: the browser takes a moment to hand its file chooser over, and none to open it.
    page.on("filechooser", lambda chooser: chooser.set_files(tmp_path / AWKWARD_NAME))
    expect(page.locator("#model")).to_be_enabled()

    def tab_to(*focused):
        for one in focused:
            page.keyboard.press("Tab")
            expect(one).to_be_focused()

    tab_to(page.get_by_role("link", name="API reference"), page.locator("#file"))
    assert page.locator("#zone").evaluate("(zone) => getComputedStyle(zone).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    visit.wait()
    tab_to(page.get_by_role("link", name="sources"), *page.locator(".sample").all(), page.locator("#model"))
    page.keyboard.press("t")
    expect(page.locator("#model")).to_have_value("tiny")
    tab_to(page.get_by_role("radio", name=OWN_MODE))
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("radio", name="sample")).to_be_checked()
    visit.wait()
    tab_to(*(page.locator(f"{place} > summary") for place in ("#classes", "#compare", "#shell")))
    page.keyboard.press("Enter")
    tab_to(page.locator("#copy"))
    page.keyboard.press("Enter")
    expect(page.locator("#copied")).to_have_text("The command was copied.")
    command = page.evaluate("() => navigator.clipboard.readText()")
    assert command == page.locator("#command").text_content()
    if shutil.which("curl"):
        command = command.replace("curl ", "curl --silent --noproxy '*' ", 1)
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, check=True, timeout=30)
        answer = json.loads(done.stdout)
        assert (answer["model"], answer["statistics"]) == ("tiny", "sample")
        assert [one["label"] for one in answer["predictions"]] == [label for label, _ in visit.read("answer")]


def test_refused_file_is_explained_and_the_next_succeeds(visit):
    with visit.page.expect_response("**/v1/classify") as answer:
        visit.drop("notes.txt", b"Plain text, whatever its name says.\n" * 20, "text/plain")
    assert answer.value.status == 415
    message = answer.value.json()["error"]["message"]
    visit.wait("error")
    expect(visit.page.locator("#status")).to_have_text(message)
    expect(visit.page.locator("#no-preview")).to_be_visible()
    visit.page.route("**/v1/classify", lambda route: pytest.fail("no other mode changes this answer"))
    visit.compare("error")
    for mode in MODES:
        expect(visit.page.get_by_test_id(f"error-{mode}")).to_have_text(message)
    visit.page.unroute("**/v1/classify")
    visit.forget(415)
    visit.page.route("**/v1/classify", lambda route: route.abort("connectionrefused"), times=1)
    visit.choose("waves.png", picture())
    expect(visit.page.locator("#status")).to_contain_text("could not be reached")
    visit.errors = [error for error in visit.errors if "net::ERR_CONNECTION_REFUSED" not in error]
    visit.page.locator("#compare > summary").click()
    visit.choose("waves.png", picture())
    visit.wait()
    expect(visit.page.get_by_test_id("error-sample")).to_be_hidden()


def test_busy_service_is_asked_again_at_most_twice(visit):
    asked = []
    error = {"error": {"code": "overloaded", "message": "The queue is full: try again in a moment."}}

    def refuse(route):
        asked.append(route)
        route.fulfill(status=429, headers={"Retry-After": "1"}, json=error)

    visit.page.route("**/v1/classify", refuse, times=4)
    visit.choose("waves.png", picture())
    expect(visit.page.locator("#status")).to_contain_text("trying again in 1 s")
    visit.wait("error")
    expect(visit.page.locator("#status")).to_have_text(error["error"]["message"])
    assert len(asked) == 3
    visit.choose("waves.png", picture())
    visit.wait()
    visit.forget(429)


def test_page_asks_for_a_key(browser, checkpoints):
    with ServiceProcess(checkpoints, "--models", "small", environment={"BKN_ZOO_API_KEYS": "sesame"}) as service:
        visit = open_page(browser, service.url)
        note = visit.page.locator("#key-note")
        expect(note).to_contain_text("asks for a key")
        expect(visit.page.locator("#command")).to_contain_text("-H 'Authorization: Bearer YOUR_KEY'")
        visit.choose("waves.png", picture())
        visit.wait("error")
        for key, words in (("wrong", "did not accept this key"), ("sesame", "is kept until this page is closed")):
            visit.page.fill("#key", key)
            visit.page.press("#key", "Enter")
            expect(note).to_contain_text(words)
        visit.wait()
        expect(visit.page.locator("#command")).not_to_contain_text("sesame")
        visit.forget(401)
        assert visit.errors == []
        visit.page.context.close()


def test_documentation_lists_routes_in_groups(visit, server):
    visit.page.goto(f"{server.url}/docs")
    expect(visit.page.get_by_text("/v1/classify", exact=True)).to_be_visible()
    names = visit.page.locator(".opblock-tag").evaluate_all("(tags) => tags.map((tag) => tag.dataset.tag)")
    assert names == ["classify", "models", "operation"]


def test_phone_layout_stacks_the_modes_within_the_screen(browser, server):
    options = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark", "reduced_motion": "reduce"}
    visit = open_page(browser, server.url, has_touch=True, **options)
    visit.choose("waves.png", picture())
    visit.wait()
    expect(visit.page.get_by_test_id("bars-answer").locator("li").first).to_be_in_viewport(ratio=1)
    for title in ("#classes", "#shell"):
        visit.page.locator(f"{title} > summary").click()
    visit.compare()
    boxes = [visit.page.locator(f"[data-mode={mode}]").bounding_box() for mode in MODES]
    assert len({box["x"] for box in boxes if box}) == 1
    assert visit.page.evaluate("() => document.documentElement.scrollWidth") == 360
    assert visit.page.evaluate("() => document.getAnimations().length") == 0
    assert visit.errors == []
    visit.page.context.close()
