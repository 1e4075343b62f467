"""Decode steps on CUDA: compiled, then recorded as graphs, so that a step costs one launch."""

from collections.abc import Callable

import torch
from torch import Tensor

from quatrain.model.device import can_compile

BUCKET = 256  # positions: a graph for each started bucket, so that short sequences do not read a long cache
WARM_UP = 3  # steps before recording: kernels are compiled and workspaces allocated in them

Step = Callable[[Tensor, Tensor, int], Tensor]  # ids and lengths (slots,), extent, to logits (slots, V)


class Graphs:
    """The step over all slots; rows of length -1 take no part."""

    def __init__(self, step: Step, slots: int, block_size: int, device: torch.device) -> None:
        self.step: Step = torch.compile(step, dynamic=False) if can_compile(device) else step
        self.block_size = block_size
        self.inputs = torch.full((2, slots), -1, dtype=torch.int64, device=device)
        self.recorded: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, tokens: list[int], lengths: list[int]) -> Tensor:
        """Logits (slots, V)."""
        self.inputs.copy_(torch.tensor([tokens, lengths]))
        extent = min(self.block_size, (max(lengths) // BUCKET + 1) * BUCKET)
        if self.inputs.device.type != "cuda":
            return self.step(self.inputs[0], self.inputs[1], extent)
        if extent not in self.recorded:
            self.recorded[extent] = self._record(extent)
        graph, logits = self.recorded[extent]
        graph.replay()
        return logits.clone()

    def _record(self, extent: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        # A step writes the same keys again when it is repeated, so warming up changes nothing.
        with torch.cuda.device(self.inputs.device):
            beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types here
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(WARM_UP):
                    self.step(self.inputs[0], self.inputs[1], extent)
            torch.cuda.current_stream().wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self.step(self.inputs[0], self.inputs[1], extent)
        return graph, logits
