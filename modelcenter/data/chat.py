"""Turns conversations into text, with the chat templates of tokenizer folders, and finds the part that the assistant wrote.

A template is a program that came with somebody's weights, so it runs in jinja2's immutable sandbox. It gets the same variables as
from transformers' apply_chat_template, so that a model is trained on the text with which it will later be prompted.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import InputError, refuse
from .record import Record

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

Message = Mapping[str, Any]
Spans = list[tuple[int, int]]  # of characters
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # stand around what the assistant wrote; Unicode keeps them for such uses, no text has them

NAMED = {  # name: the template, and the tokens without which nothing would end a turn
    "chatml": ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
               "{% if message['role'] == 'assistant' %}"
               "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
               "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
               "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}", ("<|im_start|>", "<|im_end|>")),
    "plain": ("{% for message in messages %}{{ message['role'] | capitalize + ':' }}"
              "{% if message['role'] == 'assistant' %}"
              "{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}"
              "{% else %}{{ ' ' + message['content'] }}{% endif %}{{ '\\n\\n' }}{% endfor %}"
              "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}", ()),
}  # fmt: skip


class Template:
    """A tokenizer's chat template, or one of `NAMED`, which then becomes the tokenizer's; `auto`: its own, or else `plain`. A named
    one begins with the beginning of text if the tokenizer puts one before every text, because the weights have never seen a text
    without it."""

    def __init__(self, tokenizer: "Tokenizer", name: str | None = None) -> None:
        if name == "auto":
            name = "plain" if tokenizer.chat_template is None else None
        if name is not None:
            source, needed = NAMED[name]
            lack = [token for token in needed if token not in tokenizer.vocabulary]
            if name == "plain" and tokenizer.id("eos") is None:
                lack = ["end of text"]
            if lack:
                found = f"{name} with a tokenizer that has no {lack[0]}"
                refuse(tokenizer.name, "data.chat_template", found, "another template, or a tokenizer that has it")
            tokenizer.chat_template = "{{ bos_token }}" * tokenizer.puts_bos + source
        if tokenizer.chat_template is None:
            wanted = f"data.chat_template={' or '.join(NAMED)}, or a chat_template in tokenizer_config.json"
            refuse(tokenizer.name, "objective", "chat with a tokenizer that has no chat template", wanted)
        self.name, self.own, source = tokenizer.name, "" if name is None else f"{name} ", tokenizer.chat_template
        self.marked = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        self.special = {f"{role}_token": token for role, token in tokenizer.special.items()}
        self.compiled = compiled(source, self.name)

    def text(self, record: Record, messages: Sequence[Message], tools: Any = None, prompt: bool = False) -> str:
        """The text of a conversation; as a `prompt`, it ends with what asks the assistant to continue."""
        if any(isinstance(message.get("content"), list) for message in messages) and not self.takes_lists:
            messages = [joined(message) for message in messages]
        return self.rendered(record, messages, tools, prompt)

    @cached_property
    def takes_lists(self) -> bool:
        """Whether the template writes a content that is a list of one text as it writes the text. Most know text alone: they fail,
        or write the list as Python shows it."""
        nowhere, texts = Record({}, self.name, None), [{"type": "text", "text": "question"}]
        try:
            one, other = (self.rendered(nowhere, [{"role": "user", "content": said}]) for said in ("question", texts))
        except InputError:
            return False
        return one == other

    def rendered(self, record: Record, messages: Sequence[Message], tools: Any = None, prompt: bool = False) -> str:
        """What the template makes of messages as they are."""
        from jinja2 import TemplateError

        given = {"messages": list(messages), "tools": tools, "documents": None, "add_generation_prompt": prompt}
        try:
            out: str = self.compiled.render(**self.special, **given)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as e:
            said = str(e).strip() or type(e).__name__
            record.refuse(f"the chat template {self.own}refuses it ({said})", "a conversation that it knows")
        return out

    def prompt(self, record: Record, messages: Sequence[Message], tools: Any = None) -> str:
        """The text that asks the assistant for the next turn of a conversation."""
        unmarkable(record, messages, tools)
        return unmarked(self.text(record, messages, tools, prompt=True))[0]

    def marked_texts(self, record: Record, messages: Sequence[Message], tools: Any = None) -> list[tuple[str, Spans]]:
        """The text of a conversation, and the ranges of it that the assistant wrote: the {% generation %} blocks, or, in a template
        without them, what each assistant turn adds to the conversation before it, when that asks the assistant to continue. A turn
        whose `weight` is 0 has no range.

        Some templates write a turn differently once others follow it: its thoughts are left out, or an end-of-text token follows
        only the last turn. For these there is one text for each assistant turn, up to this turn, in the form in which the model
        will be prompted.
        """
        unmarkable(record, messages, tools)
        text = self.text(record, messages, tools)
        if any(message.get("tool_calls") for message in messages) and not self.writes_calls(record, messages, tools, text):
            wanted = "one that does, or no messages with tool_calls"
            record.refuse(f"the chat template {self.own}leaves out tool_calls: an answer without them would be learned", wanted)
        weights = [message.get("weight") != 0 for message in messages if message.get("role") == "assistant"]
        if self.marked:
            plain, spans = unmarked(text)
            if len(spans) != len(weights) and not all(weights):
                found = f"the chat template of {self.name} marks {len(spans)} turns of {len(weights)}, some of them of weight 0"
                record.refuse(found, "a template that marks each turn of the assistant once")
            return [(plain, spans if all(weights) else list(compress(spans, weights)))]
        turns = []
        for k, message in enumerate(messages):
            if message.get("role") == "assistant" and message.get("weight") != 0:
                before = self.text(record, messages[:k], tools, prompt=True)
                after = self.text(record, messages[: k + 1], tools)
                if not after.startswith(before):
                    found = f"the chat template of {self.name} asks for turn {k + 1} in other words than it writes it"
                    record.refuse(found, "a template that marks the assistant's turns with {% generation %}")
                turns.append((after, [(len(before), len(after))]))
        if all(text.startswith(after) for after, _ in turns):
            return [(text, [span for _, spans in turns for span in spans])]
        return turns

    def writes_calls(self, record: Record, messages: Sequence[Message], tools: Any, text: str) -> bool:
        """Whether `text`, which is that of `messages`, says something of their calls."""
        without = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
        try:
            return self.text(record, without, tools) != text
        except InputError:  # of a message without words
            return True

    def tail(self) -> str:
        """What the assistant writes after its words; empty for a template that does not accept a plain question."""
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        try:
            text, spans = self.marked_texts(Record({}, self.name, None), turns)[-1]
        except InputError:
            return ""
        return text[slice(*spans[-1])].rpartition("answer")[2] if spans else ""


def joined(message: Message) -> Message:
    """A message with one text in place of a list of them: as transformers' server joins them for models that read text alone."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    known = [text for text in texts if isinstance(text, str)]
    return {**message, "content": " ".join(known)} if len(known) == len(parts) else message  # a tool's may be any list


