"""The form of Dynamo's workers: P answers with `disaggregated_params`, then D is called with them.

Both legs go to kvferry's server for a worker (`kvferry.bridge.dynamo`), which translates. With the request to D those
parameters become `prefill_result`, as Dynamo's own frontend has it. Run with Dynamo 1.7.0.dev20261026
(`tests/end_to_end/dynamo`).
"""

from __future__ import annotations

from kvferry.router.protocols.form import Form
from kvferry.router.protocols.nixl import produce_params


def dynamo(transfer_id: str) -> Form:
    """D samples the first token again. P has no release request, so a decode worker fetches it, and
    drops it."""
    return Form(protocol="dynamo", transfer_id=transfer_id, produce=produce_params(transfer_id), released_by="d")
