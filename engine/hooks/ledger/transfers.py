"""KV transfers: when they start, and the end of those that fail."""

from engine.hooks.hook import DECODE, Hook, HookGroup, HookKind, Platform
from engine.hooks.kv import connections, held_rooms, prompt_digests, room

_PREFILL = frozenset({"prefill"})

GROUPS: tuple[HookGroup, ...] = (
    HookGroup(
        lacking="A check that KV is of the prompt that decode was asked for",
        remove_when="a decode engine refuses the KV of another prompt",
        hooks=(
            Hook(
                name="prompts_are_digested",
                target="sglang.srt.disaggregation.utils.MetadataBuffers.set_buf",
                kind=HookKind.AFTER,
                fn=prompt_digests.send_digest,
                roles=_PREFILL,
                source_sha256="2eebbd13a3b8c8c11cc33d6fdcdabc70358399202caa84d8293b78794a901806",
                why="each engine makes its own tokens of a request, which may differ by their settings",
            ),
            Hook(
                name="digests_are_compared",
                target="sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req",
                fn=prompt_digests.compare_digest,
                roles=DECODE,
                source_sha256="138dfa83cf30b23040449d288cd0c46e118173e9a61e5d1f03b766769edb5152",
                why="an answer from another prompt's KV, or from pages that nobody filled, would look like any other",
            ),
        ),
    ),
    HookGroup(
        lacking="KV pages that are free when the last step has written to them",
        remove_when="a decode engine frees pages after the step that was launched before",
        hooks=(
            Hook(
                name="freed_kv_waits_for_the_running_step",
                target="sglang.srt.disaggregation.decode.alloc_for_decode_prealloc",
                fn=room.wait_for_the_running_step,
                roles=DECODE,
                platform=Platform.GPU,
                source_sha256="83e695bb91a605bb640346c99a19e9930be66e78f1461456726c796d6521318c",
                why="a token of KV that a prefill engine has just written would be overwritten",
            ),
        ),
    ),
    HookGroup(
        lacking="KV pages of failed requests that are free once the prefill engine has ended",
        remove_when="decode engines free the pages of a failed room when its prefill engine has gone",
        hooks=(
            Hook(
                name="failed_kv_rooms_are_held",
                target="sglang.srt.disaggregation.decode.DecodeTransferQueue.resolve_deferred_releases",
                fn=held_rooms.release_what_nobody_writes_to,
                roles=DECODE,
                source_sha256="11abf1156672ec0288191ac502c2b9a7d7d9acf5fa41cc56e3bfbed905a16657",
                why="pages are not freed without an answer, since a late write would give another request a wrong "
                "answer; those of a restarted prefill engine would never be free",
            ),
        ),
    ),
    HookGroup(
        lacking="KV transfers that end while retracted requests wait",
        remove_when="process_decode_queue takes transfers that have ended before it returns",
        hooks=(
            Hook(
                name="kv_transfers_end_beside_retracted",
                target="sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin.process_decode_queue",
                kind=HookKind.AFTER,
                fn=held_rooms.end_beside_retracted,
                roles=DECODE,
                source_sha256="eebd4b89bba2df2f55579c7a4108433b236a294dfbf6a3ce33e5e3c0acf0b13a",
                why="retracted requests may wait for the pages of those whose KV has arrived: nothing would run again",
            ),
        ),
    ),
    HookGroup(
        lacking="KV pages that stay with a failed request until nothing reads them",
        remove_when="prefill engines free them after NIXL has completed or released each transfer",
        hooks=(
            Hook(
                name="failed_transfers_keep_their_source",
                target="sglang.srt.disaggregation.prefill.poll_and_all_reduce_attn_cp_tp_group",
                kind=HookKind.GLOBAL,
                fn=held_rooms.with_kept_sources,
                roles=_PREFILL,
                source_sha256="9cb952d115f436e22fd4d9d186cd154e6553788bf40dc4269f7333f3d8733211",
                why="a decode engine would get the KV of whoever has the pages next",
            ),
        ),
    ),
    HookGroup(
        lacking="KV connections that are made again after a network cut",
        remove_when="SGLang reloads each peer whose connection has broken",
        hooks=(
            Hook(
                name="broken_kv_connections_are_made_again",
                target="sglang.srt.disaggregation.nixl.conn.NixlKVManager._reload_invalidated_peers",
                fn=connections.reload_broken_peers,
                roles=_PREFILL,
                source_sha256="7c2a11ef15b8fa8014261f4432377a595ec3b2275e2b87ceae329bfa92923b17",
                why="after a cut of 45 s no request of the pair would succeed until an engine restarts, and decode "
                "would keep the pages of those that the cut has failed",
            ),
            Hook(
                name="kv_messages_are_sent_again",
                target="sglang.srt.disaggregation.common.conn.CommonKVManager._connect",
                fn=connections.connect_until_it_works,
                roles=_PREFILL,
                source_sha256="31772d73f45e2dc5b5c697b8937fddfffa9c5c739d04f077a480c282d80ca2d1",
                why="a socket that was made during a cut would swallow all results: each request of the pair would "
                "time out until an engine restarts",
            ),
        ),
    ),
)