def unmarkable(record: Record, *given: Any) -> None:
    """Refuse text that contains the marks themselves."""
    if {OPEN, CLOSE} & set(json.dumps(given, ensure_ascii=False, default=str)):
        record.refuse("a message holds U+FDD0 or U+FDD1", "text, which has no such characters")


def unmarked(text: str) -> tuple[str, Spans]:
    """`text` without its marks, and the ranges that stood between them."""
    plain, spans = "", []
    for k, part in enumerate(re.split(f"[{OPEN}{CLOSE}]", text)):
        if k % 2:
            spans.append((len(plain), len(plain) + len(part)))
        plain += part
    return plain, spans


def compiled(source: str, name: str) -> Any:
    """`source` in a sandbox, with the functions that transformers gives a template."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}"""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
               ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(said: str) -> NoReturn:
        raise TemplateError(said)

    class Names(Namespace):
        """jinja2's namespace, in which a template may store anything, except under names that Python itself looks up."""

        def __init__(*args: Any, **values: Any) -> None:
            checked(dict(*args[1:], **values))
            Namespace.__init__(*args, **values)

        def __setitem__(self, name: str, value: Any) -> None:
            checked({name: value})
            Namespace.__setitem__(self, name, value)

    def checked(values: Mapping[str, Any]) -> None:
        if odd := [name for name in values if str(name).startswith("_")]:
            raise SecurityError(f"a namespace holds {odd[0]!r}")

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson  # jinja2's own writes for HTML
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: datetime.now().strftime(form),
                            "namespace": Names}
    try:
        return environment.from_string(source)
    except TemplateError as e:
        refuse(name, "chat_template", f"not a template ({str(e).strip()})", "one that jinja2 can read")
