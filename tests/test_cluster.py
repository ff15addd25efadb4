"""What is written for clusters: read by a shell and a schema, and run with a scheduler that is a few lines of shell."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_ranks import run_of

from modelcenter.__main__ import main
from modelcenter.config import describe, dump_yaml, to_dict
from modelcenter.errors import InputError, LateError
from modelcenter.parallel.machine import Machine
from modelcenter.parallel.watch import LOST, STALLED
from modelcenter.train import cluster
from modelcenter.train.cluster import POD, STOPPED, Job, check, kubernetes, seconds, slurm
from modelcenter.train.read import ALIASES, PARTIAL
from modelcenter.train.recipe import Recipe

MACHINE = Machine(fsdp=8, tensor_parallel=2)
ODD = ["train", "it's", "data.path=a b/$HOME $$ $(NNODES) `x`.txt"]


def pod_of(text: str) -> dict[str, Any]:
    service, job = yaml.safe_load_all(text)
    assert service["kind"] == "Service" and job["kind"] == "Job"
    return dict(job["spec"]["template"]["spec"])


# --------------------------------------------------------------------------------------------------------------- Slurm


SRUN = """\
while [ "${1#--}" != "$1" ]; do echo "$1" >> "$(dirname "$0")/options"; shift; done
SLURM_NODEID=0 "$@" &
trap 'kill -KILL "$!"' TERM
trap 'kill -USR1 "$!"' USR1
until wait "$!"; status=$?; ! kill -0 "$!" 2> /dev/null; do :; done
wait "$!"  # as it ended, whenever a trap has ended the wait
status=$?; exit $((status > ${OTHER:-0} ? status : OTHER))
"""


SHOW = "touch shown; sleep ${SLOW:-0}; echo host-a; echo host-b"


def scheduler(folder: Path, **more: str) -> dict[str, str]:
    """An environment in which srun runs its command once, as node 0, hands USR1 on to it and at a TERM kills it, as Slurm's does;
    it ends with the highest status of its nodes, of which another has that in OTHER. scontrol writes down what it is asked."""
    for name, text in {
        "srun": SRUN,
        "scontrol": f'if [ "$1" = show ]; then {SHOW}; else echo "$@" >> {folder}/asked; fi',
    }.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    told = {"SLURM_CPUS_ON_NODE": "96", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "host-[a,b]", "SLURM_JOB_ID": "70007", **more}
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **told}


def submitted(folder: Path, command: list[str], **more: str) -> "subprocess.Popen[str]":
    file = folder / "job.sbatch"
    file.write_text(slurm(Job(slurm=True, nodes=2, retries=2), MACHINE, command, str(folder)))
    return subprocess.Popen(["bash", str(file)], env=scheduler(folder, **more), stdout=subprocess.PIPE, text=True)


def test_a_script_reads_as_it_should(tmp_path: Path) -> None:
    job = Job(slurm=True, nodes=2, time="1-00:00:00", partition="gpu", cpus=32, memory="200G", grace=120)
    text = slurm(job, MACHINE, ["python", *ODD], "/a b")
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    head = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert head == ["job-name=train", "output=%x-%j.out", "open-mode=append", "nodes=2", "ntasks-per-node=1", "gpus-per-node=8",
                    "cpus-per-task=32", "mem=200G", "time=1-00:00:00", "partition=gpu", "signal=B:USR1@120", "requeue"]  # fmt: skip
    first = next(k for k, line in enumerate(text.splitlines()) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in text.splitlines()[first:]), "sbatch reads none after a command"
    assert "gpus" not in slurm(job, Machine(device="cpu", fsdp=4), ["x"], "/")
    bare = slurm(Job(slurm=True), MACHINE, ["x"], "/")
    assert "\n# 16 ranks on 2 nodes; written by modelcenter" in text and "\n# 16 ranks on 1 node; written by" in bare
    assert "\n#SBATCH --mem=0\n" in bare and "\n#SBATCH --exclusive\n" in bare, "else a node's ranks would share one CPU"
    assert "mem=" not in slurm(Job(slurm=True, cpus=8), MACHINE, ["x"], "/")


def test_a_script_tells_each_node_what_it_needs(tmp_path: Path) -> None:
    """The command arrives word for word."""
    names = "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"
    told = f"import os, sys; print(*(os.environ[k] for k in {names}), sys.argv[1:])"
    job = submitted(tmp_path, [sys.executable, "-c", told, *ODD])
    said, _ = job.communicate(timeout=250)
    assert said == f"2 0 host-a 20007 {ODD}\n" and job.returncode == 0 and not (tmp_path / "asked").exists()
    assert (tmp_path / "options").read_text().split() == ["--kill-on-bad-exit=1", "--cpus-per-task=96"]
    assert " --cpus-per-task=3 " in slurm(Job(slurm=True, cpus=3), MACHINE, ["x"], "/"), "a host rounds it up to whole cores"


def test_the_port_of_a_job_is_none_that_a_host_gives_away() -> None:
    """One that a connection has got is in use, which is a mistake, after which no job is queued again."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert cluster.PORTS.start > 1024 and max(cluster.PORTS) < min(given, 32768)


