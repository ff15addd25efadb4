"""The public names, for type checkers; written by tests/stub.py."""

from .adapter.attach import add_adapter as add_adapter
from .adapter.attach import merge_adapter as merge_adapter
from .adapter.config import AdapterConfig as AdapterConfig
from .create import build as build
from .create import load as load
from .data.tokenizer_open import load_tokenizer as load_tokenizer
from .errors import InputError as InputError
from .layers import Cache as Cache
from .layers import Output as Output
from .model import Model as Model
from .models.bert import BERT as BERT
from .models.bloom import BLOOM as BLOOM
from .models.cpm import CPM as CPM
from .models.cpm_ant import CPMAnt as CPMAnt
from .models.gpt import GPT as GPT
from .models.llama import LLaMA as LLaMA
from .models.llama import Llama as Llama
from .models.mt5 import MT5 as MT5
from .models.t5 import T5 as T5
from .optim.norm import clip_grad_norm_ as clip_grad_norm_
from .parallel.apply import parallelize as parallelize
from .parallel.machine import Machine as Machine
from .train.loop import train as train
from .train.recipe import Recipe as Recipe

PUBLIC: dict[str, str]
__version__: str
