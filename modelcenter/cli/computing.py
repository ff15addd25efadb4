"""Where `generate` and `evaluate --lm-eval` compute, and how much at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..config import says
from ..errors import refuse


@dataclass(frozen=True, kw_only=True)
class Computing:
    """The keys that both take."""

    batch: int = field(default=8, metadata=says("rows per forward", min=1))
    dtype: str = field(default="auto", metadata=says("fp32, bf16, fp16; auto: as stored"))
    device: str = field(default="auto", metadata=says("cpu, cuda ...; auto: the accelerator that torch finds, or the CPU", min=1))

    def place(self) -> str:
        """The device of the weights: the one that `train` would choose where none is named."""
        from ..parallel.device import device_of
        from ..parallel.machine import Machine

        return str(device_of(Machine())) if self.device == "auto" else self.device

    @contextmanager
    def room(self) -> Iterator[None]:
        """Memory that runs out within is one line, which names what to change."""
        try:
            yield
        except (MemoryError, OSError, RuntimeError) as error:
            from ..train.memory import ran_out

            if not ran_out(error):
                raise
            ways = [f"batch={self.batch // 2}"] if self.batch > 1 else []
            ways += [] if self.dtype in ("bf16", "fp16") else ["dtype=bf16"]
            ways += [] if self.place() == "cpu" else ["device=cpu"]
            key = ways[0].partition("=")[0] if ways else "device"
            refuse(None, key, f"{getattr(self, key)}: out of memory", " or ".join(ways) or "a smaller model, or more memory")
