"""What a family wants tried beyond its default form: field changes by name (`default` changes the default form itself), and
the generic tests it is excused from, each with the reason that README repeats."""

from modelcenter import ops

VARIANTS: dict[str, dict[str, dict[str, object]]] = {
    "gpt2": {
        "default": {},
        "by-layer": {"scale_by_layer": True, "hidden": None},
        "unscaled": {"scale_by_head": False},
        "erf-gelu": {"act": ops.gelu},
        "untied": {"tie": False},
    },
}
EXCEPTIONS: dict[str, dict[str, str]] = {
    "cpmant": {
        "padding-right": "transformers reads its padding off id 0 and takes it to stand on the left",
        "losses": "transformers neither shifts the labels nor hides the future",
    },
}
