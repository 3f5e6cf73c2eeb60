"""Images that buildah builds and containers that podman runs, in a store of their own below one folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PROGRAMS = ("buildah", "mmdebstrap", "podman", "runc")
_LACKING = [each for each in PROGRAMS if shutil.which(each) is None] + (["root's rights"] if os.geteuid() else [])

needs_containers = pytest.mark.skipif(
    bool(_LACKING),
    reason=f"images are NOT TESTED: this needs {', '.join(_LACKING)} (on Debian: apt-get install {' '.join(PROGRAMS)})",
)

# What Debian's own image leaves out. Its Python stands in for the one that images are made on.
_LEAN = (
    *(f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in ("doc", "locale", "man")),
    '--setup-hook=mkdir -p "$1/etc/apt/apt.conf.d"',
    """--setup-hook=echo 'Dir::Cache{pkgcache "";srcpkgcache "";};' > "$1/etc/apt/apt.conf.d/docker-clean" """.strip(),
    '--customize-hook=chroot "$1" apt-get purge -y usrmerge perl-modules-5.36',
    '--customize-hook=ln -s python3 "$1/usr/bin/python"',
    "--include=python3,python3-pip,python3-venv,ca-certificates,usr-is-merged",
)


class ContainerStore:
    """Commands on the store. Raises CalledProcessError, which prints what the failing one wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        limit = ["nofile=20000:20000", "nproc=20000:20000"]  # podman's own are more than a container in one may ask for
        containers: dict[str, dict[str, Any]] = {
            "containers": {"default_ulimits": limit, "log_driver": "k8s-file"},
            "engine": {
                "cgroup_manager": "cgroupfs",
                "events_logger": "file",
                "lock_type": "file",
                "runtime": "runc",
                "tmp_dir": f"{folder}/tmp",
            },
            "network": {"network_config_dir": f"{folder}/networks"},
        }
        storage = {"storage": {"driver": "overlay", "graphroot": f"{folder}/graph", "runroot": f"{folder}/run"}}
        self._environment = dict(os.environ)
        for name, settings in (("CONTAINERS_CONF", containers), ("CONTAINERS_STORAGE_CONF", storage)):
            self._environment[name] = str(folder / name)
            (folder / name).write_text("".join(f"[{each}]\n{_toml(settings[each])}" for each in settings))

    def run(self, *words: object, timeout_s: float = 60.0) -> str:
        """Standard output of a command, such as `podman`, `images`."""
        command = list(map(str, words))
        done = subprocess.run(
            command, env=self._environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout.strip()

    def succeeds(self, *words: object) -> bool:
        command = list(map(str, words))
        return not subprocess.run(command, env=self._environment, capture_output=True, check=False).returncode

    def make_base(self, name: str) -> None:
        """An image of Debian's packages with the name of the one that a Dockerfile is made on."""
        archive = self.folder / "base.tar"
        self.run("mmdebstrap", "--variant=minbase", *_LEAN, "bookworm", archive, timeout_s=900)
        self.run("podman", "import", "--quiet", archive, name, timeout_s=300)
        archive.unlink()

    def build(self, dockerfile: Path, name: str) -> None:
        options = ("--isolation=chroot", "--format=docker", "--pull=never", f"--file={dockerfile}", f"--tag={name}")
        self.run("buildah", "build", *options, *self._registries(), ".", timeout_s=1800)

    def size(self, image: str) -> int:
        """All layers, unpacked, in bytes."""
        return json.loads(self.run("podman", "image", "inspect", image))[0]["Size"]

    def _registries(self) -> list[str]:
        """Lend a build the configuration of pip and apt here by bind mounts: empty files are all that stays of them."""
        lines = self.run(sys.executable, "-m", "pip", "config", "list").splitlines()
        pairs = [each.partition("=") for each in reversed(lines)]  # variables of the environment come last, and win
        values = {name.rpartition(".")[2]: value.strip("'") for name, _, value in pairs}
        (self.folder / "pip.conf").write_text("[global]\n" + "".join(f"{k} = {v}\n" for k, v in values.items()))
        (self.folder / "apt.conf").write_text(self.run("apt-config", "dump", "Acquire"))
        words = [word for value in values.values() for word in value.split()]
        paths = [Path(each) for each in words if each.startswith("/")]
        paths += [Path(each[7:]).parent for each in words if each.startswith("file:///")]  # and what it refers to
        mounts = [f"{path}:{path}" for path in paths if path.exists()]
        mounts += [f"{self.folder}/pip.conf:/etc/pip.conf", f"{self.folder}/apt.conf:/etc/apt/apt.conf"]
        return [f"--volume={each}:ro" for each in mounts]

    def close(self) -> None:
        self.run("podman", "system", "reset", "--force", timeout_s=300)


def _toml(table: dict[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
