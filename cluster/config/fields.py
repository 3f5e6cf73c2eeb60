"""Shared by the sections of `cluster.yaml`: field types, and the resolution of paths."""

import re
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo


def is_loopback(host: str) -> bool:
    """Whether a server at this address can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_dns_name(text: str) -> bool:
    """Whether it has the form of a name in DNS. Resolves nothing."""
    labels = text.removesuffix(".").split(".")
    return len(text) <= 253 and all(
        re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?", each) for each in labels
    )


def check_host(text: str) -> str:
    """The address or name of a host. Raises ValueError for anything else, such as a URL."""
    try:
        ip_address(text)
    except ValueError:
        if not is_dns_name(text):
            raise ValueError("expected a host's name or IP address, without scheme, brackets or port") from None
    return text


def host_of(address: str) -> str:
    """The host of HOST:PORT; an IPv6 address without its brackets."""
    return address.rpartition(":")[0].strip("[]")


def _resolve_path(path: Path, info: ValidationInfo) -> Path:
    """Expand `~`, and resolve against the context's `folder` where there is one."""
    try:
        path = path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"the home directory of {path.parts[0]} is unknown") from error
    folder: Path | None = (info.context or {}).get("folder")
    return path if folder is None else folder / path


# Every path of cluster.yaml: relative ones start at the file's folder, which `load_cluster_config` passes as context.
ConfigPath = Annotated[Path, AfterValidator(_resolve_path)]


Host = Annotated[str, AfterValidator(check_host)]


NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"


Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]


LAST_PORT = 65535


Port = Annotated[int, Field(ge=0, le=LAST_PORT)]  # 0: `prelude up` picks a free port


MAX_DURATION_S = 7 * 86400.0  # agents refuse longer ones


Seconds = Annotated[float, Field(gt=0, le=MAX_DURATION_S)]


MAX_NAME = 63  # characters of a Name


class Section(BaseModel):
    """A section. Its ClassVars are constants: its readers find them beside its fields, and the file cannot set them."""

    model_config = ConfigDict(extra="forbid", frozen=True)