@pytest.mark.parametrize(("status", "before", "again"), [(1, 0, True), (76, 1, True), (137, 2, False), (2, 0, False)])
def test_what_failed_is_queued_again_a_few_times(status: int, before: int, again: bool, tmp_path: Path) -> None:
    """However often its time was up before: failures alone are counted, those of this job."""
    kept = tmp_path / "train-70007.failures"
    kept.write_text("Sun: status 1 on host-[a,b]\n" * before)
    (tmp_path / "train-70006.failures").write_text("Sat: status 1 on host-[a,b]\n" * 9)
    job = submitted(tmp_path, ["bash", "-c", f"exit {status}"], SLURM_RESTART_COUNT="9")
    job.communicate(timeout=250)
    assert job.returncode == status and (tmp_path / "asked").exists() == again
    assert not again or (tmp_path / "asked").read_text() == "requeue 70007\n"
    lines = kept.read_text().splitlines()
    assert len(lines) == before + 1 and lines[-1].endswith(f": status {status} on host-[a,b]")


@pytest.mark.parametrize(("words", "again"), [(["train", "nowhere"], False), (["doctor", "--help"], True)])
def test_a_mistake_is_not_hidden_by_nodes_that_lost_it(words: list[str], again: bool, tmp_path: Path) -> None:
    """srun ends with the highest status of its nodes, and knows no mistake."""
    command = [sys.executable, "-m", "modelcenter.train.cluster", *words]
    job = submitted(tmp_path, command, OTHER="137", PYTHONPATH=str(Path(cluster.__file__).parents[2]))
    job.communicate(timeout=250)
    assert job.returncode == (137 if again else 2) and (tmp_path / "asked").exists() == again


@pytest.mark.parametrize("before", [0, 2])
def test_a_job_that_is_told_before_its_run_has_begun_counts(before: int, tmp_path: Path) -> None:
    """Else one whose time is too short for anything would be queued again for ever."""
    (tmp_path / "train-70007.failures").write_text("Sun: status 1 on host-[a,b]\n" * before)
    job = submitted(tmp_path, ["touch", "begun"], SLOW="1")
    while not (tmp_path / "shown").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=250)
    assert job.returncode == 128 + signal.SIGUSR1 and not (tmp_path / "begun").exists()
    assert (tmp_path / "asked").exists() == (before < 2)
    assert (tmp_path / "train-70007.failures").read_text().count("\n") == before + 1


HEARS = """\
import os, time
from modelcenter.train.interrupt import Interrupt
with Interrupt() as interrupt:
    interrupt.begin()
    print(os.getpid(), flush=True)
    while not interrupt:
        time.sleep(0.01)
    time.sleep(0.3)  # who is killed meanwhile has saved nothing
    print("saved", flush=True)
"""


def at_work(folder: Path, **more: str) -> "tuple[subprocess.Popen[str], int]":
    """A job whose run can be asked for its end, and the process of that."""
    more |= {"SLURM_RESTART_COUNT": "9", "PYTHONPATH": str(Path(__file__).parents[1])}
    job = submitted(folder, [sys.executable, "-c", HEARS], **more)
    assert job.stdout is not None
    return job, int(job.stdout.readline())


def test_when_its_time_is_up_a_run_saves_and_is_queued_again(tmp_path: Path) -> None:
    job, _ = at_work(tmp_path)
    job.send_signal(signal.SIGUSR1)
    assert job.communicate(timeout=250)[0] == "saved\n" and job.returncode == 0
    assert (tmp_path / "asked").read_text() == "requeue 70007\n" and not list(tmp_path.glob("*.failures"))


def test_a_job_that_has_not_saved_when_its_time_was_up_counts(tmp_path: Path) -> None:
    (tmp_path / "train-70007.failures").write_text("Sun: status 1 on host-[a,b]\n" * 2)
    job = submitted(tmp_path, ["bash", "-c", "trap 'exit 138' USR1; echo; while true; do sleep 0.05; done"])
    assert job.stdout is not None
    job.stdout.readline()
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=250)
    assert job.returncode == 138 and not (tmp_path / "asked").exists()


