"""Tests import the flat files of the root. One thread: tiny models are faster so, and sums come in
one order."""
import os
import sys
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
torch.set_num_threads(1)


class Watch(TorchDispatchMode):
    """Counts the matrix products made inside it, and `peak`, the most bytes that tensors took at
    once, those not counted that were `given`."""

    def __init__(self, *given):
        super().__init__()
        self.products = self.live = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += "mm" in func.__name__
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.live += size
            weakref.finalize(storage, self.forget, key, size)

    def forget(self, key, size):
        self.known.remove(key)
        self.live -= size
