"""`modelcenter launch`: a training run for a cluster's queue."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.atomic import atomic_write
from ..errors import refuse
from ..train.cluster import Job, check, kubernetes, slurm
from .arguments import Answer, Arguments, check_model
from .recipe import run_of, take_own

if TYPE_CHECKING:
    from ..parallel.machine import Machine
    from ..train.recipe import Recipe


def launch(args: Arguments) -> Answer:
    """Write a readable Slurm script or Kubernetes manifest that trains, and resumes after a time limit; with submit, submit it.

    modelcenter launch RECIPE --slurm [--nodes 2] [--time 1-00:00:00] [--submit] [--machine M] [key=value ...]
    modelcenter launch RECIPE --kubernetes image=IMAGE claim=NAME [--nodes 2] [--submit] [--machine M] [key=value ...]

    Takes the arguments of train, and checks them now. Relative paths start from this folder, on Kubernetes from where the claim is
    mounted. For other options of your cluster add lines to the file. Keys of launch only:
    """
    from ..train.launch import check_ranks

    job, args = take_own(Job, args)
    recipe, machine = run_of(args)
    check(job, machine)
    check_ranks(recipe, machine)
    if recipe.resume != "auto":
        found = f"{recipe.resume}, which is refused when the job is queued again and finds its own run in output_dir"
        refuse(None, "resume", found, "resume=auto, which also goes on with what modelcenter train has begun there")
    if job.slurm:
        look(recipe, machine)
    words = ["train", args.names[0], *(["--machine", args.machine] if args.machine is not None else []), *args.settings]
    if job.slurm:
        text = slurm(job, machine, [sys.executable, "-m", "modelcenter.train.cluster", *words], os.getcwd())
    else:
        text = kubernetes(job, machine, ["python", "-m", "modelcenter", *words])
    file = Path(job.out or f"{job.name}.{'sbatch' if job.slurm else 'yaml'}")
    if file.exists():
        refuse(file, None, "exists", "move it away, or out=ANOTHER")
    atomic_write(file, text.encode())
    command = ["sbatch", str(file)] if job.slurm else ["kubectl", "apply", "-f", str(file)]
    if not job.submit:
        return Answer(f"{file} written; next: {shlex.join(command)}", {"file": str(file), "submit": command})
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        refuse(file, "submit", f"{command[0]}: {error}", f"a machine from which {shlex.join(command)} works")
    if done.returncode:
        refuse(file, "submit", f"{command[0]}: {done.stderr.strip()}", f"mend it, then {shlex.join(command)}")
    return Answer(f"{file}: {done.stdout.strip()}", {"file": str(file), "submitted": done.stdout.strip()})


def look(recipe: "Recipe", machine: "Machine") -> None:
    """Refuse a model or data that are not there, or do not fit the recipe: a job that waits in a queue for days should not find
    out."""
    from ..data.read import find_files

    if recipe.init == "pretrained":
        check_model(recipe.model)
    for key, said in (("data.path", recipe.data.path), ("data.eval_path", recipe.data.eval_path)):
        for path in [said] if isinstance(said, str) else said or ():
            if not path.startswith("datasets:"):
                find_files(path, recipe.data.format, key)
    from ..train.resolve import check_heads, check_length, sizes_of  # torch's import is waited for by who has no simpler mistake

    check_heads(recipe, machine)
    check_length(recipe, sizes_of(recipe))
