"""Fixtures that many tests share: the real demo ensemble, loaded once, two tiny members, and a browser.

`pytest -m gpu` must start on a GPU machine with pydantic, pytest and little more: the settings of missing plugins are
accepted, and files without a GPU test are not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from specfuse_shared import EnsembleConfig, EnsembleEngine, demo_members
from specfuse_shared.serving import admission
from specfuse_shared.text.chat_template import PromptEncoder
from specfuse_shared.text.codec import Codec
from tests.support.against_naive import FAULT_ROW, EngineOver, local_members
from tests.support.browser import CHROMIUM, DESK, QUIET
from tests.support.tiny import byte_level_tokenizer, metaspace_tokenizer, pair_config, save_pair

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_SETTINGS = {
    "pytest_timeout": ("timeout",),
    "pytest_asyncio": ("asyncio_mode", "asyncio_default_fixture_loop_scope"),
}
_MARKS = ("needs_cuda(", "mark.gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    for plugin, names in _SETTINGS.items():
        for name in names if find_spec(plugin) is None else ():
            parser.addini(name, f"of {plugin}, which is not installed")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "gpu":  # a bare GPU machine has other versions, which may warn
        config.addinivalue_line("filterwarnings", "default")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.option.markexpr != "gpu":
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return None if any(mark in file.read_text("utf-8") for file in files for mark in _MARKS) else True


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test that needs a shared demo ensemble is slow: the README's test command loads the demo for the
    README's examples and the programs of examples/ only. Every weekly test is slow."""
    for item in items:
        demo = not {"demo_engine", "exact_engine"}.isdisjoint(getattr(item, "fixturenames", ()))
        if demo or item.get_closest_marker("weekly"):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Freeze the libraries' objects: closing an engine collects garbage, which would search all of them."""
    admission.settle()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Before the next file, freeze what this one has imported and cached."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        admission.settle()


@pytest.fixture(scope="session")
def exact_engine() -> Iterator[EnsembleEngine]:
    """The demo ensemble in float32, for comparisons with the naive round."""
    with EnsembleEngine(EnsembleConfig(demo_members(dtype="float32"), first_segment_tokens=None)) as engine:
        yield engine.load()


@pytest.fixture(scope="session")
def demo_engine(exact_engine: EnsembleEngine) -> Iterator[EnsembleEngine]:
    """The same members with a short first segment, so that short answers have several segments, and without prefix
    reuse, so that counts do not depend on earlier tests."""
    config = replace(exact_engine.config, first_segment_tokens=5, reuse_prefixes=False)
    with EngineOver(exact_engine, config) as engine:
        yield engine.load()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of injected faults; with several processes, only this conftest is read early enough."""
    reports = [report for report in terminalreporter.stats.get("", ()) if report.when == "teardown"]
    rows = [row for report in reports for name, row in report.user_properties if name == FAULT_ROW]
    for row in [("injected", "stage", "into", "what happened"), *rows] if rows else ():
        terminalreporter.write_line("{:<14} {:<8} {:<12} {}".format(*row))


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnsembleEngine]:
    """Two tiny members of different families: a byte-level chat model and a metaspace base model."""
    with EnsembleEngine(pair_config(save_pair(tmp_path_factory))) as engine:
        yield engine.load()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = [f"--{option}" for option in (*QUIET, "disable-sync", "no-sandbox")]
        with playwright.chromium.launch(executable_path=CHROMIUM, args=arguments) as chromium:
            yield chromium


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """`opened(html, **context)` → its page; afterwards its console must be empty, without any request."""
    complaints: list[str] = []
    requests: list[str] = []
    contexts = []

    def open_page(html: str, **settings: Any) -> Page:
        contexts.append(browser.new_context(**{"viewport": DESK, **settings}))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        file = tmp_path / f"{len(contexts)}.html"
        file.write_text(html, "utf-8")
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith("blob:")] == [
        (tmp_path / f"{i}.html").as_uri() for i in range(1, len(contexts) + 1)
    ]


@pytest.fixture(scope="session")
def paged_engine(tiny_engine: EnsembleEngine) -> Iterator[EnsembleEngine]:
    """The two tiny members in paged execution."""
    with EnsembleEngine(replace(tiny_engine.config, execution="paged")) as engine:
        yield engine.load()


@pytest.fixture(scope="session")
def codecs(exact_engine: EnsembleEngine) -> dict[str, Codec]:
    """Codecs of both real members and of both tiny tokenizers."""
    results = {m.name: m.codec for m in local_members(exact_engine)}
    for tokenizer in (byte_level_tokenizer(), metaspace_tokenizer()):
        encoder = PromptEncoder(tokenizer, None, {}, "tiny")
        results[encoder.kind] = encoder.codec
    return results
