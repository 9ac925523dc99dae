"""Check that the Hugging Face hub, or its local cache, has a model, before anything is started.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

from kvferry.core.errors import ConfigError

_TIMEOUT_S = 10.0


def require_on_hub(model: str) -> None:
    """Raise `ConfigError` with the reason if the hub's model `model` is not available: it does not exist, it is gated,
    or the hub cannot be reached and the model is not in the cache. Takes at most some seconds."""
    if _is_cached(model):
        return
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{_describe(model)} is not in the cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set"
        )
    try:
        HfApi().model_info(model, timeout=_TIMEOUT_S)
    except GatedRepoError as error:
        raise ConfigError(
            f"{_describe(model)} is a gated model: request access to it, and set HF_TOKEN to your token"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{_describe(model)} does not exist, or is private; a local model is named by its directory"
        ) from error
    except HfHubHTTPError as error:
        raise ConfigError(f"{_describe(model)} cannot be looked up on the hub: {str(error).splitlines()[0]}") from error
    except Exception as error:
        raise ConfigError(
            f"{_describe(model)} is not in the cache, and {constants.ENDPOINT} cannot be reached"
            f" ({type(error).__name__}); without a network, name a local directory, or kvferry/tiny-python"
        ) from error


def _describe(model: str) -> str:
    return f"the hub's model {model!r} (there is no directory of that name)"


def _is_cached(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "config.json"), str)
