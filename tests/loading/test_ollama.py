"""Models of Ollama's store by name: models that are found, names that are refused, and damaged stores."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from specfuse_shared import MemberConfig, MemberLoadError, MissingTemplateWarning
from specfuse_shared.config import OLLAMA
from specfuse_shared.loading.gguf import gguf_file, ollama_models
from specfuse_shared.loading.planning import lora_files
from specfuse_shared.members.local.member import LocalMember
from tests.support.tiny import byte_level_tokenizer, save_model

MODEL, ADAPTER = "application/vnd.ollama.image.model", "application/vnd.ollama.image.adapter"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    (tmp_path / "blobs").mkdir()
    return tmp_path


def add(store: Path, place: str, layers: Sequence[tuple[str, str]], data: bytes = b"GGUF and more") -> None:
    """A manifest at `place`, with layers of a kind and digest, whose files hold `data`."""
    manifest = store / "manifests" / place
    manifest.parent.mkdir(parents=True, exist_ok=True)
    entries = [{"mediaType": kind, "digest": f"sha256:{digest}"} for kind, digest in layers]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": entries}))
    for _, digest in layers:
        if len(digest) == 64:
            (store / "blobs" / f"sha256-{digest}").write_bytes(data)


def member(name: str) -> MemberConfig:
    return MemberConfig(OLLAMA + name)


@pytest.mark.parametrize("name", ["llama3.2:3b", "library/llama3.2:3b", "registry.ollama.ai/library/llama3.2:3b"])
def test_a_model_is_found_by_every_form_of_its_name(store: Path, name: str) -> None:
    add(
        store,
        "registry.ollama.ai/library/llama3.2/3b",
        [("application/vnd.ollama.image.license", "b" * 64), (MODEL, "a" * 64)],
    )
    assert gguf_file(member(name)) == store / "blobs" / f"sha256-{'a' * 64}"
    assert [(result.name, result.size) for result in ollama_models()] == [("llama3.2:3b", 13)]
    assert member("llama3.2:3b").label == "llama3.2:3b"


def test_latest_and_other_registries(store: Path) -> None:
    add(store, "registry.ollama.ai/library/phi3/latest", [(MODEL, "a" * 64)])
    add(store, "hf.co/somebody/Model-GGUF/Q4_K_M", [(MODEL, "c" * 64)])
    assert gguf_file(member("phi3")) == gguf_file(member("phi3:latest"))
    assert gguf_file(member("hf.co/somebody/Model-GGUF:Q4_K_M")) == store / "blobs" / f"sha256-{'c' * 64}"
    assert [result.name for result in ollama_models()] == ["hf.co/somebody/Model-GGUF:Q4_K_M", "phi3:latest"]


def test_adapters_of_a_model_are_loaded(store: Path) -> None:
    add(store, "registry.ollama.ai/library/tuned/latest", [(MODEL, "a" * 64), (ADAPTER, "d" * 64)])
    assert lora_files(member("tuned")) == (store / "blobs" / f"sha256-{'d' * 64}",)


def test_an_unknown_name_lists_the_existing_ones(store: Path) -> None:
    add(store, "registry.ollama.ai/library/llama3.2/3b", [(MODEL, "a" * 64)])
    with pytest.raises(MemberLoadError, match=r"no model 'mistral': there are llama3.2:3b \(`ollama pull mistral`"):
        gguf_file(member("mistral"))
    with pytest.raises(MemberLoadError, match=r"did you mean 'llama3.2:3b'\?"):
        gguf_file(member("llama3.2:4b"))


def test_an_empty_store_is_reported(store: Path) -> None:
    with pytest.raises(MemberLoadError, match="it is empty"):
        gguf_file(member("mistral"))
    assert ollama_models() == ()


def test_files_in_formats_of_ollamas_engine_are_named(store: Path) -> None:
    add(store, "registry.ollama.ai/library/new/latest", [(MODEL, "a" * 64)], data=b"PK else")
    with pytest.raises(MemberLoadError, match="no whole GGUF file"):
        gguf_file(member("new"))
    assert ollama_models() == ()


@pytest.mark.parametrize("digest", ["../../../etc/passwd", "a" * 63, "A" * 64])
def test_a_digest_cannot_lead_out_of_the_store(store: Path, digest: str) -> None:
    add(store, "registry.ollama.ai/library/bad/latest", [(MODEL, digest)])
    with pytest.raises(MemberLoadError, match="no whole GGUF file"):
        gguf_file(member("bad"))


def test_a_broken_manifest_hides_no_other_model(store: Path) -> None:
    add(store, "registry.ollama.ai/library/good/latest", [(MODEL, "a" * 64)])
    add(store, "registry.ollama.ai/library/bad/latest", [])
    (store / "manifests/registry.ollama.ai/library/bad/latest").write_text("[1")
    assert [result.name for result in ollama_models()] == ["good:latest"]


def test_a_model_without_a_template_gives_a_warning(tmp_path: Path) -> None:
    folder = save_model("qwen3", byte_level_tokenizer(), tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), byte_level_tokenizer()
    config = MemberConfig(OLLAMA + "tuned", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LocalMember(config, loaded=(model, tokenizer))
    tokenizer.chat_template = None
    with pytest.warns(MissingTemplateWarning, match="ollama:tuned has no chat template .* member 'tuned'"):
        LocalMember(config, loaded=(model, tokenizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LocalMember(MemberConfig(str(folder), device="cpu"), loaded=(model, tokenizer))
