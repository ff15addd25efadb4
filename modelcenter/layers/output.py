"""What a forward returns."""

from collections.abc import Iterator
from typing import Any

from torch.utils import _pytree

from ..errors import nearest, refuse
from ..theirs import OUTPUT

KEYS = ("loss", "logits", "last_hidden_state", "hidden_states", "past_key_values", "pooler_output", "embeddings", "start_logits",
        "end_logits")  # fmt: skip
SCORES = ("logits", "embeddings", "start_logits")  # one of which stands behind the loss where a head computes any


class Output(dict[Any, Any]):
    """What a forward returns: a mapping whose keys are also attributes. Either way can read and set a value, and both see the
    change; setting None removes a key. As in transformers, an integer index counts the values that are present; beside a loss
    without scores, as in training, one above 0 is an `InputError`, because it would not be what it is in evaluation.

    Keys: loss, logits, last_hidden_state, hidden_states, past_key_values, and those that a head adds: pooler_output, embeddings,
    start_logits, end_logits. A key that this forward does not have reads as None, and is not among the items. Any other attribute
    that was never set is an `AttributeError`. `Model.forward` gives the shapes.
    """

    def __init__(self, *found: Any, **more: Any):
        super().__init__({key: value for key, value in dict(*found, **more).items() if value is not None})

    def __missing__(self, key: str) -> None:
        if key not in KEYS:
            raise KeyError(key)

    def __getattr__(self, name: str) -> Any:
        if name not in KEYS and name not in self:
            raise AttributeError(f"Output has no {name}; {OUTPUT.get(name) or nearest(name, KEYS)}", name=name, obj=self)
        return self.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in KEYS or name in self:
            self[name] = value
        else:
            super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        if value is None:
            self.pop(key, None)
        else:
            super().__setitem__(key, value)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        values = self.to_tuple()
        counted = range(len(values))[key] if isinstance(key, slice) else (key,)
        if "loss" in self and self.keys().isdisjoint(SCORES) and any(index > 0 for index in counted):
            found = "an index above 0 in training with labels, where no logits are behind the loss"
            refuse(None, "output", found, "model.eval(), or a key: output.last_hidden_state")
        return values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.keys()))

    def to_tuple(self) -> tuple[Any, ...]:
        """The values, in order, without their keys."""
        return tuple(self.values())


def put_back(values: Any, keys: Any) -> Output:
    """The inverse of flattening an output; torch may have put anything in place of its values."""
    out = Output()
    out.update(zip(keys, values, strict=True))
    return out


# FSDP and DDP look for the tensors inside what a module returns.
_pytree.register_pytree_node(
    Output,
    lambda out: (list(out.values()), list(out.keys())),
    put_back,
    serialized_type_name="modelcenter.Output",
)
