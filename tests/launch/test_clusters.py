"""The files of examples/clusters start what they say, on stand-ins for what starts processes there.

Each is run as its system runs it, with the variables that this sets, on nodes that are all this machine. The
manifests were once read by the models of kubeflow-trainer-api 2.3.0, which know the keys of JobSet and of TrainJob.

By default `colossus` on their PATH writes down its words and variables, with which a forked launcher is started then;
with ``-m long`` it is the command itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.forked import ForkedPython
from helpers.launching import ROOT, TINY, environment, finish, rows_of
from helpers.ports import free_port

FILES = ROOT / "examples" / "clusters"

#: what srun does with a step of one task on each of two nodes: https://slurm.schedmd.com/srun.html
SRUN = """\
#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
for node in 0 1; do
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE='1(x2)' \\
        SLURM_PROCID=$node SLURM_NODEID=$node SLURM_LOCALID=0 "$@" &
    tasks+=($!)
done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit "$code"
"""

#: the part of Ray's API that the script uses, on threads
RAY = """\
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

class Remote:
    def __init__(self, function): self.function = function
    def options(self, **options): return self
    def remote(self, *words): return POOL.submit(self.function, *words)

POOL = ThreadPoolExecutor()
def remote(function=None, **options): return Remote(function) if function else Remote
def get(refs): return [ref.result() for ref in refs] if isinstance(refs, list) else refs.result()
def init(): pass
"""
RAY_UTIL = """\
from concurrent.futures import Future
def get_node_ip_address(): return "127.0.0.1"
class placement_group:
    def __init__(self, bundles, strategy):
        assert strategy == "STRICT_SPREAD" and len(bundles) == 2
    def ready(self):
        future = Future()
        future.set_result(None)
        return future
"""
RAY_STRATEGIES = "class PlacementGroupSchedulingStrategy:\n    def __init__(self, group, **options): pass\n"

SHORT = ["parallel.data=2", "train.steps=2", "checkpoint.every=2"]


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """Return a folder for the PATH in which `colossus` and `torchrun` are those of this Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, module in {"colossus": "colossus", "torchrun": "torch.distributed.run"}.items():
        _command(folder / name, f'#!/usr/bin/env bash\nexec "{sys.executable}" -m {module} "$@"\n')
    return folder


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """Return the folder in which `colossus` on the PATH writes down how it is called."""
    (tmp_path / "bin").mkdir()
    folder = tmp_path / "calls"
    folder.mkdir()
    lines = f'printf "%s\\0" "$@" > "{folder}/$$.words"', f'env -0 > "{folder}/$$.variables"'
    _command(tmp_path / "bin" / "colossus", "\n".join(("#!/usr/bin/env bash", *lines, "")))
    return folder


def _launch_called(calls: Path, cwd: Path, number: int) -> list[str]:
    """Start what was called, all at once, and return what each has printed."""
    launchers = []
    for file in calls.glob("*.words"):
        words = file.read_text().split("\0")[:-1]
        pairs = (pair.partition("=") for pair in file.with_suffix(".variables").read_text().split("\0") if pair)
        env = {name: value for name, _, value in pairs}
        launchers.append(ForkedPython([sys.executable, "-m", "colossus", *words], env=env, cwd=cwd, pipes=True))
    assert len(launchers) == number
    ended = [finish(launcher) for launcher in launchers]
    assert all(code == 0 for code, _, _ in ended), ended
    return [out for _, out, _ in ended]


