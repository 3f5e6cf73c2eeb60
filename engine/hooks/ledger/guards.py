"""Guards of the ports of engines."""

from __future__ import annotations

from engine.hooks import inspection
from engine.hooks.guards import http as http_guard
from engine.hooks.guards import kv as kv_guard
from engine.hooks.hook import DECODE, OUR_ROLES, PAIR_ROLES, Hook, HookGroup, HookKind
from engine.hooks.kv import prefill_engines

GROUPS: tuple[HookGroup, ...] = (
    HookGroup(
        lacking="A KV thread that outlives a bad message",
        upstream="none; an assertion about foreign traffic ends the thread, and the engine goes on as if it were ready",
        remove_when="SGLang drops messages that it cannot take",
        hooks=(
            Hook(
                name="kv_thread_drops_bad_messages",
                target="sglang.srt.disaggregation.nixl.conn.threading",
                kind=HookKind.GLOBAL,
                fn=inspection.with_kept_kv_thread,
                roles=frozenset({"prefill"}),
                source_sha256="28da79ad06baa8c1b725bc98983ca570f82a73b49439873831505ab7f1eef601",
                why="anybody who can reach the port could stop a worker's prefill with one message",
            ),
        ),
    ),
    HookGroup(
        lacking="Heartbeats that are counted for the prefill engine that they come from",
        upstream="none; failures of one that was given up count for the next one at its address",
        remove_when="the failures end when the engine is given up",
        hooks=(
            Hook(
                name="heartbeats_begin_anew",
                target="sglang.srt.disaggregation.common.conn.CommonKVManager._handle_node_failure",
                kind=HookKind.AFTER,
                fn=prefill_engines.begin_anew,
                roles=DECODE,
                source_sha256="df3e647763c068da4894eea09f9c73cc70c178e04ea0b87eb22f127c613df70a",
                why="one late heartbeat of a prefill engine that has just started again failed its requests",
            ),
        ),
    ),
    HookGroup(
        lacking="A decode engine that outlives a prefill engine unlike itself",
        upstream="none; pages or a dtype of KV that differ raise an error in the scheduler, which ends the engine",
        remove_when="the requests of such a prefill engine fail instead",
        hooks=(
            Hook(
                name="unlike_prefill_engines_are_declined",
                target="sglang.srt.disaggregation.common.conn.CommonKVManager.try_ensure_parallel_info",
                fn=prefill_engines.decline_unlike,
                roles=DECODE,
                source_sha256="320569121d8ff2750310cb1e89a9be5e27efba1a69dbd583ceed050d2e72f068",
                why="a cluster whose pages are changed worker by worker would lose each decode engine with its streams",
            ),
        ),
    ),
    HookGroup(
        lacking="Keys that stay secret, and client certificates",
        upstream="none; /server_info and the log show --api-key and --admin-api-key; --ssl-ca-certs asks no client for "
        "a certificate, and --enable-ssl-refresh misses files that are replaced",
        remove_when="SGLang reads its keys from files or the environment, and offers mutual TLS",
        hooks=(
            Hook(
                name="keys_of_the_environment",
                target="sglang.srt.utils.auth.decide_request_auth",
                fn=http_guard.ask_for_own_keys,
                roles=OUR_ROLES,
                source_sha256="dd4099e7eaa1d7fadcb89283be9c97714d98032158706afdbd0e8fd31fc29055",
                why="reaching the port must not suffice to use an engine, and who may generate must not load adapters",
            ),
            Hook(
                name="mutual_tls",
                target="sglang.srt.entrypoints.http_server.uvicorn",
                kind=HookKind.GLOBAL,
                fn=http_guard.with_mutual_tls,
                roles=OUR_ROLES,
                source_sha256="1de1fbce4c87b11b01ab99c802d0684053dc4539b95d8b3a8d88c80d7d238e9a",
                why="beyond the host, engines serve only processes of the cluster",
            ),
        ),
    ),
    HookGroup(
        lacking="KV ports for peers only",
        upstream="none; whoever reaches the bootstrap server or the ports of the ranks can register, ask and send",
        remove_when="SGLang authenticates the engines that exchange KV",
        hooks=(
            Hook(
                name="kv_bootstrap_for_peers",
                target="sglang.srt.disaggregation.common.conn.CommonKVBootstrapServer._setup_routes",
                kind=HookKind.AFTER,
                fn=kv_guard.bootstrap_for_peers,
                roles=frozenset({"prefill"}),
                source_sha256="6cd5f2e4fedb56b6ada397559ba5c14d511c12b9b9aaaa2a26cae79f666d4e4a",
                why="a stranger could register a rank, and get the KV of prompts or send its own",
            ),
            Hook(
                name="kv_messages_from_peers",
                target="sglang.srt.disaggregation.common.conn.get_zmq_socket_on_host",
                fn=kv_guard.socket_for_peers,
                roles=PAIR_ROLES,
                source_sha256="c1f47315cefe07da12c1cb2af46eb5562cf6c7f60036b32fd5cf86e541e0f279",
                why="a rank does what any message says, such as where to write the KV of a room",
            ),
        ),
    ),
)
