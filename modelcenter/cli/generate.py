"""`modelcenter generate`."""

import json
import os
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

from ..config import COMMAND_LINE
from ..errors import refuse
from ..generate.options import FILE, Options
from .arguments import Answer, Arguments, check_model, settings


@dataclass(frozen=True, kw_only=True)
class Generation(Options):
    """What `generate` takes: where the prompts are and where the texts go, and how to choose their tokens."""

    model: str = field(metadata={"help": "a folder, a preset or a hub id", "min": 1})
    prompt: str | None = field(default=None, metadata={"help": "the text to go on with, or to translate", "min": 1})
    prompts: str | None = field(default=None, metadata={"help": "a file of them: a line each, or .jsonl with prompt_key", "min": 1})
    prompt_key: str = field(default="prompt", metadata={"help": "the field of the prompt in a .jsonl file", "min": 1})
    out: str | None = field(default=None, metadata={"help": "a .jsonl file to write; absent: the terminal", "min": 1})
    batch: int = field(default=8, metadata={"help": "prompts of one forward", "min": 1})
    stream: bool = field(default=False, metadata={"help": "show each token as it is written"})
    dtype: str = field(default="auto", metadata={"help": "fp32, bf16, fp16; auto: as stored"})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda ...; absent: the CPU", "min": 1})


def generate(args: Arguments) -> Answer:
    """Go on with texts: greedily, by sampling or by beam search.

    modelcenter generate MODEL PROMPT [stream=true] [key=value ...]
    modelcenter generate MODEL prompts=FILE [out=FILE.jsonl] [batch=8] [key=value ...]

    What is not given comes from the model's generation_config.json; without a length in it, 64 tokens are written.
    """
    asked = settings(Generation, args, ["model", "prompt"])
    if (asked.prompt is None) == (asked.prompts is None):
        refuse(COMMAND_LINE, "prompt", "missing" if asked.prompt is None else "given, and so is prompts", "a text, or prompts=FILE")
    if asked.stream and (asked.prompt is None or asked.num_beams > 1 or asked.num_return_sequences > 1):
        refuse(COMMAND_LINE, "stream", "true with several texts", "one PROMPT, one beam, one sequence")
    if asked.out is not None and os.path.lexists(asked.out):
        refuse(asked.out, None, "exists", "a new file")
    check_model(asked.model)
    prompts = [asked.prompt] if asked.prompt is not None else read_prompts(str(asked.prompts), asked.prompt_key)
    from ..checkpoint.hub import resolve
    from ..data.tokenizer import load_tokenizer
    from ..registry import load, presets
    from ..train.write import Spoken, write

    folder = resolve(asked.model, presets={name: preset.hub for name, (_, preset) in presets().items()})
    tokenizer, model = load_tokenizer(folder), load(folder, dtype=asked.dtype, device=asked.device)
    given = [setting.partition("=")[0] for setting in args.settings]
    options = {key: getattr(asked, key) for key in given if key in {f.name for f in fields(Options)}}
    lengths = {"max_new_tokens", "max_length"}
    if not lengths & {*options, *json.loads(model.companions.get(FILE, b"{}"))}:
        options["max_new_tokens"] = 64
    if asked.stream:
        start = [] if model.encoder_decoder else tokenizer.encode(prompts[0])
        options["streamer"] = Spoken(tokenizer, partial(print, end="", flush=True), start)
    rows = []
    for prompt, texts in zip(prompts, write(model, tokenizer, prompts, asked.batch, **options), strict=True):
        rows += [{"prompt": prompt, "text": tokenizer.decode(ids), "ids": ids} for ids in texts]
    if asked.out is not None:
        with open(asked.out, "x", encoding="utf-8") as f:
            f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        return Answer(f"{asked.out}: {len(rows)} texts", {"out": asked.out, "texts": len(rows)})
    if asked.stream:
        return Answer("", rows[0])
    return Answer("\n".join(str(row["text"]) for row in rows), rows[0] if asked.prompt is not None and len(rows) == 1 else rows)


def read_prompts(file: str, key: str) -> list[str]:
    """The prompts of a file: `key` of its records, or the lines of a .txt that are not empty."""
    from ..data.read import read_records

    if Path(file).suffix not in (".txt", ""):
        return [record.text(key, "prompt_key") for record in read_records(file, key="prompts")]
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        refuse(file, None, getattr(error, "strerror", None) or "not UTF-8", "a .txt with a prompt a line, or .jsonl")
    if not any(line.strip() for line in lines):
        refuse(file, None, "no prompt", "a prompt a line")
    return [line for line in lines if line.strip()]
