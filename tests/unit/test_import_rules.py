"""Who may import whom (docs/architecture.md, "Layout")."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the bottom up. A room imports rooms of lower lines and itself, nothing beside or above it. A room is a folder or,
# where a package's own modules stand at different heights, one of them.
LAYERS = """
process process.certificates.identity
process.certificates
adapters.errors adapters.scopes
adapters.identity adapters.model adapters.files
adapters.formats.folder
adapters.formats.json_file
adapters.formats.safetensors_file adapters.formats.origin adapters.formats.lineage adapters.formats.positions
adapters.formats.peft
adapters.formats
adapters.catalog adapters.store
adapters.catalog.sql
adapters.packed adapters.backup
adapters adapters.verification
samples
training.errors
training.tree
training.trainable
training.data
training
training.loop
training.runs
training.conversion training.executor
training.service
engine.access engine.errors engine.pin engine.step_times engine.vital_signs engine.cpu_support
engine.client engine.adapter_slots
engine.hooks.requests
engine.hooks
engine.plugin
engine.arguments
engine
cluster.errors
cluster.config
cluster.integrity
cluster.open_library cluster.control cluster.host_memory
cluster.discovery
cluster.agent
cluster cluster.local
cluster.planning
router.collectors router.alias_split
router.errors router.metrics router.http
router.public_errors router.protocol
router.identity
router.fleet router.quotas
router.placement router.revisions
router.generation
router.api router.management router.console
router
prefill_worker.residency.errors prefill_worker.residency.threads prefill_worker.residency.acceptance
prefill_worker.residency.metrics
prefill_worker.residency.tiers
prefill_worker.residency.loading
prefill_worker.residency
prefill_worker decode_worker
observability
bench.errors
bench.measuring bench.workloads
bench.load
bench.systems
bench
cli.libraries cli.agents cli.bench.arguments
cli.bench.load
cli.bench.matrix
cli.adapters cli.bench cli.train
cli
""".strip().splitlines()
HEIGHTS = {room: height for height, layer in enumerate(LAYERS) for room in layer.split()}
PACKAGES = {room.partition(".")[0] for room in HEIGHTS}
WORKERS_AND_ROUTER = ("prefill_worker", "decode_worker", "router")  # they meet over the network only

# What only these packages import.
EXTERNAL = {
    "sglang": {"engine"},
    "torch": {"adapters", "samples", "training", "engine", "cluster", "bench"},
    "uvicorn": {"process", "router", "training"},
}
MAX_MODULES = 16  # in a folder


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {module_of(path): path for package in sorted(PACKAGES) for path in sorted((ROOT / package).rglob("*.py"))}


def room_of(module: str) -> str:
    """The innermost room that a module is in."""
    while module not in HEIGHTS:
        module, dot, _ = module.rpartition(".")
        assert dot, "no room"
    return module


@functools.cache
def imports(path: Path) -> set[str]:
    """Dotted names that a module imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def own_imports(module: str) -> set[str]:
    """Modules of ours that a module imports."""
    found = set()
    for name in imports(SOURCES[module]):
        source = name if name in SOURCES else name.rpartition(".")[0]
        if source in SOURCES:
            found.add(source)
    return found - {module}


def test_imports_go_down():
    for module in SOURCES:
        room = room_of(module)
        for imported in own_imports(module):
            other = room_of(imported)
            assert other == room or HEIGHTS[other] < HEIGHTS[room], f"{module} imports {imported}"
            apart = {module.partition(".")[0], imported.partition(".")[0]} - {room.partition(".")[0]}
            if module.startswith(WORKERS_AND_ROUTER):
                assert not apart & set(WORKERS_AND_ROUTER), f"{module} imports {imported}"


def test_no_circle():
    """Nor inside a room."""
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above[above.index(module) :], module))
        if module not in done:
            for imported in own_imports(module):
                visit(imported, (*above, module))
            done.add(module)

    for module in SOURCES:
        visit(module, ())


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTERNAL)
def test_heavy_libraries_stay_where_they_belong(name: str):
    for module, path in SOURCES.items():
        if module.partition(".")[0] not in EXTERNAL[name]:
            assert name not in {each.partition(".")[0] for each in imports(path)}, f"{module} imports {name}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    ["router.server", "prefill_worker.agent", "prefill_worker.unified_agent", "decode_worker.agent", "cli.main"],
)
def test_a_process_does_not_load_what_it_does_not_need(module: str):
    """Also not by way of somebody else."""
    absent = ("sglang", "torch", "transformers", "opentelemetry")
    absent += ("engine",) if module in ("router.server", "cli.main") else ()
    code = f"import sys, {module}; sys.exit(', '.join(n for n in {absent!r} if n in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_plugin_leaves_prometheus_to_sglang():
    """prometheus_client asks at its import where metrics go: before SGLang has said it, an engine would show none."""
    code = "import sys, engine.plugin, engine.hooks.installation; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_every_room_exists_and_no_package_is_left_out():
    folders = {".".join(path.relative_to(ROOT).parent.parts) for path in SOURCES.values()}
    assert {room for room in HEIGHTS if room not in SOURCES and room not in folders} == set()
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == PACKAGES


def test_packages_below_the_top_have_an_init_only_where_it_holds_code():
    """docs/architecture.md says what is in each folder; a stranger's top-level folder must not become part of ours."""
    inits = [path for path in SOURCES.values() if path.name == "__init__.py" and path.parent.parent != ROOT]
    assert [path for path in inits if len(ast.parse(path.read_text()).body) < 2] == []


def test_no_folder_is_crowded():
    for top in (*(ROOT / package for package in PACKAGES), ROOT / "tests"):
        for folder in (top, *(path for path in top.rglob("*") if path.is_dir())):
            modules = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
            assert len(modules) <= MAX_MODULES, f"{folder.relative_to(ROOT)} has {len(modules)} modules"