def test_a_job_that_is_cancelled_has_time_to_save(tmp_path: Path) -> None:
    """Slurm tells script and tasks by TERM, half a minute before it kills them; srun would kill them at once."""
    job, run = at_work(tmp_path)
    job.send_signal(signal.SIGTERM)
    os.kill(run, signal.SIGTERM)
    assert job.communicate(timeout=250)[0] == "saved\n" and job.returncode == 0
    assert not (tmp_path / "asked").exists() and not list(tmp_path.glob("*.failures"))


# A shell whose `kill` returns when what it has told has ended, before the script looks at that.
AT_ONCE = """() {
    builtin kill "$@" || return
    while [ "$1" != -0 ] && builtin kill -0 "$2" 2> /dev/null; do :; done
}"""


def test_what_ends_as_soon_as_it_is_told_has_its_own_status(tmp_path: Path) -> None:
    job, _ = at_work(tmp_path, **{"BASH_FUNC_kill%%": AT_ONCE})
    job.send_signal(signal.SIGUSR1)
    assert job.communicate(timeout=250)[0] == "saved\n" and job.returncode == 0
    assert (tmp_path / "asked").read_text() == "requeue 70007\n"


# ---------------------------------------------------------------------------------------------------------- Kubernetes


def manifest(**changes: Any) -> str:
    job = Job(kubernetes=True, **{"nodes": 2, "image": "registry/mc:1", "claim": "runs", "name": "big", **changes})
    check(job, MACHINE)
    return kubernetes(job, MACHINE, ["python", *ODD])


def expanded(word: str) -> str:
    """A word of a command as the kubelet hands it to a container of `manifest`."""
    known = {"NNODES": "2", "MASTER_PORT": "29500"}
    return re.sub(r"\$(\$|\(([^)]*)\))", lambda m: "$" if m[1] == "$" else known.get(m[2], m[0]), word)


def test_a_manifest_fits_together() -> None:
    service, job = yaml.safe_load_all(manifest(memory="200Gi", cpus=16))
    spec, pod = job["spec"], pod_of(manifest(memory="200Gi", cpus=16))
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(env["NNODES"]) == 2 and spec["completionMode"] == "Indexed"
    assert env["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}", "the name that the first pod has by the Service"
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == spec["template"]["metadata"]["labels"] and service["spec"]["publishNotReadyAddresses"]
    assert container["resources"]["limits"] == {"cpu": "16", "memory": "200Gi", "nvidia.com/gpu": "8"}
    assert [expanded(word) for word in container["command"]] == ["sh", "-c", POD, "train", "python", *ODD, "--json"]
    rules = {rule["action"] + str(rule.get("onExitCodes", {}).get("values", "")) for rule in spec["podFailurePolicy"]["rules"]}
    assert rules == {"FailJob[2]", f"Ignore[{STOPPED}, 143]", "Ignore"} and pod["restartPolicy"] == "Never"
    assert {v["name"] for v in pod["volumes"]} == {m["name"] for m in container["volumeMounts"]}


def test_a_manifest_fits_the_schema_of_kubernetes() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for text in (manifest(), manifest(memory="200Gi", cpus=16, nodes=1)):
        for document in yaml.safe_load_all(text):
            validator.validate(document, validator.latest_version(), strict=True)
    _, job = yaml.safe_load_all(manifest())
    job["spec"]["template"]["spec"]["restartPolice"] = "Never"
    with pytest.raises(validator.ValidationError):
        validator.validate(job, validator.latest_version(), strict=True)


SHELLS = pytest.mark.parametrize("shell", [["sh"], ["bash"], ["bash", "--posix"]], ids="-".join)  # what `sh` may be there


def pod(command: str, shell: list[str], **more: str) -> "subprocess.Popen[str]":
    words = [*shell, "-c", POD, "train", "bash", "-c", command]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | more)


@pytest.mark.parametrize(("command", "status"), [
    ("""echo '{"step": 3, "stopped": true}'""", STOPPED), ("""echo '{"stopped": false}'""", 0), ("exit 2", 2), ("exit 137", 137),
    ("exit 75", 75),
])  # fmt: skip
@SHELLS
def test_how_a_pod_ends(shell: list[str], command: str, status: int) -> None:
    job = pod(command, shell)
    job.communicate(timeout=250)
    assert job.returncode == status


