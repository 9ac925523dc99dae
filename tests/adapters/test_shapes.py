"""Which KV caches of vLLM's are taken, and what the others are told."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.errors import ConfigError

pytestmark = pytest.mark.vllm

FLAG = "--disable-hybrid-kv-cache-manager"
MAX_MODEL_LEN = 4096


def full(**changes: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return replace(FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32), **changes)


def window(**changes: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    spec = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=80)
    return replace(spec, **changes)


def mamba() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))


def uniform(*specs: Any) -> Any:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    return UniformTypeKVCacheSpecs(
        block_size=32, kv_cache_specs=dict(zip(("layer.0.a", "layer.0.b"), specs, strict=True))
    )


def model_of(layers: dict[str, Any] | None = None, **changes: Any) -> Any:
    fields = {"is_attention_free": False, "is_hybrid": False, "hf_config": SimpleNamespace()}
    fields["using_transformers_backend"] = lambda: True
    return SimpleNamespace(**fields | {"hf_text_config": SimpleNamespace(**layers or {})} | changes)


def shape_of(
    *specs: Any,
    several: bool = True,
    sleep_mode: bool = False,
    latent: bool = False,
    caching: bool = True,
    **group: Any,
) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from kvferry.adapters.vllm.kv_cache.layout import cache_shape

    groups = [
        KVCacheGroupSpec([f"layer.{index}.a", f"layer.{index}.b"], spec, **group) for index, spec in enumerate(specs)
    ]
    model_config = model_of(max_model_len=MAX_MODEL_LEN, enable_sleep_mode=sleep_mode, use_mla=latent)
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        model_config=model_config,
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=False),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
    )
    return cache_shape(vllm_config, KVCacheConfig(10, [], groups), supports_groups=several)


def test_one_group() -> None:
    assert shape_of(full()).windows == [None]
    assert shape_of(window(sliding_window=MAX_MODEL_LEN)).windows == [None]
    with pytest.raises(ConfigError, match="SlidingWindowSpec"):
        shape_of(window())


def test_several_groups() -> None:
    shape = shape_of(window(), window(), full(), window(sliding_window=MAX_MODEL_LEN))
    assert shape.windows == [80, 80, None, None]
    assert shape.block_size == 32
    with pytest.raises(ConfigError, match=FLAG):
        shape_of(window(), full(), several=False)


@pytest.mark.parametrize(
    "specs",
    [
        lambda: [window(), window(sliding_window=81)],
        lambda: [full(), window(block_size=64, head_size=16)],
        lambda: [full(), window(head_size=64)],
        lambda: [full(), window(sliding_window=1)],
        lambda: [full(), window(extra_retained_tokens=2)],
    ],
    ids=["no full attention", "block sizes", "page sizes", "window of one", "retained"],
)
def test_what_cannot_be_moved_names_the_way_out(specs: Any) -> None:
    with pytest.raises(ConfigError, match=FLAG):
        shape_of(*specs())


@pytest.mark.parametrize(
    "specs", [lambda: [full(), mamba()], lambda: [mamba()], lambda: [uniform(full(), mamba())], lambda: []]
)
@pytest.mark.parametrize("several", [True, False])
def test_recurrent_layers_are_refused_by_their_cache(specs: Any, *, several: bool) -> None:
    with pytest.raises(ConfigError, match="neither hand it off nor store it"):
        shape_of(*specs(), several=several)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (lambda: model_of(is_attention_free=True), "no attention"),
        (lambda: model_of(is_hybrid=True), "recurrent layers beside attention"),
        (lambda: model_of({"layer_types": ["full_attention", "linear_attention"]}), "of the kind linear_attention:"),
        (lambda: model_of({"layer_types": ["full_attention", "conv"]}), "of the kind conv:"),
        (lambda: model_of({"layers_block_type": ["attention", "mamba", "hybrid"]}), "of the kind hybrid, mamba:"),
        (lambda: model_of({"block_types": ["recurrent", "attention"]}), "of the kind recurrent:"),
        (lambda: model_of({"hybrid_override_pattern": "M-M*-"}), "of the kind M:"),
        (lambda: model_of(hf_config=SimpleNamespace(layer_types=["linear_attention"])), "linear_attention"),
    ],
)
def test_recurrent_layers_are_refused_by_the_models_configuration(model: Any, told: str) -> None:
    """By vLLM's first call that shows it."""
    from kvferry.adapters.vllm import KvferryP2pConnector, KvferrySharedStorageConnector

    for kind in (KvferryP2pConnector, KvferrySharedStorageConnector):
        with pytest.raises(ConfigError, match=told):
            kind.get_required_kvcache_layout(SimpleNamespace(model_config=model()))
    attention_only = model_of({"layer_types": ["full_attention", "sliding_attention"]})
    assert kind.get_required_kvcache_layout(SimpleNamespace(model_config=attention_only)) is None


