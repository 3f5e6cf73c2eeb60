"""What a prefill engine needs to become a decode engine, and back, by SGLang's `/pd_role_switch`.

SGLang keeps weights, KV cache and graphs of an idle engine, empties the prefix cache, and makes queues and a KV manager
for the new role. Its manager for NIXL has no end, and engines that exchange KV with this one would not learn of it.
"""

import functools
import threading
import time
from typing import Any

_END_S = 10.0  # for a thread or a socket
_FAREWELL_MS = 2000  # to reach an engine
_FAREWELL = b"PRELUDE_FAREWELL"

threads: list[threading.Thread] = []  # of the KV manager that is there now
end_s: float | None = None  # that the one before it took to end


def begin_role(scheduler, lora_manager) -> str:
    """Prepare a scheduler for the role that it has now; its name. Raises ValueError for adapters on a decode engine."""
    from sglang.srt.disaggregation import role_switch

    role = scheduler.disaggregation_mode.value
    if role == "decode" and lora_manager is not None and lora_manager.loras:
        raise ValueError(f"a decode engine holds no adapters; unload {', '.join(lora_manager.loras)} first")
    scheduler.tree_cache.disable = role == "decode"  # requests do not tell it their adapter; it is empty now
    manager: Any = role_switch._current_kv_manager(scheduler)
    manager.supports_role_switch = True
    manager.teardown = functools.partial(_end, manager)
    hears = "handle_chunk_ready" if role == "decode" else "_handle_abort_notification"  # first to get each message
    setattr(manager, hears, functools.partial(_hear, manager, getattr(manager, hears)))
    return role


def socket_to(ip: str, port: int):
    """A socket for messages to the KV manager there."""
    import zmq
    from sglang.srt.utils.network import NetworkAddress

    address = NetworkAddress(ip, port)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.IPV6, address.is_ipv6)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address.to_tcp())
    return socket


class _NoMoreChunks:
    """Ends the thread that finds it in its queue."""

    @property
    def room(self) -> int:
        raise SystemExit


def _end(manager) -> None:
    """End an idle KV manager: its threads, its sockets, and NIXL's agent with the memory that it has registered."""
    global end_s
    began = time.monotonic()
    farewell = [_FAREWELL, manager.local_ip.encode(), b"%d" % manager.rank_port, manager.agent.name.encode()]
    if (heartbeat := getattr(manager, "_heartbeat_shutdown", None)) is not None:
        heartbeat.set()
    for queue in getattr(manager, "transfer_queues", ()):
        queue.put(_NoMoreChunks())
    ending = threading.Thread(target=manager._zmq_ctx.term, name="end of KV sockets", daemon=True)
    ending.start()  # ends each wait for a message, and waits until all sockets are closed
    for thread in threads:
        _join(thread)
    threads.clear()
    for ip, port in _partners(manager):  # all: no thread adds any
        farewell_socket = socket_to(ip, port)
        farewell_socket.send_multipart(farewell)
        farewell_socket.close(linger=_FAREWELL_MS)  # does not wait
    for socket in (manager.server_socket, *manager._socket_cache.values(), *manager._monitor_cache.values()):
        socket.close(linger=0)
    _join(ending)
    prepared = (manager.prep_handles, manager.prep_handles_slice_dst, manager.prep_handles_segment_src)
    for table in (*prepared, manager._prepared_state_plans, getattr(manager, "decode_kv_args_table", {})):
        table.clear()
    manager.prep_handle_slice_src = None
    for registered in (*manager.kv_descs, manager.aux_descs, *filter(None, [getattr(manager, "state_descs", None)])):
        manager.agent.deregister_memory(registered)
    manager.agent = None
    end_s = time.monotonic() - began


def _join(thread: threading.Thread) -> None:
    thread.join(_END_S)
    if thread.is_alive():
        raise RuntimeError(f"the thread {thread.name} of the KV manager does not end")


def _partners(manager) -> set[tuple[str, int]]:
    """Where the KV managers are that know this one."""
    if manager.disaggregation_mode.value == "prefill":
        return {(peer.endpoint, peer.dst_port) for peer in manager.decode_kv_args_table.values()}
    return {(info["rank_ip"], int(info["rank_port"])) for infos in manager.connection_pool.values() for info in infos}


def _hear(manager, original, message) -> bool:
    """Forget a KV manager that says farewell: the next request of that engine finds its new one."""
    if message[0] != _FAREWELL:
        return original(message)
    ip, port, name = (part.decode() for part in message[1:4])
    if manager.disaggregation_mode.value == "prefill":
        if manager.decode_kv_args_table.pop(name, None) is not None:
            for prepared in (manager.prep_handles, manager.prep_handles_slice_dst, manager._prepared_state_plans):
                prepared.pop(name, None)
            manager.agent.remove_remote_agent(name)
        return True
    with manager.connection_lock:
        known = list(manager.connection_pool.items())
    for key, infos in known:
        if any((info["rank_ip"], str(info["rank_port"])) == (ip, port) for info in infos):
            manager._handle_node_failure(key.rsplit("_", 3)[0])  # the key ends in three ranks
    return True
