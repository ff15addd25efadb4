"""Writes jobs for a cluster: a Slurm script or a Kubernetes manifest, to be read before it is submitted. Torch-free.

Both start one `modelcenter train` per node, which starts that node's ranks (train/launch.py). There is no torchrun in between: it
kills ranks 30 s after SIGTERM, which is too soon to save a large model, and hides their exit status, which distinguishes a mistake
(2) from a lost node. On Kubernetes an Indexed Job with a headless Service gives each pod a number and a name, which is all that
ranks need, on any cluster; a PyTorchJob would need an operator.
"""

import re
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from runpy import run_module
from textwrap import indent

import yaml

from ..config import says
from ..errors import counted, refuse
from ..parallel.machine import Machine

STOPPED = 77  # the exit status of a pod whose run was asked to stop, and has saved: it is to go on. No status of a rank is that
MISTAKE = 255  # that of a node of a Slurm job in place of 2: the highest there is
MARGIN = 120  # seconds that a time limit has beyond `grace`: Slurm may signal a minute sooner than asked, and a run has to begin
PORT = 29500
PORTS = range(10000, 30000)  # of a Slurm job, by its number; Linux gives those from 32768 on to whoever asks for none
# The forms that are asked of what clusters would refuse only when the job is submitted, or begun, and how each is told.
ANY_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|infinite|unlimited", re.ASCII | re.IGNORECASE)
SLURM = {
    "time": (ANY_TIME, "minutes, hours:minutes:seconds or days-hours:minutes:seconds, such as 1-12:00:00"),
    "memory": (re.compile(r"\d+([KMGT]B?)?", re.ASCII | re.IGNORECASE), "a number with K, M, G or T, such as 200G"),
}
COMPONENT = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
REFERENCE = rf"(?:[\w.\[\]:-]+/)?{COMPONENT}(?:/{COMPONENT})*(?::\w[\w.-]{{0,127}})?(?:@[a-z][\w+.-]*:[0-9a-f]{{32,}})?"
KUBERNETES = {
    "memory": (re.compile(r"\d+(\.\d+)?(k|[MGTPE]|[KMGTPE]i)?", re.ASCII), "a number with Ki, Mi, Gi or Ti, such as 200Gi"),
    "image": (re.compile(REFERENCE, re.ASCII), "the reference of an image, such as registry.org/me/modelcenter:1"),
    "claim": (re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"),
              "the name of a claim: small letters, digits, and dashes or dots between them"),
    "mount": (re.compile(r"/[^:]+"), "an absolute path without a colon, such as /workspace"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `launch` takes besides what `train` takes."""

    slurm: bool = field(default=False, metadata=says("write a script for sbatch"))
    kubernetes: bool = field(default=False, metadata=says("write a manifest for kubectl"))
    out: str | None = field(default=None, metadata=says("the file to write; null: NAME.sbatch or NAME.yaml", min=1))
    submit: bool = field(default=False, metadata=says("submit it too"))
    name: str = field(default="train", metadata=says("name of the job", min=1, max=40))
    nodes: int = field(default=1, metadata=says("machines over which the ranks are distributed", min=1))
    cpus: int | None = field(default=None, metadata=says("CPUs per node; null: all, on nodes that no other job shares", min=1))
    memory: str | None = field(default=None, metadata=says("per node: 200G on Slurm, 200Gi on Kubernetes; null: like cpus", min=1))
    grace: int = field(default=300, metadata=says("seconds to finish a step and save, before the time is up or a pod ends", min=1,
                                                  max=65535))
    retries: int = field(default=3, metadata=says("times that a failed job is queued again, unless a mistake ended it", min=0))
    time: str | None = field(default=None, metadata=says("Slurm: time limit, 1-12:00:00; the next job continues the run", min=1))
    partition: str | None = field(default=None, metadata=says("Slurm: the partition", min=1))
    account: str | None = field(default=None, metadata=says("Slurm: the account", min=1))
    image: str | None = field(default=None, metadata=says("Kubernetes: a container with modelcenter in it", min=1))
    claim: str | None = field(
        default=None, metadata=says("Kubernetes: the volume claim with data and output, for all nodes", min=1)
    )
    mount: str = field(default="/workspace", metadata=says("Kubernetes: where the claim is mounted and the command runs", min=1))


def check(job: Job, machine: Machine) -> None:
    """Refuse a job that no cluster could run."""
    if machine.devices is not None:
        wanted = "the degrees: modelcenter plan RECIPE --gpus N --device NAME finds them"
        refuse(None, "machine.devices", f"{machine.devices}, and the cluster's are not here", wanted)
    if job.slurm == job.kubernetes:
        refuse(None, "launch", "neither --slurm nor --kubernetes" if not job.slurm else "both", "one of the two")
    if machine.ranks % job.nodes:
        wanted = f"a divisor of its ranks; of eight GPUs a node, machine.fsdp={8 * job.nodes}"
        refuse(None, "nodes", f"{job.nodes}, for a machine of {counted(machine.ranks, 'rank')}", wanted)
    only = {"slurm": ("time", "partition", "account"), "kubernetes": ("image", "claim")}
    for key in only["kubernetes" if job.slurm else "slurm"]:
        if getattr(job, key) is not None:
            refuse(None, key, "given", f"leave it out: it is for --{'kubernetes' if job.slurm else 'slurm'}")
    if job.kubernetes:
        for key in only["kubernetes"]:
            if getattr(job, key) is None:
                refuse(None, key, "missing", "--kubernetes needs image=IMAGE and claim=NAME")
    if not all(c.isascii() and (c.isalnum() or c == "-") for c in job.name) or job.name != job.name.lower().strip("-"):
        refuse(None, "name", repr(job.name), "small letters, digits and dashes between them")
    if job.kubernetes and job.name[0].isdigit():
        refuse(None, "name", repr(job.name), "one that begins with a letter, as a Service's must")
    for key in ("partition", "account"):  # lines of a script's head
        if any(not c.isprintable() or c.isspace() for c in getattr(job, key) or ""):
            refuse(None, key, repr(getattr(job, key)), "one word")
    for key, (form, wanted) in (SLURM if job.slurm else KUBERNETES).items():
        value = getattr(job, key)
        if value is not None and not form.fullmatch(value):
            refuse(None, key, repr(value), wanted)
    if job.time is not None and 0 < (limit := seconds(job.time)) < job.grace + MARGIN:
        wanted = f"{-(-(job.grace + MARGIN) // 60)} minutes at least, or a smaller grace"
        refuse(None, "time", f"{job.time!r}, {limit} s, of which grace takes {job.grace}", wanted)


def seconds(time: str) -> int:
    """Of a time as Slurm takes it; 0 is no limit, as it is there."""
    if time[0].isalpha():
        return 0
    days, _, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(unit * part for unit, part in zip(units, parts, strict=False))


def awaited(process: str) -> str:
    """Lines of a shell that wait for a process, whatever a trap does meanwhile; `status` is then how that process has ended."""
    return f"""\
until wait "{process}"; status=$?; ! kill -0 "{process}" 2> /dev/null; do :; done  # a trap ends a wait early
# If it ended at that very moment, the status is the trap's, and the shell still has its own; 127: that was returned already.
wait "{process}" 2> /dev/null; ended=$?; [ "$ended" -eq 127 ] || status=$ended"""


def gpus(job: Job, machine: Machine) -> int:
    """Of a node."""
    return 0 if machine.device == "cpu" else machine.ranks // job.nodes


def written(job: Job, machine: Machine) -> str:
    """The beginning of a file's first line."""
    return f"{counted(machine.ranks, 'rank')} on {counted(job.nodes, 'node')}; written"


def slurm(job: Job, machine: Machine, command: Sequence[str], folder: str) -> str:
    """A script for sbatch that runs `command` in `folder`, and queues itself again until the run is done."""
    wanted = {
        "job-name": job.name, "output": "%x-%j.out", "open-mode": "append", "nodes": job.nodes, "ntasks-per-node": 1,
        "gpus-per-node": gpus(job, machine) or None, "cpus-per-task": job.cpus,
        "mem": job.memory or (None if job.cpus else "0"), "time": job.time,
        "partition": job.partition, "account": job.account, "signal": f"B:USR1@{job.grace}",
    }  # fmt: skip
    alone = "\n#SBATCH --exclusive" if job.cpus is None else ""  # one task has one CPU where nothing is said, for all its GPUs
    head = "\n".join(f"#SBATCH --{key}={value}" for key, value in wanted.items() if value is not None) + alone
    return f"""#!/bin/bash
# {written(job, machine)} by modelcenter launch. Submit: sbatch THIS-FILE
{head}
#SBATCH --requeue

# {job.grace} s before the time is up: finish the step, save, and continue in the next job. srun passes USR1 on to its tasks; at a
# TERM it kills them. If a job is cancelled, Slurm itself sends them TERM, and this script only has to wait.
again=0
trap 'again=1; kill -USR1 "$!" 2> /dev/null' USR1
trap : TERM

cd {shlex.quote(folder)} || exit 2
export NNODES="$SLURM_NNODES"
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_ADDR
export MASTER_PORT="$(({PORTS.start} + SLURM_JOB_ID % {len(PORTS)}))"

if [ "$again" -eq 1 ]; then
    status={128 + signal.SIGUSR1}  # the time is up before a run has begun
else
    # srun returns the highest status of its nodes. A mistake in the recipe or the command ends a node with {MISTAKE} instead of 2,
    # so that the status of nodes which have lost that one does not hide it.
    # srun ignores the CPUs that sbatch was given, or reads two variables, which may differ.
    srun --kill-on-bad-exit=1 --cpus-per-task={job.cpus or '"$SLURM_CPUS_ON_NODE"'} \\
        bash -c 'NODE_RANK="$SLURM_NODEID" exec "$@"' train \\
        {shlex.join(command)} &
{indent(awaited("$!"), "    ")}
    [ "$status" -ne {MISTAKE} ] || status=2
fi

# Slurm counts restarts whatever their reason. Here each failure is a line in a file; a run that saved as its time was up is none.
failures={job.name}-"$SLURM_JOB_ID".failures
if [ "$status" -ne 0 ]; then
    echo "$(date): status $status on $SLURM_JOB_NODELIST" >> "$failures"
    again=0
    [ "$status" -ne 2 ] && [ "$(wc -l < "$failures")" -le {job.retries} ] && again=1  # 2: the next job would make the mistake too
fi
if [ "$again" -eq 1 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""


POD = f"""\
# SIGTERM is passed on: the run finishes its step and saves. A run that stopped so, on any node, is not done ({STOPPED}).
trap 'kill -TERM "$!"' TERM
answer=$(mktemp)
"$@" > "$answer" &
{awaited("$!")}
cat "$answer"
if grep -q '"stopped": true' "$answer"; then exit {STOPPED}; fi
exit "$status"
"""


def kubernetes(job: Job, machine: Machine, command: Sequence[str]) -> str:
    """A manifest for kubectl: an Indexed Job whose pods find each other by a headless Service."""
    words = [word.replace("$", "$$") for word in command]  # else the kubelet puts what a variable holds in the place of $(NAME)
    needs = {"cpu": job.cpus, "memory": job.memory, "nvidia.com/gpu": gpus(job, machine) or None}
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container = {
        "name": "train",
        "image": job.image,
        "workingDir": job.mount,
        "command": ["sh", "-c", POD, "train", *words, "--json"],
        "env": [
            {"name": "NNODES", "value": str(job.nodes)},
            {"name": "NODE_RANK", "valueFrom": index},
            {"name": "MASTER_ADDR", "value": f"{job.name}-0.{job.name}"},
            {"name": "MASTER_PORT", "value": str(PORT)},
        ],
        "resources": {"limits": {key: str(value) for key, value in needs.items() if value is not None}},
        "volumeMounts": [{"name": "run", "mountPath": job.mount}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        "containers": [container],
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": job.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # through which NCCL's ranks of a node talk; 64 MB without
        ],
    }
    codes = {"containerName": "train", "operator": "In"}
    rules = [
        {"action": "FailJob", "onExitCodes": {**codes, "values": [2]}},  # a mistake, which another pod would make too
        {"action": "Ignore", "onExitCodes": {**codes, "values": [STOPPED, 128 + signal.SIGTERM]}},  # saved, or nothing was to be
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
    ]
    label = {"modelcenter-run": job.name}
    documents = [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": job.name},
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": label, "ports": [{"port": PORT}]},
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": job.name},
            "spec": {
                "completionMode": "Indexed",
                "completions": job.nodes,
                "parallelism": job.nodes,
                "backoffLimit": job.retries * job.nodes,
                "podFailurePolicy": {"rules": rules},
                "template": {"metadata": {"labels": label}, "spec": pod},
            },
        },
    ]
    head = f"# {written(job, machine)} by modelcenter launch. Submit: kubectl apply -f THIS-FILE\n"
    return head + yaml.dump_all(documents, Dumper=Literal, sort_keys=False, width=130)


class Literal(yaml.SafeDumper):
    """Texts of several lines as they are."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Literal.add_representer(str, Literal.represent_str)


if __name__ == "__main__":  # a node of a Slurm job: `python -m modelcenter`, with `MISTAKE` in place of 2
    try:
        run_module("modelcenter", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        sys.exit(MISTAKE if ended.code == 2 else ended.code)
