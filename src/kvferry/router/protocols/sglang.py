"""The form of SGLang's disaggregation: P and D are called concurrently, with the same bootstrap room.

Both get the client's request with the address of P's bootstrap server and the number of the room as fields at its top
(`bootstrap_host`, `bootstrap_port`, `bootstrap_room`). P's answer only matters if it is an error. A room serves one P
and one D: when either fails, both legs are sent again with a new room. The prompts of a batch use consecutive rooms,
which both servers count up from the first.

Run with the servers of SGLang 0.5.23 (`tests/end_to_end/sglang`). They resolve the data-parallel rank of a P with
several ranks (`disagg_prefill_dp_rank`) at its bootstrap server themselves.
"""

from __future__ import annotations

from kvferry.router.protocols.form import Form


def sglang(transfer_id: str, host: str, bootstrap_port: int) -> Form:
    """Make the form of a hand-off from P at `host`. A room has 63 bits; 62 are used, so that a batch's rooms fit
    too."""
    room = int(transfer_id[:16], 16) >> 2
    bootstrap_fields = {"bootstrap_host": host, "bootstrap_port": bootstrap_port, "bootstrap_room": room}
    return Form(
        protocol="sglang",
        transfer_id=transfer_id,
        produce={},
        early=bootstrap_fields,
        early_is_final=True,
        concurrent=True,
        prefill_fields=bootstrap_fields,
        uses_rendezvous=True,
        released_by=None,
    )