def test_what_stopped_has_a_status_of_its_own() -> None:
    """Pods that end so are replaced without a limit: ranks that never reach each other would be, too."""
    assert STOPPED not in {0, 1, 2, LateError.status, LOST, STALLED, *range(128, 256)}


@SHELLS
def test_a_pod_that_ends_as_soon_as_it_is_told_has_its_own_status(shell: list[str], tmp_path: Path) -> None:
    stops = f"trap 'exit 7' TERM; touch {tmp_path}/on; while true; do sleep 0.05; done"
    job = pod(stops, shell, **{"BASH_FUNC_kill%%": AT_ONCE})
    while not (tmp_path / "on").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=250)
    assert job.returncode == 7


@SHELLS
def test_a_pod_hands_sigterm_on(shell: list[str], tmp_path: Path) -> None:
    stops = f"""trap 'echo "{{\\"stopped\\": true}}"; exit 0' TERM; touch {tmp_path}/on; while true; do sleep 0.05; done"""
    job = pod(stops, shell)
    while not (tmp_path / "on").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    assert job.communicate(timeout=250)[0] == '{"stopped": true}\n' and job.returncode == STOPPED


# -------------------------------------------------------------------------------------------------------------- the verb


def test_no_key_means_two_things() -> None:
    taken = {key.name.partition(".")[0] for key in describe(Recipe)} | {*ALIASES, *PARTIAL}
    assert not taken & {f.name for f in fields(Job)}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(dump_yaml(to_dict(run_of(tmp_path))))
    return "r.yaml"


