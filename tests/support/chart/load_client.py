"""Asks a router without a pause and prints a line for each request: what was wrong with its answer.

`python load_client.py URL STOP` ends when there is a file STOP. A pod runs it as `python -c`, with nothing installed.
"""

import http.client
import json
import os
import sys
import threading
import urllib.request

NUM_THREADS = 4  # each repeats one question; those of the last two stream


def ask(url: str, number: int) -> str:
    """The text of an answer. Raises ValueError if it is not whole."""
    body = {
        "model": "demo",
        "adapter": f"a{number % 2}",
        "max_tokens": 16,
        "temperature": 0,
        "stream": number > 1,
        "messages": [{"role": "user", "content": f"Hello {number}"}],
    }
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = answer.read().decode()
    try:
        if number > 1:
            *events, end = [line.removeprefix("data: ") for line in found.splitlines() if line]
            if end != "[DONE]":
                raise ValueError
            choices = [choice for event in events for choice in json.loads(event)["choices"]]
            return "".join(choice["delta"].get("content") or "" for choice in choices)
        return json.loads(found)["choices"][0]["message"]["content"] or ""
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"not a whole answer: {found[-500:]}") from error


def work(url: str, stop: str, number: int) -> None:
    first = None
    while not os.path.exists(stop):
        wrong = ""
        try:
            text = ask(url, number)
            first = text if first is None else first
            if text != first:
                wrong = f"another answer than the first: {text!r}, not {first!r}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            wrong = f"{error!r} {error.read()[:500] if hasattr(error, 'read') else ''}"
        os.write(1, (json.dumps(wrong) + "\n").encode())  # at once, as several threads write


def wrong_answers(printed: str) -> list[str]:
    """What was wrong, of all requests whose lines these are. Raises AssertionError if there are none."""
    ended = [json.loads(line) for line in printed.splitlines()]
    assert ended, "the client has asked nothing"
    return [wrong for wrong in ended if wrong]


if __name__ == "__main__":
    for each in range(NUM_THREADS):
        threading.Thread(target=work, args=(*sys.argv[1:], each)).start()
