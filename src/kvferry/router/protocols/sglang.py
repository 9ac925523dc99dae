"""The form of SGLang's disaggregation: P and D are called at once, and meet by a number.

Both get the client's request with three fields at its top: where P's bootstrap server is, and the room in which the two
find each other (`bootstrap_host`, `bootstrap_port`, `bootstrap_room`). P's answer is of no use but to tell that it
failed; a room serves one P and one D, so that when either fails both legs are sent anew.

Made after what SGLang's own router sends (`sglang-router` 0.3.2); with SGLang's servers, which need a GPU, it has
**never run**.
"""

from __future__ import annotations

from kvferry.router.protocols.form import Form


def sglang(transfer_id: str, host: str, bootstrap_port: int) -> Form:
    """P at `host`. The room is the transfer id's first 63 bits, as SGLang takes no more."""
    room = int(transfer_id[:16], 16) >> 1
    meeting = {"bootstrap_host": host, "bootstrap_port": bootstrap_port, "bootstrap_room": room}
    return Form(
        protocol="sglang",
        transfer_id=transfer_id,
        produce={},
        early=meeting,
        early_is_all=True,
        concurrent=True,
        prefill_fields=meeting,
        meets_in_a_room=True,
        released_by="nobody",
    )
