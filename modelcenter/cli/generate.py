"""`modelcenter generate`."""

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..config import COMMAND_LINE, says
from ..data.config import DataConfig
from ..errors import refuse
from ..generate.options import Options
from .arguments import Answer, Arguments, check_model, new_file, settings
from .computing import Computing

if TYPE_CHECKING:
    from ..data.chat import Template
    from ..data.record import Record
    from ..data.tokenizer import Tokenizer
    from ..model import Model


@dataclass(frozen=True, kw_only=True)
class Generation(Computing, Options):
    """What `generate` takes: where the prompts are and where the texts go, and how to choose their tokens."""

    model: str = field(metadata=says("a folder, a preset or a hub id", min=1))
    prompt: str | None = field(default=None, metadata=says("the text to continue, or to translate", min=1))
    prompts: str | None = field(default=None, metadata=says("a file of prompts: one per line, or .jsonl with prompt_key", min=1))
    prompt_key: str = field(default="prompt", metadata=says("the prompt's field in a .jsonl file: text, or messages", min=1))
    chat: bool = field(default=False, metadata=says("a prompt is a user's message: put it into the tokenizer's chat template"))
    out: str | None = field(default=None, metadata=says("a .jsonl file to write; null: the terminal", min=1))
    stream: bool = field(default=False, metadata=says("show each token as it is generated"))


def generate(args: Arguments) -> Answer:
    """Generate text from prompts: greedily, by sampling or by beam search.

    modelcenter generate MODEL PROMPT [stream=true] [key=value ...]
    modelcenter generate MODEL prompts=FILE [out=FILE.jsonl] [batch=8] [key=value ...]

    Options that are not given come from the model's generation_config.json. Without a length there, 64 tokens are generated, or as
    many as the model has positions left for. Messages, and with chat=true any prompt, go through the tokenizer's chat template; the
    output is then only the answer.
    """
    check_prompt(args)
    asked = settings(Generation, args, ["model", "prompt"])
    check(asked)
    with asked.room(), new_file(asked.out) if asked.out is not None else nullcontext() as out:
        return answered(asked, [setting.partition("=")[0] for setting in args.settings], out)


def check_prompt(args: Arguments) -> None:
    """Refuse a prompt that reads as a setting: `a = b` does not, `a=b and more` does."""
    known = {f.name for f in fields(Generation)}
    for word in args.settings:
        if " " in word and word.partition("=")[0] not in known:
            refuse(COMMAND_LINE, word, "reads as a setting, and there is none of this name", 'prompt="TEXT" if it is the prompt')


def check(asked: Generation) -> None:
    """Refuse what a look at the command line tells."""
    if (asked.prompt is None) == (asked.prompts is None):
        refuse(COMMAND_LINE, "prompt", "missing" if asked.prompt is None else "given, and so is prompts", "a text, or prompts=FILE")
    if asked.stream and (asked.prompt is None or asked.num_beams > 1 or asked.num_return_sequences > 1):
        refuse(COMMAND_LINE, "stream", "true with several texts", "one PROMPT, one beam, one sequence")
    if asked.out is not None and Path(asked.out).suffix != ".jsonl":
        refuse(COMMAND_LINE, "out", asked.out, "a name that ends in .jsonl, the format that is written")
    check_model(asked.model)


