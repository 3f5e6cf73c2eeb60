"""Body of the hook that streams what a model wrote of a call that a limit cut, and no more."""

import json
import re
from collections.abc import Iterator
from typing import Any

_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)|[{}\[\],:]|[^\s"{}\[\],:]+', re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')  # up to half an escape
_SPACED = {",": ", ", ":": ": "}


def finish_calls(
    original: Any, serving: Any, parser: Any, content: Any, request: Any, index: int, created: int
) -> str | None:
    """The last events of a stream's calls. SGLang closes a call that the model did not, and drops what it has not read.

    Its parsers read one thing per event, so the last event may leave them more to read.
    """
    detector = getattr(parser, "detector", parser)
    events: list[str] = []
    before: Any = None
    while getattr(detector, "_buffer", "") and before != (before := _state(detector)):
        events += _drained(serving._process_tool_call_stream(index, "", {index: parser}, content, request, {}, created))
    is_cut = _is_cut(content["meta_info"]["finish_reason"], request.stop_token_ids)
    if is_cut or _is_text(detector):
        events += _held_text(detector, content, request, index, created)
    if is_cut:
        _end_arguments(detector)
    events.append(original(serving, parser, content, request, index, created=created) or "")
    return "".join(events) or None


def _is_cut(finish_reason: Any, stop_token_ids: Any) -> bool:
    """Whether an answer ended where the model did not end it: at a limit, or at a stop of the client's."""
    if not finish_reason:
        return False
    matched = finish_reason.get("matched")
    return finish_reason["type"] == "length" or isinstance(matched, str) or matched in (stop_token_ids or ())


def _is_text(detector: Any) -> bool:
    """Whether what is held back would have been the begin of the answer's first call, and has not become one."""
    return getattr(detector, "current_tool_id", 0) < 0 and not detector.has_tool_call(detector._buffer)


def _state(detector: Any) -> tuple[Any, ...]:
    names = ("_buffer", "current_tool_id", "current_tool_name_sent")
    return (*(getattr(detector, name, None) for name in names), len(getattr(detector, "prev_tool_call_arr", ())))


def _held_text(detector: Any, content: Any, request: Any, index: int, created: int) -> Iterator[str]:
    """What looked like the begin of a call, and has no name yet."""
    from sglang.srt.entrypoints.openai.sse_utils import build_sse_content

    held = getattr(detector, "_buffer", "")
    if held.strip() and not detector.current_tool_name_sent and not detector.eot_token.startswith(held):
        detector._buffer = ""
        held = held.replace(detector.eot_token or "\0", "")
        yield build_sse_content(content["meta_info"]["id"], created, request.model, index, content=held)


def _end_arguments(detector: Any) -> None:
    """Have SGLang send the arguments up to where the model stopped, in place of a closed object."""
    if not getattr(detector, "current_tool_name_sent", False):
        return
    number, read = detector.current_tool_id, detector.prev_tool_call_arr
    sent = detector.streamed_args_for_tool
    if not 0 <= number < len(sent):
        return
    read += [{} for _ in range(number + 1 - len(read))]
    begin = _ARGUMENTS.search(detector._buffer)
    written = written_arguments(detector._buffer[begin.end() :]) if begin else ""
    read[number] = {**read[number], "arguments": written if written.startswith(sent[number]) else sent[number]}


def written_arguments(text: str) -> str:
    """The JSON value that a text begins with, as `json.dumps` spaces and escapes it, up to its end or the text's."""
    parts: list[str] = []
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        depth += (token in "{[") - (token in "}]")
        is_open = match.end() == len(text)
        parts.append(_SPACED.get(token) or (_rewritten(token, is_open) if token not in "{}[]" else token))
        if depth <= 0:
            break
    return "".join(parts).rstrip(" ")


def _rewritten(token: str, is_open: bool) -> str:
    if begin := _STRING.match(token):
        text = json.dumps(json.loads(f'{begin[0]}"'), ensure_ascii=False)
        return text if token == f'{begin[0]}"' else text[:-1]
    try:
        return token if is_open else json.dumps(json.loads(token), ensure_ascii=False)
    except ValueError:
        return token


def _drained(events: Any) -> Iterator[str]:
    """What an asynchronous iterator yields that waits for nothing."""
    while True:
        try:
            events.__anext__().send(None)
        except StopIteration as event:
            yield event.value
        except StopAsyncIteration:
            return
