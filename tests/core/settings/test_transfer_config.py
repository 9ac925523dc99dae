import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.settings.transfer_config import parse_transfer_config, read_transfer_json


def test_a_vllm_line_works_unchanged() -> None:
    config = parse_transfer_config(
        '{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer","kv_buffer_size":"1e9","kv_port":21001,'
        '"kv_connector_extra_config":{"proxy_port":30001}}'.replace('"1e9"', "1e9")
    )
    assert config.kv_connector == "P2pNcclConnector"
    assert config.produces
    assert not config.consumes


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="kv_conector is not a known key; did you mean 'kv_connector'"):
        parse_transfer_config('{"kv_conector": "P2pConnector"}')


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '"x"',
        '{"kv_connector": 3}',
        '{"kv_role": "kv_both"}',
        "[" * 100_000,
        '{"kv_connector": ' * 100_000,
        '{"kv_connector": "P2pConnector", "engine_id": "\\ud800"}',
        '{"kv_connector": "P2pConnector", "engine_id": ""}',
        '{"kv_connector": "P2pConnector", "engine_id": "a\\nb"}',
        f'{{"kv_connector": "P2pConnector", "engine_id": "{"x" * 257}"}}',
        '{"kv_connector": "P2pConnector", "kv_connector": "NixlConnector"}',
        '{"kv_connector": "P2pConnector", "kv_connector_extra_config": {"lease_s": 5, "lease_s": 6}}',
        '{"kv_connector": "P2pConnector", "kv_connector_extra_config": {"lease_s": NaN}}',
        '{"kv_connector": "P2pConnector", "kv_connector_extra_config": {"transport_options": {"x": 1e999}}}',
    ],
)
def test_bad_json_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-transfer-config"):
        parse_transfer_config(text)


def test_bad_role_lists_the_field() -> None:
    with pytest.raises(ConfigError, match="kv_role"):
        parse_transfer_config('{"kv_connector": "P2pConnector", "kv_role": "producer"}')


def test_a_role_is_named_by_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="kv_role: 'producer' is not a known value; did you mean 'kv_producer'"):
        parse_transfer_config('{"kv_connector": "P2pConnector", "kv_role": "producer"}')


def test_numbers_may_be_text_and_null_is_not_set_as_in_vllm() -> None:
    config = parse_transfer_config(
        '{"kv_connector":"P2pConnector","kv_port":"21001","kv_buffer_size":"5e8","kv_rank":"1","kv_parallel_size":"2",'
        '"engine_id":null,"kv_connector_module_path":null,"enable_permute_local_kv":"True"}'
    )
    assert (config.kv_port, config.kv_buffer_size, config.kv_rank, config.kv_parallel_size) == (21001, 5e8, 1, 2)
    assert config.engine_id
    child = read_transfer_json(
        '{"kv_connector":"MultiConnector","kv_connector_extra_config":{"connectors":[{"kv_connector":"NixlConnector",'
        '"kv_port":"7"},3]}}'
    )["kv_connector_extra_config"]["connectors"]
    assert child == [{"kv_connector": "NixlConnector", "kv_port": 7}, 3]


@pytest.mark.parametrize(
    ("key", "value"), [("kv_port", '"x"'), ("kv_port", "[1]"), ("kv_port", "1.5"), ("kv_rank", "{}"), ("kv_rank", '""')]
)
def test_what_is_no_number_is_named(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^--kv-transfer-config: {key} must be a number, got"):
        read_transfer_json(f'{{"kv_connector": "P2pConnector", "{key}": {value}}}')
