"""A model for lm-eval, EleutherAI's evaluation harness (`pip install modelcenter[lm-eval]`); imported only when asked for.

It answers like lm-eval's own `hf` model with the same weights: the log probability of a continuation and whether greedy decoding
produces it, the log probability of a whole text in windows, and texts generated up to the first of some strings.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from ..checkpoint.hub import resolve
from ..create import load
from ..data.table import first_line
from ..data.tokenizer_open import load_tokenizer
from ..errors import nearest, refuse
from ..registry import hubs
from .write import Spelled, padded

POSITIONS = 2048  # tokens at most of a model whose positions have no end, as lm-eval has it
WRITTEN = 256  # tokens that are written where a task does not say, as lm-eval has it

T = TypeVar("T")
Request = tuple[tuple[str, str] | None, list[int], list[int]]  # the texts, ids of the context, ids of what follows it


@register_model("modelcenter")
class Harness(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """`pretrained`: a folder, a preset or a hub id of a causal LM or an encoder-decoder; `batch_size`: rows of a forward."""

    def __init__(self, pretrained: str, batch_size: int | str = 8, device: str | None = None, dtype: str = "auto") -> None:
        super().__init__()
        folder = resolve(pretrained, presets=hubs())
        self.name, self.words, self.model = pretrained, load_tokenizer(folder), load(folder, dtype=dtype, device=device).eval()
        self.backend = "seq2seq" if self.model.encoder_decoder else "causal"
        self.rows, self._device = int(batch_size), next(self.model.parameters()).device
        self.max_length = int(getattr(self.model.config, "positions", None) or POSITIONS)
        if self.words.eos_id is None:
            refuse(folder, "tokenizer", "no end of text", "a tokenizer with one")
        if self.backend == "causal" and self.sees_ahead():
            refuse(folder, "model", "its tokens see what follows them", "a causal model or an encoder-decoder")

    @torch.no_grad()
    def sees_ahead(self) -> bool:
        """Whether the scores of a token depend on the next one."""
        ids = torch.tensor([[1, 2], [1, 3]], device=self.device)
        first = self.model(ids).logits[:, 0].float()
        return not torch.allclose(first[0], first[1], rtol=1e-3, atol=1e-3 * float(first.abs().max()))

    @property
    def eot_token_id(self) -> int:
        return int(self.words.eos_id or 0)

    @property
    def prefix_token_id(self) -> int:
        """The id that precedes a text without a context."""
        return self.eot_token_id if self.words.bos_id is None else int(self.words.bos_id)

    @property
    def tokenizer_name(self) -> str:
        return self.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text, in the tokenizer's template unless the text already starts with its beginning."""
        begins = self.words.bos_id is not None and string.startswith(self.words.decode([self.words.bos_id], special=True))
        return self.words.encode(string, special=not begins if add_special_tokens is None else add_special_tokens)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: Sequence[Request], disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        """For each request the log probability of the continuation, and whether greedy decoding produces it."""
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        for some in groups(order, self.rows):
            scores = self.scores([requests[i] for i in some])
            for i, row in zip(some, scores, strict=True):
                wanted = torch.tensor(requests[i][2], device=row.device)
                said = row.log_softmax(-1).gather(1, wanted[:, None]).sum()
                answers[i] = (float(said), bool((row.argmax(-1) == wanted).all()))
        return answers

    def scores(self, requests: Sequence[Request]) -> Iterator[Tensor]:
        """The scores (t v), fp32, of what may stand at each of the t places that follow a request's context."""
        if self.backend == "seq2seq":
            start = self.model.config.to_dict()["decoder_start_token_id"]
            ids, mask = self.padded([context[-self.max_length :] for _, context, _ in requests])
            before, _ = self.padded([[start, *follows[:-1]] for *_, follows in requests])
            out = self.model(ids, attention_mask=mask, decoder_input_ids=before).logits
            return (row[: len(follows)].float() for row, (*_, follows) in zip(out, requests, strict=True))
        rows = [(context + follows)[-self.max_length - 1 : -1] for _, context, follows in requests]
        out = self.model(*self.padded(rows)).logits
        ends = [(len(ids) - len(follows), len(ids)) for ids, (*_, follows) in zip(rows, requests, strict=True)]
        return (row[begin:end].float() for row, (begin, end) in zip(out, ends, strict=True))

    def padded(self, rows: Sequence[list[int]], left: bool = False) -> tuple[Tensor, Tensor]:
        return padded(rows, self.words.pad_id or 0, self.device, left)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log probability of each text: every token once, in windows that the model can hold."""
        windows: list[Request] = []
        of: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(pair)))
                of.append(number)
        totals = [0.0] * len(requests)
        for number, (said, _) in zip(of, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += said
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to the first of the strings that end it."""
        texts = [""] * len(requests)
        kinds: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            kinds.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        for numbers in kinds.values():
            options = normalize_gen_kwargs(requests[numbers[0]].args[1], WRITTEN)
            stops = handle_stop_sequences(options.pop("until", None), eos=self.words.decode([self.eot_token_id], special=True))
            new, heat = options.pop("max_gen_toks"), options.pop("temperature", 0.0)
            room = self.max_length if self.backend == "seq2seq" else self.max_length - new
            if room < 1:
                refuse(None, "max_gen_toks", f"{new} tokens to write, of {self.max_length} positions", "fewer")
            for some in groups(numbers, self.rows):
                rows = [self.tok_encode(requests[i].args[0])[-room:] for i in some]
                ids, mask = self.padded(rows, left=True)
                out = self.model.generate(
                    ids, mask, max_new_tokens=new, stop_strings=[stop for stop in stops if stop], tokenizer=Spelled(self.words),
                    **{"temperature": heat, **options} if heat else options,
                )
                begin = 1 if self.backend == "seq2seq" else ids.size(1)
                for i, row in zip(some, out.tolist(), strict=True):
                    texts[i] = str(postprocess_generated_text(self.words.decode(row[begin:]), stops, None))
        return texts


def groups(numbers: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (numbers[i : i + size] for i in range(0, len(numbers), size))


def examine(model: str, tasks: Sequence[str], folder: str | None = None, few_shot: int | None = None, limit: int | None = None,
            batch: int = 8, device: str | None = None, dtype: str = "auto") -> dict[str, dict[str, float]]:
    """The metrics of each task of lm-eval, or of the files in `folder`. `limit`: how many examples of each."""
    manager = TaskManager(include_path=folder, include_defaults=folder is None)  # to read all of lm-eval's own takes half a minute
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        refuse(None, "lm_eval", unknown[0], nearest(unknown[0], manager.all_tasks)[:150])
    try:
        found = simple_evaluate(Harness(model, batch, device, dtype), tasks=list(tasks), num_fewshot=few_shot, limit=limit,
                                task_manager=manager, bootstrap_iters=0)["results"]
    except OSError as error:  # a data set that cannot be fetched
        refuse(None, "lm_eval", f"{', '.join(tasks)}: {first_line(error)}", "a network, or the data in the hub's cache")
    named = {task: {key.removesuffix(",none"): value for key, value in row.items()} for task, row in found.items()}
    return {task: {key: value for key, value in row.items() if isinstance(value, float)} for task, row in named.items()}
