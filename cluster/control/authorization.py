"""Who may make which call to an agent, by the role in the caller's certificate."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc

from cluster.control.checked_calls import checked_handler
from process.certificates.identity import OPERATOR, ROLES, ROUTER, Identity

log = logging.getLogger(__name__)

_PEERS = ("prefill", "decode")  # they watch each other
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
}
ENGINE_KEY_READERS = frozenset({ROUTER, "prefill"})  # they send requests to engines; a prefill worker to warm pairs
_HEALTH = "/grpc.health.v1.Health/"  # for everyone with a certificate of the cluster


def caller_of(context: Any) -> Identity | None:
    """Who calls, by the one URI of its certificate; None if that names no process of a cluster."""
    names = context.auth_context().get("peer_spiffe_id", ())
    try:
        return Identity.parse(names[0].decode()) if len(names) == 1 else None
    except (ValueError, UnicodeDecodeError):
        return None


class AuthorizedCalls(grpc.aio.ServerInterceptor):
    """Refuses calls that the caller's role may not make, before their handlers see them."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        allowed = (
            frozenset(ROLES) if method.startswith(_HEALTH) else CALLERS.get(method.rpartition("/")[2], frozenset())
        )

        async def check(context: Any) -> None:
            await self._check(context, method, allowed)

        return checked_handler(handler, check_call=check)

    async def _check(self, context: Any, method: str, allowed: frozenset[str]) -> None:
        caller = caller_of(context)
        if caller is None or caller.trust_domain != self._identity.trust_domain:
            log.warning("call by an unknown caller refused", extra={"fields": {"call": method}})
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                f"the certificate names no process of {self._identity.trust_domain}; see docs/security.md",
            )
        elif caller.role not in allowed:
            log.warning("call refused", extra={"fields": {"call": method, "caller": caller.uri}})
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, f"{method.rpartition('/')[2]} is not for {caller.uri}"
            )
