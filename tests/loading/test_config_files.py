"""One file of an ensemble for the command, the server and both chat models."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from langchain_specfuse import ChatSpecFuse
from llamaindex_specfuse import SpecFuseLLM
from specfuse_shared import ConfigError, EnsembleConfig, MemberConfig, demo_members
from specfuse_shared.api_server.settings import read_config
from specfuse_shared.loading.config_files import read_ensemble
from tests.support.tiny import save_pair


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ensembles of the same two tiny members: in each of them one member's weight dominates."""
    pair = save_pair(tmp_path_factory, max_position_embeddings=2048)
    members = [f"model = {json.dumps(str(folder))}, name = {json.dumps(name)}" for name, folder in pair.items()]
    text = "[server]\nport = 0\n"
    for heavy in pair:
        tables = ", ".join(f"{{ {m}, weight = {1e40 if heavy in m.split('name')[1] else 1.0} }}" for m in members)
        text += f'[ensembles.{heavy}]\nmembers = [{tables}]\nsegment_tokens = 3\naggregate = "weighted_mean"\n'
    path = tmp_path_factory.mktemp("config") / "specfuse.toml"
    path.write_text(text, "utf-8")
    return path


def test_the_server_and_all_other_readers_use_the_same_table(file: Path) -> None:
    served = read_config(file).ensembles
    assert {name: read_ensemble(f"{file}#{name}") for name in served} == served
    assert served["base"].member_configs[1].weight == 1e40


def test_a_file_of_one_ensemble_needs_no_name_and_a_file_of_several_does(file: Path, tmp_path: Path) -> None:
    single = tmp_path / "odd#name.toml"
    single.write_text('[ensembles.x]\nmembers = ["org/one", "org/two"]\n')
    assert read_ensemble(single).names == ("one", "two")
    assert read_ensemble(f"{single}#x").names == ("one", "two")
    with pytest.raises(ConfigError, match=r"it has several ensembles: name one, such as .*specfuse\.toml#chat"):
        read_ensemble(file)
    with pytest.raises(ConfigError, match="did you mean 'base'"):
        read_ensemble(f"{file}#bse")
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        read_ensemble(tmp_path / "none.toml")


def test_the_demo_can_be_named_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "demo.toml").write_text('[ensembles.demo]\nmembers = "demo"\nsegment_tokens = 4\n')
    assert read_ensemble(tmp_path / "demo.toml") == EnsembleConfig(demo_members(), segment_tokens=4)


@pytest.mark.parametrize("kind", [ChatSpecFuse, SpecFuseLLM])
def test_a_chat_model_accepts_a_file_like_a_configuration(
    kind: type[ChatSpecFuse] | type[SpecFuseLLM], file: Path
) -> None:
    named, direct = (
        kind(config=f"{file}#base", max_tokens=9),
        kind(config=read_ensemble(f"{file}#base"), max_tokens=9),
    )
    assert isinstance(named.config, EnsembleConfig)
    assert named.config == direct.config
    assert pickle.loads(pickle.dumps(named)).config == direct.config
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        kind(config=Path("none.toml"))
    with pytest.raises(ConfigError, match="must be an EnsembleConfig or a TOML file, not int"):
        kind(config=5)


@pytest.mark.parametrize("kind", [ChatSpecFuse, SpecFuseLLM])
def test_a_dictionary_can_name_the_demo_like_a_file(kind: type[ChatSpecFuse] | type[SpecFuseLLM]) -> None:
    expected = EnsembleConfig(demo_members(), segment_tokens=4)
    assert kind(config={"members": "demo", "segment_tokens": 4}).config == expected
    assert kind(config={"members": list(expected.members), "segment_tokens": 4}).config == expected
    with pytest.raises(ConfigError, match="name at least one model"):
        kind(config={"segment_tokens": 4})


def test_the_weights_of_a_file_change_a_chat_models_answer(file: Path) -> None:
    """Over all questions: if members disagree, the words of the heavier one are chosen."""
    questions = [f"Say something about {what}." for what in ("tides", "bees", "bread", "snow")]
    texts = {}
    for name in ("chat", "base"):
        with ChatSpecFuse(config=f"{file}#{name}", max_tokens=12, ledger="full") as llm:
            texts[name] = [message.text for message in llm.batch(questions)]
        with SpecFuseLLM(config=f"{file}#{name}", max_tokens=12) as llama:
            assert [llama.complete(question).text for question in questions] == texts[name]
            assert "".join(chunk.delta or "" for chunk in llama.stream_complete(questions[0])) == texts[name][0]
    assert texts["chat"] != texts["base"]


async def test_a_file_serves_streams_and_the_event_loop_alike(file: Path) -> None:
    with ChatSpecFuse(config=f"{file}#base", max_tokens=12) as llm:
        whole = llm.invoke("Tides?").text
        assert "".join(chunk.text for chunk in llm.stream("Tides?")) == whole
        assert (await llm.ainvoke("Tides?")).text == whole


def test_members_of_a_table_are_checked_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[ensembles.a]\nmembers = [{ model = "x", wieght = 2.0 }]\n')
    with pytest.raises(ConfigError, match=r"a\.toml: .*did you mean 'weight'"):
        read_ensemble(tmp_path / "a.toml")
    assert MemberConfig("x").weight == 1.0


@pytest.mark.parametrize(
    "setting",
    [
        *("stop_token_ids = 2", 'stop_token_ids = "2"', 'stop_token_ids = ["2"]', "thinking = 5", "resources = 5"),
        'template_options = "x"',
    ],
)
def test_a_setting_of_another_type_is_named(tmp_path: Path, setting: str) -> None:
    file = tmp_path / "e.toml"
    file.write_text(f'[ensembles.a]\nmembers = [{{model = "x", {setting}}}]\n', "utf-8")
    with pytest.raises(ConfigError, match=rf"MemberConfig\.{setting.split()[0]}(\[0\])? must be"):
        read_ensemble(file)


def test_stop_strings_of_another_type_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text('[ensembles.a]\nmembers = ["x"]\n[sampling]\nstop = 5\n', "utf-8")
    with pytest.raises(ConfigError, match=r"\[sampling\]\.stop\[0\] must be a text, not 5"):
        read_config(file)


def test_a_home_folder_is_expanded_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    member = MemberConfig("~/chat", adapter="~/adapter", tokenizer="~/tokens")
    assert (member.model, member.adapter, member.tokenizer) == tuple(
        str(tmp_path / name) for name in ("chat", "adapter", "tokens")
    )
    with pytest.raises(ConfigError, match="the home folder of a user who does not exist"):
        MemberConfig("~nobody-of-this-name/model")
