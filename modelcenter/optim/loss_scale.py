"""Dynamic loss scaling: a factor on the loss that keeps gradients within fp16's range, adjusted during training.

Micikevicius et al., 2017, "Mixed Precision Training", section 3.2, with torch.amp.GradScaler's numbers: gradients are computed from
a loss that is `value` times too large. If one of them is not finite, there is no update and the factor is halved; after `EVERY`
updates in a row it is doubled.
"""

import math
from dataclasses import dataclass

FIRST, EVERY = 2.0**16, 2000


@dataclass
class LossScale:
    """The factor, a power of 2 (1: none), and the updates since it last changed."""

    value: float = 1.0
    steady: int = 0

    def judge(self, loss: float, norm: float) -> bool:
        """Adjust the factor to the `norm` of a step's gradients. True if it is not finite because the factor, which is smaller now,
        was too large: the loss was finite, and the factor could be made smaller."""
        if math.isfinite(norm):
            self.steady += 1
            if self.steady == EVERY:
                self.value, self.steady = 2 * self.value, 0
            return False
        fault = math.isfinite(loss) and self.value > 1
        self.value, self.steady = self.value / 2, 0
        return fault
