"""Writes the model of a training state, as the run itself would have written it at its end."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint.manifest import verify
from ..checkpoint.state import load_state
from ..errors import refuse_missing
from ..identify import asked_dtype
from ..optim.ema import EMA
from ..parallel.machine import Machine
from .folder import RECIPE
from .prepare import prepare
from .read import recipe_of
from .resolve import resolve
from .setup import write_model
from .state import put_weights


def export(state: str | Path, out: str | Path, dtype: str = "auto", **how: Any) -> None:
    """Write the model of `state`, a run's folder step-N, into the folder `out` with the run's tokenizer: the averaged weights if
    the run keeps them, the adapter if one is trained. It works on the CPU, whatever number of ranks wrote the state. `how`: options
    of `save_pretrained`.

    The run's data are read once more, for what is made of them: a tokenizer, the names of labels. Errors: `InputError`, raised
    before that for a state that is broken or has no recipe beside it.
    """
    state, machine = Path(state).resolve(), Machine(device="cpu")  # `.`, or a link, does not say whose it is
    file = state.parent / RECIPE
    verify(state)
    if not file.is_file():
        refuse_missing(file, None, "missing", f"the recipe of the run that wrote {state.name}")
    kind = asked_dtype(dtype)
    recipe, device = resolve(replace(recipe_of(file), micro_batch=None), machine)  # which may be for several ranks
    setup = prepare(recipe, machine, device)
    ema = EMA(setup.model, recipe.ema) if recipe.ema is not None else None
    put_weights(state, load_state(state)[0], setup.model, ema)
    if ema is not None:
        ema.swap()
    setup.model.to(kind)
    write_model(Path(out), setup, **how)
