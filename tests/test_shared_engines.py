"""One process, one engine: models of both frameworks with equal members share it until the last one is closed."""

from __future__ import annotations

import copy
import pickle

from langchain_specfuse import ChatSpecFuse
from llamaindex_specfuse import SpecFuseLLM


def test_equal_models_share_one_engine_until_the_last_one_is_closed() -> None:
    chat = ChatSpecFuse(members="demo", max_tokens=31)
    equal_models = [
        SpecFuseLLM(members="demo"),
        copy.copy(chat),
        copy.deepcopy(chat),
        chat.model_copy(),
        pickle.loads(pickle.dumps(chat)),
    ]
    engine = chat._resolve_engine()
    assert all(model._resolve_engine() is engine for model in equal_models)
    chat.close()
    chat.close()
    for model in equal_models:
        assert not engine.closed
        model.close()
    assert engine.closed
    assert chat._resolve_engine() is not engine, "a closed model starts afresh"
    chat.close()


def test_other_members_or_weights_mean_another_engine() -> None:
    demo = ChatSpecFuse(members="demo")
    config = demo._ensemble()
    different = ChatSpecFuse(config=type(config)(config.members, score="mean_prob"))
    assert demo._resolve_engine() is not different._resolve_engine()
    demo.close()
    different.close()
