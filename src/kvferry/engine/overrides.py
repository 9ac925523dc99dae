"""Settings in place of what a checkpoint brings: its chat template, variables of it, and its sampling parameters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry.core.errors import ConfigError, InvalidRequest
from kvferry.core.sampling import SAMPLING_DEFAULTS, SamplingParams
from kvferry.core.settings.files import read_whole
from kvferry.core.settings.options import unknown_key

if TYPE_CHECKING:
    from kvferry.engine.model.loader import LoadedModel

_TEMPLATE = "--chat-template"
_SAMPLING = "--override-generation-config"
_KWARGS = "--default-chat-template-kwargs"


def read_chat_template(value: str) -> str:
    """The template: `value` itself if it is one, else the content of the file that it names. Raises `ConfigError`."""
    from jinja2 import Environment, TemplateSyntaxError  # the command line does without

    template = value
    if not any(character in value for character in "{}\n"):
        try:
            template = read_whole(Path(value)).decode()
        except ConfigError as error:
            raise ConfigError(f"{_TEMPLATE}: {error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{_TEMPLATE} {value}: it is not UTF-8: {error}") from error
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False).parse(template)
    except TemplateSyntaxError as error:
        if "unknown tag 'generation'" not in str(error):  # transformers' own
            raise ConfigError(f"{_TEMPLATE}: line {error.lineno}: {error.message}") from error
    return template


def parse_sampling(text: str) -> dict[str, float | int]:
    """Sampling parameters for requests without their own. Raises `ConfigError`."""
    values = _object(text, _SAMPLING)
    for name in values:
        if name not in SAMPLING_DEFAULTS:
            raise ConfigError(unknown_key(f"{_SAMPLING}.{name}", name, SAMPLING_DEFAULTS))
    try:
        checked = msgspec.convert(values, SamplingParams)
        checked.validate()
    except (msgspec.ValidationError, InvalidRequest) as error:
        raise ConfigError(f"{_SAMPLING}: {error}") from error
    return {name: getattr(checked, name) for name in values}


def parse_template_kwargs(text: str) -> dict[str, Any]:
    """Variables of the chat template for requests without their own. Raises `ConfigError`."""
    return _object(text, _KWARGS)


def override_model(model: LoadedModel, chat_template: str | None, sampling: str | None) -> None:
    """Replace the model's chat template and sampling parameters, before requests are served."""
    if chat_template is not None:
        model.tokenizer.chat_template = chat_template
    if sampling is not None:
        model.default_sampling.update(parse_sampling(sampling))


def _object(text: str, flag: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{flag} is no JSON object: {error}") from error
