"""Which certificate a process of the cluster uses, and whether it can."""

from pathlib import Path
from urllib.parse import urlsplit

from cluster.config.fields import is_loopback
from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError
from process.certificates.files import CertificateFiles, check, check_identity
from process.certificates.identity import OPERATOR, ROUTER, TRAINER, CertificateError, certified_role

_PLACEHOLDER = "{name}"


def cluster_files(config: ClusterConfig, name: str) -> CertificateFiles | None:
    """The files of one process, by its name: a worker's, `router`, `trainer` or `operator`. None without `tls`."""
    tls = config.tls
    if tls is None:
        return None
    certificate, key, ca = (Path(str(path).replace(_PLACEHOLDER, name)) for path in (tls.certificate, tls.key, tls.ca))
    return CertificateFiles(certificate, key, ca)


def client_files(config: ClusterConfig) -> CertificateFiles | None:
    """The files of the router's certificate for clients. None without `router.tls`."""
    tls = config.router.tls
    return None if tls is None else CertificateFiles(tls.certificate, tls.key)


def check_process(config: ClusterConfig, name: str) -> None:
    """Check the certificates that a process would use, or that it needs none, by its name as `cluster_files`.

    Raises ConfigError with its location. A router's or operator's certificate may have any name, a worker's its own.
    """
    worker = config.workers.get(name)
    _check_plain_text(config, name)
    files = cluster_files(config, name)
    if files is not None:
        try:
            role = name if worker is None else certified_role(worker.role, config.roles_may_change)
            check_identity(files, check(files), role, None if worker is None else name)
        except CertificateError as error:
            raise ConfigError(str(error), location=("tls", error.field)) from error
    if name == ROUTER:
        check_client_files(config)


def check_cluster(config: ClusterConfig) -> None:
    """Check the certificates of every process of cluster.yaml, as `prelude up` starts them. Raises ConfigError."""
    for name in (ROUTER, *config.workers, *(() if config.trainer is None else (TRAINER,))):
        check_process(config, name)


def _check_plain_text(config: ClusterConfig, name: str) -> None:
    """Refuse plain text beyond loopback unless `router.insecure` is set. Raises ConfigError."""
    router = config.router
    if config.trainer is not None and name in (ROUTER, TRAINER):
        _check_trainer(config, config.trainer.url)
    if router.insecure:
        return
    if name == ROUTER and router.tls is None and not is_loopback(router.host):
        raise ConfigError(
            f"{router.host} can be reached from other machines, over plain HTTP. Set `router: {{tls: {{certificate: "
            "FILE, key: FILE}}`, or host to 127.0.0.1; `router: {insecure: true}` serves in plain text",
            location=("router", "host"),
        )
    if name == ROUTER and not router.admin.insecure and not is_loopback(router.admin.host):
        raise ConfigError(
            f"{router.admin.host} can be reached from other machines, and the admin listener tells everybody there, in "
            "plain text, of all tenants. Set host to 127.0.0.1; `router: {admin: {insecure: true}}` serves there, for "
            "networks that let in operators and scrapers only",
            location=("router", "admin", "host"),
        )
    if config.tls is not None:
        return
    for worker_name, worker in config.workers.items():
        for field, host in (("host", worker.host), ("engine_host", worker.engine_host)):
            if name in (ROUTER, OPERATOR, worker_name) and host is not None and not is_loopback(host):
                raise ConfigError(
                    f"{host} can be reached from other machines, and traffic between processes is plain text. Set `tls`"
                    ' (docs/security.md: "Certificates of the cluster"), or 127.0.0.1; `router: {insecure: true}` '
                    "allows plain text",
                    location=("workers", worker_name, field),
                )


def _check_trainer(config: ClusterConfig, url: str) -> None:
    is_https, location = url.startswith("https:"), ("trainer", "url")
    if is_https is not (config.tls is not None):
        remedy = "without `tls` it is http" if is_https else "with `tls` it is https"
        raise ConfigError(f"{url} has the wrong scheme: {remedy}", location=location)
    if not (is_https or config.router.insecure or is_loopback(urlsplit(url).hostname or "")):
        raise ConfigError(
            f"{url} is on another machine, and clients' keys would go there in plain text. Set `tls`; `router: "
            "{insecure: true}` allows plain text",
            location=location,
        )


def check_client_files(config: ClusterConfig) -> None:
    """Raises ConfigError with its location."""
    files = client_files(config)
    if files is None:
        return
    try:
        check(files)
    except CertificateError as error:
        raise ConfigError(str(error), location=("router", "tls", error.field)) from error
