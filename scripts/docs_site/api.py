"""The reference of Python's side: which public modules there are, and in what order a reader wants them."""

from __future__ import annotations

from collections.abc import Iterator

PAGES = {
    "connectors": (
        "Connectors",
        "What a connector implements, what the engine calls and when, and how a connector is found by name.",
        ("kvferry.connectors.api", "kvferry.connectors.registry"),
    ),
    "transport": (
        "Transport",
        "What moves KV between processes: fabrics, pipes, and the lookup buffer.",
        (
            "kvferry.transport.fabric.base",
            "kvferry.transport.fabric.pipe",
            "kvferry.transport.lookup_buffer.base",
            "kvferry.transport.options",
        ),
    ),
    "memory": (
        "Memory and layout",
        "What the bytes of a KV block mean, and where they are.",
        ("kvferry.core.blocks.layout", "kvferry.transport.memory", "kvferry.core.blocks.block_hash"),
    ),
    "store": (
        "Stores",
        "KV blocks at rest, by block hash; which of them are evicted, and how they are encoded.",
        ("kvferry.store.base", "kvferry.store.eviction.base", "kvferry.store.codecs.base"),
    ),
    "testing": (
        "Contract suites",
        "What every implementation of an interface must do, as classes for pytest that another package subclasses.",
        (
            "kvferry.testing.connector",
            "kvferry.testing.fabric",
            "kvferry.testing.pipe",
            "kvferry.testing.lookup_buffer",
            "kvferry.testing.model_patch",
            "kvferry.testing.policy",
            "kvferry.testing.stores",
            "kvferry.testing.eviction",
            "kvferry.testing.codecs",
            "kvferry.testing.backends",
        ),
    ),
    "fleet": (
        "Backends of fleets",
        "What starts and ends the members of a fleet, and is asked what has become of them.",
        ("kvferry.fleet.control.backend", "kvferry.fleet.processes.process", "kvferry.fleet.processes.ready"),
    ),
    "router": (
        "Router policies",
        "How one instance is chosen among several.",
        ("kvferry.router.choice.policies.base", "kvferry.router.instances.load"),
    ),
    "hand-off": (
        "Hand-offs",
        "The ticket, and how requests say their part in a hand-off.",
        ("kvferry.core.messages.hand_off", "kvferry.core.settings.transfer_config"),
    ),
    "configuration": (
        "Configuration classes",
        "Frozen classes from which flags, TOML and environment variables are made.",
        (
            "kvferry.engine.config",
            "kvferry.fleet.spec.settings",
            "kvferry.fleet.spec.restart",
            "kvferry.router.config",
            "kvferry.router.picker.config",
            "kvferry.http.server.config",
            "kvferry.http.server.limits",
            "kvferry.core.settings.options",
            "kvferry.core.settings.model",
            "kvferry.fleet.processes.process_settings",
        ),
    ),
    "errors": ("Errors", "The one tree of errors.", ("kvferry.core.errors",)),
}
"""Page → its title, what it is about, and its modules."""


def pages() -> Iterator[tuple[str, str]]:
    """Each page's place and text; mkdocstrings fills in the modules."""
    for name, (title, about, modules) in PAGES.items():
        yield f"api/{name}.md", f"# {title}\n\n{about}\n\n" + "\n".join(f"::: {module}\n" for module in modules)
