"""`modelcenter tokenize`."""

import os
from dataclasses import replace

from ..data.config import Tokenization
from ..errors import counted
from .arguments import Answer, Arguments, settings


def tokenize(args: Arguments) -> Answer:
    """Tokenize a corpus into token files, which training reads piece by piece; the same command resumes after an interruption.

    modelcenter tokenize PATH OUT --tokenizer T [objective=lm|mlm] [text_key=...] [format=...] [processes=...]

    OUT.bin and OUT.idx are an indexed dataset of Megatron-LM; data.path=OUT.bin trains on it.
    """
    from ..data.tokenize import tokenize as write

    asked = settings(Tokenization, args, ["path", "out"])
    if not os.path.isdir(os.path.expanduser(asked.tokenizer)):
        from ..registry import hubs

        asked = replace(asked, tokenizer=hubs().get(asked.tokenizer) or asked.tokenizer)
    said = write(asked)
    what = f"{counted(said['tokens'], 'token')} of {counted(said['documents'], 'document')}"
    done = "" if said["made"] else ", made before"
    return Answer(f"{asked.out.removesuffix('.bin')}.bin: {what}{done}", said)
