"""Who may make which call to an agent, by the role in the caller's certificate."""

import logging
from collections.abc import Mapping
from typing import Any

import grpc

from process.certificates.identity import OPERATOR, PAIR_ROLES, ROUTER, SWITCHING, Identity

log = logging.getLogger(__name__)

_PEERS = (*PAIR_ROLES, SWITCHING)  # they watch each other
# Of `prelude.control.v1.WorkerControl`. A call that is not listed is refused to every caller.
CALLERS: Mapping[str, frozenset[str]] = {
    "Describe": frozenset({ROUTER, OPERATOR, *_PEERS}),
    "WatchState": frozenset({ROUTER, OPERATOR, *_PEERS}),
    "EnsureAdapter": frozenset({ROUTER, OPERATOR}),
    "PinAdapter": frozenset({ROUTER, OPERATOR}),
    "PutAdapter": frozenset({ROUTER}),
    "EvictAdapter": frozenset({ROUTER, OPERATOR}),
    "Drain": frozenset({OPERATOR}),
    "Undrain": frozenset({OPERATOR}),
    "ChangeRole": frozenset({ROUTER, OPERATOR}),
}
# They send requests to engines; a prefill worker, to warm pairs. `Transport.certified_role` has their certificates'.
ENGINE_KEY_READERS = frozenset({ROUTER, "prefill"})


def caller_of(context: Any) -> Identity | None:
    """Who calls, by the one URI of its certificate; None if that names no process of a cluster."""
    names = context.auth_context().get("peer_spiffe_id", ())
    try:
        return Identity.parse(names[0].decode()) if len(names) == 1 else None
    except (ValueError, UnicodeDecodeError):
        return None


async def check_caller(context: Any, method: str, agent: Identity) -> None:
    """Abort a call that the caller's role may not make, or a caller of another trust domain than the agent's."""
    caller = caller_of(context)
    if caller is None or caller.trust_domain != agent.trust_domain:
        log.warning("call by an unknown caller refused", extra={"fields": {"call": method}})
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            f"the certificate names no process of {agent.trust_domain}; see docs/security.md",
        )
    elif caller.role not in CALLERS.get(method, ()):
        log.warning("call refused", extra={"fields": {"call": method, "caller": caller.uri}})
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{method} is not for {caller.uri}")
