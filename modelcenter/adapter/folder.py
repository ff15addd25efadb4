"""peft's format of an adapter: `adapter_model.safetensors` and `adapter_config.json`; save.py writes it, read.py reads it.

A tensor's name is `base_model.model.`, the name of Hugging Face's layer, and the kind of tensor. Where Hugging Face has one matrix
and we have several, the translation is exact in both directions: their `b` consists of the rows of our parts. If each of our parts
has its own `a`, their `a` stacks all of them, and each part's rows of `b` are zero in the columns of the others. A config.json
beside the two files holds what peft has no place for: the task, the names of its classes, and the direction in which the model
reads.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.files import ADAPTER
from ..names import Entry

if TYPE_CHECKING:
    from ..model import Model

(CONFIG, WEIGHTS), PREFIX = ADAPTER, "base_model.model."
A, B, M = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
TASK_TYPES = {"lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "classify": "SEQ_CLS", "tag": "TOKEN_CLS", "qa": "QUESTION_ANS",
              "backbone": "FEATURE_EXTRACTION", "embed": "FEATURE_EXTRACTION"}  # fmt: skip


def is_adapter(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an adapter and not a model."""
    return os.path.isfile(Path(folder) / CONFIG)


def copies(model: "Model", entry: Entry) -> list[str]:
    """Hugging Face's names of other tensors that repeat this entry's: for an embedding the head, if it is tied, and the tables of
    an encoder-decoder's stacks."""
    own = {e.theirs for e in model.entries}
    tied = not set(model.shared.values()).isdisjoint(entry.ours)
    there = [alias for alias, of in model.aliases.items() if of == entry.theirs and alias not in own]
    return [alias for alias in there if tied or getattr(model, alias.partition(".")[0], None) is not None]