def stateful_families() -> list[str]:
    """Those of transformers whose code says that they keep a state."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    folder = Path(transformers.__file__).parent / "models"
    signs = ("_is_stateful = True", "recurrent_states", "conv_states")
    code = {
        family: "".join(path.read_text() for path in (folder / model_type_to_module_name(family)).glob("modeling_*.py"))
        for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    }
    return [family for family, text in code.items() if any(sign in text for sign in signs)]


def test_every_family_with_a_state_is_refused_where_vllm_does_not_know_it() -> None:
    """vLLM runs what it has no class for with transformers' own."""
    from kvferry.adapters.vllm.kv_cache.layout import require_attention_only
    from support.families import CannotBuildSmall, Case, make_config

    families = stateful_families()
    assert {"mamba", "bamba", "falcon_h1", "qwen3_next", "lfm2", "xlstm", "zaya"} <= set(families)
    for family in families:
        with suppress(CannotBuildSmall):
            config = make_config(Case(family))
            with pytest.raises(ConfigError, match="neither hand it off nor store it"):
                require_attention_only(model_of(hf_config=config, hf_text_config=config.get_text_config()))


def test_attention_that_keeps_something_else_is_refused() -> None:
    from vllm.v1.kv_cache_interface import SinkFullAttentionSpec

    plain = full()
    sink = SinkFullAttentionSpec(
        block_size=32, num_kv_heads=2, head_size=32, head_size_v=32, dtype=plain.dtype, sink_len=4
    )
    with pytest.raises(ConfigError, match="SinkFullAttentionSpec"):
        shape_of(sink)


def test_groups_for_speculative_decoding() -> None:
    with pytest.raises(ConfigError, match=f"speculative.*{FLAG}"):
        shape_of(full(), window(), is_eagle_group=True)


def test_sleep_mode_is_refused() -> None:
    """It would unmap memory that other instances read."""
    from kvferry.adapters.vllm import KvferryP2pConnector

    with pytest.raises(ConfigError, match="--enable-sleep-mode"):
        shape_of(full(), sleep_mode=True)
    assert not KvferryP2pConnector.supports_sleep_mode(None)


def test_latent_attention_that_vllm_keeps_from_cached_kv_is_refused() -> None:
    assert shape_of(full(), latent=True).windows == [None]
    assert shape_of(full(), caching=False).windows == [None]
    with pytest.raises(ConfigError, match="MLA"):
        shape_of(full(), latent=True, caching=False)


def test_only_what_hands_off_declares_it() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma

    from kvferry.adapters.vllm.catalog import connector_class

    assert supports_hma(connector_class("KvferryP2pConnector"))
    assert supports_hma(connector_class("KvferryNixlConnector"))
    assert not supports_hma(connector_class("KvferrySharedStorageConnector"))


def test_beside_a_connector_of_vllms_that_hands_off_a_cache_is_a_cache_only() -> None:
    """vLLM's MultiConnector cannot join two tickets."""
    from vllm.config import KVTransferConfig

    from kvferry.adapters.vllm.settings import read_settings
    from kvferry.adapters.vllm.siblings import hands_off

    nixl, other, config = type("NixlPullConnector", (), {})(), object(), KVTransferConfig(kv_role="kv_both")
    cache = read_settings(config, "OffloadingConnector")
    assert hands_off(other, cache, [other])
    assert not hands_off(other, cache, [nixl])
    with pytest.raises(ConfigError, match="NixlPullConnector and object would both hand requests off"):
        hands_off(other, read_settings(config, "P2pConnector"), [nixl])
