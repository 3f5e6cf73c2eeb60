"""KV transfers: when they start, and the end of those that fail."""

from __future__ import annotations

from engine.hooks.hook import DECODE, Hook, HookGroup, HookKind, Platform
from engine.hooks.kv import early_sends, held_rooms, pages, posts, prompt_digests, room

_PREFILL = frozenset({"prefill"})

GROUPS: tuple[HookGroup, ...] = (
    HookGroup(
        lacking="KV that leaves while the next batch is computed",
        upstream="none; since pull request 31687 the scheduler's stream waits for batch k+1 before KV of batch k is "
        "looked up on it",
        remove_when="a prefill engine looks up KV before its stream waits, or without that stream",
        hooks=(
            Hook(
                name="kv_leaves_before_the_next_batch_ends",
                target="sglang.srt.managers.scheduler.Scheduler._apply_war_barrier",
                fn=early_sends.put_off,
                roles=_PREFILL,
                platform=Platform.GPU,
                source_sha256="795909ae5f28c3288b8537381fd6851e3a31a5d6a8f66d7fc60c3c771d4cb3aa",
                why="first tokens would come a whole batch later, and the GPU would idle meanwhile",
            ),
            Hook(
                name="the_next_batch_is_waited_for",
                target="sglang.srt.managers.scheduler.Scheduler.process_batch_result",
                kind=HookKind.AFTER,
                fn=early_sends.wait_now,
                roles=_PREFILL,
                platform=Platform.GPU,
                source_sha256="2b92e6cdbfb7621326695b49adfb7e6f373bfbd99ca49c1574964e414a10b7a9",
                why="the same wait, before the scheduler writes to what the running batch reads",
            ),
        ),
    ),
    HookGroup(
        lacking="KV that leaves once it is there, where a hierarchical cache loads it",
        upstream="none; a prompt's KV that the cache has is sent at once, also while it is loaded for another prompt",
        remove_when="NIXL's sender waits for what loads KV, as mori's does for what computes it",
        hooks=(
            Hook(
                name="only_loaded_kv_is_sent",
                target="sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin."
                "maybe_send_cached_prefix_chunk",
                fn=early_sends.send_only_loaded_kv,
                roles=_PREFILL,
                source_sha256="046705ef4d564ed06939565ee83eb8b0e37dd4ae768ef0f1ba2fb13cb7d4cc1f",
                why="a decode engine would get what the pages had before, and answer wrongly without an error",
            ),
        ),
    ),
    HookGroup(
        lacking="Requests that an engine refuses, and that move no KV",
        upstream="none; set_finish_with_abort replaces the prompt by one token, and a prefill engine sends that "
        "token's KV and ends the request as if it were done",
        remove_when="a refused request ends with its error before it enters a queue of KV transfers",
        hooks=(
            Hook(
                name="refused_prompts_send_no_kv",
                target="sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._check_if_req_exceed_kv_capacity",
                fn=room.end_refused,
                roles=_PREFILL,
                source_sha256="cd5d88cd65327c43705ede6262b313691781a2c89d0ae85c9d3d8e1f610f86f0",
                why="the decode engine would answer from what others have left in its pages",
            ),
            Hook(
                name="refused_answers_take_no_kv",
                target="sglang.srt.disaggregation.decode.DecodePreallocQueue._check_if_req_exceed_kv_capacity",
                fn=room.end_refused,
                roles=DECODE,
                source_sha256="5b01c6ec3c1a1ba9b180ea751ce272bf7bef01e2d2f3d22663195346ab50e39a",
                why="the client would wait for a transfer to learn that its request is refused, or get another error",
            ),
        ),
    ),
    HookGroup(
        lacking="A check that KV is that of the prompt which the decode engine was asked for",
        upstream="none; a decode engine compares rooms, but neither lengths nor tokens",
        remove_when="a decode engine refuses the KV of another prompt",
        hooks=(
            Hook(
                name="prompts_are_digested",
                target="sglang.srt.disaggregation.utils.MetadataBuffers.set_buf",
                kind=HookKind.AFTER,
                fn=prompt_digests.send_digest,
                roles=_PREFILL,
                source_sha256="973c40ac4b68e4e1ca57b851a8429cf374ec22f18e90f82a7a16a69aac431fe4",
                why="each engine makes its own tokens of a request, which may differ by their settings",
            ),
            Hook(
                name="digests_are_compared",
                target="sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req",
                fn=prompt_digests.compare_digest,
                roles=DECODE,
                source_sha256="1b1aeca0a46a72996ba8012ea8fa6dffba1258f0d6b353e223b8e8d5502dd11a",
                why="an answer from another prompt's KV, or from pages that nobody filled, would look like any other",
            ),
        ),
    ),
    HookGroup(
        lacking="KV pages that are free when the last step that writes to them has run",
        upstream="none; pages are free with the result of step k, while step k+1 may still write to one of them",
        remove_when="a decode engine frees pages after the step that was launched before",
        hooks=(
            Hook(
                name="freed_kv_waits_for_the_running_step",
                target="sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.merge_and_sort_free",
                fn=pages.wait_for_the_running_step,
                roles=DECODE,
                platform=Platform.GPU,
                source_sha256="9da300dfcfcd4aeca46c3aca143895d5db8f3c1ac875ceb4bb8385751bbd4507",
                why="a token of KV that a prefill engine has just written would be overwritten",
            ),
        ),
    ),
    HookGroup(
        lacking="KV pages of several tokens that a decode engine takes and frees without waiting for its GPU",
        upstream="none; the prefix cache frees whole pages by `free_segment`, a decode engine's ChunkCache not yet",
        remove_when="ChunkCache calls `free_segment`, and a prompt's pages are taken without copies to the GPU",
        hooks=(
            Hook(
                name="prompts_take_whole_pages",
                target="sglang.srt.disaggregation.decode.alloc_for_decode_prealloc",
                fn=pages.take_whole_pages,
                roles=DECODE,
                source_sha256="686c3d1b33b6e5ee34175ebde94d1f1a925119922339b4b6362f9156ca9795d5",
                why="each prompt would make the scheduler wait for four copies to the GPU",
            ),
            Hook(
                name="finished_requests_free_whole_pages",
                target="sglang.srt.mem_cache.chunk_cache.ChunkCache.cache_finished_req",
                fn=pages.free_whole_pages,
                roles=DECODE,
                source_sha256="ff9d455e45ce8dbea5259ac9bce9e6700e075f108891733f3e417cd308de6bcc",
                why="each finished request would make the scheduler wait for a search on the GPU",
            ),
        ),
    ),
    HookGroup(
        lacking="KV pages that stay with a failed request until nothing is written to them any longer",
        upstream="a TODO in NixlKVManager._handle_abort_notification; pages are free at once, and a write that was "
        "posted before or comes later lands in another request's KV",
        remove_when="decode engines free the pages of a failed room after an answer of each prefill rank",
        hooks=(
            Hook(
                name="failed_kv_rooms_are_held",
                target="sglang.srt.disaggregation.decode.DecodeTransferQueue._poll_with_metadata_gate",
                fn=held_rooms.hold_failed,
                roles=DECODE,
                source_sha256="9161679f96d25fcaabdb0c214ce20d4f6ac4d4d8e8940746f7629adcfdac1103",
                why="pages that are written to late would give another request a wrong answer",
            ),
            Hook(
                name="kv_transfers_end_beside_retracted",
                target="sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin.process_decode_queue",
                kind=HookKind.AFTER,
                fn=held_rooms.end_beside_retracted,
                roles=DECODE,
                source_sha256="869d4787e7c58f939b2e61500623f19d23df1190c2cce8c81c777826b20c20c0",
                why="SGLang looks at no transfer while retracted requests wait, and these may wait for its pages",
            ),
            Hook(
                name="posts_are_noted",
                target="sglang.srt.disaggregation.nixl.conn.NixlKVManager.transfer_worker",
                fn=posts.note_posts,
                roles=_PREFILL,
                source_sha256="75b946bfc1c0e961c035d9926e743a4e991873d28a3ff0e1d11078aa3cec9d04",
                why="only who knows each write that NIXL has not completed can say that none will come",
            ),
            Hook(
                name="aborts_are_answered",
                target="sglang.srt.disaggregation.nixl.conn.NixlKVManager._handle_abort_notification",
                kind=HookKind.AFTER,
                fn=posts.answer_aborts,
                roles=_PREFILL,
                source_sha256="3ac19dded99f7e953aff802bdfff5bb4a55c539a95782635daf50f5dc01aa863",
                why="a decode engine that is to keep pages must learn when it may free them",
            ),
        ),
    ),
    HookGroup(
        lacking="KV pages that stay with a failed request until nothing reads them any longer",
        upstream="none; prefill engines free the pages of a failed room while NIXL may read them",
        remove_when="prefill engines free them after NIXL has completed or released each transfer",
        hooks=(
            Hook(
                name="failed_transfers_keep_their_source",
                target="sglang.srt.disaggregation.prefill.poll_and_all_reduce_attn_cp_tp_group",
                kind=HookKind.GLOBAL,
                fn=posts.with_kept_sources,
                roles=_PREFILL,
                source_sha256="9fd0c9debefae5f4c675a79ad7b62c1a7fe1dc92aeac6cdda12d527e20189af3",
                why="a decode engine would get the KV of whoever has the pages next",
            ),
            Hook(
                name="aborted_prompts_keep_their_source",
                target="sglang.srt.managers.scheduler.Scheduler.process_pending_chunked_abort",
                fn=posts.keep_source_of_chunked,
                roles=_PREFILL,
                source_sha256="a46cda9bd86d29f0d2acf59b21a91acbf0efd31da74675485556f5a9e3db6691",
                why="the same for a prompt that is aborted between its chunks, which SGLang frees without a poll",
            ),
        ),
    ),
)
