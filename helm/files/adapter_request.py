"""What `helm test` runs: one request with an adapter, whose answer must name the revision that made it."""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

RETRY_S = 2.0


def main() -> str:
    """What was found wrong; empty if nothing was."""
    url, adapter = os.environ["URL"], os.environ["ADAPTER"]
    deadline = time.monotonic() + float(os.environ["TIMEOUT_S"])
    body = {
        "model": os.environ["MODEL"],
        "adapter": adapter,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "Hello"}],
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    if key := os.environ.get("API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    context = None
    if certificate := os.environ.get("CERTIFICATE"):  # the very one, by whichever name it is reached here
        context = ssl.create_default_context(cafile=certificate)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30, context=context) as answer:
                headers, usage = answer.headers, json.load(answer)["usage"]
            break
        except urllib.error.HTTPError as error:
            wrong = f"{error.code}: {error.read(2000).decode(errors='replace')}"
            if error.code not in (429, 503):
                return wrong
        except OSError as error:  # no router is ready yet
            wrong = str(error)
        if time.monotonic() + RETRY_S > deadline:
            return f"no answer in time; the last one: {wrong}"
        time.sleep(RETRY_S)
    revision, named = headers.get("x-prelude-revision"), headers.get("x-prelude-adapter")
    if not revision or not named:
        return f"the answer names no revision: x-prelude-adapter {named!r}, x-prelude-revision {revision!r}"
    if usage["completion_tokens"] < 1:
        return "the answer has no tokens"
    print(f"{named} {revision}: {usage['completion_tokens']} tokens")
    return ""


if __name__ == "__main__":
    sys.exit(main() or 0)
