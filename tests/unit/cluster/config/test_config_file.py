"""cluster.yaml: valid files are read as written, errors name file, line and remedy."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel

from cluster.config.fields import ConfigPath
from cluster.config.load import dump_cluster_config, load_cluster_config
from cluster.config.schema import ClusterConfig
from cluster.config.workers import EngineConfig
from cluster.errors import ConfigError
from cluster.local.ports import with_ports
from cluster.local.supervisor import LocalCluster

GOOD = """\
model: {path: model, name: demo}
workers:
  p: {role: prefill}
  d:
    role: decode
    engine: {max_running_requests: 7}
adapters:
  legal: {path: adapters/legal}
  acme/tone: {path: /somewhere/else}
"""
UNIFIED = """\
model: {path: model, name: demo}
workers:
  u: {role: unified}
"""


def load(folder: Path, text: str):
    path = folder / "cluster.yaml"
    path.write_text(text)
    return load_cluster_config(path)


def test_paths_start_at_the_files_folder(tmp_path: Path):
    config = load(tmp_path, GOOD)
    dump_cluster_config(config, tmp_path / "again.yaml")
    assert load_cluster_config(tmp_path / "again.yaml") == config
    assert config.model.path == tmp_path / "model"
    assert config.adapters["legal"].path == tmp_path / "adapters/legal"
    assert config.adapters["acme/tone"].path == Path("/somewhere/else")


def test_management_has_to_be_wanted(tmp_path: Path):
    assert load(tmp_path, GOOD + "router: {management: true}\n").router.management
    assert not load(tmp_path, GOOD).router.management


def test_roles_change_only_where_it_is_wanted(tmp_path: Path):
    for mode in ("manual", "dry-run", "auto"):
        found = load(tmp_path, GOOD + f"role_changes: {mode}\n")
        assert (found.role_changes, found.roles_may_change) == (mode, mode != "dry-run")
        assert found.may_be("decode", "prefill") is found.roles_may_change
    assert load(tmp_path, GOOD + "role_changes: dry-run\ntls: {ca: a, certificate: b, key: c}\n").tls is not None
    for default in ("", "role_changes: off\n", 'role_changes: "off"\n', "role_changes: false\n"):
        found = load(tmp_path, GOOD + default)
        assert (found.role_changes, found.roles_may_change) == ("off", False)
        dump_cluster_config(found, tmp_path / "again.yaml")
        assert load_cluster_config(tmp_path / "again.yaml").role_changes == "off"


@pytest.mark.parametrize("value", ["&a {b: *a}", "&a [[*a]]", "&a {<<: *a}"])
def test_a_section_that_contains_itself_is_refused(tmp_path: Path, value: str):
    with pytest.raises(ConfigError, match=r"cluster\.yaml:10: this section contains itself"):
        load(tmp_path, GOOD + f"engine: {value}\n")


def test_a_section_may_be_repeated(tmp_path: Path):
    """Also many times over: each alias is looked at once."""
    doubled = "".join(f"x{i}: &x{i} [*x{i - 1}, *x{i - 1}]\n" for i in range(1, 40))
    with pytest.raises(ConfigError, match="x0"):
        load(tmp_path, f"{GOOD}x0: &x0 [1]\n{doubled}")


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = load(tmp_path, GOOD.replace("adapters/legal", "~/legal"))
    assert config.adapters["legal"].path == tmp_path / "home/legal"


def path_fields(hint: Any, where: str) -> Iterator[tuple[str, bool]]:
    """Every path below a type, and whether it is a ConfigPath."""
    if hint == ConfigPath:
        yield where, True
    elif isinstance(hint, type) and issubclass(hint, Path):
        yield where, False
    elif isinstance(hint, type) and issubclass(hint, BaseModel):
        for name, part in get_type_hints(hint, include_extras=True).items():
            if get_origin(part) is not ClassVar:
                yield from path_fields(part, f"{where}.{name}")
    else:
        for part in get_args(hint):
            yield from path_fields(part, where)


def test_every_path_is_resolved_by_its_type():
    found = dict(path_fields(ClusterConfig, "cluster"))
    assert found["cluster.model.path"]
    assert [where for where, resolved in found.items() if not resolved] == []


def test_engine_overrides_hold_no_path():
    """A worker's `engine` section is validated each time it is applied, when the file's folder is no longer known."""
    assert list(path_fields(EngineConfig, "engine")) == []


def test_an_operator_can_know_all_fields():
    """Those that several sections inherit count in each."""
    schema = ClusterConfig.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    assert 100 < sum(len(each.get("properties", ())) for each in sections) <= 162


def test_the_disk_cache_outlives_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whether it is configured or not, its folder is not removed with the cluster."""
    assert load(tmp_path, GOOD).residency.disk_directory == tmp_path / ".prelude" / "cache"
    named = load(tmp_path, GOOD + "residency: {disk_directory: fast/disk}\n")
    assert named.residency.disk_directory == tmp_path / "fast" / "disk"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for config in (named, load(tmp_path, GOOD)):
        assert LocalCluster(config, tmp_path / "logs").config.residency == config.residency
    nowhere = ClusterConfig.model_validate(
        {"model": {"path": tmp_path, "name": "m"}, "workers": {"u": {"role": "unified"}}}
    )
    cluster = LocalCluster(nowhere, tmp_path / "logs")
    assert cluster.config.residency.disk_directory == cluster._run_dir / "cache"


