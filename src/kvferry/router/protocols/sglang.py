"""The form of SGLang's disaggregation: P and D are called at once, and meet by a number.

Both get the client's request with three fields at its top: where P's bootstrap server is, and the room in which the two
find each other (`bootstrap_host`, `bootstrap_port`, `bootstrap_room`). P's answer is of no use but to tell that it
failed; a room serves one P and one D, so that when either fails both legs are sent anew. The prompts of a batch meet in
rooms that follow one another, which both servers count up from the first.

Run with the servers of SGLang 0.5.23 (`tests/end_to_end/sglang`); they resolve the data-parallel rank of a P with
several (`disagg_prefill_dp_rank`) at its bootstrap server themselves.
"""

from __future__ import annotations

from kvferry.router.protocols.form import Form


def sglang(transfer_id: str, host: str, bootstrap_port: int) -> Form:
    """P at `host`. SGLang takes 63 bits for a room; 62 are used, so that those of a batch fit behind it."""
    room = int(transfer_id[:16], 16) >> 2
    meeting = {"bootstrap_host": host, "bootstrap_port": bootstrap_port, "bootstrap_room": room}
    return Form(
        protocol="sglang",
        transfer_id=transfer_id,
        produce={},
        early=meeting,
        early_is_all=True,
        concurrent=True,
        prefill_fields=meeting,
        uses_rendezvous=True,
        released_by="nobody",
    )