def _command(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _start(tmp_path: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = environment(PATH=path, **more)
    return subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish(*processes: subprocess.Popen[str]) -> list[str]:
    ended = [(*process.communicate(), process.returncode) for process in processes]
    assert all(code == 0 for _, _, code in ended), ended
    return [out for out, _, _ in ended]


def _container(name: str) -> dict[str, Any]:
    manifest = yaml.safe_load((FILES / name).read_text())
    if manifest["kind"] == "TrainJob":
        return manifest["spec"]["trainer"]  # type: ignore[no-any-return]
    (job,) = manifest["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return container  # type: ignore[no-any-return]


def _words(container: dict[str, Any], folder: Path, **replaced: str) -> list[str]:
    """Return the command of a container on this machine: its paths are in a folder, some options have other values."""
    words = [word.replace("/runs/", f"{folder}/runs/") for word in (*container["command"], *container["args"])]
    words = [str(TINY) if word == "/job/config.py" else word for word in words]
    for option, value in replaced.items():
        (at,) = (at for at, word in enumerate(words) if word.startswith(f"--{option.replace('_', '-')}="))
        words[at] = f"{words[at].partition('=')[0]}={value}"
    return [*words, "parallel.data=2", "train.steps=2"]


# -- SLURM ------------------------------------------------------------------------------------------------------


JOB = dict(SLURM_JOB_ID="77", SLURM_JOB_NUM_NODES="2", SLURM_GPUS_ON_NODE="1", SLURM_CPUS_PER_TASK="1")


@pytest.mark.parametrize("folder", ["calls", pytest.param("commands", marks=pytest.mark.long)])
def test_slurm_trains(folder: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    called: Path = request.getfixturevalue(folder)
    _command(tmp_path / "bin" / "srun", SRUN)
    _command(tmp_path / "bin" / "scontrol", '#!/usr/bin/env bash\necho "scontrol $*"\n')
    job = dict(SLURM_JOB_NODELIST="localhost", MASTER_PORT=str(free_port()), ENVIRONMENT="BATCH")
    (out,) = _finish(_start(tmp_path, "bash", str(FILES / "slurm.sh"), str(TINY), *SHORT, **JOB, **job))
    assert "scontrol" not in out
    if folder == "calls":
        _launch_called(called, tmp_path, 2)
    assert [row["step"] for row in rows_of(tmp_path / "runs" / "pretrain-77")] == [1, 2]


def test_slurm_asks_for_another_try(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    _command(tmp_path / "bin" / "scontrol", '#!/usr/bin/env bash\necho "scontrol $*"\n')
    for code, is_requeued in ((143, True), (1, True), (2, False)):
        _command(tmp_path / "bin" / "srun", f"#!/usr/bin/env bash\nexit {code}\n")
        process = _start(tmp_path, "bash", str(FILES / "slurm.sh"), str(TINY), **JOB)
        out, _ = process.communicate()
        assert process.returncode == code
        assert (out == "scontrol requeue 77\n") == is_requeued


def test_slurm_asks_for_what_the_script_uses() -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", (FILES / "slurm.sh").read_text(), re.MULTILINE))
    assert options["ntasks-per-node"] == "1"
    assert options["signal"].startswith("USR1@")
    assert {"nodes", "gpus-per-node", "requeue"} <= options.keys()


# -- torchrun, Kubernetes, SkyPilot, Ray ------------------------------------------------------------------------


@pytest.mark.long
def test_torchrun_trains(tmp_path: Path, commands: Path) -> None:
    script = (FILES / "torchrun.sh").read_text().replace("29500", str(free_port()))
    _command(commands / "torchrun.sh", script)
    _finish(_start(tmp_path, "torchrun.sh", str(TINY), *SHORT, HEAD="localhost", NODES="1", GPUS="2"))
    assert [row["step"] for row in rows_of(tmp_path / "runs" / "pretrain")] == [1, 2]


def test_torchrun_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    process = _start(tmp_path, "bash", str(FILES / "torchrun.sh"), str(TINY), NODES="1", GPUS="2")
    assert "HEAD: the host name of one of the nodes" in process.communicate()[1]


def test_the_jobset_is_one_job_whose_pods_meet() -> None:
    manifest = yaml.safe_load((FILES / "jobset.yaml").read_text())
    assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    (job,) = manifest["spec"]["replicatedJobs"]
    spec, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    container = _container("jobset.yaml")
    options = dict(word.removeprefix("--").split("=") for word in container["args"] if word.startswith("--"))
    assert int(options["nnodes"]) == spec["parallelism"] == spec["completions"]
    assert int(options["nproc"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    name = manifest["metadata"]["name"]
    assert options["rdzv-endpoint"].split(":")[0] == f"{name}-{job['name']}-0-0.{name}"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]


@pytest.mark.parametrize("is_dry", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_pods_of_the_jobset_train(is_dry: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue("calls" if is_dry else "commands")
    words = _words(_container("jobset.yaml"), tmp_path, nproc="1", rdzv_endpoint=f"localhost:{free_port()}")
    if is_dry:
        _finish(_start(tmp_path, *words, "--dry-run"))
        (out,) = _launch_called(folder, tmp_path, 1)
        assert "processes   1 on each of 2 nodes" in out
        return
    _finish(_start(tmp_path, *words), _start(tmp_path, *words))
    assert [row["step"] for row in rows_of(tmp_path / "runs" / "pretrain")] == [1, 2]


def test_the_trainjob_calls_torchrun() -> None:
    manifest = yaml.safe_load((FILES / "trainjob.yaml").read_text())
    assert manifest["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert manifest["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = _container("trainjob.yaml")
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert trainer["command"][:4] == ["torchrun", "-m", "colossus", "launch"]


@pytest.mark.long
def test_the_nodes_of_the_trainjob_train(tmp_path: Path, commands: Path) -> None:
    words = _words(_container("trainjob.yaml"), tmp_path)
    nodes = dict(PET_NNODES="2", PET_NPROC_PER_NODE="1", PET_MASTER_ADDR="localhost", PET_MASTER_PORT=str(free_port()))
    _finish(*(_start(tmp_path, *words, PET_NODE_RANK=str(node), **nodes) for node in range(2)))
    assert [row["step"] for row in rows_of(tmp_path / "runs" / "pretrain")] == [1, 2]


@pytest.mark.parametrize("is_dry", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_machines_of_skypilot_train(is_dry: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue("calls" if is_dry else "commands")
    task = yaml.safe_load((FILES / "sky.yaml").read_text())
    assert task.keys() == {"name", "workdir", "num_nodes", "resources", "envs", "volumes", "setup", "run"}
    assert list(task["volumes"]) == ["/runs"]
    script = task["run"].replace("/runs/", f"{tmp_path}/runs/").replace("29500", str(free_port()))
    script = script.replace("checkpoint.every=500", " ".join(SHORT) + (" --dry-run" if is_dry else ""))
    machine = dict(SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.2", SKYPILOT_NUM_NODES="2", SKYPILOT_NUM_GPUS_PER_NODE="1")
    machine |= dict(CONFIG=str(TINY), HOME=str(tmp_path))
    _finish(*(_start(tmp_path, "bash", "-euc", script, **machine) for _ in range(1 if is_dry else 2)))
    if is_dry:
        (out,) = _launch_called(folder, tmp_path, 1)
        assert "processes   1 on each of 2 nodes" in out
    else:
        assert [row["step"] for row in rows_of(tmp_path / "runs" / "pretrain")] == [1, 2]


@pytest.mark.parametrize("is_dry", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_tasks_of_ray_train(is_dry: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue("calls" if is_dry else "commands")
    (tmp_path / "ray" / "util").mkdir(parents=True)
    for name, text in {
        "__init__": RAY,
        "util/__init__": RAY_UTIL,
        "util/scheduling_strategies": RAY_STRATEGIES,
    }.items():
        (tmp_path / "ray" / f"{name}.py").write_text(text)
    words = [sys.executable, str(FILES / "ray_job.py"), str(TINY), "--gpus", "0", "--port", str(free_port())]
    words += [*SHORT, "--run-dir", "run", *(["--dry-run"] if is_dry else [])]
    _finish(_start(tmp_path, *words, PYTHONPATH=f"{tmp_path}:{ROOT}"))
    if is_dry:
        outs = _launch_called(folder, tmp_path, 2)
        assert all("processes   1 on each of 2 nodes" in out for out in outs)
    else:
        assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2]


# -- the container ----------------------------------------------------------------------------------------------


def test_the_container_copies_what_the_package_is_built_from() -> None:
    text = (FILES / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in lines} <= {"FROM", "ARG", "COPY", "RUN", "WORKDIR", "CMD"}
    copied = [words[1:-1] for line in lines if (words := line.split())[0] == "COPY" and "--from" not in line]
    sources = {source for words in copied for source in words}
    assert all((ROOT / source).exists() for source in sources), sources
    linked = {(ROOT / "configs" / "mlp.py").resolve().relative_to(ROOT).as_posix()}
    assert sources >= {"pyproject.toml", "README.md", "LICENSE", "colossus", "configs"} | linked
    assert json.loads(lines[-1].removeprefix("CMD ")) == ["colossus", "doctor"]
