"""Saved activations that lie in host memory from a forward to its backward.

Storages are emptied and filled again in place (as those of gathered weights are), so autograd's tensors stay what they
are. Which ones may go: those that the forward saved, its input among them, but not its output, which the next block
or another stage reads, and nothing that others share: weights, buffers, tables, the batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mixfleet.run.recorder import Recorder

Storages = dict[int, torch.UntypedStorage]


class Parked:
    """What one block saved of one micro-batch."""

    def __init__(self, storages: Storages, recorder: Recorder, device: torch.device) -> None:
        self._storages = [s for s in storages.values() if s.nbytes()]
        self._keys = list(storages)
        self._homes: list[Tensor] = []
        self._recorder, self._device = recorder, device
        self.nbytes = sum(s.nbytes() for s in self._storages)

    def save(self) -> Iterator[tuple[()]]:
        """Move it to the host, as a transfer."""
        yield ()
        cuda = self._device.type == "cuda"
        for storage in self._storages:
            here = _bytes(storage, self._device)
            home = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=cuda)
            home.copy_(here, non_blocking=True)
            if cuda:  # the memory is not given to others before the copy has been made
                here.record_stream(torch.cuda.current_stream())
            self._homes.append(home)
            storage.resize_(0)
        self._recorder.moved(self._keys, here=False)

    def load(self) -> Iterator[tuple[()]]:
        """Bring it back, as a transfer."""
        yield ()
        for storage, home in zip(self._storages, self._homes):
            storage.resize_(home.numel())
            here = _bytes(storage, self._device)
            here.copy_(home, non_blocking=True)
        self._homes.clear()
        self._recorder.moved(self._keys, here=True)


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def constants(module: nn.Module) -> set[int]:
    """Storages that a module keeps for itself: parameters, buffers, and tensors among its attributes."""
    found = {*module.parameters(), *module.buffers()}
    for part in module.modules():
        found.update(v for v in vars(part).values() if isinstance(v, Tensor))
    return {t.untyped_storage()._cdata for t in found}
