"""`modelcenter launch`: a training run for a cluster's queue."""

import os
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

from ..checkpoint.atomic import atomic_write
from ..config import COMMAND_LINE, bind, override
from ..errors import refuse
from .arguments import Answer, Arguments
from .recipe import run_of


def launch(args: Arguments) -> Answer:
    """Write a readable Slurm script or Kubernetes manifest that trains and resumes when its time is up; with submit, submit it.

    modelcenter launch RECIPE --slurm [--nodes 2] [--time 1-00:00:00] [--submit] [--machine M] [key=value ...]
    modelcenter launch RECIPE --kubernetes image=IMAGE claim=NAME [--nodes 2] [--submit] [--machine M] [key=value ...]

    Takes what train takes, and checks it now. Relative paths are seen from here, on Kubernetes from where the claim is mounted.
    """
    from ..train.cluster import Job, check, kubernetes, slurm

    own = {f.name for f in fields(Job)}
    mine = [setting for setting in args.settings if setting.partition("=")[0] in own]
    rest = [setting for setting in args.settings if setting not in mine]
    job = bind(Job, override({}, mine), COMMAND_LINE)
    _, machine = run_of(replace(args, settings=rest))
    check(job, machine)
    words = ["-m", "modelcenter", "train", args.names[0], *(["--machine", args.machine] if args.machine is not None else []), *rest]
    text = slurm(job, machine, [sys.executable, *words], os.getcwd()) if job.slurm else kubernetes(job, machine, ["python", *words])
    file = Path(job.out or f"{job.name}.{'sbatch' if job.slurm else 'yaml'}")
    if file.exists():
        refuse(file, None, "exists", "move it away, or out=ANOTHER")
    atomic_write(file, text.encode())
    command = ["sbatch", str(file)] if job.slurm else ["kubectl", "apply", "-f", str(file)]
    if not job.submit:
        return Answer(f"{file}: now {shlex.join(command)}", {"file": str(file), "submit": command})
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        refuse(file, "submit", f"{command[0]}: {error}", f"a machine from which {shlex.join(command)} works")
    if done.returncode:
        refuse(file, "submit", f"{command[0]}: {done.stderr.strip()}", f"mend it, then {shlex.join(command)}")
    return Answer(f"{file}: {done.stdout.strip()}", {"file": str(file), "submitted": done.stdout.strip()})