def test_a_file_is_written_once_and_submitted_on_request(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         capsys: Any) -> None:
    words = ["launch", recipe, "--slurm", "--nodes", "2", "machine.fsdp=4", "machine.device=cpu", "batch=12"]
    assert main(words) == 0
    assert capsys.readouterr().out == "train.sbatch written; next: sbatch train.sbatch\n"
    text = (tmp_path / "train.sbatch").read_text()
    assert f"{sys.executable} -m modelcenter.train.cluster train r.yaml machine.fsdp=4 machine.device=cpu batch=12 &\n" in text
    assert main(words) == 2 and "train.sbatch: exists" in capsys.readouterr().err
    (tmp_path / "sbatch").write_text("#!/bin/bash\necho Submitted batch job 7: $1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main([*words, "--submit", "--out", "b.sbatch"]) == 0
    assert capsys.readouterr().out == "b.sbatch: Submitted batch job 7: b.sbatch\n"
    (tmp_path / "sbatch").write_text("#!/bin/bash\necho no such partition >&2; exit 1\n")
    assert main([*words, "--submit", "--out", "c.sbatch"]) == 2
    assert re.search(r"error: c\.sbatch: submit: sbatch: no such partition; mend it", capsys.readouterr().err)


@pytest.mark.parametrize(("words", "text"), [
    ([], "launch: neither --slurm nor --kubernetes"),
    (["--slurm", "--kubernetes"], "launch: both"),
    (["--slurm", "nodes=2"], "nodes: 2, for a machine of 1 rank; a divisor of its ranks; of eight GPUs a node, machine.fsdp=16"),
    (["--slurm", "image=x"], "image: given; leave it out: it is for --kubernetes"),
    (["--kubernetes", "image=x"], "claim: missing"),
    (["--kubernetes", "image=x", "claim=y", "time=1"], "time: given; leave it out: it is for --slurm"),
    (["--slurm", "name=My_Run"], "name: 'My_Run'; small letters"),
    (["--slurm", "time=1 --oversubscribe"], "time: '1 --oversubscribe'; minutes, hours:minutes:seconds or "),
    (["--slurm", "bach=3"], "bach"),
    (["--slurm", "nodes=0"], "nodes"),
    (["--slurm", "node=2"], "did you mean 'nodes'?"),
    (["--slurm", "data.path=nowhere.jsonl"], "nowhere.jsonl: data.path: no such file"),
    (["--slurm", "data.eval_path=nowhere.jsonl"], "nowhere.jsonl: data.eval_path: no such file"),
    (["--slurm", "init=pretrained", "model=r.yaml"], "r.yaml: model: a file"),
    (["--slurm", "account=a b"], "account: 'a b'; one word"),
    (["--slurm", "time=tomorrow"], "time: 'tomorrow'; minutes, hours:minutes:seconds or days-hours:minutes:seconds"),
    (["--slurm", "memory=lots"], "memory: 'lots'; a number with K, M, G or T"),
    (["--slurm", "memory=200Gi"], "memory: '200Gi'; a number with K, M, G or T"),
    (["--kubernetes", "image=foo bar", "claim=y"], "image: 'foo bar'; the reference of an image"),
    (["--kubernetes", "image=Foo", "claim=y"], "image: 'Foo'"),
    (["--kubernetes", "image=x", "claim=Not_Valid"], "claim: 'Not_Valid'; the name of a claim: small letters"),
    (["--kubernetes", "image=x", "claim=y", "memory=lots"], "memory: 'lots'; a number with Ki, Mi, Gi or Ti"),
    (["--kubernetes", "image=x", "claim=y", "memory=200GB"], "memory: '200GB'; a number with Ki, Mi, Gi or Ti"),
    (["--kubernetes", "image=x", "claim=y", "mount=rel"], "mount: 'rel'; an absolute path without a colon"),
    (["--kubernetes", "image=x", "claim=y", "mount=/a:b"], "mount: '/a:b'; an absolute path without a colon"),
    (["--slurm", "resume=never"], "resume: never, which is refused when the job is queued again"),
    (["--slurm", "resume=out/step-4"], "resume: out/step-4, which is refused when the job is queued again"),
    (["--kubernetes", "image=x", "claim=y", "resume=never"], "resume: never, which is refused"),
    (["--slurm", "time=4"], "time: '4', 240 s, of which grace takes 300"),
    (["--slurm", "time=6:59"], "time: '6:59', 419 s, of which grace takes 300; 7 minutes at least, or a smaller grace"),
    (["--slurm", "machine.fsdp=16"], "batch: 6 sequences for 16 ranks"),
    (["--slurm", "data.seq_len=4096"], "data.seq_len: 4096"),
    (["--slurm", "config.heads=3"], "config.dim: "),
    (["--slurm", "batch=12", "machine.tensor_parallel=4"], "machine.tensor_parallel: 4, and "),
    (["--slurm", "machine.zero=1"], "machine.zero: 1 with fsdp=1"),
    (["--slurm", "machine.sequence_parallel=true"], "machine.sequence_parallel: true with tensor_parallel=1"),
    (["--slurm", "machine.tensor_parallel=2", "machine.compile=true", "machine.recompute=full"], "machine.recompute: full, with"),
])  # fmt: skip
def test_refusals(words: list[str], text: str, recipe: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["launch", recipe, *words]) == 2
    said = capsys.readouterr().err
    assert text in said and said.count("\n") == 1 and not list(tmp_path.glob("train.*")), said


@pytest.mark.parametrize("words", [
    *(["--slurm", f"time={time}"] for time in ("90", "90:00", "12:00:00", "1-12", "1-12:30", "1-12:00:00", "UNLIMITED", "7:00")),
    *(["--slurm", f"memory={memory}"] for memory in ("0", "4096", "200G", "512m", "16GB")),
    *(["--kubernetes", "image=x", "claim=a.b-1", f"memory={memory}"] for memory in ("200Gi", "1.5Ti", "64G", "1000000k", "4096")),
    *(["--kubernetes", f"image={image}", "claim=y"] for image in (
        "modelcenter", "me/model_center:v1.0", "localhost:5000/a/b--c:latest", "Registry.org/a@sha256:" + "0a" * 32)),
], ids=" ".join)  # fmt: skip
def test_what_a_cluster_takes_is_taken(words: list[str], recipe: str) -> None:
    assert main(["launch", recipe, *words]) == 0


@pytest.mark.parametrize(("time", "wanted"), [
    ("0", 0), ("unlimited", 0), ("INFINITE", 0), ("90", 5400), ("90:01", 5401), ("1:02:03", 3723), ("2-1", 176400),
    ("0-1:30", 5400), ("1-00:00:07", 86407),
])  # fmt: skip
def test_a_time_is_read_as_slurm_does(time: str, wanted: int) -> None:
    assert seconds(time) == wanted


def test_a_service_begins_with_a_letter(recipe: str, tmp_path: Path, capsys: Any) -> None:
    """RFC 1035's label, which kubectl asks of it; Slurm's job may be called anything."""
    assert main(["launch", recipe, "--kubernetes", "image=x", "claim=y", "name=7b"]) == 2
    assert capsys.readouterr().err == "modelcenter: error: name: '7b'; one that begins with a letter, as a Service's must\n"
    assert main(["launch", recipe, "--slurm", "name=7b"]) == 0


def test_a_job_without_a_cluster_is_refused() -> None:
    with pytest.raises(InputError, match="neither"):
        check(Job(), MACHINE)
