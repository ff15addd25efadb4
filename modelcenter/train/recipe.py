"""The definition of a training run: every key of a recipe, its type, default and bounds, and which keys go together.

A recipe determines the result; a `Machine` determines where it runs, and how fast. Torch-free, so that it is checked first.
"""

import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..adapter.config import AdapterConfig
from ..config import bind, checked, says
from ..data.config import DataConfig
from ..data.objective import COMMON, find_objective, objectives
from ..errors import refuse
from ..generate.options import Options
from ..metrics.table import check, of_texts
from ..optim.config import LossConfig, OptimizerConfig, ScheduleConfig, refuse_changed
from ..theirs import RECIPE, made_by_name

LARGE = ("lm", "mlm", "seq2seq")  # heads over the vocabulary
MOST = 2**20  # sequences of a step: its micro-batches are all made before the first is computed

if TYPE_CHECKING:
    Name: TypeAlias = str
    Task: TypeAlias = str
else:  # each file of data/objectives is one
    Name = Literal[tuple(objectives())]
    Task = Literal[("auto", *dict.fromkeys(objective.task for objective in objectives().values()))]


@made_by_name(RECIPE)
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run. Steps are optimizer steps; a length is in tokens; a batch in sequences.

    `modelcenter list keys` says what each key means. `mc.train` takes a Recipe, and `load_recipe` makes one from a name or a file.
    Errors: `InputError` for a value that does not fit its key, or keys that do not go together.
    """

    model: str = field(metadata=says("a folder, a preset or a hub id", min=1))
    config: dict[str, Any] = field(default_factory=dict, metadata=says("model fields to change: config.layers=2"))
    init: Literal["pretrained", "random"] = field(default="pretrained", metadata=says("the weights to start from"))
    objective: Name = field(default="lm", metadata=says("what the model learns to do"))
    task: Task = field(default="auto", metadata=says("the model's head; auto: the objective's"))
    tokenizer: str | None = field(
        default=None, metadata=says("a folder, preset, hub id, char, or bpe, roberta, span or fim:SIZE; null: the model's", min=1)
    )
    data: DataConfig = field(default_factory=DataConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    freeze: tuple[str, ...] = field(
        default=(), metadata=says("parameters not trained, by our names or Hugging Face's, * for any part")
    )
    ema: float | None = field(
        default=None, metadata=says("decay of an average of the weights, evaluated and written; null: none", above=0, below=1)
    )
    batch: int = field(default=8, metadata=says("sequences of one optimizer step, over all ranks", min=1))
    batch_tokens: int | None = field(
        default=None, metadata=says("instead of `batch`: as many sequences as fit into this many tokens, a longer one alone", min=1)
    )
    micro_batch: int | None = field(
        default=None, metadata=says("sequences of one forward, or unpadded as many tokens; null: derived", min=1)
    )
    precision: Literal["auto", "bf16", "fp16", "fp32"] = field(
        default="auto",
        metadata=says("of the computation; auto: bf16 where the device is fast at it, fp16 on older GPUs, else fp32"),
    )
    max_steps: int | None = field(default=None, metadata=says("stop after so many steps", min=1))
    num_epochs: float | None = field(
        default=None,
        metadata=says("stop after so many passes over the data, or after max_steps, whichever comes first", above=0, max=1e9),
    )
    max_grad_norm: float = field(default=1.0, metadata=says("clip the gradient's norm to this; 0: never", min=0))
    on_spike: Literal["report", "rollback", "off"] = field(
        default="report", metadata=says("on a spike of the loss: report it; return to a state and skip the data since; or nothing")
    )
    seed: int = field(default=0, metadata=says("of weights, dropout and the order of data", min=0, max=2**32 - 1))
    logging_steps: int = field(default=10, metadata=says("steps between two lines of progress", min=1))
    eval_steps: int | None = field(default=None, metadata=says("steps between evaluations; null: at the end", min=1))
    metrics: tuple[str, ...] = field(
        default=(),
        metadata=says("metrics that evaluations compute besides the objective's own: [f1, mcc], [bleu, chrf] ...", min=1),
    )
    generation: dict[str, Any] = field(
        default_factory=dict, metadata=says("how texts are generated for metrics: generation.num_beams=4")
    )
    best: str | None = field(
        default=None, metadata=says("save the model that is best by this metric in model/; null: that of the last step", min=1)
    )
    patience: int | None = field(
        default=None, metadata=says("stop after so many evaluations without a better `best` (or loss); null: never", min=1)
    )
    save_steps: int | None = field(
        default=None, metadata=says("steps between saved training states; null: one if stopped", min=1)
    )
    save_total_limit: int | None = field(default=None, metadata=says("training states kept, two at least; null: all", min=1))
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = field(
        default=(), metadata=says("services that get the metrics too; metrics.jsonl and loss.png are always written")
    )
    output_dir: str = field(metadata=says("the folder of the run", min=1))
    resume: str = field(
        default="auto", metadata=says("auto: from the newest state in output_dir; never; or the folder of a run or a state", min=1)
    )

    def __post_init__(self) -> None:
        checked(self)
        for key in ("output_dir", "resume"):  # a shell expands ~ on the command line, and nobody in a file
            object.__setattr__(self, key, os.path.expanduser(getattr(self, key)))
        for key in ("model", "tokenizer"):  # neither a preset nor a hub id begins so
            if os.path.expanduser(name := getattr(self, key) or "").startswith("~"):
                refuse(None, key, name, "a user who has a home, or ./~NAME")
        self.check_objective()
        self.check_data()
        self.check_run()
        self.check_training()

    def check_objective(self) -> None:
        """Refuse keys and metrics that the objective does not know."""
        objective = find_objective(self.objective)
        for setting in fields(self.data):
            value = getattr(self.data, setting.name)
            if setting.name not in (*COMMON, *objective.keys) and value != setting.default:
                readers = " or ".join(name for name, other in objectives().items() if setting.name in other.keys)
                found = f"{value!r} with objective {self.objective}, which does not read it"
                refuse(None, f"data.{setting.name}", found, f"leave it out; it is for {readers}")
        objective.verify(self.data)
        for name in self.metrics:
            check(name, self.objective, objective.of, "metrics")
        if self.best is not None:
            check(self.best, self.objective, objective.of, "best")
        bind(Options, self.generation, section="generation.")
        if self.generation and "texts" not in objective.of:
            name, value = next(iter(self.generation.items()))
            refuse(None, f"generation.{name}", f"{value} with objective {self.objective}, which writes no text", "leave it out")
        if not objective.packs and (self.data.packing or self.data.padding_free):
            key = "data.packing" if self.data.packing else "data.padding_free"
            refuse(None, key, f"true with objective {self.objective}", "false")
        if self.batch == 1 and self.batch_tokens is None:
            self.check_compared("batch")
        if not objective.classes and self.loss.label_smoothing:
            found = f"{self.loss.label_smoothing} with objective {self.objective}"
            refuse(None, "loss.label_smoothing", found, "0: values are no classes")

    def check_compared(self, key: str) -> None:
        """Refuse a `key` that leaves each example alone, if the loss compares it with others."""
        if find_objective(self.objective).together and self.data.negative_key is None:
            found = f"1 with objective {self.objective}: a pair alone has none to be told from"
            refuse(None, key, found, "2 or more, or data.negative_key")

    def check_data(self) -> None:
        """Refuse missing data, and an evaluation without data."""
        if self.data.path is None:
            refuse(None, "data.path", "missing", "give data.path=FILE")
        if (self.best or self.patience) and self.data.eval_path is None and not self.data.eval_fraction:
            key, value = ("best", self.best) if self.best else ("patience", self.patience)
            wanted = f"data.eval_path=FILE, a part of data.path (data.eval_fraction=0.1), or {key}=null"
            refuse(None, "data.eval_path", f"missing, and {key} {value} asks for an evaluation", wanted)
        if self.patience and self.eval_steps is None:
            refuse(None, "patience", f"{self.patience} without eval_steps", "give eval_steps: there is one evaluation, at the end")
        if self.task not in ("auto", self.head):
            refuse(None, "task", f"{self.task} with objective {self.objective}", "give one of the two")
        if self.data.group_by_length and isinstance(self.data.path, dict):
            refuse(None, "data.group_by_length", "true with a mixture", "a mixture has an order of its own: leave it out")

    def check_run(self) -> None:
        """Refuse a run without an end, a folder that cannot be its own, and batches that do not divide."""
        if self.max_steps is None and self.num_epochs is None:
            refuse(None, "max_steps", "missing, and so is num_epochs", "give one of them, or the training never ends")
        if not self.output_dir.isprintable():
            refuse(None, "output_dir", repr(self.output_dir), "a name without control characters")
        if os.path.dirname(folder := os.path.abspath(self.output_dir)) == folder:
            refuse(None, "output_dir", f"{self.output_dir}, the root of all files", "a folder for this run alone")
        if self.batch > MOST:
            refuse(None, "batch", str(self.batch), f"at most {MOST} sequences")
        if self.batch_tokens is not None and self.batch_tokens > MOST * self.data.seq_len:
            refuse(None, "batch_tokens", str(self.batch_tokens), f"at most {MOST} sequences of data.seq_len tokens")
        if self.batch_tokens is None and self.micro_batch is not None and self.batch % self.micro_batch:
            refuse(None, "batch", f"{self.batch} is no multiple of micro_batch {self.micro_batch}", "change one")

    def check_training(self) -> None:
        """Refuse settings of adapter, loss and schedule that do not go together."""
        if self.adapter.name != "none" and self.freeze:
            refuse(None, "freeze", f"with adapter.name {self.adapter.name}", "an adapter freezes all: modules_to_save are trained")
        if self.objective != "contrastive":
            refuse_changed(self.loss, ["scale", "symmetric"], f"with objective {self.objective}, which has none", "loss.")
        if self.loss.r_drop and self.objective != "classify":
            refuse(None, "loss.r_drop", f"{self.loss.r_drop} with objective {self.objective}", "0: it compares a text's classes")
        if self.loss.r_drop and (self.data.packing or self.data.padding_free):
            key = "data.packing" if self.data.packing else "data.padding_free"
            refuse(None, key, f"true with loss.r_drop {self.loss.r_drop}", "false, or loss.r_drop=0")
        if self.loss.z_loss and self.head not in LARGE:
            refuse(None, "loss.z_loss", f"{self.loss.z_loss} with objective {self.objective}", "it is for heads over a vocabulary")
        if self.schedule.decay_steps and self.max_steps:
            warmup = self.schedule.of(self.max_steps).warmup_steps
            if warmup + self.schedule.decay_steps > self.max_steps:
                found = f"{self.schedule.decay_steps} after {warmup} of warm-up, in {self.max_steps} steps"
                refuse(None, "schedule.decay_steps", found, "fewer, or more steps")
        if self.on_spike == "rollback" and self.save_steps is None:
            refuse(None, "on_spike", "rollback without save_steps", "give save_steps, or there is no state to go back to")
        if self.adapter.name != "none" and self.init == "random":
            refuse(None, "adapter.name", f"{self.adapter.name} with init random", "an adapter needs pretrained weights")
        for key, value in self.config.items() if self.adapter.name != "none" else ():
            if not key.endswith("dropout"):  # which counts in training alone; an adapter's folder names its base, and no more of it
                found = f"{value!r} with adapter.name {self.adapter.name}"
                refuse(None, f"config.{key}", found, "leave it out: who loads the adapter has the base as it is")

    @property
    def writes(self) -> bool:
        """Whether an evaluation has texts written, because a metric reads them."""
        return bool(of_texts((*self.metrics, *filter(None, [self.best])), find_objective(self.objective).of))

    @property
    def head(self) -> str:
        """The task whose head the objective trains."""
        return find_objective(self.objective).task
