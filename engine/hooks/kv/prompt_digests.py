"""Bodies of the hooks by which a decode engine knows that KV is that of the prompt which it was asked for.

The router sends the same request to both engines, and each makes token ids of it by itself. Where they differ (another
chat template on one of them, a prompt that one cuts), the decode engine would answer from the KV of another prompt, or
from pages that nobody has filled.
"""

import logging
import zlib
from array import array
from http import HTTPStatus

log = logging.getLogger(__name__)

# Of the sixteen numbers in a row of `cached_tokens`, which moves with the KV, SGLang uses seven.
_LENGTH, _CHECKSUM = 7, 8


def send_digest(_result, buffers, request):
    """Put the prompt's length and checksum beside the first token, on a prefill engine."""
    row = buffers.cached_tokens[request.metadata_buffer_index]
    row[_LENGTH], row[_CHECKSUM] = _digest(request.origin_input_ids)


def compare_digest(original, queue, waiting):
    """Take over the first token, on a decode engine, unless it follows another prompt: then the request fails."""
    from sglang.srt.disaggregation.utils import prepare_abort

    request = waiting.req
    ids = request.origin_input_ids
    if getattr(request, "pd_rebootstrap_in_progress", False):  # the prefill engine has read its answer so far, too
        ids = [*ids, *request.output_ids]
    buffers, index = queue.metadata_buffers, waiting.metadata_buffer_index
    row = buffers.cached_tokens[index]
    theirs, ours = (int(row[_LENGTH]), int(row[_CHECKSUM])), _digest(ids)
    room = int(buffers.bootstrap_room[index][0])
    says_nothing = theirs[0] == 0 or room == 0 or room != request.bootstrap_room  # SGLang's own check is for the rooms
    if says_nothing or theirs == ours:
        return original(queue, waiting)
    log.error(
        "the prefill engine has read another prompt of request %s: %d tokens (checksum %08x), not %d (%08x)",
        request.rid, theirs[0], theirs[1] & 0xFFFFFFFF, ours[0], ours[1] & 0xFFFFFFFF,
    )  # fmt: skip
    prepare_abort(
        request,
        "the prefill engine and the decode engine made different tokens of this prompt; give both the same tokenizer, "
        "chat template and arguments",
        status_code=HTTPStatus.INTERNAL_SERVER_ERROR,
    )
    waiting.kv_receiver.clear()
    waiting.kv_receiver = None
    return None


def _digest(ids) -> tuple[int, int]:
    """The number of ids and a checksum of them, as numbers of 32 bits with a sign."""
    checksum = zlib.crc32(array("q", ids))
    return len(ids), checksum - (1 << 32) if checksum >> 31 else checksum
