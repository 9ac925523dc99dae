"""A chat template, its variables and sampling parameters in place of the checkpoint's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.errors import ConfigError
from kvferry.engine.config import EngineConfig
from kvferry.engine.overrides import override_model, parse_sampling, read_chat_template

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def test_a_template_is_a_file_or_the_text_itself(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    assert read_chat_template(str(path)) == read_chat_template(TEMPLATE) == TEMPLATE
    assert read_chat_template("{% generation %}x{% endgeneration %}")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("nowhere.jinja", "--chat-template: nowhere.jinja: No such file"),
        ("{% for message in messages %}", "--chat-template: line 1: "),
        ("{{ message", "--chat-template: line 1: "),
    ],
)
def test_wrong_templates_are_refused(value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_chat_template(value)


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_chat_template(str(path))


def test_a_model_is_overridden_before_it_serves() -> None:
    sampling: dict[str, Any] = {"temperature": 0.7, "top_k": 20}
    model: Any = SimpleNamespace(tokenizer=SimpleNamespace(chat_template="old"), default_sampling=sampling)
    override_model(model, None, None)
    assert (model.tokenizer.chat_template, sampling) == ("old", {"temperature": 0.7, "top_k": 20})
    override_model(model, TEMPLATE, '{"temperature": 0, "min_p": 0.1}')
    assert (model.tokenizer.chat_template, sampling) == (TEMPLATE, {"temperature": 0.0, "top_k": 20, "min_p": 0.1})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON object"),
        ("[1]", "no JSON object"),
        ('{"temprature": 1}', "temperature"),
        ('{"max_tokens": 5}', "max_tokens"),
        ('{"temperature": "hot"}', "--override-generation-config"),
        ('{"temperature": -1}', "temperature must be"),
        ('{"top_p": 0}', "top_p must be"),
    ],
)
def test_wrong_sampling_parameters_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_sampling(text)
    with pytest.raises(ConfigError):
        EngineConfig(model="m", override_generation_config=text)


def test_variables_of_the_template_are_an_object() -> None:
    EngineConfig(model="m", default_chat_template_kwargs='{"enable_thinking": false}')
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs is no JSON object"):
        EngineConfig(model="m", default_chat_template_kwargs="enable_thinking")
