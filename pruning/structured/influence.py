"""How much a model misses each of its blocks: what the block changes, measured on text."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from pruning.anatomy import Block
from pruning.errors import RunError
from pruning.placement import Stage
from pruning.replay import capture
from pruning.walk import Tick


class Miss:
    """Measures blocks of ``model`` on ``ids`` (windows, tokens) when some are removed."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block], ids: Tensor, stage: Stage) -> None:
        self._blocks = blocks
        self._stage = stage
        self._replay = capture(model, blocks, ids)
        stage.receive(self._replay)
        self._start = list(self._replay.hidden)

    def order(self, removed: Sequence[int], near: Sequence[int], tick: Tick) -> list[int]:
        """The blocks ``near``, the one of least influence first, in the model without ``removed``.

        The influence of a block is 1 - cos(h, h′), with h what it is given and h′ what it makes of it, averaged over
        tokens (Men et al. 2024, ShortGPT, arXiv 2403.03853, equation 1).
        """
        influence: dict[int, float] = {}
        self._replay.hidden = list(self._start)
        for index, block in enumerate(self._blocks):
            if index in removed:
                continue
            changed, tokens = 0.0, 0
            with self._stage.holding(block.module):
                for batch, before in enumerate(self._replay.hidden):
                    after = self._stage.run(self._replay, index, batch, block.module)
                    cosine = cosine_similarity(before.to(after.device).float(), after.float(), dim=-1)
                    changed += float((1 - cosine).sum())
                    tokens += cosine.numel()
                    self._stage.keep(self._replay, batch, after)
                    tick()
            influence[index] = changed / tokens
            if not torch.isfinite(torch.tensor(changed)):
                raise RunError(
                    f"what block {block.name} gives on the calibration text is not finite (NaN or infinity): the model "
                    "is damaged, or its numbers pass the range of its dtype; try --dtype float32"
                )
        return sorted(near, key=influence.__getitem__)
