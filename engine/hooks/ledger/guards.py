"""Guards of the ports of engines."""

from engine import access
from engine.hooks import inspection
from engine.hooks.hook import DECODE, OUR_ROLES, PAIR_ROLES, Hook, HookGroup, HookKind
from engine.hooks.kv import peers, room

GROUPS: tuple[HookGroup, ...] = (
    HookGroup(
        lacking="A KV thread that outlives a bad message",
        remove_when="SGLang drops messages that it cannot take",
        hooks=(
            Hook(
                name="kv_thread_drops_bad_messages",
                target="sglang.srt.disaggregation.nixl.conn.threading",
                kind=HookKind.GLOBAL,
                fn=inspection.with_kept_kv_thread,
                roles=frozenset({"prefill"}),
                source_sha256="517c7573adf3b3e553a69251498c72ec9067db5f3244cd806c61e09b30b88c80",
                why="anybody who can reach the port could stop a worker's prefill with one message",
            ),
        ),
    ),
    HookGroup(
        lacking="A decode engine that outlives a prefill engine unlike itself",
        remove_when="the requests of such a prefill engine fail instead",
        hooks=(
            Hook(
                name="unlike_prefill_engines_are_declined",
                target="sglang.srt.disaggregation.common.conn.CommonKVManager.try_ensure_parallel_info",
                fn=room.decline_unlike,
                roles=DECODE,
                source_sha256="7b7cdcf5e0a38f4ee5f56f0e74574d28081f04fce7a51516fec1d76ceff3244e",
                why="a cluster whose pages are changed worker by worker would lose each decode engine with its streams",
            ),
        ),
    ),
    HookGroup(
        lacking="Keys that stay secret, and client certificates",
        remove_when="SGLang reads its keys from files or the environment, and offers mutual TLS",
        hooks=(
            Hook(
                name="keys_of_the_environment",
                target="sglang.srt.utils.auth.decide_request_auth",
                fn=access.ask_for_own_keys,
                roles=OUR_ROLES,
                source_sha256="ba9f3a6b2d1cec33e81142eb3a5765d3af68fb6a0c34c4b53710e534a1253112",
                why="reaching the port must not suffice to use an engine, and who may generate must not load adapters",
            ),
            Hook(
                name="mutual_tls",
                target="sglang.srt.entrypoints.http_server.uvicorn",
                kind=HookKind.GLOBAL,
                fn=access.with_mutual_tls,
                roles=OUR_ROLES,
                source_sha256="d5d7ae6c5e8f403f9a46617377ab96977d9d4f1f263c0b90fc9fd2769eef061e",
                why="beyond the host, engines serve only processes of the cluster",
            ),
        ),
    ),
    HookGroup(
        lacking="KV ports for peers only",
        remove_when="SGLang authenticates the engines that exchange KV",
        hooks=(
            Hook(
                name="kv_bootstrap_for_peers",
                target="sglang.srt.disaggregation.common.conn.CommonKVBootstrapServer._setup_routes",
                kind=HookKind.AFTER,
                fn=peers.bootstrap_for_peers,
                roles=frozenset({"prefill"}),
                source_sha256="6cd5f2e4fedb56b6ada397559ba5c14d511c12b9b9aaaa2a26cae79f666d4e4a",
                why="a stranger could register a rank, and get the KV of prompts or send its own",
            ),
            Hook(
                name="kv_messages_from_peers",
                target="sglang.srt.disaggregation.common.conn.get_zmq_socket_on_host",
                fn=peers.socket_for_peers,
                roles=PAIR_ROLES,
                source_sha256="7d343e157ba199be1269929f32e216bca98dc607a474d004dd62198813816ce7",
                why="a rank does what any message says, such as where to write the KV of a room",
            ),
        ),
    ),
)
