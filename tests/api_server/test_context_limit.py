"""A setting means the same through every interface: the engine, both frameworks, and the paths of the server."""

from __future__ import annotations

from dataclasses import replace

from langchain_specfuse import ChatSpecFuse
from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import EnsembleEngine, SamplingParams
from tests.support.against_naive import EngineOver
from tests.support.serving import serving


def test_max_tokens_beyond_the_context_means_the_same_through_every_interface(tiny: EnsembleEngine) -> None:
    """The engine, LangChain, LlamaIndex and the server's three paths all answer up to the end of the context."""
    with EngineOver(tiny, replace(tiny.config, first_segment_tokens=5)) as engine:
        max_tokens, stop = 100_000, ["e", "a", " "]
        expected = engine.generate("Hello", SamplingParams(max_tokens=max_tokens, stop=stop)).text
        assert ChatSpecFuse(engine=engine, max_tokens=max_tokens, stop=stop).invoke("Hello").text == expected
        assert SpecFuseLLM(engine=engine, max_tokens=max_tokens, stop=stop).complete("Hello").text == expected
        assert SpecFuseLLM(engine=engine, stop=stop).complete("Hello", max_tokens=max_tokens).text == expected
        with serving({"tiny": engine}) as client:
            options = {"model": "tiny", "max_tokens": max_tokens, "stop": stop}
            chat = client.post(
                "/v1/chat/completions", json={**options, "messages": [{"role": "user", "content": "Hello"}]}
            )
            assert chat.json()["choices"][0]["message"]["content"] == expected
            completion = client.post("/v1/completions", json={**options, "prompt": "Hello"})
            assert completion.json()["choices"][0]["text"] == expected
            options = {"model": "tiny", "max_output_tokens": max_tokens, "stop": stop, "input": "Hello"}
            [item] = client.post("/v1/responses", json=options).json()["output"]
            assert item["content"][0]["text"] == expected
            remote = SpecFuseLLM(base_url=str(client.base_url), max_tokens=max_tokens, stop=stop)
            assert remote.complete("Hello").text == expected