def answered(asked: Generation, given: list[str], out: TextIO | None) -> Answer:
    """The texts; `given` are the options of the command line, `out` takes each text as soon as it is there."""
    from ..data.record import Record

    key = asked.prompt_key
    records = [Record({key: asked.prompt}, COMMAND_LINE, 1)] if asked.prompt is not None else read_prompts(str(asked.prompts), key)
    talks = [messages_of(record, key, asked.chat) for record in records]
    from ..checkpoint.hub import resolve
    from ..create import load
    from ..data.chat import Template
    from ..data.tokenizer_open import load_tokenizer
    from ..generate.run import beside
    from ..registry import hubs
    from ..train.write import Spoken, write

    folder = resolve(asked.model, presets=hubs())
    tokenizer, model = load_tokenizer(folder), load(folder, dtype=asked.dtype, device=asked.place())
    if not model.can_generate():
        wanted = "one that predicts the next token; modelcenter evaluate judges others"
        refuse(asked.model, "generate", f"a model with the task {model.task!r}", wanted)
    options = {key: getattr(asked, key) for key in given if key in {f.name for f in fields(Options)}}
    chats = any(talk is not None for talk in talks)
    if chats and tokenizer.chat_template is None:
        refuse(asked.model, "chat_template", "none, for messages to go through", "a model tuned on conversations, or texts")
    template = Template(tokenizer) if chats else None
    source = model.encoder_decoder
    prompts = [ids_of(tokenizer, template, record, key, talk, source) for record, talk in zip(records, talks, strict=True)]
    if asked.prompts is not None and (most := positions(model)) is not None:
        for record, ids in zip(records, prompts, strict=True):
            if len(ids) >= most:
                record.refuse(f"a prompt of {len(ids)} tokens", f"fewer than {most}, as many as the model has positions")
    if not {"max_new_tokens", "max_length"} & {*options, *beside(model)}:
        options["max_new_tokens"] = unasked(model, prompts)
    if asked.stream:
        start = [] if model.encoder_decoder or talks[0] is not None else prompts[0]
        options["streamer"] = Spoken(tokenizer, partial(print, end="", flush=True), start)
    rows, written = [], write(model, tokenizer, prompts, asked.batch, **options)
    for record, talk, prompt, texts in zip(records, talks, prompts, written, strict=True):
        begin = 0 if talk is None or model.encoder_decoder else len(prompt)
        said = talk if talk is not None else record.text(key, "prompt_key")
        new = [{"prompt": said, "text": tokenizer.decode(ids[begin:]), "ids": ids} for ids in texts]
        rows += new
        if out is not None:
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in new)
            out.flush()
    if out is not None:
        return Answer(f"{asked.out}: {len(rows)} texts", {"out": asked.out, "texts": len(rows)})
    if asked.stream:
        return Answer("", rows[0])
    return Answer("\n".join(str(row["text"]) for row in rows), rows[0] if asked.prompt is not None and len(rows) == 1 else rows)


def unasked(model: "Model", prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens are written where nobody says: 64, or as many as the longest prompt leaves of the model's positions."""
    most = positions(model)
    return 64 if most is None else max(1, min(64, most - max(map(len, prompts))))


def positions(model: "Model") -> int | None:
    """The tokens of a prompt and what follows it, where a table of the model limits them."""
    table = getattr(getattr(model, "embed", None), "positions", None)
    return None if table is None or model.encoder_decoder else len(table.weight)


def read_prompts(file: str, key: str) -> "list[Record]":
    """The prompts of a file: its records, or the lines of a text that are not empty, under `key`."""
    from ..data.formats import Texts
    from ..data.read import format_of, read_records

    place = Path(os.path.expanduser(file))
    if format_of(place) != "text" or not os.path.exists(place) or place.is_dir():  # or a glob, or datasets:NAME
        return list(read_records(file, key="prompts"))
    return list(Texts(place, key)) or refuse(file, None, "no prompt", "a prompt a line")


def messages_of(record: "Record", key: str, chat: bool) -> list[dict[str, Any]] | None:
    """The conversation that a record asks to go on with; None of a text that is no part of one."""
    from ..data.objectives.chat import KEYS, conversation

    if isinstance(record.fields.get(key), list):
        return conversation(record, DataConfig(messages_key=key))
    if key not in record.fields and any(name in record.fields for name in KEYS):
        return conversation(record, DataConfig())
    text = record.text(key, "prompt_key")
    return [{"role": "user", "content": text}] if chat else None


def ids_of(tokenizer: "Tokenizer", template: "Template | None", record: "Record", key: str, talk: list[dict[str, Any]] | None,
           source: bool = False) -> list[int]:
    """The ids of a prompt, which is gone on with or, a `source`, read by an encoder; those of a conversation as by transformers'
    apply_chat_template, whose template writes all special tokens itself."""
    if template is None or talk is None:
        text = record.text(key, "prompt_key")
        ids = tokenizer.encode(text) if source else tokenizer.begin(text)
        if not ids:
            record.refuse(f"{key} has no token", "a text to go on with")
        return ids
    from ..data.objectives.chat import tools_of

    return tokenizer.encode(template.prompt(record, talk, tools_of(record)), special=False)
