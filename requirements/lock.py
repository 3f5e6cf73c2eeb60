"""Write the hashes of all pins beside this file anew: `.venv/bin/python requirements/lock.py INDEX`.

INDEX is the URL of a package index with the JSON form of PEP 691: the public one's, whose hashes these are.

Of each release, the wheels that CPython 3.11 to 3.13 can install on Linux, x86-64 and aarch64. A pin without one is an
error: pip would run the code of its source archive to build it. torch.txt has no hashes, for a reason that it states.
"""

import json
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

FILES = ("cpu", "dev", "gpu", "router", "worker")
_HASHES = re.compile(r" \\\n +--hash=\S+")
_PIN = re.compile(r"^([\w.-]+)==(\S+)$", re.MULTILINE)
_PLATFORM = re.compile(r"any|(many)?linux\w*_(x86_64|aarch64)")
_PYTHONS = {
    (tag.interpreter, tag.abi)
    for minor in (11, 12, 13)
    for tag in (
        *cpython_tags((3, minor), [f"cp3{minor}"], ["any"]),
        *compatible_tags((3, minor), f"cp3{minor}", ["any"]),
    )
}


def main(index: str) -> None:
    paths = [Path(__file__).with_name(f"{name}.txt") for name in FILES]
    texts = {path: _HASHES.sub("", path.read_text()) for path in paths}
    names = {match[1] for text in texts.values() for match in _PIN.finditer(text)}
    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(names, pool.map(lambda name: files_of(index, name), names), strict=True))
    for path, text in texts.items():
        path.write_text(_PIN.sub(lambda pin: " \\\n    ".join([pin[0], *hashes(found[pin[1]], pin[2])]), text))


def files_of(index: str, name: str) -> list[dict]:
    """What the index has of a package, of all releases."""
    url = f"{index.rstrip('/')}/{canonicalize_name(name)}/"
    request = urllib.request.Request(url, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["files"]


def hashes(files: list[dict], release: str) -> list[str]:
    found = sorted(f"--hash=sha256:{file['hashes']['sha256']}" for file in files if _fits(file["filename"], release))
    return found or sys.exit(f"no wheel of release {release} fits, of {[file['filename'] for file in files][-9:]}")


def _fits(filename: str, release: str) -> bool:
    try:
        _, version, _, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename:  # a source archive
        return False
    fitting = ((tag.interpreter, tag.abi) in _PYTHONS and _PLATFORM.fullmatch(tag.platform) for tag in tags)
    return version == Version(release) and any(fitting)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) == 2 else sys.exit(__doc__))