def test_open_ports_are_filled_and_differ(tmp_path: Path):
    config = with_ports(load(tmp_path, GOOD.replace("{role: prefill}", "{role: prefill, engine_port: 7321}")))
    assert config.workers["p"].engine_port == 7321
    assert config.workers["d"].bootstrap_port == 0
    ports = [config.router.port, config.workers["p"].bootstrap_port]
    for worker in config.workers.values():
        ports += [worker.control_port, worker.metrics_port, worker.engine_port]
    assert 0 not in ports
    assert len(set(ports)) == len(ports)


PAIR = "  p: {role: prefill}\n  d: {role: decode}\n"


DISCOVERED = "model: {path: model, name: demo}\ndiscovery: {unified: {dns: unified.example.org, control_port: 9000}}\n"
TOO_DEEP = "[" * 3000


BAD = {
    "no file": (None, ("there is no such file; `prelude init` writes one, --config names another",)),
    "not YAML": ("model: {path: x\nworkers: [", (":2:", "not YAML")),
    "a date that is none": (GOOD + "log_level: 2026-13-45\n", (":10:", "2026-13-45 is no timestamp", "quote it")),
    "a number that is none": (GOOD + "log_level: !!int many\n", (":10:", "many is no int")),
    "what looks like a template": (GOOD.replace("path: model", "path: {{model}}"), (":1: a key is {…}", "quotes")),
    "too deep": (TOO_DEEP, ("nested too deeply",)),
    "what nobody sees": (GOOD.replace("name: demo", "name: demo\u200b"), (":1: 'demo\\u200b' has an invisible",)),
    "the same in a key": (GOOD.replace("legal:", "le\u00a0gal:"), (":8: 'le\\xa0gal' has an invisible",)),
    "half a character": (GOOD.replace("path: model", 'path: "\\ud800"'), ("has an invisible character",)),
    "an empty section": (GOOD + "router:\n", (":10: router: it is empty; remove it",)),
    "a host in brackets": (GOOD + "router: {host: '[::1]'}\n", ("router.host: expected a host's name", "'[::1]'")),
    "a host with its port": (GOOD + "router: {admin: {host: 'a:80'}}\n", ("admin.host: expected", "'a:80'")),
    "no host": (GOOD.replace("prefill}", "prefill, host: ''}"), (":3: workers.p.host: expected", "found ''")),
    "a URL for a host": (
        GOOD.replace("prefill}", "prefill, engine_host: 'http://a'}"), (":3: workers.p.engine_host: expected",),
    ),
    "a time without an end": (GOOD + "router: {drain_timeout_s: .inf}\n", ("drain_timeout_s", "604800", "inf")),
    "an issuer that is not there": (
        GOOD + "router: {auth: {oidc: [{issuer: '', audience: a}]}}\n", ("issuer: expected a URL", "found ''"),
    ),
    "a URL that a template left empty": (GOOD + "catalog: {url: ''}\n", (":10: catalog.url", "at least 1 character")),
    "the same of the store": (GOOD + "store: {url: ''}\n", (":10: store.url", "at least 1 character")),
    "a projection that is none": (
        GOOD + "adapter_limits:\n  target_modules: [q_proj,\n    qq_proj]\n",
        (":12: adapter_limits.target_modules.1: Input should be 'q_proj', 'k_proj',", "(found 'qq_proj')"),
    ),
    "no projection": (GOOD + "adapter_limits: {target_modules: []}\n", ("target_modules", "at least 1 item")),
    "a worker called as the router": (
        UNIFIED.replace("  u:", "  router:"), ("workers.router: that name is another process's certificate",),
    ),
    "an override of workers that are found": (
        DISCOVERED.replace("9000}", "9000, worker: {engine: {max_total_token: 7}}}"),
        ("discovery.unified.worker.engine.max_total_token: there is no such field; did you mean max_total_tokens?",),
    ),
    "a list": ("- 1\n", (":1:", "mapping")),
    "a misspelt key of a worker": (
        GOOD.replace("role: decode", "roll: decode"), (":5:", "d.roll: there is no such field; did you mean role?"),
    ),
    "a wrong role": (GOOD.replace("role: decode", "role: both"), (":5:", "workers.d.role", "'both'", "unified")),
    "a port out of range": (GOOD.replace("prefill}", "prefill, engine_port: 70000}"), (":3:", "65535", "70000")),
    "no decode worker": (GOOD.replace("role: decode", "role: prefill"), ("no decode worker", "unified")),
    "no prefill worker": (UNIFIED + "  d: {role: decode}\n", ("no prefill worker for the decode workers",)),
    "roles by nobody": (GOOD + "role_changes: sometimes\n", ("role_changes", "'off', 'manual'", "'sometimes'")),
    "a name that YAML reads as a boolean": (GOOD + "router: {hosts: [on]}\n", ("True", "write it in quotes")),
    "a key that YAML reads as a boolean": (GOOD.replace("legal", "no"), ("adapters", "False", "write it in quotes")),
    "unified's bootstrap port": (UNIFIED.replace("unified", "unified, bootstrap_port: 9"), ("u.bootstrap_port",)),
    "no model": (GOOD.replace("model:", "modell:", 1), ("model", "required", ":1: modell:", "did you mean model?")),
    "a misspelt section": (GOOD + "Routr: {}\n", (":10: Routr: there is no such field; did you mean router?",)),
    "a misspelt key below": (
        GOOD + "router: {quotas: {tenants: {acme: {request_per_s: 1}}}}\n", ("did you mean requests_per_s?",),
    ),
    "what is like no key": (GOOD + "store: {bucket: x}\n", ("there is s3_endpoint_url, s3_profile, s3_region,",)),
    "a misspelt override": (
        GOOD.replace("max_running_requests: 7", "max_runing_requests: 7"), ("did you mean max_running_requests?",),
    ),
    "a bad override": (GOOD.replace("max_running_requests: 7", "max_running_requests: no"), ("workers.d.engine",)),
    "an adapter's name": (GOOD.replace("legal:", "'le:gal':"), ("le:gal",)),
    "an adapter called like the model": (GOOD.replace("legal:", "demo:"), ("adapters.demo", "base model's name")),
    "the same with its tenant": (GOOD.replace("legal:", "default/demo:"), ("default/demo", "base model's name")),
    "the same key twice": (GOOD + "model: {path: y, name: z}\n", (":10:", "line 1")),
    "no whole pages": (
        GOOD.replace("max_running_requests: 7", "kv_page_tokens: 64, chunked_prefill_tokens: 100"),
        ("workers.d.engine", "100; give a multiple of kv_page_tokens, 64"),
    ),
    "an odd page": (GOOD.replace("max_running_requests: 7", "kv_page_tokens: 48"), ("48; give a power of two",)),
    "pages that differ": (
        GOOD.replace("max_running_requests: 7", "kv_page_tokens: 64"),
        ("their kv_page_tokens differ (p 1, d 64); set it in `engine`",),
    ),
    "pages that differ from those of workers that are found": (
        GOOD.replace("  d:", "  decode:")
        + "discovery: {decode: {dns: d.example.org, control_port: 9000, worker: {engine: {kv_page_tokens: 16}}}}\n",
        ("discovery.decode 16, p 1, decode 1",),
    ),
    "nobody's home": (GOOD.replace("/somewhere/else", "~no-such-user/x"), (":9:", "acme/tone.path", "~no-such-user")),
    "experts over all": (
        UNIFIED + "adapter_limits: {max_rank: 4, max_expert_rank: 8}\n", ("max_expert_rank is 8", "raise max_rank"),
    ),
    "what became a constant": (GOOD + "router: {heartbeat_s: 1}\n", (":10:", "heartbeat_s: it is a constant")),
    "what a worker cannot override any more": (
        GOOD.replace("role: prefill", "role: prefill, engine: {more_arguments: [--x]}"),
        ("workers.p.engine.more_arguments: it is gone since 0.2.0; use extra_arguments",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors_name_line_and_remedy(tmp_path: Path, name: str):
    text, words = BAD[name]
    path = tmp_path / "cluster.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_cluster_config(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


def test_a_folder_whose_name_would_end_the_catalogs_url_is_refused(tmp_path: Path):
    """The catalog would be a file elsewhere."""
    folder = tmp_path / "what?"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"what\?/cluster.yaml: the path of its folder has a \?"):
        load(folder, UNIFIED)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1%eth0", "node-7.example.org.", "node_7", "localhost"])
def test_hosts_are_addresses_and_names(tmp_path: Path, host: str):
    config = load(tmp_path, UNIFIED.replace("unified}", f"unified, host: '{host}'}}"))
    assert config.workers["u"].host == host


def test_the_catalogs_url_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert load(tmp_path, UNIFIED).catalog.url == f"sqlite:///{tmp_path}/.prelude/catalog.db"
    monkeypatch.setenv("PRELUDE_CATALOG_URL", "postgresql://user:secret@database/prelude")
    assert load(tmp_path, UNIFIED).catalog.url == "postgresql://user:secret@database/prelude"
    given = load(tmp_path, UNIFIED + "catalog: {url: sqlite:////elsewhere/catalog.db}\n")
    assert given.catalog.url == "sqlite:////elsewhere/catalog.db"


def test_a_cluster_that_only_discovers_workers_makes_no_keys(tmp_path: Path):
    """Each of its routers would make its own, and its workers would trust none of them."""
    assert load(tmp_path, UNIFIED).integrity.key_directory == tmp_path / ".prelude" / "signing"
    assert load(tmp_path, DISCOVERED).integrity.key_directory is None
