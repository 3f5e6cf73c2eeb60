"""`prelude certs init | issue | renew`: certificates for a cluster that has no other authority."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.adapters.outcome import REFUSED, add_command, add_group, fail, failures_end, print_result

if TYPE_CHECKING:
    from process.certificates.authority import Authority

_CA_DAYS, _DAYS, _WITHIN_DAYS = 3650.0, 90.0, 30.0
_DAY_S = 86400.0


def add_commands(commands: Any) -> None:
    """Add `certs` and its subcommands to the command line."""
    text = "Create and renew the certificates with which processes of a cluster authenticate each other."
    subcommands = add_group(commands, "certs", text)
    init = add_command(subcommands, "init", _init, "Create a certificate authority. Its key stays in the folder.")
    init.add_argument("--trust-domain", metavar="NAME", help="of the SPIFFE IDs; default: prelude.local")
    _add_days(init, _CA_DAYS)
    issue = add_command(
        subcommands,
        "issue",
        _issue,
        "Issue certificates for `router`, `operator` and what cluster.yaml names.",
    )
    issue.add_argument("names", metavar="NAME", nargs="*", help="default: all that have no certificate yet")
    issue.add_argument(
        "--host",
        action="append",
        type=_host,
        default=[],
        help="a name or address under which clients reach it; repeatable",
    )
    _add_days(issue, _DAYS)
    renew = add_command(
        subcommands, "renew", _renew, "Issue certificates again that expire soon. Running processes take the new ones."
    )
    renew.add_argument(
        "--within",
        type=_days,
        default=_WITHIN_DAYS,
        metavar="DAYS",
        help=f"renew certificates that expire within DAYS; default: {_WITHIN_DAYS:g}",
    )
    _add_days(renew, _DAYS)
    for command in (init, issue, renew):
        command.add_argument("--folder", type=Path, help="default: `certs` beside cluster.yaml")


def _add_days(command: argparse.ArgumentParser, default: float) -> None:
    command.add_argument("--days", type=_days, default=default, help=f"how long it is valid; default: {default:g}")


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 < days <= 36500:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days between 0 and 36500")
    return days


def _host(text: str) -> str:
    from cluster.config.fields import check_host

    try:
        check_host(text.removeprefix("*."))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; found {text!r}") from None
    return text


@contextmanager
def _authority(arguments: argparse.Namespace) -> Iterator[Authority]:
    from process.certificates.authority import Authority
    from process.certificates.identity import CertificateError

    folder = (arguments.folder or arguments.config.resolve().parent / "certs").resolve()
    try:
        with failures_end(arguments):
            yield Authority(folder)
    except CertificateError as error:
        fail(arguments, REFUSED, "certificate", str(error))


def _init(arguments: argparse.Namespace) -> None:
    from process.certificates.identity import TRUST_DOMAIN, Identity

    trust_domain = arguments.trust_domain or TRUST_DOMAIN
    with _authority(arguments) as authority:
        try:
            Identity.parse(Identity("router", "router", trust_domain).uri)
        except ValueError:
            text = f"--trust-domain {trust_domain!r} must be lower-case letters, digits, '.', '_' and '-'"
            fail(arguments, 2, "wrong_usage", text)
        authority.init(trust_domain=trust_domain, days=arguments.days)
    folder = authority.folder
    lines = [
        f"{authority.certificate} is the authority of {trust_domain}. Keep {authority.key} off the cluster's hosts.",
        "",
        "Next: `prelude certs issue`, and in cluster.yaml:",
        "",
        "tls:",
        f"  ca: {folder / 'ca.crt'}",
        f"  certificate: {folder}/{{name}}.crt",
        f"  key: {folder}/{{name}}.key",
    ]
    print_result(arguments, {"ca": str(authority.certificate), "trust_domain": trust_domain}, lines)


def _issue(arguments: argparse.Namespace) -> None:
    from cluster.config.load import load_cluster_config
    from cluster.errors import ConfigError
    from process.certificates.identity import OPERATOR, ROUTER, TRAINER, Identity, certified_role

    with _authority(arguments) as authority:
        config = load_cluster_config(arguments.config)
        roles = {ROUTER: ROUTER, OPERATOR: OPERATOR}
        roles |= {name: certified_role(each.role, config.roles_may_change) for name, each in config.workers.items()}
        if config.trainer is not None:
            roles[TRAINER] = TRAINER
        for name in arguments.names:
            if name not in roles:
                raise ConfigError(f"{arguments.config}: there is no {name!r}; there is {', '.join(roles)}")
        trust_domain = authority.trust_domain
        names = arguments.names or [name for name in roles if not (authority.folder / f"{name}.crt").exists()]
        issued = {}
        for name in names:
            identity = Identity(roles[name], name, trust_domain)
            certificate, _ = authority.issue(identity, hosts=arguments.host, days=arguments.days)
            issued[name] = {"certificate": str(certificate), "identity": identity.uri}
    lines = [f"{each['certificate']}: {each['identity']}" for each in issued.values()] or ["nothing to issue"]
    print_result(arguments, {"issued": issued}, lines)


def _renew(arguments: argparse.Namespace) -> None:
    from process.certificates.files import not_after
    from process.certificates.identity import CertificateError

    with _authority(arguments) as authority:
        limit = time.time() + arguments.within * _DAY_S
        renewed, failed = [], []
        for path in authority.issued():
            try:
                if not_after(path).timestamp() <= limit:
                    authority.renew(path, arguments.days)
                    renewed.append(str(path))
            except CertificateError as error:  # of one of them, which is no reason to let the others expire
                failed.append(str(error))
        if failed:
            fail(arguments, REFUSED, "certificate", "; ".join(failed), renewed=renewed)
    print_result(arguments, {"renewed": renewed}, renewed or ["nothing to renew"])
