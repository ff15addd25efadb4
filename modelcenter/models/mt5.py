"""mT5: T5 v1.1 over 101 languages and a vocabulary of 250 thousand; its head is never scaled. Xue et al., 2020."""

from dataclasses import dataclass, replace
from typing import ClassVar

from .. import ops
from ..model import Preset, Task, register
from ..ops import Op
from .t5 import T5, T5Config


@dataclass(frozen=True, kw_only=True)
class MT5Config(T5Config):
    vocab: int = 250112
    hidden: int = 1024
    heads: int = 6
    layers: int = 8
    act: Op = ops.geglu_tanh
    tie: bool = False
    scale: ClassVar[bool] = False  # type: ignore[misc]  # no choice here

    hf = replace(T5Config.hf, model_type="mt5", keys={k: v for k, v in T5Config.hf.keys.items() if k != "scale_decoder_outputs"})


@register
class MT5(T5):
    Config = MT5Config

    presets = {
        "mt5-small": Preset("google/mt5-small", 300_176_768),
        "mt5-base": Preset("google/mt5-base", 582_401_280, dict(dim=768, hidden=2048, heads=12, layers=12)),
        "mt5-large": Preset("google/mt5-large", 1_229_581_312, dict(dim=1024, hidden=2816, heads=16, layers=24)),
        "mt5-xl": Preset("google/mt5-xl", 3_742_619_648, dict(dim=2048, hidden=5120, heads=32, layers=24)),
        "mt5-xxl": Preset("google/mt5-xxl", 12_921_057_280, dict(dim=4096, hidden=10240, heads=64, layers=24)),
    }

    tasks = {
        "seq2seq": Task("MT5ForConditionalGeneration", T5.tasks["seq2seq"].head, T5.tasks["seq2seq"].rows),
        "backbone": Task("MT5Model"),
        "embed": Task("MT5EncoderModel", T5.tasks["embed"].head, without=T5.tasks["embed"].without),
    }
