"""kvferry: prefill and decode on different instances, the KV cache ferried between them."""

__version__ = "0.1.0.dev0"
